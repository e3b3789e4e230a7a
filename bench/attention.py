"""Compare attention from matrix products with PyTorch's fused kernel, forward and backward in bfloat16, one thread.

    python bench/attention.py

The times are CPU time, the shapes those of small images, of 224 and of 384 pixels.
"""

import statistics
import time
from collections.abc import Callable

import torch
from timing import gc_disabled, interleave
from torch import Tensor
from torch.nn import functional

from vitkit.model.attention import scaled_dot_product_attention

SHAPES = [(128, 6, 36, 32), (128, 6, 64, 32), (32, 3, 64, 64), (16, 3, 197, 64), (8, 12, 197, 64), (4, 12, 577, 64)]
"""Images, heads, tokens and width of a head."""
ROUNDS = 12


def main() -> None:
    """Print a table of milliseconds."""
    torch.set_num_threads(1)
    print("| images | heads | tokens | width | vitkit | fused | ratio |\n|--:|--:|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        runs = {"vitkit": step(scaled_dot_product_attention, shape), "fused": step(fused, shape)}
        times: dict[str, list[float]] = {name: [run()] for name, run in runs.items()}
        with gc_disabled():
            interleave(runs, times, rounds=ROUNDS)
        vitkit, peer = (1e3 * statistics.median(times[name]) for name in runs)
        print(
            "|", " | ".join(map(str, shape)), f"| {vitkit:.1f} ms | {peer:.1f} ms | {peer / vitkit:.2f} |", flush=True
        )


def fused(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Call the fused kernel."""
    return functional.scaled_dot_product_attention(queries, keys, values)


def step(attention: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> Callable[[], float]:
    """Return a function that runs forward and backward and returns its seconds."""
    images, heads, tokens, width = shape
    inputs = [
        torch.randn(images, tokens, heads, width).to(torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
    ]

    def run() -> float:
        start = time.process_time()
        result = attention(*inputs)
        result.backward(torch.ones_like(result))
        return time.process_time() - start

    return run


if __name__ == "__main__":
    main()
