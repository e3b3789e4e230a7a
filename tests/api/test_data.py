"""`check_data` and `check_data_quality`: results equal to `--json`, pairs in memory, files and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api.tiny import CLASSES, make_model, make_pairs
from cli.tiny_runs import Shell, photos

import vitkit
from vitkit.core.errors import ConfigError, DataError

QUIET: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", CLASSES, each=3)
    (tmp_path / "photos/cat/00.png").write_bytes(b"")
    (tmp_path / "photos/beside.png").write_bytes((tmp_path / "photos/cat/01.png").read_bytes())
    return Shell(capsys)


def test_summary_of_a_directory(shell: Shell) -> None:
    summary = vitkit.check_data("photos", contact_sheet="sheet.png", **QUIET)
    assert summary.contact_sheet == Path("sheet.png")
    assert summary.contact_sheet.is_file()
    assert (summary.images, summary.counts) == (9, {"cat": 3, "dog": 3, "owl": 3})
    assert [(split, file.name) for split, file in summary.bad] == [("all", "cat/00.png")]


def test_images_beside_class_folders_are_reported(shell: Shell) -> None:
    summary = vitkit.check_data("photos", **QUIET)
    assert summary.left_out == ("beside.png",)
    assert "left out 1 image without a class: beside.png" in summary.warnings


def test_summary_of_pairs() -> None:
    pairs = make_pairs(5)
    summary = vitkit.check_data({"train": pairs, "test": pairs[:1]}, **QUIET)
    assert (summary.splits, summary.classes) == ({"train": 15, "test": 1}, CLASSES)
    assert summary.sizes is not None
    assert summary.sizes.height.median == 20
    assert len(summary.duplicates) == 1
    assert summary.duplicates[0].across_splits


def test_quality_is_written_as_json(shell: Shell) -> None:
    vitkit.save(make_model(), "model")
    report = vitkit.check_data_quality("photos", model="model", out="quality", **QUIET)
    assert report.report_path == Path("quality/report.html")
    assert json.loads(Path("quality/data_quality.json").read_bytes()) == json.loads(json.dumps(report.to_dict()))
    assert report.warnings == (
        "left out 1 image without a class: beside.png",
        "skipped cat/00.png: the file is empty",
    )


def test_quality_finds_copies_and_wrong_labels() -> None:
    pairs = make_pairs(8)
    wrong = (pairs[0][0][::-1].copy(), "owl")
    data = {"train": [*pairs, wrong], "test": pairs[:2]}
    report = vitkit.check_data_quality(data, model=make_model(), min_score=-1.0, **QUIET)
    assert [row["other_file"] for row in report.near_duplicate_rows()] == ["test/image-00001", "test/image-00002"]
    labels = {row["file"]: row["given_label"] for row in report.label_issue_rows()}
    assert labels["train/image-00025"] == "owl"


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(ConfigError, match="need a model"):
        vitkit.check_data_quality(make_pairs(), probability=True)
    with pytest.raises(ConfigError, match="channels must be positive"):
        vitkit.check_data(make_pairs(), channels=0)
    with pytest.raises(DataError, match="pair 1: the label"):
        vitkit.check_data([(np.zeros((8, 8), np.uint8), "a"), (np.zeros((8, 8), np.uint8), 2)])  # type: ignore[list-item]
