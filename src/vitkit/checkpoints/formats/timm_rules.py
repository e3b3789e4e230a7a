"""A model and the names in a file of timm's or of a relative's go in, the rule table between the two comes out.

timm, DeiT, MAE, DINOv2 and DINOv3 name their tensors alike, and we as they do. What differs is a `Spelling`: the names
of registers, LayerScale and gated MLPs, and where biases and positions lie.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vitkit.checkpoints.formats.timm_models import plain
from vitkit.checkpoints.mapping import SAME, Layout, Rule, Shapes, Tensors, joined, rearranged, same
from vitkit.core.errors import WeightsError
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a file spells what timm's relatives spell each in their own way.

    `gated` and `last` are the layers of a SwiGLU. Biases of queries, keys and values are one tensor, one with a `mask`
    that takes the keys' away, or one for queries and one for values. With `register_rows` the position table has rows
    for registers too. `mask_token` and `periods` stand in files though no image needs them.
    """

    registers: str = "reg_token"
    scale: str = r"ls\2.gamma"
    gated: tuple[str, ...] = ("fc1",)
    last: str = "fc2"
    bias: tuple[str, ...] = ("qkv.bias",)
    register_rows: bool = False
    mask_token: bool = False
    periods: bool = False


TIMM_SPELLING = Spelling(register_rows=True)
DEIT_SPELLING = Spelling(scale=r"gamma_\2")
DINOV2_SPELLING = Spelling(registers="register_tokens", gated=("w12",), last="w3", mask_token=True)
DINOV3_SPELLING = Spelling(
    registers="storage_tokens",
    gated=("w1", "w2"),
    last="w3",
    bias=("qkv.bias", "qkv.bias_mask"),
    mask_token=True,
    periods=True,
)
GATED = {("w12",): "w3", ("w1", "w2"): "w3", ("fc1_g", "fc1_x"): "fc2", ("fc1",): "fc2"}
BIASES = (("qkv.bias", "qkv.bias_mask"), ("q_bias", "v_bias"), ("qkv.bias",))


def spelling(shapes: Shapes, config: ViTConfig) -> Spelling:
    """How a file spells things, told from its plain names.

    >>> config = ViTConfig(image_size=32, width=64, depth=1, heads=1, mlp_dim=128)
    >>> spelling({"storage_tokens": (1, 4, 64), "blocks.0.gamma_1": (64,)}, config).scale
    'gamma_\\\\2'
    """
    block = "blocks.0."
    gated = next((names for names in GATED if f"{block}mlp.{names[0]}.weight" in shapes), ("fc1",))
    rows = config.placed_prefix + config.tokens.registers + config.patches
    return Spelling(
        registers=next((name for name in ("storage_tokens", "register_tokens") if name in shapes), "reg_token"),
        scale=r"gamma_\2" if f"{block}gamma_1" in shapes else r"ls\2.gamma",
        gated=gated,
        last=GATED[gated],
        bias=next((names for names in BIASES if f"{block}attn.{names[-1]}" in shapes), ("qkv.bias",)),
        register_rows=config.tokens.registers > 0 and shapes.get("pos_embed", (0, 0))[1] == rows,
        mask_token=len(shapes.get("mask_token", ())) == 2,
        periods="rope_embed.periods" in shapes,
    )


# Rules


def rules(config: ModelConfig, shapes: Shapes | None, *, written: Spelling) -> list[Rule]:
    """The table of a model, as a file of these shapes spells it, or as we write it.

    >>> config = ViTConfig(image_size=32, width=64, depth=1, heads=1, mlp_dim=128)
    >>> rules(config, None, written=TIMM_SPELLING)[0].theirs
    ('cls_token',)
    """
    if isinstance(config, BiTConfig):
        raise WeightsError("the format holds Vision Transformers only", got="a ResNet")
    in_file = plain(shapes or {})
    known = {name: shape for name, (_, shape) in in_file.items()}
    # Where registers are the only tokens in front, timm's own models give them no rows.
    written = written if config.placed_prefix else replace(written, register_rows=False)
    spelled = spelling(known, config) if shapes is not None else written
    names = list(create(config, device="meta").state_dict())
    special = _special(config, spelled, names)
    claimed = {name for rule in special for name in rule.ours}
    table = _renames(config, spelled)
    rest = [same(name, _renamed(name, table)) for name in names if name not in claimed]
    prefix = next((full.removesuffix(name) for name, (full, _) in in_file.items() if full.endswith(name)), "")

    def located(rule: Rule) -> Rule:
        theirs = (in_file[name][0] if name in in_file else prefix + name for name in rule.theirs)
        return replace(rule, theirs=tuple(theirs))

    return [located(rule) for rule in (*special, *rest)]


def _special(config: ViTConfig, spelled: Spelling, names: Sequence[str]) -> list[Rule]:
    """The rules of tensors that lie otherwise in the file than in ours."""
    special = []
    placed, registers = config.placed_prefix, config.tokens.registers
    if spelled.register_rows and registers and "pos_embed" in names:
        pair = ("reg_token", "pos_embed")
        special.append(Rule(pair, (spelled.registers, "pos_embed"), _register_rows(placed, registers)))
    if spelled.mask_token and "cls_token" in names:
        special.append(Rule(("cls_token",), ("cls_token", "mask_token"), WITH_MASK_TOKEN))
    if spelled.periods:
        quarter = config.head_width // 4
        special.append(Rule((), ("rope_embed.periods",), _periods(config.positions.rotary_base, quarter)))
    for layer in range(config.depth):
        block = f"blocks.{layer}."
        if config.block.attention.qkv_bias and len(spelled.bias) == 2:
            layout = MASKED_BIAS if "mask" in spelled.bias[1] else BIAS_APART
            theirs = tuple(f"{block}attn.{name}" for name in spelled.bias)
            special.append(Rule((f"{block}attn.qkv.bias",), theirs, layout))
        if config.block.activation == "swiglu" and len(spelled.gated) == 2:
            special += [
                Rule(
                    (f"{block}mlp.fc1.{kind}",),
                    tuple(f"{block}mlp.{name}.{kind}" for name in spelled.gated),
                    joined(SAME, 2),
                )
                for kind in ("weight", "bias")
            ]
    return special


def _renames(config: ViTConfig, spelled: Spelling) -> dict[str, str]:
    """Patterns of our names, and what the file calls them."""
    table = {
        r"reg_token": spelled.registers,
        r"(blocks\.\d+)\.ls(\d)\.gamma": rf"\1.{spelled.scale}",
        r"head\.label\.(.+)": r"head.\1",
        r"head\.teacher\.(.+)": r"head_dist.\1",
    }
    if config.block.activation == "swiglu":
        table[r"(blocks\.\d+)\.mlp\.fc1\.(.+)"] = rf"\1.mlp.{spelled.gated[0]}.\2"
        table[r"(blocks\.\d+)\.mlp\.fc2\.(.+)"] = rf"\1.mlp.{spelled.last}.\2"
    if config.backbone and not config.backbone.units:
        table[r"patch_embed\.backbone\.stem\.(.+)"] = r"patch_embed.backbone.\1"
    return table


def _renamed(name: str, table: Mapping[str, str]) -> str:
    return next((match.expand(theirs) for ours, theirs in table.items() if (match := re.fullmatch(ours, name))), name)


def bit_rules(config: BiTConfig) -> list[Rule]:
    """The table of a BiT ResNet: timm's head is a convolution of one pixel.

    >>> bit_rules(BiTConfig(units=(1,)))[-1].theirs
    ('head.fc.bias',)
    """
    heads = {"head.weight": "head.fc.weight", "head.bias": "head.fc.bias"}
    pixel = rearranged("classes width 1 1", "classes width")
    return [
        Rule((name,), (heads.get(name, name),), pixel if name == "head.weight" else SAME)
        for name in create(config, device="meta").state_dict()
    ]


# Layouts


def _register_rows(placed: int, registers: int) -> Layout:
    """Registers with positions of their own: timm adds the two, so their sum is the register; we write zeros."""

    def read(theirs: Tensors) -> Tensors:
        tokens, table = theirs
        before, own, patches = table.split([placed, registers, table.shape[1] - placed - registers], dim=1)
        return [tokens + own, torch.cat([before, patches], dim=1)]

    def write(ours: Tensors) -> Tensors:
        tokens, table = ours
        before, patches = table.split([placed, table.shape[1] - placed], dim=1)
        return [tokens, torch.cat([before, torch.zeros_like(tokens), patches], dim=1)]

    return Layout(read, write)


def _with_mask_token(ours: Tensors) -> Tensors:
    return [ours[0], torch.zeros_like(ours[0][0])]


WITH_MASK_TOKEN = Layout(lambda theirs: theirs[:1], _with_mask_token)
"""The token that stood for hidden patches in training: not ours, but their loader misses it."""


def _keys_masked(ours: Tensors) -> Tensors:
    """A bias and its mask, zero over the keys where they have no bias."""
    bias = ours[0]
    queries, keys, values = torch.ones_like(bias).chunk(3)
    keys = keys * (bias.chunk(3)[1] != 0).any()
    return [bias, torch.cat([queries, keys, values])]


MASKED_BIAS = Layout(lambda theirs: [theirs[0] * theirs[1].to(theirs[0].dtype)], _keys_masked)


def _without_keys(ours: Tensors) -> Tensors:
    queries, keys, values = ours[0].chunk(3)
    if keys.any():
        raise WeightsError("the file has no place for a bias of keys", hint="write it in another format")
    return [queries, values]


BIAS_APART = Layout(lambda theirs: [torch.cat([theirs[0], torch.zeros_like(theirs[0]), theirs[1]])], _without_keys)


def _periods(base: float, quarter: int) -> Layout:
    """Rotary periods are a formula in our model; a file that holds others is refused."""
    expected = base ** (torch.arange(quarter, dtype=torch.float32) / quarter)

    def read(theirs: Tensors) -> Tensors:
        found = theirs[0].float()
        # A hundredth, because the published files hold them in bfloat16.
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2, atol=0.0):
            raise WeightsError(
                "the rotary periods are not those of the model",
                expected=f"{quarter} from 1, of base {base:g}",
                got=", ".join(f"{period:g}" for period in found.flatten()[:4].tolist()) + " …",
            )
        return []

    return Layout(read, lambda _: [expected])
