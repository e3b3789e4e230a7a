"""CSV and JSONL manifests, and the errors in them."""

import os
from pathlib import Path

import pytest
from data.layouts import write

from vitkit.core.errors import DataError
from vitkit.data.layouts.base import check_several_classes
from vitkit.data.layouts.registry import open_dataset

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def manifest(root: Path, *lines: str, name: str = "labels.csv") -> Path:
    for image in ("1.png", "2.png", "cats/3 ä.png"):
        write(root / image, image)
    return write(root / name, "\n".join(lines))


def test_columns_may_be_in_any_order(tmp_path: Path) -> None:
    manifest(tmp_path, "label,note,file_name", '"cat, young",x,./cats/3 ä.png', "dog,,1.png")
    data = open_dataset(tmp_path)
    assert data.layout == "CSV manifest"
    assert data.classes == ("cat, young", "dog")
    assert [data.first_split.name(i) for i in range(2)] == ["1.png", "cats/3 ä.png"]
    assert data.first_split.read(1) == "cats/3 ä.png".encode()


def test_numeric_labels_are_sorted_by_value(tmp_path: Path) -> None:
    manifest(tmp_path, "file_name,label", "1.png,10", "2.png,9", "cats/3 ä.png,0")
    assert open_dataset(tmp_path).classes == ("0", "9", "10")


def test_class_index_sets_the_order(tmp_path: Path) -> None:
    manifest(tmp_path, "file_name,class_index,label", "1.png,2,crane", "2.png,1,tench", "cats/3 ä.png,0,crane")
    data = open_dataset(tmp_path)
    assert data.classes == ("crane (0)", "tench", "crane (2)")
    assert data.first_split.labels.tolist() == [2, 1, 0]


def test_images_that_no_line_lists_are_left_out(tmp_path: Path) -> None:
    path = manifest(tmp_path, "file_name,label", "1.png,a", "cats/3 ä.png,b")
    write(tmp_path / "cats/4.png", "4")
    assert open_dataset(tmp_path).left_out == ("2.png", "cats/4.png")
    assert open_dataset(path).left_out == ()  # lists of other images may be next to it


def test_split_column_equals_split_folders(tmp_path: Path) -> None:
    path = manifest(tmp_path, "file_name,label,split", "1.png,a,train", "2.png,b,train", "cats/3 ä.png,b,Validation")
    assert {split: len(source) for split, source in open_dataset(path).splits.items()} == {"train": 2, "val": 1}
    other = tmp_path / "other"
    manifest(other / "train", "file_name,label", "1.png,a", "2.png,b", name="metadata.csv")
    manifest(other / "test", "file_name,label", "1.png,b", name="metadata.csv")
    data = open_dataset(other)
    assert data.splits["test"].name(0) == "test/1.png"
    assert data.splits["test"].labels.tolist() == [1]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/1.png",
        "../1.png",
        "cats/../../1.png",
        "cats\\3.png",
        "..\\1.png",
        "C:/1.png",
        "c:1.png",
        "a\\..\\..\\1.png",
    ],
)
def test_path_outside_of_the_folder_is_rejected(tmp_path: Path, name: str) -> None:
    manifest(tmp_path / "set", "file_name,label", "1.png,a", f"{name},b")
    write(tmp_path / "1.png", "secret")
    with pytest.raises(DataError, match=r"labels\.csv, line 3: .* not a relative path"):
        open_dataset(tmp_path / "set")


@pytest.mark.parametrize("link", ["file", "folder"])
def test_link_outside_of_the_folder_is_rejected(tmp_path: Path, link: str) -> None:
    write(tmp_path / "out" / "1.png", "secret")
    name = "l.png" if link == "file" else "l/1.png"
    manifest(tmp_path / "set", "file_name,label", "1.png,a", f"{name},b")
    if link == "file":
        (tmp_path / "set" / "l.png").symlink_to(tmp_path / "out" / "1.png")
    else:
        (tmp_path / "set" / "l").symlink_to(tmp_path / "out")
    with pytest.raises(DataError, match="outside of"):
        open_dataset(tmp_path / "set")


def test_link_within_the_folder_is_read(tmp_path: Path) -> None:
    manifest(tmp_path, "file_name,label", "1.png,a", "l.png,b")
    (tmp_path / "l.png").symlink_to("2.png")
    assert open_dataset(tmp_path).first_split.read(1) == b"2.png"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("file_name,label", "1.png,a", "2.png,"), r"line 3: 2\.png has no label"),
        (("file_name,label", "1.png,a", "2.png"), r"line 3: 2\.png has no label"),
        (("file_name,label", "1.png,a", "gone.png,b"), r"line 3: no file gone\.png"),
        (("file_name,label", "1.png,a", "1.png,b"), "line 3 repeats 1.png"),
        (("file_name,label", "1.png,a", ",b"), "line 3 has no file_name"),
        (("file_name,label", "1.png,a", "2.png,b,c"), "line 3 has too many values"),
        (("file_name,label", "1.png,a", "cats,b"), "cats is not a file"),
        (("file_name,class", "1.png,a"), "lacks the column label"),
        (("file_name,label",), "lists no images"),
        (("file_name,label,split", "1.png,a,train", "2.png,b,holdout"), "line 3: unknown split"),
        (("file_name,label,class_index", "1.png,a,0", "2.png,b,1e9"), "line 3: class_index"),
        (("file_name,label,class_index", "1.png,a,0", "2.png,b,0"), "expected a, got b"),
        (("file_name,label", "1.png,a", "2.png,a"), "only one class: a"),
    ],
)
def test_invalid_csv_line_is_named(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    manifest(tmp_path, *lines)
    with pytest.raises(DataError, match=message):
        check_several_classes(open_dataset(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"file_name": "2.png"}', "line 2: 2.png has no label"),
        ('{"file_name": "2.png", "label": null}', "line 2: 2.png has no label"),
        ('{"file_name": "2.png", "label": true}', "line 2: label"),
        ('{"file_name": "2.png", "label": ["b"]}', "line 2: label"),
        ('["2.png", "b"]', "line 2"),
        ('{"file_name": ', "line 2 is not JSON"),
        ("[" * 100_000, "cannot be read|not JSON"),
    ],
)
def test_invalid_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = manifest(tmp_path, '{"file_name": "1.png", "label": 3}', line, name="list.jsonl")
    with pytest.raises(DataError, match=message):
        open_dataset(path)


def test_manifest_must_be_utf8(tmp_path: Path) -> None:
    manifest(tmp_path)
    write(tmp_path / "labels.csv", "file_name,label\n1.png,ä\n2.png,b\n".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read") as caught:
        open_dataset(tmp_path)
    assert caught.value.hint == "save it as UTF-8"


def test_two_manifests_in_one_folder_are_rejected(tmp_path: Path) -> None:
    manifest(tmp_path, "file_name,label", "1.png,a", "2.png,b")
    manifest(tmp_path, "file_name,label", "1.png,a", "2.png,b", name="metadata.csv")
    with pytest.raises(DataError, match="2 manifests"):
        open_dataset(tmp_path)


def test_csv_without_file_names_is_no_manifest(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", "")
    write(tmp_path / "b" / "1.png", "")
    write(tmp_path / "labels.csv", "id,meaning\n1,a\n")
    assert open_dataset(tmp_path).layout == "class folders"


@pytest.mark.skipif(not (DATA / "photos").is_dir(), reason="the photos are not on this machine")
def test_imagenet_photos_have_1000_classes() -> None:
    data = open_dataset(DATA / "photos")
    assert data.layout == "CSV manifest"
    assert (len(data.first_split), len(set(data.classes)), data.classes[0]) == (1000, 1000, "tench")
    assert data.first_split.labels.tolist() == list(range(1000))
    assert os.path.getsize(DATA / "photos" / data.first_split.name(7)) == len(data.first_split.read(7))  # noqa: PTH202


def test_file_name_that_no_system_can_have_is_named(tmp_path: Path) -> None:
    write(tmp_path / "metadata.jsonl", '{"file_name": "\\ud800.png", "label": "a"}\n')
    with pytest.raises(DataError, match=r"line 1: '\\ud800.png' is not valid text"):
        open_dataset(tmp_path)
