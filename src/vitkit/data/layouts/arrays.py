"""Arrays of images in memory: IDX files, .npz archives and the embedded digits."""

import gzip
import math
import re
import struct
import zipfile
import zlib
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.formatting import shorten_list
from vitkit.core.pickles import describe_array_error
from vitkit.data.dataset import Dataset, hold_out
from vitkit.data.layouts.base import ArraySource, make_array_dataset, number_names
from vitkit.data.layouts.files import (
    check_expansion,
    list_directory,
    parse_split,
    read_class_names,
    select_one,
)

IDX_NAME = re.compile(
    r"(?P<prefix>.*?)(?P<split>[A-Za-z]+|t10k)[-_.](?P<content>images|labels)[-.]idx[13][-.]ubyte(\.gz)?"
)
IDX_FOLDERS = (".", "raw", "MNIST/raw", "FashionMNIST/raw")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FASHION_LABELS = {60_000: (9, 0, 0, 3, 0, 2, 7, 2, 5, 5), 10_000: (9, 2, 1, 1, 6, 1, 4, 6, 5, 7)}
"""First labels of Fashion-MNIST, whose files have the names and sizes of MNIST's."""


def find_idx_files(path: Path) -> dict[tuple[str, str], Path]:
    """Return the IDX files of the path or of torchvision's `raw` folder, by (split, content); plain ones before .gz."""
    for directory in (path / name for name in IDX_FOLDERS):
        files: dict[tuple[str, str], Path] = {}
        for file in list_directory(directory):
            if match := IDX_NAME.fullmatch(file.name):
                split = "test" if match["split"].lower() == "t10k" else parse_split(match["split"])
                if split:
                    files.setdefault((match["prefix"] + split, match["content"]), file)
        if any(content == "images" for _, content in files):
            return files
    return {}


def open_idx(path: Path) -> Dataset:
    """Open MNIST, Fashion-MNIST and others in their format: images and labels of train and t10k (test)."""
    files = find_idx_files(path)
    splits = sorted({split for split, content in files if content == "images"})
    if not splits or not set(splits) <= {"train", "val", "test"}:
        expected = "files such as train-images-idx3-ubyte, of one dataset"
        got = shorten_list(splits) or None
        raise DataError(f"{path} has IDX files of {len(splits) or 'no'} datasets", expected=expected, got=got)
    images, labels = {}, {}
    for split in splits:
        if (split, "labels") not in files:
            raise DataError(f"{files[split, 'images']} has no labels next to it", expected="…-labels-idx1-ubyte")
        images[split] = read_idx(files[split, "images"])
        labels[split] = read_idx(files[split, "labels"]).astype(np.int64)
        check_counts(images[split], labels[split], where=str(files[split, "images"]))
    is_fashion = all(
        tuple(of_split[:10].tolist()) == FASHION_LABELS.get(len(of_split), ()) for of_split in labels.values()
    )
    classes = read_class_names(files[splits[0], "images"].parent) or (FASHION if is_fashion else ())
    return make_array_dataset(path, layout="IDX files", images=images, labels=labels, classes=classes)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the array of an IDX file of bytes, plain or gzipped."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\0\0\x08" or magic[3] not in (1, 3, 4):
                raise DataError(
                    f"{path} is not an IDX file of bytes", expected="00 00 08 and 1 or 3", got=magic.hex(" ")
                )
            shape = struct.unpack(f">{magic[3]}I", file.read(4 * magic[3]))
            count = math.prod(shape)
            check_expansion(count, compressed=path.stat().st_size, where=f"{path} is damaged, or")
            content = file.read(count)
            excess = file.read(1)
    except (EOFError, zlib.error, gzip.BadGzipFile, struct.error) as error:
        raise DataError(f"{path} is damaged: {error}", hint="download it again") from error
    if len(content) != count or excess:
        expected = f"{count} bytes for {' × '.join(map(str, shape))}"
        got = f"more than {count}" if excess else len(content)
        raise DataError(f"{path} is damaged", expected=expected, got=got, hint="download it again")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)  # a bytearray is writable


def find_npz_files(path: Path) -> list[Path]:
    """Return the .npz files of a path."""
    files = [path] if path.is_file() else list_directory(path)
    return [file for file in files if file.suffix.lower() == ".npz"]


def open_npz(path: Path) -> Dataset:
    """Open arrays images and labels, or x_train, y_train, …, or train_images, train_labels, …, and optionally classes.

    Images are uint8, N × H × W or N × H × W × C.
    """
    archive = select_one(path, find_npz_files(path), content=".npz files", expected="one")
    images, labels = {}, {}
    try:
        if not zipfile.is_zipfile(archive):
            raise zipfile.BadZipFile("it is not a zip archive of arrays")
        # Opened here, because np.load does not close the file of a damaged archive.
        with archive.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            size = sum(entry.file_size for entry in arrays.zip.infolist())
            check_expansion(size, compressed=archive.stat().st_size, where=str(archive))
            for split, (image_key, label_key) in pair_arrays(list(arrays.files), where=str(archive)).items():
                images[split] = check_images(arrays[image_key], where=f"{archive}: {image_key}")
                labels[split] = check_label_array(arrays[label_key], where=f"{archive}: {label_key}")
                check_counts(images[split], labels[split], where=f"{archive}: {image_key}")
            classes = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays.files else ()
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{archive} cannot be read: {describe_array_error(error)}",
            hint="arrays of objects are refused, because they could run code",
        ) from error
    return make_array_dataset(path, layout=".npz arrays", images=images, labels=labels, classes=classes)


def pair_arrays(keys: list[str], *, where: str) -> dict[str, tuple[str, str]]:
    """Return the keys of images and labels of each split."""
    pairs = {}
    for split in ("train", "val", "test"):
        for pair in ((f"x_{split}", f"y_{split}"), (f"{split}_images", f"{split}_labels")):
            if set(pair) <= set(keys):
                pairs[split] = pair
    if not pairs and {"images", "labels"} <= set(keys):
        pairs["all"] = ("images", "labels")
    if not pairs:
        expected = "images, labels or x_train, y_train"
        raise DataError(f"{where} has no images with labels", expected=expected, got=shorten_list(keys))
    return pairs


def check_images(array: NDArray[np.generic], *, where: str) -> NDArray[np.uint8]:
    """Return the array if it can be images."""
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or 0 in array.shape:
        shape = " × ".join(map(str, array.shape))
        raise DataError(where, expected="uint8, N × H × W or N × H × W × C", got=f"{array.dtype}, {shape}")
    return array.astype(np.uint8, copy=False)


def check_label_array(array: NDArray[np.generic], *, where: str) -> NDArray[np.int64]:
    """Return N labels if the array is N or N × 1 integers."""
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise DataError(where, expected="N integers", got=f"{array.dtype}, {' × '.join(map(str, array.shape))}")
    return flat.astype(np.int64)


def check_counts(images: NDArray[np.uint8], labels: NDArray[np.int64], *, where: str) -> None:
    """Raise DataError if the numbers of images and labels differ."""
    if len(images) != len(labels):
        raise DataError(f"{where} does not have one label per image", expected=len(images), got=len(labels))


@cache
def open_digits() -> Dataset:
    """Open 1,797 handwritten digits of 8 × 8 pixels. A fixed fifth is the test split.

    E. Alpaydin and C. Kaynak, 1998; see digits.README.md.

    >>> {name: len(source) for name, source in open_digits().splits.items()}
    {'train': 1438, 'test': 359}
    """
    with (
        (resources.files("vitkit.data") / "digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        pixels, labels = arrays["images"], arrays["labels"]
    source = ArraySource(
        np.round(pixels * (255 / 16)).astype(np.uint8),  # stored as 0…16
        layout="digits, embedded",
        classes=tuple("0123456789"),
        labels=labels.astype(np.int64),
        names=number_names("digits", len(labels)),
    )
    train, test = hold_out(source, fraction=0.2)
    return Dataset(path="digits", splits={"train": train, "test": test})
