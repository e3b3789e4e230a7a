"""Oxford-IIIT Pets and Oxford Flowers-102 as their publisher ships them, with their standard splits."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.base import check_files, make_file_dataset
from vitkit.data.layouts.files import read_class_names, read_lines, shorten_list
from vitkit.data.layouts.manifests import check_relative_path

PETS_LISTS = {"train": "trainval.txt", "test": "test.txt"}
FLOWERS_LISTS = {"train": "trnid", "val": "valid", "test": "tstid"}


def has_pets(path: Path) -> bool:
    """Return whether there are the images and lists of Oxford-IIIT Pets."""
    return (path / "images").is_dir() and (path / "annotations" / "trainval.txt").is_file()


def open_pets(path: Path) -> Dataset:
    """Open Oxford-IIIT Pets: images/, annotations/trainval.txt and test.txt. Classes are breeds, by CLASS-ID."""
    rows = {
        split: sorted(read_pets_list(path / "annotations" / name))
        for split, name in PETS_LISTS.items()
        if (path / "annotations" / name).is_file()
    }
    breeds: dict[int, str] = {}
    for of_split in rows.values():
        for name, class_id in of_split:
            breed = name.removesuffix(".jpg").rpartition("_")[0].rpartition("/")[2]
            if breeds.setdefault(class_id, breed) != breed:
                message = f"{path}: CLASS-ID {class_id} has two breeds"
                raise DataError(message, expected=breeds[class_id], got=f"{breed} in {name}")
    if sorted(breeds) != list(range(1, len(breeds) + 1)):
        got = shorten_list(list(map(str, breeds)))
        raise DataError(f"{path} has gaps in its CLASS-IDs", expected=f"1…{len(breeds)}", got=got)
    names = {split: [name for name, _ in of_split] for split, of_split in rows.items()}
    for of_split_names in names.values():
        check_files(path, of_split_names, where=str(path))
    return make_file_dataset(
        path,
        layout="Oxford-IIIT Pets",
        classes=tuple(breeds[class_id] for class_id in sorted(breeds)),
        labels={
            split: np.array([class_id - 1 for _, class_id in of_split], dtype=np.int64)
            for split, of_split in rows.items()
        },
        names=names,
    )


def read_pets_list(path: Path) -> list[tuple[str, int]]:
    """Return image names and CLASS-IDs of lines such as Abyssinian_100 1 1 1."""
    rows = []
    for line in read_lines(path):
        if line.startswith("#"):
            continue
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal() or len(words[1]) > 6:
            raise DataError(f"{path}: {line!r}", expected="name, CLASS-ID, species, breed")
        rows.append((f"images/{check_relative_path(words[0], where=str(path))}.jpg", int(words[1])))
    return rows


def has_flowers(path: Path) -> bool:
    """Return whether there are the images and labels of Flowers-102."""
    return (path / "imagelabels.mat").is_file() and (path / "jpg").is_dir()


def open_flowers(path: Path) -> Dataset:
    """Open Oxford Flowers-102: jpg/, imagelabels.mat and setid.mat.

    Class names are numbers from 1, as in the published files, or the lines of classes.txt.
    """
    class_ids = read_matlab_row(path / "imagelabels.mat", "labels")
    if len(class_ids) and not (class_ids.min() >= 1 and class_ids.max() <= 100_000):
        raise DataError(f"{path}/imagelabels.mat has a label out of range", expected="1…102", got=int(class_ids.min()))
    count = int(class_ids.max(initial=0))
    classes = read_class_names(path) or tuple(str(number) for number in range(1, count + 1))
    if len(classes) < count:
        raise DataError(f"{path}/classes.txt has too few names", expected=count, got=len(classes))
    names: dict[str, list[str]] = {}
    labels: dict[str, NDArray[np.int64]] = {}
    for split, key in FLOWERS_LISTS.items():
        image_ids = np.sort(read_matlab_row(path / "setid.mat", key))
        if not len(image_ids):
            continue
        if image_ids[0] < 1 or image_ids[-1] > len(class_ids):
            raise DataError(f"{path}/setid.mat: {key}", expected=f"1…{len(class_ids)}", got=int(image_ids[-1]))
        names[split] = [f"jpg/image_{image_id:05d}.jpg" for image_id in image_ids.tolist()]
        labels[split] = class_ids[image_ids - 1] - 1
        check_files(path, names[split], where=str(path))
    return make_file_dataset(path, layout="Oxford Flowers-102", classes=classes, labels=labels, names=names)


def read_matlab_row(path: Path, key: str) -> NDArray[np.int64]:
    """Return one array of a .mat file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", hint="download imagelabels.mat and setid.mat next to the folder jpg")
    arrays = read_matlab(path.read_bytes(), where=str(path))
    if key not in arrays:
        raise DataError(f"{path} has no {key}", got=shorten_list(sorted(arrays)) or "no arrays")
    return arrays[key]


# MATLAB 5 files, as far as Flowers-102 needs them

MATRIX, COMPRESSED = 14, 15
DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)
MAX_MATLAB_BYTES = 64 << 20


def read_matlab(content: bytes, *, where: str) -> dict[str, NDArray[np.int64]]:
    """Return the integer arrays of a MATLAB 5 file by name, flattened."""
    if len(content) < 128 or content[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{where} is not a MATLAB 5 file", hint="download it again, or save it with -v7")
    order = "<" if content[126:128] == b"IM" else ">"
    arrays = {}
    try:
        for element in iterate_elements(content[128:], order=order):
            is_compressed = element[0] == COMPRESSED
            inner = iterate_elements(decompress(element[1]), order=order) if is_compressed else [element]
            for kind, data in inner:
                if kind == MATRIX:
                    arrays.update(parse_matrix(data, order=order))
    except (struct.error, zlib.error, ValueError, StopIteration, UnicodeDecodeError) as error:
        raise DataError(f"{where} is damaged: {error}", hint="download it again") from error
    return arrays


def iterate_elements(content: bytes, *, order: str) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of consecutive elements. A small element has both in four bytes."""
    offset = 0
    while offset + 8 <= len(content):
        element, size = struct.unpack_from(f"{order}II", content, offset)
        if element >> 16:
            element, size = element & 0xFFFF, element >> 16
            start, end = offset + 4, offset + 8
        else:
            start = offset + 8
            end = start + size if element == COMPRESSED else start + size + -size % 8
        if start + size > len(content):
            raise ValueError("it ends within an array")
        yield element, content[start : start + size]
        offset = end


def decompress(data: bytes) -> bytes:
    """Return the content of a compressed element, up to a maximal size."""
    content = zlib.decompressobj().decompress(data, MAX_MATLAB_BYTES + 1)
    if len(content) > MAX_MATLAB_BYTES:
        raise ValueError("it has an array of more than 64 MB")
    return content


def parse_matrix(data: bytes, *, order: str) -> dict[str, NDArray[np.int64]]:
    """Return name and numbers of an array; nothing if it does not hold numbers."""
    parts = iterate_elements(data, order=order)
    flags = struct.unpack_from(f"{order}I", next(parts)[1])[0]
    if flags & 0xFF not in NUMERIC_CLASSES:
        return {}
    _, name = next(parts), next(parts)[1]
    element, numbers = next(parts)
    if element not in DTYPES:
        raise ValueError(f"it has numbers of the unknown type {element}")
    array = np.frombuffer(numbers, dtype=np.dtype(DTYPES[element]).newbyteorder("<" if order == "<" else ">"))
    if array.dtype.kind == "f" and not (np.isfinite(array) & (abs(array) < 2**53)).all():
        return {}
    return {name.decode("ascii"): array.astype(np.int64)}
