"""A model goes in, the engine that runs it as it is written comes out: the reference for every other engine."""

from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.engine.engine import CPU, Precision
from vitkit.engine.merging import Merging
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model

Module = TypeVar("Module", bound=nn.Module)


Featured = ViT | BiT | Merging
"""What has two halves: features of images, and a head."""


class ModuleEngine:
    """A torch module as an engine: images go to its device and type, answers come back in float32 on the CPU.

    `at_once` is how many images the module is shown at a time, where fewer than a batch are faster.
    """

    def __init__(
        self,
        module: Featured,
        *,
        name: str,
        precision: Precision = "fp32",
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        at_once: int | None = None,
    ) -> None:
        self.module, self.name, self.precision, self.dtype, self.device = module, name, precision, dtype, device
        self.at_once = at_once

    @torch.no_grad()
    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of each image."""
        return self._features(images).float().cpu()

    @torch.no_grad()
    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits, in one pass."""
        features = self._features(images)
        return features.float().cpu(), self.module.head(features).float().cpu()

    def _features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        moved = images.to(self.device, self.dtype)
        if self.at_once is None or len(moved) <= self.at_once:
            return self.module.features(moved)
        return torch.cat([self.module.features(part) for part in moved.split(self.at_once)])


def written(model: Model, *, precision: Precision = "fp32", device: torch.device = CPU) -> ModuleEngine:
    """The model's own forward pass in fp32, or with everything in bf16.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, classes=10, settings=["depth=1"]).eval()
    >>> images = torch.rand(2, 3, 32, 32)
    >>> bool((written(model).answer(images)[1] == model(images)).all())
    True
    """
    if precision == "int8":
        raise ConfigError("a model as written has no int8 form", expected="fp32 or bf16", got="int8")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module = shared_copy(model).to(device, dtype)
    return ModuleEngine(module, name="torch, as written", precision=precision, dtype=dtype, device=device)


def shared_copy(module: Module) -> Module:
    """A copy in evaluation that can be moved and have parts exchanged; until then its numbers are the original's own.

    >>> original = nn.Linear(2, 2)
    >>> copied = shared_copy(original)
    >>> copied.weight.data_ptr() == original.weight.data_ptr(), copied.bfloat16().weight.dtype, original.weight.dtype
    (True, torch.bfloat16, torch.float32)
    """
    shared: dict[int, Tensor] = {
        id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()
    }
    shared |= {id(each): each.detach() for each in module.buffers()}
    return deepcopy(module, shared).eval()
