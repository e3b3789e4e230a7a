"""The shapes in a file go in, the sizes that it leaves unsaid come out; and why a plain ViT's file refuses a model."""

import math
from collections.abc import Iterable

from vitkit.checkpoints.mapping import Shapes
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import Size
from vitkit.model.config import ViTConfig
from vitkit.zoo.variants import SIZES

USUAL_HEADS = {config.width: config.heads for config in SIZES.values()}
NOT_A_TABLE = {
    "none": "no positions",
    "learned_2d": "two tables of positions",
    "relative": "relative positions",
    "rotary": "rotary positions",
}


def shape_of(shapes: Shapes, name: str, *, axes: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there, with so many axes.

    >>> shape_of({"head.weight": (10, 64)}, "head.weight", axes=2)
    (10, 64)
    """
    if name not in shapes:
        raise WeightsError(f"the file has no {name}", hint="it is of another model, or incomplete")
    if len(shapes[name]) != axes or min(shapes[name]) < 1:
        got = " × ".join(map(str, shapes[name])) or "a single number"
        raise WeightsError(f"{name} has no such shape", expected=f"{axes} axes", got=got)
    return shapes[name]


def impossible(error: ConfigError) -> WeightsError:
    """What is wrong with a file whose sizes make no model.

    >>> impossible(ConfigError("the heads do not divide the width", got=7)).message
    'the file holds no model that can be: the heads do not divide the width'
    """
    message = f"the file holds no model that can be: {error.message}"
    return WeightsError(message, expected=error.expected, got=error.got, hint=error.hint)


def usual_heads(width: int) -> int:
    """The heads of a model whose file does not say: the paper's for its widths, else 64 wide.

    >>> usual_heads(1024), usual_heads(1280), usual_heads(1536)
    (16, 16, 24)
    """
    if width in USUAL_HEADS:
        return USUAL_HEADS[width]
    if width < 64 or width % 64:
        raise WeightsError(
            f"nothing says how many heads share the width of {width}",
            hint="put the config.json of the model beside the file",
        )
    return width // 64


def tells_heads(config: ViTConfig) -> bool:
    """Whether a file that does not say how many heads there are would be read with those of the model.

    >>> tells_heads(ViTConfig()), tells_heads(ViTConfig(heads=8)), tells_heads(ViTConfig(width=80, heads=1))
    (True, False, False)
    """
    try:
        return usual_heads(config.width) == config.heads
    except WeightsError:
        return False


def square_side(patches: int) -> int:
    """The side of a grid of which a file gives the number of patches alone.

    >>> square_side(196)
    14
    """
    side = math.isqrt(max(patches, 0))
    if side < 1 or side**2 != patches:
        raise WeightsError(
            "the positions do not make a square",
            expected="1, 4, 9, 16 … patches",
            got=patches,
            hint="put the config.json of the model beside the file",
        )
    return side


def size_of(height: int, width: int) -> Size:
    """One number for a square.

    >>> size_of(16, 16), size_of(16, 8)
    (16, (16, 8))
    """
    return height if height == width else (height, width)


def first_reason(reasons: Iterable[tuple[bool, str]]) -> str | None:
    """The first of some reasons that holds.

    >>> first_reason([(False, "a hybrid"), (True, "registers")])
    'registers'
    """
    return next((reason for holds, reason in reasons if holds), None)


def not_plain(config: ViTConfig) -> str | None:
    """Why a file of one stem, one table of positions and a normed class token cannot hold a model, or None.

    >>> not_plain(ViTConfig(pooling="mean")), not_plain(ViTConfig())
    ('mean pooling', None)
    """
    positions = config.positions
    return first_reason(
        (
            (config.backbone is not None, "a hybrid"),
            (config.block.axial, "axial attention"),
            (config.pooling != "class", f"{config.pooling} pooling"),
            (positions.kind in NOT_A_TABLE, NOT_A_TABLE.get(positions.kind, "")),
            (positions.place != "stem", "positions at every layer"),
            (positions.covers != "all", "a class token without a position"),
            (config.block.attention.qk_norm, "normed queries and keys"),
            (config.head.norm != "before_pooling", "a norm after pooling"),
        )
    )
