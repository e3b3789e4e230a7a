"""WebDataset tars go in (key.jpg beside key.cls or key.json), a data set that reads them in place comes out."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.data.source import UNLABELLED, DataSet
from vitkit.data.sources.base import (
    IMAGE_SUFFIXES,
    SliceSource,
    by_number,
    check_labels,
    class_numbers,
    class_table,
    data_set,
    listing,
    some,
    split_in,
    walk,
)
from vitkit.data.sources.tars import Member, images_within, members, read_text

MOST_SHARDS = 100_000
LABEL_KEYS = ("label", "cls", "class")
CLASS_NAMES = ("classes.txt", "classnames.txt")


@dataclass
class Shards:
    """The images of one split, as they are found."""

    archives: list[Path] = field(default_factory=list)
    slices: list[tuple[int, int, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    labels: list[str | int | None] = field(default_factory=list)


def has_tars(place: Path) -> bool:
    """Whether this is a tar, or a folder of tars that are not ImageNet's."""
    return bool(find_shards(place, suffix=".tar"))


def find_shards(place: Path, *, suffix: str) -> list[Path]:
    """The shards of a place: itself, those of a brace pattern, or those in a folder and the folders within it."""
    if is_pattern(place):
        shards = [Path(path) for path in expand(str(place))]
        if missing := [str(path) for path in shards if not path.is_file()]:
            raise DataError(
                f"{place} names files that are not there: {some(missing)}", got=f"{len(missing)} of {len(shards)}"
            )
    elif place.is_file():
        shards = [place]
    else:
        shards = listing(place)
        shards += [path for folder in shards if folder.is_dir() for path in shards_within(folder, suffix=suffix)]
    return [path for path in shards if path.suffix.lower() == suffix and not path.name.startswith("ILSVRC2012_")]


def shards_within(folder: Path, *, suffix: str) -> list[Path]:
    """The shards at any depth of a folder."""
    return sorted(folder / name for name in walk(folder) if name.endswith(suffix) and (folder / name).is_file())


def is_pattern(place: Path) -> bool:
    """Whether a place is a brace pattern and not a file or folder with braces in its name."""
    return bool(re.search(r"\{[^{}]*(\.\.|,)[^{}]*\}", str(place))) and not place.exists()


def expand(pattern: str) -> list[str]:
    """The paths a brace pattern stands for.

    >>> expand("data-{000009..000011}.tar")
    ['data-000009.tar', 'data-000010.tar', 'data-000011.tar']
    >>> expand("{train,val}-{0..1}.tar")
    ['train-0.tar', 'train-1.tar', 'val-0.tar', 'val-1.tar']
    """
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    if numbers := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", found[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + MOST_SHARDS:
            raise DataError(f"{pattern} is not a range of files", expected=f"1 to {MOST_SHARDS} of them")
        words = [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]
    else:
        words = found[1].split(",")
    rests = expand(pattern[found.end() :])
    if len(words) * len(rests) > MOST_SHARDS:
        raise DataError(f"{pattern} names too many files", expected=f"at most {MOST_SHARDS}")
    return [pattern[: found.start()] + word + rest for word in words for rest in rests]


def home_of(place: Path) -> Path:
    """The folder that names are relative to: the place itself, or the one a file or pattern lies in."""
    if is_pattern(place):
        return Path(str(place).partition("{")[0] + "x").parent
    return place.parent if place.is_file() else place


def open_webdataset(place: Path) -> DataSet:
    """The images of tar shards; train, val and test are told apart by the shards' names.

    A label is a number or a class name. Numbers get their names from classes.txt beside the shards, one a line.
    """
    home = home_of(place)
    by_split: dict[str, Shards] = {}
    for archive in find_shards(place, suffix=".tar"):
        split = split_in(archive, root=home) or "all"
        add_archive(by_split.setdefault(split, Shards()), archive, home=home)
    if "all" in by_split and len(by_split) > 1:
        unclear = [path.name for path in by_split["all"].archives]
        raise DataError(
            f"some tars of {place} name their split and some do not: {some(unclear)}",
            hint="let each name begin with train-, val- or test-",
        )
    classes, labels = labels_of(place, home, {split: shards.labels for split, shards in by_split.items()})
    kind = "WebDataset tars" if classes else "WebDataset tars without labels"
    splits = {
        split: SliceSource(
            shards.archives,
            shards.slices,
            kind=kind,
            classes=classes,
            labels=labels[split],
            names=shards.names,
        )
        for split, shards in by_split.items()
    }
    return data_set(place, splits)


def tar_images(archives: Mapping[str, Path]) -> SliceSource:
    """Every image of some tars, under the names that the tars go by; labels are not looked at."""
    slices: list[tuple[int, int, int]] = []
    names: list[str] = []
    for number, (name, archive) in enumerate(archives.items()):
        # A tar may hold a name twice; who unpacks it has the later file.
        for image in {image.name: image for image in images_within(archive)}.values():
            slices.append((number, image.offset, image.size))
            names.append(f"{name}/{image.name}")
    labels = np.full(len(names), UNLABELLED, dtype=np.int64)
    return SliceSource(list(archives.values()), slices, kind="images in tars", classes=(), labels=labels, names=names)


def add_archive(shards: Shards, archive: Path, *, home: Path) -> None:
    """Add the images of one tar, with their labels."""
    number = len(shards.archives)
    shards.archives.append(archive)
    images: dict[str, Member] = {}
    labels: dict[str, Member] = {}
    for member in members(archive):
        folder, _, base = member.name.rpartition("/")
        base, _, suffix = base.partition(".")
        key = f"{folder}/{base}" if folder else base
        suffix = suffix.lower()
        if f".{suffix}" in IMAGE_SUFFIXES:
            if key in images:
                raise DataError(f"{archive} has two images for {key}: {images[key].name}, {member.name}")
            images[key] = member
        elif suffix == "cls" or (suffix == "json" and key not in labels):
            labels[key] = member
    shard = archive.relative_to(home).as_posix()
    with archive.open("rb") as file:
        for key, image in images.items():
            text = read_text(file, labels[key], where=str(archive)) if key in labels else None
            shards.slices.append((number, image.offset, image.size))
            shards.names.append(f"{shard}/{image.name}")
            where = f"{archive}: {labels[key].name}" if key in labels else ""
            is_json = key in labels and labels[key].name.lower().endswith(".json")
            shards.labels.append(None if text is None else label_in(text, is_json=is_json, where=where))


def label_in(text: str, *, is_json: bool, where: str) -> str | int | None:
    """The label in a .cls or .json file; None where the JSON speaks of other things."""
    value: object = text.strip()
    if is_json:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        record = record if isinstance(record, dict) else {"label": record}
        value = next((record[key] for key in LABEL_KEYS if record.get(key) is not None), None)
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value or None
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise DataError(f"{where} has no label", expected="a number or a class name", got=repr(value)[:80])
    return value


def labels_of(
    place: Path, home: Path, values: dict[str, list[str | int | None]]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Class names and the labels of each split; all without labels is well, some without is not."""
    everything = [value for of_split in values.values() for value in of_split]
    without = sum(value is None for value in everything)
    if without == len(everything):
        return (), {split: [UNLABELLED] * len(of_split) for split, of_split in values.items()}
    if without:
        raise DataError(
            f"{place} has images without a label",
            expected="key.cls or key.json beside each key.jpg",
            got=f"{without} of {len(everything)} without",
        )
    if all(isinstance(value, int) for value in everything):
        numbers = {split: [int(value or 0) for value in of_split] for split, of_split in values.items()}
        arrays = [np.asarray(of_split, dtype=np.int64) for of_split in numbers.values()]
        classes = class_names_beside(home) or class_numbers(arrays, where=str(place))
        for array in arrays:
            check_labels(array, classes=len(classes), where=str(place))
        return classes, numbers
    texts = {split: [str(value) for value in of_split] for split, of_split in values.items()}
    classes = by_number(class_table(place, texts))
    number = {name: label for label, name in enumerate(classes)}
    return classes, {split: [number[text] for text in of_split] for split, of_split in texts.items()}


def class_names_beside(folder: Path) -> tuple[str, ...]:
    """The lines of classes.txt, where there is one."""
    for path in (folder / name for name in CLASS_NAMES):
        if path.is_file():
            return tuple(lines_of(path))
    return ()


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text that are not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8") from error
    return (line.strip() for line in text.splitlines() if line.strip())
