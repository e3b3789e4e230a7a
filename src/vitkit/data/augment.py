"""Augmentation of images, and mixup and cutmix of batches.

    image ─ crop and resize ─ flip ─ color jitter ─ RandAugment ─→ C × H × W ─ erasing ─→ pixels ─ (batch) ─ mixup

All random numbers come from the generator that is passed in.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vitkit.core.errors import DataError, check_fraction
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import pair
from vitkit.data.config import AugmentConfig, check_augment, check_magnitude
from vitkit.data.dataset import DecodedImage
from vitkit.data.preprocessing import (
    Preprocessing,
    check_channels,
    crop,
    crop_resize,
    flip_horizontal,
    get_size,
    resize_bilinear,
    to_chw,
)

_CROP_ATTEMPTS = 100  # TensorFlow's default, which the released code uses
_ERASING_ATTEMPTS = 10
_ERASED_AREA = (0.02, 0.33)
_ERASED_ASPECT = (0.3, 3.3)
_REDUCING_GAP = 2.0


def augment_image(
    image: DecodedImage, *, preprocessing: Preprocessing, augment: AugmentConfig, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return the pixels, C × H × W, of one randomly augmented training example.

    >>> image = Image.new("RGB", (50, 40))
    >>> rng = np.random.default_rng((0, 1, 2))
    >>> augment_image(image, preprocessing=Preprocessing(image_size=32), augment=AugmentConfig(), rng=rng).shape
    (3, 32, 32)
    """
    check_channels(image, channels=preprocessing.channels)
    image = _random_crop(image, preprocessing, augment, rng)
    if augment.flip and rng.random() < 0.5:
        image = flip_horizontal(image)
    if isinstance(image, Image.Image):
        if augment.color_jitter > 0:
            image = _jitter_colors(image, augment.color_jitter, rng)
        if augment.randaugment_layers > 0:
            layers, magnitude = augment.randaugment_layers, augment.randaugment_magnitude
            image = randaugment(image, layers=layers, magnitude=magnitude, rng=rng)
    else:
        check_augment(augment, channels=preprocessing.channels)
    pixels = to_chw(image)
    if augment.erasing > 0 and rng.random() < augment.erasing:
        _erase(pixels, rng)
    return pixels


def inception_crop(
    size: tuple[int, int], *, area: tuple[float, float], aspect: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw the box (left, top, right, bottom) of a random crop of an image of size (height, width).

    Equal to TensorFlow's `sample_distorted_bounding_box`, which the released code calls: a uniform aspect (width /
    height), a uniform height among those that keep the area in its range and the box in the image, and a uniform
    position. After 100 draws that do not fit, as for a strip, it is the whole image.
    """
    image_height, image_width = size
    min_area, max_area = (fraction * image_height * image_width for fraction in area)
    for _ in range(_CROP_ATTEMPTS):
        ratio = aspect[0] + (aspect[1] - aspect[0]) * rng.random()
        max_width = image_width + 0.4999999  # still rounds to the image width
        max_height = min(round(math.sqrt(max_area / ratio)), int(max_width / ratio), image_height)
        min_height = min(round(math.sqrt(min_area / ratio)), max_height)
        height = min_height + int(rng.random() * (max_height - min_height + 1))
        width = round(height * ratio)
        # Rounding may have left the range by a row.
        if height * width < min_area:
            height += 1
        elif height * width > max_area:
            height -= 1
        width = round(height * ratio)
        if 0 < height <= image_height and 0 < width <= image_width and min_area <= height * width <= max_area:
            left = int(rng.random() * (image_width - width + 1))
            top = int(rng.random() * (image_height - height + 1))
            return left, top, left + width, top + height
    return 0, 0, image_width, image_height


def _random_crop(
    image: DecodedImage, preprocessing: Preprocessing, augment: AugmentConfig, rng: np.random.Generator
) -> DecodedImage:
    """Crop as configured, and resize to image_size."""
    if augment.crop == "none":
        is_image = preprocessing.antialias
        return preprocessing.resize_and_crop(image) if is_image else _from_chw(preprocessing.to_pixels(image))
    size = get_size(image)
    if augment.crop == "inception":
        box = inception_crop(size, area=augment.crop_area, aspect=augment.crop_aspect, rng=rng)
        return _crop_resize(image, box, preprocessing)
    height, width = pair(preprocessing.image_size)
    left, top = (int(rng.random() * (2 * augment.pad + 1)) - augment.pad for _ in range(2))
    squashed = _crop_resize(image, (0, 0, size[1], size[0]), preprocessing)
    return crop(squashed, box=(left, top, left + width, top + height))


def _crop_resize(image: DecodedImage, box: tuple[int, int, int, int], preprocessing: Preprocessing) -> DecodedImage:
    size, interpolation = pair(preprocessing.image_size), preprocessing.interpolation
    if preprocessing.antialias:
        return crop_resize(image, box=box, size=size, interpolation=interpolation, reducing_gap=_REDUCING_GAP)
    return _from_chw(resize_bilinear(to_chw(crop(image, box=box)), size))


def _from_chw(pixels: NDArray[np.uint8] | NDArray[np.float32]) -> DecodedImage:
    """Return C × H × W pixels as an image, rounded."""
    array = np.ascontiguousarray(np.moveaxis(np.rint(pixels).astype(np.uint8), 0, 2))
    channels = array.shape[2]
    return Image.fromarray(array[:, :, 0] if channels == 1 else array) if channels in (1, 3) else array


def _jitter_colors(image: Image.Image, jitter: float, rng: np.random.Generator) -> Image.Image:
    """Multiply brightness, contrast and saturation by 1 ± jitter, in random order."""
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    factors = rng.uniform(max(0.0, 1.0 - jitter), 1.0 + jitter, size=3).tolist()
    for choice in rng.permutation(3).tolist():
        image = enhancers[choice](image).enhance(factors[choice])
    return image


def _erase(pixels: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Replace a box of 2–33 % of the area by noise, in place; do nothing if ten boxes do not fit."""
    channels, image_height, image_width = pixels.shape
    for _ in range(_ERASING_ATTEMPTS):
        area = rng.uniform(*_ERASED_AREA) * image_height * image_width
        aspect = math.exp(rng.uniform(math.log(_ERASED_ASPECT[0]), math.log(_ERASED_ASPECT[1])))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < height < image_height and 0 < width < image_width:
            top = int(rng.integers(image_height - height + 1))
            left = int(rng.integers(image_width - width + 1))
            noise = rng.integers(0, 256, size=(channels, height, width), dtype=np.uint8)
            pixels[:, top : top + height, left : left + width] = noise
            return


Operation = Callable[[Image.Image, int, np.random.Generator], Image.Image]
_GRAY = 128
_REFERENCE_SIZE = 224


def randaugment(image: Image.Image, *, layers: int, magnitude: int, rng: np.random.Generator) -> Image.Image:
    """Apply `layers` random operations to an image of mode L or RGB.

    Operations and scale are those of Google's code, to which AugReg's (2, 15) and others refer: each operation is drawn
    uniformly, all have the same magnitude, and none has a probability of its own. Magnitudes are 0 to 30, although the
    formulas are scaled to 10:

    | operation | argument at magnitude M | identity at |
    |---|---|---|
    | AutoContrast, Equalize, Invert | none | never |
    | Rotate | ± 3 M degrees | 0 |
    | ShearX, ShearY | ± 0.03 M | 0 |
    | TranslateX, TranslateY | ± 10 M pixels of 224 | 0 |
    | Cutout | a gray square of half-side 4 M pixels of 224 | 0 |
    | Color, Contrast, Brightness, Sharpness | factor 0.1 + 0.18 M | 5 |
    | Posterize | keeps floor(0.4 M) bits, at least 1 | 20 and more |
    | Solarize | inverts from floor(25.6 M) | 10 and more |
    | SolarizeAdd | adds 11 M to values below 128 | 0 |

    Magnitude 0 is therefore not the identity, and a larger magnitude is not a larger change in every operation.
    Google's distances are pixels of 224; here they scale with the image.
    """
    check_magnitude(magnitude)
    operations = list(OPERATIONS.values())
    for choice in rng.integers(len(operations), size=layers).tolist():
        image = operations[choice](image, magnitude, rng)
    return image


def _random_sign(number: float, rng: np.random.Generator) -> float:
    return number if rng.random() < 0.5 else -number


def _rotate(image: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    gray = (_GRAY,) * len(image.getbands())
    return image.rotate(_random_sign(3.0 * magnitude, rng), Image.Resampling.NEAREST, fillcolor=gray)


def _transform(position: int, argument: Callable[[Image.Image, int], float]) -> Operation:
    """Create an affine operation whose matrix differs from the identity at one position by ± the argument.

    Pixels are nearest ones, as in Google's code, and gray outside of the image.
    """

    def apply(image: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
        matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        matrix[position] = _random_sign(argument(image, magnitude), rng)
        gray = (_GRAY,) * len(image.getbands())
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=gray)

    return apply


def _cutout(image: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    half = int(4 * magnitude * min(image.size) / _REFERENCE_SIZE)
    x, y = int(rng.integers(image.width)), int(rng.integers(image.height))
    if half == 0:
        return image
    cut = image.copy()
    box = (x - half, y - half, x + half - 1, y + half - 1)
    ImageDraw.Draw(cut).rectangle(box, fill=(_GRAY,) * len(image.getbands()))
    return cut


def _solarize_add(image: Image.Image, magnitude: int, _: np.random.Generator) -> Image.Image:
    table = [min(level + 11 * magnitude, 255) if level < 128 else level for level in range(256)]
    return image.point(table * len(image.getbands()))


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, magnitude, _: enhancer(image).enhance(magnitude / 10 * 1.8 + 0.1)


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, _, __: ImageOps.autocontrast(image),
    "Equalize": lambda image, _, __: ImageOps.equalize(image),
    "Invert": lambda image, _, __: ImageOps.invert(image),
    "Rotate": _rotate,
    # TensorFlow shifts by 0 to 7 bits, so that one bit always remains.
    "Posterize": lambda image, magnitude, _: ImageOps.posterize(image, min(max(4 * magnitude // 10, 1), 8)),
    "Solarize": lambda image, magnitude, _: ImageOps.solarize(image, int(25.6 * magnitude)),
    "Color": _enhance(ImageEnhance.Color),
    "Contrast": _enhance(ImageEnhance.Contrast),
    "Brightness": _enhance(ImageEnhance.Brightness),
    "Sharpness": _enhance(ImageEnhance.Sharpness),
    "ShearX": _transform(1, lambda _, magnitude: 0.03 * magnitude),
    "ShearY": _transform(3, lambda _, magnitude: 0.03 * magnitude),
    "TranslateX": _transform(2, lambda image, magnitude: 10.0 * magnitude * image.width / _REFERENCE_SIZE),
    "TranslateY": _transform(5, lambda image, magnitude: 10.0 * magnitude * image.height / _REFERENCE_SIZE),
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}
"""Operations by Google's names, in Google's order."""


def one_hot(labels: Int[Tensor, " B"], *, num_classes: int, smoothing: int | float = 0.0) -> Float[Tensor, "B Y"]:
    """Return the target distribution of each label; `smoothing` is the mass spread evenly over all classes.

    >>> one_hot(torch.tensor([1]), num_classes=4, smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    check_fraction("label smoothing", smoothing)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            "a label is out of range", expected=f"0…{num_classes - 1}", got=f"{int(labels.min())}…{int(labels.max())}"
        )
    targets = torch.full((len(labels), num_classes), smoothing / num_classes, device=labels.device)
    return targets.scatter_(1, labels[:, None].long(), 1.0 - smoothing + smoothing / num_classes)


def mix_batch(
    images: Float[Tensor, "B C H W"],
    targets: Float[Tensor, "B Y"],
    *,
    mixup: int | float = 0.0,
    cutmix: int | float = 0.0,
    rng: np.random.Generator,
) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B Y"]]:
    """Mix the batch with itself in reverse order, by mixup, cutmix, or a random one of them; 0 disables.

    Both arguments are the α of Beta(α, α), from which one weight is drawn for the batch.

    >>> images, targets = torch.eye(2)[:, None, None], torch.eye(2)
    >>> mixed_images, mixed_targets = mix_batch(images, targets, mixup=0.2, rng=np.random.default_rng(0))
    >>> torch.equal(mixed_images[:, 0, 0], mixed_targets)
    True
    """
    if mixup > 0 and (cutmix <= 0 or rng.random() < 0.5):
        weight = float(rng.beta(mixup, mixup))
        # Each pair of images occurs in both orders, so taking the larger weight does not change the distribution. An
        # image's own label stays the most probable one, by which the training accuracy is measured.
        weight = max(weight, 1.0 - weight)
        return torch.lerp(images.flip(0), images, weight), torch.lerp(targets.flip(0), targets, weight)
    if cutmix > 0:
        height, width = images.shape[-2:]
        side = math.sqrt(1.0 - float(rng.beta(cutmix, cutmix)))
        box_height, box_width = int(height * side), int(width * side)
        # As in CutMix, the box around a uniform center is clipped at the border; labels are weighted by what is left.
        y, x = int(rng.integers(height)) - box_height // 2, int(rng.integers(width)) - box_width // 2
        top, bottom, left, right = max(y, 0), min(y + box_height, height), max(x, 0), min(x + box_width, width)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right].flip(0)
        weight = 1.0 - (bottom - top) * (right - left) / (height * width)
        return mixed, torch.lerp(targets.flip(0), targets, weight)
    return images, targets
