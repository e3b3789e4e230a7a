"""Several datasets as one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.joined import join_datasets
from vitkit.data.layouts.registry import open_dataset


def write_images(path: Path, classes: dict[str, int], *, splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Write images whose gray level is the given one of their class."""
    for split in splits:
        for name, level in classes.items():
            (path / split / name).mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (8, 8), (level, level, level + index)).save(path / split / name / f"{index}.png")
    return path


def test_classes_of_equal_name_are_one(tmp_path) -> None:
    pets = open_dataset(write_images(tmp_path / "pets", {"cat": 10, "dog": 20}))
    animals = open_dataset(write_images(tmp_path / "animals", {"bee": 30, "dog": 40}))
    joined = join_datasets([pets, animals])
    train = joined.splits["train"]
    assert joined.classes == ("cat", "dog", "bee")
    assert np.bincount(train.labels).tolist() == [4, 8, 4]
    assert list(joined.splits) == ["train", "test"]
    names = [train.name(index) for index in range(len(train))]
    assert len(set(names)) == 16
    assert names[0] == "train/cat/0.png"
    assert names[8] == "+1/train/bee/0.png"
    assert train.labels[names.index("+1/train/dog/0.png")] == 1
    assert train.read(8) == (tmp_path / "animals/train/bee/0.png").read_bytes()
    assert train.locate(8) == (str(tmp_path / "animals/train/bee/0.png"), 0)


def test_datasets_with_other_splits_or_without_labels_are_refused(tmp_path) -> None:
    pets = open_dataset(write_images(tmp_path / "pets", {"cat": 10, "dog": 20}))
    other = open_dataset(write_images(tmp_path / "other", {"bee": 30, "ant": 40}, splits=("train", "val")))
    with pytest.raises(DataError, match=r"their splits differ.*train, test.*train, val"):
        join_datasets([pets, other])
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos/one.png")
    with pytest.raises(DataError, match="photos has no labels"):
        join_datasets([pets, open_dataset(tmp_path / "photos")])
