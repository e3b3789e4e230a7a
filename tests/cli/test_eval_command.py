"""`vitkit eval`: metrics, classes by name, escaping and unreadable files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.tiny_runs import Shell, photos
from PIL import Image

import vitkit
from vitkit.api import progress
from vitkit.cli.main import main

CLASSES = ["<script>alert(1)</script>", "cat", "dog\x1b[31m", "owl"]


def manifest(folder: Path, numbers: list[int]) -> None:
    """List the photos of some of the classes, in this order, under the classes' own names."""
    rows = [f"{number}/{index:02}.png,{CLASSES[number]}" for number in numbers for index in range(12)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on four classes, two of them with hostile names."""
    path = tmp_path_factory.mktemp("eval")
    photos(path / "photos", ["0", "1", "2", "3"], each=12)
    manifest(path / "photos", [0, 1, 2, 3])
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8"]
    settings = ['model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]', "steps=3", "batch_size=8", "workers=0"]
    assert main(["train", str(path / "photos"), "--out", str(path / "run"), *shape, *settings]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_json_has_the_stable_keys(shell):
    shutil.copytree("photos", "others")
    result = shell("eval", "run", "others", "--workers", "0", "--json")
    assert result.code == 0
    actual = result.json
    assert {
        "top1",
        "top5",
        "count",
        "per_class",
        "ece",
        "nll",
        "intervals",
        "confusion",
        "split",
        "skipped",
    } <= actual.keys()
    assert actual["count"] == 48
    assert actual["split"] == "all"
    assert actual["skipped"] == []
    assert 0 <= actual["top1"] <= actual["top5"] <= 1
    low, high = actual["intervals"]["top1"]
    assert low <= actual["top1"] <= high
    assert [each["name"] for each in actual["per_class"]] == CLASSES
    assert sum(actual["confusion"]["count"]) == 48
    assert all(actual["confusion"]["count"])  # only pairs that occur


def test_names_are_escaped_in_terminal_and_page(shell):
    result = shell("eval", "run", "photos", "--workers", "0")
    assert result.code == 0
    assert "dog\\x1b[31m" in result.out
    assert "\x1b" not in result.out + result.stderr
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "\x1b" not in page


def test_classes_are_matched_by_name(shell):
    shutil.copytree("photos", "others")
    whole = shell("eval", "run", "others", "--workers", "0", "--json").json
    shutil.copytree("photos", "some")
    manifest(Path("some"), [3, 1])
    some = shell("eval", "run", "some", "--workers", "0", "--json").json
    assert some["count"] == 24
    assert [each["count"] for each in some["per_class"]] == [0, 12, 0, 12]
    pairs = [list(zip(*each["confusion"].values(), strict=True)) for each in (some, whole)]
    assert pairs[0] == [pair for pair in pairs[1] if pair[0] in (1, 3)]


def test_split_option_and_default(shell):
    for split in ("train", "test"):
        photos(Path("splits", split), ["cat", "owl"], each=2 if split == "test" else 3)
    counts = {}
    for option in ((), ("--split", "train")):
        result = shell("eval", "run", "splits", "--workers", "0", "--json", *option).json
        counts[result["split"]] = result["count"]
    assert counts == {"test": 4, "train": 6}


def test_unreadable_files_are_skipped(shell):
    photos(Path("holidays"), ["cat", "owl"], each=3)
    Path("holidays/cat/\x1b[2Jgone.png").write_bytes(b"")
    result = shell("eval", "run", "holidays", "--workers", "0", "--json")
    assert result.code == 0
    assert result.json["count"] == 6
    assert result.json["skipped"] == [{"file": "cat/\x1b[2Jgone.png", "reason": "the file is empty"}]
    assert "warning: skipped cat/\\x1b[2Jgone.png: the file is empty\n" in result.stderr
    assert "\x1b" not in result.out + result.stderr


def test_only_first_unreadable_files_are_named(shell):
    photos(Path("holidays"), ["cat", "owl"], each=3)
    for number in range(30):
        Path(f"holidays/cat/bad-{number:02}.png").write_bytes(b"")
    result = shell("eval", "run", "holidays", "--workers", "0", "--json")
    assert len(result.json["skipped"]) == 30
    assert result.stderr.count("warning: skipped cat/") == 20
    assert "warning: skipped 10 more" in result.stderr


def test_result_of_a_run_equals_eval(shell):
    """The same images, read by another command, give the same numbers."""
    photos(Path("data/train"), each=8)
    photos(Path("data/test"), each=5)
    summary = shell.train("data", "own", "--json").json
    assert summary["evaluated_on"] == "test"
    evaluated = shell("eval", "own", "data", "--workers", "0", "--json").json
    assert "confusion" not in summary["result"]
    with np.load("own/confusion.npz", allow_pickle=False) as file:
        assert evaluated["confusion"] == {name: file[name].tolist() for name in ("row", "column", "count")}
    for key in ("top1", "top5", "count", "ece", "nll"):
        assert evaluated[key] == pytest.approx(summary["result"][key], abs=1e-6)  # batches may be of other sizes


def test_batch_size_and_workers_do_not_matter(shell):
    usual = shell("eval", "run", "photos", "--workers", "0", "--json").json
    other = shell("eval", "run", "photos", "--workers", "1", "--batch-size", "5", "--json").json
    assert other["confusion"] == usual["confusion"]
    assert other["nll"] == pytest.approx(usual["nll"], abs=1e-5)  # sums of other sizes round otherwise


def test_json_comes_with_progress_on_stderr(shell, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)  # a line for every batch
    result = shell("eval", "run", "photos", "--workers", "0", "--batch-size", "2", "--json")
    assert result.json["count"] == 4
    assert "evaluating: 2/4" in result.stderr
    assert "evaluating: 4/4" in result.stderr


def test_gray_images_are_evaluated(shell):
    photos(Path("gray"), ["cat", "owl"], each=2)
    for path in Path("gray").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert shell("eval", "run", "gray", "--workers", "0", "--json").json["count"] == 4


def test_labels_are_stored_unchanged(trained):
    assert json.loads((trained / "run" / "labels.json").read_bytes()) == CLASSES


def test_own_dataset_uses_held_out_images(shell: Shell) -> None:
    result = shell("eval", "run", "photos", "--json")
    held_out = json.loads(Path("run/data.json").read_bytes())["images"]["val"]
    assert (result.json["split"], result.json["count"]) == ("val", held_out)


def test_test_set_of_one_class_is_evaluated(shell: Shell) -> None:
    shutil.copytree("photos/1", "one/cat")
    Path("one/cat/notes.txt").write_text("", encoding="utf-8")
    result = shell("eval", "run", "one", "--workers", "0", "--json")
    assert (result.code, result.json["count"]) == (0, 12)
    assert "left out 1 file that is not an image (1 .txt): cat/notes.txt" in result.stderr


def test_training_images_give_a_warning(shell: Shell) -> None:
    assert "may have seen them" in shell("eval", "run", "photos", "--split", "train").stderr


def test_headless_model_is_rejected(shell: Shell, tmp_path: Path) -> None:
    vitkit.save(vitkit.create("Ti/16", image_size=16, num_classes=0), tmp_path / "features")
    result = shell("eval", "features", "digits")
    assert result.code == 1
    assert "the model has no classes" in result.stderr
    assert "add classes with fewshot(save=…) or finetune" in result.stderr
