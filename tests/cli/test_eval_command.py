"""`vitkit eval`: a model is judged on images of its classes, however few, in whatever order, whatever their names."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.tiny_runs import Shell, photos
from PIL import Image

import vitkit
from vitkit.cli.main import main

CLASSES = ["<script>alert(1)</script>", "cat", "dog\x1b[31m", "owl"]


def manifest(folder: Path, numbers: list[int]) -> None:
    """List the photos of some of the classes, in this order, under the classes' own names."""
    rows = [f"{number}/{index:02}.png,{CLASSES[number]}" for number in numbers for index in range(12)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on four classes, two of them with names to be careful with, and the photos it learned from."""
    place = tmp_path_factory.mktemp("judged")
    photos(place / "photos", ["0", "1", "2", "3"], each=12)
    manifest(place / "photos", [0, 1, 2, 3])
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8"]
    settings = ['model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]', "steps=3", "batch_size=8", "workers=0"]
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *shape, *settings]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "run"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_json_has_what_scripts_rely_on(shell):
    shutil.copytree("photos", "others")
    said = shell("eval", "run", "others", "--workers", "0", "--json")
    assert said.code == 0
    found = said.json
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
        "bad",
    } <= found.keys()
    assert found["count"] == 48
    assert found["split"] == "all"
    assert found["bad"] == []
    assert 0 <= found["top1"] <= found["top5"] <= 1
    low, high = found["intervals"]["top1"]
    assert low <= found["top1"] <= high
    assert [each["name"] for each in found["per_class"]] == CLASSES
    assert np.sum(found["confusion"]) == 48


def test_names_cannot_steer_the_terminal_or_the_page(shell):
    said = shell("eval", "run", "photos", "--workers", "0")
    assert said.code == 0
    assert "dog\\x1b[31m" in said.out
    assert "\x1b" not in said.out + said.talk
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "\x1b" not in page


def test_classes_are_found_by_name_in_any_order_and_number(shell):
    shutil.copytree("photos", "others")
    whole = shell("eval", "run", "others", "--workers", "0", "--json").json
    shutil.copytree("photos", "some")
    manifest(Path("some"), [3, 1])
    some = shell("eval", "run", "some", "--workers", "0", "--json").json
    assert some["count"] == 24
    assert [each["count"] for each in some["per_class"]] == [0, 12, 0, 12]
    for number in (1, 3):
        assert some["confusion"][number] == whole["confusion"][number]


def test_the_split_may_be_chosen_and_test_is_preferred(shell):
    for split in ("train", "test"):
        photos(Path("splits", split), ["cat", "owl"], each=2 if split == "test" else 3)
    counts = {}
    for option in ((), ("--split", "train")):
        found = shell("eval", "run", "splits", "--workers", "0", "--json", *option).json
        counts[found["split"]] = found["count"]
    assert counts == {"test": 4, "train": 6}


def test_bad_files_are_named_and_left_out(shell):
    photos(Path("holidays"), ["cat", "owl"], each=3)
    Path("holidays/cat/\x1b[2Jgone.png").write_bytes(b"")
    said = shell("eval", "run", "holidays", "--workers", "0", "--json")
    assert said.code == 0
    assert said.json["count"] == 6
    assert said.json["bad"] == [{"file": "cat/\x1b[2Jgone.png", "reason": "the file is empty"}]
    assert "warning: left out cat/\\x1b[2Jgone.png: the file is empty\n" in said.talk
    assert "\x1b" not in said.out + said.talk


def test_of_very_many_bad_files_the_first_are_named(shell):
    photos(Path("holidays"), ["cat", "owl"], each=3)
    for number in range(30):
        Path(f"holidays/cat/bad-{number:02}.png").write_bytes(b"")
    said = shell("eval", "run", "holidays", "--workers", "0", "--json")
    assert len(said.json["bad"]) == 30
    assert said.talk.count("warning: left out cat/") == 20
    assert "warning: left out 10 more" in said.talk


def test_the_judgement_of_a_run_is_that_of_eval(shell):
    """The same images, read by another command, give the same numbers."""
    photos(Path("data/train"), each=8)
    photos(Path("data/test"), each=5)
    summary = shell.train("data", "own", "--json").json
    assert summary["judged_on"] == "test"
    judged = shell("eval", "own", "data", "--workers", "0", "--json").json
    assert judged["confusion"] == summary["result"]["confusion"]
    for key in ("top1", "top5", "count", "ece", "nll"):
        assert judged[key] == pytest.approx(summary["result"][key], abs=1e-6)  # batches may be of other sizes


def test_batch_size_and_workers_change_nothing(shell):
    usual = shell("eval", "run", "photos", "--workers", "0", "--json").json
    other = shell("eval", "run", "photos", "--workers", "1", "--batch-size", "5", "--json").json
    assert other["confusion"] == usual["confusion"]
    assert other["nll"] == pytest.approx(usual["nll"], abs=1e-5)  # sums of other sizes round otherwise


def test_grey_photos_are_judged_too(shell):
    photos(Path("grey"), ["cat", "owl"], each=2)
    for path in Path("grey").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    assert shell("eval", "run", "grey", "--workers", "0", "--json").json["count"] == 4


def test_labels_are_kept_as_they_were_written(trained):
    assert json.loads((trained / "run" / "labels.json").read_bytes()) == CLASSES


def test_on_its_own_folder_a_model_is_judged_by_what_was_held_out(shell: Shell) -> None:
    said = shell("eval", "run", "photos", "--json")
    held_out = json.loads(Path("run/data.json").read_bytes())["images"]["val"]
    assert (said.json["split"], said.json["count"]) == ("val", held_out)


def test_on_what_it_learned_from_a_model_is_judged_with_a_warning(shell: Shell) -> None:
    assert "may have seen them" in shell("eval", "run", "photos", "--split", "train").talk


def test_a_model_without_classes_has_nothing_to_be_judged_by(shell: Shell, tmp_path: Path) -> None:
    vitkit.save(vitkit.create("Ti/16", image_size=16, classes=0), tmp_path / "features")
    said = shell("eval", "features", "digits")
    assert said.code == 1
    assert "the model has no classes to answer with" in said.talk
    assert "vitkit finetune" in said.talk
