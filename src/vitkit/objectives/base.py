"""Interfaces of objectives: (model, images, targets) -> loss and metrics, and how a run builds them.

Supervised objectives get label distributions as targets. Self-supervised ones make their own targets first, from
random numbers that depend on the image's position alone.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Bool, Float, Tensor
from vitkit.data.dataset import ImageSource
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.stored_targets import StoredTargets
from vitkit.model.config import ViTConfig
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.model.vit import ViT
from vitkit.objectives.config import ObjectiveConfig
from vitkit.objectives.teacher import Teacher
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig

Targets_contra = TypeVar("Targets_contra", contravariant=True)
Targets = TypeVar("Targets")


class LossOutput(NamedTuple):
    """Mean loss of a batch, and metrics summed over its images.

    Logs hold the mean of each metric; that of "correct" is called top1.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


@runtime_checkable
class Objective(Protocol[Targets_contra]):
    """A loss function of model, images and targets."""

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Targets_contra) -> LossOutput:
        """Return the mean loss of a batch, and its metrics."""
        ...


@dataclass(frozen=True, kw_only=True)
class PerImageRNG:
    """Random numbers for consecutive images, of which the first is at position `first`.

    The numbers of an image are a function of seed, use and position, however a batch is divided among ranks,
    micro-batches and evaluations. `use` separates steps, and training from evaluation.

    >>> together = PerImageRNG(seed=0, use=1).uniform(3, numbers=5)
    >>> torch.equal(together[2:], PerImageRNG(seed=0, use=1, first=2).uniform(1, numbers=5))
    True
    """

    seed: int
    use: int
    first: int = 0

    def uniform(self, images: int, *, numbers: int) -> Float[Tensor, "B numbers"]:
        """Draw numbers in [0, 1) for each image, on the CPU: they are sorted, and not every device has float64."""
        # Philox counts in blocks of four numbers, so an image's numbers start at its position without skipping any.
        blocks = -(-numbers // 4)
        # NumPy makes a list of numbers below and above 2^63 float64, in which a thousand steps are the same key.
        key = np.array([self.seed, self.use], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key, counter=self.first * blocks))
        return torch.from_numpy(rng.random((images, 4 * blocks))[:, :numbers])


# The loader's keys are below 2^63, so these differ from them.
EVALUATION_USE = 3 << 62
"""`use` of validation images, the same at every evaluation."""


def training_use(step: int) -> int:
    """Return the `use` of a training step."""
    return (1 << 63) + step


GRAY = 128.0
"""Value of hidden pixels in pictures of reconstructions."""


class Reconstruction(NamedTuple):
    """Images and a model's reconstruction of their hidden patches, as pixels 0…255."""

    images: Float[Tensor, "B C H W"]
    hidden: Bool[Tensor, "B H W"]
    """Pixels that were hidden or corrupted, and predicted."""
    predicted: Float[Tensor, "B C H W"]
    """The images with the hidden pixels replaced by the prediction."""

    @property
    def visible(self) -> Float[Tensor, "B C H W"]:
        """The images with hidden pixels in gray."""
        return self.images.masked_fill(self.hidden[:, None], GRAY)


@runtime_checkable
class SelfSupervised(Objective[Targets], Protocol[Targets]):
    """An objective that makes its own targets, and whose predictions can be shown as images."""

    def make_targets(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, rng: PerImageRNG) -> Targets:
        """Choose the patches to predict and return their targets; `pixels` are the images as 0…255."""
        ...

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: Targets
    ) -> Reconstruction:
        """Return the images with the model's prediction of the hidden patches."""
        ...


class ObjectiveBuilder:
    """Everything that a run needs to know about its objective; the defaults are those of supervised training."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def teacher(self) -> str | None:
        """Return the source of the teacher, or None if the objective has none."""
        return None

    def configure_model(self, model: ModelConfig) -> ModelConfig:
        """Return the model's configuration with the changes that the objective needs."""
        return model

    def wrap(self, model: Model, *, generator: torch.Generator | None = None) -> nn.Module:
        """Return the module whose forward pass the objective calls: the model, or a wrapper around it."""
        return model

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        """Return the objective for a wrapped model."""
        raise NotImplementedError

    def stored_targets(self, source: ImageSource) -> StoredTargets | None:
        """Return the stored targets of the training images, or None if the objective has none."""
        return None

    def forward_flops(self, model: ModelConfig) -> int:
        """Return the FLOPs of a training forward pass of one image."""
        return sum(count_forward_flops(model).values())

    def pretraining_config(self) -> MaskedConfig | MAEConfig | None:
        """Return the configuration of the pre-training wrapper to save with the model."""
        return None


class PretrainingBuilder(ObjectiveBuilder):
    """Builder for self-supervised objectives, which wrap a headless ViT."""

    def configure_model(self, model: ModelConfig) -> ModelConfig:
        if isinstance(model, ViTConfig):
            return replace(model, head=replace(model.head, pre_logits=None, bias=0.0))
        return model


def require_vit(model: nn.Module) -> ViT:
    """Return the model, or raise an error if it has no patches to hide."""
    if not isinstance(model, ViT):
        raise ConfigError(
            "hiding patches needs a Vision Transformer", expected="a ViT", got="a ResNet", hint="set model.name=B/16"
        )
    return model
