"""Tensors and config.json of a transformers model go in, our model comes out, and back: ViT, DeiT, ViT-MAE, DINOv2.

What tensors cannot say (heads, GELU, eps, the aspect of the image) is in config.json; without one it is what the
library's configuration classes take for granted.

Two of the library's models are more than ours can say: `DeiTForImageClassification` does not read its distillation
token, and `Dinov2ForImageClassification` reads the mean of the patches beside the class token. Of these the backbone
is described, without classes, and the classifier is left over as extra: nothing is dropped unseen, and one can still
see what the file is.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.huggingface_names import (
    DEIT,
    DINOV2,
    VIT,
    VIT_MAE,
    Family,
    Spelling,
    depth_of,
    recognises,
    rules,
    spoken,
)
from vitkit.checkpoints.formats.sizes import (
    first_reason,
    impossible,
    not_plain,
    shape_of,
    size_of,
    square_side,
    usual_heads,
)
from vitkit.checkpoints.mapping import Shapes
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import Size, pair
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import Activation, BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

Value = TypeVar("Value", int, float, str)

# What the library's words mean. All of the tanh forms are one formula.
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


def describe(family: Family, shapes: Shapes, about: About) -> ViTConfig:
    """The model in a file: sizes from its tensors, the rest from config.json, which must not contradict them."""
    try:
        found = _described(family, shapes, about)
    except ConfigError as error:
        raise impossible(error) from error
    _check(family, found, about.config)
    return found


def _described(family: Family, shapes: Shapes, about: About) -> ViTConfig:
    spelling, config = spoken(family, shapes), about.config
    dialect, block = spelling.dialect, f"{spelling.layers}0."
    width, channels, *patch = shape_of(shapes, f"{spelling.embeddings}patch_embeddings.projection.weight", axes=4)
    positions = shape_of(shapes, f"{spelling.embeddings}position_embeddings", axes=3)[1]
    tokens = f"{spelling.embeddings}register_tokens"
    registers = shape_of(shapes, tokens, axes=3)[1] if tokens in shapes else 0
    gated = f"{block}{dialect.gated[1]}.weight" in shapes
    last = (dialect.gated if gated else dialect.mlp)[1]
    classifier = next((f"{name}.weight" for _, name in family.heads if f"{name}.weight" in shapes), None)
    patch_size = size_of(patch[0], patch[1])
    return ViTConfig(
        image_size=_image_size(config, patch_size=patch_size, patches=positions - 1 - family.distilled),
        patch_size=patch_size,
        channels=channels,
        width=width,
        depth=depth_of(spelling, shapes),
        heads=told(config, "num_attention_heads", 0) or usual_heads(width),
        mlp_dim=shape_of(shapes, f"{block}{last}.weight", axes=2)[1],
        classes=shape_of(shapes, classifier, axes=2)[0] if classifier else 0,
        positions=PositionConfig(origin="dinov2-registers" if registers else family.kernel),
        tokens=TokenConfig(distillation=family.distilled, registers=registers),
        block=BlockConfig(
            attention=AttentionConfig(qkv_bias=f"{block}{dialect.qkv[0]}.bias" in shapes),
            activation="swiglu" if gated else _activation(config),
            norm_eps=told(config, "layer_norm_eps", family.norm_eps),
            layer_scale=told(config, "layerscale_value", 1.0) if family.scaled else None,
        ),
        head=HeadConfig(pre_logits=None if classifier else _pooler(family, spelling, shapes, config)),
    )


def told(config: Mapping[str, Any], key: str, usual: Value) -> Value:
    """What config.json says, if it is of the right kind; the usual, if it says nothing.

    >>> told({"layer_norm_eps": 1e-6}, "layer_norm_eps", 1e-12), told({}, "hidden_act", "gelu")
    (1e-06, 'gelu')
    """
    value = config.get(key)
    if value is None:
        return usual
    if type(value) is not type(usual) and not (type(value) is int and isinstance(usual, float)):
        raise WeightsError(f"config.json: {key} is of the wrong kind", expected=f"something like {usual}", got=value)
    return type(usual)(value)


def _activation(config: Mapping[str, Any]) -> Activation:
    name = told(config, "hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise WeightsError("config.json: no such hidden_act here", expected=" or ".join(ACTIVATIONS), got=name)
    return ACTIVATIONS[name]


def _pooler(family: Family, spelling: Spelling, shapes: Shapes, config: Mapping[str, Any]) -> int | None:
    """The width of the pre-logits: dense and tanh on the class token is what `ViTModel` has for a pooler.

    In Google's ImageNet-21k files they are the trained ones. Under a classifier the library does not run them.
    """
    name = f"{spelling.prefix}pooler.dense.weight"
    if not family.pooler or name not in shapes:
        return None
    if (activation := told(config, "pooler_act", "tanh")) != "tanh":
        raise WeightsError("config.json: pre-logits end in tanh here", expected="pooler_act = tanh", got=activation)
    return shape_of(shapes, name, axes=2)[0]


def _image_size(config: Mapping[str, Any], *, patch_size: Size, patches: int) -> Size:
    """The image that so many patches fill: config.json's, or a square one."""
    height, width = pair(patch_size)
    if config.get("image_size") is None:
        side = square_side(patches)
        return size_of(side * height, side * width)
    image = _plain_size(config, "image_size")
    _agree("image_size", (pair(image)[0] // height) * (pair(image)[1] // width), patches)
    return image


def _plain_size(config: Mapping[str, Any], key: str) -> Size:
    """A size in config.json: a number, or height and width."""
    sides = config[key] if isinstance(config[key], list | tuple) else [config[key]] * 2
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise WeightsError(f"config.json: {key} is not a size", expected="a number or two", got=config[key])
    return size_of(sides[0], sides[1])


def _check(family: Family, found: ViTConfig, config: Mapping[str, Any]) -> None:
    """Refuse a config.json that says other than the tensors."""
    for key, fact in _sizes(family, found).items():
        if config.get(key) is not None:
            _agree(key, _plain_size(config, key) if key == "patch_size" else config[key], fact)
    if config.get("num_register_tokens") is not None:
        _agree("num_register_tokens", config["num_register_tokens"], found.tokens.registers)
    if found.classes and config.get("id2label"):
        _agree("id2label", len(hub_labels(config)), found.classes)


def _agree(key: str, said: object, fact: object) -> None:
    if said != fact:
        raise WeightsError(
            f"config.json and the tensors disagree on {key}",
            expected=said,
            got=fact,
            hint="the two files belong to different models",
        )


# What a file cannot hold


def refuses(family: Family, config: ModelConfig) -> str | None:
    """Why the library's model cannot be this one, or None."""
    if isinstance(config, BiTConfig):
        return "a ResNet"
    scaled, gated = config.block.layer_scale is not None, config.block.activation == "swiglu"
    height, width = pair(config.image_size)
    return not_plain(config) or first_reason(
        (
            (family.distilled and not config.tokens.distillation, "no distillation token"),
            (not family.distilled and config.tokens.distillation, "a distillation token"),
            (family.scaled and not scaled, "no layer scale"),
            (not family.scaled and scaled, "layer scale"),
            (not family.scaled and config.tokens.registers > 0, "registers"),
            (not family.scaled and gated, "a gated MLP"),
            (not family.heads and config.classes > 0, "a classifier of the class token"),
            (not family.pooler and bool(config.head.pre_logits), "pre-logits"),
            (config.classes > 0 and bool(config.head.pre_logits), "pre-logits under a classifier"),
            # The library resamples positions for such an image, from a table that it takes for a square one.
            (family.scaled and height != width, "an image that is not square"),
            (family.scaled and mlp_ratio(config) is None, "an MLP that is no whole multiple of the width"),
        )
    )


def mlp_ratio(config: ViTConfig) -> int | None:
    """The ratio from which DINOv2 takes the hidden width of its MLP (two thirds, in eights, if gated), if there is one.

    >>> mlp_ratio(ViTConfig(width=1536, heads=24, mlp_dim=4096, block=BlockConfig(activation="swiglu")))
    4
    """
    if config.block.activation != "swiglu":
        return None if config.mlp_dim % config.width else config.mlp_dim // config.width
    least = config.mlp_dim * 3 // (2 * config.width)
    hidden = {ratio: (config.width * ratio * 2 // 3 + 7) // 8 * 8 for ratio in (least, least + 1)}
    return next((ratio for ratio, width in hidden.items() if ratio and width == config.mlp_dim), None)


# The rows


def _row(
    family: Family, *, name: str, title: str, origin: str, ignored: Sequence[str], input_size: int | None = None
) -> Format:
    prefix = "|".join(map(re.escape, family.prefixes))
    return Format(
        name=name,
        title=title,
        origin=origin,
        writes="safetensors",
        recognises=partial(recognises, family),
        describe=partial(describe, family),
        rules=partial(rules, family),
        refuses=partial(refuses, family),
        ignored=tuple(pattern.replace("PREFIX", f"(?:{prefix})") for pattern in ignored),
        input_size=input_size,
    )


_UNREAD = (r"PREFIXembeddings\.mask_token", r"PREFIXpooler\..+", r"decoder\.0\..+")

HF_VIT = _row(VIT, name="huggingface", title="Hugging Face ViT", origin="huggingface", ignored=_UNREAD)
HF_DEIT = _row(DEIT, name="huggingface-deit", title="Hugging Face DeiT", origin="huggingface_deit", ignored=_UNREAD)
HF_VIT_MAE = _row(
    VIT_MAE, name="huggingface-mae", title="Hugging Face ViT-MAE", origin="huggingface_mae", ignored=(r"decoder\..+",)
)
HF_DINOV2 = _row(
    DINOV2,
    name="huggingface-dinov2",
    title="Hugging Face DINOv2, with registers or without",
    origin="huggingface_dinov2",
    ignored=_UNREAD[:1],
    input_size=224,
)
FAMILIES = {HF_VIT.name: VIT, HF_DEIT.name: DEIT, HF_VIT_MAE.name: VIT_MAE, HF_DINOV2.name: DINOV2}


# config.json


def hub_config(config: ViTConfig, labels: Sequence[str], *, to: Format = HF_VIT) -> dict[str, object]:
    """The config.json with which `from_pretrained` loads the model; without labels, classes are numbered.

    >>> written = hub_config(ViTConfig(classes=2), ["cat", "dog"])
    >>> written["architectures"], written["hidden_act"], written["id2label"]
    (['ViTForImageClassification'], 'gelu_pytorch_tanh', {'0': 'cat', '1': 'dog'})
    """
    family = FAMILIES[to.name]
    if reason := to.refuses(config):
        raise WeightsError(f"{to.title} cannot hold this model", got=reason)
    if labels and len(labels) != config.classes:
        raise WeightsError("the labels are not the model's", expected=f"{config.classes} labels", got=len(labels))
    named = list(labels) or [f"LABEL_{index}" for index in range(config.classes)]
    registers = "WithRegisters" if config.tokens.registers else ""
    return {
        "architectures": [family.models[config.classes > 0].replace("Dinov2", f"Dinov2{registers}")],
        "model_type": family.model_type + ("_with_registers" if registers else ""),
        "image_size": config.image_size,
        **_sizes(family, config),
        "hidden_act": HIDDEN_ACT[config.block.activation],
        "layer_norm_eps": config.block.norm_eps,
        **({"layerscale_value": config.block.layer_scale} if family.scaled else {}),
        **({"use_mask_token": False} if family.scaled and not registers else {}),
        **({"id2label": {str(index): label for index, label in enumerate(named)}} if named else {}),
        **({"label2id": {label: index for index, label in enumerate(named)}} if named else {}),
    }


def hub_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels in a config.json, class by class; none, if it has none.

    >>> hub_labels({"id2label": {"1": "dog", "0": "cat"}})
    ('cat', 'dog')
    """
    labels = config.get("id2label") or {}
    try:
        numbered = {int(index): str(label) for index, label in labels.items()}
        return tuple(numbered[index] for index in range(len(labels)))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise WeightsError("config.json: id2label does not number the classes from 0") from error


def _sizes(family: Family, config: ViTConfig) -> dict[str, object]:
    """What config.json and tensors both say of a model."""
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
    return {**sizes, "mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": gated, **registers}
