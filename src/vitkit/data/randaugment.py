"""A picture goes in, the picture after a few operations drawn from RandAugment's sixteen comes out.

Set and scale are those of Google's code, which AugReg's (2, 15) and the like refer to: each of `layers` operations
is drawn evenly, all have the same magnitude, and none has a probability of its own. Magnitudes run from 0 to 30,
although the tables below are scaled to 10:

| operation | argument at magnitude M | does nothing at |
|---|---|---|
| AutoContrast, Equalize, Invert | none | never |
| Rotate | ± 3 M degrees | 0 |
| ShearX, ShearY | ± 0.03 M | 0 |
| TranslateX, TranslateY | ± 10 M pixels of 224 | 0 |
| Cutout | a grey square of half-side 4 M pixels of 224 | 0 |
| Color, Contrast, Brightness, Sharpness | factor 0.1 + 0.18 M | 5 |
| Posterize | keeps 0.4 M bits, rounded down, at least 1 | 20 and more |
| Solarize | inverts from 25.6 M, rounded down | 10 and more |
| SolarizeAdd | adds 11 M to what is below 128 | 0 |

Magnitude 0 is therefore not the identity (it inverts, and fades nearly to grey), and a larger magnitude is not in
every operation a larger change. Google's distances are in pixels of its 224; here they grow with the picture.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vitkit.core.errors import ConfigError

Operation = Callable[[Image.Image, int, np.random.Generator], Image.Image]

MOST = 30
"""The largest magnitude."""
_GREY = 128
_SIDE = 224


def randaugment(picture: Image.Image, *, layers: int, magnitude: int, rng: np.random.Generator) -> Image.Image:
    """The picture, of mode L or RGB, after `layers` operations drawn from all.

    >>> picture = Image.new("RGB", (32, 24), (200, 100, 50))
    >>> randaugment(picture, layers=2, magnitude=15, rng=np.random.default_rng(0)).size
    (32, 24)
    """
    check_magnitude(magnitude)
    operations = list(OPERATIONS.values())
    for choice in rng.integers(len(operations), size=layers).tolist():
        picture = operations[choice](picture, magnitude, rng)
    return picture


def check_magnitude(magnitude: int) -> None:
    """Refuse a magnitude that is not on the scale.

    >>> check_magnitude(31)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: the magnitude of RandAugment is not on its scale (expected 0…30, got 31)
    """
    if not 0 <= magnitude <= MOST:
        raise ConfigError("the magnitude of RandAugment is not on its scale", expected=f"0…{MOST}", got=magnitude)


def _signed(number: float, rng: np.random.Generator) -> float:
    """The number or its negative, evenly."""
    return number if rng.random() < 0.5 else -number


def _moved(picture: Image.Image, matrix: tuple[float, float, float, float, float, float]) -> Image.Image:
    """The picture read through the matrix (to nearest pixels, as Google's), grey where there is nothing to read."""
    grey = (_GREY,) * len(picture.getbands())
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=grey)


def _auto_contrast(picture: Image.Image, _: int, __: np.random.Generator) -> Image.Image:
    return ImageOps.autocontrast(picture)


def _equalize(picture: Image.Image, _: int, __: np.random.Generator) -> Image.Image:
    return ImageOps.equalize(picture)


def _invert(picture: Image.Image, _: int, __: np.random.Generator) -> Image.Image:
    return ImageOps.invert(picture)


def _rotate(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    grey = (_GREY,) * len(picture.getbands())
    return picture.rotate(_signed(3.0 * magnitude, rng), Image.Resampling.NEAREST, fillcolor=grey)


def _shear_x(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    return _moved(picture, (1.0, _signed(0.03 * magnitude, rng), 0.0, 0.0, 1.0, 0.0))


def _shear_y(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    return _moved(picture, (1.0, 0.0, 0.0, _signed(0.03 * magnitude, rng), 1.0, 0.0))


def _translate_x(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    return _moved(picture, (1.0, 0.0, _signed(10.0 * magnitude * picture.width / _SIDE, rng), 0.0, 1.0, 0.0))


def _translate_y(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    return _moved(picture, (1.0, 0.0, 0.0, 0.0, 1.0, _signed(10.0 * magnitude * picture.height / _SIDE, rng)))


def _cutout(picture: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    half = int(4 * magnitude * min(picture.size) / _SIDE)
    across, down = int(rng.integers(picture.width)), int(rng.integers(picture.height))
    if half == 0:
        return picture
    cut = picture.copy()
    box = (across - half, down - half, across + half - 1, down + half - 1)
    ImageDraw.Draw(cut).rectangle(box, fill=(_GREY,) * len(picture.getbands()))
    return cut


def _factor(magnitude: int) -> float:
    return magnitude / 10 * 1.8 + 0.1


def _color(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    return ImageEnhance.Color(picture).enhance(_factor(magnitude))


def _contrast(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    return ImageEnhance.Contrast(picture).enhance(_factor(magnitude))


def _brightness(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(picture).enhance(_factor(magnitude))


def _sharpness(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    return ImageEnhance.Sharpness(picture).enhance(_factor(magnitude))


def _posterize(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    # TensorFlow shifts by at most seven bits, so that one always remains, and not by fewer than none.
    return ImageOps.posterize(picture, min(max(4 * magnitude // 10, 1), 8))


def _solarize(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(picture, int(25.6 * magnitude))


def _solarize_add(picture: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    table = [min(level + 11 * magnitude, 255) if level < 128 else level for level in range(256)]
    return picture.point(table * len(picture.getbands()))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": _brightness,
    "Sharpness": _sharpness,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}
"""The sixteen operations by Google's names, in Google's order."""
