"""Random files with Google's names, in every naming scheme."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from witness import google_numpy as witness

from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.formats.bit import BIT
from vitkit.weights.formats.google import BIG_VISION, GOOGLE

File = dict[str, NDArray[np.float32]]

NPZ = FileMetadata(file_type="npz")
FORMATS = {"google": GOOGLE, "big_vision": BIG_VISION, "bit": BIT}


def tensors(file: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in file.items()}


def shapes_of(file: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in file.items()}


def same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether names, shapes and bits are equal."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def recognized(file: Mapping[str, Any], metadata: FileMetadata = NPZ) -> list[str]:
    return [name for name, form in FORMATS.items() if form.matches(shapes_of(file), metadata)]


def drawn(**changes: Any) -> File:
    """Draw weights of a released file; class token and positions have few digits, so that their sum is exact."""
    file = witness.random_vit_weights(np.random.default_rng(0), **changes)
    few = {name: np.round(array * 256) / 256 for name, array in file.items() if re.search("cls|pos_embedding", name)}
    return file | few


def with_prefix(file: File, prefix: str) -> File:
    return {prefix + name: array for name, array in file.items()}


def later(file: File) -> File:
    """Rename the blocks as later versions of the code do."""
    numbers = {"LayerNorm_2": "LayerNorm_1", "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0"}
    numbers["MlpBlock_3"] = "MlpBlock_0"
    return {re.sub("|".join(numbers), lambda found: numbers[found[0]], name): array for name, array in file.items()}


def at_top(file: File) -> File:
    """Move the positions to where big_vision has them."""
    return {name.replace("Transformer/posembed_input/", ""): array for name, array in file.items()}


def patches_only(file: File) -> File:
    """The class token's position added to the class token, as big_vision does to old files."""
    table = file["pos_embedding"]
    return file | {"cls": file["cls"] + table[:, :1], "pos_embedding": table[:, 1:]}


def on_one_axis(file: File) -> File:
    """All blocks stacked, as big_vision's scan writes them."""
    layers: dict[str, list[NDArray[np.float32]]] = {}
    for name, array in file.items():
        layers.setdefault(re.sub(r"encoderblock_\d+", "encoderblock", name), []).append(array)
    return {name: np.stack(arrays) if "encoderblock/" in name else arrays[0] for name, arrays in layers.items()}


def big_vision(file: File) -> File:
    return at_top(later(file))


DIALECTS: dict[str, tuple[str, Callable[[File], File]]] = {
    "released": ("google", lambda file: file),
    "training state": ("google", lambda file: with_prefix(file, "opt/target/")),
    "later code": ("google", later),
    "later code's state": ("google", lambda file: with_prefix(later(file), "params/")),
    "big_vision": ("big_vision", lambda file: with_prefix(patches_only(big_vision(file)), "params/")),
    "big_vision, image tower": ("big_vision", lambda file: with_prefix(patches_only(big_vision(file)), "params/img/")),
    "big_vision, no prefix": ("big_vision", lambda file: patches_only(big_vision(file))),
    "big_vision, old state": ("big_vision", lambda file: with_prefix(patches_only(big_vision(file)), "opt/target/")),
    "big_vision, stacked": (
        "big_vision",
        lambda file: with_prefix(on_one_axis(patches_only(big_vision(file))), "params/"),
    ),
    "big_vision, old positions": ("big_vision", lambda file: with_prefix(big_vision(file), "params/")),
    "big_vision, old and stacked": ("big_vision", lambda file: on_one_axis(big_vision(file))),
}
