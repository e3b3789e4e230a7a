"""A configuration goes in, what it costs comes out: operations, exaFLOPs of a whole run, and memory."""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from vitkit.core.shapes import Tensor, pair
from vitkit.zoo.flops import Parts, forward_flops
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig

TRAINING_FACTOR = 3
"""A training step costs three forward passes: forward, gradients of inputs, gradients of weights."""
EXA = 10**18


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The ledger of a model. Bytes are for float32 weights and Adam, whose state is two numbers a weight."""

    parts: Parts
    parameters: int
    activation_bytes: int

    @property
    def forward_flops(self) -> int:
        """Operations to classify one image."""
        return sum(self.parts.values())

    @property
    def train_flops(self) -> int:
        """Operations to learn from one image once."""
        return TRAINING_FACTOR * self.forward_flops

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return 4 * self.parameters

    def exaflops(self, *, images: int, epochs: int | float) -> float:
        """Operations of a whole run, in units of 10^18."""
        return self.train_flops * images * epochs / EXA

    def training_bytes(self, batch: int) -> int:
        """Memory of weights, gradients, Adam's state, and what a batch leaves for the backward pass."""
        return 4 * self.weight_bytes + batch * self.activation_bytes


def cost(config: ModelConfig) -> Cost:
    """What a model costs; nothing is computed but shapes.

    >>> from vitkit.zoo.lookup import configure
    >>> ledger = cost(configure("B/16"))
    >>> round(ledger.exaflops(images=303_000_000, epochs=7))
    224
    """
    return Cost(
        parts=forward_flops(config),
        parameters=sum(parameter.numel() for parameter in create(config, device="meta").parameters()),
        activation_bytes=activation_bytes(config),
    )


def activation_bytes(config: ModelConfig) -> int:
    """What autograd keeps of one image's forward pass in training, counted in a pass over tensors without data."""
    model = create(config, device="meta").train()
    kept: dict[int, Tensor] = {}

    def remember(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode():
        parameters = {
            name: torch.empty(parameter.shape, requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        images = torch.empty(1, config.channels, *pair(config.image_size))
        with saved_tensors_hooks(remember, lambda tensor: tensor):
            functional_call(model, parameters, (images,))
    for parameter in parameters.values():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
