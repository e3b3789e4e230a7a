"""Two sets of vectors go in, the nearest of the one to each of the other come out: exact, in pieces that fit memory.

What is held at once does not grow with the sets: a block of rows, a block of columns, and their product.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitkit.core.shapes import Float, Int, Tensor

ROWS, COLUMNS = 1024, 8192
"""Of a block: with 384 features its product takes 34 MB and its operands 14."""

Hidden = Literal["nothing", "self", "self and before"]
"""Which columns a row does not see, where both sets are the same."""


class Nearest(NamedTuple):
    """The nearest columns of a block of rows, nearest first; −1 where there are fewer than were asked for."""

    start: int
    cosines: Float[Tensor, "R k"]
    indices: Int[Tensor, "R k"]


def nearest(
    left: NDArray[np.float32], right: NDArray[np.float32], *, count: int, hidden: Hidden = "nothing"
) -> Iterator[Nearest]:
    """For each row of `left`, block by block, the rows of `right` at the smallest angles, with their cosines.

    >>> rows = np.eye(3, dtype=np.float32)
    >>> [block] = nearest(rows[:1], rows + 0.1, count=2)
    >>> block.indices.tolist()
    [[0, 1]]
    """
    for start in range(0, len(left), ROWS):
        rows = unit(left[start : start + ROWS])
        best = Nearest(start, torch.full((len(rows), count), -2.0), torch.full((len(rows), count), -1))
        for first in range(0, len(right), COLUMNS):
            if hidden == "self and before" and first + COLUMNS <= start:
                continue
            cosines = rows @ unit(right[first : first + COLUMNS]).T
            _hide(cosines, start=start, first=first, hidden=hidden)
            best = _merged(best, cosines, first=first)
        yield best


def unit(rows: NDArray[np.float32]) -> Float[Tensor, "R F"]:
    """The rows at length 1. A copy: they may lie in a file that is mapped for reading only."""
    return functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=1)


def _hide(cosines: Float[Tensor, "R C"], *, start: int, first: int, hidden: Hidden) -> None:
    if hidden == "nothing":
        return
    row = torch.arange(start, start + cosines.shape[0])[:, None]
    column = torch.arange(first, first + cosines.shape[1])[None]
    cosines[column <= row if hidden == "self and before" else column == row] = -2.0


def _merged(best: Nearest, cosines: Float[Tensor, "R C"], *, first: int) -> Nearest:
    count = best.cosines.shape[1]
    values, places = cosines.topk(min(count, cosines.shape[1]), dim=1)
    places = torch.where(values > -2.0, places + first, -1)
    both, where = torch.cat([best.cosines, values], dim=1), torch.cat([best.indices, places], dim=1)
    kept, chosen = both.topk(count, dim=1)
    return Nearest(best.start, kept, where.gather(1, chosen))
