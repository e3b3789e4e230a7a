"""Class folders, split folders and images without labels."""

import tracemalloc
from pathlib import Path

import pytest
from data.layouts import write

from vitkit.core.errors import DataError
from vitkit.data.dataset import UNLABELED, ImageSource
from vitkit.data.layouts.base import FileSource, PackedNames, check_several_classes
from vitkit.data.layouts.files import list_left_out
from vitkit.data.layouts.registry import detect_layout, open_dataset


def tree(root: Path, *names: str) -> Path:
    for name in names:
        write(root / name, name)
    return root


def names_of(source: ImageSource) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_names_and_classes_are_sorted(tmp_path: Path) -> None:
    data = open_dataset(tree(tmp_path, "b/2.png", "b/10.png", "Z/1.JPG", "ä b/ü 1.webp", "a/x/deep/1.jpeg"))
    assert data.layout == "class folders"
    assert data.classes == ("Z", "a", "b", "ä b")
    assert names_of(data.first_split) == ["Z/1.JPG", "a/x/deep/1.jpeg", "b/10.png", "b/2.png", "ä b/ü 1.webp"]
    assert data.first_split.labels.tolist() == [0, 1, 2, 2, 3]
    assert data.first_split.read(4) == "ä b/ü 1.webp".encode()


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    place = tree(tmp_path, "a/1.png", "b/1.png", "a/._1.png", ".git/1.png", "__MACOSX/a/1.png", "a/Thumbs.db", "n.txt")
    tree(place, "cover.png")
    source = open_dataset(place).first_split
    assert isinstance(source, FileSource)
    assert names_of(source) == ["a/1.png", "b/1.png"]


def test_wrapper_folders_are_skipped(tmp_path: Path) -> None:
    data = open_dataset(tree(tmp_path, "photos/set/cat/1.png", "photos/set/dog/1.png"))
    assert data.classes == ("cat", "dog")
    assert names_of(data.first_split)[0] == "photos/set/cat/1.png"


@pytest.mark.parametrize("val", ["val", "Validation", "valid", "dev"])
def test_split_folders_are_detected_by_name(tmp_path: Path, val: str) -> None:
    data = open_dataset(tree(tmp_path, "Training/a/1.png", "Training/b/1.png", f"{val}/b/2.png", "testing/a/3.png"))
    assert list(data.splits) == ["train", "val", "test"]
    assert data.splits["val"].labels.tolist() == [1]
    assert data.splits["val"].classes == ("a", "b")


def test_val_class_missing_in_train_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"val of .* train lacks: Cat"):
        open_dataset(tree(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/Cat/1.png"))


def test_two_folders_for_one_split_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two folders for val"):
        open_dataset(tree(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "valid/a/1.png"))


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    assert open_dataset(tree(tmp_path, "test/1.png", "other/1.png")).classes == ("other", "test")


def test_test_folder_without_classes_is_ignored(tmp_path: Path) -> None:
    data = open_dataset(tree(tmp_path, "train/a/1.png", "train/b/1.png", "test/7.png"))
    assert list(data.splits) == ["train"]
    assert names_of(data.first_split) == ["train/a/1.png", "train/b/1.png"]


def test_val_folder_without_classes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class folders"):
        open_dataset(tree(tmp_path, "train/a/1.png", "train/b/1.png", "val/7.png"))


def test_single_class_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only one class: cat") as caught:
        check_several_classes(open_dataset(tree(tmp_path, "cat/1.png", "cat/2.png")))
    assert caught.value.hint is not None
    assert "unlabeled" in caught.value.hint


def test_images_without_folders_are_unlabeled(tmp_path: Path) -> None:
    flat = open_dataset(tree(tmp_path / "flat", "1.png", "2.png"))
    assert (flat.layout, flat.classes, flat.first_split.labels.tolist()) == (
        "images without labels",
        (),
        [UNLABELED] * 2,
    )
    tree(tmp_path / "deep", "cat/1.png", "cat/x/2.png", "3.png")
    assert len(open_dataset(tmp_path / "deep", layout="unlabeled").first_split) == 3
    split = open_dataset(tree(tmp_path / "split", "train/1.png", "val/2.png"))
    assert {name: len(source) for name, source in split.splits.items()} == {"train": 1, "val": 1}


def test_circular_links_are_followed_once(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "self").symlink_to(tmp_path / "b")
    assert names_of(open_dataset(tmp_path).first_split) == ["a/1.png", "b/1.png"]


def test_broken_link_fails_when_read(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nothing")
    source = open_dataset(tmp_path).first_split
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        source.read(names_of(source).index("a/gone.png"))


@pytest.mark.parametrize(("names", "found"), [((), "an empty directory"), (("a.txt", "b.txt"), "2 .txt")])
def test_folder_without_images_is_described(tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    with pytest.raises(DataError, match=found) as caught:
        detect_layout(tree(tmp_path, *names))
    assert "CLASS/IMAGE" in str(caught.value)
    with pytest.raises(DataError, match="no images"):
        open_dataset(tmp_path, layout="folders")


def test_packed_names_are_unchanged() -> None:
    count = 50_000
    tracemalloc.start()
    try:
        names = PackedNames(f"photos/{number:08}.jpeg" for number in range(count))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(names), names[0], names[count - 1]) == (count, "photos/00000000.jpeg", f"photos/{count - 1:08}.jpeg")
    assert most < 80 * count  # 20 letters and where they end, each twice for a moment; a list of texts is 100 and more


def test_everything_left_out_is_named(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "cat/1.png", "cat/2.heic", "cat/3.AVIF", "dog/1.png", "dog/2.svg", "owl/1.pdf", "notes", "x.jpg"
    )
    (root / "bird").mkdir()
    data = open_dataset(root)
    assert names_of(data.first_split) == ["cat/1.png", "cat/2.heic", "cat/3.AVIF", "dog/1.png"]
    assert data.left_out == ("x.jpg", "bird/", "dog/2.svg", "notes", "owl/1.pdf", "owl/")
    files, image, folders = list_left_out(data.left_out)[0].split("; ")
    assert (
        files == "left out 3 files that are not images (1 .svg, 1 without suffix, 1 .pdf): dog/2.svg, notes, owl/1.pdf"
    )
    assert (image, folders) == ("1 image without a class: x.jpg", "2 folders without images: bird/, owl/")
    unlabeled = open_dataset(root, layout="unlabeled")
    assert unlabeled.left_out == ("bird/", "dog/2.svg", "notes", "owl/1.pdf")


def test_empty_classes_of_splits_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.txt")
    (root / "train/c").mkdir()
    data = open_dataset(root)
    assert data.left_out == ("train/c/", "val/b/1.txt")


def test_directory_linked_twice_is_read_twice(tmp_path: Path) -> None:
    tree(tmp_path, "images/1.png", "photos/a/1.png")
    (tmp_path / "photos/b").symlink_to(tmp_path / "images")
    (tmp_path / "photos/c").symlink_to(tmp_path / "images")
    assert open_dataset(tmp_path / "photos").classes == ("a", "b", "c")
