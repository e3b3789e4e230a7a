"""Formats of timm and of code with the same names: DeiT, MAE, DINOv2 and DINOv3."""

from collections.abc import Callable, Mapping

from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.weights.formats.base import FileMetadata, Format, find_reason
from vitkit.weights.formats.timm import rules
from vitkit.weights.formats.timm.config import find_nearest_architecture
from vitkit.weights.formats.timm.infer import (
    DINOV3_EPS,
    ROTARY_BASE,
    Defaults,
    find_published_heads,
    has_timm_rotary,
    infer_bit,
    infer_vit,
    is_bit,
    normalize_names,
)
from vitkit.weights.rules import Rule, Shapes
from vitkit.zoo.variants import ModelConfig

Reasons = Mapping[str, bool]
"""Reasons why a format cannot hold a model, and whether they apply."""
UNSUPPORTED_PARTS = (
    *("axial attention", "pre-logits", "relative positions", "learned positions of rows and columns"),
    *("positions at every layer", "class_mean pooling"),
)
"""Parts that none of these formats can hold."""
FACEBOOK_PARTS = (
    *("a hybrid", "normalized queries and keys", "no class token", "attention pooling"),
    "class pooling before the norm",
)
"""Parts that DeiT, MAE, DINOv2 and DINOv3 do not have."""
ENCODER_PARTS = ("no positions", "rotary positions", "registers", "no qkv biases", "SwiGLU")
"""Parts that DeiT and MAE do not have."""
BACKBONE_PARTS = (*FACEBOOK_PARTS, "mean pooling", "a distillation token", "a classifier", "no positions")
"""Parts that DINOv2 and DINOv3 do not have."""
ROTARY_PARTS = (
    *("a hybrid", "a distillation token", "no class token", "attention pooling", "tanh GELU"),
    "normalized queries and keys",
)
"""Parts that timm's DINOv3 does not have."""
TIMM_ROTARY = Defaults(origin="timm", rotary=True, eps=DINOV3_EPS)
"""DINOv3 in timm."""
NEUTRAL_KEYS = frozenset({"label_names", "image_size", "input_size"})
"""Keys of a config.json that do not identify a library."""


def _detect(shapes: Shapes, metadata: FileMetadata) -> str | None:
    """Detect the format by the first sign that applies."""
    names = {name: shape for name, (_, shape) in normalize_names(shapes).items()}
    is_plain_torch = metadata.file_type == "torch" and not metadata.config.keys() - NEUTRAL_KEYS
    is_facebook = is_plain_torch and metadata.container == "model"
    has_plain_head = "head.weight" in names and "fc_norm.weight" not in names
    is_deit = has_plain_head or "dist_token" in names or "blocks.0.gamma_1" in names
    signs = (
        ("timm", is_bit(names)),
        (None, not {"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= names.keys()),
        ("dinov3", "storage_tokens" in names or "rope_embed.periods" in names),
        ("timm", has_timm_rotary(names)),
        ("mae", "decoder_embed.weight" in names),
        ("dinov2", "register_tokens" in names or "blocks.0.mlp.w12.weight" in names),
        ("dinov2", len(names.get("mask_token", ())) == 2),
        ("deit", is_facebook and is_deit),
        ("mae", is_facebook),
    )
    return next((origin for origin, applies in signs if applies), "timm")


# Unsupported models


def _find_timm_reasons(config: ViTConfig) -> Reasons:
    positions, distilled = config.positions, config.tokens.distillation
    return {
        "SwiGLU with attention pooling": config.pooling == "map" and config.block.activation == "swiglu",
        "SwiGLU with a distillation token": distilled and config.block.activation == "swiglu",
        "a distillation token with registers": distilled and config.tokens.registers > 0,
        "a distillation token with no position": distilled and (positions.covers != "all" or not positions.is_additive),
        "a distillation token, pooled before the norm": distilled and config.head.norm == "after_pooling",
    }


def _find_rotary_reasons(config: ViTConfig) -> Reasons:
    """Return what timm's DINOv3 cannot hold."""
    return {
        f"a norm eps other than {DINOV3_EPS:g}": config.block.norm_eps != DINOV3_EPS,
        "no LayerScale": config.block.layer_scale is None,
    }


def _find_inexpressible(config: ViTConfig) -> Reasons:
    """Return what a file without config.json cannot express."""
    heads = find_published_heads(config.width, gated=config.block.activation == "swiglu")
    return {
        "tanh GELU": config.block.activation == "gelu_tanh",
        "a grid that is not square": config.positions.is_additive and config.grid[0] != config.grid[1],
        "a number of heads that does not follow from the width": config.heads != heads,
    }


def _find_deit_reasons(config: ViTConfig) -> Reasons:
    """Return what DeiT cannot hold. DeiT III has LayerScale and no position for the class token."""
    third, covers_all = config.block.layer_scale is not None, config.positions.covers == "all"
    is_mae = not (config.num_classes or third or config.tokens.distillation)
    return {
        "LayerScale with a position of the class token": third and covers_all,
        "a class token without a position": not (third or covers_all),
        "LayerScale with a distillation token": third and config.tokens.distillation,
        **_find_inexpressible(config),
        "no classifier, because such files are MAE's": is_mae,
    }


def _find_mae_reasons(config: ViTConfig) -> Reasons:
    """Return what MAE cannot hold: its encoders are pre-trained, or fine-tuned with a norm after mean pooling."""
    is_mean, classifies = config.pooling == "mean", config.num_classes > 0
    return {
        "mean pooling after the norm": is_mean and config.head.norm == "before_pooling",
        **_find_inexpressible(config),
        "a classifier of the class token, because such files are DeiT's": classifies and not is_mean,
    }


def _find_dinov3_reasons(config: ViTConfig) -> Reasons:
    """Return what DINOv3 cannot hold. Its files store the number of heads, and fit any image size."""
    kind, base = config.positions.kind, config.positions.rotary_base
    return {f"{kind} positions": kind != "rotary", f"a rotary base other than {ROTARY_BASE:g}": base != ROTARY_BASE}


# Formats

MAE_HEADS = {768: 12, 1024: 16, 1280: 16}
DEIT_HEADS = {192: 3, 384: 6, 512: 8, **MAE_HEADS}
DINOV2_HEADS = {384: 6, 768: 12, 1024: 16, 1536: 24}
"""Number of heads of published models by width."""


def _define(
    name: str,
    *,
    title: str,
    defaults: Defaults,
    names: rules.TimmNames,
    parts: tuple[str, ...],
    reasons: Callable[[ViTConfig], Reasons],
    ignored_names: tuple[str, ...] = (),
    input_size: int | None = None,
    container: str | None = None,
) -> Format:
    """Define a format that holds neither `parts` nor models to which one of the `reasons` applies."""
    is_timm = name == "timm"

    def infer_config(shapes: Shapes, metadata: FileMetadata) -> ModelConfig:
        normalized = {key: shape for key, (_, shape) in normalize_names(shapes).items()}
        if is_bit(normalized):
            return infer_bit(normalized, metadata)
        is_rotary = is_timm and has_timm_rotary(normalized)
        return infer_vit(normalized, metadata, defaults=TIMM_ROTARY if is_rotary else defaults)

    def make_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
        if isinstance(config, BiTConfig) and is_timm:
            return rules.make_bit_rules(config)
        is_rotary = is_timm and isinstance(config, ViTConfig) and config.positions.kind == "rotary"
        return rules.make_vit_rules(config, shapes, default=rules.TIMM_ROTARY_NAMES if is_rotary else names)

    def unsupported_reason(config: ModelConfig) -> str | None:
        resnet = config if isinstance(config, BiTConfig) else config.backbone
        if is_timm and resnet is not None and resnet.origin != "timm":
            return "a ResNet with Google's numerics"
        unnamed = "a ResNet without a name in timm" if is_timm and find_nearest_architecture(config) is None else None
        if isinstance(config, BiTConfig):
            return unnamed if is_timm else "a ResNet"
        if is_timm and config.positions.kind == "rotary":
            reason = find_reason(config, (*UNSUPPORTED_PARTS, *ROTARY_PARTS), _find_rotary_reasons(config))
            return reason and f"{reason} with rotary positions"
        eps = {f"a norm eps other than {defaults.eps:g}": config.block.norm_eps != defaults.eps}
        reason = find_reason(config, UNSUPPORTED_PARTS, eps) or find_reason(config, parts, reasons(config))
        return reason or unnamed

    return Format(
        name=name,
        title=title,
        preset="timm_augreg" if is_timm else None,
        file_type="safetensors" if is_timm else "torch",
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
    defaults=Defaults(origin="timm", rows="by_registers"),
    names=rules.TIMM_NAMES,
    parts=(),
    reasons=_find_timm_reasons,
)
DEIT = _define(
    "deit",
    title="DeiT (Facebook)",
    defaults=Defaults(origin="deit", rows="all_or_patches", heads=DEIT_HEADS, file_names=r"deit"),
    names=rules.DEIT_NAMES,
    parts=(*FACEBOOK_PARTS, *ENCODER_PARTS, "mean pooling"),
    reasons=_find_deit_reasons,
    container="model",
)
MAE = _define(
    "mae",
    title="MAE (Facebook)",
    defaults=Defaults(origin="mae", rows="all", heads=MAE_HEADS, file_names=r"mae_(pretrain|finetuned)_"),
    names=rules.TimmNames(),
    parts=(*FACEBOOK_PARTS, *ENCODER_PARTS, "a distillation token", "LayerScale", "a class token without a position"),
    reasons=_find_mae_reasons,
    ignored_names=(r"(.*\.)?mask_token", r"(.*\.)?decoder_.*"),
    container="model",
)
DINOV2 = _define(
    "dinov2",
    title="DINOv2 (Meta)",
    defaults=Defaults(origin="dinov2", rows="all", heads=DINOV2_HEADS),
    names=rules.DINOV2_NAMES,
    parts=(*BACKBONE_PARTS, "rotary positions", "a class token without a position"),
    reasons=_find_inexpressible,
    ignored_names=(r"(.*\.)?mask_token",),
    input_size=224,
)
DINOV3 = _define(
    "dinov3",
    title="DINOv3 (Meta)",
    defaults=Defaults(origin="dinov2", rotary=True, eps=DINOV3_EPS),
    names=rules.DINOV3_NAMES,
    parts=(*BACKBONE_PARTS, "tanh GELU"),
    reasons=_find_dinov3_reasons,
    ignored_names=(r"(.*\.)?mask_token", r"(.*\.)?local_cls_norm\..*"),
)
