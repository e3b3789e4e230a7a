"""A model goes in, the `config.json` with which timm makes it comes out; and what such a file says of a model.

timm names one of its architectures and, under `model_args`, what differs from it.
"""

from collections.abc import Mapping
from typing import Any, Literal

from vitkit.checkpoints.formats.format import About
from vitkit.core.config import from_mapping
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import pair
from vitkit.data.image_processors import IMAGENET_DEVIATION, IMAGENET_MEAN
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

Pooling = Literal["class", "mean", "map"]
POOLINGS: dict[str, Pooling] = {"token": "class", "avg": "mean", "map": "map"}
_TIMM_POOL = {pooling: name for name, pooling in POOLINGS.items()}
_FEEDING = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")


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


def preprocessing_told(config: Mapping[str, object]) -> Preprocessing | None:
    """What timm feeds a model with this config.json, by its defaults where that is silent; None if it is not timm's.

    >>> told = preprocessing_told({"pretrained_cfg": {"crop_pct": 1.0, "crop_mode": "squash"}})
    >>> told.image_size, told.resize, told.filter
    ((224, 224), 'squash', 'bicubic')
    """
    said = config.get("pretrained_cfg")
    if said is None and "architecture" in config:
        said = {key: config[key] for key in _FEEDING if key in config}  # as the first files have it
    if not said:
        return None
    try:
        return from_mapping(Preprocessing, _fed(said))
    except (ValueError, TypeError, ArithmeticError, ConfigError) as error:
        raise WeightsError(f"config.json: pretrained_cfg asks for what we cannot do: {error}") from error


def _fed(said: Any) -> dict[str, object]:
    """The fields of `Preprocessing`, by the rules of timm's `resolve_data_config` and `create_transform`."""
    if not isinstance(said, Mapping):
        raise TypeError(f"it is {said}")
    channels, height, width = said.get("input_size") or (3, 224, 224)
    share, mode = said.get("crop_pct") or 0.875, said.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise ValueError(f"crop_mode is {mode}, neither center nor squash")
    mean, deviation = said.get("mean") or IMAGENET_MEAN, said.get("std") or IMAGENET_DEVIATION
    squash: dict[str, object] = {"resize": "squash"} if share == 1 else {"resize": "squash_crop", "crop_share": share}
    return {
        "image_size": [height, width],
        "channels": channels if len(mean) == 1 else len(mean),
        **({"resize": "crop", "crop_share": share} if mode == "center" else squash),
        "filter": said.get("interpolation") or "bicubic",
        "mean": mean,
        "deviation": deviation,
    }


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
        pool, features = "avg", config.width
    else:
        pool, features = _TIMM_POOL[config.pooling], config.width
        args |= model_args(config)
    named = architecture(config)
    if named is None:
        raise WeightsError("timm has no ResNet of this kind to name", hint="its classes can still hold the weights")
    return {
        "architecture": named,
        "num_classes": config.classes,
        "num_features": features,
        "global_pool": pool,
        "model_args": args | {"num_classes": config.classes},
        "pretrained_cfg": {"input_size": [config.channels, height, width], "num_classes": config.classes},
    }


def architecture(config: ModelConfig) -> str | None:
    """The one of timm's architectures that comes nearest; None where timm has no such ResNet, or none under a ViT.

    >>> architecture(BiTConfig()), architecture(BiTConfig(width_factor=2))
    ('resnetv2_50x1_bit', None)
    """
    if isinstance(config, BiTConfig):
        name, factors = RESNETS.get(config.units, ("", ()))
        return f"resnetv2_{name}x{config.width_factor}_bit" if config.width_factor in factors else None
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
