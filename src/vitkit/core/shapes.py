"""Tensor types and the axis letters of every signature. Shapes are checked at run time under pytest.

| letter | axis | | letter | axis |
|---|---|---|---|---|
| B | batch | | L | tokens (class token and patches together) |
| C | channels | | D | width |
| H W | image height and width in pixels | | A | heads |
| P | values of one patch, all channels (P²C) | | K | width of one head (D / A) |
| N | patches | | M | hidden width of the MLP |
| Y | classes | | F | features that the head reads |

A patch grid is a pair (rows, columns), never a single number.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor"]
