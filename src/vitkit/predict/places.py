"""Places that a user names go in, one source of all images there comes out: files, folders, archives and tables."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.data.decode import DEFAULT_GATE
from vitkit.data.source import UNLABELLED, Content, Joined, Source
from vitkit.data.sources.base import NamedSource, is_image, walk
from vitkit.data.sources.detect import open_data
from vitkit.data.sources.parquet import holds_images, parquet_images
from vitkit.data.sources.webdataset import find_shards, is_pattern, tar_images

TAR, PARQUET = ".tar", ".parquet"


class Files(NamedSource):
    """Image files by the paths that they were named by, or by that of their folder and their names in it."""

    def __init__(self, names: Sequence[str], *, folder: str = "") -> None:
        labels = np.full(len(names), UNLABELLED, dtype=np.int64)
        super().__init__(kind="files", classes=(), labels=labels, names=names)
        self.folder = folder

    def name(self, index: int) -> str:
        """The path."""
        return self.folder + self.names[index]

    def content(self, index: int) -> Content:
        """The bytes of the file."""
        return read_bytes(self.name(index), most=DEFAULT_GATE.max_bytes)


class Elsewhere(Source):
    """The images of any other data set, under the name of the place as well."""

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
    """The images of one place: a file, all that is below a folder, or whatever else is known to hold images."""
    path = Path(place)
    if path.is_file() and is_image(path.name):
        return [Files([place])]
    found = sources_below(place) if path.is_dir() else sources_in(shards(place, TAR), shards(place, PARQUET))
    if found := [source for source in found if len(source)]:
        return found
    return [Elsewhere(place if path.exists() else "", source) for source in open_data(place).splits.values()]


def sources_below(place: str) -> list[Source]:
    """The image files below a folder, then what its tars hold, then its parquet files, but for those without images."""
    root, folder = Path(place), f"{place.rstrip('/')}/"
    found: dict[str, list[str]] = {"image": [], TAR: [], PARQUET: []}
    for name in walk(root):
        kind = "image" if is_image(name) else os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million Paths are slow
        if kind in found:
            found[kind].append(name)
    images, *packed = (sorted(names) for names in found.values())
    tars, tables = ({folder + name: root / name for name in names if (root / name).is_file()} for names in packed)
    tables = {name: table for name, table in tables.items() if holds_images(table)}
    return [Files(images, folder=folder), *sources_in(tars, tables)]


def sources_in(tars: dict[str, Path], tables: dict[str, Path]) -> list[Source]:
    """The images of tars and of parquet files, by the names that these go by."""
    return [*([tar_images(tars)] if tars else []), *([parquet_images(tables)] if tables else [])]


def shards(place: str, suffix: str) -> dict[str, Path]:
    """The files with this suffix that a place is or, being a pattern, stands for."""
    path = Path(place)
    if path.is_file():
        return {place: path} if path.suffix.lower() == suffix else {}
    return {str(shard): shard for shard in find_shards(path, suffix=suffix)} if is_pattern(path) else {}
