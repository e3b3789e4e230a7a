"""A picture and a size go in, the picture at that size comes out: resized, cropped or mirrored, as pixels if asked."""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from vitkit.data.source import Picture

Filter = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]
Rounding = Literal["even", "down"]
Box = tuple[int | float, int | float, int | float, int | float]
"""(left, top, right, bottom) in pixels, as Pillow has it."""

RESAMPLING: dict[Filter, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}
"""Pillow's filters. Its box takes whole pixels only; `averaged` is the exact one."""
_AT_ONCE = 1 << 20
"""Pixels whose sums are held at once: each takes eight bytes for each channel."""
_NEARLY_WHOLE = 1e-4
"""What rounding may take from a mean that is a whole number, before its fraction is cut off."""


def crop_resize(
    picture: Picture, *, box: Box, size: tuple[int, int], resampling: Filter, reducing_gap: float | None = None
) -> Picture:
    """The part of the picture in `box`, resized to (height, width) with antialias.

    `reducing_gap` lets Pillow first shrink by a whole factor and leave the filter at least that much to do: three
    times quicker on a photo of 12 megapixels and not the same pixels, so training uses it and evaluation does not.

    >>> crop_resize(Image.new("L", (8, 6)), box=(1, 1, 7, 5), size=(4, 4), resampling="bilinear").size
    (4, 4)
    """
    height, width = size
    if isinstance(picture, Image.Image):
        if picture.size == (width, height) and box == (0, 0, width, height):
            return picture  # as Pillow does, without the copy
        return picture.resize((width, height), RESAMPLING[resampling], box=box, reducing_gap=reducing_gap)
    bands = (Image.fromarray(plane) for plane in np.moveaxis(picture, 2, 0))
    sized = (crop_resize(band, box=box, size=size, resampling=resampling, reducing_gap=reducing_gap) for band in bands)
    return np.stack([np.asarray(band) for band in sized], axis=2)


def crop(picture: Picture, *, box: tuple[int, int, int, int]) -> Picture:
    """The part of the picture in `box`; black where the box reaches beyond it.

    >>> crop(Image.new("L", (8, 6), 255), box=(-1, 0, 1, 1)).tobytes()
    b'\\x00\\xff'
    """
    if isinstance(picture, Image.Image):
        return picture.crop(box)
    left, top, right, bottom = box
    height, width, channels = picture.shape
    part = np.zeros((bottom - top, right - left, channels), dtype=np.uint8)
    rows, columns = slice(max(top, 0), max(min(bottom, height), 0)), slice(max(left, 0), max(min(right, width), 0))
    inside = picture[rows, columns]
    part[rows.start - top :, columns.start - left :][: inside.shape[0], : inside.shape[1]] = inside
    return part


def flip(picture: Picture) -> Picture:
    """The picture, left and right exchanged.

    >>> flip(np.array([[[1], [2]]], dtype=np.uint8)).tolist()
    [[[2], [1]]]
    """
    if isinstance(picture, Image.Image):
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return picture[:, ::-1]


def planes(picture: Picture) -> NDArray[np.uint8]:
    """The picture's pixels, C × H × W, in memory of their own.

    >>> planes(Image.new("RGB", (2, 1), (7, 8, 9))).tolist()
    [[[7, 7]], [[8, 8]], [[9, 9]]]
    """
    if not isinstance(picture, Image.Image):
        return np.array(np.moveaxis(picture, 2, 0), order="C")
    width, height = picture.size
    bands = picture.getbands()
    if len(bands) == 1:
        return np.array(picture)[None]
    pixels = np.empty((len(bands), height, width), dtype=np.uint8)
    if height * width < 4096:
        pixels[:] = np.moveaxis(np.asarray(picture), 2, 0)
    else:  # asking for one band at a time halves the time on larger pictures
        for plane, band in zip(pixels, bands, strict=True):
            plane[:] = np.frombuffer(picture.tobytes("raw", band), dtype=np.uint8).reshape(height, width)
    return pixels


def sampled(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float32]:
    """C × H × W pixels resized without antialias: bilinear between four neighbours, half-pixel centres, not rounded.

    >>> sampled(np.array([[[0, 10, 20, 30]]], dtype=np.uint8), (1, 2)).tolist()
    [[[5.0, 25.0]]]
    """
    # One plane at a time: as floats, a large photo takes four times the memory.
    one_by_one = (torch.from_numpy(plane.astype(np.float32))[None, None] for plane in pixels)
    sized = [interpolate(plane, size, mode="bilinear", align_corners=False)[0, 0] for plane in one_by_one]
    return torch.stack(sized).numpy()


def averaged(picture: Picture, size: tuple[int, int]) -> Picture:
    """The picture resized to (height, width), each pixel the mean of the area it covers, its fraction cut off.

    So does `tf.image.resize` with the method "area" and a cast back to whole numbers.

    >>> averaged(np.array([[[0], [30], [60]]], dtype=np.uint8), (1, 2)).tolist()
    [[[10], [50]]]
    """
    pixels = np.asarray(picture)
    for axis in sorted(
        (0, 1), key=lambda axis: size[axis] > pixels.shape[axis]
    ):  # what shrinks comes before what grows
        other, step = 1 - axis, max(1, _AT_ONCE // pixels.shape[axis])
        parts = np.split(pixels, range(step, pixels.shape[other], step), axis=other)
        pixels = np.concatenate([_means(part, length=size[axis], axis=axis) for part in parts], axis=other)
    whole = np.floor(pixels + _NEARLY_WHOLE).astype(np.uint8)
    return Image.fromarray(whole, picture.mode) if isinstance(picture, Image.Image) else whole


def _means(pixels: NDArray[np.generic], *, length: int, axis: int) -> NDArray[np.float64]:
    """Means over `length` equal parts of an axis, from sums up to their borders; a part may end inside a pixel."""
    along = np.moveaxis(pixels, axis, 0)
    sums = np.zeros((len(along) + 1, *along.shape[1:]))
    np.cumsum(along, axis=0, out=sums[1:])
    borders = np.linspace(0, len(along), length + 1)
    before = np.minimum(borders.astype(np.int64), len(along) - 1)
    inside = (borders - before).reshape(-1, *[1] * (along.ndim - 1))
    up_to = sums[before] * (1 - inside) + sums[before + 1] * inside
    return np.moveaxis(np.diff(up_to, axis=0) * (length / len(along)), 0, axis)


def sides_of(picture: Picture) -> tuple[int, int]:
    """(height, width)."""
    if isinstance(picture, Image.Image):
        return picture.height, picture.width
    return picture.shape[0], picture.shape[1]


def covering(sides: tuple[int, int], target: tuple[int, int], *, rounded: bool = False) -> tuple[int, int]:
    """(height, width) of a picture's sides scaled until they cover the target.

    Of a square the longer side is cut to whole pixels, as timm and torchvision do, or rounded.

    >>> covering((300, 403), (200, 200)), covering((300, 403), (200, 200), rounded=True)
    ((200, 268), (200, 269))
    """
    height, width = sides
    if target[0] == target[1] and not rounded:
        if height < width:
            return target[0], int(target[0] * width / height)
        return int(target[0] * height / width), target[0]
    ratio = min(height / target[0], width / target[1])
    return round(height / ratio), round(width / ratio)


def centre(resized: tuple[int, int], size: tuple[int, int], rounding: Rounding) -> tuple[int, int, int, int]:
    """The box of a centre crop, rounded to even as by timm and torchvision, or down as by transformers, big_vision."""
    half = round if rounding == "even" else math.floor
    top, left = (half((whole - part) / 2) for whole, part in zip(resized, size, strict=True))
    return left, top, left + size[1], top + size[0]
