"""A model and a batch of labelled images go in, the loss to descend and the numbers to show come out."""

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn import functional

from vitkit.core.errors import check_share
from vitkit.core.shapes import Float, Tensor
from vitkit.objectives.objective import Objective, Outcome

__all__ = ["Objective", "Outcome", "Supervised", "SupervisedConfig", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Softmax or sigmoid cross-entropy; the latter for data sets whose images have several labels (appendix B.1)."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_share("objective.smoothing", self.smoothing)


class Supervised:
    """Cross-entropy between the model's logits and targets that may be mixed, or smoothed.

    >>> import torch
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> outcome = Supervised(SupervisedConfig())(model, torch.rand(8, 1, 2, 2), torch.eye(2).repeat(4, 1))
    >>> outcome.loss.shape, sorted(outcome.sums)
    (torch.Size([]), ['correct'])
    """

    def __init__(self, config: SupervisedConfig) -> None:
        self.config = config

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Float[Tensor, "B Y"]) -> Outcome:
        """The mean loss of the batch, and how many of its images are right."""
        logits = model(images).float()
        correct = (logits.argmax(dim=1) == targets.argmax(dim=1)).sum()
        return Outcome(cross_entropy(logits, targets, loss=self.config.loss), {"correct": correct})


def cross_entropy(
    logits: Float[Tensor, "B Y"], targets: Float[Tensor, "B Y"], *, loss: Literal["softmax", "sigmoid"]
) -> Float[Tensor, ""]:
    """The mean over images; a sigmoid loss is the sum over an image's classes, as in the released code.

    >>> import torch
    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]]), loss="softmax").item()
    1.3862943649291992
    """
    if loss == "softmax":
        return functional.cross_entropy(logits, targets)
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1).mean()
