"""Datasets as sources of stored images with names and labels.

    path → Dataset of splits → ImageSource → stored image → decode → preprocessing → loader → batches

Many processes read a source at once, so `read` keeps no file position and no open file that a fork would share.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.errors import check_fraction

StoredImage = bytes | NDArray[np.uint8]
"""An image as the dataset stores it: an encoded file, or pixels, H × W or H × W × C."""

DecodedImage = Image.Image | NDArray[np.uint8]
"""A decoded image: mode L or RGB, or pixels H × W × C for other numbers of channels."""

UNLABELED = -1


class ImageSource(ABC):
    """Images of one split, by index. The order is fixed and the same on every machine."""

    layout: str
    """Description of the layout that the images were read from, such as "class folders"."""
    classes: tuple[str, ...]
    """Class names by label; empty for images without labels."""
    labels: NDArray[np.int64]
    """Label of each image, or UNLABELED."""
    always_readable: bool = False
    """True if no image can be broken, because images are generated or held in memory."""
    left_out: tuple[str, ...] = ()
    """Files next to the images that are none."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image: unique, with /, and independent of where the dataset is stored."""

    @abstractmethod
    def read(self, index: int) -> StoredImage:
        """Return an image as it is stored; raise DataError or OSError if it cannot be read."""

    def locate(self, index: int) -> tuple[str, int] | None:
        """Return the absolute path of the file that holds an image, and its position there; None for memory."""
        return None

    def checksum(self, index: int) -> bytes:
        """Return the SHA-256 of the stored image; raise DataError or OSError if it cannot be read."""
        return hash_image(self.read(index))


class DerivedSource(ImageSource):
    """Base of sources whose images are those of other sources."""

    @abstractmethod
    def _resolve(self, index: int) -> tuple[ImageSource, int]:
        """Return the source that has an image, and its index there."""

    def name(self, index: int) -> str:
        """Return the name that the image has in its own source."""
        source, index = self._resolve(index)
        return source.name(index)

    def read(self, index: int) -> StoredImage:
        """Return the image as it is stored."""
        source, index = self._resolve(index)
        return source.read(index)

    def locate(self, index: int) -> tuple[str, int] | None:
        """Return the file of the image and its position there."""
        source, index = self._resolve(index)
        return source.locate(index)

    def checksum(self, index: int) -> bytes:
        """Return the checksum of the stored image."""
        source, index = self._resolve(index)
        return source.checksum(index)


class Subset(DerivedSource):
    """Selected images of a source, in the given order."""

    def __init__(self, source: ImageSource, indices: Iterable[int]) -> None:
        self.source, self.indices = source, np.fromiter(indices, dtype=np.int64)
        self.layout, self.classes, self.labels = source.layout, source.classes, source.labels[self.indices]
        self.always_readable = source.always_readable

    def _resolve(self, index: int) -> tuple[ImageSource, int]:
        return self.source, int(self.indices[index])


class ConcatSource(DerivedSource):
    """Several sources with the same classes, one after the other."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self.sources = tuple(sources)
        self.layout, self.classes = sources[0].layout, sources[0].classes
        self.labels = np.concatenate([source.labels for source in sources])
        self.always_readable = all(source.always_readable for source in sources)
        self.left_out = tuple(name for source in sources for name in source.left_out)
        self.ends = np.cumsum([len(source) for source in sources])

    def _resolve(self, index: int) -> tuple[ImageSource, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[number], index - int(self.ends[number]) + len(self.sources[number])


@dataclass(frozen=True)
class Dataset:
    """Splits that share their classes: some of train, val and test, or only `all`."""

    path: str
    splits: Mapping[str, ImageSource]
    left_out: tuple[str, ...] = ()
    """Files at the path that are in no split: images without a class, files of other kinds, and, with a final /,
    folders without images."""

    @cached_property
    def first_split(self) -> ImageSource:
        """Any split, for attributes that all splits share."""
        return next(iter(self.splits.values()))

    @property
    def layout(self) -> str:
        """Description of the layout that the dataset was read from."""
        return self.first_split.layout

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label."""
        return self.first_split.classes


def count_labels(source: ImageSource) -> list[int]:
    """Return the number of images of each class."""
    labels = source.labels[source.labels != UNLABELED]
    return np.bincount(labels, minlength=len(source.classes)).tolist()


# Stratified splits by hashes of image names: the same images on every machine


def hold_out(source: ImageSource, *, fraction: int | float = 0.1, salt: str = "") -> tuple[ImageSource, ImageSource]:
    """Return the source without a fraction of every class, and the held-out fraction.

    Within a class the images with the lowest SHA-256 of salt and name are held out: at least one if the class has two,
    and never all. Adding or removing an image therefore moves hardly any other. Both parts keep the order.

    >>> from vitkit.data.layouts.arrays import open_digits
    >>> train, val = hold_out(open_digits().splits["train"], fraction=0.1)
    >>> len(train) + len(val), bool(set(val.labels) == set(range(10)))
    (1438, True)
    """
    check_fraction("fraction", fraction)
    held_out = np.zeros(len(source), dtype=np.bool_)
    for members in _sort_classes(source, salt=salt):
        count = round(fraction * len(members))
        count = min(max(count, 1), len(members) - 1) if fraction > 0 else 0
        held_out[members[:count]] = True
    return Subset(source, np.flatnonzero(~held_out).tolist()), Subset(source, np.flatnonzero(held_out).tolist())


def subsample(source: ImageSource, *, fraction: int | float, salt: str = "") -> ImageSource:
    """Return a fraction of every class, at least one image of each, in the order of the source.

    A smaller fraction is a subset of a larger one.
    """
    check_fraction("fraction", fraction, allow_zero=False, allow_one=True)
    indices: list[int] = []
    for members in _sort_classes(source, salt=salt):
        indices += members[: max(round(fraction * len(members)), 1)]
    return Subset(source, sorted(indices))


def _sort_classes(source: ImageSource, *, salt: str) -> list[list[int]]:
    """Return the indices of each class, sorted by the hash of salt and name."""

    def digest(index: int) -> bytes:
        return hashlib.sha256((salt + source.name(index)).encode("utf-8", "surrogateescape")).digest()

    order = np.argsort(source.labels, kind="stable")
    starts = np.flatnonzero(np.diff(source.labels[order])) + 1
    return [sorted(members.tolist(), key=digest) for members in np.split(order, starts) if len(members)]


# Checksums that tell whether two sources hold the same images; fingerprint.py has those of contents


def fingerprint_source(source: ImageSource) -> str:
    """Return a checksum of the labels, class names and image names, in order. No image is read."""
    digest = hashlib.sha256(np.ascontiguousarray(source.labels).tobytes())
    for name in (*source.classes, *map(source.name, range(len(source)))):
        digest.update(name.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def hash_image(image: StoredImage) -> bytes:
    """Return the SHA-256 of one stored image."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).digest()
    return hashlib.sha256(np.ascontiguousarray(image).tobytes() + str(image.shape).encode()).digest()
