"""A model goes in, the `config.json` with which timm makes it comes out; and what such a file says of a model.

timm names one of its architectures and, under `model_args`, what differs from it.
"""

from collections.abc import Mapping
from typing import Any, Literal

from vitkit.checkpoints.formats.format import About
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import pair
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

Pooling = Literal["class", "mean", "map"]
POOLINGS: dict[str, Pooling] = {"token": "class", "avg": "mean", "map": "map"}
_TIMM_POOL = {pooling: name for name, pooling in POOLINGS.items()}


# What it says


def told(about: About, key: str, kind: type) -> Any:
    """What a config.json says, in `model_args` first; None where it does not."""
    config, kinds = about.config, (float, int) if kind is float else (kind,)
    for part in (config.get("model_args"), config, config.get("pretrained_cfg")):
        if isinstance(part, Mapping) and part.get(key) is not None:
            value = part[key]
            if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
                raise WeightsError(f"config.json: {key} is not what it should be", expected=kind.__name__, got=value)
            return value
    return None


def image_size_told(about: About) -> tuple[int, int] | None:
    """Height and width of the images, if a config.json says so."""
    if not isinstance(about.config.get("model_args"), Mapping | None):
        raise WeightsError("config.json: model_args is not what it should be", expected="names and values")
    args = about.config.get("model_args") or {}
    asked = args.get("img_size")
    if asked is None:
        whole = told(about, "input_size", list)
        asked = whole[1:] if whole else None
    if asked is None:
        return None
    sides = [asked, asked] if isinstance(asked, int) else asked
    are_sides = isinstance(sides, list | tuple) and all(type(side) is int and side > 0 for side in sides)
    if not are_sides or len(sides) != 2:
        raise WeightsError("config.json: no such image size", expected="[height, width]", got=asked)
    return sides[0], sides[1]


# What we write

ARCHITECTURES: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
"""timm's hybrids, by the units of their ResNet."""
RESNETS: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {
    (3, 4, 6, 3): ("50", (1, 3)),
    (3, 4, 23, 3): ("101", (1, 3)),
    (3, 8, 36, 3): ("152", (2, 4)),
}
"""timm's BiT ResNets, by their units: the name, and the width factors."""


def timm_config(config: ModelConfig) -> dict[str, object]:
    """The config.json with which timm makes the same model: one of its architectures, with all that differs from it.

    >>> timm_config(ViTConfig(classes=10))["architecture"]
    'vit_base_patch16_224'
    """
    height, width = pair(config.image_size)
    args: dict[str, object] = {"in_chans": config.channels}
    if isinstance(config, BiTConfig):
        name, factors = RESNETS.get(config.units, ("", ()))
        architecture = f"resnetv2_{name}x{config.width_factor}_bit" if config.width_factor in factors else None
        pool, features = "avg", config.width
    else:
        architecture, pool, features = _architecture(config), _TIMM_POOL[config.pooling], config.width
        args |= model_args(config)
    if architecture is None:
        raise WeightsError("timm has no ResNet of this kind to name", hint="its classes can still hold the weights")
    return {
        "architecture": architecture,
        "num_classes": config.classes,
        "num_features": features,
        "global_pool": pool,
        "model_args": args | {"num_classes": config.classes},
        "pretrained_cfg": {"input_size": [config.channels, height, width], "num_classes": config.classes},
    }


def _architecture(config: ViTConfig) -> str | None:
    if config.tokens.distillation:
        return "deit_base_distilled_patch16_224" if config.backbone is None else None
    if config.backbone:
        named = ARCHITECTURES.get(config.backbone.units) if config.backbone.root_width == 64 else None
        return named if config.block.activation != "swiglu" else None
    return "vit_giant_patch14_dinov2" if config.block.activation == "swiglu" else "vit_base_patch16_224"


def model_args(config: ViTConfig) -> dict[str, object]:
    """The arguments of timm's VisionTransformer that make this model, but for the classes of its layers.

    >>> model_args(ViTConfig())["mlp_ratio"]
    4.0
    """
    block, gated = config.block, config.block.activation == "swiglu"
    hidden = config.mlp_dim * (2 if gated else 1)  # timm counts gate and values together
    ratio = hidden / config.width
    args: dict[str, object] = {
        "img_size": list(pair(config.image_size)),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        # Half a unit more where rounding down would lose one.
        "mlp_ratio": ratio if int(config.width * ratio) == hidden else (hidden + 0.5) / config.width,
        "global_pool": _TIMM_POOL[config.pooling],
        "class_token": config.class_tokens > 0,
        "fc_norm": config.head.norm == "after_pooling",
        "qkv_bias": block.attention.qkv_bias,
        "qk_norm": block.attention.qk_norm,
        "init_values": block.layer_scale,
        "reg_tokens": config.tokens.registers,
        "no_embed_class": config.placed_prefix == 0,
        "pos_embed": "learn" if config.positions.is_additive else "none",
        "pool_include_prefix": config.pooling == "map" and config.prefix > 0,
    }
    if not gated:
        args["act_layer"] = "gelu_tanh" if block.activation == "gelu_tanh" else "gelu"
    return args
