"""Description of a weight format, and helpers that the formats share."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.sizes import Size
from vitkit.model.config import ViTConfig
from vitkit.weights.rules import Rule, Shapes
from vitkit.zoo.variants import SIZES, ModelConfig

FileType = Literal["npz", "safetensors", "torch"]
DEFAULT_HEADS = {config.width: config.heads for config in SIZES.values()}
NONSTANDARD_PARTS = (
    *("a hybrid", "axial attention", "attention pooling", "mean pooling"),
    *("no positions", "learned positions of rows and columns", "relative positions", "rotary positions"),
    *("positions at every layer", "a class token without a position", "normalized queries and keys"),
    *("a norm after pooling", "class_mean pooling"),
)
"""Parts that a standard ViT does not have."""


@dataclass(frozen=True, kw_only=True)
class FileMetadata:
    """Facts about a weight file besides its tensors.

    `container` is the key of the state dict in a torch file ("model", "state_dict", …), None at the top level; `config`
    is the content of the `config.json` in the same directory. `is_declared` means that the user named the format, and
    `architecture` is the name of timm's architecture that the user gave with it.
    """

    file_type: FileType
    container: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    file_name: str = ""
    is_declared: bool = False
    architecture: str | None = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way to store models.

    Attributes:
        preset: Preprocessing preset of models in this format, if it is not called like the format.
        file_type: File type that is written; safetensors means a directory with `config.json`.
        infer_config: Infer the model from names and shapes, with this origin's GELU form, LayerNorm eps and positions.
        rules: Make the rules of a model, with the names of a file of these shapes or, without one, those we write.
        unsupported_reason: Return why the format cannot hold a model, or None.
        ignored_names: Patterns of tensors that are not part of the model: decoders, mask tokens, optimizer states.
        input_size: Image size that the origin evaluates at, if it resamples larger position tables to it.
        library: Python package that runs such files.
        container: Key of the state dict in torch files we write.
        make_config: Make the `config.json` of a model with these labels.
    """

    name: str
    title: str
    file_type: FileType
    matches: Callable[[Shapes, FileMetadata], bool]
    infer_config: Callable[[Shapes, FileMetadata], ModelConfig]
    rules: Callable[[ModelConfig, Shapes | None], Sequence[Rule]]
    unsupported_reason: Callable[[ModelConfig], str | None]
    preset: str | None = None
    ignored_names: tuple[str, ...] = ()
    input_size: int | None = None
    library: str | None = None
    container: str | None = None
    make_config: Callable[[ViTConfig, Sequence[str]], dict[str, object]] | None = None


# Inference


def get_shape(shapes: Shapes, name: str, *, axes: int) -> tuple[int, ...]:
    """Return the shape of a required tensor with this number of axes."""
    if name not in shapes:
        raise WeightsError(f"the file has no {name}", hint="it is incomplete, or of another model")
    if len(shapes[name]) != axes or min(shapes[name]) < 1:
        got = " × ".join(map(str, shapes[name])) or "a scalar"
        raise WeightsError(f"{name} has an unexpected shape", expected=f"{axes} axes", got=got)
    return shapes[name]


def count_outputs(shapes: Shapes, weight: str, *, axis: int = 0) -> int | None:
    """Return the number of outputs of a dense layer, None if it does not exist."""
    return get_shape(shapes, weight, axes=2)[axis] if weight in shapes else None


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """Count the blocks, whose names have a prefix and a number; the numbers may be arbitrary."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for name in shapes if (match := pattern.match(name))})


@contextmanager
def invalid_model_errors() -> Iterator[None]:
    """Report an inconsistent configuration as an error of the file that it was inferred from."""
    try:
        yield
    except ConfigError as error:
        message = f"invalid model in the file: {error.message}"
        raise WeightsError(message, expected=error.expected, got=error.got, hint=error.hint) from error


def require_vit(config: ModelConfig) -> ViTConfig:
    """Return the configuration, or raise if it is a ResNet's."""
    if not isinstance(config, ViTConfig):
        raise WeightsError("the format is for Vision Transformers only", got="a ResNet")
    return config


def find_default_heads(width: int) -> int | None:
    """Return the default number of heads: the paper's for its widths, else heads of width 64, or None."""
    return DEFAULT_HEADS.get(width) or (width // 64 if width % 64 == 0 else None)


def default_heads(width: int, *, format: str, is_declared: bool) -> int:  # noqa: A002  the word users type
    """Return the default number of heads if the user named the format; otherwise it is not guessed."""
    heads = find_default_heads(width)
    if heads and is_declared:
        return heads
    hint = "put the config.json of the model next to the file"
    hint += f"; if its heads have the usual width, --format {format}" if heads else ""
    raise WeightsError(f"neither tensors nor names determine the number of heads (width {width})", hint=hint)


def square_side(patches: int) -> int:
    """Return the side of a square grid with this number of patches."""
    side = math.isqrt(max(patches, 0))
    if side < 1 or side**2 != patches:
        expected, hint = "1, 4, 9, 16 … patches", "put the config.json of the model next to the file"
        raise WeightsError("the positions do not form a square", expected=expected, got=patches, hint=hint)
    return side


def simplify_size(height: int, width: int) -> Size:
    """Return one number for a square, else height and width."""
    return height if height == width else (height, width)


def find_reason(config: ViTConfig, parts: Sequence[str], others: Mapping[str, bool]) -> str | None:
    """Return the first of these parts that a model has, else the first other reason that applies, or None."""
    positions, block, tokens = config.positions, config.block, config.tokens
    has = {
        "a hybrid": config.backbone is not None,
        "axial attention": block.axial,
        "attention pooling": config.pooling == "map",
        "mean pooling": config.pooling == "mean",
        "class_mean pooling": config.pooling == "class_mean",
        "no positions": positions.kind == "none",
        "learned positions of rows and columns": positions.kind == "learned_2d",
        "relative positions": positions.kind == "relative",
        "rotary positions": positions.kind == "rotary",
        "positions at every layer": positions.is_additive and positions.injection_point != "stem",
        "a class token without a position": positions.covers == "patches",
        "a grid that is not square": positions.is_additive and config.grid[0] != config.grid[1],
        "no class token": config.class_tokens == tokens.distillation,
        "a distillation token": tokens.distillation,
        "registers": tokens.registers > 0,
        "normalized queries and keys": block.attention.qk_norm,
        "no qkv biases": not block.attention.qkv_bias,
        "LayerScale": block.layer_scale is not None,
        "SwiGLU": block.activation == "swiglu",
        "tanh GELU": block.activation == "gelu_tanh",
        "exact GELU": block.activation == "gelu_erf",
        "a norm after pooling": config.head.norm == "after_pooling",
        "class pooling before the norm": config.pooling == "class" and config.head.norm == "after_pooling",
        "pre-logits": config.head.pre_logits is not None,
        "a classifier": config.num_classes > 0,
    }
    reasons = {**{part: has[part] for part in parts}, **others}
    return next((reason for reason, applies in reasons.items() if applies), None)
