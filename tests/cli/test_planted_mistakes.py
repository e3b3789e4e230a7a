"""Mistakes of users: each gives one message with a hint, and leaves nothing behind."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.tiny_runs import CommandResult, Shell, photos, tree

from vitkit.cli.main import main

FAILURE, USAGE_ERROR = 1, 2


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with photos/ and a run on them, which no test changes."""
    directory = tmp_path_factory.mktemp("mistakes")
    photos(directory / "photos")
    tiny = ["model=Ti/16", "image_size=16", "model.patch_size=8", 'model.settings=["width=16","heads=2","depth=1"]']
    length = ["steps=2", "batch_size=8", "workers=0"]
    assert main(["train", str(directory / "photos"), "--out", str(directory / "run"), *tiny, *length]) == 0
    return directory


@pytest.fixture
def directory(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with photos/ and run/."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        shutil.copytree(shared / name, tmp_path / name)
    return tmp_path


def one_message(said: CommandResult, *, names: str, cure: str | None, code: int = FAILURE) -> None:
    """Assert one error line with `names`, one hint line with `cure`, and no traceback."""
    assert said.code == code, said.stderr
    assert len(said.errors) == 1, said.stderr
    assert names in said.errors[0]
    assert "bug in vitkit" not in said.stderr
    assert "Traceback" not in said.stderr
    assert said.out == ""
    assert len(said.errors[0]) < 450, "the line is too long"
    if cure is None:
        assert said.hints == []
    else:
        assert len(said.hints) == 1
        assert cure in said.hints[0]
    assert said.stderr.rstrip("\n").splitlines()[-1] in (said.hints or said.errors)


# Images


def empty_directory(directory: Path) -> str:
    (directory / "data").mkdir()
    return "data"


def one_class(directory: Path) -> str:
    photos(directory / "data", ["cat"], each=2)
    return "data"


def missing_directory(directory: Path) -> str:
    return "somewhere/photos"


def misspelled_name(directory: Path) -> str:
    return "photo"


def text_file(directory: Path) -> str:
    (directory / "notes.txt").write_text("nothing to see", encoding="utf-8")
    return "notes.txt"


def too_many_broken(directory: Path) -> str:
    for path in sorted((directory / "photos").rglob("*.png"))[::3]:
        path.write_bytes(b"this is no image")
    return "photos"


def no_labels(directory: Path) -> str:
    (directory / "loose").mkdir()
    for path in (directory / "photos" / "cat").iterdir():
        path.rename(directory / "loose" / path.name)
    return "loose"


def only_a_test_split(directory: Path) -> str:
    photos(directory / "data" / "test", each=2)
    photos(directory / "data" / "val", each=2)
    return "data"


@pytest.mark.parametrize(
    ("plant", "names", "cure"),
    [
        (one_class, "only one class: cat", "one directory per class"),
        (missing_directory, "somewhere/photos does not exist", "give a directory of images, or a recipe"),
        (misspelled_name, "photo is neither a recipe nor a directory", "did you mean photos?"),
        (too_many_broken, "14 of 40 images cannot be used: cat/00.png: not a JPEG", "vitkit data check"),
        (no_labels, "loose: the images have no labels", "a directory of their own, or list file_name,label"),
        (only_a_test_split, "data: there is no training split", None),
    ],
)
def test_unusable_training_images(directory, shell, plant, names, cure):
    data = plant(directory)
    before = tree(directory)
    one_message(shell.train(data, "new/run"), names=names, cure=cure)
    assert tree(directory) == before  # not even an empty directory is left


@pytest.mark.parametrize("plant", [empty_directory, text_file])
def test_path_without_images(directory, shell, plant):
    data = plant(directory)
    before = tree(directory)
    result = shell.train(data, "new")
    assert result.code == FAILURE
    assert len(result.errors) == len(result.hints) == 1
    assert result.errors[0].startswith(f"error: {data}")
    assert "use one directory per class" in result.hints[0]
    assert tree(directory) == before


@pytest.mark.parametrize(
    ("line", "names", "cure"),
    [
        ("cat/01.png", "list/metadata.csv, line 3: cat/01.png has no label", "fill in the column label"),
        ("cat/01.png,", "list/metadata.csv, line 3: cat/01.png has no label", "fill in the column label"),
        (
            "cat/99.png,cat",
            "list/metadata.csv, line 3: no file cat/99.png",
            "relative to the directory of the manifest",
        ),
        ("../photos/cat/01.png,cat", "list/metadata.csv, line 3: '../photos/cat/01.png'", "without .."),
        ("/etc/passwd,cat", "list/metadata.csv, line 3: '/etc/passwd' is not a relative path", "relative to"),
    ],
)
def test_manifest_mistake_is_named_with_its_line(directory, shell, line, names, cure):
    (directory / "photos").rename(directory / "list")
    text = f"file_name,label\ncat/00.png,cat\n{line}\ndog/00.png,dog\n"
    (directory / "list" / "metadata.csv").write_text(text, encoding="utf-8")
    one_message(shell.train("list", "new"), names=names, cure=cure)
    assert not (directory / "new").exists()


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
def test_mistake_in_a_settings_file(directory, shell, text, names, cure):
    (directory / "my.toml").write_text(text, encoding="utf-8")
    one_message(shell("train", "my.toml", "--out", "new"), names=names, cure=cure)
    assert not (directory / "new").exists()


@pytest.mark.parametrize(
    ("settings", "names", "cure"),
    [
        ({"lr": "abc"}, 'schedule.lr is not valid (expected a number, got "abc")', None),
        ({"lr": "-1"}, "schedule.lr must be positive", None),
        ({"lr": "nan"}, "schedule.lr must be positive", None),
        ({"lr": "inf"}, "schedule.lr must be finite", None),
        ({"optimizer.layer_decay": 0}, "optimizer.layer_decay is not a fraction (expected 0 < fraction ≤ 1", None),
        ({"image_size": 20}, "the patch does not divide the image (expected multiples of 8×8, got 20×20)", "16×16"),
        ({"model.name": "B/99"}, "unknown model B/99", "vitkit models lists every name"),
        ({"model.name": "none"}, "no model is set", "set model.name"),
        ({"schedule.accumulate": 3}, "the batch cannot be divided equally", "schedule.batch_size"),
        ({"epochs": 3}, "either schedule.epochs or schedule.steps", "to none"),
        ({"device": "gpu"}, "no device gpu", "vitkit doctor"),
        ({"parallel.mode": "ddp"}, "parallel.mode=ddp needs more than one process", "torchrun --nproc-per-node"),
        ({"parallel.mode": "dpp"}, "parallel.mode is not valid", "did you mean ddp?"),
        ({"channels": 4, "augment.color_jitter": 0.4}, "color_jitter is only for gray or RGB", "set color_jitter to 0"),
        ({"seed": -1}, "seed is out of range (expected 0 ≤ seed < 2^63, got -1)", None),
        ({"data.val_fraction": 1.5}, "data.val_fraction is not a fraction (expected 0 ≤ fraction < 1, got 1.5)", None),
        ({"data.layout": "folder"}, "there is no layout called folder", "did you mean folders?"),
        ({"epoch": 3}, "epoch is not a known key", "did you mean epochs?"),
        ({"quality": 3}, "quality is not a known key", "image_size, lr, epochs"),
        ({"schedule.lrr": 3}, "schedule.lrr is not a known key", "did you mean lr?"),
        ({"model.init": "run"}, "model.name and model.init are both set", "model.name=none"),
    ],
)
def test_mistake_in_an_assignment(directory, shell, settings, names, cure):
    one_message(shell.train("photos", "new", **settings), names=names, cure=cure)
    assert not (directory / "new").exists()


def test_assignment_without_a_value(directory, shell):
    one_message(shell.train("photos", "new", "lr"), names="cannot read the assignment 'lr'", cure=None)


def test_key_assigned_twice(directory, shell):
    one_message(shell.train("photos", "new", "schedule.lr=1", lr=2), names="schedule.lr is assigned twice", cure=None)


def test_unknown_recipe(directory, shell):
    one_message(shell.train("digit", "new"), names="digit is neither a recipe nor a directory", cure="mean digits?")
    one_message(shell.train("qqqq", "new"), names="qqqq is neither", cure="vitkit recipes lists the recipes")


# Weights


@pytest.mark.parametrize("command", ["finetune", "eval"])
@pytest.mark.parametrize(
    ("weights", "names", "cure"),
    [
        (
            "photos",
            "photos: no model in this directory (expected a directory with checksums.json",
            "--out directory of a finished run",
        ),
        ("nowhere", "nowhere: no such file or directory", "hub:owner/name"),
        ("damaged", "damaged/model.safetensors: damaged", "copy it again"),
        ("torn", "torn/labels.json: missing", "incomplete"),
    ],
)
def test_directory_without_a_model(directory, shell, command, weights, names, cure):
    for name in ("damaged", "torn"):
        shutil.copytree(directory / "run", directory / name)
    content = bytearray((directory / "damaged" / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (directory / "damaged" / "model.safetensors").write_bytes(content)
    (directory / "torn" / "labels.json").unlink()
    result = shell("eval", weights, "photos") if command == "eval" else shell.finetune(weights, "photos", "new")
    one_message(result, names=names, cure=cure)
    assert not (directory / "new").exists()


@pytest.mark.parametrize(
    ("settings", "names", "cure"),
    [
        ({"model.settings": '["width=32"]'}, "does not fit the model", "width 16 against 32"),
        ({"model.name": "B/16"}, "model.name and model.init are both set", "model.name=none"),
    ],
)
def test_weights_of_another_model(directory, shell, settings, names, cure):
    one_message(shell.finetune("run", "photos", "new", **settings), names=names, cure=cure)
    assert not (directory / "new").exists()


def test_finetune_with_a_recipe_from_scratch(directory, shell):
    result = shell.finetune("run", "photos", "new", "--recipe", "digits")
    one_message(result, names="the recipe digits does not fine-tune", cure="finetune-folder")
    result = shell.finetune("run", "photos", "new", "--recipe", "finetune-foldr")
    one_message(result, names="no recipe is called finetune-foldr", cure="did you mean finetune-folder?")


def test_eval_on_unknown_classes(directory, shell):
    photos(directory / "birds", ["dog", "eagle", "owl"], each=2)
    result = shell("eval", "run", "birds")
    one_message(result, names="the model does not have the class eagle and 1 more", cure="fine-tune it on these")


def test_eval_on_unusable_data(directory, shell):
    one_message(shell("eval", "run", "photo"), names="photo does not exist", cure="did you mean photos?")
    one_message(shell("eval", "run", "photos", "--split", "val"), names="photos has no split val", cure=None)
    one_message(shell("eval", "run", "photos", "--device", "gpu"), names="no device gpu", cure="vitkit doctor")
    for path in (directory / "photos").rglob("*.png"):
        path.write_bytes(b"")
    result = shell("eval", "run", "photos", "--workers", "0")
    one_message(
        result, names="none of the 40 images can be read; cat/00.png: the file is empty", cure="data check photos"
    )
    no_labels(directory)
    one_message(
        shell("eval", "run", "loose"), names="the images have no labels", cure="a CSV file with file_name,label"
    )


# Sweeps


def test_sweep_without_held_out_images(directory, shell):
    result = shell.finetune("run", "photos", "new", "--sweep", **{"data.val_fraction": 0})
    one_message(result, names="a sweep chooses the learning rate on held-out images", cure="data.val_fraction=0.1")
    assert not (directory / "new").exists()


@pytest.mark.parametrize("rates", ["abc", "0.1,-1", "", "0.1;0.2", "inf"])
def test_invalid_rates(directory, shell, rates):
    result = shell.finetune("run", "photos", "new", "--rates", rates)
    one_message(result, names="--rates", cure="vitkit finetune --help", code=USAGE_ERROR)


def test_mistake_in_a_sweep_leaves_nothing(directory, shell):
    one_message(shell.finetune("run", "photo", "new", "--sweep"), names="photo does not exist", cure="mean photos?")
    assert not (directory / "new").exists()


# The run directory


def test_directory_of_another_run(directory, shell):
    assert shell.train("photos", "mine").code == 0
    before = tree(directory)
    result = shell.train("photos", "mine", lr=0.5)
    one_message(result, names="mine holds a run with schedule.lr=0.001, not 0.5", cure="another out")
    assert tree(directory) == before


def test_directory_with_other_files(directory, shell):
    (directory / "thesis").mkdir()
    (directory / "thesis" / "data.json").write_text("precious", encoding="utf-8")
    one_message(shell.train("photos", "thesis"), names="thesis holds other files: data.json", cure="--out")
    assert (directory / "thesis" / "data.json").read_text(encoding="utf-8") == "precious"


def test_file_in_place_of_the_run_directory(directory, shell):
    (directory / "taken").write_text("precious", encoding="utf-8")
    one_message(shell.train("photos", "taken"), names="taken", cure="--out")
    assert (directory / "taken").read_text(encoding="utf-8") == "precious"


def test_read_only_directory(directory, shell, monkeypatch):
    (directory / "new").mkdir()
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    one_message(shell.train("photos", "new"), names="new: the directory is not writable", cure="--out")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    one_message(shell.train("photos", "other"), names="other: Permission denied", cure="--out")


@pytest.mark.parametrize("writes", [0, 3, 12, 28, 34])
def test_full_disk(directory, shell, monkeypatch, writes):
    """At any write: the run reports it, and ends as any other when there is space again."""
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
        result = shell.train("photos", "new")
    one_message(result, names="new: No space left on device", cure="free disk space and run the same command again")
    if not (directory / "new/checksums.json").exists():  # an incomplete artifact is not read, but a checkpoint is
        has_checkpoint = any((directory / "new/checkpoints").glob("*/*.safetensors"))
        assert shell("eval", "new", "photos").code == (0 if has_checkpoint else FAILURE)
    assert shell.train("photos", "new").code == 0
    assert shell.train("photos", "other").code == 0
    assert (directory / "new/model.safetensors").read_bytes() == (directory / "other/model.safetensors").read_bytes()


def test_corrected_command_can_use_the_same_directory(directory, shell):
    assert shell.train("folder", "new", data="photo").code == FAILURE
    assert shell.train("folder", "new", data="photos", channels=4).code == FAILURE
    assert shell.train("folder", "new", data="photos").code == 0


# The command itself


@pytest.mark.parametrize(
    ("arguments", "names", "cure"),
    [
        (["train"], "missing argument 'DATA|RECIPE|FILE.toml'", "vitkit train --help"),
        (["train", "photos", "--otu", "new"], "no such option '--otu'", "did you mean --out?"),
        (["finetune", "run"], "missing argument 'DATA'", "vitkit finetune --help"),
        (["eval", "run"], "missing argument 'DATA'", "vitkit eval --help"),
        (["eval", "run", "photos", "--batch-size", "0"], "--batch-size", "vitkit eval --help"),
    ],
)
def test_usage_error(directory, shell, arguments, names, cure):
    result = shell(*arguments)
    one_message(result, names=names, cure=cure, code=USAGE_ERROR)


def test_real_command_prints_two_lines_and_exits_with_1(directory):
    arguments = ["train", "photos", "--out", "new", "lr=abc"]
    ended = subprocess.run([sys.executable, "-m", "vitkit", *arguments], check=False, capture_output=True, text=True)
    result = CommandResult(ended.returncode, ended.stdout, ended.stderr)
    one_message(result, names='schedule.lr is not valid (expected a number, got "abc")', cure=None)
