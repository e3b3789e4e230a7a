"""Preprocessing of images for evaluation, as the origin of the weights did it.

    image ─ to_pixels ─→ C × H × W, 0…255 ─ (batch) ─ normalize ─→ input of the model

`Preprocessing` is stored with the weights and used everywhere, so that predict = eval = serve.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image
from PIL.Image import Resampling
from torch.nn.functional import interpolate

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import (
    ConfigError,
    InputError,
    UnknownNameError,
    WeightsError,
    check_fraction,
    check_positive,
    did_you_mean,
    summarize,
)
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import DecodedImage
from vitkit.data.decode import ImageLike, load_image
from vitkit.data.image_processors import IMAGENET_MEAN, IMAGENET_STD, parse_image_processor

Resize = Literal["squash", "squash_crop", "crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]
Rounding = Literal["even", "down"]
Box = tuple[int | float, int | float, int | float, int | float]
"""(left, top, right, bottom) in pixels, as in Pillow."""

RESAMPLING: dict[Interpolation, Resampling] = {"nearest": Resampling.NEAREST, "bilinear": Resampling.BILINEAR}
RESAMPLING |= {"bicubic": Resampling.BICUBIC, "lanczos": Resampling.LANCZOS, "area": Resampling.BOX}
"""Pillow's filters. Its box filter uses whole pixels only; `resize_area` is exact."""
_PIXELS_PER_CHUNK = 1 << 20
"""Pixels whose cumulative sums are held at once, at eight bytes per channel."""
_ROUNDING_ERROR = 1e-4
"""Error that a mean may have before its fraction is cut off."""
_MAX_PIXELS_BEFORE_CROP = 2**25
"""Size of an image before its center crop; without a limit, one of 1 × 60,000 pixels would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resizing, cropping and normalization of images for evaluation.

    Args:
        image_size: Size of the model input.
        channels: Number of channels.
        resize: "squash" resizes to exactly image_size, as the paper's released code. "crop" resizes the shorter side to
            floor(image_size / crop_fraction) and crops the center, as DeiT, timm and torchvision. "squash_crop" resizes
            both sides to that and crops the center, as the paper's few-shot evaluation.
        crop_fraction: timm's crop_pct.
        interpolation: "area" is that of big_vision, and rounds the longer side as it does.
        antialias: Without it, bilinear pixels are those of `tf.image.resize`: not rounded, and of four neighbors
            however far the image shrinks.
        crop_rounding: Start of a crop with an odd border: at the even pixel, or "down" as in transformers and
            big_vision.
        mean: Mean of pixels in 0…1, per channel or one for all.
        std: Standard deviation of pixels in 0…1, per channel or one for all.

    >>> Preprocessing(resize="crop", crop_fraction=0.9).resize_size
    (248, 248)
    """

    image_size: Size = 224
    channels: int = 3
    resize: Resize = "squash"
    crop_fraction: float = 0.875
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    crop_rounding: Rounding = "even"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        check_positive("preprocessing.image_size", min(pair(self.image_size)))
        check_positive("preprocessing.channels", self.channels)
        check_fraction("preprocessing.crop_fraction", self.crop_fraction, allow_zero=False, allow_one=True)
        if not self.antialias and (self.interpolation != "bilinear" or self.resize == "crop"):
            message = "preprocessing.antialias = false is only for the paper's bilinear squash"
            expected = 'interpolation = "bilinear" and resize = "squash" or "squash_crop"'
            raise ConfigError(message, expected=expected, got=f"{self.interpolation} and {self.resize}")
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, self.channels):
                raise ConfigError(
                    f"preprocessing.{name} must have one number per channel, or one for all",
                    expected=f"{self.channels} numbers or 1",
                    got=len(numbers),
                )
            if not all(map(math.isfinite, numbers)):
                raise ConfigError(f"preprocessing.{name} must be finite", got=numbers)
        check_positive("preprocessing.std", min(self.std))

    @property
    def resize_size(self) -> tuple[int, int]:
        """(height, width) before the crop; for "crop", the size that the resized image covers."""
        height, width = pair(self.image_size)
        if self.resize == "squash":
            return height, width
        # Rounded down as by timm and DeiT: 224 / 0.9 is 248.
        return math.floor(height / self.crop_fraction), math.floor(width / self.crop_fraction)

    def __call__(self, images: ImageLike | Sequence[ImageLike]) -> Float[Tensor, "B C H W"]:
        """Return the batch of one image or several, of any form and size, as input of the model.

        >>> Preprocessing(image_size=32)([np.zeros((40, 30, 3), dtype=np.uint8), Image.new("RGB", (9, 9))]).shape
        torch.Size([2, 3, 32, 32])
        """
        several = images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
        if not several:
            raise InputError("there are no images to preprocess", hint="pass an image, or a list of at least one")
        decoded = [load_image(image, channels=self.channels) for image in several]
        return self.normalize(torch.from_numpy(np.stack([self.to_pixels(image) for image in decoded])))

    def transforms(self, *, train: bool = False) -> Callable[[ImageLike], Float[Tensor, "C H W"]]:
        """Return the transform of a single image, for a torch Dataset.

        With `train` it is the paper's random crop and flip, with random numbers from torch, which DataLoader seeds
        for each worker.
        """
        return partial(_transform, preprocessing=self, train=train)

    def to_pixels(self, image: DecodedImage) -> NDArray[np.uint8] | NDArray[np.float32]:
        """Resize and crop, and return pixels, C × H × W, 0…255: uint8 with antialiasing, float32 without."""
        check_channels(image, channels=self.channels)
        if self.antialias:
            return to_chw(self.resize_and_crop(image))
        left, top, right, bottom = center_box(self.resize_size, pair(self.image_size), self.crop_rounding)
        return resize_bilinear(to_chw(image), self.resize_size)[:, top:bottom, left:right].copy()

    def resize_and_crop(self, image: DecodedImage) -> DecodedImage:
        """Return the image at image_size, resized with antialiasing and cropped."""
        target = pair(self.image_size)
        height, width = get_size(image)
        size = self.resize_size
        if self.resize == "crop":
            size = cover_size((height, width), size, rounded=self.interpolation == "area")
        if size != target and math.prod(size) > _MAX_PIXELS_BEFORE_CROP:
            # Resize only the center of a strip. Equal up to the rounding of where the center begins.
            left, top, right, bottom = center_box(size, target, self.crop_rounding)
            scale_y, scale_x = height / size[0], width / size[1]
            box = (left * scale_x, top * scale_y, min(right * scale_x, width), min(bottom * scale_y, height))
            return crop_resize(image, box=box, size=target, interpolation=self.interpolation)
        if self.interpolation == "area":
            resized = resize_area(image, size)
        else:
            resized = crop_resize(image, box=(0, 0, width, height), size=size, interpolation=self.interpolation)
        return resized if size == target else crop(resized, box=center_box(size, target, self.crop_rounding))

    def normalize(self, pixels: UInt8[Tensor, "B C H W"] | Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Return the input of the model: (pixels − 255 mean) / (255 std), in float32."""
        if pixels.shape[1] != self.channels:
            raise InputError("wrong number of channels in the batch", expected=self.channels, got=pixels.shape[1])
        # Subtract before scaling: mid-gray is near zero, and a fused multiply-add would round it at the magnitude of
        # one. Convert first: arithmetic on mixed types is five times slower.
        shift, scale = self._shift_and_scale(pixels.device)
        return pixels.to(torch.float32, copy=True).sub_(shift).div_(scale)

    def denormalize(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Return the pixels, 0…255, of normalized images."""
        shift, scale = self._shift_and_scale(images.device)
        return images.float() * scale + shift

    def _shift_and_scale(self, device: torch.device) -> list[Tensor]:
        numbers = ([[[255 * number]] for number in each] for each in (self.mean, self.std))
        return [torch.tensor(each, dtype=torch.float32, device=device) for each in numbers]

    def to_hub(self) -> dict[str, object]:
        """Return the content of preprocessor_config.json: keys of transformers and, under "vitkit", all fields."""
        height, width = pair(self.image_size)
        crops = self.resize != "squash"
        size = dict(zip(("height", "width"), self.resize_size, strict=True))
        if self.resize == "crop":
            size = {"shortest_edge": min(self.resize_size)}
        return {
            "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
            "do_resize": True,
            "size": size,
            "resample": int(RESAMPLING[self.interpolation]),
            "do_center_crop": crops,
            **({"crop_size": {"height": height, "width": width}, "crop_pct": self.crop_fraction} if crops else {}),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": np.broadcast_to(self.mean, self.channels).tolist(),
            "image_std": np.broadcast_to(self.std, self.channels).tolist(),
            "vitkit": to_mapping(self),
        }

    @classmethod
    def from_hub(cls, data: Mapping[str, object]) -> "Preprocessing":
        """Create the preprocessing of a preprocessor_config.json, written by vitkit or for transformers.

        >>> Preprocessing.from_hub({"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}).resize
        'squash'
        """
        own = data.get("vitkit")
        if not isinstance(own, Mapping):
            try:
                return from_mapping(cls, parse_image_processor(data))
            except (ValueError, TypeError, ArithmeticError, ConfigError) as error:
                raise WeightsError(
                    f"preprocessor_config.json is not supported: {summarize(error)}",
                    hint="without that file, the preprocessing of the format's origin is used",
                ) from error
        preprocessing = from_mapping(cls, own, where="vitkit.")
        for key, value in preprocessing.to_hub().items():
            if key != "vitkit" and data.get(key, value) != value:
                message = f"preprocessor_config.json contradicts itself: {key} differs from its vitkit section"
                hint = "change the vitkit section, or remove it"
                raise WeightsError(message, expected=value, got=data[key], hint=hint)
        return preprocessing


_PAPER = Preprocessing(antialias=False)
_IMAGENET_SQUASH = Preprocessing(mean=IMAGENET_MEAN, std=IMAGENET_STD)
_IMAGENET = replace(_IMAGENET_SQUASH, resize="crop", crop_fraction=0.875, interpolation="bicubic")

ORIGINS: dict[str, Preprocessing] = {
    "paper": _PAPER,
    "bit": _PAPER,
    "big_vision": Preprocessing(resize="crop", crop_fraction=0.875, interpolation="area", crop_rounding="down"),
    "timm_augreg": Preprocessing(resize="crop", crop_fraction=0.9, interpolation="bicubic"),
    "deit": _IMAGENET,
    "mae": _IMAGENET,
    "dinov2": _IMAGENET,
    "dinov3": _IMAGENET_SQUASH,
    "dinov3_satellite": Preprocessing(mean=(0.430, 0.411, 0.296), std=(0.213, 0.156, 0.143)),
    "torchvision": replace(_IMAGENET, interpolation="bilinear"),
    "huggingface": Preprocessing(),
    "huggingface_deit": replace(_IMAGENET, resize="squash_crop", crop_rounding="down"),
    "huggingface_mae": _IMAGENET_SQUASH,
    "huggingface_dinov2": replace(_IMAGENET, crop_rounding="down"),
}
"""Preprocessing with which the weights of each origin were evaluated, at 224 pixels; DINOv3: from its README."""
_CHANGES_FROM_SIZE: dict[str, tuple[int, dict[str, object]]] = {
    "timm_augreg": (384, {"crop_fraction": 1.0}),
    "mae": (225, {"crop_fraction": 1.0}),
    "torchvision": (384, {"crop_fraction": 1.0, "interpolation": "bicubic"}),
    "big_vision": (384, {"crop_fraction": 384 / 448}),
}
"""Fields that change from a size on: in timm's AugReg, MAE's code, torchvision's SWAG and big_vision's transfers."""


def _transform(image: ImageLike, *, preprocessing: Preprocessing, train: bool) -> Float[Tensor, "C H W"]:
    if not train:
        return preprocessing(image)[0]
    from vitkit.data.augment import augment_image  # noqa: PLC0415  it imports this module

    rng = np.random.default_rng(int(torch.randint(2**62, ()).item()))
    decoded = load_image(image, channels=preprocessing.channels)
    pixels = augment_image(decoded, preprocessing=preprocessing, augment=AugmentConfig(), rng=rng)
    return preprocessing.normalize(torch.from_numpy(pixels)[None])[0]


def get_preprocessing(origin: str, *, image_size: Size, channels: int = 3) -> Preprocessing:
    """Return the preprocessing of an origin at another size, and for other channels with their mean statistics.

    >>> get_preprocessing("timm_augreg", image_size=384).resize_size
    (384, 384)
    """
    if origin not in ORIGINS:
        hint = did_you_mean(origin, ORIGINS) or f"known origins: {', '.join(ORIGINS)}"
        raise UnknownNameError(f"there is no preprocessing of {origin!r}", hint=hint)
    preprocessing = replace(ORIGINS[origin], image_size=image_size)
    min_size, changes = _CHANGES_FROM_SIZE.get(origin, (math.inf, {}))
    if min(pair(image_size)) >= min_size:
        preprocessing = from_mapping(Preprocessing, to_mapping(preprocessing) | changes)
    if channels == 3:
        return preprocessing
    mean, std = sum(preprocessing.mean) / 3, sum(preprocessing.std) / 3
    return replace(preprocessing, channels=channels, mean=(mean,), std=(std,))


def check_channels(image: DecodedImage, *, channels: int) -> None:
    """Raise InputError if the image has another number of channels."""
    actual = len(image.getbands()) if isinstance(image, Image.Image) else image.shape[2]
    if actual != channels:
        raise InputError("wrong number of channels in the image", expected=channels, got=actual)


def crop_resize(
    image: DecodedImage,
    *,
    box: Box,
    size: tuple[int, int],
    interpolation: Interpolation,
    reducing_gap: float | None = None,
) -> DecodedImage:
    """Return the part of the image in `box`, resized to (height, width) with antialiasing.

    `reducing_gap` lets Pillow shrink by a whole factor first: three times faster on a photo of 12 megapixels, but the
    pixels differ, so training uses it and evaluation does not.
    """
    if not isinstance(image, Image.Image):
        resize = partial(crop_resize, box=box, size=size, interpolation=interpolation, reducing_gap=reducing_gap)
        return np.stack([np.asarray(resize(Image.fromarray(plane))) for plane in np.moveaxis(image, 2, 0)], axis=2)
    height, width = size
    if image.size == (width, height) and box == (0, 0, width, height):
        return image  # as Pillow does, without the copy
    return image.resize((width, height), RESAMPLING[interpolation], box=box, reducing_gap=reducing_gap)


def crop(image: DecodedImage, *, box: tuple[int, int, int, int]) -> DecodedImage:
    """Return the part of the image in `box`, which is black beyond the image."""
    if isinstance(image, Image.Image):
        return image.crop(box)
    left, top, right, bottom = box
    height, width, channels = image.shape
    cropped = np.zeros((bottom - top, right - left, channels), dtype=np.uint8)
    rows, columns = slice(max(top, 0), max(min(bottom, height), 0)), slice(max(left, 0), max(min(right, width), 0))
    inside = image[rows, columns]
    cropped[rows.start - top :, columns.start - left :][: inside.shape[0], : inside.shape[1]] = inside
    return cropped


def flip_horizontal(image: DecodedImage) -> DecodedImage:
    """Return the image with left and right exchanged."""
    if isinstance(image, Image.Image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image[:, ::-1]


def to_chw(image: DecodedImage) -> NDArray[np.uint8]:
    """Return a copy of the pixels, C × H × W."""
    if not isinstance(image, Image.Image):
        return np.array(np.moveaxis(image, 2, 0), order="C")
    bands = image.getbands()
    if len(bands) == 1:
        return np.array(image)[None]
    if image.height * image.width < 4096:
        return np.array(np.moveaxis(np.asarray(image), 2, 0), order="C")
    # One band at a time takes half the time on larger images.
    planes = [np.frombuffer(image.tobytes("raw", band), dtype=np.uint8) for band in bands]
    return np.stack(planes).reshape(len(bands), image.height, image.width)


def resize_bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float32]:
    """Resize C × H × W pixels without antialiasing: bilinear, half-pixel centers, not rounded."""
    # One plane at a time: a large photo takes four times the memory as floats.
    planes = (torch.from_numpy(plane.astype(np.float32))[None, None] for plane in pixels)
    resized = [interpolate(plane, size, mode="bilinear", align_corners=False)[0, 0] for plane in planes]
    return torch.stack(resized).numpy()


def resize_area(image: DecodedImage, size: tuple[int, int]) -> DecodedImage:
    """Resize to (height, width): each pixel is the mean of the area it covers, rounded down.

    Equal to `tf.image.resize` with the method "area" and a cast to integers.

    >>> resize_area(np.array([[[0], [30], [60]]], dtype=np.uint8), (1, 2)).tolist()
    [[[10], [50]]]
    """
    pixels = np.asarray(image)
    for axis in sorted((0, 1), key=lambda axis: size[axis] > pixels.shape[axis]):  # shrink before growing
        other, step = 1 - axis, max(1, _PIXELS_PER_CHUNK // pixels.shape[axis])
        parts = np.split(pixels, range(step, pixels.shape[other], step), axis=other)
        pixels = np.concatenate([_average(part, length=size[axis], axis=axis) for part in parts], axis=other)
    rounded = np.floor(pixels + _ROUNDING_ERROR).astype(np.uint8)
    return Image.fromarray(rounded, image.mode) if isinstance(image, Image.Image) else rounded


def _average(pixels: NDArray[np.generic], *, length: int, axis: int) -> NDArray[np.float64]:
    """Return means over `length` equal parts of an axis, by cumulative sums. A part may end inside a pixel."""
    along = np.moveaxis(pixels, axis, 0)
    sums = np.zeros((len(along) + 1, *along.shape[1:]))
    np.cumsum(along, axis=0, out=sums[1:])
    borders = np.linspace(0, len(along), length + 1)
    before = np.minimum(borders.astype(np.int64), len(along) - 1)
    remainder = (borders - before).reshape(-1, *[1] * (along.ndim - 1))
    sums_at_borders = sums[before] * (1 - remainder) + sums[before + 1] * remainder
    return np.moveaxis(np.diff(sums_at_borders, axis=0) * (length / len(along)), 0, axis)


def get_size(image: DecodedImage) -> tuple[int, int]:
    """Return (height, width)."""
    if isinstance(image, Image.Image):
        return image.height, image.width
    return image.shape[0], image.shape[1]


def cover_size(size: tuple[int, int], target: tuple[int, int], *, rounded: bool = False) -> tuple[int, int]:
    """Return (height, width) scaled until it covers the target, with the same aspect ratio.

    For a square target the longer side is truncated, as by timm and torchvision, or rounded.

    >>> cover_size((300, 403), (200, 200)), cover_size((300, 403), (200, 200), rounded=True)
    ((200, 268), (200, 269))
    """
    (height, width), side = size, target[0]
    if side == target[1] and not rounded:
        return (side, int(side * width / height)) if height < width else (int(side * height / width), side)
    ratio = min(height / target[0], width / target[1])
    return round(height / ratio), round(width / ratio)


def center_box(size: tuple[int, int], crop_size: tuple[int, int], rounding: Rounding) -> tuple[int, int, int, int]:
    """Return the box of a center crop; odd borders round to even (timm, torchvision) or down (transformers)."""
    halve = round if rounding == "even" else math.floor
    top, left = (halve((whole - part) / 2) for whole, part in zip(size, crop_size, strict=True))
    return left, top, left + crop_size[1], top + crop_size[0]
