"""Configurations of augmentation and of built-in datasets. Importing this module does not import torch."""

import math
from dataclasses import dataclass
from typing import Literal

from vitkit.core.errors import ConfigError, UnknownNameError, check_not_negative, did_you_mean

MAX_MAGNITUDE = 30
"""Largest magnitude of RandAugment."""
MAX_FRACTALS = 200_000_000
"""Largest number of generated images; labels take 8 bytes per image."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images. The defaults are the paper's.

    Args:
        crop: "inception" is a random part with `crop_area` of the area and an aspect ratio within `crop_aspect`. "pad"
            is the whole image, squashed and shifted by up to `pad` pixels over black, as usual for CIFAR. "none" is the
            crop of evaluation.
        crop_area: Range of the area of a crop, as a fraction of the image.
        crop_aspect: Range of width / height of a crop.
        pad: Largest shift in pixels.
        flip: Flip half of the images horizontally.
        randaugment_layers: Number of RandAugment operations per image.
        randaugment_magnitude: Their magnitude, 0 to 30.
        color_jitter: Largest change of brightness, contrast and saturation, each a factor around 1.
        erasing: Probability of random erasing.
        mixup: α of Beta(α, α).
        cutmix: α of Beta(α, α). If both are set, each batch gets one of them.
    """

    crop: Literal["inception", "pad", "none"] = "inception"
    crop_area: tuple[float, float] = (0.05, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    color_jitter: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        smallest, largest = self.crop_area
        if not 0.0 < smallest <= largest <= 1.0:
            raise ConfigError(
                "augment.crop_area is not a range of fractions", expected="0 < a ≤ b ≤ 1", got=[smallest, largest]
            )
        narrow, wide = self.crop_aspect
        if not 0.0 < narrow <= wide < math.inf:
            raise ConfigError("augment.crop_aspect is not a range", expected="0 < a ≤ b", got=[narrow, wide])
        check_magnitude(self.randaugment_magnitude)
        for name in ("pad", "randaugment_layers", "color_jitter", "erasing", "mixup", "cutmix"):
            check_not_negative(f"augment.{name}", getattr(self, name))
        if self.erasing > 1:
            raise ConfigError("augment.erasing is not a probability", expected="0…1", got=self.erasing)


def check_magnitude(magnitude: int) -> None:
    """Raise ConfigError if a magnitude of RandAugment is out of range."""
    if not 0 <= magnitude <= MAX_MAGNITUDE:
        raise ConfigError("RandAugment's magnitude is out of range", expected=f"0…{MAX_MAGNITUDE}", got=magnitude)


def check_augment(augment: AugmentConfig, *, channels: int) -> None:
    """Raise ConfigError for color operations on images with other than one or three channels."""
    if channels in (1, 3):
        return
    for name in ("color_jitter", "randaugment_layers"):
        if getattr(augment, name) > 0:
            hint = f"set {name} to 0; crops, flips, erasing, mixup and cutmix take any number of channels"
            message = f"{name} is only for gray or RGB images"
            raise ConfigError(message, expected="1 or 3 channels", got=channels, hint=hint)


AUGREG_LEVELS: dict[str, tuple[float, tuple[int, int]]] = {
    "none": (0.0, (0, 0)),
    "light1": (0.0, (2, 0)),
    "light2": (0.2, (2, 10)),
    "medium1": (0.2, (2, 15)),
    "medium2": (0.5, (2, 15)),
    "strong1": (0.5, (2, 20)),
    "strong2": (0.8, (2, 20)),
}
"""Mixup, and layers and magnitude of RandAugment, of each level of AugReg."""


def augreg_config(level: str) -> AugmentConfig:
    """Return one of the seven levels of "How to train your ViT?": mixup and RandAugment with the paper's crop and flip.

    >>> augreg_config("medium1").mixup, augreg_config("medium1").randaugment_magnitude
    (0.2, 15)
    """
    if level not in AUGREG_LEVELS:
        hint = did_you_mean(level, AUGREG_LEVELS) or f"known levels: {', '.join(AUGREG_LEVELS)}"
        raise UnknownNameError(f"AugReg has no level {level!r}", hint=hint)
    mixup, (layers, magnitude) = AUGREG_LEVELS[level]
    return AugmentConfig(mixup=mixup, randaugment_layers=layers, randaugment_magnitude=magnitude)


@dataclass(frozen=True, kw_only=True)
class FractalConfig:
    """Number and appearance of generated fractals. `size` is the side in pixels; `per_class` counts training images.

    The validation split has a twentieth of that, at least one image per class.
    """

    num_classes: int = 1000
    per_class: int = 1000
    size: int = 64
    color: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "num_classes": (2, 10_000_000),
            "per_class": (1, MAX_FRACTALS),
            "size": (8, 2048),
            "seed": (0, 2**32 - 1),  # one word of the seed sequence
        }
        for name, (smallest, largest) in ranges.items():
            if not smallest <= getattr(self, name) <= largest:
                message = f"fractals.{name} is out of range"
                raise ConfigError(message, expected=f"{smallest} to {largest}", got=getattr(self, name))
        if self.num_classes * self.per_class > MAX_FRACTALS:
            raise ConfigError(
                "too many fractals: their labels would not fit into memory",
                expected=f"num_classes × per_class ≤ {MAX_FRACTALS:,}",
                got=f"{self.num_classes:,} × {self.per_class:,}",
                hint="lower fractals.per_class; augmentation makes more of each image",
            )

    @property
    def per_class_val(self) -> int:
        """Number of validation images per class."""
        return max(1, self.per_class // 20)
