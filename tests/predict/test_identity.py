"""Marks tell weights and images from others, and stay the same for the same."""

import os
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called, load
from vitkit.predict.identity import images_mark, weights_mark
from vitkit.predict.places import Files

SETTINGS = ("width=32", "depth=1", "heads=2", "mlp_dim=32")


@pytest.mark.parametrize("form", ["vitkit", "google", "timm"])
def test_weights_are_told_from_others_by_the_files_that_are_loaded(tmp_path: Path, form: str) -> None:
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, classes=2, settings=SETTINGS)
    vitkit.save(model, tmp_path / "vitkit", labels=["cat", "dog"])
    place = tmp_path / "vitkit"
    if form != "vitkit":
        place = tmp_path / ("weights.npz" if form == "google" else "timm")
        write_as(format_called(form), place, load(tmp_path / "vitkit"))
    first = weights_mark(str(place))
    assert first is not None
    (tmp_path / "answers.csv.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of no matter")
    assert weights_mark(str(place)) == first
    torch.nn.init.ones_(model.head.weight)
    if form == "vitkit":
        vitkit.save(model, place, labels=["cat", "dog"])
    else:
        file = place if form == "google" else next(place.glob("*.safetensors"))
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert weights_mark(str(place)) not in (first, None)


def test_where_there_are_no_weights_there_is_no_mark(tmp_path: Path) -> None:
    assert weights_mark(str(tmp_path)) is None
    assert weights_mark(str(tmp_path / "nowhere")) is None
    assert weights_mark("hub:no/../name") is None


def test_images_are_told_from_others_by_their_names_and_order() -> None:
    lists = (["a", "b"], ["b", "a"], ["a"], ["ab"], ["a", "b", "c"], ["a", "\udcff"], [])
    found = [images_mark(Files(names)) for names in lists]
    assert [mark["count"] for mark in found] == [2, 2, 1, 1, 3, 2, 0]
    assert len({str(mark) for mark in found}) == len(lists)
    assert images_mark(Files(["x/a"])) == images_mark(Files(["a"], folder="x/"))
