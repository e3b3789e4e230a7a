"""Files of timm, DeiT, MAE, DINOv2 and DINOv3 go in, the models in them and their rule tables come out."""

from collections.abc import Mapping

from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.timm_config import architecture
from vitkit.checkpoints.formats.timm_models import (
    DINOV3_EPS,
    ROTARY_BASE,
    Habits,
    bit,
    habitual_heads,
    holds_bit,
    plain,
    vit,
)
from vitkit.checkpoints.formats.timm_rules import (
    DEIT_SPELLING,
    DINOV2_SPELLING,
    DINOV3_SPELLING,
    TIMM_SPELLING,
    Spelling,
    bit_rules,
    rules,
)
from vitkit.checkpoints.mapping import Rule, Shapes
from vitkit.model.config import ViTConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

# What each format can hold


def _refused(config: ModelConfig, *, eps: float) -> str | None:
    """What none of these formats can hold."""
    if isinstance(config, BiTConfig):
        return "a ResNet"
    positions, block = config.positions, config.block
    reasons = {
        "axial attention": block.axial,
        "a pre-logits layer": config.head.pre_logits is not None,
        "relative positions": positions.kind == "relative",
        "positions in two tables": positions.kind == "learned_2d",
        "positions at every layer": positions.is_additive and positions.place != "stem",
        f"a norm eps other than {eps:g}": block.norm_eps != eps,
    }
    return _first(reasons)


def _unsaid(config: ViTConfig) -> str | None:
    """What a file that nothing stands beside cannot say."""
    heads = habitual_heads(config.width, gated=config.block.activation == "swiglu")
    reasons = {
        "the tanh form of GELU": config.block.activation == "gelu_tanh",
        "a head count that its width does not tell": config.heads != heads,
        "a grid that is not square": config.positions.is_additive and config.grid[0] != config.grid[1],
    }
    return _first(reasons)


def _plain_vit(config: ViTConfig) -> str | None:
    """What DeiT, MAE and the DINOs know nothing of."""
    attention = config.block.attention
    reasons = {
        "a hybrid": config.backbone is not None,
        "normalised queries and keys": attention.qk_norm,
        "no class token": config.class_tokens - config.tokens.distillation == 0,
        "pooling by attention": config.pooling == "map",
        "class pooling before the norm": config.pooling == "class" and config.head.norm == "after_pooling",
    }
    return _first(reasons)


def _in_words(positions: PositionConfig) -> str:
    return "no positions" if positions.kind == "none" else f"{positions.kind} positions"


def _first(reasons: Mapping[str, bool]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)


def refused_by_timm(config: ModelConfig) -> str | None:
    """Why timm cannot compute a model, told all that a config.json can tell.

    >>> refused_by_timm(BiTConfig()), refused_by_deit(BiTConfig()), refused_by_dinov3(ViTConfig())
    ("a ResNet of Google's numbers", 'a ResNet', 'a norm eps other than 1e-05')
    """
    resnet = config if isinstance(config, BiTConfig) else config.backbone
    if resnet is not None and resnet.origin != "timm":
        return "a ResNet of Google's numbers"
    unnamed = "a ResNet that timm has no name for" if architecture(config) is None else None
    if isinstance(config, BiTConfig):
        return unnamed
    tokens, after = config.tokens, config.head.norm == "after_pooling"
    covers_all = config.positions.covers == "all"
    reasons = {
        "rotary positions": config.positions.kind == "rotary",
        "a gated MLP under pooling by attention": config.pooling == "map" and config.block.activation == "swiglu",
        "a distillation token with registers": tokens.distillation and tokens.registers > 0,
        "a distillation token with no position": tokens.distillation
        and not (covers_all and config.positions.is_additive),
        "a distillation token, pooled before the norm": tokens.distillation and after,
    }
    return _refused(config, eps=1e-6) or _first(reasons) or unnamed


def refused_by_deit(config: ModelConfig) -> str | None:
    """DeiT with and without distillation, and DeiT III, which has LayerScale and no position for its class token."""
    if reason := _refused(config, eps=1e-6):
        return reason
    assert isinstance(config, ViTConfig)
    positions, third = config.positions, config.block.layer_scale is not None
    reasons = {
        _in_words(positions): not positions.is_additive,
        "mean pooling": config.pooling == "mean",
        "registers": config.tokens.registers > 0,
        "no bias of queries, keys and values": not config.block.attention.qkv_bias,
        "a gated MLP": config.block.activation == "swiglu",
        "LayerScale with a position of the class token": third and positions.covers == "all",
        "a class token with no position": not third and positions.covers == "patches",
        "LayerScale with a distillation token": third and config.tokens.distillation,
    }
    unlike_mae = config.classes > 0 or third or config.tokens.distillation
    reason = _plain_vit(config) or _first(reasons) or _unsaid(config)
    return reason or (None if unlike_mae else "no classifier, because such a file is MAE's")


def refused_by_mae(config: ModelConfig) -> str | None:
    """MAE's encoder as it was pre-trained, or as it was fine-tuned: averaged, then normalised."""
    if reason := _refused(config, eps=1e-6):
        return reason
    assert isinstance(config, ViTConfig)
    positions, averaged = config.positions, config.pooling == "mean"
    reasons = {
        _in_words(positions): not positions.is_additive,
        "mean pooling after the norm": averaged and config.head.norm == "before_pooling",
        "registers": config.tokens.registers > 0,
        "a distillation token": config.tokens.distillation,
        "no bias of queries, keys and values": not config.block.attention.qkv_bias,
        "a gated MLP": config.block.activation == "swiglu",
        "LayerScale": config.block.layer_scale is not None,
        "a class token with no position": positions.covers == "patches",
    }
    unlike_deit = averaged or not config.classes
    reason = _plain_vit(config) or _first(reasons) or _unsaid(config)
    return reason or (None if unlike_deit else "a classifier of the class token, because such a file is DeiT's")


def _refused_by_dino(config: ViTConfig) -> str | None:
    reasons = {
        "mean pooling": config.pooling == "mean",
        "a distillation token": config.tokens.distillation,
        "a classifier": config.classes > 0,
    }
    return _plain_vit(config) or _first(reasons)


def refused_by_dinov2(config: ModelConfig) -> str | None:
    """DINOv2's backbone, with or without registers."""
    if reason := _refused(config, eps=1e-6):
        return reason
    assert isinstance(config, ViTConfig)
    reasons = {
        _in_words(config.positions): not config.positions.is_additive,
        "a class token with no position": config.positions.covers == "patches",
    }
    return _refused_by_dino(config) or _first(reasons) or _unsaid(config)


def refused_by_dinov3(config: ModelConfig) -> str | None:
    """DINOv3's backbone. Its file says how many heads there are, and of the image nothing: any will do."""
    if reason := _refused(config, eps=DINOV3_EPS):
        return reason
    assert isinstance(config, ViTConfig)
    positions = config.positions
    reasons = {
        _in_words(positions): positions.kind != "rotary",
        f"a rotary base other than {ROTARY_BASE:g}": positions.rotary_base != ROTARY_BASE,
        "the tanh form of GELU": config.block.activation == "gelu_tanh",
    }
    return _refused_by_dino(config) or _first(reasons)


# The formats


DINOV2_PATCH = (14, 14)
"""By which a backbone of Meta's is known, if somebody has left out its mask token."""


WORDS = frozenset({"label_names", "image_size", "input_size"})
"""What a config.json may hold beside weights of any format: it tells of no library."""


def _recognised(shapes: Shapes, about: About) -> str | None:
    """Which of the relatives a file is of, by the first sign that it shows."""
    names = {name: shape for name, (_, shape) in plain(shapes).items()}
    says_nothing = not about.config.keys() - WORDS
    facebook = about.kind == "torch" and about.container == "model" and says_nothing
    patch = names.get("patch_embed.proj.weight", ())[-2:]
    bare = about.kind == "torch" and about.container is None and says_nothing and "head.weight" not in names
    plain_head = "head.weight" in names and "fc_norm.weight" not in names
    of_deit = plain_head or "dist_token" in names or "blocks.0.gamma_1" in names
    signs = (
        ("timm", holds_bit(names)),
        (None, not {"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= names.keys()),
        ("dinov3", "storage_tokens" in names or "rope_embed.periods" in names),
        ("dinov3", "blocks.0.gamma_1" in names and "pos_embed" not in names),
        ("mae", "decoder_embed.weight" in names),
        ("dinov2", "register_tokens" in names or "blocks.0.mlp.w12.weight" in names),
        ("dinov2", len(names.get("mask_token", ())) == 2),
        ("dinov2", bare and "blocks.0.ls1.gamma" in names and patch == DINOV2_PATCH),
        ("deit", facebook and of_deit),
        ("mae", facebook),
    )
    return next((origin for origin, shown in signs if shown), "timm")


def _describe(shapes: Shapes, about: About, habits: Habits) -> ModelConfig:
    names = {name: shape for name, (_, shape) in plain(shapes).items()}
    return bit(names, about) if holds_bit(names) else vit(names, about, habits=habits)


def _timm_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    return bit_rules(config) if isinstance(config, BiTConfig) else rules(config, shapes, written=TIMM_SPELLING)


TIMM = Format(
    name="timm",
    title="timm",
    origin="timm_augreg",
    writes="safetensors",
    recognises=lambda shapes, about: _recognised(shapes, about) == "timm",
    describe=lambda shapes, about: _describe(shapes, about, Habits(origin="timm", rows="by_registers")),
    rules=_timm_rules,
    refuses=refused_by_timm,
)
DEIT = Format(
    name="deit",
    title="DeiT (Facebook)",
    origin="deit",
    writes="torch",
    recognises=lambda shapes, about: _recognised(shapes, about) == "deit",
    describe=lambda shapes, about: _describe(shapes, about, Habits(origin="deit", rows="all_or_patches")),
    rules=lambda config, shapes: rules(config, shapes, written=DEIT_SPELLING),
    refuses=refused_by_deit,
)
MAE = Format(
    name="mae",
    title="MAE (Facebook)",
    origin="mae",
    writes="torch",
    recognises=lambda shapes, about: _recognised(shapes, about) == "mae",
    describe=lambda shapes, about: _describe(shapes, about, Habits(origin="mae", rows="all")),
    rules=lambda config, shapes: rules(config, shapes, written=Spelling()),
    refuses=refused_by_mae,
    ignored=(r"(.*\.)?mask_token", r"(.*\.)?decoder_.*"),
)
DINOV2 = Format(
    name="dinov2",
    title="DINOv2 (Meta)",
    origin="dinov2",
    writes="torch",
    recognises=lambda shapes, about: _recognised(shapes, about) == "dinov2",
    describe=lambda shapes, about: _describe(shapes, about, Habits(origin="dinov2", rows="all")),
    rules=lambda config, shapes: rules(config, shapes, written=DINOV2_SPELLING),
    refuses=refused_by_dinov2,
    ignored=(r"(.*\.)?mask_token",),
    input_size=224,
)
DINOV3 = Format(
    name="dinov3",
    title="DINOv3 (Meta)",
    origin="dinov3",
    writes="torch",
    recognises=lambda shapes, about: _recognised(shapes, about) == "dinov3",
    describe=lambda shapes, about: _describe(shapes, about, Habits(origin="dinov2", rotary=True, eps=DINOV3_EPS)),
    rules=lambda config, shapes: rules(config, shapes, written=DINOV3_SPELLING),
    refuses=refused_by_dinov3,
    ignored=(r"(.*\.)?mask_token", r"(.*\.)?local_cls_norm\..*"),
)
