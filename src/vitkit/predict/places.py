"""Places that a user names go in, one source of all images there comes out: files, folders, archives and tables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.data.decode import DEFAULT_GATE
from vitkit.data.source import UNLABELLED, Content, Joined, Source
from vitkit.data.sources.base import NamedSource, is_image, walk
from vitkit.data.sources.detect import open_data


class Files(NamedSource):
    """Image files by the paths that they were named by."""

    def __init__(self, paths: Sequence[str]) -> None:
        labels = np.full(len(paths), UNLABELLED, dtype=np.int64)
        super().__init__(kind="files", classes=(), labels=labels, names=paths)

    def content(self, index: int) -> Content:
        """The bytes of the file."""
        return read_bytes(self.names[index], most=DEFAULT_GATE.max_bytes)


class Elsewhere(Source):
    """The images of an archive, a table or any other data set, under the name of the place as well."""

    def __init__(self, place: str, source: Source) -> None:
        self.place, self.source = place.rstrip("/"), source
        self.kind, self.classes, self.is_sound = source.kind, (), source.is_sound
        self.labels = np.full(len(source), UNLABELLED, dtype=np.int64)

    def name(self, index: int) -> str:
        """The place, where it is one on this disk, and the name in it."""
        return f"{self.place}/{self.source.name(index)}" if self.place else self.source.name(index)

    def content(self, index: int) -> Content:
        """The content in its own source."""
        return self.source.content(index)


def images_at(places: Sequence[str]) -> Source:
    """All images at some places, in the order of the places and by name inside them; labels are not looked at.

    >>> images_at(["digits"]).name(0)
    'digits/000002'
    """
    found = [source for place in places for source in sources_at(place)]
    if not found or not sum(map(len, found)):
        raise DataError("no images there", got=", ".join(places)[:200] or "no place", hint="name files or folders")
    return Joined(found) if len(found) > 1 else found[0]


def sources_at(place: str) -> list[Source]:
    """The images of one place: a file, the image files below a folder, or whatever else is known to hold images."""
    path = Path(place)
    if path.is_file() and is_image(path.name):
        return [Files([place])]
    if path.is_dir() and (inside := sorted(name for name in walk(path) if is_image(name))):
        return [Files([f"{place.rstrip('/')}/{name}" for name in inside])]
    return [Elsewhere(place if path.exists() else "", source) for source in open_data(place).splits.values()]
