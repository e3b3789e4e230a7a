"""Helpers for comparisons with other libraries: random weights, outputs with gradients, and tolerances."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = {
    torch.float32: 1e-5,  # a few hundred roundings of 6e-8: the two sides sum in different orders
    torch.float64: 1e-9,  # nothing but the formulas is left: an eps of 1e-5 for 1e-6 would show
}
"""Largest difference, relative to the largest value of the tensor."""

LARGE_KERNELS = 1e6
"""Libraries use different eps when they standardize kernels. With a standard deviation this large the eps does not
matter, so that everything else can be compared; the NumPy witness checks the eps."""

CANCELLED = ("k_norm.bias", "k_proj.bias", "key.bias")
"""A bias of keys adds the same to all logits of a query, so its gradient is zero up to rounding."""


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int = 0, kernels: float = LARGE_KERNELS) -> None:
    """Randomize all parameters: none is zero, no norm is trivial, and activations are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith(".weight") and parameter.ndim == 4:
            # Standardized kernels have a nonzero mean; their standard deviation matters only relative to the eps.
            value = (noise + 0.5) * (kernels if "conv" in name else parameter[0].numel() ** -0.5)
        elif name.endswith(".weight") and parameter.ndim > 1:
            value = noise * parameter[0].numel() ** -0.5
        elif parameter.ndim == 1 and name.endswith((".weight", ".gamma")):
            value = 1 + 0.3 * noise
        else:
            value = 0.5 * noise  # biases, tokens, positions
        parameter.copy_(value)


def random_images(batch: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class OutputAndGradients:
    """Output of a model, and the gradients of its parameters and images by name."""

    output: Tensor
    gradients: dict[str, Tensor]


def compute_gradients(
    model: nn.Module, images: Tensor, *, read: Callable[[Any], Tensor] = lambda output: output
) -> OutputAndGradients:
    """Compute output and gradients of the cross entropy in evaluation mode; `read` extracts the output.

    An output with one row per token is treated as that many images.
    """
    images = images.to(next(model.parameters()).dtype).requires_grad_()
    output = read(model.eval()(images))
    rows = output.flatten(0, -2)
    labels = torch.arange(len(rows)) % rows.shape[1]
    model.zero_grad()
    functional.cross_entropy(rows, labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return OutputAndGradients(output.detach(), gradients | {"images": images.grad})


def assert_close(actual: Tensor, expected: Tensor, *, name: str = "output", scale: Tensor | None = None) -> None:
    """Check agreement up to `TOLERANCE`, relative to the largest expected value or to `scale`."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert expected.abs().max() > 0 or scale is not None, f"{name} is all zeros, which compares nothing"
    difference = (actual - expected).abs().max() / (expected.abs().max() if scale is None else scale)
    assert difference <= TOLERANCE[expected.dtype], f"{name} differs by {difference:.1e} of its largest number"


def assert_same_gradients(
    actual: OutputAndGradients,
    expected: OutputAndGradients,
    *,
    rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Check that outputs and gradients agree; `rename` converts our names to theirs."""
    assert_close(actual.output, expected.output)
    ours, theirs = rename(actual.gradients), expected.gradients
    assert ours.keys() == theirs.keys()
    largest = torch.stack([gradient.abs().max() for gradient in theirs.values()]).max()
    for key, gradient in theirs.items():
        scale = largest if key.endswith(CANCELLED) else None
        assert_close(ours[key], gradient, name=f"the gradient of {key}", scale=scale)
