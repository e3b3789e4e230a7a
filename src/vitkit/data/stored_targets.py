"""Features of a teacher, computed once for fixed crops of the training images and stored next to their names.

A directory holds `names.txt`, one image name per line, and `crop0.npy`, `crop1.npy`, …: float16 arrays of one row per
name. tools/teacher_targets.py writes it.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.data.dataset import ImageSource

NAMES = "names.txt"
MIN_AREA = 0.35
MAX_ASPECT = 4 / 3


def crop_path(directory: Path, crop: int) -> Path:
    """Return the path of the features of one crop."""
    return directory / f"crop{crop}.npy"


def crop_box(name: str, crop: int, *, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) of a crop, which depends on the image's name and size alone.

    Crop 0 is the whole image; the others have at least 35 % of its area.

    >>> crop_box("cat/1.jpg", 0, height=48, width=64)
    (0, 0, 64, 48)
    """
    if crop == 0:
        return 0, 0, width, height
    digest = hashlib.sha256(f"{crop}/{name}".encode("utf-8", "surrogateescape")).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    area = rng.uniform(MIN_AREA, 1.0) * height * width
    aspect = np.exp(rng.uniform(-np.log(MAX_ASPECT), np.log(MAX_ASPECT)))
    box_width = min(width, max(1, round(np.sqrt(area * aspect))))
    box_height = min(height, max(1, round(np.sqrt(area / aspect))))
    left, top = round(rng.random() * (width - box_width)), round(rng.random() * (height - box_height))
    return left, top, left + box_width, top + box_height


def count_features(directory: Path | str) -> int:
    """Return the number of features of a row."""
    return int(_open_crop(Path(directory), 0).shape[1])


class StoredTargets:
    """Rows of stored features for the images of a source. Every image must have one.

    An epoch uses one crop of each image, and successive epochs the next.
    """

    def __init__(self, directory: Path | str, source: ImageSource, *, crops: int = 1) -> None:
        directory = Path(directory)
        self.source, self.crops = source, crops
        self._tables = [_open_crop(directory, crop) for crop in range(crops)]
        try:
            names = (directory / NAMES).read_text("utf-8", errors="surrogateescape").splitlines()
        except OSError as error:
            raise DataError(f"{directory / NAMES}: {error.strerror}", hint=_HINT) from error
        if any(len(table) != len(names) for table in self._tables):
            expected, got = f"{len(names):,} rows in every file", ", ".join(f"{len(table):,}" for table in self._tables)
            message = f"{directory}: the features are not those of {NAMES}"
            raise DataError(message, expected=expected, got=got, hint=_HINT)
        row_of = {name: row for row, name in enumerate(names)}
        rows = [row_of.get(name, -1) for name in map(source.name, range(len(source)))]
        if missing := [index for index, row in enumerate(rows) if row < 0]:
            message = f"{directory}: {len(missing):,} of {len(source):,} training images have no stored features"
            got = f"none for {source.name(missing[0])}"
            raise DataError(message, expected="a row for every image", got=got, hint=_HINT)
        self._rows = np.array(rows, dtype=np.int64)

    def crop(self, epoch: int, index: int) -> int:
        """Return the crop of an image in an epoch."""
        return (epoch + index) % self.crops

    def box(self, epoch: int, index: int, *, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the box of an image's crop in an epoch."""
        return crop_box(self.source.name(index), self.crop(epoch, index), height=height, width=width)

    def features(self, epoch: int, index: int) -> NDArray[np.float32]:
        """Return the teacher's features of an image's crop in an epoch."""
        return self._tables[self.crop(epoch, index)][self._rows[index]].astype(np.float32)


_HINT = "compute them for these images: python tools/teacher_targets.py"


def _open_crop(directory: Path, crop: int) -> NDArray[np.float16]:
    path = crop_path(directory, crop)
    try:
        table: NDArray[np.float16] = open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as stored features: {error}", hint=_HINT) from error
    if table.ndim != 2 or table.dtype != np.float16:
        got = f"{table.dtype}, {' × '.join(map(str, table.shape))}"
        raise DataError(f"{path}: not a table of features", expected="float16, images × features", got=got, hint=_HINT)
    return table
