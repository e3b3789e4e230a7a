"""A picture and random numbers go in, the pixels of one training example come out.

    picture ─ crop and resize ─ flip ─ colour jitter ─ RandAugment ─→ C × H × W ─ erasing ─→ pixels

All that is random comes from the generator that is passed in. Mixup and cutmix need a batch, and are in `mixing`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from vitkit.core.errors import ConfigError, UnknownNameError, check_not_negative, did_you_mean
from vitkit.core.shapes import pair
from vitkit.data.geometry import crop, crop_resize, flip, planes, sampled
from vitkit.data.randaugment import check_magnitude, randaugment
from vitkit.data.source import Picture
from vitkit.data.transforms import Preprocessing, check_channels

_CROP_ATTEMPTS = 100  # TensorFlow's default, which the released code leaves as it is
_ERASING_ATTEMPTS = 10
_ERASED_AREA = (0.02, 0.33)
_ERASED_ASPECT = (0.3, 3.3)
_REDUCING_GAP = 2.0


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """What training does to a picture; the defaults are the paper's.

    `crop` is "inception" (a random part: `crop_area` of the area, width to height within `crop_aspect`), "pad" (the
    whole, squashed, and moved by up to `pad` pixels over black: the usual for CIFAR) or "none" (as in evaluation).
    `colour_jitter` is how far brightness, contrast and saturation each go from 1; `erasing` is a probability;
    `mixup` and `cutmix` are the α of their Beta(α, α), and where both are set each batch has one of them.
    """

    crop: Literal["inception", "pad", "none"] = "inception"
    crop_area: tuple[float, float] = (0.05, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    colour_jitter: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        least, most = self.crop_area
        if not 0.0 < least <= most <= 1.0:
            raise ConfigError("augment.crop_area is not a range of shares", expected="0 < a ≤ b ≤ 1", got=[least, most])
        narrow, wide = self.crop_aspect
        if not 0.0 < narrow <= wide < math.inf:
            raise ConfigError("augment.crop_aspect is not a range", expected="0 < a ≤ b", got=[narrow, wide])
        check_magnitude(self.randaugment_magnitude)
        for name in ("pad", "randaugment_layers", "colour_jitter", "erasing", "mixup", "cutmix"):
            check_not_negative(f"augment.{name}", getattr(self, name))
        if self.erasing > 1:
            raise ConfigError("augment.erasing is not a probability", expected="0…1", got=self.erasing)


def check_augment(augment: AugmentConfig, *, channels: int) -> None:
    """Refuse operations on colours where there are other than one or three channels.

    >>> check_augment(AugmentConfig(colour_jitter=0.4), channels=4)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: colour_jitter works on grey or RGB images alone (expected 1 or 3 channels, got 4)
    """
    if channels in (1, 3):
        return
    for name in ("colour_jitter", "randaugment_layers"):
        if getattr(augment, name) > 0:
            raise ConfigError(
                f"{name} works on grey or RGB images alone",
                expected="1 or 3 channels",
                got=channels,
                hint=f"set {name} to 0; crops, flips, erasing, mixup and cutmix take any channels",
            )


_MIXUP_AND_RANDAUGMENT: dict[str, tuple[float, tuple[int, int]]] = {
    "none": (0.0, (0, 0)),
    "light1": (0.0, (2, 0)),
    "light2": (0.2, (2, 10)),
    "medium1": (0.2, (2, 15)),
    "medium2": (0.5, (2, 15)),
    "strong1": (0.5, (2, 20)),
    "strong2": (0.8, (2, 20)),
}


def augreg(level: str) -> AugmentConfig:
    """One of the seven levels of "How to train your ViT?": mixup and RandAugment on the paper's crop and flip.

    >>> augreg("medium1").mixup, augreg("medium1").randaugment_magnitude
    (0.2, 15)
    """
    if level not in _MIXUP_AND_RANDAUGMENT:
        hint = did_you_mean(level, _MIXUP_AND_RANDAUGMENT) or f"known levels: {', '.join(_MIXUP_AND_RANDAUGMENT)}"
        raise UnknownNameError(f"AugReg has no level {level!r}", hint=hint)
    mixup, (layers, magnitude) = _MIXUP_AND_RANDAUGMENT[level]
    return AugmentConfig(mixup=mixup, randaugment_layers=layers, randaugment_magnitude=magnitude)


def train_pixels(
    picture: Picture, *, preprocessing: Preprocessing, augment: AugmentConfig, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """One training example of the picture, C × H × W.

    >>> picture = Image.new("RGB", (50, 40))
    >>> rng = np.random.default_rng((0, 1, 2))
    >>> train_pixels(picture, preprocessing=Preprocessing(image_size=32), augment=AugmentConfig(), rng=rng).shape
    (3, 32, 32)
    """
    check_channels(picture, channels=preprocessing.channels)
    picture = _framed(picture, preprocessing, augment, rng)
    if augment.flip and rng.random() < 0.5:
        picture = flip(picture)
    if isinstance(picture, Image.Image):
        if augment.colour_jitter > 0:
            picture = _jittered(picture, augment.colour_jitter, rng)
        if augment.randaugment_layers > 0:
            layers, magnitude = augment.randaugment_layers, augment.randaugment_magnitude
            picture = randaugment(picture, layers=layers, magnitude=magnitude, rng=rng)
    else:
        check_augment(augment, channels=preprocessing.channels)
    pixels = planes(picture)
    if augment.erasing > 0 and rng.random() < augment.erasing:
        _erase(pixels, rng)
    return pixels


def inception_crop(
    sides: tuple[int, int], *, area: tuple[float, float], aspect: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """The box (left, top, right, bottom) of a random part of a picture with the sides (height, width).

    Drawn as TensorFlow's `sample_distorted_bounding_box` does, which the released code calls: an even aspect (width
    to height), then an even height among those that keep the area in its range and the box in the picture, then
    an even place. After 100 draws that fit nowhere (a strip has no part of such a shape) it is the whole picture.

    >>> inception_crop((10, 500), area=(0.5, 1.0), aspect=(0.75, 1.25), rng=np.random.default_rng(0))
    (0, 0, 500, 10)
    """
    whole_height, whole_width = sides
    least, most = (share * whole_height * whole_width for share in area)
    for _ in range(_CROP_ATTEMPTS):
        ratio = aspect[0] + (aspect[1] - aspect[0]) * rng.random()
        widest = whole_width + 0.4999999  # which still rounds to the whole width
        highest = min(round(math.sqrt(most / ratio)), int(widest / ratio), whole_height)
        lowest = min(round(math.sqrt(least / ratio)), highest)
        height = lowest + int(rng.random() * (highest - lowest + 1))
        width = round(height * ratio)
        # Rounding may have left the range by a row.
        if height * width < least:
            height += 1
        elif height * width > most:
            height -= 1
        width = round(height * ratio)
        if 0 < height <= whole_height and 0 < width <= whole_width and least <= height * width <= most:
            left = int(rng.random() * (whole_width - width + 1))
            top = int(rng.random() * (whole_height - height + 1))
            return left, top, left + width, top + height
    return 0, 0, whole_width, whole_height


def _framed(
    picture: Picture, preprocessing: Preprocessing, augment: AugmentConfig, rng: np.random.Generator
) -> Picture:
    """The part of the picture that this example shows, at image_size."""
    if augment.crop == "none":
        return preprocessing.framed(picture) if preprocessing.antialias else _picture(preprocessing.pixels(picture))
    sides = (picture.height, picture.width) if isinstance(picture, Image.Image) else picture.shape[:2]
    if augment.crop == "inception":
        box = inception_crop(sides, area=augment.crop_area, aspect=augment.crop_aspect, rng=rng)
        return _part(picture, box, preprocessing)
    height, width = pair(preprocessing.image_size)
    across, down = (int(rng.random() * (2 * augment.pad + 1)) - augment.pad for _ in range(2))
    whole = _part(picture, (0, 0, sides[1], sides[0]), preprocessing)
    return crop(whole, box=(across, down, across + width, down + height))


def _part(picture: Picture, box: tuple[int, int, int, int], preprocessing: Preprocessing) -> Picture:
    """The part of the picture in the box, at image_size."""
    size = pair(preprocessing.image_size)
    if preprocessing.antialias:
        return crop_resize(picture, box=box, size=size, resampling=preprocessing.filter, reducing_gap=_REDUCING_GAP)
    return _picture(sampled(planes(crop(picture, box=box)), size))


def _picture(pixels: NDArray[np.uint8] | NDArray[np.float32]) -> Picture:
    """C × H × W pixels as a picture, rounded."""
    array = np.ascontiguousarray(np.moveaxis(np.rint(pixels).astype(np.uint8), 0, 2))
    match array.shape[2]:
        case 1:
            return Image.fromarray(array[:, :, 0])
        case 3:
            return Image.fromarray(array)
        case _:
            return array


def _jittered(picture: Image.Image, jitter: float, rng: np.random.Generator) -> Image.Image:
    """The picture with brightness, contrast and saturation each times 1 ± jitter, in random order."""
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    factors = rng.uniform(max(0.0, 1.0 - jitter), 1.0 + jitter, size=3).tolist()
    for choice in rng.permutation(3).tolist():
        picture = enhancers[choice](picture).enhance(factors[choice])
    return picture


def _erase(pixels: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Put noise in place of a box of 2–33 % of the area, in the array itself; nothing where ten boxes do not fit."""
    channels, whole_height, whole_width = pixels.shape
    for _ in range(_ERASING_ATTEMPTS):
        area = rng.uniform(*_ERASED_AREA) * whole_height * whole_width
        aspect = math.exp(rng.uniform(math.log(_ERASED_ASPECT[0]), math.log(_ERASED_ASPECT[1])))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < height < whole_height and 0 < width < whole_width:
            top = int(rng.integers(whole_height - height + 1))
            left = int(rng.integers(whole_width - width + 1))
            noise = rng.integers(0, 256, size=(channels, height, width), dtype=np.uint8)
            pixels[:, top : top + height, left : left + width] = noise
            return
