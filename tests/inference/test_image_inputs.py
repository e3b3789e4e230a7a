"""Opening images by path: every image is found, in any container and with any label."""

import json
from pathlib import Path

import pytest
from data.layouts import imagenet_tars, samples, tar_bytes, write

from vitkit.core.errors import DataError
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.inference.image_inputs import open_images


def png(number: int) -> bytes:
    return samples()[number].png


def table(path: Path, columns: dict[str, list[object]]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), str(path), row_group_size=2)
    return path


def names(source: ImageSource) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def contents(source: ImageSource) -> list[object]:
    return [source.read(index) for index in range(len(source))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_split_with_hidden_labels_is_opened() -> None:
    table(Path("set/train-0.parquet"), {"image": [png(0), png(1)], "label": [0, 1]})
    table(Path("set/test-0.parquet"), {"image": [png(2)], "label": [-1]})
    found = open_images(["set"])
    assert names(found) == ["set/test-0.parquet/000000", "set/train-0.parquet/000000", "set/train-0.parquet/000001"]
    assert contents(found) == [png(2), png(0), png(1)]
    assert names(open_images(["set/test-0.parquet"])) == ["set/test-0.parquet/000000"]
    assert list(open_dataset("set").splits) == ["train"]  # a split without labels is not a training split


@pytest.mark.parametrize("labels", [[0, None], [0.5, 1.0], [0, 10**12]])
def test_invalid_parquet_labels_are_ignored(labels: list[object]) -> None:
    path = table(Path("d.parquet"), {"image": [png(0), png(1)], "label": labels})
    assert contents(open_images([str(path)])) == [png(0), png(1)]
    with pytest.raises(DataError):
        open_dataset(path)


@pytest.mark.parametrize(
    "labels",
    [{"1.cls": b"0"}, {"1.json": b"{", "2.cls": b"\xff"}, {"1.cls": b"9" * (2 << 20)}],
    ids=["some without", "damaged", "too long"],
)
def test_invalid_tar_labels_are_ignored(labels: dict[str, bytes]) -> None:
    path = write(Path("a.tar"), tar_bytes({"1.png": png(0), "2.png": png(1), **labels}))
    found = open_images(["a.tar"])
    assert (names(found), contents(found)) == (["a.tar/1.png", "a.tar/2.png"], [png(0), png(1)])
    with pytest.raises(DataError):
        open_dataset(path)


def test_tar_members_are_recognized_by_their_last_suffix() -> None:
    files = {"2020.01.05.jpg": png(0), "a.edit.JPG": png(1), "x/b.png": png(2), "x/c.png.txt": b"", "._d.png": b""}
    write(Path("a.tar"), tar_bytes(files))
    found = open_images(["a.tar"])
    assert names(found) == ["a.tar/2020.01.05.jpg", "a.tar/a.edit.JPG", "a.tar/x/b.png"]
    assert contents(found) == [png(0), png(1), png(2)]


def test_repeated_tar_member_is_the_later_file() -> None:
    first, second = (tar_bytes({"1.png": png(number)}) for number in range(2))
    write(Path("a.tar"), first.rstrip(b"\0") + b"\0" * (-len(first.rstrip(b"\0")) % 512) + second)
    found = open_images(["a.tar"])
    assert (names(found), contents(found)) == (["a.tar/1.png"], [png(1)])


def test_directory_includes_all_images_below() -> None:
    write(Path("clone/assets/example.png"), png(0))
    write(Path("clone/more/b.TAR"), tar_bytes({"1.jpg": png(1)}))
    write(Path("clone/a.tar"), tar_bytes({"notes.txt": b""}))
    table(Path("clone/data/train-0.parquet"), {"img": [png(2)], "label": [0]})
    table(Path("clone/predictions.parquet"), {"file": ["x.png"], "labels": [["cat"]]})  # predictions, not images
    table(Path("clone/paths.parquet"), {"image": ["assets/example.png"]})
    found = open_images(["clone/"])
    expected = ["clone/assets/example.png", "clone/more/b.TAR/1.jpg", "clone/data/train-0.parquet/000000"]
    assert (names(found), contents(found)) == (expected, [png(0), png(1), png(2)])


def test_imagenet_tars_need_no_label_files() -> None:
    place = imagenet_tars(Path("imagenet"))
    (place / "imagenet_2012_validation_synset_labels.txt").unlink()
    found = open_images(["imagenet"])
    assert len(found) == 24
    assert {content for content in contents(found) if isinstance(content, bytes)} == {png(i) for i in range(24)}
    assert names(found)[0] == "imagenet/ILSVRC2012_img_train.tar/n00000001.tar/n00000001_0.JPEG"
    assert len(open_images(["imagenet/ILSVRC2012_img_val.tar"])) == 12


def test_pattern_expands_to_its_tars() -> None:
    for number in range(2):
        write(Path(f"d/s-{number}.tar"), tar_bytes({"1.png": png(number), "1.json": json.dumps({"label": 1}).encode()}))
    assert names(open_images(["d/s-{0..1}.tar"])) == ["d/s-0.tar/1.png", "d/s-1.tar/1.png"]
    with pytest.raises(DataError, match=r"s-2\.tar"):
        open_images(["d/s-{0..2}.tar"])


def test_parquet_files_with_different_columns_are_rejected() -> None:
    one = table(Path("d/1.parquet"), {"image": [png(0)]})
    two = table(Path("d/2.parquet"), {"img": [png(1)]})
    with pytest.raises(DataError, match="another column"):
        open_images(["d"])
    assert contents(open_images([str(one), str(two)])) == [png(0), png(1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.tar", b"noise" * 1000, "not a complete tar"), ("a.tar", tar_bytes({"notes.txt": b""}), "no images")],
)
def test_tar_without_images_is_named(name: str, content: bytes, message: str) -> None:
    write(Path(name), content)
    with pytest.raises(DataError, match=message) as caught:
        open_images([name])
    assert name in str(caught.value)


def test_parquet_file_without_images_is_named() -> None:
    table(Path("predictions.parquet"), {"file": ["x.png"]})
    with pytest.raises(DataError, match="no column of images"):
        open_images(["predictions.parquet"])


def test_other_files_in_directories_are_left_out_by_name() -> None:
    for name in ("d/1.png", "d/2.svg", "d/b/3.pdf"):
        write(Path(name), png(1))
    write(Path("d/s.tar"), tar_bytes({"1.png": png(2), "1.cls": b"0", "2.svg": b""}))
    Path("empty").mkdir()
    source = open_images(["d", "empty"])
    assert names(source) == ["d/1.png", "d/s.tar/1.png"]
    assert source.left_out == ("d/2.svg", "d/b/3.pdf", "d/s.tar/2.svg", "empty/")
    with pytest.raises(DataError, match=r"no images found .*left out 1 folder without images: empty/"):
        open_images(["empty"])


def test_files_of_other_kinds_are_unreadable_images() -> None:
    for name in ("a.png", "b.svg", "c"):
        write(Path(name), png(1))
    assert names(open_images(["a.png", "b.svg", "c"])) == ["a.png", "b.svg", "c"]
    assert names(open_images(["b.svg"])) == ["b.svg"]
