"""Formats of timm and of code with the same names: DeiT, MAE, DINOv2 and DINOv3."""

from collections.abc import Callable

from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.weights.formats.base import FileMetadata, FileType, Format, find_part, find_reason
from vitkit.weights.formats.timm.config import find_architecture
from vitkit.weights.formats.timm.infer import (
    DINOV3_EPS,
    ROTARY_BASE,
    Defaults,
    find_published_heads,
    infer_bit,
    infer_vit,
    is_bit,
    normalize_names,
)
from vitkit.weights.formats.timm.rules import (
    DEIT_NAMES,
    DINOV2_NAMES,
    DINOV3_NAMES,
    TIMM_NAMES,
    NamingScheme,
    make_bit_rules,
    make_vit_rules,
)
from vitkit.weights.rules import Rule, Shapes
from vitkit.zoo.variants import ModelConfig

UNSUPPORTED_PARTS = (
    *("axial attention", "pre-logits", "relative positions", "learned positions of rows and columns"),
    "positions at every layer",
)
"""Parts that none of these formats can hold."""
FACEBOOK_PARTS = (
    *("a hybrid", "normalized queries and keys", "no class token", "attention pooling"),
    "class pooling before the norm",
)
"""Parts that DeiT, MAE, DINOv2 and DINOv3 do not have."""
DINOV2_PATCH = (14, 14)
"""Identifies a backbone of Meta's without its mask token."""
NEUTRAL_KEYS = frozenset({"label_names", "image_size", "input_size"})
"""Keys of a config.json that do not identify a library."""


def _detect(shapes: Shapes, metadata: FileMetadata) -> str | None:
    """Detect the format by the first sign that applies."""
    names = {name: shape for name, (_, shape) in normalize_names(shapes).items()}
    is_neutral = not metadata.config.keys() - NEUTRAL_KEYS
    is_facebook = metadata.file_type == "torch" and metadata.container == "model" and is_neutral
    patch = names.get("patch_embed.proj.weight", ())[-2:]
    is_bare = metadata.file_type == "torch" and metadata.container is None and is_neutral and "head.weight" not in names
    has_plain_head = "head.weight" in names and "fc_norm.weight" not in names
    is_deit = has_plain_head or "dist_token" in names or "blocks.0.gamma_1" in names
    signs = (
        ("timm", is_bit(names)),
        (None, not {"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= names.keys()),
        ("dinov3", "storage_tokens" in names or "rope_embed.periods" in names),
        ("dinov3", "blocks.0.gamma_1" in names and "pos_embed" not in names),
        ("mae", "decoder_embed.weight" in names),
        ("dinov2", "register_tokens" in names or "blocks.0.mlp.w12.weight" in names),
        ("dinov2", len(names.get("mask_token", ())) == 2),
        ("dinov2", is_bare and "blocks.0.ls1.gamma" in names and patch == DINOV2_PATCH),
        ("deit", is_facebook and is_deit),
        ("mae", is_facebook),
    )
    return next((origin for origin, applies in signs if applies), "timm")


# Unsupported models


def _find_common_reason(config: ModelConfig, *, eps: float, parts: tuple[str, ...] = ()) -> str | None:
    if isinstance(config, BiTConfig):
        return "a ResNet"
    reason = find_part(config, UNSUPPORTED_PARTS)
    if reason is None and config.block.norm_eps != eps:
        return f"a norm eps other than {eps:g}"
    return reason or find_part(config, parts)


def _find_inexpressible(config: ViTConfig) -> str | None:
    """Return what a file without config.json cannot express."""
    heads = find_published_heads(config.width, gated=config.block.activation == "swiglu")
    reasons = {"a number of heads that does not follow from the width": config.heads != heads}
    return find_part(config, ("tanh GELU", "a grid that is not square")) or find_reason(reasons)


def find_timm_reason(config: ModelConfig) -> str | None:
    """Return why timm cannot hold a model, or None; config.json expresses what tensors do not."""
    resnet = config if isinstance(config, BiTConfig) else config.backbone
    if resnet is not None and resnet.origin != "timm":
        return "a ResNet with Google's numerics"
    unnamed = "a ResNet without a name in timm" if find_architecture(config) is None else None
    if isinstance(config, BiTConfig):
        return unnamed
    positions, distilled = config.positions, config.tokens.distillation
    reasons = {
        "SwiGLU with attention pooling": config.pooling == "map" and config.block.activation == "swiglu",
        "a distillation token with registers": distilled and config.tokens.registers > 0,
        "a distillation token with no position": distilled and (positions.covers != "all" or not positions.is_additive),
        "a distillation token, pooled before the norm": distilled and config.head.norm == "after_pooling",
    }
    return _find_common_reason(config, eps=1e-6, parts=("rotary positions",)) or find_reason(reasons) or unnamed


def find_deit_reason(config: ModelConfig) -> str | None:
    """Return why DeiT cannot hold a model. DeiT III has LayerScale and no position for the class token."""
    parts = ("no positions", "rotary positions", "mean pooling", "registers", "no qkv biases", "SwiGLU")
    if reason := _find_common_reason(config, eps=1e-6, parts=(*FACEBOOK_PARTS, *parts)):
        return reason
    assert isinstance(config, ViTConfig)
    third, covers_all = config.block.layer_scale is not None, config.positions.covers == "all"
    reasons = {
        "LayerScale with a position of the class token": third and covers_all,
        "a class token without a position": not (third or covers_all),
        "LayerScale with a distillation token": third and config.tokens.distillation,
    }
    is_mae = not (config.num_classes or third or config.tokens.distillation)
    encoder = "no classifier, because such files are MAE's" if is_mae else None
    return find_reason(reasons) or _find_inexpressible(config) or encoder


def find_mae_reason(config: ModelConfig) -> str | None:
    """Return why MAE cannot hold a model: a pre-trained encoder, or a fine-tuned one with a norm after mean pooling."""
    parts = (
        *(*FACEBOOK_PARTS, "no positions", "rotary positions", "registers", "a distillation token", "no qkv biases"),
        *("SwiGLU", "LayerScale", "a class token without a position"),
    )
    if reason := _find_common_reason(config, eps=1e-6, parts=parts):
        return reason
    assert isinstance(config, ViTConfig)
    is_mean = config.pooling == "mean"
    if is_mean and config.head.norm == "before_pooling":
        return "mean pooling after the norm"
    classifier = "a classifier of the class token, because such files are DeiT's"
    return _find_inexpressible(config) or (classifier if config.num_classes and not is_mean else None)


def find_dinov2_reason(config: ModelConfig) -> str | None:
    """Return why DINOv2 cannot hold a model: a backbone with or without registers."""
    parts = (
        *(*FACEBOOK_PARTS, "mean pooling", "a distillation token", "a classifier"),
        *("no positions", "rotary positions", "a class token without a position"),
    )
    if reason := _find_common_reason(config, eps=1e-6, parts=parts):
        return reason
    assert isinstance(config, ViTConfig)
    return _find_inexpressible(config)


def find_dinov3_reason(config: ModelConfig) -> str | None:
    """Return why DINOv3 cannot hold a model. Its files store the number of heads, and fit any image size."""
    parts = (*FACEBOOK_PARTS, "mean pooling", "a distillation token", "a classifier", "no positions", "tanh GELU")
    if reason := _find_common_reason(config, eps=DINOV3_EPS, parts=parts):
        return reason
    assert isinstance(config, ViTConfig)
    positions = config.positions
    reasons = {
        f"{positions.kind} positions": positions.kind != "rotary",
        f"a rotary base other than {ROTARY_BASE:g}": positions.rotary_base != ROTARY_BASE,
    }
    return find_reason(reasons)


# Formats


def _define(
    name: str,
    *,
    title: str,
    origin: str,
    file_type: FileType,
    defaults: Defaults,
    names: NamingScheme,
    unsupported_reason: Callable[[ModelConfig], str | None],
    ignored_names: tuple[str, ...] = (),
    input_size: int | None = None,
    container: str | None = None,
) -> Format:
    def infer_config(shapes: Shapes, metadata: FileMetadata) -> ModelConfig:
        normalized = {key: shape for key, (_, shape) in normalize_names(shapes).items()}
        if is_bit(normalized):
            return infer_bit(normalized, metadata)
        return infer_vit(normalized, metadata, defaults=defaults)

    def make_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
        if isinstance(config, BiTConfig) and name == "timm":
            return make_bit_rules(config)
        return make_vit_rules(config, shapes, default=names)

    return Format(
        name=name,
        title=title,
        origin=origin,
        file_type=file_type,
        matches=lambda shapes, metadata: _detect(shapes, metadata) == name,
        infer_config=infer_config,
        rules=make_rules,
        unsupported_reason=unsupported_reason,
        ignored_names=ignored_names,
        input_size=input_size,
        library=None if name == "dinov3" else "timm",  # Meta's names differ from timm's DINOv3
        container=container,
    )


TIMM = _define(
    "timm",
    title="timm",
    origin="timm_augreg",
    file_type="safetensors",
    defaults=Defaults(origin="timm", rows="by_registers"),
    names=TIMM_NAMES,
    unsupported_reason=find_timm_reason,
)
DEIT = _define(
    "deit",
    title="DeiT (Facebook)",
    origin="deit",
    file_type="torch",
    defaults=Defaults(origin="deit", rows="all_or_patches"),
    names=DEIT_NAMES,
    unsupported_reason=find_deit_reason,
    container="model",
)
MAE = _define(
    "mae",
    title="MAE (Facebook)",
    origin="mae",
    file_type="torch",
    defaults=Defaults(origin="mae", rows="all"),
    names=NamingScheme(),
    unsupported_reason=find_mae_reason,
    ignored_names=(r"(.*\.)?mask_token", r"(.*\.)?decoder_.*"),
    container="model",
)
DINOV2 = _define(
    "dinov2",
    title="DINOv2 (Meta)",
    origin="dinov2",
    file_type="torch",
    defaults=Defaults(origin="dinov2", rows="all"),
    names=DINOV2_NAMES,
    unsupported_reason=find_dinov2_reason,
    ignored_names=(r"(.*\.)?mask_token",),
    input_size=224,
)
DINOV3 = _define(
    "dinov3",
    title="DINOv3 (Meta)",
    origin="dinov3",
    file_type="torch",
    defaults=Defaults(origin="dinov2", rotary=True, eps=DINOV3_EPS),
    names=DINOV3_NAMES,
    unsupported_reason=find_dinov3_reason,
    ignored_names=(r"(.*\.)?mask_token", r"(.*\.)?local_cls_norm\..*"),
)
