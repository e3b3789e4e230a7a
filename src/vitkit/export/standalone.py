"""The functions that an `example.py` is made of, on numpy and Pillow alone: an image file goes in, pixels come out.

Their text is copied into example files, each file getting those that its preprocessing needs, so that a program runs
where vitkit is not. They give the pixels of `vitkit.data.decode` and `Preprocessing.pixels`; the tests compare them.
Nothing here may use anything but what `IMPORTS` of `vitkit.export.example` names.
"""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def orientation(image: Image.Image) -> int:
    """How the camera was held, from 1 to 8. Pillow turns a TIFF by itself; what cannot be read says nothing."""
    try:
        return 1 if image.format == "TIFF" else Image.Image.getexif(image).get(0x0112, 1)
    except Exception:
        return 1


def decoded(path: str) -> Image.Image:
    """The image as stored."""
    image = Image.open(io.BytesIO(Path(path).read_bytes()))
    image.load()
    return image


def in_8_bits(image: Image.Image) -> Image.Image:
    """Integers of 16 bits and floats as grey of 8 bits, white to white; Pillow would clip them at 255."""
    if not image.mode.startswith(("I", "F")):
        return image
    numbers = np.asarray(image)
    if image.mode == "F":
        return Image.fromarray(np.rint(numbers * (255.0 if numbers.max() <= 1 else 1.0)).astype(np.uint8))
    return Image.fromarray(((numbers.astype(np.uint32) + 128) // 257).astype(np.uint8))


def in_colour(image: Image.Image) -> Image.Image:
    """Red, green and blue."""
    return in_8_bits(image).convert("RGB")


def in_grey(image: Image.Image) -> Image.Image:
    """One channel."""
    image = in_8_bits(image)
    return image.convert("L") if image.mode in ("1", "L", "LA", "P") else image.convert("RGB").convert("L")


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """The channels as they are stored."""
    image = in_8_bits(image)
    if image.mode in ("P", "PA") and image.has_transparency_data:
        image = image.convert("RGBA")
    if image.mode == "P" or len(image.getbands()) != channels:
        raise SystemExit(f"an image of {channels} channels is needed, and this has {len(image.getbands())}")
    return image


def upright(picture: Image.Image, orientation: int) -> NDArray[np.uint8]:
    """The pixels of the picture as it was seen, channels × height × width."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    if orientation in turns:
        picture = picture.transpose(turns[orientation])
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def resized(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    resampling: Image.Resampling,
    box: tuple[float, float, float, float] | None = None,
) -> NDArray[np.uint8]:
    """Each channel resized by Pillow to (height, width), with antialias; of `box` alone, if there is one."""
    height, width = size
    bands = [Image.fromarray(np.ascontiguousarray(plane)) for plane in pixels]
    return np.stack([np.asarray(band.resize((width, height), resampling, box=box)) for band in bands])


def averaged(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Each new pixel the mean of the area that it covers, its fraction cut off."""
    means = pixels.astype(np.float64)
    for axis, length in ((1, size[0]), (2, size[1])):
        along = np.moveaxis(means, axis, 0)
        sums = np.concatenate([np.zeros_like(along[:1]), np.cumsum(along, axis=0)])
        borders = np.linspace(0, len(along), length + 1)
        before = np.minimum(borders.astype(np.int64), len(along) - 1)
        inside = (borders - before)[:, None, None]
        up_to = sums[before] * (1 - inside) + sums[before + 1] * inside
        means = np.moveaxis(np.diff(up_to, axis=0) * (length / len(along)), 0, axis)
    return np.floor(means + 1e-4).astype(np.uint8)


def sampled(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float32]:
    """Bilinear between four neighbours, however far the image shrinks, and not rounded."""
    numbers = pixels.astype(np.float32)
    for axis, length in ((2, size[1]), (1, size[0])):
        whole = numbers.shape[axis]
        places = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * (np.float32(whole) / np.float32(length))
        places = np.maximum(places - np.float32(0.5), np.float32(0.0))
        first = np.minimum(places.astype(np.int64), whole - 1)
        second = np.minimum(first + 1, whole - 1)
        share = (places - first).astype(np.float32).reshape([-1 if each == axis else 1 for each in range(3)])
        numbers = numbers.take(first, axis) * (1 - share) + numbers.take(second, axis) * share
    return numbers


def covering(sides: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Height and width scaled until they cover the square target, the longer side cut to whole pixels."""
    height, width = sides
    if height < width:
        return target[0], int(target[0] * width / height)
    return int(target[0] * height / width), target[0]


def covering_rounded(sides: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Height and width scaled until they cover the target, and rounded."""
    ratio = min(sides[0] / target[0], sides[1] / target[1])
    return round(sides[0] / ratio), round(sides[1] / ratio)


def likeliest(logits: NDArray[np.float32], labels: list[str], top: int) -> list[dict[str, object]]:
    """The likeliest classes of one image with their probabilities, the likeliest first."""
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")[:top]
    return [{"label": labels[number], "probability": float(shares[number])} for number in order]


def printable(text: object) -> str:
    """The text without what could steer a terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(text))
