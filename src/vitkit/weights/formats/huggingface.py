"""Formats of transformers: ViT, DeiT, ViT-MAE and DINOv2.

Files have the names of version 4, which `save_pretrained` still writes; version 5 uses others in memory. Both are read,
with or without the prefix of the base model (`vit.`).

What tensors do not determine (heads, GELU form, eps, aspect ratio) is in config.json. What it leaves out has the
default of the library's configuration class. Without config.json a file is read only if the user names its format.
`Dinov2ForImageClassification` reads the class token and the mean of the patches. `DeiTForImageClassification` does not
read its distillation token, which is a register of the loaded model; such a model is not written.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from vitkit.core.errors import WeightsError
from vitkit.core.sizes import Size, pair
from vitkit.model.config import (
    Activation,
    AttentionConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    InterpolationOrigin,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats import base
from vitkit.weights.formats.base import NONSTANDARD_PARTS, FileMetadata, Format, get_shape, simplify_size
from vitkit.weights.rules import Rule, Shapes, layer_rules, rename, sum_register_positions
from vitkit.zoo.variants import ModelConfig

Value = TypeVar("Value", int, float, str)

# The tanh forms are one formula.
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_erf"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
}
HIDDEN_ACT: dict[Activation, str] = {"gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "gelu"}
UNDISTILLED_HEAD = ("head", "classifier")
"""Classifier of `DeiTForImageClassification`."""
UNUSED_NAMES = (r"PREFIXembeddings\.mask_token", r"PREFIXpooler\..+", r"decoder\.0\..+")


# Names


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """Names of one version of the library: prefix of the base model, and parts of a block; `gated` are of a SwiGLU."""

    prefix: str = ""
    encoder: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    mlp: tuple[tuple[str, ...], str]
    gated: tuple[tuple[str, ...], str] = ((), "")

    @property
    def layers(self) -> str:
        """Prefix of all blocks."""
        return f"{self.prefix}{self.encoder}."

    @property
    def embeddings(self) -> str:
        """Prefix of tokens, positions and patch projection."""
        return f"{self.prefix}embeddings."


_VIT_4 = HuggingFaceNames(
    encoder="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    mlp=(("intermediate.dense",), "output.dense"),
)
_QKV_5, _PROJ_5 = ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj"
VIT_BLOCKS = (_VIT_4, replace(_VIT_4, encoder="layers", qkv=_QKV_5, proj=_PROJ_5, mlp=(("mlp.fc1",), "mlp.fc2")))
"""Names of versions 4 and 5."""
_GATED_4, _GATED_5 = (("mlp.weights_in",), "mlp.weights_out"), (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
_DINOV2_4 = replace(_VIT_4, norms=("norm1", "norm2"), mlp=(("mlp.fc1",), "mlp.fc2"), gated=_GATED_4)
DINOV2_BLOCKS = (_DINOV2_4, replace(_DINOV2_4, qkv=_QKV_5, proj=_PROJ_5, gated=_GATED_5))


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Facts about one of the library's model types. The first prefix and block names are those we write."""

    model_type: str
    models: tuple[str, str]  # classes without and with a classifier
    prefixes: tuple[str, ...] = ("vit.", "")
    schemes: tuple[HuggingFaceNames, ...] = VIT_BLOCKS
    heads: tuple[tuple[str, str], ...] = ()  # classifiers: our name and theirs
    norm_eps: float = 1e-12
    kernel: InterpolationOrigin = "huggingface"
    distilled: bool = False
    scaled: bool = False
    pooler: bool = False


VIT = ModelFamily(
    model_type="vit", models=("ViTModel", "ViTForImageClassification"), heads=(("head", "classifier"),), pooler=True
)
DEIT = ModelFamily(
    model_type="deit",
    models=("DeiTModel", "DeiTForImageClassificationWithTeacher"),
    prefixes=("deit.", ""),
    heads=(("head.label", "cls_classifier"), ("head.teacher", "distillation_classifier")),
    kernel="deit",
    distilled=True,
)
VIT_MAE = ModelFamily(model_type="vit_mae", models=("ViTMAEModel", ""), kernel="mae")
DINOV2 = ModelFamily(
    model_type="dinov2",
    models=("Dinov2Model", "Dinov2ForImageClassification"),
    prefixes=("dinov2.", "dinov2_with_registers.", ""),
    schemes=DINOV2_BLOCKS,
    heads=(("head", "classifier"),),
    norm_eps=1e-6,
    scaled=True,
)
MODEL_TYPES = (*(family.model_type for family in (VIT, DEIT, VIT_MAE, DINOV2)), "dinov2_with_registers")
"""Model types that are read."""


# Detection


def matches(family: ModelFamily, shapes: Shapes, metadata: FileMetadata) -> bool:
    """Return whether a file belongs to this family, by its names and config.json."""
    naming = detect_naming(family, shapes)
    required = {f"{naming.embeddings}{part}" for part in ("cls_token", "position_embeddings")}
    if not required <= shapes.keys() or not base.count_blocks(shapes, naming.layers):
        return False
    signs = (
        ("dinov2", any(name.endswith(".layer_scale1.lambda1") for name in shapes)),
        ("deit", any(name.endswith("embeddings.distillation_token") for name in shapes)),
        # An encoder alone may be of a ViT or an MAE.
        ("vit_mae", "decoder.decoder_embed.weight" in shapes or metadata.config.get("model_type") == "vit_mae"),
    )
    detected = next((model_type for model_type, applies in signs if applies), "vit")
    configured = metadata.config.get("model_type") or detected
    return detected == family.model_type and configured in (detected, f"{detected}_with_registers")


def detect_naming(family: ModelFamily, shapes: Shapes) -> HuggingFaceNames:
    """Return the naming scheme that most of a file's attention layers follow."""

    def count_matches(naming: HuggingFaceNames) -> int:
        parts = tuple(f".{part}.weight" for part in (*naming.qkv, naming.proj))
        return sum(name.startswith(naming.layers) and name.endswith(parts) for name in shapes)

    schemes = (replace(naming, prefix=prefix) for prefix in family.prefixes for naming in family.schemes)
    return max(schemes, key=count_matches)


# Rules


def make_rules(family: ModelFamily, config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """Make the rules of a model, with the names of a file or those of `save_pretrained`."""
    config = base.require_vit(config)
    with_registers = family.scaled and config.tokens.registers > 0
    naming = replace(family.schemes[0], prefix=family.prefixes[with_registers] if config.num_classes else "")
    if shapes is not None:
        naming = detect_naming(family, shapes)
    prefix, embeddings = naming.prefix, naming.embeddings
    tokens = {"cls_token": "cls_token", "pos_embed": "position_embeddings"}
    tokens |= {"dist_token": "distillation_token"} if config.tokens.distillation else {}
    tokens |= {"reg_token": "register_tokens"} if config.tokens.registers else {}
    table, heads = [], family.heads
    if family.distilled and not config.tokens.distillation:
        names = (f"{embeddings}distillation_token", f"{embeddings}{tokens.pop('pos_embed')}")
        table.append(Rule(("reg_token", "pos_embed"), names, sum_register_positions(1, 1)))
        tokens, heads = {"cls_token": "cls_token"}, (UNDISTILLED_HEAD,)
    table += [rename(ours, f"{embeddings}{theirs}") for ours, theirs in tokens.items()]
    table += layer_rules("patch_embed.proj", f"{embeddings}patch_embeddings.projection")
    for layer in range(config.depth):
        table += _block_rules(config, naming, layer)
    table += layer_rules("norm", f"{prefix}layernorm")
    if config.head.pre_logits:
        table += layer_rules("pre_logits.fc", f"{prefix}pooler.dense")
    for ours, theirs in heads if config.num_classes else ():
        table += layer_rules(ours, theirs)
    return table


def _block_rules(config: ViTConfig, naming: HuggingFaceNames, layer: int) -> Iterator[Rule]:
    first, second = naming.gated if config.block.activation == "swiglu" else naming.mlp
    parts = (
        *(("norm1", naming.norms[:1]), ("attn.qkv", naming.qkv), ("attn.proj", (naming.proj,))),
        *(("norm2", naming.norms[1:]), ("mlp.fc1", first), ("mlp.fc2", (second,))),
    )
    ours, theirs = f"blocks.{layer}", f"{naming.layers}{layer}"
    for part, names in parts:
        bias = part != "attn.qkv" or config.block.attention.qkv_bias
        yield from layer_rules(f"{ours}.{part}", *(f"{theirs}.{name}" for name in names), bias=bias)
    for branch in (1, 2) if config.block.layer_scale is not None else ():
        yield rename(f"{ours}.ls{branch}.gamma", f"{theirs}.layer_scale{branch}.lambda1")


# Inference


@base.invalid_model_errors()
def infer_config(family: ModelFamily, shapes: Shapes, metadata: FileMetadata) -> ViTConfig:
    """Infer the model in a file: dimensions from its tensors, the rest from config.json, which must agree."""
    naming, config = detect_naming(family, shapes), metadata.config
    block = f"{naming.layers}0."
    width, channels, *patch = get_shape(shapes, f"{naming.embeddings}patch_embeddings.projection.weight", axes=4)
    positions = get_shape(shapes, f"{naming.embeddings}position_embeddings", axes=3)[1]
    tokens = f"{naming.embeddings}register_tokens"
    registers = get_shape(shapes, tokens, axes=3)[1] if tokens in shapes else 0
    gated = f"{block}{naming.gated[1]}.weight" in shapes
    last = (naming.gated if gated else naming.mlp)[1]
    heads = (*family.heads, UNDISTILLED_HEAD) if family.distilled else family.heads
    classifier = next((f"{name}.weight" for _, name in heads if f"{name}.weight" in shapes), None)
    is_distilled = family.distilled and classifier != f"{UNDISTILLED_HEAD[1]}.weight"
    patch_size = simplify_size(patch[0], patch[1])
    activation = get_setting(config, "hidden_act", "gelu")
    if not gated and activation not in ACTIVATIONS:
        raise WeightsError("config.json: unsupported hidden_act", expected=" or ".join(ACTIVATIONS), got=activation)
    inferred = ViTConfig(
        image_size=_image_size(config, patch_size=patch_size, patches=positions - 1 - family.distilled),
        patch_size=patch_size,
        channels=channels,
        width=width,
        depth=base.count_blocks(shapes, naming.layers),
        heads=_count_heads(family, metadata, width=width),
        mlp_dim=get_shape(shapes, f"{block}{last}.weight", axes=2)[1],
        num_classes=get_shape(shapes, classifier, axes=2)[0] if classifier else 0,
        pooling="class_mean" if family.scaled and classifier else "class",
        positions=PositionConfig(origin="dinov2-registers" if registers else family.kernel),
        tokens=TokenConfig(distillation=is_distilled, registers=registers + (family.distilled and not is_distilled)),
        block=BlockConfig(
            attention=AttentionConfig(qkv_bias=f"{block}{naming.qkv[0]}.bias" in shapes),
            activation="swiglu" if gated else ACTIVATIONS[activation],
            norm_eps=get_setting(config, "layer_norm_eps", family.norm_eps),
            layer_scale=get_setting(config, "layerscale_value", 1.0) if family.scaled else None,
        ),
        head=HeadConfig(pre_logits=None if classifier else _find_pooler_width(family, naming, shapes, config)),
    )
    _check_config(family, inferred, config)
    return inferred


def _count_heads(family: ModelFamily, metadata: FileMetadata, *, width: int) -> int:
    """Return the number of heads in config.json; 12, the default of the library's classes, if it is left out."""
    heads = get_setting(metadata.config, "num_attention_heads", 12 if "model_type" in metadata.config else 0)
    name = {"vit": "huggingface", "vit_mae": "huggingface-mae"}.get(
        family.model_type, f"huggingface-{family.model_type}"
    )
    return heads or base.default_heads(width, format=name, is_declared=metadata.is_declared)


def get_setting(config: Mapping[str, Any], key: str, default: Value) -> Value:
    """Return a setting of config.json, or the default if it is absent; reject one of another type."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not type(default) and not (type(value) is int and isinstance(default, float)):
        raise WeightsError(f"config.json: {key} has the wrong type", expected=f"a value like {default}", got=value)
    return type(default)(value)


def _find_pooler_width(
    family: ModelFamily, naming: HuggingFaceNames, shapes: Shapes, config: Mapping[str, Any]
) -> int | None:
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
        side = base.square_side(patches)
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
    dimensions = _dimensions(family, inferred) | {"num_register_tokens": inferred.tokens.registers}
    for key, actual in dimensions.items():
        if config.get(key) is not None:
            _check_agreement(key, _get_size(config, key) if key == "patch_size" else config[key], actual)
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
    has_pre_logits, is_class_mean = config.head.pre_logits is not None, config.pooling == "class_mean"
    reads_class_token = bool(family.heads) and not family.scaled
    reasons = {
        "no distillation token": family.distilled and not config.tokens.distillation,
        "a distillation token": not family.distilled and config.tokens.distillation,
        "no LayerScale": family.scaled and config.block.layer_scale is None,
        "a classifier of the class token": config.num_classes > 0 and not is_class_mean and not reads_class_token,
        "class_mean pooling without a classifier": is_class_mean and config.num_classes == 0,
        "pre-logits": not family.pooler and has_pre_logits,
        "pre-logits under a classifier": config.num_classes > 0 and has_pre_logits,
        # The library resamples the positions of such an image as if they formed a square.
        "an image that is not square": family.scaled and height != width,
        "an MLP that is not a multiple of the width": family.scaled and find_mlp_ratio(config) is None,
    }
    parts = [part for part in NONSTANDARD_PARTS if not (family.scaled and part == "class_mean pooling")]
    parts += [] if family.scaled else ["LayerScale", "registers", "SwiGLU"]
    return base.find_reason(config, parts, reasons)


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
        message, expected = "the number of labels does not match the model", f"{config.num_classes} labels"
        raise WeightsError(message, expected=expected, got=len(labels))
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
    is_gated = config.block.activation == "swiglu"
    return {**sizes, "mlp_ratio": find_mlp_ratio(config), "use_swiglu_ffn": is_gated, **registers}


def _define(
    family: ModelFamily, name: str, title: str, *, ignored: Sequence[str], input_size: int | None = None
) -> Format:
    prefix = "|".join(map(re.escape, family.prefixes))
    return Format(
        name=name,
        title=f"Hugging Face {title}",
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


HF_VIT = _define(VIT, "huggingface", "ViT", ignored=UNUSED_NAMES)
HF_DEIT = _define(DEIT, "huggingface-deit", "DeiT", ignored=UNUSED_NAMES)
HF_VIT_MAE = _define(VIT_MAE, "huggingface-mae", "ViT-MAE", ignored=(r"decoder\..+",))
_DINOV2_TITLE = "DINOv2, with registers or without"
HF_DINOV2 = _define(DINOV2, "huggingface-dinov2", _DINOV2_TITLE, ignored=UNUSED_NAMES[:1], input_size=224)
