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

from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import ConfigError, InputError, UnknownNameError, WeightsError, check_positive, did_you_mean
from vitkit.core.shapes import Float, Size, Tensor, pair
from vitkit.data import image_processors
from vitkit.data.geometry import (
    RESAMPLING,
    Filter,
    Rounding,
    averaged,
    centre,
    covering,
    crop,
    crop_resize,
    planes,
    sampled,
    sides_of,
)
from vitkit.data.image_processors import IMAGENET_DEVIATION, IMAGENET_MEAN
from vitkit.data.source import Picture

Resize = Literal["squash", "squash_crop", "crop"]

_MOST_BEFORE_CROP = 2**25
"""Pixels of a picture before its centre crop: without a limit, one of 1 × 60 000 would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How evaluation turns a picture into the model's input.

    `resize` is "squash" (to exactly image_size, as the paper's released code does), "crop" (the shorter side to
    image_size / crop_share rounded down, then the centre: DeiT, timm, torchvision) or "squash_crop" (both sides to
    image_size / crop_share, then the centre: the paper's few-shot probe). Without `antialias`, bilinear pixels are
    those of `tf.image.resize`: four neighbours however far the image shrinks, not rounded to integers. The filter
    "area" is that of big_vision, and rounds the longer side as it does. `crop_rounding` says where the middle of an
    odd border begins: at the even pixel, or "down" for Hugging Face's and big_vision's.
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

    def pixels(self, picture: Picture) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The picture's pixels, C × H × W, 0…255: whole numbers with antialias, float32 without.

        >>> Preprocessing(image_size=32).pixels(Image.new("RGB", (40, 30))).shape
        (3, 32, 32)
        """
        check_channels(picture, channels=self.channels)
        if self.antialias:
            return planes(self.framed(picture))
        left, top, right, bottom = centre(self.resized, pair(self.image_size), self.crop_rounding)
        return sampled(planes(picture), self.resized)[:, top:bottom, left:right].copy()

    def framed(self, picture: Picture) -> Picture:
        """The picture at image_size, resized with antialias and cropped, still a picture."""
        target = pair(self.image_size)
        height, width = sides_of(picture)
        resized = self.resized
        if self.resize == "crop":
            resized = covering((height, width), resized, rounded=self.filter == "area")
        if resized != target and math.prod(resized) > _MOST_BEFORE_CROP:
            # A strip: only its middle is resized. The same but for the rounding of where that middle begins.
            left, top, right, bottom = centre(resized, target, self.crop_rounding)
            down, across = height / resized[0], width / resized[1]
            box = (left * across, top * down, min(right * across, width), min(bottom * down, height))
            return crop_resize(picture, box=box, size=target, resampling=self.filter)
        if self.filter == "area":
            whole = averaged(picture, resized)
        else:
            whole = crop_resize(picture, box=(0, 0, width, height), size=resized, resampling=self.filter)
        return whole if resized == target else crop(whole, box=centre(resized, target, self.crop_rounding))

    def normalise(self, pixels: UInt8[Tensor, "B C H W"] | Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """The batch as the model takes it: (pixels − 255 mean) / (255 deviation), in float32.

        >>> Preprocessing().normalise(torch.tensor([0, 255], dtype=torch.uint8).expand(1, 3, 1, 2))[0, 0]
        tensor([[-1.,  1.]])
        """
        if pixels.shape[1] != self.channels:
            raise InputError("the batch has other channels", expected=self.channels, got=pixels.shape[1])
        # Subtracted before scaling, because mid-grey lies near zero and a fused multiply-add would round it off at
        # the size of one; converted first, because arithmetic on mixed types is five times slower.
        shift, scale = self._shift_and_scale(pixels.device)
        return pixels.to(torch.float32, copy=True).sub_(shift).div_(scale)

    def pixels_of(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """The pixels, 0…255, of a batch as the model takes it: what `normalise` made it from, up to rounding.

        >>> how, pixels = Preprocessing(), torch.tensor([0.0, 100.0]).expand(1, 3, 1, 2)
        >>> how.pixels_of(how.normalise(pixels))[0, 0]
        tensor([[  0., 100.]])
        """
        shift, scale = self._shift_and_scale(images.device)
        return images.float() * scale + shift

    def _shift_and_scale(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shift, scale = (
            torch.tensor([[[255 * share]] for share in shares], dtype=torch.float32, device=device)
            for shares in (self.mean, self.deviation)
        )
        return shift, scale

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
            "resample": int(RESAMPLING[self.filter]),
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
    "big_vision": Preprocessing(resize="crop", crop_share=0.875, filter="area", crop_rounding="down"),
    "timm_augreg": Preprocessing(resize="crop", crop_share=0.9, filter="bicubic"),
    "deit": _IMAGENET,
    "mae": _IMAGENET,
    "dinov2": _IMAGENET,
    "dinov3": _IMAGENET_SQUASH,
    "dinov3_satellite": Preprocessing(mean=(0.430, 0.411, 0.296), deviation=(0.213, 0.156, 0.143)),
    "torchvision": replace(_IMAGENET, filter="bilinear"),
    "huggingface": Preprocessing(),
    "huggingface_deit": replace(_IMAGENET, resize="squash_crop", crop_rounding="down"),
    "huggingface_mae": _IMAGENET_SQUASH,
    "huggingface_dinov2": replace(_IMAGENET, crop_rounding="down"),
}
"""What the weights of each origin were evaluated with, at 224 pixels; DINOv3's are its README's."""
_AT_SIZES: dict[str, tuple[int, dict[str, object]]] = {
    "timm_augreg": (384, {"crop_share": 1.0}),
    "mae": (225, {"crop_share": 1.0}),
    "torchvision": (384, {"crop_share": 1.0, "filter": "bicubic"}),
    "big_vision": (384, {"crop_share": 384 / 448}),
}
"""What changes from a size on: with timm's AugReg, MAE's code, torchvision's SWAG and big_vision's transfers."""


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
    least, otherwise = _AT_SIZES.get(origin, (math.inf, {}))
    if min(pair(image_size)) >= least:
        found = from_mapping(Preprocessing, to_mapping(found) | otherwise)
    if channels == 3:
        return found
    mean, deviation = sum(found.mean) / 3, sum(found.deviation) / 3
    return replace(found, channels=channels, mean=(mean,), deviation=(deviation,))


def check_channels(picture: Picture, *, channels: int) -> None:
    """Refuse a picture with other channels than the model's.

    >>> check_channels(Image.new("L", (4, 4)), channels=3)
    Traceback (most recent call last):
    vitkit.core.errors.InputError: the picture has other channels (expected 3, got 1)
    """
    found = len(picture.getbands()) if isinstance(picture, Image.Image) else picture.shape[2]
    if found != channels:
        raise InputError("the picture has other channels", expected=channels, got=found)
