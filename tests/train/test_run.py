"""Whole runs on digits: stopped and resumed, with full disks, bad images and other configurations."""

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.checkpoints import native
from vitkit.checkpoints.native import read_tensors
from vitkit.core import runlog
from vitkit.core.errors import ConfigError, DataError, TrainingError
from vitkit.core.stopping import Stop
from vitkit.data.source import Content
from vitkit.data.sources.base import ArraySource
from vitkit.train import state as state_module
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.run import Result, rhythm, run
from vitkit.train.update import Trainer, Update
from vitkit.train.watch import Pulse, Watcher

CONFIG = RunConfig(
    model=ModelChoice(
        name="Ti/16",
        image_size=8,
        patch_size=4,
        settings=("width=16", "depth=2", "heads=2", "mlp_dim=32", "dropout.dense=0.1"),
    ),
    data=DataConfig(path="digits", channels=1, workers=0),
    optimizer=OptimizerConfig(average=0.9, weight_decay=0.1),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=20, warmup_steps=3, lr=3e-3),
    keep=KeepConfig(log_every=1, evaluate_every=5, save_every=5),
)


class Ears(Watcher):
    """Remembers what was said, and asks to stop after a step: the next one is then the last."""

    def __init__(self, *, at: int | None = None) -> None:
        self.at, self.stop = at, Stop()
        self.warnings: list[str] = []
        self.said: list[str] = []
        self.saved_steps: list[int] = []

    def pulse(self, pulse: Pulse) -> None:
        if pulse.step == self.at:
            self.stop.signal = "SIGTERM"

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def say(self, message: str) -> None:
        self.said.append(message)

    def saved(self, step: int) -> None:
        self.saved_steps.append(step)


def carry_out(config: RunConfig, out: Path, *, at: int | None = None) -> tuple[Result, Ears]:
    ears = Ears(at=at)
    return run(config, out, watcher=ears, stop=ears.stop), ears


def files_of(out: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(out)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in out.rglob("*")
        if path.is_file()
    }


def result_of(out: Path) -> dict[str, str]:
    """The SHA-256 of all that must be the same however the run went."""
    last = "checkpoints/step-00000020/state.safetensors"
    return {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "metrics.jsonl", last, "labels.json", "config.json")
    }


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The run that nothing disturbed."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("straight") / "run"
    run(CONFIG, out)
    return out


@pytest.mark.parametrize(("asked", "saved"), [(1, 2), (6, 7), (10, 10), (20, 20)])
def test_a_run_that_is_stopped_and_resumed_ends_the_same_bit_for_bit(tmp_path, straight, asked, saved) -> None:
    stopped, ears = carry_out(CONFIG, tmp_path / "run", at=asked)  # at 10 and 20 it is asked before it evaluates
    assert stopped.summary is None
    assert ears.saved_steps[-1] == saved
    finished, ears = carry_out(CONFIG, tmp_path / "run")
    assert finished.summary is not None
    assert f"going on from step {saved}" in ears.said
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_run_stopped_before_its_first_step_goes_on(tmp_path, straight) -> None:
    assert run(CONFIG, tmp_path / "run", stop=Stop("SIGINT")).summary is None
    run(CONFIG, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_run_stopped_while_it_evaluates_goes_on_with_the_evaluation(tmp_path, straight, monkeypatch) -> None:
    asked = Stop()

    real = Trainer.update

    def update(self: Trainer, *arguments: object, **named: object) -> Update:
        made = real(self, *arguments, **named)
        if self.state.progress.step == 10:
            asked.signal = "SIGTERM"  # after the step's own look at the flag: the next to look is the evaluation
        return made

    monkeypatch.setattr(Trainer, "update", update)
    assert run(CONFIG, tmp_path / "run", stop=asked).summary is None
    monkeypatch.undo()
    logged = runlog.read(tmp_path / "run" / "metrics.jsonl")
    assert logged[-1]["step"] == 10
    assert "val_top1" not in logged[-1]
    run(CONFIG, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_killed_run_repeats_what_was_not_saved(tmp_path, straight) -> None:
    class Killed(Watcher):
        def pulse(self, pulse: Pulse) -> None:
            if pulse.step == 13:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path / "run", watcher=Killed())
    (tmp_path / "run" / "checkpoints" / ".step-00000015.9.tmp").mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 13, "lo')
    run(CONFIG, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_damaged_checkpoint_is_named_and_the_run_ends_the_same(tmp_path, straight) -> None:
    carry_out(CONFIG, tmp_path / "run", at=11)
    damaged = tmp_path / "run" / "checkpoints" / "step-00000012" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    _, ears = carry_out(CONFIG, tmp_path / "run")
    assert str(damaged) in ears.warnings[0]
    assert "going on from step 10" in ears.said
    assert result_of(tmp_path / "run") == result_of(straight)


def test_workers_and_what_else_the_machine_does_change_no_bit(tmp_path, straight) -> None:
    other = replace(
        CONFIG,
        data=replace(CONFIG.data, workers=2),
        keep=replace(CONFIG.keep, save_every=3, last=1, best=False),
        parallel=ParallelConfig(activation_checkpointing=True),
    )
    carry_out(other, tmp_path / "run", at=9)
    run(other, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_finished_run_says_so_and_changes_nothing(straight) -> None:
    before = files_of(straight)
    again = run(CONFIG, straight)
    assert again.was_finished
    assert again.summary == json.loads((straight / "summary.json").read_bytes())
    assert files_of(straight) == before


def test_a_folder_keeps_the_last_checkpoints_and_the_best(straight) -> None:
    records = [record for record in runlog.read(straight / "metrics.jsonl") if "val_top1" in record]
    best = max(records, key=lambda record: (record["val_top1"], -record["step"]))["step"]
    kept = {int(path.name.removeprefix("step-")) for path in (straight / "checkpoints").iterdir()}
    assert kept == {best, 15, 20}


def test_the_best_is_kept_even_where_no_save_is_due(tmp_path) -> None:
    config = replace(CONFIG, keep=replace(CONFIG.keep, save_every=20, last=1))
    run(config, tmp_path / "run")
    records = [record for record in runlog.read(tmp_path / "run" / "metrics.jsonl") if "val_top1" in record]
    best = max(records, key=lambda record: (record["val_top1"], -record["step"]))["step"]
    kept = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 20}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_while_saving_is_a_warning_and_the_run_goes_on(tmp_path, straight, monkeypatch) -> None:
    real: Callable[..., None] = state_module.commit_folder

    def sometimes(path: Path, fill: Callable[[Path], None]) -> None:
        if path.name == "step-00000010":
            full_disk()
        real(path, fill)

    monkeypatch.setattr(state_module, "commit_folder", sometimes)
    _, ears = carry_out(CONFIG, tmp_path / "run", at=11)
    assert ["step 10" in warning and "No space" in warning for warning in ears.warnings] == [True]
    assert {5, 12} <= set(ears.saved_steps)
    run(CONFIG, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_a_save_that_must_be_and_fails_is_an_error_and_leaves_the_one_before(tmp_path, straight, monkeypatch) -> None:
    real: Callable[..., None] = state_module.commit_folder

    def sometimes(path: Path, fill: Callable[[Path], None]) -> None:
        if path.name == "step-00000007":
            full_disk()
        real(path, fill)

    monkeypatch.setattr(state_module, "commit_folder", sometimes)
    with pytest.raises(TrainingError, match="step 7 could not be saved") as caught:
        carry_out(CONFIG, tmp_path / "run", at=6)
    assert "make room" in str(caught.value.hint)
    monkeypatch.undo()
    run(CONFIG, tmp_path / "run")
    assert result_of(tmp_path / "run") == result_of(straight)


def test_another_configuration_in_the_same_folder_is_refused_by_key(straight) -> None:
    before = files_of(straight)
    with pytest.raises(ConfigError, match=r"schedule\.lr"):
        run(replace(CONFIG, schedule=replace(CONFIG.schedule, lr=0.5)), straight)
    assert files_of(straight) == before


def test_many_updates_that_are_not_finite_stop_the_run_with_good_weights_saved(tmp_path, monkeypatch) -> None:
    real = Trainer.prepare

    def prepare(self: Trainer, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = real(self, *arguments)
        return images * (float("nan") if self.state.progress.step >= 6 else 1.0), targets

    monkeypatch.setattr(Trainer, "prepare", prepare)
    config = replace(CONFIG, keep=replace(CONFIG.keep, max_skipped=3))
    with pytest.raises(TrainingError, match="3 updates in a row"):
        run(config, tmp_path / "run")
    monkeypatch.undo()
    saved = tmp_path / "run" / "checkpoints" / "step-00000009"
    tensors = read_tensors(saved / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert json.loads((saved / "state.json").read_bytes()) == {"step": 9, "skipped": 3, "skipped_in_a_row": 3}
    assert run(config, tmp_path / "run").summary is not None


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch) -> None:
    real = Trainer.apply

    def apply(self: Trainer, rate: float) -> None:
        real(self, rate)
        if self.state.progress.step == 7:
            next(iter(self.state.parameters.values())).data.fill_(float("inf"))

    monkeypatch.setattr(Trainer, "apply", apply)
    with pytest.raises(TrainingError, match="not finite"):
        run(CONFIG, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


def class_folders(place: Path, *, broken: bool, without: bool = False) -> Path:
    """Two classes of twenty digits; every tenth file is broken, or is not there."""
    random = np.random.default_rng(0)
    for label in range(2):
        folder = place / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
            bad = number % 10 == 4
            if bad and without:
                continue
            path = folder / f"{number:02d}.png"
            Image.fromarray(pixels).save(path)
            if bad and broken:
                path.write_bytes(path.read_bytes()[: 20 if label else 0])
    return place


def test_bad_images_are_left_out_as_if_they_had_never_been_there(tmp_path) -> None:
    broken = class_folders(tmp_path / "a" / "set", broken=True)
    clean = class_folders(tmp_path / "b" / "set", broken=False, without=True)
    for name, place in (("broken", broken), ("clean", clean)):
        config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
        _, ears = carry_out(config, tmp_path / name)
        assert bool(ears.warnings) == (name == "broken")
    listed = (tmp_path / "broken" / "bad_files.csv").read_text(encoding="utf-8")
    assert [line.partition(",")[0] for line in listed.splitlines()[1:]] == [
        f"class{label}/{number}.png" for label in range(2) for number in ("04", "14")
    ]
    assert result_of(tmp_path / "broken") == result_of(tmp_path / "clean")


def test_other_images_than_those_the_run_began_with_are_refused(tmp_path) -> None:
    place = class_folders(tmp_path / "set", broken=False)
    config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
    carry_out(config, tmp_path / "run", at=3)
    (place / "class0" / "03.png").rename(place / "class0" / "03b.png")
    with pytest.raises(DataError, match="not those that the run began with"):
        run(config, tmp_path / "run")
    (place / "class0" / "03b.png").rename(place / "class0" / "03.png")
    assert run(config, tmp_path / "run").summary is not None


def test_a_finished_run_can_be_fine_tuned_at_another_size_with_other_classes(tmp_path, straight) -> None:
    place = class_folders(tmp_path / "set", broken=False)
    config = replace(
        CONFIG,
        model=ModelChoice(weights=str(straight), image_size=12),
        data=replace(CONFIG.data, path=str(place)),
        optimizer=OptimizerConfig(tune="lora", lora_rank=2, layer_decay=0.8),
    )
    _, ears = carry_out(config, tmp_path / "tuned")
    assert any("2×2 → 3×3" in line for line in ears.said)
    old, new = native.load(straight), native.load(tmp_path / "tuned")
    assert new.labels == ("class0", "class1")
    assert new.state.keys() == old.state.keys()
    assert torch.equal(new.state["blocks.0.mlp.fc1.weight"], old.state["blocks.0.mlp.fc1.weight"])
    assert new.model()(torch.rand(1, 1, 12, 12)).shape == (1, 2)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (ScheduleConfig(batch_size=10, epochs=2.0), 20),
        (ScheduleConfig(batch_size=30, epochs=1.0), 4),
        (ScheduleConfig(batch_size=400, epochs=0.1), 1),
        (ScheduleConfig(batch_size=10, epochs=None, steps=7), 7),
    ],
)
def test_epochs_become_steps(schedule, steps) -> None:
    assert rhythm(RunConfig(schedule=schedule), images=100).steps == steps


def test_an_image_that_goes_bad_after_the_check_stops_the_run_by_name(tmp_path, monkeypatch) -> None:
    real = ArraySource.content

    def content(self: ArraySource, index: int) -> Content:
        if index % 7 == 0:
            raise OSError(5, "Input/output error")
        return real(self, index)

    monkeypatch.setattr(ArraySource, "content", content)
    with pytest.raises(DataError, match=r"digits/\d+ cannot be read"):
        run(CONFIG, tmp_path / "run")
