"""CIFAR-10 and CIFAR-100: directories or archives, in the python or the binary version."""

import gzip
import io
import math
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.core.pickles import GlobalName, PickleReader
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.base import make_array_dataset, number_names
from vitkit.data.layouts.files import check_expansion, list_directory, select_one

PIXELS = 3 * 32 * 32
MAX_FILE_BYTES = 1 << 30
BUFFER_BYTES = 1 << 18
"""Bytes that are decompressed in one step."""
PYTHON = re.compile(r"data_batch_\d+|test_batch|batches\.meta|train|test|meta")
BINARY = re.compile(r"(data_batch_\d+|test_batch|train|test)\.bin|batches\.meta\.txt|fine_label_names\.txt")
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz")

PUBLISHED = (
    dict.fromkeys([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], 10_000),
    {"train": 50_000, "test": 10_000},
)
"""Images of each file of CIFAR-10 and of CIFAR-100."""

# Names that the pickles refer to
ENCODE = "_codecs encode"
DTYPE = "numpy dtype"
NDARRAY = "numpy ndarray"
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
FROM_BUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")
BYTES = "__builtin__ bytes"
"""Old protocols encode empty bytes as a call without arguments."""


CifarBatch = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images and labels of one file."""


def find_cifar(path: Path) -> list[Path]:
    """Return the directories with CIFAR's files, or else the archives: the path itself, or in it."""
    if path.is_file():
        return [path] if path.name.lower().endswith((".tar.gz", ".tgz")) else []
    if is_cifar_directory(path):
        return [path]
    directories = [path / name for name in FOLDERS if is_cifar_directory(path / name)]
    return directories or [path / name for name in ARCHIVES if (path / name).is_file()]


def is_cifar_directory(path: Path) -> bool:
    """Return whether CIFAR's files are directly in the directory."""
    names = {file.name for file in list_directory(path) if file.is_file()}
    return bool(names & {"data_batch_1", "data_batch_1.bin"}) or {"train", "meta"} <= names or "train.bin" in names


def open_cifar(path: Path) -> Dataset:
    """Open CIFAR-10, or CIFAR-100 with its 100 fine labels. The python version is read without unpickling."""
    expected = "one, such as cifar-10-batches-py or its archive"
    root = select_one(path, find_cifar(path), content="CIFAR datasets", expected=expected)
    batches: dict[str, CifarBatch] = {}
    classes: tuple[str, ...] = ()
    is_binary = False
    for name, content in _read_files(root):
        where = f"{root}/{name}"
        is_binary = name.endswith((".bin", ".txt"))
        if name.endswith(".txt"):
            classes = tuple(line.strip() for line in content.decode("latin-1").splitlines() if line.strip())
        elif name.endswith(".bin"):
            batches[name[:-4]] = _read_binary(content, fine=name in {"train.bin", "test.bin"}, where=where)
        elif name.endswith("meta"):
            values = _read_dict(content, where=where)
            names = values.get("fine_label_names", values.get("label_names"))
            if not isinstance(names, list):
                raise DataError(f"{where} has no label_names")
            classes = tuple(map(_to_str, names))
        else:
            batches[name] = _read_python(content, where=where)
    if not batches:
        raise DataError(f"{root} has none of CIFAR's files", expected="data_batch_1 or train, or these with .bin")
    check_complete({name: len(labels) for name, (_, labels) in batches.items()}, where=str(root))
    fine = "train" in batches or "test" in batches
    splits: dict[str, list[str]] = {}
    for name in sorted(batches):
        splits.setdefault("test" if name.startswith("test") else "train", []).append(name)
    return make_array_dataset(
        path,
        layout=f"CIFAR-{'100' if fine else '10'}, {'binary' if is_binary else 'python'} version",
        images={split: np.concatenate([batches[name][0] for name in parts]) for split, parts in splits.items()},
        labels={split: np.concatenate([batches[name][1] for name in parts]) for split, parts in splits.items()},
        classes=classes,
        names={  # of batch and row, so both versions are split equally
            split: [row for name in parts for row in number_names(name, len(batches[name][1]))]
            for split, parts in splits.items()
        },
    )


def check_complete(sizes: Mapping[str, int], *, where: str) -> None:
    """Raise DataError if one file has as many images as in the published dataset, and another is short or missing."""
    for published in PUBLISHED:
        is_full = {name: sizes.get(name) == size for name, size in published.items()}
        if any(is_full.values()) and (short := [name for name in published if not is_full[name]]):
            actual = ", ".join(f"{sizes[name]:,} in {name}" if name in sizes else f"no {name}" for name in short)
            expected = f"{published[short[0]]:,} images in {short[0]}"
            raise DataError(f"{where} is incomplete", expected=expected, got=actual, hint="download the dataset again")


class BoundedReader(io.BufferedIOBase):
    """Reader of a gzip file that fails when it decompresses to far more than images do."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        super().__init__()
        self.file, self.path, self.compressed, self.total = file, path, path.stat().st_size, 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; raise DataError once they are too many."""
        content = self.file.read(size)
        self.total += len(content)
        check_expansion(self.total, compressed=self.compressed, where=str(self.path))
        return content


def _read_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of CIFAR's files in a directory or archive. Nothing is unpacked to the disk."""
    if path.is_dir():
        files = {file.name: file for file in list_directory(path) if file.is_file()}
        binary = list(filter(BINARY.fullmatch, files))
        # If a directory has both versions, the binary one is read.
        selected = binary if any(name.endswith(".bin") for name in binary) else filter(PYTHON.fullmatch, files)
        yield from ((name, read_bytes(files[name], max_bytes=MAX_FILE_BYTES)) for name in selected)
        return
    try:
        with (
            gzip.open(path) as unzipped,
            tarfile.open(fileobj=BoundedReader(unzipped, path), mode="r|", bufsize=BUFFER_BYTES) as tar,
        ):
            for member in tar:
                name = member.name.rpartition("/")[2]
                if not member.isreg() or not (PYTHON.fullmatch(name) or BINARY.fullmatch(name)):
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise DataError(f"{path}: {name} is too large for CIFAR", expected="at most 1 GB")
                content = tar.extractfile(member)
                yield name, content.read() if content else b""
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a complete .tar.gz: {error}", hint="download it again") from error


def _read_binary(content: bytes, *, fine: bool, where: str) -> CifarBatch:
    """Read rows of one label (CIFAR-100: coarse and fine) and 3 × 32 × 32 bytes."""
    row_size = PIXELS + (2 if fine else 1)
    if len(content) % row_size:
        raise DataError(
            f"{where} is damaged",
            expected=f"a multiple of {row_size} bytes",
            got=len(content),
            hint="download the dataset again",
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, row_size)
    return _to_hwc(rows[:, -PIXELS:]), rows[:, -PIXELS - 1].astype(np.int64)


def _read_python(content: bytes, *, where: str) -> CifarBatch:
    """Read a pickled dict of data and labels (CIFAR-100: fine_labels)."""
    values = _read_dict(content, where=where)
    data, labels = values.get("data"), values.get("fine_labels", values.get("labels"))
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
        raise DataError(f"{where} has no images", expected=f"data, N × {PIXELS} bytes")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise DataError(f"{where} has no labels", expected=f"{len(data)} integers")
    try:
        return _to_hwc(data), np.asarray(labels, dtype=np.int64)
    except OverflowError as error:
        raise DataError(f"{where} has a label out of range") from error


def _read_dict(content: bytes, *, where: str) -> dict[str, object]:
    """Read a pickled dict whose keys are bytes or strings, depending on the Python version that wrote it."""
    values = read_pickle(content, where=where)
    if not isinstance(values, dict):
        raise DataError(f"{where} is not one of CIFAR's files", expected="a dict", got=type(values).__name__)
    return {_to_str(key): value for key, value in values.items()}


def _to_str(text: object) -> str:
    return text.decode("latin-1") if isinstance(text, bytes) else str(text)


def _to_hwc(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return N × 3072 bytes, planes of red, green and blue, as N × 32 × 32 × 3."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


# Pickles of the python version: plain values and uint8 arrays of NumPy. Nothing in them is run.


@dataclass
class ArrayType:
    """Element type of an array, by NumPy's code."""

    code: object


@dataclass
class PendingArray:
    """An array whose content may follow as its state."""

    array: NDArray[np.uint8] | None = None


def read_pickle(content: bytes, *, where: str) -> object:
    """Return the plain value in a pickle; raise `DataError` if it contains anything else."""
    try:
        value = ArrayReader().read(io.BytesIO(content))
    except ValueError as error:
        raise DataError(f"{where} is not a plain pickle: {error}", hint="download it again") from error
    # Data files nest arrays one level deep.
    if isinstance(value, dict):
        return {key: item.array if isinstance(item, PendingArray) else item for key, item in value.items()}
    return value.array if isinstance(value, PendingArray) else value


class ArrayReader(PickleReader):
    """Pickle reader that accepts uint8 arrays of NumPy."""

    max_opcodes = 2_000_000
    """The 50,000 images of CIFAR-100 take 300,000."""
    allowed_globals = frozenset({BYTES, ENCODE, DTYPE, NDARRAY, *RECONSTRUCT, *FROM_BUFFER})

    def decode_str(self, text: str) -> bytes:
        """Return the bytes of a Python 2 `str`."""
        return text.encode("latin-1")

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return the value that stands for a call of NumPy."""
        if name == ENCODE and isinstance(arguments[0], str) and arguments[1] in ("latin1", b"latin1"):
            return arguments[0].encode("latin-1")
        if name == BYTES and arguments == ():
            return b""
        if name == DTYPE:
            return ArrayType(arguments[0])
        if name in RECONSTRUCT and arguments[0] == GlobalName(NDARRAY):
            return PendingArray()
        if name in FROM_BUFFER:
            buffer, dtype, shape, order = arguments
            return PendingArray(_make_array(shape, dtype, order in ("F", b"F"), buffer))
        return super().call(name, arguments)

    def set_state(self, instance: object, state: object) -> None:
        """Fill an array. The state of a dtype is its byte order, which single bytes do not have."""
        if isinstance(instance, PendingArray) and isinstance(state, tuple):
            _, shape, dtype, is_fortran, buffer = state
            instance.array = _make_array(shape, dtype, bool(is_fortran), buffer)
        elif not isinstance(instance, ArrayType):
            super().set_state(instance, state)


def _make_array(shape: object, dtype: object, is_fortran: bool, buffer: object) -> NDArray[np.uint8]:
    if not isinstance(dtype, ArrayType) or dtype.code not in ("u1", b"u1", "|u1", b"|u1"):
        raise ValueError("it contains an array that is not uint8")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("it contains an array without a shape")
    if not isinstance(buffer, bytes | bytearray) or len(buffer) != math.prod(shape):
        raise ValueError(f"it contains an array whose bytes do not fill the shape {shape}")
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")
