"""Decoding of image files and arrays to upright 8-bit images.

Files come from untrusted sources: `DecodeLimits` are checked on the header before Pillow spends time or memory on the
rest. Pillow's global settings are not changed.
"""

import contextlib
import io
import os
import re
import threading
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from os import PathLike
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError, features
from PIL.Image import Transpose
from torch import Tensor, uint8

from vitkit.core.errors import DataError, InputError, summarize
from vitkit.core.files import read_bytes
from vitkit.core.version import __version__
from vitkit.data.dataset import DecodedImage, StoredImage
from vitkit.data.decode_limits import (
    DEFAULT_LIMITS,
    DecodeLimits,
    check_limit,
    check_structure,
    count_gif_frames,
    is_small_exif,
)

ImageLike = str | PathLike[str] | bytes | Image.Image | NDArray[np.uint8] | Tensor
"""A path, an encoded file, a Pillow image, or uint8 pixels: an array H × W or H × W × C, or a tensor C × H × W."""


class ImageHeader(NamedTuple):
    """Facts about an image that are known before it is decoded. The size is that of the upright image."""

    format: str
    mode: str
    height: int
    width: int


URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)

# Transposition that undoes each EXIF orientation
_TRANSPOSE = {2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM}
_TRANSPOSE |= {5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
_SIDEWAYS = range(5, 9)

_MAGIC = {b"\xff\xd8": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"BM": "BMP"}
_MAGIC |= {b"II*\0": "TIFF", b"MM\0*": "TIFF", b"RIFF": "WEBP"}
# Brands in the first box of a file that is AVIF or HEIF
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIF", b"heix": "HEIF", b"heim": "HEIF", b"heis": "HEIF"}
_BRANDS |= {b"hevc": "HEIF", b"hevx": "HEIF", b"mif1": "HEIF", b"msf1": "HEIF"}

NO_AVIF = "this build of Pillow cannot read AVIF: install Pillow from PyPI, or convert the file"
_SCANS_AT_MAX_PIXELS = 12
"""Scans that an image with the maximal number of pixels may have; smaller images may have more."""

# Warning filters are global to the process: two threads that change them at once restore them wrongly.
_filters_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock in a locked state
    os.register_at_fork(
        before=_filters_lock.acquire, after_in_parent=_filters_lock.release, after_in_child=_filters_lock.release
    )


def decode(
    image: StoredImage,
    *,
    channels: int = 3,
    limits: DecodeLimits = DEFAULT_LIMITS,
    draft_size: tuple[int, int] | None = None,
) -> DecodedImage:
    """Return the upright image: RGB for three channels, gray for one, else an array H × W × C.

    Alpha is dropped and palettes are looked up as by `convert("RGB")`, because evaluations of published weights do so.
    With `draft_size` (height, width), a JPEG that is much larger is decoded at 1/2, 1/4 or 1/8 of its size, but not
    below `draft_size`. A file that cannot be decoded raises DataError.

    >>> decode(np.zeros((2, 3), dtype=np.uint8)).mode
    'RGB'
    >>> decode(b"<html>")
    Traceback (most recent call last):
    vitkit.core.errors.DataError: not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file
    """
    if isinstance(image, np.ndarray):
        check_pixels(image, channels=channels, limits=limits)
        return _from_array(image, channels=channels)
    with _open(image, limits) as file:
        if draft_size is not None and file.format in ("JPEG", "MPO"):  # a HEIF file would show its thumbnail
            height, width = reversed(draft_size) if _get_orientation(file) in _SIDEWAYS else draft_size
            file.draft(None, (width, height))
        # Only these two formats may warn while they decode; the others need not wait for the lock.
        with _suppress_warnings() if file.format in ("TIFF", "GIF") else contextlib.nullcontext():
            file.load()
        with _suppress_warnings():
            transpose = _TRANSPOSE.get(_get_orientation(file))
            decoded = _convert_channels(file, channels)
        if transpose is not None:
            decoded = decoded.transpose(transpose)
        decoded.info = {}  # metadata, such as the GPS position, must not reach any output
        return decoded if channels in (1, 3) else np.asarray(decoded)


def describe_decoder() -> str:
    """Return the versions of what decodes images; others may read files that these cannot."""
    heif = version("pillow_heif") if find_spec("pillow_heif") else "none"
    return f"vitkit {__version__}, Pillow {PIL.__version__}, pillow-heif {heif}"


def load_image(image: ImageLike, *, channels: int = 3) -> DecodedImage:
    """Decode an image in any form that users have it in. Errors name the file."""
    if isinstance(image, Image.Image):
        return decode(pillow_to_array(image, channels=channels), channels=channels)
    if isinstance(image, Tensor):
        return decode(tensor_to_array(image), channels=channels)
    if isinstance(image, bytes | np.ndarray):
        return decode(image, channels=channels)
    refuse_url(image)
    try:
        return decode(read_bytes(os.fspath(image), max_bytes=DEFAULT_LIMITS.max_bytes), channels=channels)
    except OSError as error:
        raise DataError(f"{image}: {error.strerror or error}", hint="give the path of an image file") from error
    except DataError as error:
        raise DataError(f"{image}: {summarize(error)}", hint=error.hint) from error


def refuse_url(path: object) -> None:
    """Raise DataError if a path is a URL."""
    if isinstance(path, str) and URL.match(path):
        raise DataError(f"{path}: URLs are not opened", hint="download the images, and give their paths")


def tensor_to_array(image: Tensor) -> NDArray[np.uint8]:
    """Return the pixels of a uint8 tensor C × H × W, with the channels last."""
    if image.ndim != 3 or image.dtype != uint8:
        got = f"{str(image.dtype).removeprefix('torch.')}, {' × '.join(map(str, image.shape))}"
        is_batch = image.ndim == 4 and image.dtype == uint8
        hint = "pass list(images)" if is_batch else "a batch that is normalized already is input of the model itself"
        raise InputError("a tensor is not an image", expected="uint8, channels × height × width", got=got, hint=hint)
    return np.ascontiguousarray(image.permute(1, 2, 0).cpu().numpy())


def read_header(image: StoredImage) -> ImageHeader:
    """Return format, mode and upright size without decoding; raise DataError if a limit is exceeded."""
    if isinstance(image, np.ndarray):
        channels = _count_channels(image)
        return ImageHeader("array", "1 channel" if channels == 1 else f"{channels} channels", *image.shape[:2])
    with _open(image, DEFAULT_LIMITS) as file:
        width, height = reversed(file.size) if _get_orientation(file) in _SIDEWAYS else file.size
        return ImageHeader(file.format or "", file.mode, height, width)


def check_pixels(pixels: NDArray[np.uint8], *, channels: int = 3, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
    """Raise DataError for an array that is no image, is too large, or cannot be converted to these channels."""
    actual = _count_channels(pixels)
    _check_size(pixels.shape[0], pixels.shape[1], limits)
    if actual != channels and {actual, channels} != {1, 3}:
        raise DataError("wrong number of channels", expected=channels, got=actual)


def _count_channels(pixels: NDArray[np.uint8]) -> int:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        got = f"{'×'.join(map(str, pixels.shape))} of {pixels.dtype}"
        raise DataError("the array is not an image", expected="H×W or H×W×C of uint8", got=got)
    return 1 if pixels.ndim == 2 else pixels.shape[2]


def _from_array(pixels: NDArray[np.uint8], *, channels: int) -> DecodedImage:
    if channels not in (1, 3):
        return pixels
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    mode = "RGB" if channels == 3 else "L"
    return image if image.mode == mode else image.convert(mode)


def pillow_to_array(image: Image.Image, *, channels: int) -> NDArray[np.uint8]:
    """Return upright 8-bit pixels of a Pillow image, which may still have an EXIF orientation."""
    if image.mode.startswith(("I", "F")):
        hint = "pass the file, or 8-bit pixels"
        raise DataError("the image does not have 8 bits per channel", got=f"mode {image.mode}", hint=hint)
    upright = ImageOps.exif_transpose(image)
    if channels in (1, 3) and upright.mode not in ("L", "RGB"):
        upright = upright.convert("L" if upright.mode in ("1", "LA") else "RGB")
    return np.asarray(upright)


@contextlib.contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress Pillow's warnings about odd headers; what matters is an error."""
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _describe_error(error: Exception, content: bytes, limits: DecodeLimits) -> str:
    file_format = _detect_format(content)
    text = " ".join(str(error).split())
    if isinstance(error, UnidentifiedImageError):
        if file_format in limits.formats:
            is_supported = file_format != "AVIF" or features.check("avif")
            return f"damaged {file_format} file: its header cannot be read" if is_supported else NO_AVIF
        *others, last = limits.formats
        return f"not a {', '.join(others)} or {last} file" if others else f"not a {last} file"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(error, MemoryError):
        return "too large for the memory"
    if "truncated" in text.lower():
        return "the file is truncated"
    return f"damaged {file_format or 'image'} file: {text[:100] or type(error).__name__}"


@contextlib.contextmanager
def _open(content: bytes, limits: DecodeLimits) -> Iterator[Image.Image]:
    """Open a file that keeps the limits; only its header is read.

    Every exception becomes a DataError: hostile files cause OSError, SyntaxError, struct.error and more.
    """
    try:
        if not content:
            raise DataError("the file is empty")
        check_limit("bytes", len(content), limits.max_bytes)
        check_structure(content, max_frames=limits.max_frames)
        with _suppress_warnings():
            is_heif = _detect_format(content) == "HEIF" and "HEIF" in limits.formats
            image = _open_heif(content) if is_heif else _open_pillow(content, limits)
        with image:
            _check_header(image, content, limits)
            yield image
    except DataError:
        raise
    except Exception as error:
        raise DataError(_describe_error(error, content, limits)) from error


def _open_pillow(content: bytes, limits: DecodeLimits) -> Image.Image:
    formats = [name for name in limits.formats if name != "HEIF"]
    if any(name not in Image.OPEN for name in formats):
        Image.init()  # imports the plugins; naming a format does not
    return Image.open(io.BytesIO(content), formats=formats)


def _open_heif(content: bytes) -> Image.Image:
    """Open a HEIF file. libheif rotates it, and pillow-heif sets the EXIF orientation to 1."""
    try:
        heif = import_module("pillow_heif")
    except ImportError as error:
        message = "HEIC needs the extra heif: pip install 'vitkit[heif]', or convert the file to JPEG"
        raise DataError(message) from error
    return heif.HeifImageFile(io.BytesIO(content))


def _detect_format(content: bytes) -> str | None:
    """Return the format that a file claims to have by its first bytes."""
    if content[4:8] == b"ftyp":
        size = min(int.from_bytes(content[:4], "big"), 256)
        names = [_BRANDS.get(content[start : start + 4]) for start in (8, *range(16, size, 4))]
        return "AVIF" if "AVIF" in names else next(filter(None, names), None)
    return next((name for magic, name in _MAGIC.items() if content.startswith(magic)), None)


def _check_header(image: Image.Image, content: bytes, limits: DecodeLimits) -> None:
    width, height = image.size
    _check_size(height, width, limits)
    if image.format in ("JPEG", "MPO"):
        max_scans = min(limits.max_scans, max(1, _SCANS_AT_MAX_PIXELS * limits.max_pixels // (height * width)))
        check_limit("scans", content.count(b"\xff\xda"), max_scans)
    with _suppress_warnings():
        check_limit("frames", _count_frames(image, content, max_frames=limits.max_frames), limits.max_frames)


def _check_size(height: int, width: int, limits: DecodeLimits) -> None:
    if height < 1 or width < 1:
        raise DataError("the image has no pixels", got=f"{height}×{width}")
    check_limit("pixels", height * width, limits.max_pixels)


def _count_frames(image: Image.Image, content: bytes, *, max_frames: int) -> int:
    """Count the frames, up to one more than `max_frames`."""
    if image.format == "GIF":
        return count_gif_frames(content, max_frames=max_frames)
    if image.format != "TIFF":
        return int(getattr(image, "n_frames", 1))
    if not getattr(image, "is_animated", False):
        return 1
    # Pillow counts frames by seeking, and cannot seek back after the last one: seek in a second object.
    with Image.open(io.BytesIO(content), formats=("TIFF",)) as file:
        try:
            file.seek(max_frames)
        except Exception:  # the end, or damage in a frame that is not used
            return 1
    return max_frames + 1


def _get_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation from 1 to 8; 1 if there is none or it cannot be read."""
    if image.format == "TIFF":  # Pillow applies it
        return 1
    try:
        exif = image.info.get("exif")
        if isinstance(exif, bytes) and not is_small_exif(exif):
            return 1
        # The method of the base class: that of PNG would decode the image to search for more EXIF data.
        orientation = Image.Image.getexif(image).get(0x0112, 1)
    except Exception:
        return 1
    return orientation if orientation in _TRANSPOSE else 1


def _convert_channels(image: Image.Image, channels: int) -> Image.Image:
    """Return a new 8-bit image with this number of channels."""
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if channels == 3:
        return image.convert("RGB")
    if channels == 1:
        return image.convert("L") if image.mode in ("1", "L", "LA", "P") else image.convert("RGB").convert("L")
    if image.mode in ("P", "PA") and image.has_transparency_data:
        image = image.convert("RGBA")
    if image.mode == "P" or len(image.getbands()) != channels:
        got = f"{len(image.getbands())} ({image.mode})"
        raise DataError("wrong number of channels", expected=channels, got=got)
    return image.copy()


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit integers and floats to 8-bit gray. Pillow would clip them at 255.

    Floats are in 0…1 or 0…255. An image within 0…1 would be black on the larger scale, so it is on the smaller.
    """
    pixels = np.asarray(image)
    lowest, highest = pixels.min(), pixels.max()
    if image.mode == "F":
        if not (lowest >= 0 and highest <= 255):  # or NaN
            raise DataError("unknown range of floats", expected="0…1 or 0…255", got=f"{lowest}…{highest}")
        return Image.fromarray(np.rint(pixels * (255.0 if highest <= 1 else 1.0)).astype(np.uint8))
    if not (lowest >= 0 and highest <= 65535):
        raise DataError("unknown range of integers", expected="0…65535", got=f"{lowest}…{highest}")
    return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))
