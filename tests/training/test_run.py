"""Complete runs on digits: stop and resume, full disks, bad images, changed settings."""

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

from vitkit.core import metrics_log
from vitkit.core.errors import ConfigError, DataError, TrainingError
from vitkit.core.signals import StopFlag
from vitkit.data.dataset import StoredImage
from vitkit.data.layouts.base import ArraySource
from vitkit.training import checkpoint as state_module
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.run import RunResult, plan_intervals, run_training
from vitkit.training.trainer import StepOutput, Trainer
from vitkit.weights import artifact as artifact_io
from vitkit.weights.artifact import read_tensors

CONFIG = RunConfig(
    model=ModelChoice(
        name="Ti/16",
        image_size=8,
        patch_size=4,
        settings=("width=16", "depth=2", "heads=2", "mlp_dim=32", "dropout.dense=0.1"),
    ),
    data=DataConfig(path="digits", channels=1, workers=0),
    optimizer=OptimizerConfig(ema_decay=0.9, weight_decay=0.1),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=20, warmup_steps=3, lr=3e-3),
    evaluation=EvaluationConfig(every=5),
    checkpoint=CheckpointConfig(save_every=5),
    logging=LoggingConfig(log_every=1),
)


class Recorder(Callback):
    """Records messages, and requests a stop after a step: the next one is then the last."""

    def __init__(self, *, at: int | None = None) -> None:
        self.at, self.stop = at, StopFlag()
        self.warnings: list[str] = []
        self.messages: list[str] = []
        self.saved_steps: list[int] = []

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.at:
            self.stop.signal = "SIGTERM"

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_save(self, step: int, path: Path) -> None:
        self.saved_steps.append(step)


def record_run(config: RunConfig, out: Path, *, at: int | None = None) -> tuple[RunResult, Recorder]:
    recorder = Recorder(at=at)
    return run_training(config, out, callback=recorder, stop=recorder.stop), recorder


def hash_files(out: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(out)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in out.rglob("*")
        if path.is_file()
    }


def hash_result(out: Path) -> dict[str, str]:
    """Return the SHA-256 of everything that must be the same however often the run was interrupted."""
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
    """Return an uninterrupted run."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("straight") / "run"
    run_training(CONFIG, out)
    return out


@pytest.mark.parametrize(("asked", "saved"), [(1, 2), (6, 7), (10, 10), (20, 20)])
def test_resumed_run_equals_uninterrupted_run(tmp_path, straight, asked, saved) -> None:
    stopped, recorder = record_run(CONFIG, tmp_path / "run", at=asked)  # at 10 and 20 before the evaluation
    assert stopped.summary is None
    assert recorder.saved_steps[-1] == saved
    finished, recorder = record_run(CONFIG, tmp_path / "run")
    assert finished.summary is not None
    assert f"resuming from step {saved}" in recorder.messages
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_run_stopped_before_first_step_resumes(tmp_path, straight) -> None:
    assert run_training(CONFIG, tmp_path / "run", stop=StopFlag("SIGINT")).summary is None
    run_training(CONFIG, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_run_stopped_during_evaluation_resumes(tmp_path, straight, monkeypatch) -> None:
    stop, real = StopFlag(), Trainer.step

    def step(self: Trainer, *arguments: object, **named: object) -> StepOutput:
        output = real(self, *arguments, **named)
        if self.state.progress.step == 10:
            stop.signal = "SIGTERM"  # after the step has read the flag: the evaluation is next to read it
        return output

    monkeypatch.setattr(Trainer, "step", step)
    assert run_training(CONFIG, tmp_path / "run", stop=stop).summary is None
    monkeypatch.undo()
    logged = metrics_log.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert logged[-1]["step"] == 10
    assert "val_top1" not in logged[-1]
    run_training(CONFIG, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_killed_run_repeats_unsaved_steps(tmp_path, straight) -> None:
    class Killed(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step == 13:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(CONFIG, tmp_path / "run", callback=Killed())
    (tmp_path / "run" / "checkpoints" / ".step-00000015.9.tmp").mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"step": 13, "lo')
    run_training(CONFIG, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_damaged_checkpoint_is_reported_and_recovered_from(tmp_path, straight) -> None:
    record_run(CONFIG, tmp_path / "run", at=11)
    damaged = tmp_path / "run" / "checkpoints" / "step-00000012" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    _, recorder = record_run(CONFIG, tmp_path / "run")
    assert str(damaged) in recorder.warnings[0]
    assert "resuming from step 10" in recorder.messages
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_machine_settings_do_not_change_the_result(tmp_path, straight) -> None:
    other = replace(
        CONFIG,
        data=replace(CONFIG.data, workers=2),
        checkpoint=replace(CONFIG.checkpoint, save_every=3, last=1, best=False),
        parallel=ParallelConfig(activation_checkpointing=True),
    )
    record_run(other, tmp_path / "run", at=9)
    run_training(other, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_finished_run_is_returned_unchanged(straight) -> None:
    before = hash_files(straight)
    again = run_training(CONFIG, straight)
    assert again.already_finished
    assert again.summary == json.loads((straight / "summary.json").read_bytes())
    assert hash_files(straight) == before


def test_run_keeps_last_and_best_checkpoints(straight) -> None:
    records = [record for record in metrics_log.read_metrics(straight / "metrics.jsonl") if "val_top1" in record]
    best = max(records, key=lambda record: (record["val_top1"], -record["step"]))["step"]
    kept = {int(path.name.removeprefix("step-")) for path in (straight / "checkpoints").iterdir()}
    assert kept == {best, 15, 20}


def test_best_is_saved_between_save_intervals(tmp_path) -> None:
    config = replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, save_every=20, last=1))
    run_training(config, tmp_path / "run")
    records = [
        record for record in metrics_log.read_metrics(tmp_path / "run" / "metrics.jsonl") if "val_top1" in record
    ]
    best = max(records, key=lambda record: (record["val_top1"], -record["step"]))["step"]
    kept = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 20}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_while_saving_is_a_warning(tmp_path, straight, monkeypatch) -> None:
    real: Callable[..., None] = state_module.commit_directory

    def sometimes(path: Path, fill: Callable[[Path], None]) -> None:
        if path.name == "step-00000010":
            full_disk()
        real(path, fill)

    monkeypatch.setattr(state_module, "commit_directory", sometimes)
    _, recorder = record_run(CONFIG, tmp_path / "run", at=11)
    assert ["step 10" in warning and "No space" in warning for warning in recorder.warnings] == [True]
    assert {5, 12} <= set(recorder.saved_steps)
    run_training(CONFIG, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_failed_required_save_is_an_error(tmp_path, straight, monkeypatch) -> None:
    real: Callable[..., None] = state_module.commit_directory

    def sometimes(path: Path, fill: Callable[[Path], None]) -> None:
        if path.name == "step-00000007":
            full_disk()
        real(path, fill)

    monkeypatch.setattr(state_module, "commit_directory", sometimes)
    with pytest.raises(TrainingError, match="cannot save step 7") as caught:
        record_run(CONFIG, tmp_path / "run", at=6)
    assert "free disk space" in str(caught.value.hint)
    monkeypatch.undo()
    run_training(CONFIG, tmp_path / "run")
    assert hash_result(tmp_path / "run") == hash_result(straight)


def test_other_settings_in_same_directory_are_rejected(straight) -> None:
    before = hash_files(straight)
    with pytest.raises(ConfigError, match=r"schedule\.lr"):
        run_training(replace(CONFIG, schedule=replace(CONFIG.schedule, lr=0.5)), straight)
    assert hash_files(straight) == before


def test_non_finite_updates_end_the_run_with_finite_weights(tmp_path, monkeypatch) -> None:
    real = Trainer.prepare

    def prepare(self: Trainer, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = real(self, *arguments)
        return images * (float("nan") if self.state.progress.step >= 6 else 1.0), targets

    monkeypatch.setattr(Trainer, "prepare", prepare)
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, max_skipped=3))
    with pytest.raises(TrainingError, match="3 updates in a row"):
        run_training(config, tmp_path / "run")
    monkeypatch.undo()
    saved = tmp_path / "run" / "checkpoints" / "step-00000009"
    tensors = read_tensors(saved / "state.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert json.loads((saved / "state.json").read_bytes()) == {"step": 9, "skipped": 3, "skipped_in_a_row": 3}
    assert run_training(config, tmp_path / "run").summary is not None


def test_non_finite_weights_are_not_saved(tmp_path, monkeypatch) -> None:
    real = Trainer.update

    def update(self: Trainer, lr: float) -> None:
        real(self, lr)
        if self.state.progress.step == 7:
            next(iter(self.state.parameters.values())).data.fill_(float("inf"))

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(TrainingError, match="not finite"):
        run_training(CONFIG, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


def write_classes(path: Path, *, broken: bool, without: bool = False) -> Path:
    """Write two classes of twenty images; every tenth file is broken, or missing."""
    random = np.random.default_rng(0)
    for label in range(2):
        directory = path / f"class{label}"
        directory.mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
            bad = number % 10 == 4
            if bad and without:
                continue
            file = directory / f"{number:02d}.png"
            Image.fromarray(pixels).save(file)
            if bad and broken:
                file.write_bytes(file.read_bytes()[: 20 if label else 0])
    return path


def test_bad_images_are_excluded_as_if_absent(tmp_path) -> None:
    broken = write_classes(tmp_path / "a" / "set", broken=True)
    clean = write_classes(tmp_path / "b" / "set", broken=False, without=True)
    for name, place in (("broken", broken), ("clean", clean)):
        config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
        _, recorder = record_run(config, tmp_path / name)
        assert bool(recorder.warnings) == (name == "broken")
    listed = (tmp_path / "broken" / "bad_files.csv").read_text(encoding="utf-8")
    assert [line.partition(",")[0] for line in listed.splitlines()[1:]] == [
        f"class{label}/{number}.png" for label in range(2) for number in ("04", "14")
    ]
    assert hash_result(tmp_path / "broken") == hash_result(tmp_path / "clean")


def test_changed_images_are_rejected_until_restored(tmp_path) -> None:
    place = write_classes(tmp_path / "set", broken=False)
    config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
    record_run(config, tmp_path / "run", at=3)
    (place / "class0" / "03.png").rename(place / "class0" / "03b.png")
    with pytest.raises(DataError, match="have changed since the run began"):
        run_training(config, tmp_path / "run")
    (place / "class0" / "03b.png").rename(place / "class0" / "03.png")
    assert run_training(config, tmp_path / "run").summary is not None


@pytest.mark.parametrize("stop", [3, None])
@pytest.mark.parametrize("change", ["overwritten", "swapped"])
def test_changed_contents_are_rejected_and_named(tmp_path, stop, change) -> None:
    place = write_classes(tmp_path / "set", broken=False)
    config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
    record_run(config, tmp_path / "run", at=stop)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    files = [place / "class0" / "03.png", place / "class1" / "03.png"]
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(contents[1])
    if change == "swapped":
        files[1].write_bytes(contents[0])
    with pytest.raises(DataError, match=r"have changed since the run began.*class0/03\.png"):
        run_training(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)  # other times, same content
    assert run_training(config, tmp_path / "run").already_finished == (stop is None)


def test_finished_run_whose_data_is_gone_is_returned(tmp_path) -> None:
    place = write_classes(tmp_path / "set", broken=False)
    config = replace(CONFIG, data=replace(CONFIG.data, path=str(place)))
    record_run(config, tmp_path / "run")
    place.rename(tmp_path / "moved")
    assert run_training(config, tmp_path / "run").already_finished


def test_finished_run_can_be_fine_tuned(tmp_path, straight) -> None:
    place = write_classes(tmp_path / "set", broken=False)
    config = replace(
        CONFIG,
        model=ModelChoice(init=str(straight), image_size=12),
        data=replace(CONFIG.data, path=str(place)),
        optimizer=OptimizerConfig(trainable="lora", lora_rank=2, layer_decay=0.8),
    )
    _, recorder = record_run(config, tmp_path / "tuned")
    assert any("2×2 → 3×3" in line for line in recorder.messages)
    old, new = artifact_io.read_artifact(straight), artifact_io.read_artifact(tmp_path / "tuned")
    assert new.labels == ("class0", "class1")
    assert new.state.keys() == old.state.keys()
    assert torch.equal(new.state["blocks.0.mlp.fc1.weight"], old.state["blocks.0.mlp.fc1.weight"])
    assert new.build_model()(torch.rand(1, 1, 12, 12)).shape == (1, 2)


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
    assert plan_intervals(RunConfig(schedule=schedule), images=100).total_steps == steps


def test_image_that_becomes_unreadable_fails_the_run(tmp_path, monkeypatch) -> None:
    real = ArraySource.read

    def read(self: ArraySource, index: int) -> StoredImage:
        if index % 7 == 0:
            raise OSError(5, "Input/output error")
        return real(self, index)

    monkeypatch.setattr(ArraySource, "read", read)
    with pytest.raises(DataError, match=r"digits/\d+ cannot be read"):
        run_training(CONFIG, tmp_path / "run")


def test_early_stopping_uses_the_best_weights(tmp_path) -> None:
    # A rate this high forgets what the first steps have learned, so the first evaluations are the best.
    schedule = replace(CONFIG.schedule, steps=200, lr=3.0, warmup_steps=0, decay="constant")
    config = replace(
        CONFIG,
        optimizer=replace(CONFIG.optimizer, ema_decay=None, max_skipped=1000),
        schedule=schedule,
        evaluation=EvaluationConfig(every=1, patience=3),
    )
    recorder = Recorder()
    summary = run_training(config, tmp_path, callback=recorder).summary
    scores = [
        record["val_top1"] for record in metrics_log.read_metrics(tmp_path / "metrics.jsonl") if "val_loss" in record
    ]
    assert len(scores) < 200
    assert max(scores[-3:]) <= max(scores)
    best = metrics_log.find_best(tmp_path / "metrics.jsonl")
    assert best is not None
    assert any(f"since step {best[1]}" in message for message in recorder.messages)
    assert summary is not None
    assert summary["validation"]["val_top1"] == max(scores) > scores[-1]  # type: ignore[index]
    stored = read_tensors(tmp_path / "checkpoints" / f"step-{best[1]:08d}" / "state.safetensors")
    artifact = read_tensors(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[f"model.{name}"], tensor) for name, tensor in artifact.items())


def test_early_stopping_needs_the_best_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.best=true"):
        replace(CONFIG, evaluation=EvaluationConfig(patience=1), checkpoint=CheckpointConfig(best=False))
