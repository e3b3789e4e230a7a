"""What every comparison with other people's code needs: weights that hide nothing, outputs with all gradients, and
one measure of agreement."""

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
"""The largest difference allowed, as a share of the largest number in the tensor."""

LARGE_KERNELS = 1e6
"""Libraries add different eps when they standardise kernels. Against a deviation as large as this none of them counts,
so that all the rest can be compared; the NumPy witness is there to judge the eps."""

CANCELLED = ("k_norm.bias", "k_proj.bias", "key.bias")
"""A bias on keys adds the same to all logits of a query: its true gradient is zero, and what is there is noise."""


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int = 0, kernels: float = LARGE_KERNELS) -> None:
    """Draw all parameters of a model anew, none of them zero and no norm trivial, activations of order 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith(".weight") and parameter.ndim == 4:
            # Standardised kernels have a mean to take off; their deviation counts only beside an eps.
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
class Outcome:
    """What a model made of images: its output, and by name the gradients of all parameters and of the images."""

    output: Tensor
    gradients: dict[str, Tensor]


def outcome(model: nn.Module, images: Tensor, *, read: Callable[[Any], Tensor] = lambda output: output) -> Outcome:
    """Run a model in evaluation mode and go back from the cross entropy of its output (`read` from what it returns).

    An output of one row a token, rather than one an image, is treated as so many more images.
    """
    images = images.to(next(model.parameters()).dtype).requires_grad_()
    output = read(model.eval()(images))
    rows = output.flatten(0, -2)
    labels = torch.arange(len(rows)) % rows.shape[1]
    model.zero_grad()
    functional.cross_entropy(rows, labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(output.detach(), gradients | {"images": images.grad})


def assert_close(actual: Tensor, expected: Tensor, *, what: str = "output", scale: Tensor | None = None) -> None:
    """Equal up to `TOLERANCE`, relative to the largest number expected, or to another scale."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert expected.abs().max() > 0 or scale is not None, f"{what} is all zeros, which compares nothing"
    difference = (actual - expected).abs().max() / (expected.abs().max() if scale is None else scale)
    assert difference <= TOLERANCE[expected.dtype], f"{what} differs by {difference:.1e} of its largest number"


def assert_same_outcome(
    actual: Outcome, expected: Outcome, *, rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
) -> None:
    """The same output and the same gradients; `rename` turns our names into theirs."""
    assert_close(actual.output, expected.output)
    ours, theirs = rename(actual.gradients), expected.gradients
    assert ours.keys() == theirs.keys()
    largest = torch.stack([gradient.abs().max() for gradient in theirs.values()]).max()
    for name, gradient in theirs.items():
        scale = largest if name.endswith(CANCELLED) else None
        assert_close(ours[name], gradient, what=f"the gradient of {name}", scale=scale)
