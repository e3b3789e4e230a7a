"""What a user can get wrong: each mistake gives one clear message with its cure, and leaves nothing behind."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.tiny_runs import Said, Shell, photos, tree

from vitkit.cli.main import main

FAILED, USED_WRONGLY = 1, 2


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/ and a run on them, which no test changes."""
    place = tmp_path_factory.mktemp("mistakes")
    photos(place / "photos")
    tiny = ["model=Ti/16", "image_size=16", "model.patch_size=8", 'model.settings=["width=16","heads=2","depth=1"]']
    length = ["steps=2", "batch_size=8", "workers=0"]
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *tiny, *length]) == 0
    return place


@pytest.fixture
def place(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with photos/ and run/ in it, to make mistakes in."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        shutil.copytree(shared / name, tmp_path / name)
    return tmp_path


def one_message(said: Said, *, names: str, cure: str | None, code: int = FAILED) -> None:
    """One error line that names the thing, one hint line with the cure, and no traceback."""
    assert said.code == code, said.talk
    assert len(said.errors) == 1, said.talk
    assert names in said.errors[0]
    assert "not expected" not in said.talk
    assert "Traceback" not in said.talk
    assert said.out == ""
    assert len(said.errors[0]) < 450, "nobody reads such a line"
    if cure is None:
        assert said.hints == []
    else:
        assert len(said.hints) == 1
        assert cure in said.hints[0]
    assert said.talk.rstrip("\n").splitlines()[-1] in (said.hints or said.errors)


# Images


def empty_folder(place: Path) -> str:
    (place / "data").mkdir()
    return "data"


def one_class(place: Path) -> str:
    photos(place / "data", ["cat"], each=2)
    return "data"


def no_such_folder(place: Path) -> str:
    return "somewhere/photos"


def nearly_right_name(place: Path) -> str:
    return "photo"


def a_file_of_words(place: Path) -> str:
    (place / "notes.txt").write_text("nothing to see", encoding="utf-8")
    return "notes.txt"


def too_many_broken(place: Path) -> str:
    for path in sorted((place / "photos").rglob("*.png"))[::3]:
        path.write_bytes(b"this is no image")
    return "photos"


def no_labels(place: Path) -> str:
    (place / "loose").mkdir()
    for path in (place / "photos" / "cat").iterdir():
        path.rename(place / "loose" / path.name)
    return "loose"


def only_a_test_split(place: Path) -> str:
    photos(place / "data" / "test", each=2)
    photos(place / "data" / "val", each=2)
    return "data"


@pytest.mark.parametrize(
    ("plant", "names", "cure"),
    [
        (one_class, "one class only: cat", "folder of its own"),
        (no_such_folder, "nothing at somewhere/photos", "give a folder of images, or a recipe"),
        (nearly_right_name, "photo is neither a recipe nor a folder", "did you mean photos?"),
        (too_many_broken, "14 of 40 images cannot be used: cat/00.png: not a JPEG", "vitkit data check"),
        (no_labels, "loose: the images have no labels", "a folder of its own, or list file_name,label"),
        (only_a_test_split, "data: there is nothing to train on", None),
    ],
)
def test_images_that_cannot_be_learned_from(place, shell, plant, names, cure):
    data = plant(place)
    before = tree(place)
    one_message(shell.train(data, "new/run"), names=names, cure=cure)
    assert tree(place) == before  # not even an empty folder is left


@pytest.mark.parametrize("plant", [empty_folder, a_file_of_words])
def test_a_place_without_images(place, shell, plant):
    data = plant(place)
    before = tree(place)
    said = shell.train(data, "new")
    assert said.code == FAILED
    assert len(said.errors) == len(said.hints) == 1
    assert said.errors[0].startswith(f"error: {data}")
    assert "folders of images, one folder for each class" in said.hints[0]
    assert tree(place) == before


@pytest.mark.parametrize(
    ("line", "names", "cure"),
    [
        ("cat/01.png", "list/metadata.csv, line 3: cat/01.png has no label", "fill in the column label"),
        ("cat/01.png,", "list/metadata.csv, line 3: cat/01.png has no label", "fill in the column label"),
        ("cat/99.png,cat", "list/metadata.csv, line 3: no file cat/99.png", "relative to the manifest"),
        ("../photos/cat/01.png,cat", "list/metadata.csv, line 3: '../photos/cat/01.png'", "without .."),
        ("/etc/passwd,cat", "list/metadata.csv, line 3: '/etc/passwd' is not a relative path", "relative to"),
    ],
)
def test_a_mistake_in_a_manifest_is_named_with_its_line(place, shell, line, names, cure):
    (place / "photos").rename(place / "list")
    text = f"file_name,label\ncat/00.png,cat\n{line}\ndog/00.png,dog\n"
    (place / "list" / "metadata.csv").write_text(text, encoding="utf-8")
    one_message(shell.train("list", "new"), names=names, cure=cure)
    assert not (place / "new").exists()


# Settings


@pytest.mark.parametrize(
    ("text", "names", "cure"),
    [
        ("[optimizer]\nwieght_decay = 0.1\n", "my.toml: optimizer.wieght_decay is not a known key", "weight_decay?"),
        ("[optimizer\nweight_decay = 0.1\n", "my.toml: not a TOML file: Expected ']'", None),
        ('[schedule]\nlr = "fast"\n', 'my.toml: schedule.lr is not valid (expected a number, got "fast")', None),
        ('base = "foldr"\n', 'my.toml: there is no recipe "foldr"', "did you mean folder?"),
    ],
)
def test_a_mistake_in_a_settings_file(place, shell, text, names, cure):
    (place / "my.toml").write_text(text, encoding="utf-8")
    one_message(shell("train", "my.toml", "--out", "new"), names=names, cure=cure)
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("settings", "names", "cure"),
    [
        ({"lr": "abc"}, 'schedule.lr is not valid (expected a number, got "abc")', None),
        ({"lr": "-1"}, "schedule.lr must be positive", None),
        ({"lr": "nan"}, "schedule.lr must be positive", None),
        ({"image_size": 20}, "the patch does not divide the image (expected multiples of 8×8, got 20×20)", "16×16"),
        ({"model.name": "B/99"}, "no model is called B/99", "vitkit models lists every name"),
        ({"model.name": "none"}, "no model is named", "set model.name"),
        ({"schedule.accumulate": 3}, "the batch cannot be shared out equally", "schedule.batch_size"),
        ({"epochs": 3}, "either schedule.epochs or schedule.steps", "to none"),
        ({"device": "gpu"}, "no device gpu", "vitkit doctor"),
        ({"parallel.mode": "ddp"}, "parallel.mode=ddp needs more than one process", "torchrun --nproc-per-node"),
        ({"parallel.mode": "dpp"}, "parallel.mode is not valid", "did you mean ddp?"),
        ({"channels": 4, "augment.colour_jitter": 0.4}, "colour_jitter works on grey or RGB", "set colour_jitter to 0"),
        ({"seed": -1}, "seed is out of range (expected 0 ≤ seed < 2^63, got -1)", None),
        ({"data.val_share": 1.5}, "data.val_share is not a share (expected 0 ≤ share < 1, got 1.5)", None),
        ({"data.kind": "folder"}, "no kind of data is called folder", "did you mean folders?"),
        ({"epoch": 3}, "epoch is not a known key", "did you mean epochs?"),
        ({"quality": 3}, "quality is not a known key", "image_size, lr, epochs"),
        ({"schedule.lrr": 3}, "schedule.lrr is not a known key", "did you mean lr?"),
        ({"model.weights": "run"}, "model.weights already say which model it is", "model.name=none"),
    ],
)
def test_a_mistake_in_an_assignment(place, shell, settings, names, cure):
    one_message(shell.train("photos", "new", **settings), names=names, cure=cure)
    assert not (place / "new").exists()


def test_an_assignment_without_a_value(place, shell):
    one_message(shell.train("photos", "new", "lr"), names="cannot read the assignment 'lr'", cure=None)


def test_one_thing_assigned_twice(place, shell):
    one_message(shell.train("photos", "new", "schedule.lr=1", lr=2), names="schedule.lr is assigned twice", cure=None)


def test_a_recipe_that_does_not_exist(place, shell):
    one_message(shell.train("digit", "new"), names="digit is neither a recipe nor a folder", cure="mean digits?")
    one_message(shell.train("qqqq", "new"), names="qqqq is neither", cure="vitkit recipes lists the recipes")


# Weights


@pytest.mark.parametrize("command", ["finetune", "eval"])
@pytest.mark.parametrize(
    ("weights", "names", "cure"),
    [
        ("photos", "photos: no trained model here (expected a folder with checksums.json", "--out of a finished run"),
        ("nowhere", "nowhere: no trained model here", "--out of a finished run"),
        ("damaged", "damaged/model.safetensors: damaged", "copy it again"),
        ("torn", "torn/labels.json: missing", "not complete"),
    ],
)
def test_a_folder_that_is_no_model(place, shell, command, weights, names, cure):
    for name in ("damaged", "torn"):
        shutil.copytree(place / "run", place / name)
    content = bytearray((place / "damaged" / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (place / "damaged" / "model.safetensors").write_bytes(content)
    (place / "torn" / "labels.json").unlink()
    said = shell("eval", weights, "photos") if command == "eval" else shell.finetune(weights, "photos", "new")
    one_message(said, names=names, cure=cure)
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("settings", "names", "cure"),
    [
        ({"model.settings": '["width=32"]'}, "does not fit the model", "width 16 against 32"),
        ({"model.name": "B/16"}, "model.weights already say which model it is", "model.name=none"),
    ],
)
def test_weights_of_another_model(place, shell, settings, names, cure):
    one_message(shell.finetune("run", "photos", "new", **settings), names=names, cure=cure)
    assert not (place / "new").exists()


def test_fine_tuning_by_a_recipe_that_trains_from_scratch(place, shell):
    said = shell.finetune("run", "photos", "new", "--recipe", "digits")
    one_message(said, names="digits trains from scratch", cure="finetune-folder")
    said = shell.finetune("run", "photos", "new", "--recipe", "finetune-foldr")
    one_message(said, names="no recipe is called finetune-foldr", cure="did you mean finetune-folder?")


def test_judging_on_other_classes(place, shell):
    photos(place / "birds", ["dog", "eagle", "owl"], each=2)
    said = shell("eval", "run", "birds")
    one_message(said, names="the model does not know the class eagle and 1 more", cure="fine-tune it on these")


def test_judging_on_what_cannot_be_judged_on(place, shell):
    one_message(shell("eval", "run", "photo"), names="nothing at photo", cure="did you mean photos?")
    one_message(shell("eval", "run", "photos", "--split", "val"), names="photos has no split val", cure=None)
    one_message(shell("eval", "run", "photos", "--device", "gpu"), names="no device gpu", cure="vitkit doctor")
    for path in (place / "photos").rglob("*.png"):
        path.write_bytes(b"")
    said = shell("eval", "run", "photos", "--workers", "0")
    one_message(said, names="not one of 40 images can be read; cat/00.png: the file is empty", cure="data check photos")
    no_labels(place)
    one_message(shell("eval", "run", "loose"), names="the images have no labels", cure="a folder of its own")


# Sweeps


def test_a_sweep_that_holds_nothing_out(place, shell):
    said = shell.finetune("run", "photos", "new", "--sweep", **{"data.val_share": 0})
    one_message(said, names="a sweep chooses by held-out images", cure="data.val_share=0.1")
    assert not (place / "new").exists()


@pytest.mark.parametrize("rates", ["abc", "0.1,-1", "", "0.1;0.2", "inf"])
def test_rates_that_are_none(place, shell, rates):
    said = shell.finetune("run", "photos", "new", "--rates", rates)
    one_message(said, names="--rates", cure="vitkit finetune --help", code=USED_WRONGLY)


def test_a_mistake_in_a_sweep_leaves_nothing(place, shell):
    one_message(shell.finetune("run", "photo", "new", "--sweep"), names="nothing at photo", cure="mean photos?")
    assert not (place / "new").exists()


# The place of the run


def test_a_folder_of_another_run(place, shell):
    assert shell.train("photos", "mine").code == 0
    before = tree(place)
    said = shell.train("photos", "mine", lr=0.5)
    one_message(said, names="mine holds a run with another schedule.lr (expected 0.001, got 0.5)", cure="--out")
    assert tree(place) == before


def test_a_folder_with_other_things(place, shell):
    (place / "thesis").mkdir()
    (place / "thesis" / "data.json").write_text("precious", encoding="utf-8")
    one_message(shell.train("photos", "thesis"), names="thesis holds other things: data.json", cure="--out")
    assert (place / "thesis" / "data.json").read_text(encoding="utf-8") == "precious"


def test_a_file_where_the_folder_should_be(place, shell):
    (place / "taken").write_text("precious", encoding="utf-8")
    one_message(shell.train("photos", "taken"), names="taken", cure="--out")
    assert (place / "taken").read_text(encoding="utf-8") == "precious"


def test_a_place_where_nothing_can_be_written(place, shell, monkeypatch):
    (place / "new").mkdir()
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    one_message(shell.train("photos", "new"), names="new: nothing can be written here", cure="--out")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    one_message(shell.train("photos", "other"), names="other: Permission denied", cure="--out")


@pytest.mark.parametrize("writes", [0, 3, 12, 28, 34])
def test_a_disk_that_runs_full(place, shell, monkeypatch, writes):
    """Whenever it does: the run says so, and ends as any other when there is room again."""
    left = writes
    sync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        said = shell.train("photos", "new")
    one_message(said, names="new: No space left on device", cure="make room and run the same command again")
    if not (place / "new/checksums.json").exists():  # nothing half-written passes for a model
        assert shell("eval", "new", "photos").code == FAILED
    assert shell.train("photos", "new").code == 0
    assert shell.train("photos", "other").code == 0
    assert (place / "new/model.safetensors").read_bytes() == (place / "other/model.safetensors").read_bytes()


def test_a_mended_mistake_can_use_the_same_folder(place, shell):
    assert shell.train("folder", "new", data="photo").code == FAILED
    assert shell.train("folder", "new", data="photos", channels=4).code == FAILED
    assert shell.train("folder", "new", data="photos").code == 0


# The command itself


@pytest.mark.parametrize(
    ("arguments", "names", "cure"),
    [
        (["train"], "missing argument 'RECIPE'", "vitkit train --help"),
        (["train", "photos"], "missing option '--out'", "vitkit train --help"),
        (["train", "photos", "--otu", "new"], "no such option '--otu'", "did you mean --out?"),
        (["finetune", "run"], "missing argument 'DATA'", "vitkit finetune --help"),
        (["eval", "run"], "missing argument 'DATA'", "vitkit eval --help"),
        (["eval", "run", "photos", "--batch-size", "0"], "--batch-size", "vitkit eval --help"),
    ],
)
def test_a_command_used_wrongly(place, shell, arguments, names, cure):
    said = shell(*arguments)
    one_message(said, names=names, cure=cure, code=USED_WRONGLY)


def test_the_real_command_ends_with_two_lines_and_the_exit_code(place):
    arguments = ["train", "photos", "--out", "new", "lr=abc"]
    ended = subprocess.run([sys.executable, "-m", "vitkit", *arguments], check=False, capture_output=True, text=True)
    said = Said(ended.returncode, ended.stdout, ended.stderr)
    one_message(said, names='schedule.lr is not valid (expected a number, got "abc")', cure=None)
