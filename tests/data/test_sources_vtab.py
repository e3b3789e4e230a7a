"""VTAB-1k tasks: lists of paths and labels."""

import pytest
from cli.tiny_runs import photos
from data.vtab_tasks import task_folder

from vitkit.core.errors import DataError
from vitkit.data.layouts.registry import open_dataset


def test_task_is_opened_with_its_splits(tmp_path):
    data = open_dataset(task_folder(tmp_path / "cifar", num_classes=3, train=6, val=3, test=5))
    assert data.layout == "VTAB-1k task"
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 6, "val": 3, "test": 5}
    assert data.classes == ("0", "1", "2")
    assert data.splits["test"].name(4) == "images/test/000004.jpg"
    assert data.splits["test"].labels.tolist() == [0, 1, 2, 0, 1]


def test_single_list_is_the_train_split(tmp_path):
    place = task_folder(tmp_path / "kitti")
    for name in ("train800.txt", "val200.txt"):
        (place / name).unlink()
    assert {split: len(source) for split, source in open_dataset(place).splits.items()} == {"train": 6, "test": 3}


def test_classes_without_examples_keep_their_numbers(tmp_path):
    place = task_folder(tmp_path / "sun397")
    with (place / "test.txt").open("a", encoding="utf-8") as file:
        file.write("images/val200/000000.jpg 396\n")
    assert open_dataset(place).classes == tuple(map(str, range(397)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/train800/000000.jpg", "expected a path and a number"),
        ("images/train800/000000.jpg -1", "expected a path and a number"),
        ("../secret.jpg 0", "not a relative path"),
        ("images/train800/gone.jpg 0", "no file images/train800/gone.jpg"),
        ("images/train800/000000.jpg 9999999", "label out of range"),
    ],
)
def test_invalid_list_is_rejected(tmp_path, line, message):
    place = task_folder(tmp_path / "dtd")
    with (place / "train800.txt").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        open_dataset(place)


def test_val_as_test_needs_val_and_no_test(tmp_path):
    for split in ("train", "val"):
        photos(tmp_path / "two" / split, each=2)
    assert set(open_dataset(tmp_path / "two", layout="val-as-test").splits) == {"train", "test"}
    with pytest.raises(DataError, match="no val split to test on"):
        open_dataset(task_folder(tmp_path / "dtd"), layout="val-as-test")
