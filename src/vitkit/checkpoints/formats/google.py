"""A ViT goes in, the rules between its tensors and those of Google's files come out: the paper's and big_vision's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vitkit.checkpoints.formats.format import Format
from vitkit.checkpoints.formats.google_shapes import (
    LATER_NAMES,
    MOST_LAYERS,
    PAPER_NAMES,
    Naming,
    describe,
    is_paper,
    naming_of,
)
from vitkit.checkpoints.mapping import SAME, Layout, Rule, Shapes, joined, rearranged, same, stacked
from vitkit.core.errors import WeightsError
from vitkit.model.config import ViTConfig
from vitkit.model.positions import sincos_2d
from vitkit.model.resnet import BackboneConfig
from vitkit.zoo.variants import ModelConfig

DENSE = rearranged("inputs outputs", "outputs inputs")
CONVOLUTION = rearranged("height width inputs outputs", "outputs inputs height width")
CHANNELS = rearranged("1 1 1 channels", "channels")


def dense(ours: str, theirs: str, *, kernel: Layout = DENSE) -> list[Rule]:
    """A dense layer or convolution with its bias.

    >>> [rule.theirs[0] for rule in dense("head", "head")]
    ['head/kernel', 'head/bias']
    """
    return [Rule((f"{ours}.weight",), (f"{theirs}/kernel",), kernel), same(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[Rule]:
    """A LayerNorm."""
    return [same(f"{ours}.weight", f"{theirs}/scale"), same(f"{ours}.bias", f"{theirs}/bias")]


def group_norm(ours: str, theirs: str, *, leaves: tuple[str, str], shapes: Shapes | None, flat: bool) -> Iterator[Rule]:
    """A GroupNorm, whose tensors are (C) or (1, 1, 1, C): as in the file, or in a new one `flat` or not."""
    for leaf, name in zip(("weight", "bias"), (f"{theirs}/{leaf}" for leaf in leaves), strict=True):
        one_axis = len(shapes[name]) == 1 if shapes and name in shapes else flat
        yield Rule((f"{ours}.{leaf}",), (name,), SAME if one_axis else CHANNELS)


def projections(ours: str, theirs: Sequence[str], *, heads: int) -> list[Rule]:
    """Dense layers into heads, which with us are one after the other in one layer."""
    kernel = rearranged("width heads each", "(heads each) width", heads=heads)
    bias = rearranged("heads each", "(heads each)", heads=heads)
    return [
        Rule((f"{ours}.weight",), tuple(f"{name}/kernel" for name in theirs), joined(kernel, len(theirs))),
        Rule((f"{ours}.bias",), tuple(f"{name}/bias" for name in theirs), joined(bias, len(theirs))),
    ]


def from_heads(ours: str, theirs: str, *, heads: int) -> list[Rule]:
    """The dense layer that brings the heads together."""
    return dense(ours, theirs, kernel=rearranged("heads each width", "width (heads each)", heads=heads))


def block_rules(config: ViTConfig, naming: Naming, layer: int) -> list[Rule]:
    """The rules of one layer."""
    ours, theirs = f"blocks.{layer}", naming.block(layer)
    attention = theirs + naming.attention
    return [
        *norm(f"{ours}.norm1", theirs + naming.norms[0]),
        *projections(
            f"{ours}.attn.qkv", [f"{attention}/{part}" for part in ("query", "key", "value")], heads=config.heads
        ),
        *from_heads(f"{ours}.attn.proj", f"{attention}/out", heads=config.heads),
        *norm(f"{ours}.norm2", theirs + naming.norms[1]),
        *dense(f"{ours}.mlp.fc1", f"{theirs}{naming.mlp}/Dense_0"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}{naming.mlp}/Dense_1"),
    ]


def pooling_rules(config: ViTConfig, naming: Naming) -> list[Rule]:
    """The rules of the attention pooling head."""
    at = naming.prefix + naming.pooling
    attention = f"{at}MultiHeadDotProductAttention_0"
    return [
        same("attn_pool.latent", f"{at}probe"),
        *projections("attn_pool.q", [f"{attention}/query"], heads=config.heads),
        *projections("attn_pool.kv", [f"{attention}/key", f"{attention}/value"], heads=config.heads),
        *from_heads("attn_pool.proj", f"{attention}/out", heads=config.heads),
        *norm("attn_pool.norm", f"{at}LayerNorm_0"),
        *dense("attn_pool.mlp.fc1", f"{at}MlpBlock_0/Dense_0"),
        *dense("attn_pool.mlp.fc2", f"{at}MlpBlock_0/Dense_1"),
    ]


def backbone_rules(backbone: BackboneConfig, prefix: str, shapes: Shapes | None) -> Iterator[Rule]:
    """The rules of a hybrid's ResNet, whose stages and units Google counts from 1."""

    def convolution_and_norm(ours: str, theirs: str, number: str, suffix: str) -> Iterator[Rule]:
        yield Rule((f"{ours}conv{number}.weight",), (f"{theirs}conv{suffix}/kernel",), CONVOLUTION)
        yield from group_norm(
            f"{ours}norm{number}", f"{theirs}gn{suffix}", leaves=("scale", "bias"), shapes=shapes, flat=False
        )

    at = "patch_embed.backbone."
    yield from convolution_and_norm(f"{at}stem.", prefix, "", "_root")
    for stage, units in enumerate(backbone.units):
        for unit in range(units):
            ours, theirs = f"{at}stages.{stage}.blocks.{unit}.", f"{prefix}block{stage + 1}/unit{unit + 1}/"
            for number in "123":
                yield from convolution_and_norm(ours, theirs, number, number)
            if unit == 0:  # the first of a stage changes the width, so its shortcut is a projection
                yield from convolution_and_norm(f"{ours}downsample.", theirs, "", "_proj")


def position_rules(config: ViTConfig, naming: Naming, shapes: Shapes | None) -> list[Rule]:
    """The rule of the position table, which is computed where the file leaves it to a formula."""
    name, positions = naming.prefix + naming.positions, config.positions
    if positions.kind == "none":
        return []
    if positions.kind == "sincos_2d" and shapes is not None and name not in shapes:
        table = partial(sincos_2d, config.grid, width=config.width, like=positions.sincos, prefix=config.placed_prefix)
        return [Rule(("pos_embed",), (), Layout(lambda _: [table()], lambda _: []))]
    return [same("pos_embed", name)]


def vit_rules(config: ModelConfig, naming: Naming, shapes: Shapes | None) -> list[Rule]:
    """All rules of a model, in the order of the data's way."""
    if not isinstance(config, ViTConfig):
        raise WeightsError("the format holds Vision Transformers only", got="a ResNet")
    at = naming.prefix
    layers = [block_rules(config, naming, layer) for layer in range(config.depth)]
    return [
        *(backbone_rules(config.backbone, at, shapes) if config.backbone else ()),
        *dense("patch_embed.proj", f"{at}embedding", kernel=CONVOLUTION),
        *([same("cls_token", f"{at}cls")] if config.class_tokens else ()),
        *position_rules(config, naming, shapes),
        *(map(stacked, zip(*layers, strict=True)) if naming.stacked else (rule for layer in layers for rule in layer)),
        *norm("norm", f"{at}Transformer/encoder_norm"),
        *(pooling_rules(config, naming) if config.pooling == "map" else ()),
        *(dense("pre_logits.fc", f"{at}pre_logits") if config.head.pre_logits else ()),
        *(dense("head", f"{at}head") if config.classes else ()),
    ]


def paper_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """The rules of a model for a file of the paper's code."""
    return vit_rules(config, (naming_of(shapes) if shapes else None) or PAPER_NAMES, shapes)


def big_vision_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """The rules of a model for a file of big_vision."""
    return vit_rules(config, (naming_of(shapes) if shapes else None) or LATER_NAMES, shapes)


# What the formats cannot hold

Refusal = tuple[str, Callable[[ViTConfig], bool]]

NEITHER: tuple[Refusal, ...] = (
    (
        "a ResNet of timm's numbers",
        lambda config: config.backbone is not None and config.backbone.origin != "google",
    ),
    ("a distillation token", lambda config: config.tokens.distillation),
    ("registers", lambda config: config.tokens.registers > 0),
    ("a class token that pooling does not read", lambda config: config.class_tokens > 0 and config.pooling != "class"),
    (
        "relative, rotary or two-dimensional learned positions",
        lambda config: config.positions.kind in ("relative", "rotary", "learned_2d"),
    ),
    ("no positions, because their table tells the image size", lambda config: config.positions.kind == "none"),
    ("positions that enter at every layer", lambda config: config.positions.place != "stem"),
    ("a patch grid that is not square", lambda config: config.grid[0] != config.grid[1]),
    ("a gated MLP", lambda config: config.block.activation == "swiglu"),
    ("GELU in its erf form", lambda config: config.block.activation == "gelu_erf"),
    ("a LayerNorm eps other than 1e-6", lambda config: config.block.norm_eps != 1e-6),
    ("LayerScale", lambda config: config.block.layer_scale is not None),
    ("axial attention", lambda config: config.block.axial),
    ("attention without qkv biases", lambda config: not config.block.attention.qkv_bias),
    ("norms on queries and keys", lambda config: config.block.attention.qk_norm),
    (f"more than {MOST_LAYERS} layers", lambda config: config.depth > MOST_LAYERS),
    ("a norm after pooling", lambda config: config.head.norm == "after_pooling"),
)
NOT_THE_PAPER: tuple[Refusal, ...] = (
    (
        "a backbone of more than 9 stages, or 99 units in one",
        lambda config: (
            config.backbone is not None
            and (len(config.backbone.units) > 9 or max(config.backbone.units, default=0) > 99)
        ),
    ),
    ("attention pooling", lambda config: config.pooling == "map"),
    (
        "a class token without a position",
        lambda config: config.class_tokens > 0 and config.positions.covers == "patches",
    ),
)
NOT_BIG_VISION: tuple[Refusal, ...] = (("a hybrid", lambda config: config.backbone is not None),)


def refusal(config: ModelConfig, rows: Iterable[Refusal]) -> str | None:
    """The first reason of a table that holds for a model."""
    if not isinstance(config, ViTConfig):
        return "a ResNet"
    return next((reason for reason, holds in rows if holds(config)), None)


GOOGLE = Format(
    name="google",
    title="Google's vision_transformer",
    origin="paper",
    writes="npz",
    recognises=lambda shapes, about: is_paper(shapes),
    describe=describe,
    rules=paper_rules,
    refuses=lambda config: refusal(config, NOT_THE_PAPER + NEITHER),
    ignored=(r"opt/(?!target/).*",),
)
BIG_VISION = Format(
    name="big_vision",
    title="Google's big_vision",
    origin="big_vision",
    writes="npz",
    recognises=lambda shapes, about: naming_of(shapes) is not None and not is_paper(shapes),
    describe=describe,
    rules=big_vision_rules,
    refuses=lambda config: refusal(config, NOT_BIG_VISION + NEITHER),
    # The text tower of a two-tower model with its temperature and bias, and the state of the optimiser.
    ignored=(r"params/txt/.*", r"params/[tb]", r"opt/(?!target/).*", r"extra/.*"),
)
