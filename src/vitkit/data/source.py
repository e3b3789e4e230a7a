"""What every data set looks like from inside: an index goes in; a name, a label and an image's content come out.

    place → DataSet of splits → Source → content → decode → Picture → transforms → pixels → loader → batches

A source is read by many processes at once: `content` keeps no position, and opens nothing that a fork would share.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Content = bytes | NDArray[np.uint8]
"""An image as it is stored: an encoded file, or pixels, H × W or H × W × C."""

Picture = Image.Image | NDArray[np.uint8]
"""A decoded image: mode L or RGB, or pixels H × W × C where there are other than one or three channels."""

UNLABELLED = -1


class Source(ABC):
    """Images with names and labels, by index from 0. The order is fixed, and the same on every machine."""

    kind: str
    """What was found, in words: "class folders"."""
    classes: tuple[str, ...]
    """The names of the classes, by label; empty where there are no labels."""
    labels: NDArray[np.int64]
    """The label of each image; UNLABELLED where it has none."""
    is_sound: bool = False
    """Whether every image is known to be readable: it is drawn, or is pixels in memory."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """The image's own name: unique, with /, the same wherever the data set lies."""

    @abstractmethod
    def content(self, index: int) -> Content:
        """The image as it is stored; a DataError or an OSError where it cannot be read."""


class Subset(Source):
    """Some images of a source, in the given order."""

    def __init__(self, source: Source, indices: Iterable[int]) -> None:
        self.source = source
        self.indices = np.fromiter(indices, dtype=np.int64)
        self.kind = source.kind
        self.classes = source.classes
        self.labels = source.labels[self.indices]
        self.is_sound = source.is_sound

    def name(self, index: int) -> str:
        """The name in the whole source."""
        return self.source.name(int(self.indices[index]))

    def content(self, index: int) -> Content:
        """The content in the whole source."""
        return self.source.content(int(self.indices[index]))


class Joined(Source):
    """Several sources of the same classes, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.kind, self.classes = sources[0].kind, sources[0].classes
        self.labels = np.concatenate([source.labels for source in sources])
        self.is_sound = all(source.is_sound for source in sources)
        self.ends = np.cumsum([len(source) for source in sources])

    def _place(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[number], index - int(self.ends[number]) + len(self.sources[number])

    def name(self, index: int) -> str:
        """The name in its own source."""
        source, inside = self._place(index)
        return source.name(inside)

    def content(self, index: int) -> Content:
        """The content in its own source."""
        source, inside = self._place(index)
        return source.content(inside)


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, which share their classes: some of train, val and test, or `all` where it has none."""

    place: str
    splits: Mapping[str, Source]

    @cached_property
    def first(self) -> Source:
        """Any of the splits, to ask for what all of them share."""
        return next(iter(self.splits.values()))

    @property
    def kind(self) -> str:
        """What was found, in words."""
        return self.first.kind

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self.first.classes
