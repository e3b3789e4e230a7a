"""Large matrix products, whose speed is the peak that no model can exceed."""

from collections.abc import Callable
from typing import Any

import torch
from candidates import THREADS, Precision

SIDE = 2048
GIGAFLOP = 2 * SIDE**3 / 1e9


def products(precision: Precision) -> list[Callable[[], Any]]:
    """Return torch's implementations of square matrix products in a precision; the fastest is the peak."""
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIDE, SIDE, generator=generator) for _ in range(2))
    if precision == "int8":
        return [integer_product()]
    if precision == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
        return [lambda: left @ right]
    packed = torch.ops.mkldnn._reorder_linear_weight(right, SIDE)
    linear = torch.ops.mkldnn._linear_pointwise
    return [lambda: left @ right, lambda: linear(left, packed, None, "none", [], "")]


def integer_product() -> Callable[[], Any]:
    """Multiply int8 matrices with int32 sums by oneDNN with packed weights."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(0, 255, (SIDE, SIDE), dtype=torch.uint8, generator=generator)
    right = torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8, generator=generator)
    packed = torch.ops.onednn.qlinear_prepack(right, [SIDE, SIDE])
    scales, zeros = torch.ones(SIDE), torch.zeros(SIDE, dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise
    return lambda: linear(left, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
