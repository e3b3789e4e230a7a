"""CIFAR-10 or CIFAR-100 goes in, as folder or archive, in the python or the binary version; a data set comes out."""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.data.source import DataSet
from vitkit.data.sources.base import (
    ArraySource,
    check_expansion,
    check_labels,
    class_numbers,
    data_set,
    listing,
    numbered,
    some,
)
from vitkit.data.sources.safe_pickle import read_pickle

PIXELS = 3 * 32 * 32
MOST_BYTES = 1 << 30
AT_ONCE = 1 << 18
"""Bytes that are unpacked in one step."""
PYTHON = re.compile(r"data_batch_\d+|test_batch|batches\.meta|train|test|meta")
BINARY = re.compile(r"(data_batch_\d+|test_batch|train|test)\.bin|batches\.meta\.txt|fine_label_names\.txt")
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-100-python.tar.gz", "cifar-100-binary.tar.gz")


@dataclass(frozen=True)
class Batch:
    """The images and labels of one file."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def has_cifar(place: Path) -> bool:
    """Whether this is a CIFAR folder or archive, or a folder with one in it."""
    return bool(find_cifar(place))


def find_cifar(place: Path) -> list[Path]:
    """The folder or archive with CIFAR's files; an unpacked folder is taken before the archive it came from."""
    if place.is_file():
        return [place] if place.name.lower().endswith((".tar.gz", ".tgz")) else []
    if is_cifar_folder(place):
        return [place]
    folders = [place / name for name in FOLDERS if is_cifar_folder(place / name)]
    return folders or [place / name for name in ARCHIVES if (place / name).is_file()]


def is_cifar_folder(folder: Path) -> bool:
    """Whether CIFAR's files lie directly in the folder."""
    names = {path.name for path in listing(folder) if path.is_file()}
    return bool(names & {"data_batch_1", "data_batch_1.bin"}) or {"train", "meta"} <= names or "train.bin" in names


def open_cifar(place: Path) -> DataSet:
    """CIFAR-10, or CIFAR-100 with its 100 fine labels. The python version is read without unpickling it."""
    found = find_cifar(place)
    if len(found) != 1:
        raise DataError(
            f"{place} has {len(found) or 'no'} CIFAR sets",
            expected="cifar-10-batches-py, its archive or the like, and one of them",
            got=some([path.name for path in found]) or None,
        )
    batches: dict[str, Batch] = {}
    classes: tuple[str, ...] = ()
    binary = False
    for name, content in read_files(found[0]):
        where = f"{found[0]}/{name}"
        binary = name.endswith((".bin", ".txt"))
        if name.endswith(".txt"):
            classes = tuple(line.strip() for line in content.decode("latin-1").splitlines() if line.strip())
        elif name.endswith(".bin"):
            batches[name[:-4]] = read_binary(content, fine=name in {"train.bin", "test.bin"}, where=where)
        elif name.endswith("meta"):
            classes = read_meta(content, where=where)
        else:
            batches[name] = read_python(content, where=where)
    if not batches:
        raise DataError(f"{found[0]} has none of CIFAR's files", expected="data_batch_1, or train, or either with .bin")
    fine = "train" in batches or "test" in batches
    kind = f"CIFAR-{'100' if fine else '10'}, {'binary' if binary else 'python'} version"
    return cifar_data(place, kind=kind, batches=batches, classes=classes)


class Bounded(io.BufferedIOBase):
    """What is in a packed file, read from its beginning to no more than images unpack to."""

    def __init__(self, unpacked: gzip.GzipFile, place: Path) -> None:
        super().__init__()
        self.unpacked, self.place, self.packed, self.taken = unpacked, place, place.stat().st_size, 0

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes; a DataError once they are too many."""
        content = self.unpacked.read(size)
        self.taken += len(content)
        check_expansion(self.taken, packed=self.packed, where=str(self.place))
        return content


def read_files(place: Path) -> Iterator[tuple[str, bytes]]:
    """CIFAR's files in a folder or an archive, by name; nothing is unpacked to the disk."""
    if place.is_dir():
        paths = [path for path in listing(place) if path.is_file()]
        wanted = wanted_names([path.name for path in paths])
        for path in paths:
            if path.name in wanted:
                yield path.name, path.read_bytes()
        return
    try:
        with (
            gzip.open(place) as unpacked,
            tarfile.open(fileobj=Bounded(unpacked, place), mode="r|", bufsize=AT_ONCE) as tar,
        ):
            for member in tar:
                name = member.name.rpartition("/")[2]
                if not member.isreg() or not (PYTHON.fullmatch(name) or BINARY.fullmatch(name)):
                    continue
                if member.size > MOST_BYTES:
                    raise DataError(f"{place}: {name} is too long for CIFAR", expected="at most 1 GB")
                file = tar.extractfile(member)
                yield name, file.read() if file else b""
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{place} is not a whole .tar.gz: {error}", hint="fetch it again") from error


def wanted_names(names: list[str]) -> set[str]:
    """The names of one version: binary where both are there."""
    binary = {name for name in names if BINARY.fullmatch(name)}
    if any(name.endswith(".bin") for name in binary):
        return binary
    return {name for name in names if PYTHON.fullmatch(name)}


def read_binary(content: bytes, *, fine: bool, where: str) -> Batch:
    """Rows of one label (CIFAR-100: coarse and fine) and 3 × 32 × 32 bytes."""
    width = PIXELS + (2 if fine else 1)
    if len(content) % width:
        raise DataError(f"{where} is damaged", expected=f"a multiple of {width} bytes", got=len(content))
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    return Batch(channels_last(rows[:, -PIXELS:]), rows[:, -PIXELS - 1].astype(np.int64))


def read_python(content: bytes, *, where: str) -> Batch:
    """A pickled dict of data and labels (CIFAR-100: fine_labels)."""
    values = dict_in(content, where=where)
    data, labels = values.get("data"), values.get("fine_labels", values.get("labels"))
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
        raise DataError(f"{where} has no images", expected=f"data, N × {PIXELS} bytes")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise DataError(f"{where} has no labels", expected=f"{len(data)} whole numbers")
    try:
        return Batch(channels_last(data), np.asarray(labels, dtype=np.int64))
    except OverflowError as error:
        raise DataError(f"{where} has a label out of range") from error


def read_meta(content: bytes, *, where: str) -> tuple[str, ...]:
    """The names of the classes."""
    values = dict_in(content, where=where)
    names = values.get("fine_label_names", values.get("label_names"))
    if not isinstance(names, list):
        raise DataError(f"{where} has no label_names")
    return tuple(name.decode("latin-1") if isinstance(name, bytes) else str(name) for name in names)


def dict_in(content: bytes, *, where: str) -> dict[str, object]:
    """A pickled dict, whose keys are bytes or texts by the Python that wrote it."""
    values = read_pickle(content, where=where)
    if not isinstance(values, dict):
        raise DataError(f"{where} is not one of CIFAR's files", expected="a dict", got=type(values).__name__)
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in values.items()}


def channels_last(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """N × 3072, red before green before blue, as N × 32 × 32 × 3."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def cifar_data(place: Path, *, kind: str, batches: dict[str, Batch], classes: tuple[str, ...]) -> DataSet:
    """The batches together: names tell the batch and the row, so both versions split alike."""
    named = classes or class_numbers((batch.labels for batch in batches.values()), where=str(place))
    splits = {}
    for split in ("train", "test"):
        parts = sorted(name for name in batches if name.startswith("test") == (split == "test"))
        if not parts:
            continue
        labels = np.concatenate([batches[name].labels for name in parts])
        check_labels(labels, classes=len(named), where=f"{split} of {place}")
        splits[split] = ArraySource(
            np.concatenate([batches[name].images for name in parts]),
            kind=kind,
            classes=named,
            labels=labels,
            names=[row for name in parts for row in numbered(name, len(batches[name].labels))],
        )
    return data_set(place, splits)
