"""`vitkit data check`: JSON keys and printed summary."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from vitkit.cli.data import command
from vitkit.core.errors import DataError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for number in range(12):
        path = folder / ("cat" if number < 7 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colors = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(colors).save(path)
    return folder


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["check", *map(str, arguments)], catch_exceptions=True)


def check_json(*arguments: str | Path) -> dict[str, object]:
    result = check(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_keys_are_stable(photos):
    assert check_json(photos) == {
        "path": str(photos),
        "layout": "class folders",
        "classes": ["cat", "dog"],
        "counts": {"cat": 7, "dog": 5},
        "images": 12,
        "unlabeled": 0,
        "splits": {"all": {"images": 12, "counts": {"cat": 7, "dog": 5}}},
        "bad": [],
        "sizes": {
            "height": {"minimum": 30, "median": 30, "maximum": 30},
            "width": {"minimum": 40, "median": 40, "maximum": 40},
        },
        "modes": {"PNG RGB": 12},
        "duplicates": [],
        "left_out": [],
        "warnings": [],
        "contact_sheet": None,
    }


@pytest.mark.parametrize("workers", ["0", "2"])
def test_bad_files_are_reported_without_failure(photos, workers):
    (photos / "cat" / "bad.png").write_bytes(b"")
    (photos / "dog" / "copy.png").write_bytes((photos / "cat" / "0.png").read_bytes())
    data = check_json(photos, "--workers", workers)
    assert data["bad"] == [{"file": "cat/bad.png", "reason": "the file is empty", "split": "all"}]
    assert data["duplicates"] == [
        {
            "files": [
                {"file": "cat/0.png", "split": "all", "class": "cat"},
                {"file": "dog/copy.png", "split": "all", "class": "dog"},
            ],
            "across_splits": False,
            "conflicting_labels": True,
        }
    ]
    text = check(photos, "--workers", workers)
    assert text.exit_code == 0
    assert "Bad files: 1" in text.stdout
    assert "the file is empty" in text.stdout
    assert "labeled differently" in text.stdout


def test_summary_shows_classes_and_sizes(photos):
    result = check(photos)
    assert result.exit_code == 0
    for text in (
        "class folders",
        "12 in all",
        "30 to 30 pixels, median 30",
        "PNG RGB (12)",
        "cat",
        "dog",
        "No problems found",
    ):
        assert text in result.stdout
    assert "--contact-sheet FILE.png" in result.stdout
    assert sorted(path.name for path in photos.iterdir()) == ["cat", "dog"]


def test_long_lists_are_shortened_except_in_json(photos):
    for number in range(30):
        (photos / "cat" / f"bad-{number:02}.png").write_bytes(b"")
    text = check(photos).stdout
    assert "bad-19.png" in text
    assert "bad-20.png" not in text
    assert "and 10 more" in text
    assert len(check_json(photos)["bad"]) == 30


def test_contact_sheet_is_written(photos, tmp_path):
    sheet = tmp_path / "sheet.png"
    assert check_json(photos, "--contact-sheet", sheet)["contact_sheet"] == str(sheet)
    with Image.open(sheet) as image:
        assert image.format == "PNG"


def test_control_characters_are_escaped(photos):
    (photos / "cat" / "\x1b[31mred.png").write_bytes(b"")
    text = check(photos).stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred.png" in text


def test_layout_and_channels_are_used(photos):
    data = check_json(photos, "--layout", "unlabeled", "--channels", "4")
    assert (data["layout"], data["unlabeled"]) == ("images without labels", 12)
    assert len(data["bad"]) == 12


def test_missing_path_fails(tmp_path):
    result = check(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert isinstance(result.exception, DataError)
