"""ObjectNet's images and its publisher's `mappings` go in; a label map comes out, and images without their red border.

Barbu et al., 2019. Of 313 kinds of objects, 113 are among ImageNet's classes; images of the others are left out. An
answer is right if it is one of the ImageNet classes that the publisher names for the folder; all logits are read.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.decode import decode
from vitkit.data.source import Content, Source
from vitkit.data.sources.base import some
from vitkit.evaluate.label_maps import LabelMap, imagenet_order

BORDER = 2
"""Pixels of red around every image, which tell that it is for testing only; to be cut off before a model sees it."""
FOLDERS, MEANINGS = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NAMES, PLACES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"


class WithoutBorder(Source):
    """A source's images with a border of some pixels cut off.

    >>> from vitkit.data.sources.embedded import digits
    >>> WithoutBorder(digits().splits["test"]).content(0).shape  # of 8×8 pixels
    (4, 4, 3)
    """

    def __init__(self, source: Source, *, border: int = BORDER) -> None:
        self.source, self.border = source, border
        self.kind, self.classes, self.labels = source.kind, source.classes, source.labels

    def name(self, index: int) -> str:
        """The image's own name."""
        return self.source.name(index)

    def content(self, index: int) -> Content:
        """The pixels inside the border."""
        picture = decode(self.source.content(index), channels=3)
        pixels = np.asarray(picture.convert("RGB") if isinstance(picture, Image.Image) else picture)
        if min(pixels.shape[:2]) <= 2 * self.border:
            raise DataError("the image is all border", got=f"{pixels.shape[1]}×{pixels.shape[0]} pixels")
        return np.ascontiguousarray(pixels[self.border : -self.border, self.border : -self.border])


def mappings_folder(place: Path | str) -> Path:
    """The publisher's `mappings`, in the place or beside it."""
    for home in (Path(place), Path(place).resolve().parent):
        if (home / "mappings" / MEANINGS).is_file():
            return home / "mappings"
    raise DataError(
        f"{place} has no mappings/{MEANINGS}",
        expected="objectnet-1.0/images and objectnet-1.0/mappings, as published",
        hint="give the folder that holds both",
    )


def objectnet_map(folder: Path, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """The label map that the publisher's four files make for these folders."""
    order = imagenet_order(labels)
    label_of, meanings = _object(folder / FOLDERS), _object(folder / MEANINGS)
    number_of = imagenet_numbers(folder)
    if unknown := [name for name in classes if name not in label_of]:
        raise DataError(f"{folder / FOLDERS} does not know the folders {some(unknown)}", expected=some(list(label_of)))
    means = []
    for name in classes:
        said = meanings.get(str(label_of[name]))
        parts = [] if said is None else [part.strip() for part in str(said).split("; ")]
        if unknown := [part for part in parts if part not in number_of]:
            raise DataError(f"{folder / NAMES} has no line for {some(unknown)}")
        numbers = (int(order[number_of[part]]) for part in parts)
        means.append(tuple(number for number in numbers if number >= 0))
    return LabelMap(name="objectnet", classes=tuple(classes), means=tuple(means), read="all")


def imagenet_numbers(folder: Path) -> dict[str, int]:
    """The place in ImageNet's usual order of each class, by the publisher's name for it.

    The names stand in the order of the challenge's own numbers, and another file says which of those is which class.
    """
    path = folder / NAMES
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        line_of = {int(place): int(str(line)) for place, line in _object(folder / PLACES).items()}
        return {names[line]: place for place, line in line_of.items()}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", hint="unpack ObjectNet's mappings whole") from error
    except (ValueError, IndexError) as error:
        raise DataError(f"{folder / PLACES} and {NAMES} do not fit together: {error}") from error


def _object(path: Path) -> dict[str, object]:
    """A JSON file that holds an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", hint="unpack ObjectNet's mappings whole") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", hint="unpack ObjectNet's mappings again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}", expected="a JSON object", got=type(found).__name__)
    return found
