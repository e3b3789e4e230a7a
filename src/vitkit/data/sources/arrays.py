"""IDX files or an .npz of arrays go in, a data set of images in memory comes out."""

import gzip
import math
import re
import struct
import zipfile
import zlib
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
    split_called,
)
from vitkit.data.sources.webdataset import class_names_beside

IDX_NAME = re.compile(r"(?P<set>.*?)(?P<split>[A-Za-z]+|t10k)[-_.](?P<what>images|labels)[-.]idx[13][-.]ubyte(\.gz)?")
IDX_FOLDERS = (".", "raw", "MNIST/raw", "FashionMNIST/raw")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FASHION_LABELS = {60_000: (9, 0, 0, 3, 0, 2, 7, 2, 5, 5), 10_000: (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)}
"""How Fashion-MNIST's label files begin: they have MNIST's names and sizes, and only this tells them apart."""


def has_idx(place: Path) -> bool:
    """Whether there are IDX files of images in the folder, or in the `raw` folder that torchvision makes."""
    return bool(idx_files(place))


def idx_files(place: Path) -> dict[tuple[str, str], Path]:
    """The IDX files of the first folder that has some, by set and split, and what is in them; plain ones before .gz."""
    for folder in (place / name for name in IDX_FOLDERS):
        found: dict[tuple[str, str], Path] = {}
        for path in listing(folder):
            if matched := IDX_NAME.fullmatch(path.name):
                split = "test" if matched["split"].lower() == "t10k" else split_called(matched["split"])
                if split:
                    found.setdefault((matched["set"] + split, matched["what"]), path)
        if any(what == "images" for _, what in found):
            return found
    return {}


def open_idx(place: Path) -> DataSet:
    """MNIST, Fashion-MNIST and others in their format: train and t10k (test), images and labels."""
    files = idx_files(place)
    splits = sorted({split for split, what in files if what == "images"})
    if not splits or not set(splits) <= {"train", "val", "test"}:
        raise DataError(
            f"{place} has IDX files of {len(splits) or 'no'} sets",
            expected="train-images-idx3-ubyte and the like, of one set",
            got=some(splits) or None,
        )
    images, labels = {}, {}
    for split in splits:
        if (split, "labels") not in files:
            raise DataError(f"{files[split, 'images']} has no labels beside it", expected="…-labels-idx1-ubyte")
        images[split] = read_idx(files[split, "images"])
        labels[split] = read_idx(files[split, "labels"]).astype(np.int64)
        check_counts(images[split], labels[split], where=str(files[split, "images"]))
    folder = files[splits[0], "images"].parent
    fashion = all(
        tuple(of_split[:10].tolist()) == FASHION_LABELS.get(len(of_split), ()) for of_split in labels.values()
    )
    named = class_names_beside(folder) or (FASHION if fashion else ())
    return array_data(place, kind="IDX files", images=images, labels=labels, classes=named)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes, plain or in gzip."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\0\0\x08" or magic[3] not in (1, 3, 4):
                raise DataError(
                    f"{path} is not an IDX file of bytes", expected="00 00 08 and 1 or 3", got=magic.hex(" ")
                )
            shape = struct.unpack(f">{magic[3]}I", file.read(4 * magic[3]))
            count = math.prod(shape)
            check_expansion(count, packed=path.stat().st_size, where=f"{path} is damaged, or")
            content = file.read(count)
            rest = file.read(1)
    except (EOFError, zlib.error, gzip.BadGzipFile, struct.error) as error:
        raise DataError(f"{path} is damaged: {error}", hint="fetch it again") from error
    if len(content) != count or rest:
        raise DataError(
            f"{path} is damaged",
            expected=f"{count} bytes for {' × '.join(map(str, shape))}",
            got=f"more than {count}" if rest else len(content),
            hint="fetch it again",
        )
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)  # a bytearray can be written to


def has_npz(place: Path) -> bool:
    """Whether this is an .npz file, or a folder with some in it."""
    return bool(npz_files(place))


def npz_files(place: Path) -> list[Path]:
    """The .npz files of a place."""
    paths = [place] if place.is_file() else listing(place)
    return [path for path in paths if path.suffix.lower() == ".npz"]


def open_npz(place: Path) -> DataSet:
    """Arrays images and labels; or x_train, y_train, …; or train_images, train_labels, …; `classes` where it is there.

    Images are uint8, N × H × W or N × H × W × C.
    """
    files = npz_files(place)
    if len(files) != 1:
        raise DataError(
            f"{place} has {len(files) or 'no'} .npz files",
            expected="one",
            got=some([path.name for path in files]) or None,
        )
    images, labels = {}, {}
    try:
        if not zipfile.is_zipfile(files[0]):
            raise zipfile.BadZipFile("it is not a zip archive of arrays")
        # opened here, because np.load leaves the file open where the archive is damaged
        with files[0].open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            unpacked = sum(entry.file_size for entry in arrays.zip.infolist())
            check_expansion(unpacked, packed=files[0].stat().st_size, where=str(files[0]))
            pairs = npz_pairs(list(arrays.files), where=str(files[0]))
            for split, (image, label) in pairs.items():
                images[split] = image_array(arrays[image], where=f"{files[0]}: {image}")
                labels[split] = label_array(arrays[label], where=f"{files[0]}: {label}")
                check_counts(images[split], labels[split], where=f"{files[0]}: {image}")
            classes = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays.files else ()
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{files[0]} cannot be read: {error}", hint="arrays of objects are refused, as they could run code"
        ) from error
    return array_data(place, kind=".npz arrays", images=images, labels=labels, classes=classes)


def npz_pairs(keys: list[str], *, where: str) -> dict[str, tuple[str, str]]:
    """The keys of images and labels of each split.

    >>> npz_pairs(["x_test", "x_train", "y_test", "y_train"], where="d.npz")
    {'train': ('x_train', 'y_train'), 'test': ('x_test', 'y_test')}
    """
    found = {}
    for split in ("train", "val", "test"):
        for pair in ((f"x_{split}", f"y_{split}"), (f"{split}_images", f"{split}_labels")):
            if pair[0] in keys and pair[1] in keys:
                found[split] = pair
    if not found and "images" in keys and "labels" in keys:
        found["all"] = ("images", "labels")
    if not found:
        raise DataError(
            f"{where} has no images with labels", expected="images, labels or x_train, y_train", got=some(keys)
        )
    return found


def image_array(array: NDArray[np.generic], *, where: str) -> NDArray[np.uint8]:
    """The array if it can be images."""
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or 0 in array.shape:
        shape = " × ".join(map(str, array.shape))
        raise DataError(where, expected="uint8, N × H × W or N × H × W × C", got=f"{array.dtype}, {shape}")
    return array.astype(np.uint8, copy=False)


def label_array(array: NDArray[np.generic], *, where: str) -> NDArray[np.int64]:
    """The array if it can be labels: N numbers, or N × 1."""
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise DataError(where, expected="N whole numbers", got=f"{array.dtype}, {' × '.join(map(str, array.shape))}")
    return flat.astype(np.int64)


def check_counts(images: NDArray[np.uint8], labels: NDArray[np.int64], *, where: str) -> None:
    """Refuse images and labels that are not equally many."""
    if len(images) != len(labels):
        raise DataError(f"{where} has other than one label an image", expected=len(images), got=len(labels))


def array_data(
    place: Path,
    *,
    kind: str,
    images: dict[str, NDArray[np.uint8]],
    labels: dict[str, NDArray[np.int64]],
    classes: tuple[str, ...],
) -> DataSet:
    """A data set of arrays, with numbers for names where there are none."""
    named = classes or class_numbers(labels.values(), where=str(place))
    for split, of_split in labels.items():
        check_labels(of_split, classes=len(named), where=f"{split} of {place}")
    splits = {
        split: ArraySource(
            images[split], kind=kind, classes=named, labels=labels[split], names=numbered(split, len(labels[split]))
        )
        for split in images
    }
    return data_set(place, splits)
