"""timm's `config.json`: an architecture and, under `model_args`, the differences from it."""

from collections.abc import Mapping
from typing import Any

from vitkit.core.config import from_mapping
from vitkit.core.errors import ConfigError, WeightsError, summarize
from vitkit.core.sizes import pair
from vitkit.data.image_processors import IMAGENET_MEAN, IMAGENET_STD
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import BiTConfig, Pooling, ViTConfig
from vitkit.weights.formats.base import FileMetadata
from vitkit.zoo.variants import ModelConfig

POOLINGS: dict[str, Pooling] = {"token": "class", "avg": "mean", "map": "map"}
_TIMM_POOL = {pooling: name for name, pooling in POOLINGS.items()}
INTERPRETED_ARGS = {
    *("num_heads", "act_layer", "global_pool", "pool_include_prefix", "img_size", "no_embed_class", "init_values"),
    *("rope_temperature", "pos_embed"),
}
TENSOR_ARGS = {
    *("patch_size", "in_chans", "num_classes", "embed_dim", "depth", "mlp_ratio", "class_token", "fc_norm"),
    *("qkv_bias", "qk_norm", "reg_tokens", "num_reg_tokens", "pre_norm", "final_norm", "swiglu_mlp", "use_fc_norm"),
    *("swiglu_align_to", "attn_type"),
}
"""Arguments of timm's models that the tensors determine too."""
TRAINING_ARGS = {
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("weight_init", "fix_init", "dynamic_img_size", "strict_img_size", "pretrained", "features_only"),
}
"""Arguments of timm's models that do not change what they compute for images of their size."""
_PREPROCESSING_KEYS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")


# Reading


def get_setting(metadata: FileMetadata, key: str, kind: type) -> Any:
    """Return a setting of config.json, from `model_args` first; None if it is absent."""
    config, kinds = metadata.config, (float, int) if kind is float else (kind,)
    for part in (config.get("model_args"), config, config.get("pretrained_cfg")):
        if isinstance(part, Mapping) and part.get(key) is not None:
            value = part[key]
            if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
                raise WeightsError(f"config.json: {key} has the wrong type", expected=kind.__name__, got=value)
            return value
    return None


def check_model_args(metadata: FileMetadata) -> None:
    """Refuse an argument of timm's model that may change what it computes."""
    args = metadata.config.get("model_args") or {}
    if not isinstance(args, Mapping):
        raise WeightsError("config.json: model_args is not an object")
    if unknown := sorted(args.keys() - INTERPRETED_ARGS - TENSOR_ARGS - TRAINING_ARGS):
        message = f"config.json: unsupported model_args: {', '.join(map(str, unknown))}"
        raise WeightsError(message, hint="vitkit does not know whether this changes what the model computes")


def get_image_size(metadata: FileMetadata) -> tuple[int, int] | None:
    """Return height and width of the images, if config.json has them."""
    args = metadata.config.get("model_args") or {}
    size = args.get("img_size") if isinstance(args, Mapping) else None
    if size is None:
        input_size = get_setting(metadata, "input_size", list)
        if not input_size:
            return None
        size = input_size[1:]
    match [size, size] if isinstance(size, int) else size:
        case [int(height), int(width)] if min(height, width) > 0 and bool not in (type(height), type(width)):
            return height, width
    raise WeightsError("config.json: invalid image size", expected="[height, width]", got=size)


def read_preprocessing(config: Mapping[str, object]) -> Preprocessing | None:
    """Return the preprocessing of a timm model with this config.json, or None if it is not timm's."""
    cfg = config.get("pretrained_cfg")
    if cfg is None and "architecture" in config:
        cfg = {key: config[key] for key in _PREPROCESSING_KEYS if key in config}  # older files
    if not cfg:
        return None
    try:
        return from_mapping(Preprocessing, _convert_cfg(cfg))
    except (ValueError, TypeError, ArithmeticError, ConfigError) as error:
        raise WeightsError(f"config.json: unsupported pretrained_cfg: {summarize(error)}") from error


def _convert_cfg(cfg: Any) -> dict[str, object]:
    """Convert to fields of `Preprocessing` as timm's `resolve_data_config` and `create_transform` do."""
    if not isinstance(cfg, Mapping):
        raise TypeError(f"it is {cfg}")
    channels, height, width = cfg.get("input_size") or (3, 224, 224)
    crop_pct, mode = cfg.get("crop_pct") or 0.875, cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise ValueError(f"crop_mode {mode} is neither center nor squash")
    mean = cfg.get("mean") or IMAGENET_MEAN
    is_squashed = mode == "squash" and crop_pct == 1
    return {
        "image_size": [height, width],
        "channels": channels if len(mean) == 1 else len(mean),
        "resize": "crop" if mode == "center" else "squash" if is_squashed else "squash_crop",
        **({} if is_squashed else {"crop_fraction": crop_pct}),
        "interpolation": cfg.get("interpolation") or "bicubic",
        "mean": mean,
        "std": cfg.get("std") or IMAGENET_STD,
    }


def find_changed_keys(config: Mapping[str, object], preprocessing: Preprocessing) -> list[str]:
    """Return the keys of a timm config.json that state another preprocessing than this one."""
    stated = config.get("pretrained_cfg")
    if not isinstance(stated, Mapping):
        return []
    expected = describe_preprocessing(preprocessing)
    return [key for key, value in expected.items() if stated.get(key) not in (None, value)]


# Writing


def describe_preprocessing(preprocessing: Preprocessing) -> dict[str, object]:
    """Return timm's description of a preprocessing.

    timm always resizes with antialias, so the paper's resizing is described by its size and filter alone.
    """
    channels = preprocessing.channels
    return {
        "mean": list(preprocessing.mean) * (channels // len(preprocessing.mean)),
        "std": list(preprocessing.std) * (channels // len(preprocessing.std)),
        "interpolation": preprocessing.interpolation,
        "crop_pct": 1.0 if preprocessing.resize == "squash" else preprocessing.crop_fraction,
        "crop_mode": "center" if preprocessing.resize == "crop" else "squash",
    }


HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
"""timm's hybrids by the units of their ResNet."""
BIT_RESNETS: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {
    (3, 4, 6, 3): ("50", (1, 3)),
    (3, 4, 23, 3): ("101", (1, 3)),
    (3, 8, 36, 3): ("152", (2, 4)),
}
"""timm's BiT ResNets by their units: name and width factors."""


def make_timm_config(config: ModelConfig) -> dict[str, object]:
    """Make the config.json with which timm creates the same model."""
    architecture, num_classes = find_nearest_architecture(config), config.num_classes
    if architecture is None:
        raise WeightsError("timm has no architecture with this ResNet", hint="its classes can still hold the weights")
    args = {} if isinstance(config, BiTConfig) else make_model_args(config)
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        "num_features": config.width,
        "global_pool": args.get("global_pool", "avg"),
        "model_args": {"in_chans": config.channels, **args, "num_classes": num_classes},
        "pretrained_cfg": {"input_size": [config.channels, *pair(config.image_size)], "num_classes": num_classes},
    }


def find_nearest_architecture(config: ModelConfig) -> str | None:
    """Return the nearest of timm's architectures, or None if timm does not have the ResNet."""
    resnet = config if isinstance(config, BiTConfig) else config.backbone
    if resnet and resnet.root != "standard":
        return None
    if isinstance(config, BiTConfig):
        name, factors = BIT_RESNETS.get(config.units, ("", ()))
        return f"resnetv2_{name}x{config.width_factor}_bit" if config.width_factor in factors else None
    if config.tokens.distillation:
        return "deit_base_distilled_patch16_224" if config.backbone is None else None
    if config.backbone:
        hybrid = HYBRIDS.get(config.backbone.units) if config.backbone.root_width == 64 else None
        return hybrid if config.block.activation != "swiglu" else None
    is_gated = config.block.activation == "swiglu"
    if config.positions.kind == "rotary":
        return f"vit_small_{'plus_' if is_gated else ''}patch16_dinov3_qkvb"
    return "vit_giant_patch14_dinov2" if is_gated else "vit_base_patch16_224"


def make_model_args(config: ViTConfig) -> dict[str, object]:
    """Make the arguments of timm's VisionTransformer or, for rotary positions, Eva, but for the classes of layers."""
    block, gated, is_rotary = config.block, config.block.activation == "swiglu", config.positions.kind == "rotary"
    hidden = config.mlp_dim * (2 if gated and not is_rotary else 1)  # timm counts gate and value together
    ratio, norm_is_last = hidden / config.width, config.head.norm == "after_pooling"
    args: dict[str, object] = {
        "img_size": list(pair(config.image_size)),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        # Half a unit more if rounding down would lose one.
        "mlp_ratio": ratio if int(config.width * ratio) == hidden else (hidden + 0.5) / config.width,
        "global_pool": _TIMM_POOL[config.pooling],
        "class_token": config.class_tokens > 0,
        "qkv_bias": block.attention.qkv_bias,
        "init_values": block.layer_scale,
        "no_embed_class": config.positions.covers == "patches",
    }
    if is_rotary:  # timm's own attention of these models has no bias of keys; its Eva has qk_norm only since 1.0.30
        rotary = {"rope_temperature": config.positions.rotary_base, "attn_type": "rope"}
        aligned = {"swiglu_align_to": 1} if gated else {}
        return args | rotary | aligned | {"use_fc_norm": norm_is_last, "num_reg_tokens": config.tokens.registers}
    args |= {
        "qk_norm": block.attention.qk_norm,
        "fc_norm": norm_is_last,
        "reg_tokens": config.tokens.registers,
        "pos_embed": "learn" if config.positions.is_additive else "none",
        "pool_include_prefix": config.pooling == "map" and config.prefix > 0,
    }
    if not gated:
        args["act_layer"] = "gelu_tanh" if block.activation == "gelu_tanh" else "gelu"
    return args
