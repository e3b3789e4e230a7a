"""Formats of Google's code: vision_transformer, the paper's, and its successor big_vision.

The paper's code has `MlpBlock_3` in its blocks and positions inside `Transformer`; hybrids have these names.
big_vision has `MlpBlock_0`, positions at the top level, attention pooling, and sometimes all blocks stacked on one
axis. Both occur under several prefixes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isqrt
from typing import Literal

from vitkit.core.errors import WeightsError
from vitkit.core.sizes import Size, pair
from vitkit.model.config import BackboneConfig, HeadConfig, PositionConfig, TokenConfig, ViTConfig
from vitkit.model.positions import sincos_values
from vitkit.weights.formats import base
from vitkit.weights.formats.base import FileMetadata, Format, count_outputs, get_shape, simplify_size
from vitkit.weights.rules import IDENTITY, Conversion, Rule, Shapes, concatenate, rearrange_axes, rename, stack_layers
from vitkit.zoo.variants import ModelConfig

PREFIXES = ("", "params/", "params/img/", "opt/target/")
"""At the top level, in big_vision's state, in its two-tower models, in old training states."""
IN_MODULE, AT_TOP = "Transformer/posembed_input/pos_embedding", "pos_embedding"
MAX_LAYERS = 1000
"""Rules are made for every layer, so a file with more is rejected first."""
DEFAULT_IMAGE_SIZE = 224
"""Image size if neither the file nor config.json has it."""
DENSE = rearrange_axes("inputs outputs", "outputs inputs")
CONVOLUTION = rearrange_axes("height width inputs outputs", "outputs inputs height width")
CHANNELS = rearrange_axes("1 1 1 channels", "channels")
UNSUPPORTED_PARTS = (
    *("a distillation token", "registers"),
    *("relative positions", "rotary positions", "learned positions of rows and columns", "positions at every layer"),
    *("a grid that is not square", "SwiGLU", "exact GELU", "LayerScale", "axial attention", "no qkv biases"),
    *("normalized queries and keys", "a norm after pooling", "class_mean pooling"),
)


@dataclass(frozen=True, kw_only=True)
class GoogleNames:
    """Names that differ between files. The defaults are those of the paper's released files."""

    prefix: str = ""
    positions: str = IN_MODULE
    attention: str = "MultiHeadDotProductAttention_1"
    mlp: str = "MlpBlock_3"
    norms: tuple[str, str] = ("LayerNorm_0", "LayerNorm_2")
    pooling: str = "MAPHead_0/"
    stacked: bool = False

    def block(self, layer: int) -> str:
        """Return the prefix of a layer's tensors."""
        return f"{self.prefix}Transformer/encoderblock{'' if self.stacked else f'_{layer}'}/"


PAPER_NAMES = GoogleNames()
BIG_VISION_NAMES = GoogleNames(
    prefix="params/",
    positions=AT_TOP,
    attention="MultiHeadDotProductAttention_0",
    mlp="MlpBlock_0",
    norms=("LayerNorm_0", "LayerNorm_1"),
)


def detect_naming(shapes: Shapes) -> GoogleNames | None:
    """Detect the naming scheme of a file; None if it is not a ViT of Google's."""
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in shapes), None)
    if prefix is None:
        return None
    blocks = [name for name in shapes if name.startswith(f"{prefix}Transformer/encoderblock")]
    styles = [style for style in (PAPER_NAMES, BIG_VISION_NAMES) if any(f"/{style.mlp}/" in name for name in blocks)]
    if not styles:
        return None
    # Later versions of the paper's code have its block names and big_vision's position names.
    positions = [name for name in (IN_MODULE, AT_TOP) if prefix + name in shapes]
    return replace(
        styles[0],
        prefix=prefix,
        positions=positions[0] if positions else styles[0].positions,
        pooling="" if f"{prefix}probe" in shapes else "MAPHead_0/",
        stacked=any(name.startswith(f"{prefix}Transformer/encoderblock/") for name in blocks),
    )


def is_paper(shapes: Shapes) -> bool:
    """Return whether a file is from the paper's code, by its blocks, positions or ResNet."""
    naming = detect_naming(shapes)
    if naming is None or f"{naming.prefix}{naming.pooling}probe" in shapes:
        return False
    has_paper_parts = any(naming.prefix + name in shapes for name in (IN_MODULE, "conv_root/kernel"))
    return naming.mlp == PAPER_NAMES.mlp or has_paper_parts


# Model


@base.invalid_model_errors()
def infer_config(shapes: Shapes, metadata: FileMetadata) -> ViTConfig:
    """Infer the model in a file.

    Without a position table it has sine-cosine positions in big_vision, and none in the paper's code; its image size is
    then that of `config.json`, or 224.
    """
    naming = detect_naming(shapes)
    if naming is None:
        raise WeightsError("the file has no Vision Transformer of Google's", expected="embedding/kernel and blocks")
    prefix = naming.prefix
    height, width, channels, hidden = get_shape(shapes, f"{prefix}embedding/kernel", axes=4)
    backbone, has_class_token = None, f"{prefix}cls" in shapes
    if f"{prefix}conv_root/kernel" in shapes:
        root = get_shape(shapes, f"{prefix}conv_root/kernel", axes=4)
        units = count_units(shapes, pattern=re.escape(prefix) + r"block([0-9])/unit([0-9]{1,2})/")
        backbone, channels = BackboneConfig(units=units, root_width=root[3]), root[2]
    stride = backbone.stride if backbone else 1
    cell = (height * stride, width * stride)
    image_size, positions = infer_positions(shapes, naming, metadata, cell=cell, has_class_token=has_class_token)
    pooling: Literal["class", "mean", "map"] = "class" if has_class_token else "mean"
    if f"{prefix}{naming.pooling}probe" in shapes:
        pooling = "map"
    layer_axes = int(naming.stacked)
    query = get_shape(shapes, f"{naming.block(0)}{naming.attention}/query/kernel", axes=layer_axes + 3)
    mlp = get_shape(shapes, f"{naming.block(0)}{naming.mlp}/Dense_0/kernel", axes=layer_axes + 2)
    if query[-2] * query[-1] != hidden:
        raise WeightsError("the heads do not fill the width", expected=hidden, got=f"{query[-2]} × {query[-1]}")
    return ViTConfig(
        image_size=image_size,
        patch_size=simplify_size(height, width),
        channels=channels,
        width=hidden,
        depth=count_layers(shapes, naming),
        heads=query[-2],
        mlp_dim=mlp[-1],
        num_classes=count_outputs(shapes, f"{prefix}head/kernel", axis=1) or 0,
        pooling=pooling,
        backbone=backbone,
        positions=positions,
        tokens=TokenConfig(class_token=True if has_class_token and pooling != "class" else None),
        head=HeadConfig(pre_logits=count_outputs(shapes, f"{prefix}pre_logits/kernel", axis=1)),
    )


def infer_positions(
    shapes: Shapes, naming: GoogleNames, metadata: FileMetadata, *, cell: tuple[int, int], has_class_token: bool
) -> tuple[Size, PositionConfig]:
    """Infer the image size and the positions; `cell` is the height and width of a patch in image pixels."""
    declared, name, paper = get_image_size(metadata), naming.prefix + naming.positions, is_paper(shapes)
    if name not in shapes:
        image_size = simplify_size(*round_to_patches(declared or DEFAULT_IMAGE_SIZE, cell))
        return image_size, PositionConfig(kind="none") if paper else PositionConfig(kind="sincos_2d", covers="patches")
    rows = get_shape(shapes, name, axes=3)[1]
    # The class token has a position in the paper's code and in old big_vision files. A table of 16 rows has 4×4
    # patches, or a class token and 3×5.
    prefixes = (0,) if not has_class_token else (1,) if paper else (1, 0)
    for prefix in prefixes:
        side = isqrt(max(rows - prefix, 1))
        height, width = round_to_patches(declared, cell) if declared else (side * cell[0], side * cell[1])
        if (height // cell[0]) * (width // cell[1]) == rows - prefix:
            # Without a class token, whether it would have a position depends on the code it would be added in.
            covers_all = prefix or (paper and not has_class_token)
            return simplify_size(height, width), PositionConfig(covers="all" if covers_all else "patches")
    if declared:
        message = "config.json and the position table have different image sizes"
        raise WeightsError(message, expected=f"the rows of {declared} pixels", got=f"{rows} rows")
    raise WeightsError(
        "the position table does not have a square grid",
        expected=" or ".join("a square number of rows" + " and one" * prefix for prefix in prefixes),
        got=rows,
        hint='add a config.json with "image_size": [height, width]',
    )


def get_image_size(metadata: FileMetadata) -> Size | None:
    """Return the image size in `config.json`, if it has one: a side, or [height, width]."""
    match metadata.config.get("image_size"):
        case bool():
            return None
        case int(side):
            return side
        case [int(height), int(width)]:
            return height, width
    return None


def round_to_patches(size: Size, cell: tuple[int, int]) -> tuple[int, int]:
    """Round height and width down to whole patches of `cell` pixels, at least one; Google's code cuts off the rest."""
    height, width = (max(side // pixels, 1) * pixels for side, pixels in zip(pair(size), cell, strict=True))
    return height, width


def count_units(names: Iterable[str], *, pattern: str) -> tuple[int, ...]:
    """Count the units in each stage of a ResNet; the pattern captures stage and unit of a name."""
    last: dict[int, int] = {}
    for name in names:
        if match := re.match(pattern, name):
            stage, unit = int(match[1]), int(match[2])
            last[stage] = max(last.get(stage, 0), unit)
    return tuple(last.get(stage, 0) for stage in range(1, max(last, default=0) + 1))


def count_layers(shapes: Shapes, naming: GoogleNames) -> int:
    """Count the layers up to the highest number, so that gaps are reported as missing."""
    if naming.stacked:
        depth = get_shape(shapes, f"{naming.block(0)}{naming.norms[0]}/scale", axes=2)[0]
    else:
        numbers = (re.match(r"Transformer/encoderblock_([0-9]{1,9})/", name[len(naming.prefix) :]) for name in shapes)
        depth = 1 + max((int(match[1]) for match in numbers if match), default=0)
    if depth > MAX_LAYERS:
        raise WeightsError("the file has too many layers", expected=f"at most {MAX_LAYERS}", got=depth)
    return depth


# Rules


def make_rules(config: ModelConfig, shapes: Shapes | None, *, default: GoogleNames) -> list[Rule]:
    """Make the rules of a model with the names of a file or, without one, with `default`."""
    config, naming = base.require_vit(config), (detect_naming(shapes) if shapes else None) or default
    prefix, blocks = naming.prefix, [block_rules(config, naming, layer) for layer in range(config.depth)]
    in_order = map(stack_layers, zip(*blocks, strict=True)) if naming.stacked else chain.from_iterable(blocks)
    return [
        *(backbone_rules(config.backbone, prefix, shapes) if config.backbone else ()),
        *dense("patch_embed.proj", f"{prefix}embedding", kernel=CONVOLUTION),
        *([rename("cls_token", f"{prefix}cls")] if config.class_tokens else ()),
        *position_rules(config, prefix + naming.positions, shapes),
        *in_order,
        *norm("norm", f"{prefix}Transformer/encoder_norm"),
        *(pooling_rules(config, naming) if config.pooling == "map" else ()),
        *(dense("pre_logits.fc", f"{prefix}pre_logits") if config.head.pre_logits else ()),
        *(dense("head", f"{prefix}head") if config.num_classes else ()),
    ]


def block_rules(config: ViTConfig, naming: GoogleNames, layer: int) -> list[Rule]:
    """Make the rules of one encoder block."""
    ours, theirs = f"blocks.{layer}", naming.block(layer)
    attention = theirs + naming.attention
    qkv = [f"{attention}/{part}" for part in ("query", "key", "value")]
    return [
        *norm(f"{ours}.norm1", theirs + naming.norms[0]),
        *projections(f"{ours}.attn.qkv", qkv, heads=config.heads),
        *head_projection(f"{ours}.attn.proj", f"{attention}/out", heads=config.heads),
        *norm(f"{ours}.norm2", theirs + naming.norms[1]),
        *dense(f"{ours}.mlp.fc1", f"{theirs}{naming.mlp}/Dense_0"),
        *dense(f"{ours}.mlp.fc2", f"{theirs}{naming.mlp}/Dense_1"),
    ]


def pooling_rules(config: ViTConfig, naming: GoogleNames) -> list[Rule]:
    """Make the rules of the attention pooling head."""
    pooling = naming.prefix + naming.pooling
    attention = f"{pooling}MultiHeadDotProductAttention_0"
    return [
        rename("attn_pool.latent", f"{pooling}probe"),
        *projections("attn_pool.q", [f"{attention}/query"], heads=config.heads),
        *projections("attn_pool.kv", [f"{attention}/key", f"{attention}/value"], heads=config.heads),
        *head_projection("attn_pool.proj", f"{attention}/out", heads=config.heads),
        *norm("attn_pool.norm", f"{pooling}LayerNorm_0"),
        *dense("attn_pool.mlp.fc1", f"{pooling}MlpBlock_0/Dense_0"),
        *dense("attn_pool.mlp.fc2", f"{pooling}MlpBlock_0/Dense_1"),
    ]


def backbone_rules(backbone: BackboneConfig, prefix: str, shapes: Shapes | None) -> Iterator[Rule]:
    """Make the rules of a hybrid's ResNet. Google numbers stages and units from 1."""

    def convolution_and_norm(ours: str, theirs: str, number: str, suffix: str) -> Iterator[Rule]:
        yield Rule((f"{ours}conv{number}.weight",), (f"{theirs}conv{suffix}/kernel",), CONVOLUTION)
        leaves = (f"{theirs}gn{suffix}/scale", f"{theirs}gn{suffix}/bias")
        yield from group_norm(f"{ours}norm{number}", leaves, shapes=shapes, flat=False)

    root = "patch_embed.backbone."
    yield from convolution_and_norm(f"{root}stem.", prefix, "", "_root")
    for stage, units in enumerate(backbone.units):
        for unit in range(units):
            ours, theirs = f"{root}stages.{stage}.blocks.{unit}.", f"{prefix}block{stage + 1}/unit{unit + 1}/"
            for number in "123":
                yield from convolution_and_norm(ours, theirs, number, number)
            if unit == 0:  # it changes the width, so its shortcut is a projection
                yield from convolution_and_norm(f"{ours}downsample.", theirs, "", "_proj")


def position_rules(config: ViTConfig, name: str, shapes: Shapes | None) -> list[Rule]:
    """Make the rule of the position table, which is computed if the file relies on the sine-cosine formula."""
    positions = config.positions
    if positions.kind == "none":
        return []
    if positions.kind == "sincos_2d" and shapes is not None and name not in shapes:
        return [Rule(("pos_embed",), (), Conversion(lambda _: [sincos_values(config)], lambda _: []))]
    return [rename("pos_embed", name)]


def dense(ours: str, theirs: str, *, kernel: Conversion = DENSE) -> list[Rule]:
    """Make the rules of a dense layer or convolution with its bias."""
    return [Rule((f"{ours}.weight",), (f"{theirs}/kernel",), kernel), rename(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[Rule]:
    """Make the rules of a LayerNorm."""
    return [rename(f"{ours}.weight", f"{theirs}/scale"), rename(f"{ours}.bias", f"{theirs}/bias")]


def group_norm(ours: str, theirs: tuple[str, str], *, shapes: Shapes | None, flat: bool) -> Iterator[Rule]:
    """Make the rules of a GroupNorm, whose tensors are (C) or (1, 1, 1, C); without a file, (C) if `flat`."""
    for leaf, name in zip(("weight", "bias"), theirs, strict=True):
        one_axis = len(shapes[name]) == 1 if shapes and name in shapes else flat
        yield Rule((f"{ours}.{leaf}",), (name,), IDENTITY if one_axis else CHANNELS)


def projections(ours: str, theirs: Sequence[str], *, heads: int) -> list[Rule]:
    """Make the rules of query, key or value projections, which vitkit joins in one layer."""
    kernel = rearrange_axes("width heads each", "(heads each) width", heads=heads)
    bias = rearrange_axes("heads each", "(heads each)", heads=heads)
    return [
        Rule((f"{ours}.weight",), tuple(f"{name}/kernel" for name in theirs), concatenate(kernel, len(theirs))),
        Rule((f"{ours}.bias",), tuple(f"{name}/bias" for name in theirs), concatenate(bias, len(theirs))),
    ]


def head_projection(ours: str, theirs: str, *, heads: int) -> list[Rule]:
    """Make the rules of the output projection of attention."""
    return dense(ours, theirs, kernel=rearrange_axes("heads each width", "width (heads each)", heads=heads))


# Formats


def unsupported_reason(config: ModelConfig, *, paper: bool) -> str | None:
    """Return why the paper's code, or else big_vision, cannot hold a model."""
    if not isinstance(config, ViTConfig):
        return "a ResNet"
    backbone, units = config.backbone, config.backbone.units if config.backbone else ()
    reasons = {
        "a hybrid": backbone is not None and not paper,
        "a backbone of more than 9 stages, or 99 units in one": len(units) > 9 or max(units, default=0) > 99,
        "attention pooling": paper and config.pooling == "map",
        "a class token without a position": paper and config.class_tokens > 0 and config.positions.covers == "patches",
        "a ResNet with timm's numerics": backbone is not None and backbone.origin != "google",
        "a small root": backbone is not None and backbone.root != "standard",
        "a class token that pooling does not read": config.class_tokens > 0 and config.pooling != "class",
        "no positions, because their table determines the image size": config.positions.kind == "none",
        "a LayerNorm eps other than 1e-6": config.block.norm_eps != 1e-6,
        f"more than {MAX_LAYERS} layers": config.depth > MAX_LAYERS,
    }
    return base.find_reason(config, UNSUPPORTED_PARTS, reasons)


def _define(name: str, names: GoogleNames, ignored_names: tuple[str, ...]) -> Format:
    paper = names is PAPER_NAMES
    return Format(
        name=name,
        title="Google's vision_transformer" if paper else "Google's big_vision",
        preset="paper" if paper else None,
        file_type="npz",
        library="timm",
        matches=lambda shapes, _: detect_naming(shapes) is not None and is_paper(shapes) == paper,
        infer_config=infer_config,
        rules=partial(make_rules, default=names),
        unsupported_reason=partial(unsupported_reason, paper=paper),
        ignored_names=ignored_names,
    )


OPTIMIZER_STATE = (r"opt/(?!target/).*",)
TWO_TOWERS = (r"params/txt/.*", r"params/[tb]", r"extra/.*")
"""Text tower, temperature and bias of a two-tower model, and the rest of its training state."""
GOOGLE = _define("google", PAPER_NAMES, OPTIMIZER_STATE)
BIG_VISION = _define("big_vision", BIG_VISION_NAMES, (*TWO_TOWERS, *OPTIMIZER_STATE))
