"""The one axis legend: the letters that stand for axes in every signature, checked at run time under pytest.

| letter | axis | | letter | axis |
|---|---|---|---|---|
| B | batch | | L | tokens (class token and patches together) |
| C | channels | | D | width |
| H W | pixels, down and across | | A | heads |
| P | pixels of one patch, all channels (P²C) | | K | width of one head (D / A) |
| N | patches | | M | hidden width of the MLP |
| Y | classes | | F | features that the head reads |

A patch grid is a pair (rows, columns), never a single number.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Size", "Tensor", "pair", "sides"]

Size = int | tuple[int, int]
"""A side for a square, or (height, width)."""


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of a size.

    >>> pair(224), pair((224, 320))
    ((224, 224), (224, 320))
    """
    return (size, size) if isinstance(size, int) else size


def sides(size: Size) -> str:
    """A size as height × width.

    >>> sides(224), sides((224, 320))
    ('224×224', '224×320')
    """
    return "{}×{}".format(*pair(size))
