"""Supervised objective, compared with losses computed by hand."""

import math

import pytest
import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.data.augment import one_hot
from vitkit.objectives.config import SupervisedConfig
from vitkit.objectives.supervised import SupervisedObjective, cross_entropy


def softmax_by_hand(logits: torch.Tensor, targets: torch.Tensor) -> float:
    losses = []
    for row, target in zip(logits.double().tolist(), targets.double().tolist(), strict=True):
        normalizer = math.log(sum(math.exp(value) for value in row))
        losses.append(-sum(share * (value - normalizer) for value, share in zip(row, target, strict=True)))
    return sum(losses) / len(losses)


def sigmoid_by_hand(logits: torch.Tensor, targets: torch.Tensor) -> float:
    losses = []
    for row, target in zip(logits.double().tolist(), targets.double().tolist(), strict=True):
        shares = [1 / (1 + math.exp(-value)) for value in row]
        pairs = zip(shares, target, strict=True)
        losses.append(-sum(t * math.log(p) + (1 - t) * math.log(1 - p) for p, t in pairs))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("loss", "by_hand"), [("softmax", softmax_by_hand), ("sigmoid", sigmoid_by_hand)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_its_formula(loss, by_hand, smoothing) -> None:
    logits = torch.randn(6, 4)
    targets = one_hot(torch.tensor([0, 1, 2, 3, 0, 1]), num_classes=4, smoothing=smoothing)
    assert cross_entropy(logits, targets, loss=loss).item() == pytest.approx(by_hand(logits, targets), rel=1e-5)


def test_correct_counts_the_largest_target() -> None:
    class Constant(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[5.0, 0.0], [5.0, 0.0], [0.0, 5.0]])

    targets = torch.tensor([[0.7, 0.3], [0.3, 0.7], [0.0, 1.0]])
    output = SupervisedObjective(SupervisedConfig())(Constant(), torch.zeros(3, 1, 2, 2), targets)
    assert output.metrics["correct"].item() == 2


def test_half_precision_logits_have_a_float32_loss() -> None:
    class Half(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2, 3, dtype=torch.bfloat16)

    output = SupervisedObjective(SupervisedConfig())(Half(), torch.zeros(2, 1, 2, 2), torch.eye(3)[:2])
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(math.log(3))


def test_smoothing_must_be_a_fraction() -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        SupervisedConfig(smoothing=1.0)
