"""Parser for the preprocessor_config.json files of Hugging Face.

Settings that `Preprocessing` cannot express are errors. Each image processor has its own defaults for missing keys;
null counts as missing.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Interpolations by Pillow's numbers."""
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_CONVNEXT_NO_CROP = 384
"""Size from which on ConvNeXt's processor squashes instead of cropping."""


@dataclass(frozen=True, kw_only=True)
class ProcessorDefaults:
    """Settings of an image processor for missing keys.

    An integer size means both sides if `square`, else the shorter side. `crops` is None if the presence of crop_size
    decides.
    """

    size: int | None = 224
    square: bool = True
    crops: bool | None = False
    crop_size: int = 224
    crop_fraction: float | None = None
    resample: int = 2
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF


PROCESSORS = {
    "ViT": ProcessorDefaults(),
    "DeiT": ProcessorDefaults(size=256, crops=True, resample=3),
    "Bit": ProcessorDefaults(square=False, crops=True, resample=3, mean=_CLIP_MEAN, std=_CLIP_STD),
    "CLIP": ProcessorDefaults(square=False, crops=True, resample=3, mean=_CLIP_MEAN, std=_CLIP_STD),
    "ConvNext": ProcessorDefaults(size=384, square=False, resample=3, crop_fraction=0.875),
    "DINOv3ViT": ProcessorDefaults(mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "Siglip": ProcessorDefaults(resample=3),
}
"""Processors by name, without ImageProcessor. `Fast` and `Pil` are the same on another backend."""
UNNAMED = ProcessorDefaults(size=None, crops=None)
"""The oldest files name no processor. They are ViT's, and always have a size."""

_TYPE_KEYS = ("image_processor_type", "feature_extractor_type")
_USED = {*_TYPE_KEYS, "do_resize", "size", "resample", "do_center_crop", "crop_size", "crop_pct", "do_rescale"}
_USED |= {"rescale_factor", "do_normalize", "image_mean", "image_std"}
_IRRELEVANT = {"vitkit", "processor_class", "_processor_class", "auto_map", "default_to_square", "do_convert_rgb"}
_IRRELEVANT |= {"data_format", "input_data_format", "return_tensors", "device", "disable_grouping"}
_IRRELEVANT |= {"_valid_processor_keys", "do_reduce_labels", "reduce_labels"}
"""Keys that do not affect pixels, or that vitkit always does."""
_UNSUPPORTED = {"pad_size", "size_divisor", "offset", "rescale_offset", "keep_aspect_ratio", "ensure_multiple_of"}


def parse_image_processor(data: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of `Preprocessing`; raise ValueError with the key that they cannot express.

    >>> parse_image_processor({"size": 224})["resize"]
    'squash'
    >>> parse_image_processor({"size": {"shortest_edge": 256}, "crop_size": 224})["resize"]
    'crop'
    """
    data = {key: value for key, value in data.items() if value is not None}
    defaults, processor = _find_defaults(data)
    for key in find_unknown_keys(data):
        if key in _UNSUPPORTED or key.startswith("do_"):
            raise ValueError(f"{key} is {data[key]}")
    if not data.get("do_resize", True):
        raise ValueError("do_resize is false, but vitkit resizes all images to one size")
    resample = data.get("resample", defaults.resample)
    if resample not in RESAMPLE:
        raise ValueError(f"resample is {resample}, which is none of Pillow's filters {list(RESAMPLE.values())}")
    parse_size = _parse_convnext_size if processor == "ConvNext" else _parse_size
    return parse_size(data, defaults) | _parse_normalization(data, defaults) | {"interpolation": RESAMPLE[resample]}


def find_unknown_keys(data: Mapping[str, object]) -> tuple[str, ...]:
    """Return the keys that are set but not known."""
    return tuple(key for key, value in data.items() if key not in _USED | _IRRELEVANT and value not in (None, False))


def _find_defaults(data: Mapping[str, Any]) -> tuple[ProcessorDefaults, str]:
    name = next((str(data[key]) for key in _TYPE_KEYS if data.get(key)), "")
    if not name:
        return UNNAMED, ""
    processor = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
    if processor not in PROCESSORS:
        raise ValueError(f"{name} is not supported (only the processors of {', '.join(PROCESSORS)})")
    return PROCESSORS[processor], processor


Sides = int | tuple[int, int]
"""The shortest edge, or (height, width)."""


def _parse_size(data: Mapping[str, Any], defaults: ProcessorDefaults) -> dict[str, object]:
    size = _parse_sides(data.get("size", defaults.size), "size", square=defaults.square)
    crops = defaults.crops if defaults.crops is not None else "crop_size" in data
    if not data.get("do_center_crop", crops):
        if not isinstance(size, int):
            return {"image_size": list(size), "resize": "squash"}
        if "crop_pct" not in data:
            raise ValueError("size is a shortest_edge without a crop, but vitkit resizes all images to one size")
        return _parse_convnext_size(data, defaults)
    crop = _parse_sides(data.get("crop_size", defaults.crop_size), "crop_size", square=True)
    if isinstance(crop, int):
        raise ValueError(f"crop_size is {data['crop_size']}, not height and width")
    height, width = crop
    resize, (whole_height, whole_width) = ("crop", (size, size)) if isinstance(size, int) else ("squash_crop", size)
    if resize == "crop" and height != width:
        raise ValueError(f"crop_size {height}×{width} is not square, but size is a shortest_edge")
    fraction = _find_crop_fraction(height, whole_height)
    if math.floor(width / fraction) != whole_width:
        raise ValueError(f"crop_size {height}×{width} is not the same fraction of both sides of size")
    if "crop_pct" in data and math.floor(height / data["crop_pct"]) != whole_height:
        raise ValueError(f"crop_pct is {data['crop_pct']}, but crop_size is {height} of {whole_height}")
    # transformers rounds odd borders differently from timm and torchvision.
    return {"image_size": [height, width], "resize": resize, "crop_fraction": fraction, "crop_rounding": "down"}


def _parse_convnext_size(data: Mapping[str, Any], defaults: ProcessorDefaults) -> dict[str, object]:
    """Parse ConvNeXt's convention: a fraction of the shorter side, without a crop from 384 pixels on."""
    if data.get("do_center_crop") and "crop_size" in data:
        raise ValueError("do_center_crop is true in addition to ConvNeXt's own crop")
    side = _parse_sides(data.get("size", defaults.size), "size", square=False)
    if not isinstance(side, int):
        raise ValueError("size of ConvNeXt's processor must be a shortest_edge")
    if side >= _CONVNEXT_NO_CROP:
        return {"image_size": [side, side], "resize": "squash"}
    fraction = float(data.get("crop_pct", defaults.crop_fraction))
    return {"image_size": side, "resize": "crop", "crop_fraction": fraction, "crop_rounding": "down"}


def _parse_sides(size: Any, key: str, *, square: bool) -> Sides:
    """Parse height and width, or shortest_edge, also the numbers and pairs of old files."""
    if type(size) is int:
        size = {"height": size, "width": size} if square else {"shortest_edge": size}
    elif isinstance(size, list | tuple) and len(size) == 2:
        size = {"height": size[0], "width": size[1]}
    if not isinstance(size, Mapping):
        raise ValueError(f"{key} is {size}, neither a number nor sides")
    sides = {str(name): side for name, side in size.items() if side is not None}
    if sides.keys() not in ({"height", "width"}, {"shortest_edge"}):
        raise ValueError(f"{key} is {dict(size)}, neither height and width nor shortest_edge")
    if any(type(side) is not int or side < 1 for side in sides.values()):
        raise ValueError(f"{key} is {dict(size)}: sides must be integers above 0")
    return sides["shortest_edge"] if "shortest_edge" in sides else (sides["height"], sides["width"])


def _find_crop_fraction(side: int, whole: int) -> float:
    """Return the largest fraction for which floor(side / fraction) is `whole`."""
    if side > whole:
        raise ValueError(f"a crop of {side} pixels is larger than {whole}, and padding is not supported")
    fraction = side / whole
    while math.floor(side / fraction) < whole:  # 224 / (224 / 248) may be rounded to less than 248
        fraction = math.nextafter(fraction, 0.0)
    return fraction


def _parse_normalization(data: Mapping[str, Any], defaults: ProcessorDefaults) -> dict[str, object]:
    """Return mean and std of pixels in 0…1, whatever the file rescales pixels by."""
    mean = _parse_numbers(data.get("image_mean", defaults.mean), "image_mean")
    std = _parse_numbers(data.get("image_std", defaults.std), "image_std")
    channels = max(len(mean), len(std))
    channels = 3 if channels == 1 else channels
    if not data.get("do_normalize", True):
        mean, std = (0.0,) * channels, (1.0,) * channels
    factor = data.get("rescale_factor", 1 / 255) if data.get("do_rescale", True) else 1.0
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor is {factor}, not a number above 0")
    scale = 255 * factor
    if abs(scale - 1) > 1e-6:  # else it is 1/255, possibly with few digits
        mean, std = (tuple(number / scale for number in numbers) for numbers in (mean, std))
    return {"channels": channels, "mean": list(mean), "std": list(std)}


def _parse_numbers(value: Any, key: str) -> tuple[float, ...]:
    """Return one number for all channels, or one per channel."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or any(type(number) not in (int, float) for number in numbers):
        raise ValueError(f"{key} is {value}, neither a number nor one per channel")
    return tuple(float(number) for number in numbers)
