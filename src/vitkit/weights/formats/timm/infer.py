"""Inference of models from names and shapes of timm and of code with the same names.

What names and shapes do not determine (heads, image size, GELU form) comes from timm's `config.json` or from the
defaults of the origin.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitkit.core.errors import ConfigError, WeightsError
from vitkit.model.config import (
    Activation,
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    InterpolationOrigin,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats.base import FileMetadata, count_outputs, get_shape, invalid_model_error, simplify_size
from vitkit.weights.formats.timm.config import POOLINGS, Pooling, get_image_size, get_setting
from vitkit.weights.rules import Shapes

ROTARY_BASE = 100.0
DINOV3_EPS = 1e-5
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 4096: 32}
"""Number of heads of widths whose heads are not 64 wide."""
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")
UNSUPPORTED_NAMES = {
    r"rope\..*": "learned rotary positions",
    r"norm_pre\..*": "a norm before its blocks, as CLIP has",
    r"patch_embed\.norm\..*": "a norm after its patches",
    r".*(relative_position|rel_pos).*": "relative position biases, as BEiT has",
    r"blocks\.\d+\.(attn|mlp)\.norm\..*": "norms inside its blocks, as EVA-02 has",
    r"blocks\.\d+\.attn\.[qkv]_proj\..*": "separate projections of queries, keys and values, as EVA has",
    r"blocks\.\d+\.\D+\.\d+\..*": "blocks in parallel",
}
"""Tensor names of models that vitkit does not have."""
UNSUPPORTED_ARCHITECTURES = r"eva02|rope|beit|_xp_|intern"
"""timm's architectures that vitkit does not have although their tensor names are the same."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Properties of an origin's models that a file does not store.

    `rows` tells which tokens before the patches have a row in the position table: all class tokens, all or none of
    them, or none if there are registers, as usual in timm.
    """

    origin: InterpolationOrigin
    rows: Literal["all", "all_or_patches", "by_registers"] = "all"
    rotary: bool = False
    eps: float = 1e-6


def normalize_names(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map timm's names to the names in the file and their shapes: without prefix, blocks numbered in one sequence."""
    anchor = "patch_embed.proj.weight"
    prefixes = [name.removesuffix(anchor) for name in shapes if name == anchor or name.endswith(f".{anchor}")]
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    return {
        # DINOv2's training code groups blocks in chunks: blocks.chunk.layer, with layers numbered continuously.
        re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name.removeprefix(prefix)): (name, shape)
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def is_bit(shapes: Shapes) -> bool:
    """Return whether these are the names of a BiT ResNet."""
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"} <= shapes.keys()


def find_published_heads(width: int, *, gated: bool = False) -> int | None:
    """Return the number of heads of published models with this width, or None."""
    if width == 1536:
        return 24 if gated else 16  # DINOv2's giant, and SigLIP 2's
    return HEADS.get(width) or (width // 64 if width % 64 == 0 else None)


# Configurations


def infer_vit(shapes: Shapes, metadata: FileMetadata, *, defaults: Defaults) -> ViTConfig:
    """Infer a Vision Transformer from normalized names and shapes."""
    _check_supported(shapes, metadata, defaults)
    stem = get_shape(shapes, "patch_embed.proj.weight", axes=4)
    backbone = _backbone(shapes)
    stride = backbone.stride if backbone else 1
    cell = (stride * stem[2], stride * stem[3])
    registers = next((shapes[name][1] for name in REGISTERS if len(shapes.get(name, ())) == 3), 0)
    class_tokens = int("cls_token" in shapes) + int("dist_token" in shapes)
    pooling = _pooling(shapes, metadata, defaults)
    _check_pooling(pooling, metadata, prefix=class_tokens + registers)
    grid, covers = _grid(shapes, metadata, defaults, cell=cell, class_tokens=class_tokens, registers=registers)
    block, mlp_dim = _block(shapes, metadata, defaults)
    try:
        return ViTConfig(
            image_size=simplify_size(grid[0] * cell[0], grid[1] * cell[1]),
            patch_size=simplify_size(stem[2], stem[3]),
            channels=_channels(shapes, stem),
            width=stem[0],
            depth=_depth(shapes),
            heads=_heads(shapes, metadata, defaults, width=stem[0], gated=block.activation == "swiglu"),
            mlp_dim=mlp_dim,
            num_classes=count_outputs(shapes, "head.weight") or 0,
            pooling=pooling,
            backbone=backbone,
            positions=_positions(shapes, metadata, defaults, covers=covers, registers=registers),
            tokens=TokenConfig(
                class_token=True if "cls_token" in shapes and pooling != "class" else None,
                distillation="dist_token" in shapes,
                registers=registers,
            ),
            block=block,
            head=_head(shapes),
        )
    except ConfigError as error:
        raise invalid_model_error(error) from error


def infer_bit(shapes: Shapes, metadata: FileMetadata) -> BiTConfig:
    """Infer a BiT ResNet from names and shapes."""
    stem = get_shape(shapes, "stem.conv.weight", axes=4)
    try:
        return BiTConfig(
            units=_units(shapes, "stages"),
            width_factor=stem[0] // 64,
            channels=stem[1],
            image_size=simplify_size(*(get_image_size(metadata) or (224, 224))),
            num_classes=get_shape(shapes, "head.fc.weight", axes=4)[0] if "head.fc.weight" in shapes else 0,
            origin="timm",
        )
    except ConfigError as error:
        raise invalid_model_error(error) from error


def _check_supported(shapes: Shapes, metadata: FileMetadata, defaults: Defaults) -> None:
    """Reject models that have our tensor names, or nearly, but compute something else."""
    hint = "vitkit does not implement it"
    for name in shapes:
        for pattern, reason in UNSUPPORTED_NAMES.items():
            if re.fullmatch(pattern, name):
                raise WeightsError(f"unsupported model: it has {reason}: {name}", hint=hint)
    architecture = get_setting(metadata, "architecture", str)
    if architecture and re.search(UNSUPPORTED_ARCHITECTURES, architecture):
        raise WeightsError(f"unsupported model: timm's {architecture}", hint=hint)
    if defaults.rotary and ("blocks.0.gamma_1" in shapes or "blocks.0.attn.q_bias" in shapes):
        has_tokens = {"cls_token", "reg_token", "norm.weight"} <= shapes.keys()
        is_dinov3 = has_tokens and "blocks.0.attn.qkv.bias" not in shapes
        if not ("dinov3" in architecture if architecture else is_dinov3):
            raise WeightsError("unsupported model: its rotary positions are not DINOv3's", hint=hint)


def _channels(shapes: Shapes, stem: Sequence[int]) -> int:
    root = shapes.get("patch_embed.backbone.stem.conv.weight") or shapes.get("patch_embed.backbone.conv.weight")
    return root[1] if root and len(root) == 4 else stem[1]


def _depth(shapes: Shapes) -> int:
    """Count the blocks, and reject gaps."""
    layers = {int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d{1,9})\.", name))}
    if layers != set(range(len(layers))):
        missing = min(set(range(len(layers))) - layers)
        raise WeightsError(f"block {missing} is missing", hint="it is incomplete")
    return len(layers)


def _units(shapes: Shapes, stages: str) -> tuple[int, ...]:
    """Count the units of each stage of a ResNet."""
    pattern = re.compile(re.escape(stages) + r"\.(\d{1,9})\.blocks\.(\d{1,9})\.conv1\.weight")
    numbers = {(int(match[1]), int(match[2])) for name in shapes if (match := pattern.fullmatch(name))}
    count = len({stage for stage, _ in numbers})
    units = tuple(sum(other == stage for other, _ in numbers) for stage in range(count))
    if numbers != {(stage, unit) for stage in range(count) for unit in range(units[stage])}:
        raise WeightsError("stages or units of the ResNet are missing", hint="it is incomplete")
    return units


def _backbone(shapes: Shapes) -> BackboneConfig | None:
    start = "patch_embed.backbone."
    if not any(name.startswith(start) for name in shapes):
        return None
    units = _units(shapes, f"{start}stages")
    root = f"{start}stem.conv.weight" if units else f"{start}conv.weight"
    if root not in shapes:
        raise WeightsError("unsupported hybrid: its ResNet is not one of the paper's")
    try:
        return BackboneConfig(units=units, root_width=get_shape(shapes, root, axes=4)[0], origin="timm")
    except ConfigError as error:
        raise invalid_model_error(error) from error


def _head(shapes: Shapes) -> HeadConfig:
    after = "fc_norm.weight" in shapes
    if after == ("norm.weight" in shapes):
        message = "the last norm must be before or after pooling"
        raise WeightsError(message, expected="norm or fc_norm", got="both" if after else "neither")
    hidden = count_outputs(shapes, "pre_logits.fc.weight")
    return HeadConfig(pre_logits=hidden, norm="after_pooling" if after else "before_pooling")


def _block(shapes: Shapes, metadata: FileMetadata, defaults: Defaults) -> tuple[BlockConfig, int]:
    """Infer the parts of a block and the width of its MLP."""
    names = {name.removeprefix("blocks.0.") for name in shapes if name.startswith("blocks.0.")}
    last = "mlp.w3.weight" if "mlp.w3.weight" in names else "mlp.fc2.weight"
    mlp_dim = get_shape(shapes, f"blocks.0.{last}", axes=2)[1]
    gated = "mlp.fc1.weight" not in names or shapes["blocks.0.mlp.fc1.weight"][:1] == (2 * mlp_dim,)
    if gated and "attn.q_bias" in names and not defaults.rotary:
        hint = "vitkit does not implement it"
        raise WeightsError("unsupported model: it has both rotary and learned positions, as EVA-02", hint=hint)
    scaled = bool({"ls1.gamma", "gamma_1"} & names)
    block = BlockConfig(
        attention=AttentionConfig(
            qkv_bias=bool({"attn.qkv.bias", "attn.q_bias"} & names), qk_norm="attn.q_norm.weight" in names
        ),
        activation="swiglu" if gated else _activation(metadata),
        norm_eps=defaults.eps,
        layer_scale=(get_setting(metadata, "init_values", float) or 1e-5) if scaled else None,
    )
    return block, mlp_dim


def _activation(metadata: FileMetadata) -> Activation:
    architecture = get_setting(metadata, "architecture", str) or ""
    default = (
        "gelu_tanh" if re.search(r"siglip.*_512|(patch32|so400m_patch16|giantopt).*siglip", architecture) else "gelu"
    )
    name = get_setting(metadata, "act_layer", str) or ("quick_gelu" if "quickgelu" in architecture else default)
    activations: dict[str, Activation] = {"gelu": "gelu_erf", "gelu_erf": "gelu_erf", "gelu_tanh": "gelu_tanh"}
    if name not in activations:
        raise WeightsError("unsupported activation", expected="gelu or gelu_tanh", got=name)
    return activations[name]


def _heads(shapes: Shapes, metadata: FileMetadata, defaults: Defaults, *, width: int, gated: bool) -> int:
    if "rope_embed.periods" in shapes:  # one for each quarter of a head
        return max(1, width // (4 * get_shape(shapes, "rope_embed.periods", axes=1)[0]))
    default = width // 64 if defaults.rotary and width in (1280, 1536) else find_published_heads(width, gated=gated)
    if (get_setting(metadata, "architecture", str) or "").startswith("vit_base_patch16_gap_224"):
        default = 16
    heads = get_setting(metadata, "num_heads", int) or default
    if heads is None:
        hint = 'add a config.json with "model_args": {"num_heads": …}'
        raise WeightsError(f"the number of heads is unknown for a width of {width}", hint=hint)
    return heads


def _pooling(shapes: Shapes, metadata: FileMetadata, defaults: Defaults) -> Pooling:
    if name := get_setting(metadata, "global_pool", str):
        if name not in POOLINGS:
            raise WeightsError("unsupported pooling", expected=" or ".join(POOLINGS), got=name)
        return POOLINGS[name]
    if "attn_pool.latent" in shapes:
        return "map"
    # timm's DINOv3 models use mean pooling by default, Meta's the class token.
    is_mean = "fc_norm.weight" in shapes or (defaults.rotary and "blocks.0.gamma_1" in shapes)
    return "mean" if is_mean or "cls_token" not in shapes else "class"


def _check_pooling(pooling: Pooling, metadata: FileMetadata, *, prefix: int) -> None:
    """Reject pooling over other tokens than ours: attention pooling reads all tokens, mean pooling only patches."""
    includes_prefix = get_setting(metadata, "pool_include_prefix", bool) or False
    if pooling != "class" and prefix and includes_prefix != (pooling == "map"):
        expected = f"pool_include_prefix = {str(pooling == 'map').lower()} in its config.json"
        raise WeightsError("unsupported pooling", expected=expected, got=str(includes_prefix).lower())


def _positions(
    shapes: Shapes, metadata: FileMetadata, defaults: Defaults, *, covers: Any, registers: int
) -> PositionConfig:
    if defaults.rotary:
        base = float(get_setting(metadata, "rope_temperature", float) or ROTARY_BASE)
        return PositionConfig(kind="rotary", origin=defaults.origin, rotary_base=base)
    kind: Literal["learned_1d", "none"] = "learned_1d" if "pos_embed" in shapes else "none"
    origin: InterpolationOrigin = "dinov2-registers" if defaults.origin == "dinov2" and registers else defaults.origin
    return PositionConfig(kind=kind, covers=covers, origin=origin)


def _grid(
    shapes: Shapes,
    metadata: FileMetadata,
    defaults: Defaults,
    *,
    cell: tuple[int, int],
    class_tokens: int,
    registers: int,
) -> tuple[tuple[int, int], Literal["all", "patches"]]:
    """Infer rows and columns of patches, and which tokens have positions."""
    image = get_image_size(metadata)
    expected = (image[0] // cell[0], image[1] // cell[1]) if image else None
    if "pos_embed" not in shapes:
        return expected or (max(1, 224 // cell[0]), max(1, 224 // cell[1])), "all"
    if defaults.rotary:
        raise WeightsError(
            "unsupported model: it has both rotary and learned positions", hint="vitkit does not implement it"
        )
    rows = get_shape(shapes, "pos_embed", axes=3)[1]
    all_tokens = class_tokens + registers
    choices = {"all": (class_tokens,), "all_or_patches": (class_tokens, 0), "by_registers": (all_tokens, 0)}
    prefixes = choices[defaults.rows]
    no_class_rows = get_setting(metadata, "no_embed_class", bool)
    if defaults.rows == "by_registers" and (no_class_rows or (no_class_rows is None and registers)):
        prefixes = (0,) if no_class_rows else (0, all_tokens)
    counts = [(prefix, rows - prefix, math.isqrt(max(rows - prefix, 0))) for prefix in prefixes]
    fitting = [(prefix, expected) for prefix, patches, _ in counts if expected and math.prod(expected) == patches]
    square = [(prefix, (side, side)) for prefix, patches, side in counts if side and side**2 == patches]
    for prefix, grid in (*fitting, *square):
        return grid, "all" if prefix or not class_tokens else "patches"
    raise WeightsError(
        "the position table does not have a square grid",
        expected=f"{' or '.join(map(str, prefixes))} rows and a square number",
        got=f"{rows} rows",
        hint='add a config.json with "model_args": {"img_size": [height, width]}',
    )
