"""Class folders, split folders and unlabelled trees, with what a user's disk has in it besides."""

import tracemalloc
from pathlib import Path

import pytest
from data.layouts import write

from vitkit.core.errors import DataError
from vitkit.data.source import UNLABELLED, Source
from vitkit.data.sources.base import FileSource, Names
from vitkit.data.sources.detect import detect, open_data


def tree(root: Path, *names: str) -> Path:
    for name in names:
        write(root / name, name)
    return root


def names_of(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_names_and_classes_are_in_code_point_order_and_content_is_the_file(tmp_path: Path) -> None:
    data = open_data(tree(tmp_path, "b/2.png", "b/10.png", "Z/1.JPG", "ä b/ü 1.webp", "a/x/deep/1.jpeg"))
    assert data.kind == "class folders"
    assert data.classes == ("Z", "a", "b", "ä b")
    assert names_of(data.first) == ["Z/1.JPG", "a/x/deep/1.jpeg", "b/10.png", "b/2.png", "ä b/ü 1.webp"]
    assert data.first.labels.tolist() == [0, 1, 2, 2, 3]
    assert data.first.content(4) == "ä b/ü 1.webp".encode()


def test_hidden_and_system_files_are_not_seen_and_others_are_named_as_ignored(tmp_path: Path) -> None:
    place = tree(tmp_path, "a/1.png", "b/1.png", "a/._1.png", ".git/1.png", "__MACOSX/a/1.png", "a/Thumbs.db", "n.txt")
    tree(place, "cover.png")
    source = open_data(place).first
    assert isinstance(source, FileSource)
    assert names_of(source) == ["a/1.png", "b/1.png"]
    assert source.ignored == ("cover.png", "n.txt")


def test_folders_around_the_class_folders_are_passed(tmp_path: Path) -> None:
    data = open_data(tree(tmp_path, "photos/set/cat/1.png", "photos/set/dog/1.png"))
    assert data.classes == ("cat", "dog")
    assert names_of(data.first)[0] == "photos/set/cat/1.png"


@pytest.mark.parametrize("val", ["val", "Validation", "valid", "dev"])
def test_split_folders_are_known_by_their_names(tmp_path: Path, val: str) -> None:
    data = open_data(tree(tmp_path, "Training/a/1.png", "Training/b/1.png", f"{val}/b/2.png", "testing/a/3.png"))
    assert list(data.splits) == ["train", "val", "test"]
    assert data.splits["val"].labels.tolist() == [1]
    assert data.splits["val"].classes == ("a", "b")


def test_a_class_of_val_that_train_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"val of .* train lacks: Cat"):
        open_data(tree(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/Cat/1.png"))


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two folders for val"):
        open_data(tree(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "valid/a/1.png"))


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    assert open_data(tree(tmp_path, "test/1.png", "other/1.png")).classes == ("other", "test")


def test_a_test_folder_without_classes_is_left_out_and_named(tmp_path: Path) -> None:
    data = open_data(tree(tmp_path, "train/a/1.png", "train/b/1.png", "test/7.png"))
    assert list(data.splits) == ["train"]
    assert isinstance(data.first, FileSource)
    assert data.first.ignored == ("test/7.png",)


def test_a_val_folder_without_classes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no class folders"):
        open_data(tree(tmp_path, "train/a/1.png", "train/b/1.png", "val/7.png"))


def test_one_class_only_is_an_error_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one class only: cat") as caught:
        open_data(tree(tmp_path, "cat/1.png", "cat/2.png"))
    assert caught.value.hint is not None
    assert "unlabelled" in caught.value.hint


def test_images_in_no_folder_are_unlabelled_and_any_tree_can_be_named_so(tmp_path: Path) -> None:
    flat = open_data(tree(tmp_path / "flat", "1.png", "2.png"))
    assert (flat.kind, flat.classes, flat.first.labels.tolist()) == ("images without labels", (), [UNLABELLED] * 2)
    tree(tmp_path / "deep", "cat/1.png", "cat/x/2.png", "3.png")
    assert len(open_data(tmp_path / "deep", kind="unlabelled").first) == 3
    split = open_data(tree(tmp_path / "split", "train/1.png", "val/2.png"))
    assert {name: len(source) for name, source in split.splits.items()} == {"train": 1, "val": 1}


def test_links_that_go_in_circles_end(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "self").symlink_to(tmp_path / "b")
    assert names_of(open_data(tmp_path).first) == ["a/1.png", "b/1.png"]


def test_a_link_that_leads_nowhere_is_kept_so_that_reading_it_names_it(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.png", "b/1.png")
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nothing")
    source = open_data(tmp_path).first
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        source.content(names_of(source).index("a/gone.png"))


@pytest.mark.parametrize(("names", "found"), [((), "an empty folder"), (("a.txt", "b.txt"), "2 .txt")])
def test_a_folder_without_images_says_what_was_looked_for_and_found(
    tmp_path: Path, names: tuple[str, ...], found: str
) -> None:
    with pytest.raises(DataError, match=found) as caught:
        detect(tree(tmp_path, *names))
    assert "CLASS/IMAGE" in str(caught.value)
    with pytest.raises(DataError, match="no images"):
        open_data(tmp_path, kind="folders")


def test_many_names_are_packed_as_they_come() -> None:
    count = 50_000
    tracemalloc.start()
    try:
        names = Names(f"photos/{number:08}.jpeg" for number in range(count))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(names), names[0], names[count - 1]) == (count, "photos/00000000.jpeg", f"photos/{count - 1:08}.jpeg")
    assert most < 80 * count  # 20 letters and where they end, each twice for a moment; a list of texts is 100 and more
