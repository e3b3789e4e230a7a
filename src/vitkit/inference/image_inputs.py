"""Images to predict: files, directories, archives and images in memory, as one source."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.core.errors import DataError, InputError, summarize
from vitkit.core.files import name_of_text, read_bytes
from vitkit.data.dataset import UNLABELED, ConcatSource, ImageSource, StoredImage, Subset, hash_image
from vitkit.data.decode import ImageLike, refuse_url
from vitkit.data.decode_limits import DEFAULT_LIMITS
from vitkit.data.layouts.base import NamedSource
from vitkit.data.layouts.files import find_shards, is_image, is_pattern, list_left_out, walk_files
from vitkit.data.layouts.pairs import store_image
from vitkit.data.layouts.registry import find_layouts, open_dataset
from vitkit.data.layouts.shards import lacks_images, open_parquet_images, open_tar_images
from vitkit.typing import DataSource

TAR, PARQUET = ".tar", ".parquet"


class ImageFiles(NamedSource):
    """Image files, named by the prefix (a directory, or nothing) and their names relative to it."""

    def __init__(self, names: Sequence[str], *, prefix: str = "") -> None:
        labels = np.full(len(names), UNLABELED, dtype=np.int64)
        super().__init__(layout="files", classes=(), labels=labels, names=names)
        self.prefix = prefix

    def name(self, index: int) -> str:
        """Return the path as the user wrote it."""
        return self.prefix + self.names[index]

    def read(self, index: int) -> StoredImage:
        """Return the bytes of the file."""
        return read_bytes(name_of_text(self.name(index)), max_bytes=DEFAULT_LIMITS.max_bytes)

    def locate(self, index: int) -> tuple[str, int]:
        """Return the path of the file."""
        return os.path.abspath(name_of_text(self.name(index))), 0  # noqa: PTH100 - a million Paths are slow


class DatasetImages(Subset):
    """The images of a dataset without their labels, named by the dataset's path."""

    def __init__(self, path: str, source: ImageSource) -> None:
        super().__init__(source, range(len(source)))
        self.path, self.classes = path.rstrip("/"), ()
        self.labels = np.full(len(source), UNLABELED, dtype=np.int64)

    def name(self, index: int) -> str:
        """Return the image's name, after the dataset's path if it has one."""
        return f"{self.path}/{self.source.name(index)}" if self.path else self.source.name(index)


@dataclass(eq=False)
class MemoryImages(NamedSource):
    """Images in memory, named by their positions; one that is no image raises its error when it is read."""

    images: Sequence[StoredImage | DataError]

    def read(self, index: int) -> StoredImage:
        """Return the image."""
        image = self.images[index]
        if isinstance(image, DataError):
            raise image
        return image


def list_images(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    """Return one image or several as a list.

    >>> list_images("cat.jpg"), list_images(["cat.jpg", "dog.jpg"])
    (['cat.jpg'], ['cat.jpg', 'dog.jpg'])
    """
    return list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]


def open_data_images(data: DataSource) -> ImageSource:
    """Open the images of a dataset in any form, without their labels."""
    if isinstance(data, str | PathLike):
        return open_images([data])
    pairs = [pair for split in data.values() for pair in split] if isinstance(data, Mapping) else data
    return open_images([image for image, _ in pairs])


def describe_data(data: DataSource) -> str:
    """Return how messages name a dataset."""
    return os.fspath(data) if isinstance(data, str | PathLike) else "images in memory"


def open_images(images: Sequence[ImageLike]) -> ImageSource:
    """Open images in any form, in their order and sorted by name inside each directory or archive. Labels are ignored.

    Among several images, a file of another kind is an unreadable image, and so is a path that does not exist, unless
    there are only such paths. A damaged archive is an unreadable image, too, unless it is the only one. Files of other
    kinds in a directory are in `left_out`.

    >>> open_images(["digits"]).name(0)
    'digits/000002'
    """
    for image in images:
        refuse_url(image)
    missing = [is_missing_image(image) for image in images]
    sources: list[ImageSource] = []
    for index, image in enumerate(images):
        if not isinstance(image, str | PathLike):
            sources.append(_wrap_image(image, name=f"images[{index}]"))
        elif missing[index] and not all(missing):
            sources.append(ImageFiles([os.fspath(image)]))
        else:
            sources += _open_or_wrap_error(os.fspath(image)) if len(images) > 1 else _open_path(os.fspath(image))
    if not sources or not sum(map(len, sources)):
        left_out = list_left_out([name for source in sources for name in source.left_out])
        got = left_out[0] if left_out else ", ".join(map(str, images))[:200] or "no path"
        raise DataError("no images found", got=got, hint="pass files or directories")
    return ConcatSource(sources) if len(sources) > 1 else sources[0]


def describe_images(images: Sequence[ImageLike]) -> list[str]:
    """Return the paths of images, and checksums of those in memory."""
    return [os.fspath(image) if isinstance(image, str | PathLike) else _hash(image) for image in images]


def _hash(image: ImageLike) -> str:
    try:
        return hash_image(store_image(image)).hex()  # type: ignore[arg-type]  # not a path
    except DataError as error:
        return summarize(error)


def is_missing_image(image: ImageLike) -> bool:
    """Return whether an image is the path of an image file that does not exist."""
    if not isinstance(image, str | PathLike):
        return False
    return is_image(os.fspath(image)) and not is_pattern(Path(image)) and not Path(image).exists()


def _wrap_image(image: object, *, name: str) -> MemoryImages:
    """Return a source of one image in memory. What can never be an image is the caller's mistake, and raises."""
    if not isinstance(image, bytes | Image.Image | np.ndarray | Tensor):
        expected = "a path, bytes, a Pillow image, or uint8 pixels"
        raise InputError(f"{name} is not an image", expected=expected, got=type(image).__name__)
    if isinstance(image, np.ndarray) and image.dtype != np.uint8:
        raise InputError(f"{name}: pixels are 8-bit", expected="uint8, 0…255", got=str(image.dtype))
    if isinstance(image, np.ndarray) and image.ndim == 4:
        raise InputError(f"{name} is a batch", expected="one image, or a list of images", hint="pass list(images)")
    try:
        return _make_memory_images(store_image(image), name=name)  # type: ignore[arg-type]  # not a path
    except DataError as error:
        return _make_memory_images(error, name=name)


def _make_memory_images(image: StoredImage | DataError, *, name: str) -> MemoryImages:
    labels = np.full(1, UNLABELED, dtype=np.int64)
    return MemoryImages([image], layout="images in memory", classes=(), labels=labels, names=[name])


def _open_or_wrap_error(name: str) -> list[ImageSource]:
    """Open a path; a file that cannot be opened becomes an image that cannot be read."""
    try:
        return _open_path(name)
    except DataError as error:
        if not Path(name).is_file():
            raise
        return [_wrap_error(name, error)]


def _wrap_error(name: str, error: DataError) -> MemoryImages:
    return _make_memory_images(DataError(error.message.removeprefix(f"{name} ")), name=name)


def _open_path(name: str) -> list[ImageSource]:
    path = Path(name)
    if path.is_file() and (is_image(path.name) or not find_layouts(path)):
        return [ImageFiles([name])]
    sources = _open_directory(name) if path.is_dir() else _open_matching_archives(name)
    if any(map(len, sources)) or (path.is_dir() and not find_layouts(path)):
        return sources
    return [DatasetImages(name if path.exists() else "", source) for source in open_dataset(name).splits.values()]


def _open_directory(name: str) -> list[ImageSource]:
    """Open the image files below a directory, then its tar archives, then its parquet files that hold images."""
    root, prefix = Path(name), f"{name.rstrip('/')}/"
    names: dict[str, list[str]] = {"image": [], TAR: [], PARQUET: [], "other": []}
    for file in sorted(walk_files(root)):
        kind = "image" if is_image(file) else os.path.splitext(file)[1].lower()  # noqa: PTH122 - a million Paths are slow
        names[kind if kind in names else "other"].append(file)
    tars, tables = (
        {prefix + file: root / file for file in names[kind] if (root / file).is_file()} for kind in (TAR, PARQUET)
    )
    with_images = {name: table for name, table in tables.items() if not lacks_images(table)}
    images = ImageFiles(names["image"], prefix=prefix)
    others = [prefix + file for file in names["other"]] + [name for name in tables if name not in with_images]
    images.left_out = tuple(others) if any(names.values()) else (prefix,)
    sources, errors = _open_archives(tars, with_images)
    return [images, *sources, *(_wrap_error(name, error) for name, error in errors.items())]


def _open_matching_archives(name: str) -> list[ImageSource]:
    """Open the archives that a path is, or matches as a pattern; raise the first error if all are damaged."""
    sources, errors = _open_archives(_shards(name, TAR), _shards(name, PARQUET))
    if errors and not any(map(len, sources)):
        raise next(iter(errors.values()))
    return [*sources, *(_wrap_error(name, error) for name, error in errors.items())]


def _open_archives(tars: dict[str, Path], tables: dict[str, Path]) -> tuple[list[ImageSource], dict[str, DataError]]:
    """Open archives; return also why some cannot be opened, by name."""
    errors: dict[str, DataError] = {}
    sources: list[ImageSource] = []
    if tars:
        sources.append(open_tar_images(tars, on_error=errors.__setitem__))
    if tables:
        sources.append(open_parquet_images(tables, on_error=errors.__setitem__))
    return sources, errors


def _shards(name: str, suffix: str) -> dict[str, Path]:
    """Return the files with this suffix that a path is, or matches as a pattern."""
    path = Path(name)
    if path.is_file():
        return {name: path} if path.suffix.lower() == suffix else {}
    return {str(shard): shard for shard in find_shards(path, suffix=suffix)} if is_pattern(path) else {}
