"""`vitkit train`: from a folder of images to a model, stopped, gone on with, done, and never done twice."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest
from cli.tiny_runs import Shell, assigned, photos, tree

from vitkit.cli.assignments import full
from vitkit.cli.train import resolve
from vitkit.cli.watching import Shown
from vitkit.core.config import load_toml
from vitkit.recipes.table import find
from vitkit.train.config import RunConfig
from vitkit.train.watch import Pulse


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos")
    return Shell(capsys)


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, *, by: signal.Signals = signal.SIGTERM) -> None:
    """Send a real signal when a step is done."""
    show = Shown.pulse

    def pulse(self: Shown, pulse: Pulse) -> None:
        show(self, pulse)
        if pulse.step == step:
            os.kill(os.getpid(), by)

    monkeypatch.setattr(Shown, "pulse", pulse)


def test_two_commands_lead_from_a_folder_to_a_judged_model(shell):
    trained = shell.train("photos", "run")
    assert trained.code == 0
    assert trained.out.startswith("Done\n")
    assert "vitkit eval run OTHER-FOLDER" in trained.out
    assert "class folders: 2 classes, 36 to learn from, 4 to validate on" in trained.talk
    judged = shell("eval", "run", "photos", "--workers", "0")
    assert judged.code == 0
    assert "On 4 images (val)" in judged.out
    names = {"config.toml", "metrics.jsonl", "checkpoints", "model.safetensors", "config.json", "bad_files.csv"}
    names |= {"preprocessor_config.json", "labels.json", "checksums.json", "report.html", "summary.json"}
    assert names <= {path.name for path in Path("run").iterdir()}


def test_a_finished_run_is_not_changed_by_running_it_again(shell):
    shell.train("photos", "run")
    before = tree(Path("run"))
    again = shell.train("photos", "run")
    assert again.code == 0
    assert again.out.startswith("Already done, nothing was changed\n")
    assert tree(Path("run")) == before


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_bits(shell, monkeypatch, by):
    with monkeypatch.context() as patched:
        stop_at(2, patched, by=by)
        stopped = shell.train("photos", "run")
    assert stopped.code == 75
    assert stopped.out == ""
    assert stopped.errors == []
    assert stopped.talk.endswith(f"stopped by {by.name}; run the same command again to go on\n")
    assert not Path("run/model.safetensors").exists()
    resumed = shell.train("photos", "run")
    assert resumed.code == 0
    assert "going on from step" in resumed.talk
    assert shell.train("photos", "never-stopped").code == 0
    for name in ("model.safetensors", "metrics.jsonl"):
        assert Path("run", name).read_bytes() == Path("never-stopped", name).read_bytes()


def test_a_signal_while_images_are_checked_is_obeyed_as_well(shell, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Shown, "advance", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        stopped = shell.train("photos", "run")
    assert stopped.code == 75
    assert "step 1" not in stopped.talk
    assert shell.train("photos", "run").code == 0


def test_json_is_all_that_stdout_holds(shell):
    said = shell.train("photos", "run", "--json")
    assert said.json["classes"] == 2
    assert said.json["images"] == {"train": 36, "val": 4}
    assert said.json["judged_on"] == "val"
    assert {"top1", "top5", "count", "ece", "per_class", "intervals"} <= said.json["result"].keys()
    assert {"exaflops", "images_per_second", "utilisation", "parameters"} <= said.json["ledger"].keys()
    assert json.loads(Path("run/summary.json").read_bytes()) == said.json
    assert shell.train("photos", "run", "--json").json == said.json


def test_bad_files_are_left_out_and_listed(shell):
    Path("photos/cat/\x1b[31mred.png").write_bytes(b"no image")
    said = shell.train("photos", "run", "--json")
    assert said.json["bad_files"] == 1
    assert said.json["images"] == {"train": 36, "val": 4}
    assert "1 of 41 images cannot be read" in said.talk
    assert "\x1b" not in said.talk
    assert Path("run/bad_files.csv").read_text(encoding="utf-8").startswith('file,reason\ncat/\x1b[31mred.png,"not a')


def test_a_place_may_be_a_file_as_well(shell):
    lines = [f"{path.as_posix()},{path.parent.name}" for path in sorted(Path("photos").rglob("*.png"))]
    Path("list.csv").write_text("\n".join(["file_name,label", *lines]) + "\n", encoding="utf-8")
    assert shell.train("list.csv", "run").code == 0
    assert tomllib.loads(Path("run/config.toml").read_text(encoding="utf-8"))["data"]["path"] == "list.csv"


def test_tensorboard_gets_the_curves_before_and_after_a_stop(shell, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        assert shell.train("photos", "run", keep__tensorboard="true").code == 75
    assert shell.train("photos", "run", keep__tensorboard="true").code == 0
    curves = events.EventAccumulator("run/tensorboard").Reload()
    assert {"loss/train", "lr/train", "top1/val", "loss/val"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("loss/train")] == [1, 2, 3, 4]
    assert [event.step for event in curves.Scalars("loss/val")] == [2, 4]


# What the words on the command line stand for


def test_short_forms_stand_for_full_keys(shell):
    config = resolve("digits", ("data=photos", "epochs=3", "lr=0.5", "batch_size=7", "image_size=32", "channels=3"))
    assert (config.data.path, config.data.channels) == ("photos", 3)
    assert (config.schedule.epochs, config.schedule.lr, config.schedule.batch_size) == (3.0, 0.5, 7)
    assert config.model.image_size == 32


def test_steps_take_the_place_of_a_recipes_epochs_and_the_other_way_round():
    assert resolve("digits", ("steps=5",)).schedule.epochs is None
    assert resolve("folder", ("epochs=5",)).schedule.steps is None
    assert full(["epochs=2", "steps=3"]) == ["schedule.epochs=2", "schedule.steps=3"]


def test_a_recipe_comes_before_a_folder_of_its_name(shell):
    photos(Path("digits"), each=1)
    assert resolve("digits", ()) == find("digits").make()
    assert resolve("./digits", ()).data.path == "./digits"
    assert resolve("Digits", ()) == find("digits").make()


def test_naming_another_model_means_its_shape_too():
    config = resolve("folder", ("model=B/16",)).model
    assert (config.name, config.patch_size, config.settings) == ("B/16", None, ())
    own = resolve("folder", ("model=B/16", 'model.settings=["depth=1"]', "model.patch_size=8")).model
    assert (own.patch_size, own.settings) == (8, ("depth=1",))
    kept = resolve("imagenet-b16", ("model=L/16",)).model
    assert [each for each in kept.settings if each.startswith("dropout")]  # not a matter of shape


def test_a_file_says_what_differs_from_a_recipe(shell):
    text = 'base = "folder"\nseed = 3\n[schedule]\nlr = 0.25\n[data]\npath = "photos"\n'
    Path("my.toml").write_text(text, encoding="utf-8")
    config = resolve("my.toml", ("lr=0.5",))
    assert (config.seed, config.schedule.lr, config.data.path) == (3, 0.5, "photos")
    assert config.augment == find("folder").make().augment


def test_the_resolved_settings_can_be_fed_back(shell):
    shell.train("photos", "run")
    again = shell("train", "run/config.toml", "--out", "again")
    assert again.code == 0
    assert load_toml("run/config.toml", RunConfig, recipes={}) == load_toml("again/config.toml", RunConfig, recipes={})
    assert Path("run/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


def test_assignments_of_the_tests_replace_the_usual_ones():
    assert assigned({"lr": 1, "steps": 2}, {"lr": 3, "steps": None, "keep__last": 4}) == ["lr=3", "keep.last=4"]
