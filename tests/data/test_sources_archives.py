"""WebDataset tars and parquet shards, read in place by several processes; and brace patterns."""

import json
import multiprocessing
import pickle
from pathlib import Path

import pytest
from data.layouts import CLASSES, parquet, samples, tar_bytes, webdataset_cls, write

from vitkit.core.errors import DataError
from vitkit.data.source import UNLABELLED, Source
from vitkit.data.sources import parquet as parquet_module
from vitkit.data.sources.detect import open_data
from vitkit.data.sources.webdataset import expand


def png(number: int) -> bytes:
    return samples()[number].png


def read_all(source: Source, order: list[int]) -> list[object]:
    return [source.content(i) for i in order]


@pytest.mark.parametrize("layout", ["tars", "parquet"])
def test_readers_in_several_processes_do_not_disturb_each_other(tmp_path: Path, layout: str) -> None:
    if layout == "parquet":
        pytest.importorskip("pyarrow")
    place = parquet(tmp_path) if layout == "parquet" else webdataset_cls(tmp_path)
    source = open_data(place).splits["train"]
    forwards = list(range(len(source)))
    wanted = read_all(source, forwards)
    assert read_all(pickle.loads(pickle.dumps(source)), forwards) == wanted
    with multiprocessing.get_context("spawn" if layout == "parquet" else "forkserver").Pool(2) as pool:
        orders = [forwards, forwards[::-1], forwards[::2] + forwards[1::2], forwards]
        for order, got in zip(orders, pool.starmap(read_all, [(source, order) for order in orders]), strict=True):
            assert got == [wanted[i] for i in order]


def test_numbers_get_names_from_classes_txt_and_are_their_own_without_it(tmp_path: Path) -> None:
    place = webdataset_cls(tmp_path)
    assert open_data(place).classes == CLASSES
    (place / "classes.txt").unlink()
    assert open_data(place).classes == ("0", "1", "2")
    write(place / "classes.txt", "a\nb")
    with pytest.raises(DataError, match="label out of range"):
        open_data(place)


def test_tars_without_any_label_are_unlabelled_but_some_without_is_an_error(tmp_path: Path) -> None:
    data = open_data(write(tmp_path / "a.tar", tar_bytes({"1.png": png(0), "2.png": png(1)})))
    assert (data.classes, data.first.labels.tolist()) == ((), [UNLABELLED] * 2)
    write(tmp_path / "a.tar", tar_bytes({"1.png": png(0), "2.png": png(1), "1.cls": b"0"}))
    with pytest.raises(DataError, match="1 of 2 without"):
        open_data(tmp_path / "a.tar")


def test_names_with_folders_and_other_members_are_well(tmp_path: Path) -> None:
    files = {
        "./x/1.PNG": png(0), "./x/1.cls": b" dog\n", "./x/1.seg.png": png(5), "./x/1.txt": b"a dog",
        "y/1.jpg": png(1), "y/1.json": json.dumps({"class": "cat"}).encode(), "y/._1.jpg": b"", "notes.md": b"",
    }  # fmt: skip
    data = open_data(write(tmp_path / "train-0.tar", tar_bytes(files)))
    source = data.splits["train"]
    assert data.classes == ("cat", "dog")
    assert [source.name(i) for i in range(2)] == ["train-0.tar/x/1.PNG", "train-0.tar/y/1.jpg"]
    assert source.labels.tolist() == [1, 0]
    assert source.content(1) == png(1)


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
def test_a_mistake_in_a_tar_is_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_data(write(tmp_path / "a.tar", tar_bytes(files)))


def test_a_cut_or_false_tar_is_named(tmp_path: Path) -> None:
    whole = tar_bytes({"1.cls": b"0", "1.png": png(0)})
    for content in (whole[: 1024 + 600], whole[:700], b"noise" * 1000, whole[:1024] + b"noise" * 1000):
        with pytest.raises(DataError, match=r"a\.tar"):
            open_data(write(tmp_path / "a.tar", content))


def test_a_tar_that_is_cut_after_it_was_opened_is_an_error_of_that_image(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", tar_bytes({"1.cls": b"0", "1.png": png(0), "2.cls": b"1", "2.png": png(1)}))
    source = open_data(path).first
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"ends within a\.tar/2\.png"):
        source.content(1)


def test_tars_of_which_only_some_name_their_split_are_an_error(tmp_path: Path) -> None:
    webdataset_cls(tmp_path)
    write(tmp_path / "more.tar", tar_bytes({"1.cls": b"0", "1.png": png(0)}))
    with pytest.raises(DataError, match=r"more\.tar"):
        open_data(tmp_path)


def test_a_pattern_names_the_files_that_are_missing(tmp_path: Path) -> None:
    write(tmp_path / "d-0.tar", tar_bytes({"1.cls": b"0", "1.png": png(0)}))
    with pytest.raises(DataError, match=r"d-1\.tar.*1 of 2"):
        open_data(f"{tmp_path}/d-{{0..1}}.tar")


@pytest.mark.parametrize("pattern", ["a-{0..999999999}.tar", "a-{3..1}.tar", "{0..999}{0..999}.tar"])
def test_a_pattern_of_too_many_files_is_refused(pattern: str) -> None:
    with pytest.raises(DataError, match="files"):
        expand(pattern)


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

    def test_plain_bytes_and_texts_as_labels_are_read(self, tmp_path: Path) -> None:
        images = [png(i) for i in range(5)]
        data = open_data(self.write_table(tmp_path / "d.parquet", {"img": [*images], "label": [*"babab"]}))
        assert data.classes == ("a", "b")
        assert data.first.labels.tolist() == [1, 0, 1, 0, 1]
        assert read_all(data.first, [4, 0, 3]) == [images[4], images[0], images[3]]
        assert data.first.name(4) == "d.parquet/000004"

    def test_only_so_many_bytes_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = open_data(parquet(tmp_path)).splits["train"]
        assert isinstance(source, parquet_module.ParquetSource)
        read_all(source, list(range(len(source))))
        assert len(source.kept) == 6
        monkeypatch.setattr(parquet_module, "CACHE_BYTES", 0)
        source.kept = ()
        wanted = [sample.png for sample in samples()[:16]]
        assert read_all(source, list(range(16))) == wanted
        assert len(source.kept) == 1

    def test_a_test_split_with_secret_labels_is_left_out(self, tmp_path: Path) -> None:
        self.write_table(tmp_path / "train-0.parquet", {"image": [png(0), png(1)], "label": [0, 1]})
        self.write_table(tmp_path / "test-0.parquet", {"image": [png(2)], "label": [-1]})
        assert list(open_data(tmp_path).splits) == ["train"]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"photo": [b""], "label": [0]}, "no column of images"),
            ({"image": [b"", b""], "label": [0, None]}, "row 1 has no label"),
            ({"image": [b"", b""], "label": [0.5, 1.0]}, "whole numbers or texts"),
            ({"image": [b"", b""], "label": [0, 10**12]}, "out of range"),
            ({"image": [b"", b""], "label": [3, 3]}, "one class only: 3"),
        ],
    )
    def test_a_mistake_is_named(self, tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_data(self.write_table(tmp_path / "d.parquet", columns))

    def test_a_row_without_bytes_is_an_error_of_that_image(self, tmp_path: Path) -> None:
        data = open_data(self.write_table(tmp_path / "d.parquet", {"image": [b"x", None], "label": [0, 1]}))
        with pytest.raises(DataError, match="000001 has no bytes"):
            data.first.content(1)

    def test_noise_and_shards_of_two_sets_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not a parquet file"):
            open_data(write(tmp_path / "noise.parquet", b"noise"))
        place = parquet(tmp_path / "set")
        self.write_table(place / "data" / "train-9.parquet", {"image": [b"x"], "label": [0]})
        with pytest.raises(DataError, match="other columns"):
            open_data(place)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(parquet_module, "import_module", absent)
    with pytest.raises(DataError, match="pyarrow") as caught:
        open_data(write(tmp_path / "d.parquet", b""))
    assert caught.value.hint == "pip install 'vitkit[parquet]'"
