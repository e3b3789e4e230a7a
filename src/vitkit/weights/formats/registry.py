"""Registry of the weight formats that vitkit reads and writes besides its own."""

import re

from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.weights.formats.base import FileMetadata, Format
from vitkit.weights.formats.bit import BIT
from vitkit.weights.formats.google import BIG_VISION, GOOGLE
from vitkit.weights.formats.huggingface import HF_DEIT, HF_DINOV2, HF_VIT, HF_VIT_MAE
from vitkit.weights.formats.timm import DEIT, DINOV2, DINOV3, MAE, TIMM
from vitkit.weights.formats.timm.architectures import ARCHITECTURES, RESNETS, find_architecture
from vitkit.weights.formats.torchvision import TORCHVISION
from vitkit.weights.rules import Shapes

FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        *(GOOGLE, BIG_VISION, BIT),
        *(HF_VIT, HF_DEIT, HF_VIT_MAE, HF_DINOV2),
        TORCHVISION,
        *(DINOV3, DINOV2, MAE, DEIT, TIMM),
    )
}
"""Formats by name, in the order in which a file is compared with them: specific formats come before general ones."""


def get_format(name: str) -> Format:
    """Return the format of that name."""
    if name in FORMATS:
        return FORMATS[name]
    names = ["vitkit", *FORMATS]
    hint = did_you_mean(name, names) or f"known formats: {', '.join(names)}"
    raise UnknownNameError(f"unknown weight format {name}", hint=hint)


def parse_format(name: str) -> tuple[Format, str | None]:
    """Return the format of a name, and the architecture in a name such as `timm:vit_base_patch16_224`."""
    name, colon, architecture = name.partition(":")
    if not colon:
        return get_format(name), None
    if name != TIMM.name:
        raise UnknownNameError(
            f"unknown weight format {name}:{architecture}", hint="only timm has architectures: timm:…"
        )
    if not (find_architecture(architecture) or re.fullmatch(RESNETS, architecture)):
        hint = did_you_mean(architecture, ARCHITECTURES) or "vitkit does not implement it"
        raise UnknownNameError(f"unsupported architecture of timm: {architecture}", hint=hint)
    return TIMM, architecture


def detect_format(shapes: Shapes, metadata: FileMetadata) -> Format | None:
    """Return the first format whose files have these names and shapes."""
    return next((entry for entry in FORMATS.values() if entry.matches(shapes, metadata)), None)
