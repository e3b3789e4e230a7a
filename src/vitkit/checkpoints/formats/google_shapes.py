"""Names and shapes of a file of Google's go in, how it names things and the ViT that it holds come out.

Two code bases wrote such files. The paper's has `MlpBlock_3` in its blocks and positions inside `Transformer`; hybrids
are of this kind. big_vision's has `MlpBlock_0`, positions at the top, attention pooling, and sometimes all blocks
stacked on one axis. Both are found under several prefixes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from vitkit.checkpoints.formats.format import About
from vitkit.checkpoints.formats.sizes import impossible, shape_of, size_of
from vitkit.checkpoints.mapping import Shapes
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import Size, pair
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig

PREFIXES = ("", "params/", "params/img/", "opt/target/")
"""Where in a file the model is: at the top, in big_vision's state, in its two-tower models, in old training states."""
IN_MODULE, AT_TOP = "Transformer/posembed_input/pos_embedding", "pos_embedding"
MOST_LAYERS = 1000
"""Rules are written out for every layer, so a file that claims more is refused before."""
USUAL_SIZE = 224
"""The image size of a file that does not tell its own."""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What differs from file to file. The defaults are the released files of the paper."""

    prefix: str = ""
    positions: str = IN_MODULE
    attention: str = "MultiHeadDotProductAttention_1"
    mlp: str = "MlpBlock_3"
    norms: tuple[str, str] = ("LayerNorm_0", "LayerNorm_2")
    pooling: str = "MAPHead_0/"
    stacked: bool = False

    def block(self, layer: int) -> str:
        """Where the tensors of a layer are."""
        return f"{self.prefix}Transformer/encoderblock{'' if self.stacked else f'_{layer}'}/"


PAPER_NAMES = Naming()
LATER_NAMES = Naming(
    prefix="params/",
    positions=AT_TOP,
    attention="MultiHeadDotProductAttention_0",
    mlp="MlpBlock_0",
    norms=("LayerNorm_0", "LayerNorm_1"),
)


def naming_of(shapes: Shapes) -> Naming | None:
    """How a file names its tensors; None where it holds no ViT of Google's.

    >>> naming_of({"opt/target/embedding/kernel": (), "opt/target/Transformer/encoderblock_0/MlpBlock_3/x": ()}).prefix
    'opt/target/'
    """
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in shapes), None)
    if prefix is None:
        return None
    blocks = [name for name in shapes if name.startswith(f"{prefix}Transformer/encoderblock")]
    styles = [style for style in (PAPER_NAMES, LATER_NAMES) if any(f"/{style.mlp}/" in name for name in blocks)]
    if not styles:
        return None
    # The paper's code in its later version has the blocks of the one and the positions of the other.
    places = [place for place in (IN_MODULE, AT_TOP) if prefix + place in shapes]
    return replace(
        styles[0],
        prefix=prefix,
        positions=places[0] if places else styles[0].positions,
        pooling="" if f"{prefix}probe" in shapes else "MAPHead_0/",
        stacked=any(name.startswith(f"{prefix}Transformer/encoderblock/") for name in blocks),
    )


def is_paper(shapes: Shapes) -> bool:
    """Whether a file is of the paper's code: by its blocks, its positions or its ResNet."""
    naming = naming_of(shapes)
    if naming is None or f"{naming.prefix}{naming.pooling}probe" in shapes:
        return False
    return naming.mlp == PAPER_NAMES.mlp or any(
        naming.prefix + name in shapes for name in (IN_MODULE, "conv_root/kernel")
    )


# What a file holds


def units_of(names: Iterable[str], *, pattern: str) -> tuple[int, ...]:
    """The units in each stage of a ResNet, by a pattern that finds the stage and the unit in a name.

    >>> units_of(["block1/unit1/a", "block1/unit2/a", "block2/unit1/a"], pattern="block([0-9])/unit([0-9]+)/")
    (2, 1)
    """
    last: dict[int, int] = {}
    for name in names:
        if found := re.match(pattern, name):
            stage, unit = int(found[1]), int(found[2])
            last[stage] = max(last.get(stage, 0), unit)
    return tuple(last.get(stage, 0) for stage in range(1, max(last, default=0) + 1))


def image_size_told(about: About) -> Size | None:
    """The image size that a `config.json` beside the file tells, if there is one: a side, or [height, width]."""
    told = about.config.get("image_size")
    match told:
        case bool() | None:
            return None
        case int():
            return told
        case [int(height), int(width)]:
            return height, width
    return None


def fitted(size: Size, cell: tuple[int, int]) -> tuple[int, int]:
    """Height and width in whole patches of `cell` pixels, one at least; what is left over the origin's code cuts off.

    >>> fitted(384, (14, 14))
    (378, 378)
    """
    height, width = (max(side // pixels, 1) * pixels for side, pixels in zip(pair(size), cell, strict=True))
    return height, width


@dataclass(frozen=True)
class Table:
    """What the number of rows of a position table says."""

    image_size: Size
    covers: Literal["all", "patches"]


def table_of(rows: int, *, cell: tuple[int, int], prefixes: tuple[int, ...], told: Size | None) -> Table:
    """The image size of a table of positions; the grid is square unless told otherwise.

    `cell` is the height and width of a patch in image pixels, `prefixes` are the rows that may stand before those of
    the patches: a table of 16 rows is of 4×4 patches, or of a class token and 3×5.

    >>> table_of(197, cell=(16, 16), prefixes=(1,), told=None)
    Table(image_size=224, covers='all')
    """
    for prefix in prefixes:
        side = isqrt(max(rows - prefix, 1))
        height, width = fitted(told, cell) if told else (side * cell[0], side * cell[1])
        if (height // cell[0]) * (width // cell[1]) == rows - prefix:
            return Table(size_of(height, width), "all" if prefix else "patches")
    if told:
        raise WeightsError(
            "config.json gives another image size than the position table",
            expected=f"the rows of {told} pixels",
            got=f"{rows} rows",
        )
    raise WeightsError(
        "the position table is not of a square grid",
        expected=" or ".join("a square number of rows" + " and one" * prefix for prefix in prefixes),
        got=rows,
        hint='say "image_size": [height, width] in a config.json beside the file',
    )


def depth_of(shapes: Shapes, naming: Naming) -> int:
    """The number of layers, counting up to the last that has a tensor, so that gaps are found missing."""
    if naming.stacked:
        depth = shape_of(shapes, f"{naming.block(0)}{naming.norms[0]}/scale", axes=2)[0]
    else:
        numbers = (re.match(r"Transformer/encoderblock_([0-9]{1,9})/", name[len(naming.prefix) :]) for name in shapes)
        depth = 1 + max((int(found[1]) for found in numbers if found), default=0)
    if depth > MOST_LAYERS:
        raise WeightsError("the file claims too many layers", expected=f"at most {MOST_LAYERS}", got=depth)
    return depth


def describe(shapes: Shapes, about: About) -> ViTConfig:
    """The model in a file of either kind.

    Without a table of positions it has sine-cosine ones, as in big_vision, or none where the file is of the paper's
    code; its image size is then 224 unless `config.json` says another.
    """
    naming = naming_of(shapes)
    if naming is None:
        raise WeightsError(
            "the file holds none of Google's Vision Transformers", expected="embedding/kernel and blocks"
        )
    at = naming.prefix
    height, width, inputs, hidden = shape_of(shapes, f"{at}embedding/kernel", axes=4)
    backbone, channels = None, inputs
    try:
        if f"{at}conv_root/kernel" in shapes:
            root = shape_of(shapes, f"{at}conv_root/kernel", axes=4)
            units = units_of(shapes, pattern=re.escape(at) + r"block([0-9])/unit([0-9]{1,2})/")
            backbone, channels = BackboneConfig(units=units, root_width=root[3]), root[2]
        stride = backbone.stride if backbone else 1
        cell, class_token = (height * stride, width * stride), f"{at}cls" in shapes
        image_size, positions = placed(shapes, naming, cell=cell, class_token=class_token, about=about)
        pooling, layers = pooling_of(shapes, naming), int(naming.stacked)
        query = shape_of(shapes, f"{naming.block(0)}{naming.attention}/query/kernel", axes=layers + 3)
        dense = shape_of(shapes, f"{naming.block(0)}{naming.mlp}/Dense_0/kernel", axes=layers + 2)
        if query[-2] * query[-1] != hidden:
            raise WeightsError("the heads do not make up the width", expected=hidden, got=f"{query[-2]} × {query[-1]}")
        return ViTConfig(
            image_size=image_size,
            patch_size=size_of(height, width),
            channels=channels,
            width=hidden,
            depth=depth_of(shapes, naming),
            heads=query[-2],
            mlp_dim=dense[-1],
            classes=outputs(shapes, f"{at}head/kernel") or 0,
            pooling=pooling,
            backbone=backbone,
            positions=positions,
            tokens=TokenConfig(class_token=True if class_token and pooling != "class" else None),
            head=HeadConfig(pre_logits=outputs(shapes, f"{at}pre_logits/kernel")),
        )
    except ConfigError as error:
        raise impossible(error) from error


def placed(
    shapes: Shapes, naming: Naming, *, cell: tuple[int, int], class_token: bool, about: About
) -> tuple[Size, PositionConfig]:
    """The image size, and the positions that belong to it."""
    told, name = image_size_told(about), naming.prefix + naming.positions
    if name in shapes:
        rows = shape_of(shapes, name, axes=3)[1]
        # big_vision gives the class token no position; its old files and all of the paper's do.
        prefixes = (0,) if not class_token else (1,) if is_paper(shapes) else (1, 0)
        table = table_of(rows, cell=cell, prefixes=prefixes, told=told)
        # Where there is no class token, what its position would be is a matter of the code it would be added in.
        covers = table.covers if class_token or not is_paper(shapes) else "all"
        return table.image_size, PositionConfig(covers=covers)
    image_size = size_of(*fitted(told or USUAL_SIZE, cell))
    if is_paper(shapes):
        return image_size, PositionConfig(kind="none")
    return image_size, PositionConfig(kind="sincos_2d", covers="patches")


def pooling_of(shapes: Shapes, naming: Naming) -> Literal["class", "mean", "map"]:
    """How a model pools its tokens: the tensors it has for that say so."""
    if f"{naming.prefix}{naming.pooling}probe" in shapes:
        return "map"
    return "class" if f"{naming.prefix}cls" in shapes else "mean"


def outputs(shapes: Shapes, kernel: str) -> int | None:
    """The outputs of a dense layer, None where it is not there."""
    return shape_of(shapes, kernel, axes=2)[1] if kernel in shapes else None
