"""CIFAR, IDX, .npz and MATLAB files and the embedded digits, whole and damaged."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from data.layouts import cifar_binary, cifar_python, cifar_rows, idx, idx_bytes, samples, tar_bytes, write
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import savemat

from vitkit.core.errors import DataError
from vitkit.data.layouts.cifar import check_complete
from vitkit.data.layouts.published import read_matlab
from vitkit.data.layouts.registry import open_dataset


def test_cifar_100_has_fine_labels(tmp_path: Path) -> None:
    names = [f"fine {i}" for i in range(100)]
    for part, rows in (("train", samples()[:12]), ("test", samples()[12:])):
        fine = [97 + row.label for row in rows]
        values = {b"data": cifar_rows(rows), b"coarse_labels": [0] * 12, b"fine_labels": fine}
        write(tmp_path / "python" / "cifar-100-python" / part, pickle.dumps(values, protocol=2))
        labels = np.array([[0, label] for label in fine], dtype=np.uint8)
        content = np.concatenate([labels, cifar_rows(rows)], axis=1).tobytes()
        write(tmp_path / "binary" / "cifar-100-binary" / f"{part}.bin", content)
    meta = {b"fine_label_names": [name.encode() for name in names], b"coarse_label_names": []}
    write(tmp_path / "python" / "cifar-100-python" / "meta", pickle.dumps(meta, protocol=2))
    write(tmp_path / "binary" / "cifar-100-binary" / "fine_label_names.txt", "\n".join(names))
    python, binary = open_dataset(tmp_path / "python"), open_dataset(tmp_path / "binary")
    assert (python.layout, binary.layout) == ("CIFAR-100, python version", "CIFAR-100, binary version")
    assert python.classes == binary.classes == tuple(names)
    for split in ("train", "test"):
        assert python.splits[split].labels.tolist() == binary.splits[split].labels.tolist()
        assert [python.splits[split].name(i) for i in range(12)] == [binary.splits[split].name(i) for i in range(12)]


def test_cifar_batches_are_in_order(tmp_path: Path) -> None:
    for batch in (2, 1):
        rows = samples()[batch * 6 : batch * 6 + 6]
        values = {"data": cifar_rows(rows), "labels": [row.label for row in rows]}
        write(tmp_path / f"data_batch_{batch}", pickle.dumps(values))
    source = open_dataset(tmp_path).splits["train"]
    assert (source.name(0), source.name(6)) == ("data_batch_1/000000", "data_batch_2/000000")
    np.testing.assert_array_equal(source.read(0), samples()[6].pixels)


def test_missing_part_of_published_cifar_is_named() -> None:
    published = dict.fromkeys([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], 10_000)
    check_complete(published, where="here")
    check_complete({"data_batch_1": 12}, where="here")
    del published["data_batch_4"]
    with pytest.raises(DataError, match=r"here is incomplete.*10,000 images in data_batch_4.*no data_batch_4"):
        check_complete(published, where="here")
    with pytest.raises(DataError, match=r"here is incomplete.*40,000 in train"):
        check_complete({"train": 40_000, "test": 10_000}, where="here")


def test_damaged_cifar_batch_is_named(tmp_path: Path) -> None:
    place = cifar_python(tmp_path / "python")
    batch = place / "cifar-10-batches-py" / "data_batch_1"
    whole = batch.read_bytes()
    for content in (b"cos\nsystem\n(S'true'\ntR.", whole[:500], pickle.dumps([1]), pickle.dumps({b"data": b""})):
        batch.write_bytes(content)
        with pytest.raises(DataError, match="data_batch_1"):
            open_dataset(place)
    binary = cifar_binary(tmp_path / "binary")
    with (binary / "test_batch.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged"):
        open_dataset(binary)


def test_invalid_cifar_archive_is_rejected(tmp_path: Path) -> None:
    place = cifar_binary(tmp_path / "set")
    write(place / "batches.meta.txt", "a\nb")
    with pytest.raises(DataError, match="label out of range"):
        open_dataset(place)
    for name, content in {
        "other": tar_bytes({"x": b""}, mode="w:gz"),
        "noise": b"noise",
        "cut": gzip.compress(b"x")[:9],
    }.items():
        with pytest.raises(DataError, match=f"{name}.tar.gz"):
            open_dataset(write(tmp_path / f"{name}.tar.gz", content))


def test_idx_files_of_torchvision_are_found(tmp_path: Path) -> None:
    raw = idx(tmp_path / "MNIST" / "raw")
    write(raw / "train-images-idx3-ubyte.gz", b"not read")
    assert {split: len(source) for split, source in open_dataset(tmp_path).splits.items()} == {"train": 12, "test": 12}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\0\0\0\x0c\0\0\0\x20\0\0\0\x20abc", "damaged"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\xff" * 12, "damaged"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + b"\0" * 12, "not an IDX file"),
        ("train-images-idx3-ubyte", b"", "not an IDX file"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03\0", "damaged"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(11, np.uint8)), "one label per image"),
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(13, np.uint8)), "one label per image"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write(idx(tmp_path) / name, content)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_truncated_gzip_and_missing_labels_are_errors(tmp_path: Path) -> None:
    place = idx(tmp_path)
    labels = place / "train-labels-idx1-ubyte"
    write(place / "train-labels-idx1-ubyte.gz", gzip.compress(labels.read_bytes())[:-6])
    labels.unlink()
    with pytest.raises(DataError, match="damaged"):
        open_dataset(place)
    (place / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="no labels next to it"):
        open_dataset(place)


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 3), (6, 5, 4, 7)])
def test_npz_arrays_are_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=np.array([[0], [1]] * 3))
    source = open_dataset(tmp_path).splits["train"]
    assert source.labels.tolist() == [0, 1] * 3
    np.testing.assert_array_equal(source.read(4), images[4])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4)), "labels": np.arange(2)}, "expected uint8"),
        ({"images": np.zeros((2, 4), np.uint8), "labels": np.arange(2)}, "expected uint8"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0.0, 1.0])}, "N integers"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.arange(3)}, "one label per image"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, -1])}, "out of range"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([0, 10**9])}, "out of range"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([{}, {}])}, "objects are refused|cannot be read"),
        ({"pictures": np.zeros((2, 4, 4), np.uint8)}, "no images with labels"),
    ],
)
def test_invalid_npz_arrays_are_rejected(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "d.npz")


def test_noise_in_npz_is_rejected(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04noise", b"noise", pickle.dumps({})):
        with pytest.raises(DataError):
            open_dataset(write(tmp_path / "d.npz", content))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "f8"])
def test_matlab_files_equal_scipy(tmp_path: Path, dtype: str, compressed: bool) -> None:
    values = {"a": np.arange(1, 100, dtype=dtype), "labels": np.array([7], dtype=dtype), "text": "words"}
    savemat(tmp_path / "m.mat", values, do_compression=compressed)
    found = read_matlab((tmp_path / "m.mat").read_bytes(), where="m.mat")
    assert found["a"].tolist() == list(range(1, 100))
    assert found["labels"].tolist() == [7]
    assert "text" not in found


@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_matlab_file_is_rejected(position: int, value: int, cut: bool, matlab_file: bytes) -> None:
    position %= len(matlab_file)
    damaged = matlab_file[:position] if cut else matlab_file[:position] + bytes([value]) + matlab_file[position + 1 :]
    try:
        read_matlab(damaged, where="m.mat")
    except DataError:
        return


@pytest.fixture(scope="module")
def matlab_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("matlab") / "m.mat"
    savemat(path, {"labels": np.arange(50.0), "more": np.arange(9)})
    return path.read_bytes()


def test_embedded_digits_are_complete() -> None:
    data = open_dataset("digits")
    train, test = data.splits["train"], data.splits["test"]
    assert len(train) + len(test) == 1797
    assert not {train.name(i) for i in range(len(train))} & {test.name(i) for i in range(len(test))}
    content = np.stack([np.asarray(test.read(i)) for i in range(len(test))])
    assert (content.dtype, content.shape[1:], content.min(), content.max()) == (np.uint8, (8, 8), 0, 255)
    shares = np.bincount(test.labels) / (np.bincount(test.labels) + np.bincount(train.labels))
    np.testing.assert_allclose(shares, 0.2, atol=0.005)  # whole images of about 180


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.array([{}, {}], dtype=object), "contains objects"),
        (np.zeros(2, dtype=[(f"{number:01000}", "u1") for number in range(20)]), "header is too large"),
    ],
    ids=["objects", "large header"],
)
def test_errors_of_npz_do_not_advise_to_allow_pickles(tmp_path: Path, images: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(2, np.int64))
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(tmp_path)
    assert "allow_pickle" not in str(caught.value)
