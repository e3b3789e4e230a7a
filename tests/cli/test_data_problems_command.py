"""`vitkit data problems`: copies across splits and wrong labels are named, in a page and in tables one can act on."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli.tiny_runs import Shell, assigned, photos
from PIL import Image, ImageDraw

from vitkit.cli.main import main

SHAPE = {
    "model.name": "Ti/16",
    "image_size": 16,
    "model.patch_size": 8,
    "model.settings": '["width=16","heads=2","depth=1","mlp_dim=16"]',
    "steps": 2,
    "batch_size": 8,
    "workers": 0,
}


def picture(number: int, tint: int) -> Image.Image:
    """Shapes of one of three colours, on a ground of its own."""
    rng = np.random.default_rng(number)
    drawing = Image.new("RGB", (48, 48), tuple(rng.integers(0, 60, 3).tolist()))
    pen = ImageDraw.Draw(drawing)
    for _ in range(8):
        x, y, side = rng.uniform(0, 40), rng.uniform(0, 40), rng.uniform(5, 20)
        colour = [int(rng.integers(0, 60))] * 3
        colour[tint] = int(rng.integers(180, 256))
        pen.ellipse((x, y, x + side, y + side * rng.uniform(0.4, 1.5)), fill=tuple(colour))
    return drawing


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with three copies across its splits and two wrong labels, and a model that knows colours."""
    place = tmp_path_factory.mktemp("problems")
    for split, first, each in (("train", 0, 30), ("test", 1000, 10)):
        for tint, name in enumerate(("red", "green", "blue")):
            folder = place / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(each):
                picture(first + 100 * tint + number, tint).save(folder / f"{number:02}.png")
    for number in (1, 2, 3):
        picture(100 + number, 1).resize((40, 40)).save(place / "data/test/green" / f"copy-{number}.jpg", quality=80)
    (place / "data/train/red/05.png").rename(place / "data/train/blue/was-red.png")
    (place / "data/test/green/05.png").rename(place / "data/test/red/was-green.png")
    photos(place / "photos", ("a", "b", "c"), each=6)
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *assigned(SHAPE, {})]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("data", "run"):
        (tmp_path / name).symlink_to(made / name)
    return Shell(capsys)


COPIES = {
    ("green/01.png", "green/copy-1.jpg"),
    ("green/02.png", "green/copy-2.jpg"),
    ("green/03.png", "green/copy-3.jpg"),
}


def pairs(found: dict[str, list[dict[str, str]]]) -> set[tuple[str, str]]:
    return {
        (row["file"].removeprefix("train/"), row["other_file"].removeprefix("test/"))
        for row in found["near_duplicates"]
    }


def test_copies_are_found_without_a_model_and_labels_are_said_to_need_one(shell: Shell) -> None:
    said = shell("data", "problems", "data", "--out", "out", "--workers", "0", "--json")
    assert said.code == 0
    assert pairs(said.json) == COPIES
    assert said.json["leaked"] == {"train": 3, "test": 3}
    assert said.json["mislabelled"] is None
    assert {path.name for path in Path("out").iterdir()} == {"near_duplicates.csv", "problems.json", "report.html"}
    assert json.loads(Path("out/problems.json").read_bytes()) == said.json
    assert "--weights" in shell("data", "problems", "data", "--out", "out", "--workers", "0").out


def test_with_a_model_wrong_labels_are_found_too(shell: Shell) -> None:
    arguments = ("data", "problems", "data", "--weights", "run", "--out", "out", "--workers", "0")
    said = shell(*arguments, "--probability", "--json")
    assert said.code == 0
    assert pairs(said.json) >= COPIES
    doubted = {Path(row["file"]).name: row for row in said.json["mislabelled"]}
    assert {"was-red.png", "was-green.png"} <= doubted.keys()
    assert len(doubted) <= 4  # of 126; a model of two steps may err on one or two more
    row = doubted["was-red.png"]
    assert (row["split"], row["given"], row["suggested"]) == ("train", "blue", "red")
    assert 0 <= row["probability"] <= 1
    table = list(csv.DictReader(Path("out/mislabelled.csv").read_text(encoding="utf-8").splitlines()))
    assert [each["file"] for each in table] == [each["file"] for each in said.json["mislabelled"]]
    again = shell(*arguments)
    assert "is blue, or red?" in again.out


def test_within_one_split_copies_are_looked_for_by_themselves(shell: Shell, tmp_path: Path) -> None:
    photos(tmp_path / "own", each=4, side=40)
    Image.open("own/cat/01.png").save("own/dog/again.jpg", quality=90)
    said = shell("data", "problems", "own", "--out", "out", "--workers", "0", "--json")
    [pair] = said.json["near_duplicates"]
    assert {Path(pair["file"]).name, Path(pair["other_file"]).name} == {"01.png", "again.jpg"}
    assert {pair["class"], pair["other_class"]} == {"cat", "dog"}
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "With two labels: 1" in page


def test_bad_files_are_named_and_left_out(shell: Shell, tmp_path: Path) -> None:
    photos(tmp_path / "own", each=3)
    (tmp_path / "own" / "cat" / "gone.png").write_bytes(b"")
    said = shell("data", "problems", "own", "--out", "out", "--workers", "0", "--json")
    assert said.json["bad"] == [{"file": "cat/gone.png", "reason": "the file is empty", "split": "all"}]
    assert "left out cat/gone.png" in said.talk


def test_hostile_names_steer_neither_terminal_nor_page(shell: Shell, tmp_path: Path) -> None:
    photos(tmp_path / "own", ["<b onclick=x>", "dog\x1b[31m"], each=3, side=40)
    Image.open("own/dog\x1b[31m/01.png").save("own/<b onclick=x>/\x1b[2Jagain.png")
    said = shell("data", "problems", "own", "--out", "out", "--workers", "0")
    assert said.code == 0
    assert "\x1b" not in said.out + said.talk
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "<b onclick" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "--out", "out", "--probability"), "need --weights"),
        (("nowhere", "--out", "out"), "nowhere"),
        (("data", "--out", "out", "--weights", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    said = shell("data", "problems", *arguments)
    assert said.code in (1, 2)
    assert message in said.errors[0]
    assert not Path("out").exists()


def test_help_does_not_import_torch() -> None:
    call = "from vitkit.cli.main import main; main(['data', 'problems', '--help'])"
    code = f"import sys; {call}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
