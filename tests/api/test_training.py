"""`train`, `finetune`, `suite` and `recipe`: results, resume, interruption, settings, directories."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.tiny_runs import LENGTH, SHAPE, Shell, assigned, photos, tree
from torch import distributed

import vitkit
from vitkit.api import progress
from vitkit.core.lock import lock_directory
from vitkit.errors import ConfigError, DataError, TrainingError, UnknownNameError

SETTINGS: dict[str, object] = {
    "model.patch_size": 8,
    "model.settings": ["width=16", "heads=2", "depth=1", "mlp_dim=16"],
    "evaluation.every": 2,
    "logging.log_every": 1,
}
TINY = {"model": "Ti/16", "image_size": 16, "steps": 4, "batch_size": 8, "workers": 0, "settings": SETTINGS}
"""Arguments of a run that takes a fraction of a second."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "is_logging_configured", lambda: True)
    return photos(tmp_path / "photos")


def train(*arguments: object, **options: object) -> vitkit.Run:
    return vitkit.train(*arguments, **TINY | {"progress": False} | options)


class StopAt(vitkit.Callback):
    """Raises an exception after a step."""

    def __init__(self, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.step, self.error = step, error

    def on_step(self, metrics: object) -> None:
        if metrics.step == self.step:
            raise self.error


def test_command_and_call_write_the_same_run(capsys):
    train("photos", out="call")
    assert Shell(capsys)("train", "photos", "--out", "command", *assigned(SHAPE, dict(LENGTH))).code == 0
    for name in ("config.toml", "metrics.jsonl", "model.safetensors"):
        assert Path("call", name).read_bytes() == Path("command", name).read_bytes()


def test_same_call_returns_the_finished_run_unchanged():
    first = train("photos", out="run")
    before = tree(Path("run"))
    again = train("photos", out="run")
    assert again == first
    assert (first.already_finished, again.already_finished) == (False, True)
    assert tree(Path("run")) == before


def test_other_settings_are_refused():
    train("photos", out="run")
    with pytest.raises(ConfigError) as caught:
        train("photos", out="run", lr=0.5)
    assert str(caught.value) == (
        "run holds a run with schedule.lr=0.001, not 0.5\n"
        "hint: choose another out (--out), or repeat the settings to resume"
    )


def test_directory_is_named_after_the_data_and_numbered(capsys, folder):
    paths = [train("photos").path, train("photos").path, train(str(folder), seed=1).path, train("photos", seed=1).path]
    assert paths == [Path("runs/photos"), Path("runs/photos"), Path("runs/photos-2"), Path("runs/photos-3")]
    Path("runs/photos-3").rename("runs/moved")
    Path("runs/photos-3").mkdir()
    Path("runs/photos-3/notes.txt").touch()
    capsys.readouterr()
    assert train("photos", seed=1, progress=None).path == Path("runs/photos-4")
    assert capsys.readouterr().err.startswith("run directory: runs/photos-4\n")


def test_command_chooses_a_directory(capsys):
    assert Shell(capsys)("train", "photos", *assigned(SHAPE, dict(LENGTH))).code == 0
    assert vitkit.Run("runs/photos").status == "finished"


@pytest.mark.parametrize("key", ["lr", "schedule.lr"])
def test_key_that_is_set_twice_is_refused(key):
    with pytest.raises(ConfigError, match=r"schedule\.lr is assigned twice"):
        train("photos", lr=0.1, settings={key: 0.2})


def test_data_that_is_set_twice_is_refused():
    with pytest.raises(ConfigError, match=r"data\.path is assigned twice"):
        train("photos", settings={"data": "other"})
    with pytest.raises(ConfigError, match="a RunConfig is a whole run"):
        train(vitkit.recipe("digits"), recipe="digits")
    with pytest.raises(ConfigError, match="neither data nor a recipe"):
        train()


def test_steps_and_epochs_clear_each_other():
    assert train("photos", steps=None, epochs=0.5).config.schedule.steps is None
    assert train("photos").config.schedule.epochs is None


def test_config_is_a_whole_run():
    config = vitkit.recipe("digits").override(SETTINGS | {"steps": 2, "image_size": 8, "workers": 0})
    run = vitkit.train(config, progress=False)
    assert run.path == Path("runs/digits")
    assert run.config == config.override({"parallel.precision": "fp32", "schedule.accumulate": 1})  # those of a CPU
    Path("mine.toml").write_text(config.to_toml(), encoding="utf-8")
    assert vitkit.RunConfig.from_toml("mine.toml") == config
    assert vitkit.train("mine.toml", out="runs/digits", progress=False).already_finished


def test_file_may_name_a_recipe_as_its_base():
    Path("mine.toml").write_text('base = "digits"\nseed = 7\n', encoding="utf-8")
    config = vitkit.RunConfig.from_toml("mine.toml")
    assert (config.seed, config.schedule) == (7, vitkit.recipe("digits").schedule)
    assert vitkit.recipe("mine.toml") == config


def test_recipe_runs_on_other_data():
    run = train("photos", recipe="digits", channels=3)
    assert (run.config.data.path, run.config.augment) == ("photos", vitkit.recipe("digits").augment)
    with pytest.raises(UnknownNameError) as caught:
        vitkit.recipe("digit")
    assert "digits" in caught.value.hint


def test_unknown_data_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        train("photo")
    assert caught.value.hint == "did you mean photos?"


def pairs() -> list[tuple[object, str]]:
    files = sorted(Path("photos").rglob("*.png"))
    return [(path, path.parent.name) for path in files]


def test_pairs_equal_the_folder():
    folder, listed = train("photos", out="folder"), train(pairs(), out="listed")
    assert listed.labels == ("cat", "dog")
    assert (folder.path / "model.safetensors").read_bytes() == (listed.path / "model.safetensors").read_bytes()


def test_pairs_in_memory_resume_and_are_written_nowhere():
    images = [(np.full((20, 20, 3), 6 * index, np.uint8), "dark" if index < 20 else "light") for index in range(40)]
    with pytest.raises(vitkit.Interrupted):
        train(images, callbacks=[StopAt(1)])
    run = train(images)
    assert (run.path, run.status) == (Path("runs/pairs"), "finished")
    assert not list(run.path.rglob("*.png"))
    straight = train(images, out="straight")
    assert (run.path / "model.safetensors").read_bytes() == (straight.path / "model.safetensors").read_bytes()
    changed = [(image, "dark") if index == 20 else (image, label) for index, (image, label) in enumerate(images)]
    with pytest.raises(DataError, match="the images have changed"):
        train(changed, out="straight")
    assert train(changed).path == Path("runs/pairs-2")


def test_callback_stops_a_run_that_then_resumes():
    with pytest.raises(vitkit.Interrupted) as caught:
        train("photos", out="run", callbacks=[StopAt(1)])
    assert isinstance(caught.value, KeyboardInterrupt)
    assert (caught.value.path, caught.value.run.status) == (Path("run"), "interrupted")
    assert train("photos", out="run").status == "finished"
    train("photos", out="straight")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert Path("run", name).read_bytes() == Path("straight", name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_interrupts_and_handlers_are_restored(number):
    class Signal(vitkit.Callback):
        def on_step(self, metrics: object) -> None:
            if metrics.step == 1:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(vitkit.Interrupted, match=number.name):
        train("photos", callbacks=[Signal()])
    assert signal.getsignal(number) is before


def test_second_interruption_is_immediate():
    class TwoSignals(vitkit.Callback):
        def on_step(self, metrics: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train("photos", callbacks=[TwoSignals()])
    assert not isinstance(caught.value, vitkit.Interrupted)


def test_other_exception_of_a_callback_fails_the_run():
    with pytest.raises(ZeroDivisionError):
        train("photos", out="run", callbacks=[StopAt(1, ZeroDivisionError)])
    assert not Path("run").exists()


def test_run_in_a_thread():
    runs: list[vitkit.Run] = []
    thread = threading.Thread(target=lambda: runs.append(train("photos")))
    thread.start()
    thread.join()
    assert [run.status for run in runs] == ["finished"]


def test_callbacks_observe_everything():
    events: list[str] = []

    class Recorder(vitkit.Callback):
        def on_step(self, metrics: object) -> None:
            events.append(f"step {metrics.step}")

        def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
            events.append(f"evaluate {step}")
            assert "val_top1" in metrics

        def on_save(self, step: int, path: Path) -> None:
            events.append(f"save {step}")
            assert path.is_dir()

        def on_message(self, text: str) -> None:
            events.append("message")

    train("photos", callbacks=[Recorder()])
    assert [event for event in events if event != "message"] == [
        *("step 1", "step 2", "evaluate 2", "save 2"),
        *("step 3", "step 4", "evaluate 4", "save 4"),
    ]
    assert "message" in events


def test_unreadable_image_is_a_warning(monkeypatch):
    Path("photos/cat/broken.png").write_bytes(b"no image")
    monkeypatch.setattr("vitkit.api.training.is_logging_configured", lambda: False)
    with pytest.warns(vitkit.VitkitWarning, match="1 of 41 images are unreadable"):
        run = train("photos")
    assert len(run.warnings) == 1


def test_directory_in_use_is_refused():
    Path("run").mkdir()
    with lock_directory(Path("run")), pytest.raises(TrainingError, match=f"run is in use by process {os.getpid()} on "):
        train("photos", out="run")
    assert list(Path("run").iterdir()) == []
    assert train("photos", out="run").status == "finished"
    assert not [path for path in Path("run").iterdir() if path.name.startswith(".")]


def test_lock_of_a_killed_process_is_free():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with lock_directory(Path()):
            os.write(writer, b"x")
            signal.pause()
    os.read(reader, 1)
    with pytest.raises(TrainingError, match=f"process {child} on "), lock_directory(Path()):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock_directory(Path()):
        pass
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_existing_process_group_is_used_and_kept(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert train("photos").status == "finished"
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


ON_EVERY_RANK = r"""
import os, sys, torch, vitkit
torch.set_num_threads(1)
run = vitkit.train("digits", out="run", image_size=8, steps=2, batch_size=8, workers=0)
assert not torch.distributed.is_initialized()
torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
ddp = torch.nn.parallel.DistributedDataParallel(run.model.train())
ddp(torch.rand(2, 1, 8, 8)).logsumexp(dim=1).sum().backward()
gradient = run.model.head.weight.grad.abs().sum().item()
print(f"{run.path} {run.status} {run.metrics.top1} {len(run.model.labels)} {gradient}\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


def test_every_rank_returns_an_equal_run():
    Path("script.py").write_text(ON_EVERY_RANK, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert first == second  # also the gradients of a loop of one's own, whose images differ
    assert done.stderr.count("step 2/2") == 1


def finetune(model: object, data: object, **options: object) -> vitkit.Run:
    length = {"steps": 2, "batch_size": 8, "workers": 0, "image_size": 16, "progress": False}
    return vitkit.finetune(model, data, **length | options)


def test_finetune_equals_the_command(capsys):
    base = train("photos", out="base")
    photos(Path("new"), ("fox", "owl"))
    run = finetune(base, "new", out="call", lr=0.01)
    settings = ("steps=2", "batch_size=8", "workers=0", "image_size=16", "lr=0.01")
    printed = Shell(capsys)("finetune", "base", "new", "--out", "command", "--json", *settings)
    assert (run.path / "model.safetensors").read_bytes() == Path("command/model.safetensors").read_bytes()
    assert printed.json["result"] == run.to_dict()["result"]
    assert run.labels == ("fox", "owl")


def test_sweep_has_trials_and_a_directory_of_its_own():
    base = train("photos", out="base")
    run = finetune(base, "photos", sweep=[1e-3, 3e-3])
    assert [trial.lr for trial in run.trials] == [1e-3, 3e-3]
    assert [trial["lr"] for trial in run.to_dict()["sweep"]] == [1e-3, 3e-3]
    assert any("is best on held-out images" in decision for decision in run.decisions)
    assert finetune(base, "photos", sweep=[1e-3, 3e-3]).already_finished
    assert finetune(base, "photos").path == Path("runs/photos-2")
    assert finetune(base, "photos", sweep=[1e-3, 2e-3]).path == Path("runs/photos-3")
    with pytest.raises(ConfigError, match="no learning rates"):
        finetune(base, "photos", sweep=[])


def test_model_in_memory_is_stored_with_the_run():
    torch.manual_seed(0)
    model = vitkit.create("Ti/16", image_size=16, num_classes=2, settings={"depth": 1})
    model.labels = ("cat", "dog")
    run = finetune(model, "photos")
    [stored] = run.path.glob("init-*")
    assert run.config.model.init == str(stored)
    assert torch.equal(vitkit.load(stored).head.weight, model.head.weight)
    assert finetune(model, "photos").already_finished
    with torch.no_grad():
        model.blocks[0].norm1.bias.fill_(1.0)
    assert finetune(model, "photos").path == Path("runs/photos-2")
    distilled = train("photos", out="student", teacher=model, recipe="digits-distilled", channels=3)
    assert list(distilled.path.glob("teacher-*"))


def test_model_in_memory_is_removed_if_the_run_fails():
    model = vitkit.create("Ti/16", image_size=16, num_classes=2, settings={"depth": 1})
    with pytest.raises(DataError):
        finetune(model, "nowhere", out="run")
    assert not Path("run").exists()


def test_recipes_are_listed():
    assert "digits" in vitkit.list_recipes()
    assert vitkit.list_recipes("DEIT-B16*") == ["deit-b16-distilled"]
    with pytest.raises(UnknownNameError, match="no recipe matches"):
        vitkit.list_recipes("nothing-*")


def test_recipe_that_does_not_finetune_is_refused():
    with pytest.raises(ConfigError, match="does not fine-tune"):
        finetune("base", "photos", recipe="digits")


def test_suite_writes_a_report():
    train("photos", out="base")
    photos(Path("sets/birds/train"), ("robin", "wren"))
    photos(Path("sets/birds/test"), ("robin", "wren"), each=4)
    text = '[datasets.birds]\npath = "birds"\nrates = [0.01]\n'
    Path("mine.toml").write_text(text, encoding="utf-8")
    short = {"steps": 2, "batch_size": 8, "image_size": 16}
    options = {"out": "suite", "models": [vitkit.Run("base")], "data": "sets"}
    result = vitkit.suite("mine.toml", **options, settings=short, workers=0, progress=False)
    assert result.models == ("base",)
    assert result.report_path == Path("suite/report.html")
    assert result.report_path.is_file()


def test_stopped_suite_raises_interrupted(monkeypatch):
    train("photos", out="base")
    photos(Path("sets/birds/train"), ("robin", "wren"))
    photos(Path("sets/birds/test"), ("robin", "wren"), each=4)
    Path("mine.toml").write_text('[datasets.birds]\npath = "birds"\nrates = [0.01]\n', encoding="utf-8")
    monkeypatch.setattr(progress.RunDisplay, "on_step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(vitkit.Interrupted) as caught:
        vitkit.suite(
            "mine.toml",
            out="suite",
            models=["base"],
            data="sets",
            settings={"steps": 3, "batch_size": 8, "image_size": 16},
            workers=0,
        )
    assert (caught.value.path, caught.value.run) == (Path("suite"), None)


def test_unknown_argument_names_the_right_one():
    with pytest.raises(vitkit.VitkitError, match=r"train\(\) has no argument 'max_epochs'") as caught:
        vitkit.train("photos", max_epochs=3)
    assert caught.value.hint == "use epochs=3"


def test_data_in_memory_must_be_pairs():
    with pytest.raises(DataError, match="is not a dataset"):
        train(torch.zeros(3))
