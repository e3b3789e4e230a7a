"""Supervised objective: cross-entropy with labels."""

from typing import Any, Literal

from torch import nn
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.data.preprocessing import Preprocessing
from vitkit.objectives.base import LossOutput, Objective, ObjectiveBuilder
from vitkit.objectives.config import SupervisedConfig
from vitkit.objectives.teacher import Teacher


class SupervisedObjective:
    """Cross-entropy of the logits with target distributions, which may be mixed or smoothed."""

    def __init__(self, config: SupervisedConfig) -> None:
        self.config = config

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Float[Tensor, "B Y"]) -> LossOutput:
        """Return the mean loss, and the number of correct predictions."""
        logits = model(images).float()
        correct = (logits.argmax(dim=1) == targets.argmax(dim=1)).sum()
        return LossOutput(cross_entropy(logits, targets, loss=self.config.loss), {"correct": correct})


class SupervisedBuilder(ObjectiveBuilder):
    """Builder of the supervised objective."""

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        return SupervisedObjective(self.config)


def cross_entropy(
    logits: Float[Tensor, "B Y"], targets: Float[Tensor, "B Y"], *, loss: Literal["softmax", "sigmoid"]
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over images; a sigmoid loss sums over classes, as in the paper's released code.

    >>> import torch
    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]]), loss="softmax").item()
    1.3862943649291992
    """
    if loss == "softmax":
        return functional.cross_entropy(logits, targets)
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1).mean()
