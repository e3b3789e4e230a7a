"""`vitkit train`: results, resume, JSON, settings."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest
from cli.tiny_runs import Shell, assigned, photos, tree

from vitkit.api.plans import plan_training
from vitkit.api.progress import RunDisplay
from vitkit.core.config import load_toml, parse_assignments
from vitkit.recipes.registry import find_recipe
from vitkit.training.callbacks import StepMetrics
from vitkit.training.config import RunConfig, expand_settings


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    return Shell(capsys)


def resolve_config(data: str, *assignments: str) -> RunConfig:
    return plan_training(data, settings=parse_assignments(assignments)).config


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, *, by: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to this process after a step."""
    show = RunDisplay.on_step

    def on_step(self: RunDisplay, metrics: StepMetrics) -> None:
        show(self, metrics)
        if metrics.step == step:
            os.kill(os.getpid(), by)

    monkeypatch.setattr(RunDisplay, "on_step", on_step)


def test_train_and_eval_a_folder(shell):
    trained = shell.train("photos", "run")
    assert trained.code == 0
    assert trained.out.startswith("Finished\n")
    assert "vitkit eval run OTHER-FOLDER" in trained.out
    assert "class folders: 2 classes, images: 36 train, 4 val" in trained.stderr
    evaluated = shell("eval", "run", "photos", "--workers", "0")
    assert evaluated.code == 0
    assert "4 images (val)" in evaluated.out
    names = {"config.toml", "metrics.jsonl", "checkpoints", "model.safetensors", "config.json", "bad_files.csv"}
    names |= {"preprocessor_config.json", "labels.json", "checksums.json", "report.html", "summary.json"}
    assert names <= {path.name for path in Path("run").iterdir()}


def test_finished_run_is_not_changed(shell):
    shell.train("photos", "run")
    before = tree(Path("run"))
    again = shell.train("photos", "run")
    assert again.code == 0
    assert again.out.startswith("Already finished, nothing was changed\n")
    assert tree(Path("run")) == before


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_stopped_run_resumes_bit_for_bit(shell, monkeypatch, by):
    with monkeypatch.context() as patched:
        stop_at(2, patched, by=by)
        stopped = shell.train("photos", "run")
    assert stopped.code == 75
    assert stopped.out == ""
    assert stopped.errors == []
    assert stopped.stderr.endswith(f"stopped by {by.name}; run the same command again to resume\n")
    assert not Path("run/model.safetensors").exists()
    resumed = shell.train("photos", "run")
    assert resumed.code == 0
    assert "resuming from step" in resumed.stderr
    assert shell.train("photos", "never-stopped").code == 0
    for name in ("model.safetensors", "metrics.jsonl"):
        assert Path("run", name).read_bytes() == Path("never-stopped", name).read_bytes()


def test_signal_while_checking_images_stops(shell, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunDisplay, "on_progress", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        stopped = shell.train("photos", "run")
    assert stopped.code == 75
    assert "step 1" not in stopped.stderr
    assert shell.train("photos", "run").code == 0


def test_json_is_the_only_output_on_stdout(shell):
    result = shell.train("photos", "run", "--json")
    assert result.json["classes"] == 2
    assert result.json["images"] == {"train": 36, "val": 4}
    assert result.json["evaluated_on"] == "val"
    assert {"top1", "top5", "count", "ece", "per_class", "intervals"} <= result.json["result"].keys()
    assert {"exaflops", "images_per_second", "utilization", "parameters"} <= result.json["compute"].keys()
    assert json.loads(Path("run/summary.json").read_bytes()) == result.json
    assert shell.train("photos", "run", "--json").json == result.json


def test_bad_files_are_excluded_and_listed(shell):
    Path("photos/cat/\x1b[31mred.png").write_bytes(b"no image")
    result = shell.train("photos", "run", "--json")
    assert result.json["bad_files"] == 1
    assert result.json["images"] == {"train": 36, "val": 4}
    assert "1 of 41 images are unreadable" in result.stderr
    assert "\x1b" not in result.stderr
    assert Path("run/bad_files.csv").read_text(encoding="utf-8").startswith('file,reason\ncat/\x1b[31mred.png,"not a')


def test_data_may_be_a_csv_file(shell):
    lines = [f"{path.as_posix()},{path.parent.name}" for path in sorted(Path("photos").rglob("*.png"))]
    Path("list.csv").write_text("\n".join(["file_name,label", *lines]) + "\n", encoding="utf-8")
    assert shell.train("list.csv", "run").code == 0
    assert tomllib.loads(Path("run/config.toml").read_text(encoding="utf-8"))["data"]["path"] == "list.csv"


def test_tensorboard_has_curves_of_a_resumed_run(shell, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        assert shell.train("photos", "run", logging__tensorboard="true").code == 75
    assert shell.train("photos", "run", logging__tensorboard="true").code == 0
    curves = events.EventAccumulator("run/tensorboard").Reload()
    assert {"loss/train", "lr/train", "top1/val", "loss/val"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("loss/train")] == [1, 2, 3, 4]
    assert [event.step for event in curves.Scalars("loss/val")] == [2, 4]


def test_short_keys_are_expanded(shell):
    config = resolve_config(
        "digits", "data=photos", "epochs=3", "lr=0.5", "batch_size=7", "image_size=32", "channels=3"
    )
    assert (config.data.path, config.data.channels) == ("photos", 3)
    assert (config.schedule.epochs, config.schedule.lr, config.schedule.batch_size) == (3.0, 0.5, 7)
    assert config.model.image_size == 32


def test_steps_and_epochs_replace_each_other():
    assert resolve_config("digits", "steps=5").schedule.epochs is None
    assert resolve_config("folder", "epochs=5").schedule.steps is None
    assert expand_settings({"epochs": 2, "steps": 3}) == {"schedule.epochs": 2, "schedule.steps": 3}


def test_directory_takes_precedence_over_recipe(shell):
    assert resolve_config("digits") == find_recipe("digits").make()
    assert resolve_config("Digits") == find_recipe("digits").make()
    photos(Path("digits"), each=1)
    for name in ("digits", "./digits"):
        assert resolve_config(name).data.path == "./digits"


def test_another_model_drops_architecture_settings():
    config = resolve_config("folder", "model=B/16").model
    assert (config.name, config.patch_size, config.settings) == ("B/16", None, ())
    own = resolve_config("folder", "model=B/16", 'model.settings=["depth=1"]', "model.patch_size=8").model
    assert (own.patch_size, own.settings) == (8, ("depth=1",))
    remaining = resolve_config("imagenet-b16", "model=L/16").model
    assert [each for each in remaining.settings if each.startswith("dropout")]  # not a setting of the architecture


def test_file_overrides_its_base_recipe(shell):
    text = 'base = "folder"\nseed = 3\n[schedule]\nlr = 0.25\n[data]\npath = "photos"\n'
    Path("my.toml").write_text(text, encoding="utf-8")
    config = resolve_config("my.toml", "lr=0.5")
    assert (config.seed, config.schedule.lr, config.data.path) == (3, 0.5, "photos")
    assert config.augment == find_recipe("folder").make().augment


def test_resolved_config_can_be_trained_again(shell):
    shell.train("photos", "run")
    again = shell("train", "run/config.toml", "--out", "again")
    assert again.code == 0
    assert load_toml("run/config.toml", RunConfig, recipes={}) == load_toml("again/config.toml", RunConfig, recipes={})
    assert Path("run/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


def test_test_settings_replace_defaults():
    changes = {"lr": 3, "steps": None, "checkpoint__last": 9}
    assert assigned({"lr": 1, "steps": 2}, changes) == [
        "lr=3",
        "checkpoint.last=9",
    ]
