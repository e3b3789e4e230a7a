"""WebDataset tars and parquet shards, read by several processes; brace patterns."""

import json
import pickle
from pathlib import Path

import pytest
from data.layouts import CLASSES, parquet, samples, tar_bytes, webdataset_cls, write

from vitkit.core.errors import DataError, MissingDependencyError
from vitkit.data.dataset import UNLABELED, ImageSource, Subset
from vitkit.data.layouts import shards as parquet_module
from vitkit.data.layouts.base import check_several_classes
from vitkit.data.layouts.files import expand_braces
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import map_images, read_image


def png(number: int) -> bytes:
    return samples()[number].png


def read_all(source: ImageSource, order: list[int]) -> list[object]:
    return [source.read(i) for i in order]


@pytest.mark.parametrize("layout", ["tars", "parquet"])
def test_processes_read_independently(tmp_path: Path, layout: str) -> None:
    if layout == "parquet":
        pytest.importorskip("pyarrow")
    source = open_dataset(parquet(tmp_path) if layout == "parquet" else webdataset_cls(tmp_path)).splits["train"]
    expected = [source.read(index) for index in range(len(source))]
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read(index) for index in range(len(source))] == expected
    several = Subset(source, [*range(len(source))] * 4)
    assert list(map_images(several, read_image, workers=3)) == expected * 4


def test_classes_txt_names_numeric_labels(tmp_path: Path) -> None:
    place = webdataset_cls(tmp_path)
    assert open_dataset(place).classes == CLASSES
    (place / "classes.txt").unlink()
    assert open_dataset(place).classes == ("0", "1", "2")
    write(place / "classes.txt", "a\nb")
    with pytest.raises(DataError, match="label out of range"):
        open_dataset(place)


def test_huge_label_is_rejected(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar", tar_bytes({"1.png": png(0), "1.json": b"%d" % 10**30}))
    with pytest.raises(DataError, match="label out of range"):
        open_dataset(archive)


def test_all_or_no_images_of_tars_have_labels(tmp_path: Path) -> None:
    data = open_dataset(write(tmp_path / "a.tar", tar_bytes({"1.png": png(0), "2.png": png(1)})))
    assert (data.classes, data.first_split.labels.tolist()) == ((), [UNLABELED] * 2)
    write(tmp_path / "a.tar", tar_bytes({"1.png": png(0), "2.png": png(1), "1.cls": b"0"}))
    with pytest.raises(DataError, match="1 of 2 without"):
        open_dataset(tmp_path / "a.tar")


def test_folders_and_other_members_are_allowed(tmp_path: Path) -> None:
    files = {
        "./x/1.PNG": png(0), "./x/1.cls": b" dog\n", "./x/1.seg.png": png(5), "./x/1.txt": b"a dog",
        "y/1.jpg": png(1), "y/1.json": json.dumps({"class": "cat"}).encode(), "y/._1.jpg": b"", "notes.md": b"",
    }  # fmt: skip
    data = open_dataset(write(tmp_path / "train-0.tar", tar_bytes(files)))
    source = data.splits["train"]
    assert data.classes == ("cat", "dog")
    assert [source.name(i) for i in range(2)] == ["train-0.tar/x/1.PNG", "train-0.tar/y/1.jpg"]
    assert source.labels.tolist() == [1, 0]
    assert source.read(1) == png(1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1.png": b"", "1.jpg": b"", "1.cls": b"0"}, "two images for 1"),
        ({"1.png": b"", "1.json": b"{"}, r"1\.json is not JSON"),
        ({"1.png": b"", "1.json": b"[" * 100_000}, r"1\.json is not JSON"),
        ({"1.png": b"", "1.json": b'{"label": [1]}'}, "has no label"),
        ({"1.png": b"", "1.cls": b"\xff"}, "not UTF-8"),
        ({"1.png": b"", "1.cls": b"9" * (2 << 20)}, "too long"),
        ({"1.png": b"", "1.cls": b"999999999", "2.png": b"", "2.cls": b"0"}, "out of range"),
        ({"notes.txt": b""}, "no images"),
    ],
)
def test_tar_error_names_the_member(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(write(tmp_path / "a.tar", tar_bytes(files)))


def test_damaged_tar_is_named(tmp_path: Path) -> None:
    whole = tar_bytes({"1.cls": b"0", "1.png": png(0)})
    for content in (whole[: 1024 + 600], whole[:700], b"noise" * 1000, whole[:1024] + b"noise" * 1000):
        with pytest.raises(DataError, match=r"a\.tar"):
            open_dataset(write(tmp_path / "a.tar", content))


def test_tar_truncated_after_opening_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", tar_bytes({"1.cls": b"0", "1.png": png(0), "2.cls": b"1", "2.png": png(1)}))
    source = open_dataset(path).first_split
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"ends within a\.tar/2\.png"):
        source.read(1)


def test_all_or_no_tars_name_their_split(tmp_path: Path) -> None:
    webdataset_cls(tmp_path)
    write(tmp_path / "more.tar", tar_bytes({"1.cls": b"0", "1.png": png(0)}))
    with pytest.raises(DataError, match=r"more\.tar"):
        open_dataset(tmp_path)


def test_pattern_names_missing_files(tmp_path: Path) -> None:
    write(tmp_path / "d-0.tar", tar_bytes({"1.cls": b"0", "1.png": png(0)}))
    with pytest.raises(DataError, match=r"d-1\.tar.*1 of 2"):
        open_dataset(f"{tmp_path}/d-{{0..1}}.tar")


@pytest.mark.parametrize("pattern", ["a-{0..999999999}.tar", "a-{3..1}.tar", "{0..999}{0..999}.tar"])
def test_pattern_of_too_many_files_is_rejected(pattern: str) -> None:
    with pytest.raises(DataError, match="files"):
        expand_braces(pattern)


class TestParquet:
    @pytest.fixture(autouse=True)
    def _pyarrow(self) -> None:
        pytest.importorskip("pyarrow")

    def write_table(self, path: Path, columns: dict[str, list[object]]) -> Path:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), str(path), row_group_size=2)
        return path

    def test_bytes_and_string_labels_are_read(self, tmp_path: Path) -> None:
        images = [png(i) for i in range(5)]
        data = open_dataset(self.write_table(tmp_path / "d.parquet", {"img": [*images], "label": [*"babab"]}))
        assert data.classes == ("a", "b")
        assert data.first_split.labels.tolist() == [1, 0, 1, 0, 1]
        assert read_all(data.first_split, [4, 0, 3]) == [images[4], images[0], images[3]]
        assert data.first_split.name(4) == "d.parquet/000004"

    def test_cache_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = open_dataset(parquet(tmp_path)).splits["train"]
        assert isinstance(source, parquet_module.ParquetSource)
        read_all(source, list(range(len(source))))
        assert len(source.cache) == 6
        monkeypatch.setattr(parquet_module, "CACHE_BYTES", 0)
        source.cache = ()
        wanted = [sample.png for sample in samples()[:16]]
        assert read_all(source, list(range(16))) == wanted
        assert len(source.cache) == 1

    def test_split_with_secret_labels_is_ignored(self, tmp_path: Path) -> None:
        self.write_table(tmp_path / "train-0.parquet", {"image": [png(0), png(1)], "label": [0, 1]})
        self.write_table(tmp_path / "test-0.parquet", {"image": [png(2)], "label": [-1]})
        assert list(open_dataset(tmp_path).splits) == ["train"]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"photo": [b""], "label": [0]}, "no column of images"),
            ({"image": [b"", b""], "label": [0, None]}, "row 1 has no label"),
            ({"image": [b"", b""], "label": [0.5, 1.0]}, "integers or strings"),
            ({"image": [b"", b""], "label": [0, 10**12]}, "out of range"),
            ({"image": [b"", b""], "label": [3, 3]}, "only one class: 3"),
        ],
    )
    def test_invalid_table_is_rejected(self, tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
        with pytest.raises(DataError, match=message):
            check_several_classes(open_dataset(self.write_table(tmp_path / "d.parquet", columns)))

    def test_row_without_bytes_is_an_error(self, tmp_path: Path) -> None:
        data = open_dataset(self.write_table(tmp_path / "d.parquet", {"image": [b"x", None], "label": [0, 1]}))
        with pytest.raises(DataError, match="000001 has no bytes"):
            data.first_split.read(1)

    def test_noise_and_mixed_shards_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not a parquet file"):
            open_dataset(write(tmp_path / "noise.parquet", b"noise"))
        place = parquet(tmp_path / "set")
        self.write_table(place / "data" / "train-9.parquet", {"image": [b"x"], "label": [0]})
        with pytest.raises(DataError, match="other columns"):
            open_dataset(place)


def test_missing_pyarrow_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(parquet_module, "import_module", absent)
    with pytest.raises(MissingDependencyError, match="pyarrow") as caught:
        open_dataset(write(tmp_path / "d.parquet", b""))
    assert caught.value.hint == "pip install 'vitkit[parquet]'"


@pytest.mark.parametrize(
    ("kind", "message"), [("uint64", "label out of range"), ("timestamp[ns]", "got timestamp"), ("two", "2 columns")]
)
def test_unusual_parquet_columns_are_named(tmp_path: Path, kind: str, message: str) -> None:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = arrow.array([samples()[0].png, samples()[1].png])
    labels = (
        arrow.array([0, 2**64 - 1], arrow.uint64()) if kind == "uint64" else arrow.array([1, 1_700_000_000_123_456_789])
    )
    columns = {"image": images, "label": labels.cast(kind) if kind == "timestamp[ns]" else labels}
    names = ["image", "image", "label"] if kind == "two" else ["image", "label"]
    writer.write_table(
        arrow.Table.from_arrays([columns[name] for name in names], names=names), str(tmp_path / "a.parquet")
    )
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_huge_tar_label_is_out_of_range(tmp_path: Path) -> None:
    image = samples()[0].png
    write(tmp_path / "a.tar", tar_bytes({"1.png": image, "1.json": json.dumps({"label": 10**30}).encode()}))
    with pytest.raises(DataError, match="label out of range"):
        open_dataset(tmp_path)


def test_images_next_to_archives_are_left_out(tmp_path: Path) -> None:
    webdataset_cls(tmp_path)
    write(tmp_path / "loose.jpg", samples()[0].png)
    assert open_dataset(tmp_path).left_out == ("loose.jpg",)
    assert open_dataset(tmp_path / "train-000000.tar").left_out == ()
