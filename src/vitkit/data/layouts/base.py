"""Image sources for files, slices of archives and arrays, and helpers to build datasets of them."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.files import escape_surrogates, name_of_text, read_bytes, text_of_name
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource, StoredImage
from vitkit.data.decode_limits import DEFAULT_LIMITS

MAX_CLASSES = 1_000_000
"""A larger label is damage or an attack: it would need as many class names."""

Labels = NDArray[np.int64]


class PackedNames(Sequence[str]):
    """Strings packed into one buffer: a million objects would be copied into every worker process."""

    def __init__(self, names: Iterable[str]) -> None:
        packed, self.ends = bytearray(), array("q", [0])
        for name in names:
            packed += name.encode("utf-8", "surrogateescape")
            self.ends.append(len(packed))
        self.packed = bytes(packed)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # slices are not needed
        index = range(len(self))[index]
        return self.packed[self.ends[index] : self.ends[index + 1]].decode("utf-8", "surrogateescape")


@dataclass(eq=False, kw_only=True)
class NamedSource(ImageSource):
    """Base of sources whose names and labels are known in advance."""

    layout: str
    classes: tuple[str, ...]
    labels: Labels
    names: Sequence[str]

    def __post_init__(self) -> None:
        self.classes = tuple(escape_surrogates(text_of_name(name)) for name in self.classes)
        self.names = PackedNames(self.names)

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return self.names[index]


@dataclass(eq=False)
class FileSource(NamedSource):
    """Image files below a directory, each opened when it is read."""

    root: Path

    def read(self, index: int) -> StoredImage:
        """Return the bytes of the file."""
        return read_bytes(f"{self.root}/{name_of_text(self.names[index])}", max_bytes=DEFAULT_LIMITS.max_bytes)

    def locate(self, index: int) -> tuple[str, int]:
        """Return the path of the file."""
        return f"{self.absolute_root}/{name_of_text(self.names[index])}", 0

    @cached_property
    def absolute_root(self) -> str:
        """The directory as an absolute path."""
        return str(self.root.absolute())


@dataclass(eq=False)
class ArchiveSource(NamedSource):
    """Slices (archive, offset, size) of archives, read in place."""

    archives: Sequence[Path]
    slices: NDArray[np.int64]

    def read(self, index: int) -> StoredImage:
        """Return the bytes of the slice. The file is opened each time, so processes share no file position."""
        archive, offset, size = self.slices[index].tolist()
        with self.archives[archive].open("rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) != size:
            raise DataError(f"{self.archives[archive]} ends within {self.names[index]}", hint="download it again")
        return content

    def locate(self, index: int) -> tuple[str, int]:
        """Return the path of the archive and the offset in it."""
        archive, offset, _ = self.slices[index].tolist()
        return self.absolute_archives[archive], offset

    @cached_property
    def absolute_archives(self) -> list[str]:
        """The archives as absolute paths."""
        return [str(archive.absolute()) for archive in self.archives]


def stack_slices(slices: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Return slices (archive, offset, size) as an array of N rows, also if there are none."""
    return np.array(list(slices), dtype=np.int64).reshape(-1, 3)


@dataclass(eq=False)
class ArraySource(NamedSource):
    """Images of one size in memory: N × H × W or N × H × W × C."""

    images: NDArray[np.uint8]
    always_readable = True

    def read(self, index: int) -> StoredImage:
        """Return the pixels, H × W or H × W × C."""
        return self.images[index]


def make_dataset(path: Path | str, splits: Mapping[str, ImageSource]) -> Dataset:
    """Create a dataset after checking that no split is empty."""
    for split, source in splits.items():
        if not len(source):
            raise DataError(f"{split} of {path} has no images", hint=f"it was read as: {source.layout}")
    if not splits:
        raise DataError(f"{path} has no images")
    ordered = {split: splits[split] for split in ("all", "train", "val", "test") if split in splits}
    return Dataset(path=str(path), splits=ordered)


def check_several_classes(dataset: Dataset) -> Dataset:
    """Return a dataset that a classifier can be trained on; raise DataError if it has only one class."""
    labels = np.unique(dataset.first_split.labels)
    if len(labels) < 2 and labels[0] != UNLABELED:
        message = f"{dataset.path} has only one class: {dataset.classes[int(labels[0])]}"
        hint = "use one directory per class, or set the layout to unlabeled"
        raise DataError(message, expected="two classes or more", hint=hint)
    return dataset


def make_file_dataset(
    path: Path,
    *,
    layout: str,
    classes: tuple[str, ...],
    labels: Mapping[str, Labels],
    names: Mapping[str, Sequence[str]],
    root: Path | None = None,
) -> Dataset:
    """Create a dataset of image files below `root`, by default the path, from the labels and names of each split."""
    splits = {
        split: FileSource(root or path, layout=layout, classes=classes, labels=labels[split], names=names[split])
        for split in names
    }
    return make_dataset(path, splits)


def make_array_dataset(
    path: Path,
    *,
    layout: str,
    images: Mapping[str, NDArray[np.uint8]],
    labels: Mapping[str, Labels],
    classes: tuple[str, ...],
    names: Mapping[str, Sequence[str]] | None = None,
) -> Dataset:
    """Create a dataset of arrays. Missing names of classes and images are numbers."""
    classes = name_classes(path, labels, classes=classes)
    names = names or {split: number_names(split, len(labels[split])) for split in labels}
    splits = {
        split: ArraySource(images[split], layout=layout, classes=classes, labels=labels[split], names=names[split])
        for split in images
    }
    return make_dataset(path, splits)


def number_names(prefix: str, count: int) -> list[str]:
    """Return names for images that have none."""
    return [f"{prefix}/{number:06d}" for number in range(count)]


def check_files(root: Path, names: Sequence[str], *, where: str) -> None:
    """Raise DataError if files of a list do not exist."""
    if missing := [name for name in names if not (root / name_of_text(name)).is_file()]:
        got = f"{len(missing)} of {len(names)} files missing"
        raise DataError(f"{where} lacks {shorten_list(missing)}", got=got, hint="unpack the images again")


def number_class_names(
    path: Path | str, names: Mapping[str, Sequence[str]], *, numeric: bool = True
) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """Return the sorted classes and the labels of each split; if `numeric`, names that are numbers sort by value.

    Other splits may lack classes of train, but have none of their own.

    >>> number_class_names(Path("d"), {"train": ["10", "9", "9"]})
    (('9', '10'), {'train': array([1, 0, 0])})
    """
    by_split = {split: set(of_split) for split, of_split in names.items()}
    classes = sorted(by_split.get("train", set().union(*by_split.values())))
    for split, of_split in by_split.items():
        if unknown := sorted(of_split.difference(classes)):
            hint = "add images of each to train, or remove them; names are case-sensitive"
            raise DataError(f"{split} of {path} has classes that train lacks: {shorten_list(unknown)}", hint=hint)
    if numeric and all(name.isascii() and name.isdigit() and len(name) < 19 for name in classes):
        classes.sort(key=lambda name: (int(name), name))
    label_of = {name: label for label, name in enumerate(classes)}
    labels = {
        split: np.array([label_of[name] for name in of_split], dtype=np.int64) for split, of_split in names.items()
    }
    return tuple(classes), labels


def number_labels(
    path: Path, values: Mapping[str, Sequence[str | int | None]], *, classes: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """Return the classes and the labels of each split; `classes` are the names of numbers, if known.

    Values are numbers or names, or all of them are None: images without labels.
    """
    kinds = {type(value) for of_split in values.values() for value in of_split}
    if kinds <= {type(None)}:
        return (), {split: np.full(len(of_split), UNLABELED) for split, of_split in values.items()}
    if type(None) in kinds:
        unlabeled = sum(value is None for of_split in values.values() for value in of_split)
        expected = "a label next to each image, or none at all"
        got = f"{unlabeled} of {sum(map(len, values.values()))} without"
        raise DataError(f"{path} has images without a label", expected=expected, got=got)
    if str in kinds:
        return number_class_names(path, {split: list(map(str, of_split)) for split, of_split in values.items()})
    try:
        labels = {split: np.array(of_split, dtype=np.int64) for split, of_split in values.items()}
    except OverflowError as error:
        raise DataError(f"{path} has a label out of range", expected=f"0…{MAX_CLASSES - 1}") from error
    return name_classes(path, labels, classes=classes), labels


def name_classes(path: Path, labels: Mapping[str, Labels], *, classes: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the class names, by default numbers; raise DataError if a label has no name."""
    num_classes = len(classes) or MAX_CLASSES
    largest = -1
    for split, of_split in labels.items():
        if wrong := of_split[(of_split < 0) | (of_split >= num_classes)].tolist():
            raise DataError(
                f"{split} of {path} has a label out of range", expected=f"0…{num_classes - 1}", got=wrong[0]
            )
        largest = max(largest, int(of_split.max(initial=-1)))
    return classes or tuple(map(str, range(largest + 1)))
