"""Formats of transformers: ViT, DeiT, ViT-MAE and DINOv2.

What tensors do not determine (heads, GELU form, eps, aspect ratio) is in config.json; without one, the defaults of the
library's configuration classes apply. `DeiTForImageClassification` does not read its distillation token, and
`Dinov2ForImageClassification` also reads the mean of the patches: for these only the backbone is inferred, and the
classifier is reported as extra.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.sizes import Size, pair
from vitkit.model.config import (
    Activation,
    AttentionConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats.base import (
    NONSTANDARD_PARTS,
    FileMetadata,
    Format,
    default_heads,
    find_part,
    find_reason,
    get_shape,
    invalid_model_error,
    simplify_size,
    square_side,
)
from vitkit.weights.formats.huggingface.naming import (
    DEIT,
    DINOV2,
    VIT,
    VIT_MAE,
    ModelFamily,
    NamingScheme,
    count_blocks,
    detect_naming,
    make_rules,
    matches,
)
from vitkit.weights.rules import Shapes
from vitkit.zoo.variants import ModelConfig

Value = TypeVar("Value", int, float, str)

# The tanh forms are one formula.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
HIDDEN_ACT: dict[Activation, str] = {"gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "gelu"}
_UNUSED = (r"PREFIXembeddings\.mask_token", r"PREFIXpooler\..+", r"decoder\.0\..+")


def infer_config(family: ModelFamily, shapes: Shapes, metadata: FileMetadata) -> ViTConfig:
    """Infer the model in a file: dimensions from its tensors, the rest from config.json, which must agree."""
    try:
        inferred = _infer_vit(family, shapes, metadata)
    except ConfigError as error:
        raise invalid_model_error(error) from error
    _check_config(family, inferred, metadata.config)
    return inferred


def _infer_vit(family: ModelFamily, shapes: Shapes, metadata: FileMetadata) -> ViTConfig:
    naming, config = detect_naming(family, shapes), metadata.config
    blocks, block = naming.blocks, f"{naming.layers}0."
    width, channels, *patch = get_shape(shapes, f"{naming.embeddings}patch_embeddings.projection.weight", axes=4)
    positions = get_shape(shapes, f"{naming.embeddings}position_embeddings", axes=3)[1]
    tokens = f"{naming.embeddings}register_tokens"
    registers = get_shape(shapes, tokens, axes=3)[1] if tokens in shapes else 0
    gated = f"{block}{blocks.gated[1]}.weight" in shapes
    last = (blocks.gated if gated else blocks.mlp)[1]
    classifier = next((f"{name}.weight" for _, name in family.heads if f"{name}.weight" in shapes), None)
    patch_size = simplify_size(patch[0], patch[1])
    return ViTConfig(
        image_size=_image_size(config, patch_size=patch_size, patches=positions - 1 - family.distilled),
        patch_size=patch_size,
        channels=channels,
        width=width,
        depth=count_blocks(naming, shapes),
        heads=get_setting(config, "num_attention_heads", 0) or default_heads(width),
        mlp_dim=get_shape(shapes, f"{block}{last}.weight", axes=2)[1],
        num_classes=get_shape(shapes, classifier, axes=2)[0] if classifier else 0,
        positions=PositionConfig(origin="dinov2-registers" if registers else family.kernel),
        tokens=TokenConfig(distillation=family.distilled, registers=registers),
        block=BlockConfig(
            attention=AttentionConfig(qkv_bias=f"{block}{blocks.qkv[0]}.bias" in shapes),
            activation="swiglu" if gated else _activation(config),
            norm_eps=get_setting(config, "layer_norm_eps", family.norm_eps),
            layer_scale=get_setting(config, "layerscale_value", 1.0) if family.scaled else None,
        ),
        head=HeadConfig(pre_logits=None if classifier else _pooler(family, naming, shapes, config)),
    )


def get_setting(config: Mapping[str, Any], key: str, default: Value) -> Value:
    """Return a setting of config.json, or the default if it is absent; reject one of another type."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not type(default) and not (type(value) is int and isinstance(default, float)):
        raise WeightsError(f"config.json: {key} has the wrong type", expected=f"a value like {default}", got=value)
    return type(default)(value)


def _activation(config: Mapping[str, Any]) -> Activation:
    name = get_setting(config, "hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise WeightsError("config.json: unsupported hidden_act", expected=" or ".join(ACTIVATIONS), got=name)
    return ACTIVATIONS[name]


def _pooler(family: ModelFamily, naming: NamingScheme, shapes: Shapes, config: Mapping[str, Any]) -> int | None:
    """Return the width of the pre-logits, which are the pooler of `ViTModel`: dense and tanh on the class token.

    Google's ImageNet-21k files have trained ones. With a classifier the library does not run them.
    """
    name = f"{naming.prefix}pooler.dense.weight"
    if not family.pooler or name not in shapes:
        return None
    if (activation := get_setting(config, "pooler_act", "tanh")) != "tanh":
        raise WeightsError("config.json: unsupported pooler_act", expected="tanh", got=activation)
    return get_shape(shapes, name, axes=2)[0]


def _image_size(config: Mapping[str, Any], *, patch_size: Size, patches: int) -> Size:
    """Return the image size of config.json, or that of a square grid."""
    height, width = pair(patch_size)
    if config.get("image_size") is None:
        side = square_side(patches)
        return simplify_size(side * height, side * width)
    image = _get_size(config, "image_size")
    _check_agreement("image_size", (pair(image)[0] // height) * (pair(image)[1] // width), patches)
    return image


def _get_size(config: Mapping[str, Any], key: str) -> Size:
    """Return a size of config.json: a number, or height and width."""
    sides = config[key] if isinstance(config[key], list | tuple) else [config[key]] * 2
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise WeightsError(f"config.json: {key} is not a size", expected="a number or two", got=config[key])
    return simplify_size(sides[0], sides[1])


def _check_config(family: ModelFamily, inferred: ViTConfig, config: Mapping[str, Any]) -> None:
    """Reject a config.json that contradicts the tensors."""
    for key, actual in _dimensions(family, inferred).items():
        if config.get(key) is not None:
            _check_agreement(key, _get_size(config, key) if key == "patch_size" else config[key], actual)
    if config.get("num_register_tokens") is not None:
        _check_agreement("num_register_tokens", config["num_register_tokens"], inferred.tokens.registers)
    if inferred.num_classes and config.get("id2label"):
        _check_agreement("id2label", len(read_labels(config)), inferred.num_classes)


def _check_agreement(key: str, expected: object, actual: object) -> None:
    if expected != actual:
        message = f"config.json and the tensors disagree about {key}"
        raise WeightsError(message, expected=expected, got=actual, hint="the two files belong to different models")


# Unsupported models


def unsupported_reason(family: ModelFamily, config: ModelConfig) -> str | None:
    """Return why the library cannot hold a model, or None."""
    if isinstance(config, BiTConfig):
        return "a ResNet"
    height, width = pair(config.image_size)
    has_pre_logits = config.head.pre_logits is not None
    reasons = {
        "no distillation token": family.distilled and not config.tokens.distillation,
        "a distillation token": not family.distilled and config.tokens.distillation,
        "no LayerScale": family.scaled and config.block.layer_scale is None,
        "a classifier of the class token": not family.heads and config.num_classes > 0,
        "pre-logits": not family.pooler and has_pre_logits,
        "pre-logits under a classifier": config.num_classes > 0 and has_pre_logits,
        # The library resamples the positions of such an image as if they formed a square.
        "an image that is not square": family.scaled and height != width,
        "an MLP that is not a multiple of the width": family.scaled and find_mlp_ratio(config) is None,
    }
    parts = NONSTANDARD_PARTS if family.scaled else (*NONSTANDARD_PARTS, "LayerScale", "registers", "SwiGLU")
    return find_part(config, parts) or find_reason(reasons)


def find_mlp_ratio(config: ViTConfig) -> int | None:
    """Return the ratio from which DINOv2 computes the MLP width (two thirds, rounded to eights, if gated), or None."""
    if config.block.activation != "swiglu":
        return None if config.mlp_dim % config.width else config.mlp_dim // config.width
    lower = config.mlp_dim * 3 // (2 * config.width)
    hidden = {ratio: (config.width * ratio * 2 // 3 + 7) // 8 * 8 for ratio in (lower, lower + 1)}
    return next((ratio for ratio, width in hidden.items() if ratio and width == config.mlp_dim), None)


# config.json


def make_hub_config(family: ModelFamily, config: ViTConfig, labels: Sequence[str]) -> dict[str, object]:
    """Make the config.json with which `from_pretrained` loads the model; without labels, classes are numbered."""
    if reason := unsupported_reason(family, config):
        raise WeightsError(f"{family.models[0]} cannot hold this model", got=reason)
    if labels and len(labels) != config.num_classes:
        raise WeightsError(
            "the number of labels does not match the model", expected=f"{config.num_classes} labels", got=len(labels)
        )
    names = list(labels) or [f"LABEL_{index}" for index in range(config.num_classes)]
    registers = "WithRegisters" if config.tokens.registers else ""
    return {
        "architectures": [family.models[config.num_classes > 0].replace("Dinov2", f"Dinov2{registers}")],
        "model_type": family.model_type + ("_with_registers" if registers else ""),
        "image_size": config.image_size,
        **_dimensions(family, config),
        "hidden_act": HIDDEN_ACT[config.block.activation],
        "layer_norm_eps": config.block.norm_eps,
        **({"layerscale_value": config.block.layer_scale} if family.scaled else {}),
        **({"use_mask_token": False} if family.scaled and not registers else {}),
        **({"id2label": {str(index): label for index, label in enumerate(names)}} if names else {}),
        **({"label2id": {label: index for index, label in enumerate(names)}} if names else {}),
    }


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a config.json in the order of the classes, or none."""
    labels = config.get("id2label") or {}
    try:
        numbered = {int(index): str(label) for index, label in labels.items()}
        return tuple(numbered[index] for index in range(len(labels)))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise WeightsError("config.json: id2label does not number the classes from 0") from error


def _dimensions(family: ModelFamily, config: ViTConfig) -> dict[str, object]:
    """Return the settings of config.json that the tensors determine too."""
    sizes: dict[str, object] = {
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "qkv_bias": config.block.attention.qkv_bias,
    }
    if not family.scaled:
        pooled = {"pooler_output_size": config.head.pre_logits} if config.head.pre_logits else {}
        return {**sizes, "intermediate_size": config.mlp_dim, **pooled}
    registers = {"num_register_tokens": config.tokens.registers} if config.tokens.registers else {}
    gated = config.block.activation == "swiglu"
    return {**sizes, "mlp_ratio": find_mlp_ratio(config), "use_swiglu_ffn": gated, **registers}


def _define(
    family: ModelFamily, *, name: str, title: str, origin: str, ignored: Sequence[str], input_size: int | None = None
) -> Format:
    prefix = "|".join(map(re.escape, family.prefixes))
    return Format(
        name=name,
        title=title,
        origin=origin,
        file_type="safetensors",
        library="transformers",
        matches=partial(matches, family),
        infer_config=partial(infer_config, family),
        make_config=partial(make_hub_config, family),
        rules=partial(make_rules, family),
        unsupported_reason=partial(unsupported_reason, family),
        ignored_names=tuple(pattern.replace("PREFIX", f"(?:{prefix})") for pattern in ignored),
        input_size=input_size,
    )


HF_VIT = _define(VIT, name="huggingface", title="Hugging Face ViT", origin="huggingface", ignored=_UNUSED)
HF_DEIT = _define(DEIT, name="huggingface-deit", title="Hugging Face DeiT", origin="huggingface_deit", ignored=_UNUSED)
HF_VIT_MAE = _define(
    VIT_MAE, name="huggingface-mae", title="Hugging Face ViT-MAE", origin="huggingface_mae", ignored=(r"decoder\..+",)
)
HF_DINOV2 = _define(
    DINOV2,
    name="huggingface-dinov2",
    title="Hugging Face DINOv2, with registers or without",
    origin="huggingface_dinov2",
    ignored=_UNUSED[:1],
    input_size=224,
)
