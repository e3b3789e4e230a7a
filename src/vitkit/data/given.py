"""An image in any form that a user may have it in goes in, an upright picture of the wanted channels comes out."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.data.decode import DEFAULT_GATE, decode
from vitkit.data.source import Picture

Given = str | Path | bytes | Image.Image | NDArray[np.uint8]
"""A file's path, its content, an image of Pillow's, or pixels, H × W or H × W × C."""


def picture_given(image: Given, *, channels: int = 3) -> Picture:
    """The upright picture, as `decode` makes it of a file; what cannot be read is an error that names the file.

    >>> picture_given(Image.new("RGBA", (3, 2))).mode
    'RGB'
    """
    if isinstance(image, Image.Image):
        return decode(_pixels(image, channels), channels=channels)
    if isinstance(image, bytes | np.ndarray):
        return decode(image, channels=channels)
    try:
        return decode(read_bytes(image, most=DEFAULT_GATE.max_bytes), channels=channels)
    except OSError as error:
        raise DataError(f"{image}: {error.strerror or error}", hint="name an image file") from error
    except DataError as error:
        raise DataError(f"{image}: {error}", hint=error.hint) from error


def _pixels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """Pixels of 8 bits. An image of Pillow's may still lie on its side, as its camera did."""
    if image.mode.startswith(("I", "F")):
        raise DataError("the image is not of 8 bits", got=f"mode {image.mode}", hint="give its file, or 8-bit pixels")
    upright = ImageOps.exif_transpose(image)
    if channels in (1, 3) and upright.mode not in ("L", "RGB"):
        upright = upright.convert("L" if upright.mode in ("1", "LA") else "RGB")
    return np.asarray(upright)
