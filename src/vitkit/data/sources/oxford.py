"""Oxford-IIIT Pets or Oxford Flowers-102 goes in, as its publisher ships it; a data set with its splits comes out."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.data.source import DataSet
from vitkit.data.sources.base import FileSource, data_set, some
from vitkit.data.sources.manifests import safe_name
from vitkit.data.sources.matlab import read_matlab
from vitkit.data.sources.webdataset import class_names_beside, lines_of

PETS_LISTS = {"train": "trainval.txt", "test": "test.txt"}
FLOWERS_LISTS = {"train": "trnid", "val": "valid", "test": "tstid"}


def has_pets(place: Path) -> bool:
    """Whether there are the images and lists of Oxford-IIIT Pets."""
    return (place / "images").is_dir() and (place / "annotations" / "trainval.txt").is_file()


def open_pets(place: Path) -> DataSet:
    """Oxford-IIIT Pets: images/, annotations/trainval.txt and test.txt. A class is a breed, ordered by CLASS-ID."""
    rows = {
        split: read_pets_list(place / "annotations" / name)
        for split, name in PETS_LISTS.items()
        if (place / "annotations" / name).is_file()
    }
    breeds: dict[int, str] = {}
    for of_split in rows.values():
        for name, number in of_split:
            breed = name.rpartition("_")[0].rpartition("/")[2]
            if breeds.setdefault(number, breed) != breed:
                raise DataError(
                    f"{place}: CLASS-ID {number} is two breeds", expected=breeds[number], got=f"{breed} in {name}"
                )
    if sorted(breeds) != list(range(1, len(breeds) + 1)):
        raise DataError(
            f"{place} has gaps in its CLASS-IDs", expected=f"1…{len(breeds)}", got=some(list(map(str, breeds)))
        )
    classes = tuple(breeds[number] for number in sorted(breeds))
    splits = {}
    for split, of_split in rows.items():
        named = sorted((f"images/{name}.jpg", number - 1) for name, number in of_split)
        splits[split] = FileSource(
            place,
            kind="Oxford-IIIT Pets",
            classes=classes,
            labels=[label for _, label in named],
            names=[name for name, _ in named],
        )
        check_present(place, [name for name, _ in named])
    return data_set(place, splits)


def read_pets_list(path: Path) -> list[tuple[str, int]]:
    """Image names and CLASS-IDs: Abyssinian_100 1 1 1."""
    rows = []
    for line in lines_of(path):
        if line.startswith("#"):
            continue
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal() or len(words[1]) > 6:
            raise DataError(f"{path}: {line!r}", expected="name, CLASS-ID, species, breed")
        rows.append((safe_name(words[0], where=str(path)), int(words[1])))
    return rows


def has_flowers(place: Path) -> bool:
    """Whether there are the images, labels and splits of Flowers-102."""
    return (place / "imagelabels.mat").is_file() and (place / "jpg").is_dir()


def open_flowers(place: Path) -> DataSet:
    """Oxford Flowers-102: jpg/, imagelabels.mat and setid.mat, with its standard splits.

    The publisher's files number the classes from 1; classes.txt beside them, one name a line, gives them names.
    """
    labels = matlab_row(place / "imagelabels.mat", "labels")
    if len(labels) and not (labels.min() >= 1 and labels.max() <= 100_000):
        raise DataError(f"{place}/imagelabels.mat has a label out of range", expected="1…102", got=int(labels.min()))
    count = int(labels.max(initial=0))
    classes = class_names_beside(place) or tuple(str(number) for number in range(1, count + 1))
    if len(classes) < count:
        raise DataError(f"{place}/classes.txt has too few names", expected=count, got=len(classes))
    splits = {}
    for split, key in FLOWERS_LISTS.items():
        numbers = np.sort(matlab_row(place / "setid.mat", key))
        if not len(numbers):
            continue
        if numbers[0] < 1 or numbers[-1] > len(labels):
            raise DataError(f"{place}/setid.mat: {key}", expected=f"1…{len(labels)}", got=int(numbers[-1]))
        names = [f"jpg/image_{number:05d}.jpg" for number in numbers.tolist()]
        check_present(place, names)
        splits[split] = FileSource(
            place, kind="Oxford Flowers-102", classes=classes, labels=labels[numbers - 1] - 1, names=names
        )
    return data_set(place, splits)


def matlab_row(path: Path, key: str) -> NDArray[np.int64]:
    """One array of a .mat file."""
    if not path.is_file():
        raise DataError(f"there is no {path}", hint="fetch imagelabels.mat and setid.mat beside the folder jpg")
    arrays = read_matlab(path.read_bytes(), where=str(path))
    if key not in arrays:
        raise DataError(f"{path} has no {key}", got=some(sorted(arrays)) or "no arrays")
    return arrays[key]


def check_present(place: Path, names: list[str]) -> None:
    """Refuse a list that names files which are not there."""
    if missing := [name for name in names if not (place / name).is_file()]:
        raise DataError(
            f"{place} lacks {some(missing)}",
            got=f"{len(missing)} of {len(names)} missing",
            hint="unpack the images again",
        )
