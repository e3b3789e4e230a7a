"""An image as it is stored goes in, an upright 8-bit picture of the wanted channels comes out, or a DataError says why.

Files come from anywhere, so the gate looks at the header before Pillow may spend time or memory on the rest. Pillow's
own settings are the process's, not ours: they are neither needed nor changed.
"""

import contextlib
import io
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitkit.core.errors import DataError
from vitkit.data.source import Content, Picture
from vitkit.data.structure import check_structure, is_plain_exif


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a file may be at most. Beyond these it is refused by its header, before it is decoded."""

    formats: tuple[str, ...] = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
    """Pillow's names of the formats. Those that run a program or call one, such as EPS, do not belong here."""
    max_bytes: int = 64_000_000
    max_pixels: int = 100_000_000
    """Pillow's own limit, twice its MAX_IMAGE_PIXELS (179 million if nobody changed it), holds as well."""
    max_frames: int = 256
    """Only the first frame is taken, but a file of very many is made to cost, not to be seen."""
    max_scans: int = 100
    """A progressive JPEG is decoded once a scan; photos have about 10, and hundreds make 100 kB cost seconds."""


DEFAULT_GATE = Gate()


class Header(NamedTuple):
    """What is known of an image before it is decoded; the sides are those of the upright picture."""

    format: str
    mode: str
    height: int
    width: int


# EXIF's orientations, as what makes the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = range(5, 9)

_MAGIC = {
    b"\xff\xd8": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"RIFF": "WEBP",
}

_FULL_SCANS = 12
"""Scans that an image of the most pixels may have; smaller ones may have more."""

# Python's warning filters belong to the process: two threads that set them aside at once restore them wrongly.
_filters = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock from a thread that it does not have
    os.register_at_fork(before=_filters.acquire, after_in_parent=_filters.release, after_in_child=_filters.release)


def decode(
    content: Content, *, channels: int = 3, gate: Gate = DEFAULT_GATE, fit: tuple[int, int] | None = None
) -> Picture:
    """The upright picture: RGB for three channels, grey for one, else an array H × W × C; a DataError if it is bad.

    Alpha is dropped and a palette looked up as `convert("RGB")` does it, because that is what the evaluations of
    published weights do. With `fit`, the height and width that will be needed, a JPEG much larger than that is
    decoded to a half, a quarter or an eighth of its sides, never below `fit`.

    >>> decode(np.zeros((2, 3), dtype=np.uint8)).mode
    'RGB'
    >>> decode(b"<html>")
    Traceback (most recent call last):
    vitkit.core.errors.DataError: not a JPEG, PNG, GIF, BMP, TIFF, WEBP or PPM file
    """
    if isinstance(content, np.ndarray):
        check_pixels(content, channels=channels, gate=gate)
        return _picture_of_pixels(content, channels=channels)
    with _one_kind_of_error(content, gate), _opened(content, gate) as image:
        if fit is not None:
            height, width = reversed(fit) if _orientation(image) in _LYING else fit
            image.draft(None, (width, height))
        # Only these two may warn while they decode; the others need not wait for each other.
        with _quiet() if image.format in ("TIFF", "GIF") else contextlib.nullcontext():
            image.load()
        with _quiet():
            upright = _UPRIGHT.get(_orientation(image))
            picture = _in_channels(image, channels)
        if upright is not None:
            picture = picture.transpose(upright)
        picture.info = {}  # where the photo was taken is nobody's business
        return picture if channels in (1, 3) else np.asarray(picture)


def describe(content: Content, *, gate: Gate = DEFAULT_GATE) -> Header:
    """The format, mode and upright sides, without decoding; a DataError if the gate refuses it.

    >>> describe(np.zeros((2, 3), dtype=np.uint8))
    Header(format='array', mode='1 channel', height=2, width=3)
    """
    if isinstance(content, np.ndarray):
        channels = _channels_of(content)
        return Header("array", "1 channel" if channels == 1 else f"{channels} channels", *content.shape[:2])
    with _one_kind_of_error(content, gate), _opened(content, gate) as image:
        width, height = image.size
        if _orientation(image) in _LYING:
            width, height = height, width
        return Header(image.format or "", image.mode, height, width)


def check_pixels(pixels: NDArray[np.uint8], *, channels: int = 3, gate: Gate = DEFAULT_GATE) -> None:
    """Refuse an array that is no image, is larger than the gate, or cannot be had in these channels.

    >>> check_pixels(np.zeros((8, 8, 2), dtype=np.uint8))
    Traceback (most recent call last):
    vitkit.core.errors.DataError: the image has other channels (expected 3, got 2)
    """
    found = _channels_of(pixels)
    _check_sides(pixels.shape[0], pixels.shape[1], gate)
    if found != channels and {found, channels} != {1, 3}:
        raise DataError("the image has other channels", expected=channels, got=found)


# Arrays


def _channels_of(pixels: NDArray[np.uint8]) -> int:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        got = f"{'×'.join(map(str, pixels.shape))} of {pixels.dtype}"
        raise DataError("the array is not an image", expected="H×W or H×W×C of uint8", got=got)
    return 1 if pixels.ndim == 2 else pixels.shape[2]


def _picture_of_pixels(pixels: NDArray[np.uint8], *, channels: int) -> Picture:
    if channels not in (1, 3):
        return pixels
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    mode = "RGB" if channels == 3 else "L"
    return picture if picture.mode == mode else picture.convert(mode)


# Files


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let Pillow's remarks on odd headers go unsaid: what matters of them is an error."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _one_kind_of_error(content: bytes, gate: Gate) -> Iterator[None]:
    """Whatever a decoder raises, as a DataError: hostile files reach OSError, SyntaxError, struct.error and more."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(_reason(error, content, gate)) from error


def _reason(error: Exception, content: bytes, gate: Gate) -> str:
    """The error in a few words."""
    kind = next((name for magic, name in _MAGIC.items() if content.startswith(magic)), None)
    text = " ".join(str(error).split())
    if isinstance(error, UnidentifiedImageError):
        if kind in gate.formats:
            return f"damaged {kind} file: its header cannot be read"
        *others, last = gate.formats
        return f"not a {', '.join(others)} or {last} file" if others else f"not a {last} file"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(error, MemoryError):
        return "too large for the memory"
    if "truncated" in text.lower():
        return "the file is truncated"
    return f"damaged {kind or 'image'} file: {text[:100] or type(error).__name__}"


@contextlib.contextmanager
def _opened(content: bytes, gate: Gate) -> Iterator[Image.Image]:
    """The image of a file that the gate lets through, its header read."""
    if not content:
        raise DataError("the file is empty")
    _check_most("bytes", len(content), gate.max_bytes)
    check_structure(content, max_frames=gate.max_frames)
    if any(name not in Image.OPEN for name in gate.formats):
        Image.init()  # imports the plugins; a format's name alone opens nothing
    with _quiet():
        image = Image.open(io.BytesIO(content), formats=gate.formats)
    with image:
        width, height = image.size
        _check_sides(height, width, gate)
        if image.format in ("JPEG", "MPO"):
            most = min(gate.max_scans, max(1, _FULL_SCANS * gate.max_pixels // (height * width)))
            _check_most("scans", content.count(b"\xff\xda"), most)
        with _quiet():
            frames = _frames(image, content, gate)
        _check_most("frames", frames, gate.max_frames)
        yield image


def _check_sides(height: int, width: int, gate: Gate) -> None:
    if height < 1 or width < 1:
        raise DataError("the image has no pixels", got=f"{height}×{width}")
    _check_most("pixels", height * width, gate.max_pixels)


def _check_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise DataError(f"too many {what}", expected=f"at most {most:,}", got=f"{count:,}")


def _frames(image: Image.Image, content: bytes, gate: Gate) -> int:
    """How many frames the file has; past the gate's limit, that it has one more."""
    if image.format == "GIF":
        return _gif_frames(content, most=gate.max_frames)
    if image.format != "TIFF":
        return int(getattr(image, "n_frames", 1))
    if not getattr(image, "is_animated", False):
        return 1
    # Pillow finds frames by walking through them, and does not find its way back after the last: walk in another.
    with Image.open(io.BytesIO(content), formats=("TIFF",)) as walker:
        try:
            walker.seek(gate.max_frames)
        except Exception:  # the end, or damage in a frame that is not taken
            return 1
    return gate.max_frames + 1


def _gif_frames(content: bytes, *, most: int) -> int:
    """Count the image blocks of a GIF, up to one more than `most`; Pillow would prepare each."""

    def palette(place: int) -> int:
        flags = content[place] if place < len(content) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    frames, place = 0, 13 + palette(10)
    while place < len(content) and frames <= most:
        block = content[place]
        if block == 0x3B:  # the end
            break
        if block == 0x2C:  # an image: its place, its palette, the size of its codes
            frames += 1
            place += 11 + palette(place + 9)
        elif block == 0x21:  # an extension and its kind
            place += 2
        else:
            place += 1
            continue
        while place < len(content) and content[place]:  # pieces, each behind its length
            place += 1 + content[place]
        place += 1
    return frames


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation from 1 to 8; 1 where there is none, or none that can be read."""
    if image.format == "TIFF":  # Pillow turns these by itself
        return 1
    try:
        exif = image.info.get("exif")
        if isinstance(exif, bytes) and not is_plain_exif(exif):
            return 1
        # Of the base class: a PNG's own would decode the image to look for more behind it.
        orientation = Image.Image.getexif(image).get(0x0112, 1)
    except Exception:
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _in_channels(image: Image.Image, channels: int) -> Image.Image:
    """A new image in 8 bits with these channels."""
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    if channels == 3:
        return image.convert("RGB")
    if channels == 1:
        return image.convert("L") if image.mode in ("1", "L", "LA", "P") else image.convert("RGB").convert("L")
    if image.mode in ("P", "PA") and image.has_transparency_data:
        image = image.convert("RGBA")
    if image.mode == "P" or len(image.getbands()) != channels:
        got = f"{len(image.getbands())} ({image.mode})"
        raise DataError("the image has other channels", expected=channels, got=got)
    return image.copy()


def _eight_bits(image: Image.Image) -> Image.Image:
    """Integers of 16 bits and floats as grey of 8 bits, white to white. Pillow would clip them at 255.

    Floats come as 0…1 or as 0…255, and an image within 0…1 on the larger scale would be black: it is the smaller.
    """
    pixels = np.asarray(image)
    lowest, highest = pixels.min(), pixels.max()
    if image.mode == "F":
        if not (lowest >= 0 and highest <= 255):  # nor is NaN
            raise DataError("the range of its floats is not known", expected="0…1 or 0…255", got=f"{lowest}…{highest}")
        return Image.fromarray(np.rint(pixels * (255.0 if highest <= 1 else 1.0)).astype(np.uint8))
    if not (lowest >= 0 and highest <= 65535):
        raise DataError("the range of its integers is not known", expected="0…65535", got=f"{lowest}…{highest}")
    return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))
