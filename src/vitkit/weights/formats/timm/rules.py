"""Rules between our tensors and those of timm, DeiT, MAE, DINOv2 and DINOv3.

Most names are the same as ours. A `TimmNames` has the differences: registers, LayerScale, gated MLPs, qkv biases and
positions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vitkit.core.errors import WeightsError
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.weights.formats.base import require_vit
from vitkit.weights.formats.timm.infer import normalize_names
from vitkit.weights.rules import (
    IDENTITY,
    Conversion,
    Rule,
    Shapes,
    Tensors,
    layer_rules,
    rearrange_axes,
    rename,
    sum_register_positions,
)
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TimmNames:
    """Names that differ between files.

    Attributes:
        gated, last: Layers of a SwiGLU.
        bias: One tensor for queries, keys and values; one and a mask for the keys; or one each for queries and values.
        register_rows: The position table has rows for registers.
        mask_token, periods: The file has these tensors, which inference does not need.
    """

    registers: str = "reg_token"
    scale: str = r"ls\2.gamma"
    gated: tuple[str, ...] = ("fc1",)
    last: str = "fc2"
    bias: tuple[str, ...] = ("qkv.bias",)
    register_rows: bool = False
    mask_token: bool = False
    periods: bool = False


BIASES = (("qkv.bias", "qkv.bias_mask"), ("q_bias", "v_bias"), ("qkv.bias",))
TIMM_NAMES = TimmNames(register_rows=True)
TIMM_ROTARY_NAMES = TimmNames(scale=r"gamma_\2", gated=("fc1_g", "fc1_x"))
DEIT_NAMES = TimmNames(scale=r"gamma_\2")
DINOV2_NAMES = TimmNames(registers="register_tokens", gated=("w12",), last="w3", mask_token=True)
DINOV3_NAMES = TimmNames(
    registers="storage_tokens", gated=("w1", "w2"), last="w3", bias=BIASES[0], mask_token=True, periods=True
)
GATED = {("w12",): "w3", ("w1", "w2"): "w3", ("fc1_g", "fc1_x"): "fc2", ("fc1",): "fc2"}


def detect_naming(shapes: Shapes, config: ViTConfig) -> TimmNames:
    """Detect the naming scheme of a file by its normalized names."""
    gated = next((names for names in GATED if f"blocks.0.mlp.{names[0]}.weight" in shapes), ("fc1",))
    rows = config.prefix_positions + config.tokens.registers + config.patches
    return TimmNames(
        registers=next((name for name in ("storage_tokens", "register_tokens") if name in shapes), "reg_token"),
        scale=r"gamma_\2" if "blocks.0.gamma_1" in shapes else r"ls\2.gamma",
        gated=gated,
        last=GATED[gated],
        bias=next((names for names in BIASES if f"blocks.0.attn.{names[-1]}" in shapes), ("qkv.bias",)),
        register_rows=config.tokens.registers > 0 and shapes.get("pos_embed", (0, 0))[1] == rows,
        mask_token=len(shapes.get("mask_token", ())) == 2,
        periods="rope_embed.periods" in shapes,
    )


# Rules


def make_vit_rules(config: ModelConfig, shapes: Shapes | None, *, default: TimmNames) -> list[Rule]:
    """Make the rules of a model, with the names of a file or, without one, with `default`."""
    config, in_file = require_vit(config), normalize_names(shapes or {})
    normalized = {name: shape for name, (_, shape) in in_file.items()}
    default = default if config.positions.covers == "all" else replace(default, register_rows=False)
    naming = detect_naming(normalized, config) if shapes is not None else default
    names = list(create(config, device="meta").state_dict())
    special = _make_special_rules(config, naming, names)
    covered = {name for rule in special for name in rule.ours}
    patterns = _rename_patterns(config, naming)
    rest = [rename(name, _rename_tensor(name, patterns)) for name in names if name not in covered]
    prefix = next((full.removesuffix(name) for name, (full, _) in in_file.items() if full.endswith(name)), "")

    def locate(rule: Rule) -> Rule:
        theirs = (in_file[name][0] if name in in_file else prefix + name for name in rule.theirs)
        return replace(rule, theirs=tuple(theirs))

    return [locate(rule) for rule in (*special, *rest)]


def _make_special_rules(config: ViTConfig, naming: TimmNames, names: Sequence[str]) -> list[Rule]:
    """Make the rules of tensors that are stored in another way than ours."""
    special = []
    prefix_rows, registers = config.prefix_positions, config.tokens.registers
    if naming.register_rows and registers and "pos_embed" in names:
        pair = ("reg_token", "pos_embed")
        special.append(Rule(pair, (naming.registers, "pos_embed"), sum_register_positions(prefix_rows, registers)))
    if naming.mask_token and "cls_token" in names:
        special.append(Rule(("cls_token",), ("cls_token", "mask_token"), WITH_MASK_TOKEN))
    if naming.periods:
        quarter = config.head_width // 4
        special.append(Rule((), ("rope_embed.periods",), _periods(config.positions.rotary_base, quarter)))
    for layer in range(config.depth):
        block = f"blocks.{layer}."
        if config.block.attention.qkv_bias and len(naming.bias) == 2:
            conversion = MASKED_BIAS if "mask" in naming.bias[1] else SPLIT_BIAS
            theirs = tuple(f"{block}attn.{name}" for name in naming.bias)
            special.append(Rule((f"{block}attn.qkv.bias",), theirs, conversion))
        if config.block.activation == "swiglu" and len(naming.gated) == 2:
            special += layer_rules(f"{block}mlp.fc1", *(f"{block}mlp.{name}" for name in naming.gated))
    return special


def _rename_patterns(config: ViTConfig, naming: TimmNames) -> dict[str, str]:
    """Make the patterns of our names and their replacements."""
    table = {
        r"reg_token": naming.registers,
        r"(blocks\.\d+)\.ls(\d)\.gamma": rf"\1.{naming.scale}",
        r"head\.label\.(.+)": r"head.\1",
        r"head\.teacher\.(.+)": r"head_dist.\1",
    }
    if config.block.activation == "swiglu":
        table[r"(blocks\.\d+)\.mlp\.fc1\.(.+)"] = rf"\1.mlp.{naming.gated[0]}.\2"
        table[r"(blocks\.\d+)\.mlp\.fc2\.(.+)"] = rf"\1.mlp.{naming.last}.\2"
    if config.backbone and not config.backbone.units:
        table[r"patch_embed\.backbone\.stem\.(.+)"] = r"patch_embed.backbone.\1"
    return table


def _rename_tensor(name: str, patterns: Mapping[str, str]) -> str:
    matches = ((re.fullmatch(ours, name), theirs) for ours, theirs in patterns.items())
    return next((match.expand(theirs) for match, theirs in matches if match), name)


def make_bit_rules(config: BiTConfig) -> list[Rule]:
    """Make the rules of a BiT ResNet, whose head is a 1×1 convolution in timm."""
    heads = {"head.weight": "head.fc.weight", "head.bias": "head.fc.bias"}
    pixel = rearrange_axes("classes width 1 1", "classes width")
    return [
        Rule((name,), (heads.get(name, name),), pixel if name == "head.weight" else IDENTITY)
        for name in create(config, device="meta").state_dict()
    ]


# Layouts


WITH_MASK_TOKEN = Conversion(
    lambda theirs: theirs[:1], lambda ours: [ours[0], torch.zeros_like(ours[0][0])], is_lossy=True
)
"""Mask token of training, which vitkit does not have but DINO's loader requires."""


def _add_bias_mask(ours: Tensors) -> Tensors:
    """Return the bias and its mask, which is zero for keys without bias."""
    bias = ours[0]
    queries, keys, values = torch.ones_like(bias).chunk(3)
    keys = keys * (bias.chunk(3)[1] != 0).any()
    return [bias, torch.cat([queries, keys, values])]


MASKED_BIAS = Conversion(lambda theirs: [theirs[0] * theirs[1].to(theirs[0].dtype)], _add_bias_mask, is_lossy=True)


def _drop_key_bias(ours: Tensors) -> Tensors:
    queries, keys, values = ours[0].chunk(3)
    if keys.any():
        raise WeightsError("the format cannot store a bias of keys", hint="choose another format")
    return [queries, values]


SPLIT_BIAS = Conversion(lambda theirs: [torch.cat([theirs[0], torch.zeros_like(theirs[0]), theirs[1]])], _drop_key_bias)


def _periods(base: float, quarter: int) -> Conversion:
    """Make the conversion of rotary periods, which our model computes; other periods are rejected."""
    expected = base ** (torch.arange(quarter, dtype=torch.float32) / quarter)

    def read(theirs: Tensors) -> Tensors:
        periods = theirs[0].float()
        # 1 % because the published files store them in bfloat16.
        if periods.shape != expected.shape or not torch.allclose(periods, expected, rtol=1e-2, atol=0.0):
            got = ", ".join(f"{period:g}" for period in periods.flatten()[:4].tolist()) + " …"
            message = "the rotary periods are not those of the model"
            raise WeightsError(message, expected=f"{quarter} periods with base {base:g}", got=got)
        return []

    return Conversion(read, lambda _: [expected])
