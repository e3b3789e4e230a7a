"""Model in memory with its configuration, preprocessing and labels; reference logits and differences of settings."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vitkit.core.config import flatten_settings, to_mapping
from vitkit.core.errors import WeightsError
from vitkit.core.files import escape_surrogates
from vitkit.core.formatting import format_value
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.zoo.registry import Model, build
from vitkit.zoo.variants import ModelConfig

TRAINING_SETTINGS = ("dropout.", "head.bias", "positions.origin")
"""Prefixes of settings that affect training, initialization or resizing, but not the logits of the model as it is."""


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """Weights with the configuration, preprocessing and labels that belong to them."""

    name: str
    config: ModelConfig
    state: dict[str, Tensor]
    preprocessing: Preprocessing
    labels: tuple[str, ...]

    def build_model(self, *, keep_dtype: bool = False) -> Model:
        """Build the module, in eval mode, with `name`, `labels` and `preprocess` set.

        Weights that are stored in 16 bits become float32, the type of preprocessed images, unless `keep_dtype`.
        """
        with torch.device("meta"):
            model = build(self.config)
        load_state(model, self.state, error=f"{self.name}: the weights do not fit the configuration")
        model.name, model.labels = self.name, tuple(map(escape_surrogates, self.labels))
        model.preprocess = self.preprocessing
        is_half = any(tensor.dtype in {torch.float16, torch.bfloat16} for tensor in self.state.values())
        return model.float().eval() if is_half and not keep_dtype else model.eval()

    def checksum(self) -> str:
        """Return the SHA-256 of the configuration and all tensors."""
        digest = hashlib.sha256(json.dumps(to_mapping(self.config), sort_keys=True).encode())
        for name in sorted(self.state):
            tensor = self.state[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything in the bundle: name, preprocessing and labels too."""
        parts = [self.name, list(self.labels), to_mapping(self.preprocessing), self.checksum()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_state(model: torch.nn.Module, state: Mapping[str, Tensor], *, error: str) -> None:
    """Load tensors into a model without copying. Tensors that do not fit raise `error` with the first reason."""
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as cause:  # such as an artifact whose config.json describes another model
        reason = next((line.strip() for line in str(cause).splitlines()[1:]), str(cause))
        raise WeightsError(f"{error}: {reason[:300]}") from cause


def are_class_numbers(labels: Sequence[str]) -> bool:
    """Return whether labels are only the numbers of the classes."""
    return tuple(labels) == tuple(map(str, range(len(labels))))


# Reference logits, by which a copy of a model is verified


def reference_image(config: ModelConfig) -> Float[Tensor, "1 C H W"]:
    """Return a fixed image with values in [-1, 1]: stripes with a disc, different in each channel.

    It is computed with integers, so that it is the same on every machine.
    """
    height, width = pair(config.image_size)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None, :]
    # Doubled, because the center of an even number of pixels lies between two of them.
    from_center = (2 * rows - height + 1) ** 2 + (2 * columns - width + 1) ** 2
    disc = from_center < (min(height, width) // 2 + 1) ** 2
    planes = []
    for channel in range(config.channels):
        stripes = ((rows * (7 + 4 * channel)) ^ (columns * (5 + 2 * channel))) % 256
        planes.append(torch.where(disc, 255 - stripes // 2, stripes))
    return (torch.stack(planes)[None].to(torch.float32) - 127.5) / 127.5


@torch.no_grad()
def reference_logits(model: Model) -> Float[Tensor, "1 Y"]:
    """Return the logits of the reference image in float32; features if the model has no classes."""
    logits: Tensor = model(reference_image(model.config))
    return logits.detach().float()


def logits_difference(a: Tensor, b: Tensor | Sequence[float]) -> float:
    """Return the largest absolute difference of two outputs; infinity if sizes differ or a difference is not finite."""
    left, right = a.double().flatten(), torch.as_tensor(b, dtype=torch.float64).flatten()
    if left.shape != right.shape:
        return float("inf")
    difference = float((left - right).abs().max()) if left.numel() else 0.0
    return difference if difference == difference else float("inf")  # noqa: PLR0124  NaN is not equal to itself


# Differences between two configurations, by dotted key


class ValuePair(NamedTuple):
    """Values of a setting in two models; None where a model has no such setting."""

    a: object
    b: object


def diff_settings(a: object, b: object) -> dict[str, ValuePair]:
    """Return the settings of two configurations that differ, by dotted key."""
    one, other = (flatten_settings(to_mapping(config)) for config in (a, b))
    keys = dict.fromkeys([*one, *other])
    return {key: ValuePair(one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def affects_logits(key: str) -> bool:
    """Return whether a setting changes the logits of a model whose tensors stay the same."""
    return not key.startswith(TRAINING_SETTINGS)


def format_change(key: str, pair: ValuePair) -> str:
    """Format a setting that changes.

    >>> format_change("block.activation", ValuePair("gelu_tanh", "gelu_erf"))
    'block.activation gelu_tanh → gelu_erf'
    """
    return f"{key} {format_value(pair.a)} → {format_value(pair.b)}"
