"""Every image at a place is found, whatever it is packed in, and whatever its label is."""

import json
from pathlib import Path

import pytest
from data.layouts import imagenet_tars, samples, tar_bytes, write

from vitkit.core.errors import DataError
from vitkit.data.source import Source
from vitkit.data.sources.detect import open_data
from vitkit.predict.places import images_at


def png(number: int) -> bytes:
    return samples()[number].png


def table(path: Path, columns: dict[str, list[object]]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), str(path), row_group_size=2)
    return path


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def contents(source: Source) -> list[object]:
    return [source.content(index) for index in range(len(source))]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_split_whose_labels_are_secret_is_found() -> None:
    table(Path("set/train-0.parquet"), {"image": [png(0), png(1)], "label": [0, 1]})
    table(Path("set/test-0.parquet"), {"image": [png(2)], "label": [-1]})
    found = images_at(["set"])
    assert names(found) == ["set/test-0.parquet/000000", "set/train-0.parquet/000000", "set/train-0.parquet/000001"]
    assert contents(found) == [png(2), png(0), png(1)]
    assert names(images_at(["set/test-0.parquet"])) == ["set/test-0.parquet/000000"]
    assert list(open_data("set").splits) == ["train"]  # who learns has nothing to learn from it


@pytest.mark.parametrize("labels", [[0, None], [3, 3], [0.5, 1.0], [0, 10**12]])
def test_no_label_in_a_table_is_a_reason_to_refuse_its_images(labels: list[object]) -> None:
    path = table(Path("d.parquet"), {"image": [png(0), png(1)], "label": labels})
    assert contents(images_at([str(path)])) == [png(0), png(1)]
    with pytest.raises(DataError):
        open_data(path)


@pytest.mark.parametrize(
    "labels",
    [{"1.cls": b"0", "2.cls": b"0"}, {"1.cls": b"0"}, {"1.json": b"{", "2.cls": b"\xff"}, {"1.cls": b"9" * (2 << 20)}],
    ids=["one class", "some without", "damaged", "too long"],
)
def test_no_label_in_a_tar_is_a_reason_to_refuse_its_images(labels: dict[str, bytes]) -> None:
    path = write(Path("a.tar"), tar_bytes({"1.png": png(0), "2.png": png(1), **labels}))
    found = images_at(["a.tar"])
    assert (names(found), contents(found)) == (["a.tar/1.png", "a.tar/2.png"], [png(0), png(1)])
    with pytest.raises(DataError):
        open_data(path)


def test_in_a_tar_the_last_dot_tells_what_is_an_image() -> None:
    files = {"2020.01.05.jpg": png(0), "a.edit.JPG": png(1), "x/b.png": png(2), "x/c.png.txt": b"", "._d.png": b""}
    write(Path("a.tar"), tar_bytes(files))
    found = images_at(["a.tar"])
    assert names(found) == ["a.tar/2020.01.05.jpg", "a.tar/a.edit.JPG", "a.tar/x/b.png"]
    assert contents(found) == [png(0), png(1), png(2)]


def test_a_name_that_a_tar_has_twice_is_the_later_file() -> None:
    first, second = (tar_bytes({"1.png": png(number)}) for number in range(2))
    write(Path("a.tar"), first.rstrip(b"\0") + b"\0" * (-len(first.rstrip(b"\0")) % 512) + second)
    found = images_at(["a.tar"])
    assert (names(found), contents(found)) == (["a.tar/1.png"], [png(1)])


def test_a_folder_is_all_that_is_below_it() -> None:
    write(Path("clone/assets/example.png"), png(0))
    write(Path("clone/more/b.TAR"), tar_bytes({"1.jpg": png(1)}))
    write(Path("clone/a.tar"), tar_bytes({"notes.txt": b""}))
    table(Path("clone/data/train-0.parquet"), {"img": [png(2)], "label": [0]})
    table(Path("clone/answers.parquet"), {"file": ["x.png"], "labels": [["cat"]]})  # of the same images, perhaps
    table(Path("clone/paths.parquet"), {"image": ["assets/example.png"]})
    found = images_at(["clone/"])
    expected = ["clone/assets/example.png", "clone/more/b.TAR/1.jpg", "clone/data/train-0.parquet/000000"]
    assert (names(found), contents(found)) == (expected, [png(0), png(1), png(2)])


def test_imagenets_tars_need_no_lists_of_labels() -> None:
    place = imagenet_tars(Path("imagenet"))
    (place / "imagenet_2012_validation_synset_labels.txt").unlink()
    found = images_at(["imagenet"])
    assert len(found) == 24
    assert {content for content in contents(found) if isinstance(content, bytes)} == {png(i) for i in range(24)}
    assert names(found)[0] == "imagenet/ILSVRC2012_img_train.tar/n00000001.tar/n00000001_0.JPEG"
    assert len(images_at(["imagenet/ILSVRC2012_img_val.tar"])) == 12


def test_a_pattern_stands_for_its_tars_by_their_paths() -> None:
    for number in range(2):
        write(Path(f"d/s-{number}.tar"), tar_bytes({"1.png": png(number), "1.json": json.dumps({"label": 1}).encode()}))
    assert names(images_at(["d/s-{0..1}.tar"])) == ["d/s-0.tar/1.png", "d/s-1.tar/1.png"]
    with pytest.raises(DataError, match=r"s-2\.tar"):
        images_at(["d/s-{0..2}.tar"])


def test_tables_with_images_in_different_columns_are_named_one_by_one() -> None:
    one = table(Path("d/1.parquet"), {"image": [png(0)]})
    two = table(Path("d/2.parquet"), {"img": [png(1)]})
    with pytest.raises(DataError, match="another column"):
        images_at(["d"])
    assert contents(images_at([str(one), str(two)])) == [png(0), png(1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.tar", b"noise" * 1000, "not a whole tar"), ("a.tar", tar_bytes({"notes.txt": b""}), "no images")],
)
def test_a_tar_without_images_is_named(name: str, content: bytes, message: str) -> None:
    write(Path(name), content)
    with pytest.raises(DataError, match=message) as caught:
        images_at([name])
    assert name in str(caught.value)


def test_a_table_without_images_is_named() -> None:
    table(Path("answers.parquet"), {"file": ["x.png"]})
    with pytest.raises(DataError, match="no column of images"):
        images_at(["answers.parquet"])
