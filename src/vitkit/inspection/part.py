"""What one part of a report holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitkit.core.shapes import Float, Tensor
from vitkit.inspection.canvas import Canvas


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a report. `missing` says in a plain word why there is nothing to see."""

    name: str
    title: str
    text: str = ""
    drawings: Mapping[str, Canvas] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    missing: str | None = None
    likeness: tuple[Float[Tensor, "rows columns rows2 columns2"], ...] = ()
    """Of each drawn image, for the page to light up what is like the patch under the pointer."""


def rounded(tensor: Tensor, digits: int = 6) -> Any:
    """The numbers as nested lists, short enough to store.

    >>> import torch
    >>> rounded(torch.tensor([[0.12345678]]))
    [[0.123457]]
    """
    return (tensor.double() * 10**digits).round().div(10**digits).tolist()
