"""VTAB-1k's lists of paths and labels: a task is a data set like any other, and a list with a mistake is refused."""

import pytest
from cli.tiny_runs import photos
from data.vtab_tasks import task_folder

from vitkit.core.errors import DataError
from vitkit.data.sources.detect import open_data


def test_a_task_is_a_data_set_like_any_other(tmp_path):
    data = open_data(task_folder(tmp_path / "cifar", classes=3, train=6, val=3, test=5))
    assert data.kind == "VTAB-1k task"
    assert {split: len(source) for split, source in data.splits.items()} == {"train": 6, "val": 3, "test": 5}
    assert data.classes == ("0", "1", "2")
    assert data.splits["test"].name(4) == "images/test/000004.jpg"
    assert data.splits["test"].labels.tolist() == [0, 1, 2, 0, 1]


def test_the_thousand_examples_may_be_in_one_list(tmp_path):
    place = task_folder(tmp_path / "kitti")
    for name in ("train800.txt", "val200.txt"):
        (place / name).unlink()
    assert {split: len(source) for split, source in open_data(place).splits.items()} == {"train": 6, "test": 3}


def test_classes_without_an_example_keep_their_numbers(tmp_path):
    place = task_folder(tmp_path / "sun397")
    with (place / "test.txt").open("a", encoding="utf-8") as file:
        file.write("images/val200/000000.jpg 396\n")
    assert open_data(place).classes == tuple(map(str, range(397)))


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
def test_lists_with_a_mistake_are_refused(tmp_path, line, message):
    place = task_folder(tmp_path / "dtd")
    with (place / "train800.txt").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        open_data(place)


def test_val_as_test_is_for_data_with_val_and_no_test(tmp_path):
    for split in ("train", "val"):
        photos(tmp_path / "two" / split, each=2)
    assert set(open_data(tmp_path / "two", kind="val-as-test").splits) == {"train", "test"}
    with pytest.raises(DataError, match="no val split to judge by"):
        open_data(task_folder(tmp_path / "dtd"), kind="val-as-test")
