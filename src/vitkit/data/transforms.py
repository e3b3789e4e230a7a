"""A picture goes in, the pixels that a model of some origin was evaluated on come out, then the normalised batch.

    picture ─ pixels ─→ C × H × W, 0…255 ─ (batch) ─ normalise ─→ what the model takes

`Preprocessing` is stored with the weights and used by every consumer, so that predict = eval = serve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import ConfigError, InputError, UnknownNameError, WeightsError, check_positive, did_you_mean
from vitkit.core.shapes import Float, Size, Tensor, pair
from vitkit.data import image_processors
from vitkit.data.image_processors import IMAGENET_DEVIATION, IMAGENET_MEAN
from vitkit.data.source import Picture

Filter = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Resize = Literal["squash", "squash_crop", "crop"]
Rounding = Literal["even", "down"]
Box = tuple[int | float, int | float, int | float, int | float]
"""(left, top, right, bottom) in pixels, as Pillow has it."""

_RESAMPLING: dict[Filter, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_MOST_BEFORE_CROP = 2**25
"""Pixels of a picture before its centre crop: without a limit, one of 1 × 60 000 would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How evaluation turns a picture into the model's input.

    `resize` is "squash" (to exactly image_size, as the paper's released code does), "crop" (the shorter side to
    image_size / crop_share rounded down, then the centre: DeiT, timm, torchvision) or "squash_crop" (both sides to
    image_size / crop_share, then the centre: the paper's few-shot probe). Without `antialias`, bilinear pixels are
    those of `tf.image.resize`: four neighbours however far the image shrinks, not rounded to integers.
    `crop_rounding` says where the middle of an odd border begins: at the even pixel, or "down" for Hugging Face's.
    A `mean` or `deviation` of one number, as shares of 255, stands for all channels.

    >>> Preprocessing(resize="crop", crop_share=0.9).resized
    (248, 248)
    """

    image_size: Size = 224
    channels: int = 3
    resize: Resize = "squash"
    crop_share: float = 0.875
    filter: Filter = "bilinear"
    antialias: bool = True
    crop_rounding: Rounding = "even"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        check_positive("preprocessing.image_size", min(pair(self.image_size)))
        check_positive("preprocessing.channels", self.channels)
        if not 0.0 < self.crop_share <= 1.0:
            raise ConfigError("preprocessing.crop_share is not a share", expected="0 < share ≤ 1", got=self.crop_share)
        if not self.antialias and (self.filter != "bilinear" or self.resize == "crop"):
            raise ConfigError(
                "preprocessing.antialias = false is the paper's bilinear squash alone",
                expected='filter = "bilinear" and resize = "squash" or "squash_crop"',
                got=f"{self.filter} and {self.resize}",
            )
        for name, numbers in (("mean", self.mean), ("deviation", self.deviation)):
            if len(numbers) not in (1, self.channels):
                raise ConfigError(
                    f"preprocessing.{name} has a number for each channel, or one for all",
                    expected=f"{self.channels} numbers or 1",
                    got=len(numbers),
                )
            if not all(map(math.isfinite, numbers)):
                raise ConfigError(f"preprocessing.{name} must be finite", got=numbers)
        check_positive("preprocessing.deviation", min(self.deviation))

    @property
    def resized(self) -> tuple[int, int]:
        """(height, width) before the crop; for "crop", what the resized picture covers.

        >>> Preprocessing(image_size=(224, 448), resize="crop").resized
        (256, 512)
        """
        height, width = pair(self.image_size)
        if self.resize == "squash":
            return height, width
        # Rounded down like timm and DeiT: 224 / 0.9 is 248.
        return math.floor(height / self.crop_share), math.floor(width / self.crop_share)

    @property
    def fit(self) -> tuple[int, int] | None:
        """(height, width) that a decoder must deliver at least for a JPEG decoded smaller to look the same.

        Twice what is needed leaves the filter its work; None where sampling depends on every stored pixel.

        >>> Preprocessing(image_size=224).fit
        (448, 448)
        """
        height, width = self.resized
        return (2 * height, 2 * width) if self.antialias else None

    def pixels(self, picture: Picture) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The picture's pixels, C × H × W, 0…255: whole numbers with antialias, float32 without.

        >>> Preprocessing(image_size=32).pixels(Image.new("RGB", (40, 30))).shape
        (3, 32, 32)
        """
        check_channels(picture, channels=self.channels)
        if self.antialias:
            return planes(self.framed(picture))
        left, top, right, bottom = _centre(self.resized, pair(self.image_size), self.crop_rounding)
        return sampled(planes(picture), self.resized)[:, top:bottom, left:right].copy()

    def framed(self, picture: Picture) -> Picture:
        """The picture at image_size, resized with antialias and cropped, still a picture."""
        target = pair(self.image_size)
        height, width = _sides(picture)
        resized = _covering((height, width), self.resized) if self.resize == "crop" else self.resized
        if resized != target and math.prod(resized) > _MOST_BEFORE_CROP:
            # A strip: only its middle is resized. The same but for the rounding of where that middle begins.
            left, top, right, bottom = _centre(resized, target, self.crop_rounding)
            down, across = height / resized[0], width / resized[1]
            box = (left * across, top * down, min(right * across, width), min(bottom * down, height))
            return crop_resize(picture, box=box, size=target, resampling=self.filter)
        whole = crop_resize(picture, box=(0, 0, width, height), size=resized, resampling=self.filter)
        return whole if resized == target else crop(whole, box=_centre(resized, target, self.crop_rounding))

    def normalise(self, pixels: UInt8[Tensor, "B C H W"] | Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """The batch as the model takes it: (pixels − 255 mean) / (255 deviation), in float32.

        >>> Preprocessing().normalise(torch.tensor([0, 255], dtype=torch.uint8).expand(1, 3, 1, 2))[0, 0]
        tensor([[-1.,  1.]])
        """
        if pixels.shape[1] != self.channels:
            raise InputError("the batch has other channels", expected=self.channels, got=pixels.shape[1])
        # Subtracted before scaling, because mid-grey lies near zero and a fused multiply-add would round it off at
        # the size of one; converted first, because arithmetic on mixed types is five times slower.
        shift, scale = (
            torch.tensor(numbers, dtype=torch.float64, device=pixels.device).mul_(255).float()[:, None, None]
            for numbers in (self.mean, self.deviation)
        )
        return pixels.to(torch.float32, copy=True).sub_(shift).div_(scale)

    def to_hub(self) -> dict[str, object]:
        """The content of a preprocessor_config.json, for Hugging Face's libraries and, under "vitkit", exact for us.

        >>> Preprocessing(image_size=384).to_hub()["size"]
        {'height': 384, 'width': 384}
        """
        height, width = pair(self.image_size)
        crops = self.resize != "squash"
        resized = dict(zip(("height", "width"), self.resized, strict=True))
        if self.resize == "crop":
            resized = {"shortest_edge": min(self.resized)}
        return {
            "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
            "do_resize": True,
            "size": resized,
            "resample": int(_RESAMPLING[self.filter]),
            "do_center_crop": crops,
            **({"crop_size": {"height": height, "width": width}, "crop_pct": self.crop_share} if crops else {}),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": np.broadcast_to(self.mean, self.channels).tolist(),
            "image_std": np.broadcast_to(self.deviation, self.channels).tolist(),
            "vitkit": to_mapping(self),
        }

    @classmethod
    def from_hub(cls, data: Mapping[str, object]) -> "Preprocessing":
        """The preprocessing in a preprocessor_config.json: ours exactly, or what Hugging Face's keys say.

        >>> Preprocessing.from_hub({"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}).resize
        'squash'
        """
        ours = data.get("vitkit")
        if not isinstance(ours, Mapping):
            try:
                return from_mapping(cls, image_processors.fields(data))
            except (ValueError, TypeError, ArithmeticError, ConfigError) as error:
                raise WeightsError(
                    f"preprocessor_config.json asks for what we cannot do: {error}",
                    hint="without that file the model is fed as the origin of its format does",
                ) from error
        found = from_mapping(cls, ours, where="vitkit.")
        for key, value in found.to_hub().items():
            if key != "vitkit" and data.get(key, value) != value:
                raise WeightsError(
                    f"preprocessor_config.json says two things: {key} is not what its vitkit section means",
                    expected=value,
                    got=data[key],
                    hint="change the vitkit section, or remove it",
                )
        return found


_PAPER = Preprocessing(antialias=False)
_IMAGENET_SQUASH = Preprocessing(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION)
_IMAGENET = replace(_IMAGENET_SQUASH, resize="crop", crop_share=0.875, filter="bicubic")

ORIGINS: dict[str, Preprocessing] = {
    "paper": _PAPER,
    "bit": _PAPER,
    "timm_augreg": Preprocessing(resize="crop", crop_share=0.9, filter="bicubic"),
    "deit": _IMAGENET,
    "mae": _IMAGENET,
    "dinov2": _IMAGENET,
    "dinov3": _IMAGENET_SQUASH,
    "torchvision": replace(_IMAGENET, filter="bilinear"),
    "huggingface": Preprocessing(),
    "huggingface_deit": replace(_IMAGENET, resize="squash_crop", crop_rounding="down"),
    "huggingface_mae": _IMAGENET_SQUASH,
    "huggingface_dinov2": replace(_IMAGENET, crop_rounding="down"),
}
"""What the weights of each origin were evaluated with, at 224 pixels; DINOv3's are its README's."""
_WHOLE_FROM = {"timm_augreg": 384, "mae": 225}
"""From this size on nothing is cut off: so timm configures every AugReg model of 384 pixels, and so MAE's code does."""


def preprocessing(origin: str, *, image_size: Size, channels: int = 3) -> Preprocessing:
    """The preprocessing that weights of an origin need, at another size and for other channels.

    Channels other than three have the mean of the origin's three.

    >>> preprocessing("timm_augreg", image_size=224).resized, preprocessing("timm_augreg", image_size=384).resized
    ((248, 248), (384, 384))
    """
    if origin not in ORIGINS:
        hint = did_you_mean(origin, ORIGINS) or f"known origins: {', '.join(ORIGINS)}"
        raise UnknownNameError(f"there is no preprocessing of {origin!r}", hint=hint)
    found = replace(ORIGINS[origin], image_size=image_size)
    if min(pair(image_size)) >= _WHOLE_FROM.get(origin, math.inf):
        found = replace(found, crop_share=1.0)
    if channels == 3:
        return found
    mean, deviation = sum(found.mean) / 3, sum(found.deviation) / 3
    return replace(found, channels=channels, mean=(mean,), deviation=(deviation,))


# Geometry


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
        return picture.resize((width, height), _RESAMPLING[resampling], box=box, reducing_gap=reducing_gap)
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
    batch = torch.from_numpy(pixels.astype(np.float32))[None]
    return interpolate(batch, size, mode="bilinear", align_corners=False)[0].numpy()


def check_channels(picture: Picture, *, channels: int) -> None:
    """Refuse a picture with other channels than the model's.

    >>> check_channels(Image.new("L", (4, 4)), channels=3)
    Traceback (most recent call last):
    vitkit.core.errors.InputError: the picture has other channels (expected 3, got 1)
    """
    found = len(picture.getbands()) if isinstance(picture, Image.Image) else picture.shape[2]
    if found != channels:
        raise InputError("the picture has other channels", expected=channels, got=found)


def _sides(picture: Picture) -> tuple[int, int]:
    """(height, width)."""
    if isinstance(picture, Image.Image):
        return picture.height, picture.width
    return picture.shape[0], picture.shape[1]


def _covering(sides: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a picture's sides scaled until they cover the target, rounded as timm and torchvision do."""
    height, width = sides
    if target[0] == target[1]:
        if height < width:
            return target[0], int(target[0] * width / height)
        return int(target[0] * height / width), target[0]
    ratio = min(height / target[0], width / target[1])
    return round(height / ratio), round(width / ratio)


def _centre(resized: tuple[int, int], size: tuple[int, int], rounding: Rounding) -> tuple[int, int, int, int]:
    """The box of a centre crop, rounded to even as timm and torchvision do, or down as transformers does."""
    half = round if rounding == "even" else math.floor
    top, left = (half((whole - part) / 2) for whole, part in zip(resized, size, strict=True))
    return left, top, left + size[1], top + size[0]
