"""Names and shapes as timm and its relatives have them go in, the configuration of the model comes out.

What names and shapes do not say (heads, the shape of the image, the form of GELU) is in timm's `config.json`, as
`model_args` beside the name of an `architecture`, or else what the models of that origin usually are.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitkit.checkpoints.formats.format import About
from vitkit.checkpoints.formats.sizes import shape_of, size_of
from vitkit.checkpoints.formats.timm_config import POOLINGS, Pooling, image_size_told, told
from vitkit.checkpoints.mapping import Shapes
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import Activation, BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resample import Origin
from vitkit.model.resnet import BackboneConfig, BiTConfig

ROTARY_BASE = 100.0
DINOV3_EPS = 1e-5
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 4096: 32}
"""Heads that are not 64 wide, by the width of the models they are in."""
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")
FOREIGN = {
    r"rope\..*": "learned rotary positions",
    r"norm_pre\..*": "a norm before its blocks, as CLIP has",
    r"patch_embed\.norm\..*": "a norm after its patches",
    r".*(relative_position|rel_pos).*": "relative position biases, as BEiT has",
    r"blocks\.\d+\.(attn|mlp)\.norm\..*": "norms inside its blocks, as EVA-02 has",
    r"blocks\.\d+\.attn\.[qkv]_proj\..*": "projections of queries, keys and values apart, as EVA has",
    r"blocks\.\d+\.\D+\.\d+\..*": "blocks in parallel",
}
"""Names that give a model away that we do not have."""
FOREIGN_ARCHITECTURES = r"eva02|rope|beit|_xp_|intern"
"""And timm's architectures whose names of tensors do not."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the models of an origin are, where a file does not say.

    `rows` says for which tokens in front of the patches the position table has rows: all class tokens, all of them or
    none, or as timm does, where registers usually mean none.
    """

    origin: Origin
    rows: Literal["all", "all_or_patches", "by_registers"] = "all"
    rotary: bool = False
    eps: float = 1e-6


def plain(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By timm's name, what the file calls a tensor and its shape: no prefix before it, and blocks in one row.

    >>> plain({"module.patch_embed.proj.bias": (8,), "module.patch_embed.proj.weight": (8, 3, 4, 4)}).keys()
    dict_keys(['patch_embed.proj.bias', 'patch_embed.proj.weight'])
    """
    anchor = "patch_embed.proj.weight"
    found = [name.removesuffix(anchor) for name in shapes if name == anchor or name.endswith(f".{anchor}")]
    prefix = found[0] if len(found) == 1 else ""
    return {
        # DINOv2 in training keeps its blocks in chunks: blocks.chunk.layer, the layer counted through.
        re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name.removeprefix(prefix)): (name, shape)
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def holds_bit(shapes: Shapes) -> bool:
    """Whether these are the names of a BiT ResNet."""
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight", "norm.weight"} <= shapes.keys()


def habitual_heads(width: int, *, gated: bool = False) -> int | None:
    """The heads that published models of a width have, None where there is none.

    >>> habitual_heads(768), habitual_heads(1280), habitual_heads(1536, gated=True), habitual_heads(100)
    (12, 16, 24, None)
    """
    if width == 1536:
        return 24 if gated else 16  # DINOv2's giant, and SigLIP 2's
    return HEADS.get(width) or (width // 64 if width % 64 == 0 else None)


# Names and shapes to a configuration


def vit(shapes: Shapes, about: About, *, habits: Habits) -> ViTConfig:
    """The Vision Transformer that plain names and shapes tell of."""
    _check_foreign(shapes, about, habits)
    stem = shape_of(shapes, "patch_embed.proj.weight", axes=4)
    backbone = _backbone(shapes)
    stride = backbone.stride if backbone else 1
    cell = (stride * stem[2], stride * stem[3])
    registers = next((shapes[name][1] for name in REGISTERS if len(shapes.get(name, ())) == 3), 0)
    class_tokens = int("cls_token" in shapes) + int("dist_token" in shapes)
    pooling = _pooling(shapes, about, habits)
    _check_pooled(pooling, about, prefix=class_tokens + registers)
    grid, covers = _grid(shapes, about, habits, cell=cell, class_tokens=class_tokens, registers=registers)
    block, mlp_dim = _block(shapes, about, habits)
    try:
        return ViTConfig(
            image_size=size_of(*(grid[0] * cell[0], grid[1] * cell[1])),
            patch_size=size_of(*(stem[2], stem[3])),
            channels=_channels(shapes, stem),
            width=stem[0],
            depth=_depth(shapes),
            heads=_heads(shapes, about, habits, width=stem[0], gated=block.activation == "swiglu"),
            mlp_dim=mlp_dim,
            classes=shape_of(shapes, "head.weight", axes=2)[0] if "head.weight" in shapes else 0,
            pooling=pooling,
            backbone=backbone,
            positions=_positions(shapes, about, habits, covers=covers, registers=registers),
            tokens=TokenConfig(
                class_token=True if "cls_token" in shapes and pooling != "class" else None,
                distillation="dist_token" in shapes,
                registers=registers,
            ),
            block=block,
            head=_head(shapes),
        )
    except ConfigError as error:
        raise WeightsError(f"the file holds no model that can be: {error.message}", hint=error.hint) from error


def bit(shapes: Shapes, about: About) -> BiTConfig:
    """The BiT ResNet that names and shapes tell of."""
    stem = shape_of(shapes, "stem.conv.weight", axes=4)
    try:
        return BiTConfig(
            units=_units(shapes, "stages"),
            width_factor=stem[0] // 64,
            channels=stem[1],
            image_size=size_of(*(image_size_told(about) or (224, 224))),
            classes=shape_of(shapes, "head.fc.weight", axes=4)[0] if "head.fc.weight" in shapes else 0,
            origin="timm",
        )
    except ConfigError as error:
        raise WeightsError(f"the file holds no ResNet that can be: {error.message}", hint=error.hint) from error


def _check_foreign(shapes: Shapes, about: About, habits: Habits) -> None:
    """Refuse models that have the names of ours, or nearly, and compute something else."""
    hint = "vitkit has no such model"
    for name in shapes:
        for pattern, reason in FOREIGN.items():
            if re.fullmatch(pattern, name):
                raise WeightsError(f"the model in the file has {reason}: {name}", hint=hint)
    architecture = told(about, "architecture", str)
    if architecture and re.search(FOREIGN_ARCHITECTURES, architecture):
        raise WeightsError(f"the model in the file is timm's {architecture}", hint=hint)
    if habits.rotary and ("blocks.0.gamma_1" in shapes or "blocks.0.attn.q_bias" in shapes):
        looks_it = {"cls_token", "reg_token", "norm.weight"} <= shapes.keys() and "blocks.0.attn.qkv.bias" not in shapes
        if not ("dinov3" in architecture if architecture else looks_it):
            raise WeightsError("the model in the file has rotary positions that are not DINOv3's", hint=hint)


def _channels(shapes: Shapes, stem: Sequence[int]) -> int:
    root = shapes.get("patch_embed.backbone.stem.conv.weight") or shapes.get("patch_embed.backbone.conv.weight")
    return root[1] if root and len(root) == 4 else stem[1]


def _depth(shapes: Shapes) -> int:
    """How many blocks there are; each is seen, so that no name can ask for more than the file holds."""
    layers = {int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d{1,9})\.", name))}
    if layers != set(range(len(layers))):
        missing = min(set(range(len(layers))) - layers)
        raise WeightsError(f"the file has no block {missing}, but later ones", hint="it is incomplete")
    return len(layers)


def _units(shapes: Shapes, stages: str) -> tuple[int, ...]:
    """How many units each stage of a ResNet has."""
    pattern = re.compile(re.escape(stages) + r"\.(\d{1,9})\.blocks\.(\d{1,9})\.conv1\.weight")
    found = {(int(match[1]), int(match[2])) for name in shapes if (match := pattern.fullmatch(name))}
    count = len({stage for stage, _ in found})
    units = tuple(sum(place == stage for place, _ in found) for stage in range(count))
    if found != {(stage, unit) for stage in range(count) for unit in range(units[stage])}:
        raise WeightsError("the file has ResNet stages or units missing", hint="it is incomplete")
    return units


def _backbone(shapes: Shapes) -> BackboneConfig | None:
    start = "patch_embed.backbone."
    if not any(name.startswith(start) for name in shapes):
        return None
    units = _units(shapes, f"{start}stages")
    root = f"{start}stem.conv.weight" if units else f"{start}conv.weight"
    if root not in shapes:
        raise WeightsError("the ResNet under the model is none of the paper's", hint="vitkit has no such hybrid")
    try:
        return BackboneConfig(units=units, root_width=shape_of(shapes, root, axes=4)[0], origin="timm")
    except ConfigError as error:
        raise WeightsError(f"the file holds no ResNet that can be: {error.message}") from error


def _head(shapes: Shapes) -> HeadConfig:
    after = "fc_norm.weight" in shapes
    if after == ("norm.weight" in shapes):
        raise WeightsError(
            "the last norm stands before pooling or after it",
            expected="norm or fc_norm",
            got="both" if after else "neither",
        )
    hidden = shape_of(shapes, "pre_logits.fc.weight", axes=2)[0] if "pre_logits.fc.weight" in shapes else None
    return HeadConfig(pre_logits=hidden, norm="after_pooling" if after else "before_pooling")


def _block(shapes: Shapes, about: About, habits: Habits) -> tuple[BlockConfig, int]:
    """What a block is made of, and the width of its MLP."""
    names = {name.removeprefix("blocks.0.") for name in shapes if name.startswith("blocks.0.")}
    last = "mlp.w3.weight" if "mlp.w3.weight" in names else "mlp.fc2.weight"
    mlp_dim = shape_of(shapes, f"blocks.0.{last}", axes=2)[1]
    gated = "mlp.fc1.weight" not in names or shapes["blocks.0.mlp.fc1.weight"][:1] == (2 * mlp_dim,)
    if gated and "attn.q_bias" in names and not habits.rotary:
        raise WeightsError(
            "the model has both rotary and learned positions, as EVA-02", hint="vitkit has no such model"
        )
    scaled = bool({"ls1.gamma", "gamma_1"} & names)
    block = BlockConfig(
        attention=AttentionConfig(
            qkv_bias=bool({"attn.qkv.bias", "attn.q_bias"} & names), qk_norm="attn.q_norm.weight" in names
        ),
        activation="swiglu" if gated else _activation(about),
        norm_eps=habits.eps,
        layer_scale=(told(about, "init_values", float) or 1e-5) if scaled else None,
    )
    return block, mlp_dim


def _activation(about: About) -> Activation:
    architecture = told(about, "architecture", str) or ""
    usual = (
        "gelu_tanh" if re.search(r"siglip.*_512|(patch32|so400m_patch16|giantopt).*siglip", architecture) else "gelu"
    )
    asked = told(about, "act_layer", str) or ("quick_gelu" if "quickgelu" in architecture else usual)
    activations: dict[str, Activation] = {"gelu": "gelu_erf", "gelu_erf": "gelu_erf", "gelu_tanh": "gelu_tanh"}
    if asked not in activations:
        raise WeightsError("the model has another activation", expected="gelu or gelu_tanh", got=asked)
    return activations[asked]


def _heads(shapes: Shapes, about: About, habits: Habits, *, width: int, gated: bool) -> int:
    if "rope_embed.periods" in shapes:  # one for each quarter of a head
        return max(1, width // (4 * shape_of(shapes, "rope_embed.periods", axes=1)[0]))
    usual = width // 64 if habits.rotary and width in (1280, 1536) else habitual_heads(width, gated=gated)
    if (told(about, "architecture", str) or "").startswith("vit_base_patch16_gap_224"):
        usual = 16
    heads = told(about, "num_heads", int) or usual
    if heads is None:
        raise WeightsError(
            f"the file does not say how many heads share its width of {width}",
            hint='put a config.json beside it, with "model_args": {"num_heads": …}',
        )
    return heads


def _pooling(shapes: Shapes, about: About, habits: Habits) -> Pooling:
    if asked := told(about, "global_pool", str):
        if asked not in POOLINGS:
            raise WeightsError("the model pools in another way", expected=" or ".join(POOLINGS), got=asked)
        return POOLINGS[asked]
    if "attn_pool.latent" in shapes:
        return "map"
    # timm's DINOv3 models average by default; Meta's read the class token.
    averaged = "fc_norm.weight" in shapes or (habits.rotary and "blocks.0.gamma_1" in shapes)
    return "mean" if averaged or "cls_token" not in shapes else "class"


def _check_pooled(pooling: Pooling, about: About, *, prefix: int) -> None:
    """Attention pooling sees all tokens with us, and averaging none but patches; timm can do both ways."""
    everything = told(about, "pool_include_prefix", bool) or False
    if pooling != "class" and prefix and everything != (pooling == "map"):
        raise WeightsError(
            "the model pools other tokens than ours",
            expected=f"pool_include_prefix = {str(pooling == 'map').lower()} in its config.json",
            got=str(everything).lower(),
        )


def _positions(shapes: Shapes, about: About, habits: Habits, *, covers: Any, registers: int) -> PositionConfig:
    if habits.rotary:
        base = float(told(about, "rope_temperature", float) or ROTARY_BASE)
        return PositionConfig(kind="rotary", origin=habits.origin, rotary_base=base)
    kind: Literal["learned_1d", "none"] = "learned_1d" if "pos_embed" in shapes else "none"
    origin: Origin = "dinov2-registers" if habits.origin == "dinov2" and registers else habits.origin
    return PositionConfig(kind=kind, covers=covers, origin=origin)


def _grid(
    shapes: Shapes, about: About, habits: Habits, *, cell: tuple[int, int], class_tokens: int, registers: int
) -> tuple[tuple[int, int], Literal["all", "patches"]]:
    """Rows and columns of patches, and which tokens have positions."""
    image = image_size_told(about)
    asked = (image[0] // cell[0], image[1] // cell[1]) if image else None
    if "pos_embed" not in shapes:
        return asked or (max(1, 224 // cell[0]), max(1, 224 // cell[1])), "all"
    if habits.rotary:
        raise WeightsError("the model has both rotary and learned positions", hint="vitkit has no such model")
    rows = shape_of(shapes, "pos_embed", axes=3)[1]
    everything = class_tokens + registers
    choices = {"all": (class_tokens,), "all_or_patches": (class_tokens, 0), "by_registers": (everything, 0)}
    prefixes = choices[habits.rows]
    bare = told(about, "no_embed_class", bool)
    if habits.rows == "by_registers" and (bare or (bare is None and registers)):
        prefixes = (0,) if bare else (0, everything)
    counts = [(prefix, rows - prefix, math.isqrt(max(rows - prefix, 0))) for prefix in prefixes]
    fitting = [(prefix, asked) for prefix, patches, _ in counts if asked and math.prod(asked) == patches]
    square = [(prefix, (side, side)) for prefix, patches, side in counts if side and side**2 == patches]
    for prefix, grid in (*fitting, *square):
        return grid, "all" if prefix or not class_tokens else "patches"
    raise WeightsError(
        "the position table is not that of a square image",
        expected=f"{' or '.join(map(str, prefixes))} rows and a square number",
        got=f"{rows} rows",
        hint='put a config.json beside the file, with "model_args": {"img_size": [height, width]}',
    )
