"""Files, slices of archives or arrays go in, with their names and labels; a Source comes out."""

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.files import as_text, read_bytes
from vitkit.data.decode import DEFAULT_GATE
from vitkit.data.source import UNLABELLED, Content, DataSet, Source

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
MOST_CLASSES = 1_000_000
"""A label above this is damage or mischief: it would ask for as many class names."""

MOST_DEPTH = 100
SMALL = 64 << 20
"""What unpacks to no more than this can do no harm, however small it was packed."""
MOST_EXPANSION = 20
"""Drawings pack to a tenth; a bomb to a thousandth."""


def split_called(name: str) -> str | None:
    """The split that a folder or a column means by this word, or None.

    >>> split_called("Validation"), split_called("cats")
    ('val', None)
    """
    return SPLITS.get(name.strip().lower())


def split_in(path: Path, *, root: Path) -> str | None:
    """The split that a shard belongs to, by a word of its file name, or else by a folder it lies in.

    >>> split_in(Path("d/cifar10-train-00000-of-00002.parquet"), root=Path("d"))
    'train'
    >>> split_in(Path("d/default/validation/0000.parquet"), root=Path("d"))
    'val'
    """
    words = path.name.replace("_", "-").replace(".", "-").split("-")
    folders = path.relative_to(root).parts[:-1]
    return next((split for word in (*words, *reversed(folders)) if (split := split_called(word))), None)


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's.

    >>> is_image("cat.JPG"), is_image("notes.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - a million Paths are slow


def is_hidden(name: str) -> bool:
    """Whether a file or folder is the system's own: hidden, or left by macOS or Windows.

    >>> is_hidden("._cat.jpg"), is_hidden("__MACOSX"), is_hidden("cat.jpg")
    (True, True, False)
    """
    return name.startswith(".") or name in {"__MACOSX", "Thumbs.db", "desktop.ini"}


def walk(root: Path, *, prefix: str = "", above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """The names, relative and with /, of all files below a folder; links are followed, but never round in a circle."""
    status = root.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    if len(above) >= MOST_DEPTH:
        raise DataError(f"{root} is nested too deep", expected=f"at most {MOST_DEPTH} folders in folders")
    with os.scandir(root) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from walk(Path(entry.path), prefix=f"{prefix}{entry.name}/", above=above | {here})
            else:  # a link that leads nowhere too: reading it will say so, with its name
                yield prefix + entry.name


def listing(folder: Path) -> list[Path]:
    """What lies directly in a folder, by name; hidden things are left out, and pipes and devices, which would wait."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if not is_hidden(path.name) and (path.is_file() or path.is_dir()))
    return sorted(found, key=lambda path: path.name)


class Names(Sequence[str]):
    """Names packed into one piece: a million strings would be copied bit by bit into every worker process.

    >>> names = Names(["a.png", "b/ü.png"])
    >>> names[1], len(names)
    ('b/ü.png', 2)
    """

    def __init__(self, names: Iterable[str]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for name in names:
            packed += name.encode("utf-8", "surrogateescape")
            ends.append(len(packed))
        self.packed, self.ends = bytes(packed), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # slices of names have no user
        index = range(len(self))[index]
        return self.packed[self.ends[index] : self.ends[index + 1]].decode("utf-8", "surrogateescape")


class NamedSource(Source):
    """What the sources here share: names and labels that are known beforehand."""

    def __init__(
        self, *, kind: str, classes: Sequence[str], labels: Sequence[int] | NDArray[np.int64], names: Iterable[str]
    ) -> None:
        self.kind = kind
        self.classes = tuple(map(as_text, classes))
        self.labels = np.asarray(labels, dtype=np.int64)
        self.names = Names(names)
        self.ignored: tuple[str, ...] = ()
        """The names of files that were there but are not part of the data set."""

    def name(self, index: int) -> str:
        """The image's own name."""
        return self.names[index]


class FileSource(NamedSource):
    """Image files below a folder, each opened when it is asked for."""

    def __init__(
        self,
        root: Path,
        *,
        kind: str,
        classes: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64],
        names: Iterable[str],
    ) -> None:
        super().__init__(kind=kind, classes=classes, labels=labels, names=names)
        self.root = str(root)

    def content(self, index: int) -> Content:
        """The bytes of the file."""
        return read_bytes(f"{self.root}/{self.names[index]}", most=DEFAULT_GATE.max_bytes)


class SliceSource(NamedSource):
    """Pieces of archives that are read in place: archive, offset and size of each."""

    def __init__(
        self,
        archives: Sequence[Path],
        slices: Sequence[tuple[int, int, int]],
        *,
        kind: str,
        classes: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64],
        names: Iterable[str],
    ) -> None:
        super().__init__(kind=kind, classes=classes, labels=labels, names=names)
        self.archives = [str(archive) for archive in archives]
        self.slices = np.asarray(slices, dtype=np.int64).reshape(-1, 3)

    def content(self, index: int) -> Content:
        """The bytes of the slice. The file is opened for this alone, so no process moves another's position."""
        archive, offset, size = self.slices[index].tolist()
        with open(self.archives[archive], "rb", buffering=0) as file:  # noqa: PTH123 - once an image
            file.seek(offset)
            content = file.read(size)
        if len(content) != size:
            raise DataError(f"{self.archives[archive]} ends within {self.names[index]}", hint="fetch it again")
        return content


class ArraySource(NamedSource):
    """Images of one size in memory: N × H × W or N × H × W × C."""

    is_sound = True

    def __init__(
        self,
        images: NDArray[np.uint8],
        *,
        kind: str,
        classes: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64],
        names: Iterable[str],
    ) -> None:
        super().__init__(kind=kind, classes=classes, labels=labels, names=names)
        self.images = images

    def content(self, index: int) -> Content:
        """The pixels, H × W or H × W × C."""
        return self.images[index]


def numbered(prefix: str, count: int) -> Iterator[str]:
    """Names for images that have none.

    >>> list(numbered("train", 2))
    ['train/000000', 'train/000001']
    """
    return (f"{prefix}/{number:06d}" for number in range(count))


def class_table(place: Path, names: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """All class names of a data set, in order, from the names in each split.

    The classes are those of the training split: another split may lack some of them, but has none of its own.

    >>> class_table(Path("d"), {"train": ["dog", "cat"], "val": ["cat"]})
    ('cat', 'dog')
    """
    found = {split: set(of_split) for split, of_split in names.items()}
    known = found.get("train", set().union(*found.values()))
    for split, of_split in found.items():
        if unknown := sorted(of_split - known):
            raise DataError(
                f"{split} of {place} has classes that train lacks: {some(unknown)}",
                hint="give train some images of each, or remove them; mind upper and lower case",
            )
    return tuple(sorted(known))


def by_number(classes: Sequence[str]) -> tuple[str, ...]:
    """Class names in the order of their numbers, where all of them are numbers.

    >>> by_number(["0", "10", "9"])
    ('0', '9', '10')
    """
    if all(name.isascii() and name.isdigit() and len(name) < 19 for name in classes):
        return tuple(sorted(classes, key=lambda name: (int(name), name)))
    return tuple(classes)


def some(names: Sequence[str], *, most: int = 5) -> str:
    """The first of many names, for a message.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_labels(labels: NDArray[np.int64], *, classes: int, where: str) -> None:
    """Refuse labels that have no class name."""
    if len(labels) and (labels.min() < 0 or labels.max() >= classes):
        wrong = int(np.flatnonzero((labels < 0) | (labels >= classes))[0])
        raise DataError(f"{where} has a label out of range", expected=f"0…{classes - 1}", got=int(labels[wrong]))


def check_expansion(unpacked: int, *, packed: int, where: str) -> None:
    """Refuse what unpacks to far more than images do.

    >>> check_expansion(10**10, packed=10**7, where="train.parquet")
    Traceback (most recent call last):
    vitkit.core.errors.DataError: train.parquet unpacks to far more than images do (expected at most 200,000,000 bytes)
    """
    most = max(SMALL, MOST_EXPANSION * packed)
    if unpacked > most:
        raise DataError(f"{where} unpacks to far more than images do", expected=f"at most {most:,} bytes")


def class_numbers(labels: Iterable[NDArray[np.int64]], *, where: str) -> tuple[str, ...]:
    """Numbers as names, for labels that come without any."""
    most = max((int(of_split.max()) for of_split in labels if len(of_split)), default=-1)
    if most >= MOST_CLASSES:
        raise DataError(f"{where} has a label out of range", expected=f"fewer than {MOST_CLASSES} classes", got=most)
    return tuple(map(str, range(most + 1)))


def data_set(place: Path | str, splits: Mapping[str, Source]) -> DataSet:
    """The splits as a data set that can be trained on: two classes or more, and no split empty."""
    for split, source in splits.items():
        if not len(source):
            raise DataError(f"{split} of {place} has no images", hint=f"was read as: {source.kind}")
    if not splits:
        raise DataError(f"{place} has no images")
    ordered = {split: splits[split] for split in ("all", "train", "val", "test") if split in splits}
    found = DataSet(place=str(place), splits=ordered)
    if len(present := np.unique(found.first.labels)) < 2 and present[0] != UNLABELLED:
        name = found.classes[int(present[0])]
        raise DataError(
            f"{place} has one class only: {name}",
            expected="two classes or more",
            hint="put the images of each class in a folder of its own, or name the kind unlabelled",
        )
    return found
