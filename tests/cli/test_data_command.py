"""`vitkit data check`: what scripts rely on, and what a person sees."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from vitkit.cli.data import command
from vitkit.core.errors import DataError
from vitkit.data.source import Content, DataSet, Source


class Files(Source):
    """Images in a folder a class."""

    kind = "class folders"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.classes = tuple(sorted({path.parent.name for path in self.files}))
        self.labels = np.array([self.classes.index(path.parent.name) for path in self.files], dtype=np.int64)

    def name(self, index: int) -> str:
        return self.files[index].relative_to(self.folder).as_posix()

    def content(self, index: int) -> Content:
        return self.files[index].read_bytes()


@pytest.fixture(autouse=True)
def _a_simple_way_to_open_data(monkeypatch):
    def open_data(place: str | Path, *, kind: str | None = None) -> DataSet:
        if not Path(place).is_dir():
            raise DataError(f"{place}: no such folder")
        return DataSet(str(place), {kind or "all": Files(Path(place))})

    module = ModuleType("vitkit.data.sources.detect")
    module.open_data = open_data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number in range(12):
        path = folder / ("cat" if number < 7 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colours = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(colours).save(path)
    return folder


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["check", *map(str, arguments)], catch_exceptions=True)


def found(*arguments: str | Path) -> dict[str, object]:
    result = check(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_the_keys_that_scripts_rely_on(photos):
    assert found(photos) == {
        "place": str(photos),
        "kind": "class folders",
        "classes": ["cat", "dog"],
        "counts": {"cat": 7, "dog": 5},
        "images": 12,
        "unlabelled": 0,
        "splits": {"all": {"images": 12, "counts": {"cat": 7, "dog": 5}}},
        "bad": [],
        "sizes": {
            "height": {"minimum": 30, "median": 30, "maximum": 30},
            "width": {"minimum": 40, "median": 40, "maximum": 40},
        },
        "modes": {"PNG RGB": 12},
        "duplicates": [],
        "warnings": [],
        "contact_sheet": None,
    }


@pytest.mark.parametrize("workers", ["0", "2"])
def test_bad_files_are_reported_and_are_no_failure(photos, workers):
    (photos / "cat" / "bad.png").write_bytes(b"")
    (photos / "dog" / "copy.png").write_bytes((photos / "cat" / "0.png").read_bytes())
    data = found(photos, "--workers", workers)
    assert data["bad"] == [{"file": "cat/bad.png", "reason": "the file is empty", "split": "all"}]
    assert data["duplicates"] == [
        {
            "files": [
                {"file": "cat/0.png", "split": "all", "class": "cat"},
                {"file": "dog/copy.png", "split": "all", "class": "dog"},
            ],
            "leak": False,
            "conflict": True,
        }
    ]
    text = check(photos, "--workers", workers)
    assert text.exit_code == 0
    assert "Bad files: 1" in text.stdout
    assert "the file is empty" in text.stdout
    assert "given different labels" in text.stdout


def test_a_person_sees_classes_sizes_and_how_to_see_more(photos):
    result = check(photos)
    assert result.exit_code == 0
    for text in (
        "class folders",
        "12 in all",
        "30 to 30 pixels, median 30",
        "PNG RGB (12)",
        "cat",
        "dog",
        "Nothing to",
    ):
        assert text in result.stdout
    assert "--contact-sheet FILE.png" in result.stdout
    assert sorted(path.name for path in photos.iterdir()) == ["cat", "dog"]


def test_long_lists_are_cut_for_a_person_and_whole_for_a_script(photos):
    for number in range(30):
        (photos / "cat" / f"bad-{number:02}.png").write_bytes(b"")
    text = check(photos).stdout
    assert "bad-19.png" in text
    assert "bad-20.png" not in text
    assert "and 10 more" in text
    assert len(found(photos)["bad"]) == 30


def test_a_contact_sheet_is_written_where_it_is_asked_for(photos, tmp_path):
    sheet = tmp_path / "sheet.png"
    assert found(photos, "--contact-sheet", sheet)["contact_sheet"] == str(sheet)
    with Image.open(sheet) as image:
        assert image.format == "PNG"


def test_a_name_cannot_steer_the_terminal(photos):
    (photos / "cat" / "\x1b[31mred.png").write_bytes(b"")
    text = check(photos).stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred.png" in text


def test_the_kind_and_the_channels_are_passed_on(photos):
    data = found(photos, "--kind", "train", "--channels", "4")
    assert list(data["splits"]) == ["train"]
    assert len(data["bad"]) == 12


def test_a_place_that_cannot_be_read_fails(tmp_path):
    result = check(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert isinstance(result.exception, DataError)
