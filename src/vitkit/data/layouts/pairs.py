"""Pairs of image and label in memory, alone or by split."""

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.core.errors import DataError, InputError, summarize
from vitkit.core.files import read_bytes
from vitkit.data.dataset import Dataset, StoredImage, hash_image
from vitkit.data.decode import ImageLike, pillow_to_array, read_header, refuse_url, tensor_to_array
from vitkit.data.decode_limits import DEFAULT_LIMITS
from vitkit.data.layouts.base import NamedSource, make_dataset, number_class_names
from vitkit.data.layouts.files import parse_split

Pairs = Sequence[tuple[ImageLike, str]]
FORMS = "a path, a list of (image, label) pairs, or such lists by split"


@dataclass(eq=False)
class MemorySource(NamedSource):
    """Images that are held in memory, or files at any paths, which are read when they are needed."""

    images: Sequence[StoredImage | str]

    def read(self, index: int) -> StoredImage:
        """Return the image, or the bytes of its file."""
        image = self.images[index]
        return read_bytes(image, max_bytes=DEFAULT_LIMITS.max_bytes) if isinstance(image, str) else image

    def locate(self, index: int) -> tuple[str, int] | None:
        """Return the path of the image, if it is a file."""
        image = self.images[index]
        return (image, 0) if isinstance(image, str) else None


def is_pairs_path(path: object) -> bool:
    """Return whether a path is that of a dataset of pairs, which is a fingerprint.

    >>> is_pairs_path("pairs-0123456789ab"), is_pairs_path("photos")
    (True, False)
    """
    return re.fullmatch(r"pairs-[0-9a-f]{12}", str(path)) is not None


def open_pairs(data: Pairs | Mapping[str, Pairs]) -> Dataset:
    """Open pairs of image and label. Classes are the labels in sorted order.

    Files are named relative to the directory that contains all of them, so that class folders have the same names as
    in their own layout; other images are numbered. The path of the dataset is a fingerprint: of labels and pixels or
    encoded images, and of names and sizes of files.

    >>> black, white = np.zeros((8, 8), dtype=np.uint8), np.full((8, 8), 255, dtype=np.uint8)
    >>> dataset = open_pairs([(black, "night"), (white, "day")])
    >>> dataset.classes, dataset.splits["all"].name(0)
    (('day', 'night'), 'image-00001')
    """
    splits: dict[str, object] = _parse_splits(data) if isinstance(data, Mapping) else {"all": data}
    stored = {split: list(_parse_pairs(pairs, split=split)) for split, pairs in splits.items()}
    folders = {os.path.dirname(image) for images in stored.values() for image, _ in images if isinstance(image, str)}  # noqa: PTH120
    root = os.path.commonpath(folders) if folders else ""
    names = {split: _name_images(images, split=split, root=root) for split, images in stored.items()}
    path = f"pairs-{_fingerprint(stored, names)[:12]}"
    classes, labels = number_class_names(
        path, {split: [label for _, label in images] for split, images in stored.items()}, numeric=False
    )
    sources = {
        split: MemorySource(
            [image for image, _ in images],
            layout="pairs in memory",
            classes=classes,
            labels=labels[split],
            names=names[split],
        )
        for split, images in stored.items()
    }
    return make_dataset(path, sources)


def _parse_splits(data: Mapping[str, object]) -> dict[str, object]:
    splits: dict[str, object] = {}
    for name, pairs in data.items():
        split = "all" if name == "all" else parse_split(str(name))
        if split is None or split in splits:
            problem = f"there is no split called {name}" if split is None else f"there are two splits called {split}"
            raise DataError(problem, expected="train, val and test", got=", ".join(map(str, data)))
        splits[split] = pairs
    return splits


def _parse_pairs(pairs: object, *, split: str) -> Iterator[tuple[StoredImage | str, str]]:
    """Yield each image as it is stored, with its label; an error names the pair."""
    if not isinstance(pairs, Sequence) or isinstance(pairs, str | bytes):
        hint = "for a torch Dataset or DataLoader, train vitkit.create(name) in a loop of your own"
        raise DataError(f"{type(pairs).__name__} is not a dataset", expected=FORMS, hint=hint)
    for index, pair in enumerate(pairs):
        where = f"pair {index}" if split == "all" else f"pair {index} of {split}"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"{len(pair)} values" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(f"{where} is not a pair", expected="(image, label)", got=got)
        image, label = pair
        if not isinstance(label, str) or not label:
            got = f"{type(label).__name__} {label}" if isinstance(label, str | int) else type(label).__name__
            raise DataError(f"{where}: the label is not a class name", expected="text", got=got, hint="use str(label)")
        try:
            yield store_image(image), label
        except (DataError, InputError, OSError) as error:
            advice = getattr(error, "hint", None) or "a pair is (image, label)"
            raise DataError(f"{where}: {summarize(error)}", hint=advice) from error


def store_image(image: object) -> StoredImage | str:
    """Return an image as it is kept: the path of a file, an encoded file, or upright pixels."""
    if isinstance(image, np.ndarray):
        read_header(image)  # raises if it is not an image
        return image
    if isinstance(image, bytes):
        return image
    if isinstance(image, Tensor):
        return tensor_to_array(image)
    if isinstance(image, Image.Image):
        if image.mode != "RGBA":
            return pillow_to_array(image, channels=3)
        file = io.BytesIO()  # as a file, of which models of three channels drop the alpha
        image.save(file, "PNG", compress_level=1)
        return file.getvalue()
    if not isinstance(image, str | os.PathLike):
        raise DataError(f"{type(image).__name__} is not an image", expected="a path, an encoded file, or uint8 pixels")
    refuse_url(image)
    path = os.path.abspath(os.path.expanduser(image))  # noqa: PTH100, PTH111 - a million Paths are slow
    if not os.path.isfile(path):  # noqa: PTH113
        raise DataError(f"{image}: no such file")
    return path


def _name_images(images: Sequence[tuple[StoredImage | str, str]], *, split: str, root: str) -> list[str]:
    """Return a unique name for each image; a file that is listed again gets a number."""
    prefix = "" if split == "all" else f"{split}/"
    counts: dict[str, int] = {}
    names = []
    for number, (image, _) in enumerate(images, start=1):
        name = f"{prefix}image-{number:05}"
        if isinstance(image, str):
            name = os.path.relpath(image, root).replace(os.sep, "/")
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def _fingerprint(
    splits: Mapping[str, Sequence[tuple[StoredImage | str, str]]], names: Mapping[str, Sequence[str]]
) -> str:
    digest = hashlib.sha256()
    for split, images in splits.items():
        for name, (image, label) in zip(names[split], images, strict=True):
            digest.update(f"{split}\0{name}\0{label}\0".encode(errors="surrogateescape"))
            content = str(os.stat(image).st_size).encode() if isinstance(image, str) else hash_image(image)  # noqa: PTH116
            digest.update(content + b"\0")
    return digest.hexdigest()
