"""A preprocessor_config.json of Hugging Face goes in, the fields of `Preprocessing` that do the same come out.

What its image processor does and we cannot is an error; a key that nobody knows is named by `unread`. Each processor
has habits of its own for what its file leaves out, and a null leaves out too.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers for the filters that we have."""
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_NO_CROP_FROM = 384
"""From this size on, ConvNeXt's processor squashes."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What an image processor does where its file says nothing; a size of one number is of both sides, or the shorter.

    `crops` is None where a crop_size is enough to say that there is a crop.
    """

    size: int | None = 224
    square: bool = True
    crops: bool | None = False
    crop_size: int = 224
    share: float | None = None
    resample: int = 2
    mean: Sequence[float] = HALF
    deviation: Sequence[float] = HALF


PROCESSORS = {
    "ViT": Habits(),
    "DeiT": Habits(size=256, crops=True, resample=3),
    "Bit": Habits(square=False, crops=True, resample=3, mean=_CLIP[0], deviation=_CLIP[1]),
    "CLIP": Habits(square=False, crops=True, resample=3, mean=_CLIP[0], deviation=_CLIP[1]),
    "ConvNext": Habits(size=384, square=False, resample=3, share=0.875),
    "DINOv3ViT": Habits(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION),
    "Siglip": Habits(resample=3),
}
"""By their names without ImageProcessor; `Fast` and `Pil` are the same on another backend."""
UNNAMED = Habits(size=None, crops=None)
"""The first files name no processor. They are ViT's, and say which size."""

_KINDS = ("image_processor_type", "feature_extractor_type")
_READ = {*_KINDS, "do_resize", "size", "resample", "do_center_crop", "crop_size", "crop_pct", "do_rescale"}
_READ |= {"rescale_factor", "do_normalize", "image_mean", "image_std"}
_ELSEWHERE = {"vitkit", "processor_class", "_processor_class", "auto_map", "default_to_square", "do_convert_rgb"}
_ELSEWHERE |= {"data_format", "input_data_format", "return_tensors", "device", "disable_grouping"}
_ELSEWHERE |= {"_valid_processor_keys", "do_reduce_labels", "reduce_labels"}
"""What says nothing of pixels, or what holds for every picture here: it has as many channels as the model."""
_REFUSED = {"pad_size", "size_divisor", "offset", "rescale_offset", "keep_aspect_ratio", "ensure_multiple_of"}


def fields(data: Mapping[str, object]) -> dict[str, object]:
    """The fields of `Preprocessing`; what cannot be had in them is a ValueError that names the key.

    >>> fields({"size": 224})["resize"], fields({"size": {"shortest_edge": 256}, "crop_size": 224})["resize"]
    ('squash', 'crop')
    """
    habits, kind = _habits(data)
    for key, value in data.items():
        if key not in _READ | _ELSEWHERE and value not in (None, False) and (key in _REFUSED or key.startswith("do_")):
            raise ValueError(f"{key} is {value}")
    if not _told(data, "do_resize", True):
        raise ValueError("do_resize is false: images have one size here")
    resample = _told(data, "resample", habits.resample)
    if resample not in RESAMPLE:
        raise ValueError(f"resample is {resample}, one of Pillow's filters that is not among {list(RESAMPLE.values())}")
    frame = _convnext(data, habits) if kind == "ConvNext" else _frame(data, habits)
    return frame | _normalisation(data, habits) | {"filter": RESAMPLE[resample]}


def unread(data: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of a file that nobody here knows and that are not null.

    >>> unread({"size": 224, "colour": "warm", "pad_size": None})
    ('colour',)
    """
    return tuple(key for key, value in data.items() if key not in _READ | _ELSEWHERE and value not in (None, False))


def _habits(data: Mapping[str, Any]) -> tuple[Habits, str]:
    named = next((str(data[key]) for key in _KINDS if data.get(key)), "")
    if not named:
        return UNNAMED, ""
    kind = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", named)
    if kind not in PROCESSORS:
        raise ValueError(f"{named} is none of the processors of {', '.join(PROCESSORS)}")
    return PROCESSORS[kind], kind


def _told(data: Mapping[str, Any], key: str, usual: Any) -> Any:
    value = data.get(key)
    return usual if value is None else value


# Size and crop


def _frame(data: Mapping[str, Any], habits: Habits) -> dict[str, object]:
    """How pictures are resized and cropped."""
    size = _sides(_told(data, "size", habits.size), "size", square=habits.square)
    crops = habits.crops if habits.crops is not None else data.get("crop_size") is not None
    if not _told(data, "do_center_crop", crops):
        if "shortest_edge" in size and data.get("crop_pct") is None:
            raise ValueError("size is the shortest_edge and there is no crop: images have one size here")
        return _convnext(data, habits) if "shortest_edge" in size else _squash(size)
    crop = _sides(_told(data, "crop_size", habits.crop_size), "crop_size", square=True)
    height, width = _both(crop, "crop_size")
    if "shortest_edge" in size:
        if height != width:
            raise ValueError(f"crop_size is {height}×{width} of a size that is the shortest_edge: only squares are cut")
        resize, whole, across = "crop", size["shortest_edge"], size["shortest_edge"]
    else:
        resize, (whole, across) = "squash_crop", _both(size, "size")
    share = _share(height, whole)
    if math.floor(width / share) != across:
        raise ValueError(f"crop_size {height}×{width} is not the same share of both sides of {whole}×{across}")
    said = data.get("crop_pct")
    if said is not None and math.floor(height / said) != whole:
        raise ValueError(f"crop_pct is {said}, but {height} of {whole} are cut")
    # This library cuts one pixel beside timm and torchvision where the border is odd.
    return {"image_size": [height, width], "resize": resize, "crop_share": share, "crop_rounding": "down"}


def _squash(size: Mapping[str, int]) -> dict[str, object]:
    return {"image_size": list(_both(size, "size")), "resize": "squash"}


def _convnext(data: Mapping[str, Any], habits: Habits) -> dict[str, object]:
    """ConvNeXt's way: a share of the shorter side, and none of it from 384 pixels on."""
    if data.get("do_center_crop") and data.get("crop_size") is not None:
        raise ValueError("do_center_crop is true after ConvNeXt's own crop")
    side = _sides(_told(data, "size", habits.size), "size", square=False).get("shortest_edge")
    if side is None:
        raise ValueError("size of ConvNeXt's processor is the shortest_edge")
    if side >= _NO_CROP_FROM:
        return _squash({"height": side, "width": side})
    share = float(_told(data, "crop_pct", habits.share))
    return {"image_size": side, "resize": "crop", "crop_share": share, "crop_rounding": "down"}


def _sides(size: Any, key: str, *, square: bool) -> dict[str, int]:
    """A size in the words of today: one number or two of the first files become height and width, or shortest_edge."""
    if type(size) is int:
        size = {"height": size, "width": size} if square else {"shortest_edge": size}
    elif isinstance(size, list | tuple) and len(size) == 2:
        size = {"height": size[0], "width": size[1]}
    if not isinstance(size, Mapping):
        raise ValueError(f"{key} is {size}, neither a number nor sides")
    said = {str(name): side for name, side in size.items() if side is not None}
    if said.keys() not in ({"height", "width"}, {"shortest_edge"}):
        raise ValueError(f"{key} is {dict(size)}, neither height and width nor shortest_edge")
    if any(type(side) is not int or side < 1 for side in said.values()):
        raise ValueError(f"{key} is {dict(size)}: sides are whole numbers above 0")
    return said


def _both(size: Mapping[str, int], key: str) -> tuple[int, int]:
    if "height" not in size:
        raise ValueError(f"{key} is {dict(size)}, not height and width")
    return size["height"], size["width"]


def _share(side: int, whole: int) -> float:
    """The share that leaves `whole` where it is divided by."""
    if side > whole:
        raise ValueError(f"{side} pixels are to be cut out of {whole}: borders are not filled here")
    share = side / whole
    while math.floor(side / share) < whole:  # 224 / (224 / 248) may fall short of 248 by rounding
        share = math.nextafter(share, 0.0)
    return share


# Mean and deviation


def _normalisation(data: Mapping[str, Any], habits: Habits) -> dict[str, object]:
    """Mean and deviation as shares of 255, whatever the file scales pixels by before it subtracts."""
    mean = _numbers(_told(data, "image_mean", habits.mean), "image_mean")
    deviation = _numbers(_told(data, "image_std", habits.deviation), "image_std")
    channels = max(len(mean), len(deviation))
    channels = 3 if channels == 1 else channels
    if not _told(data, "do_normalize", True):
        mean, deviation = (0.0,) * channels, (1.0,) * channels
    factor = _told(data, "rescale_factor", 1 / 255) if _told(data, "do_rescale", True) else 1.0
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor is {factor}, no number above 0")
    scale = 255 * factor
    if abs(scale - 1) > 1e-6:  # else it is 1/255, perhaps written with few digits
        mean, deviation = (tuple(number / scale for number in numbers) for numbers in (mean, deviation))
    return {"channels": channels, "mean": list(mean), "deviation": list(deviation)}


def _numbers(numbers: Any, key: str) -> tuple[float, ...]:
    """One number for all channels, or one for each."""
    listed = numbers if isinstance(numbers, list | tuple) else [numbers]
    if not listed or any(type(number) not in (int, float) for number in listed):
        raise ValueError(f"{key} is {numbers}, neither a number nor one for each channel")
    return tuple(float(number) for number in listed)
