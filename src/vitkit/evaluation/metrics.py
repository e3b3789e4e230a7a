"""Classification metrics of logits: top-k, per-class scores, calibration and intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class; None where a denominator is zero."""

    name: str
    count: int
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, eq=False)
class Calibration:
    """Confidence against accuracy, overall and in equal-width bins from 0 to 1."""

    error: float
    """Expected calibration error: mean of |accuracy − confidence| over the bins, weighted by their images."""
    count: NDArray[np.int64]
    """Images in each bin."""
    confidence: NDArray[np.float64]
    """Mean confidence in each bin; NaN if empty."""
    accuracy: NDArray[np.float64]
    """Accuracy in each bin; NaN if empty."""


@dataclass(frozen=True, eq=False)
class Confusion:
    """Sparse confusion matrix: the pairs of true class (row) and predicted class (column) that occur, in order."""

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    count: NDArray[np.int64]

    def matrix(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dense matrix of some classes, given in increasing order."""
        matrix = np.zeros((len(classes), len(classes)), dtype=np.int64)
        selected = np.isin(self.row, classes) & np.isin(self.column, classes)
        indices = (np.searchsorted(classes, index[selected]) for index in (self.row, self.column))
        matrix[tuple(indices)] = self.count[selected]
        return matrix


def target_ranks(logits: Float[Tensor, "B Y"], targets: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Return how many logits come before that of the target; of equal logits the lower class comes first.

    This tie rule makes a model with a zero head correct by chance only, and rank 0 equal to argmax.

    >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.0, 0.0, 0.0]])
    >>> target_ranks(logits, torch.tensor([2, 2])).tolist()
    [1, 2]
    """
    target_logits = logits.gather(1, targets[:, None])
    index = torch.arange(logits.shape[1], device=logits.device)
    precedes = (logits > target_logits) | ((logits == target_logits) & (index < targets[:, None]))
    return precedes.sum(dim=1)


def count_confusion(targets: NDArray[np.int64], predictions: NDArray[np.int64], *, num_classes: int) -> Confusion:
    """Count images by true class (row) and predicted class (column)."""
    pairs, count = np.unique(targets * num_classes + predictions, return_counts=True)
    return Confusion(*np.divmod(pairs, num_classes), count)


def class_metrics(confusion: Confusion, labels: Sequence[str]) -> list[ClassMetrics]:
    """Compute count, recall, precision and F1 of each class from a confusion matrix."""
    is_correct = confusion.row == confusion.column
    correct, targets, predictions = (
        np.bincount(index, weights=count, minlength=len(labels)).astype(np.int64)
        for index, count in (
            (confusion.row, confusion.count * is_correct),
            (confusion.row, confusion.count),
            (confusion.column, confusion.count),
        )
    )
    pairs = ((correct, targets), (correct, predictions), (2 * correct, targets + predictions))
    rows = zip(labels, targets.tolist(), *(_divide(part, whole) for part, whole in pairs), strict=True)
    return [ClassMetrics(name, count, *map(none_if_nan, scores)) for name, count, *scores in rows]


def none_if_nan(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return None if math.isnan(value) else float(value)


def confidences(logits: Float[Tensor, "B Y"]) -> Float[Tensor, "B"]:
    """Return the largest softmax probability of each image, in double precision."""
    return (logits.amax(dim=1).double() - _logsumexp(logits)).exp().clamp(max=1.0)


def negative_log_likelihood(logits: Float[Tensor, "B Y"], targets: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return −log of the softmax probability of each target, in double precision."""
    target_logits = logits.gather(1, targets.long()[:, None])[:, 0].double()
    return (_logsumexp(logits) - target_logits).clamp(min=0.0)


def calibration(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], *, bins: int = 15) -> Calibration:
    """Compute the expected calibration error over equal-width bins, each open below and closed above.

    Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3, with their 15 bins.
    """
    probability: NDArray[np.float64] = confidence.cpu().double().numpy()
    is_correct: NDArray[np.float64] = correct.cpu().double().numpy()
    # Rounded to float32 resolution: its 0.2 lies slightly above 0.2, the upper end of the third bin.
    bin_index = np.clip(np.ceil(np.round(probability * bins, 6)) - 1, 0, bins - 1).astype(np.int64)
    count = np.bincount(bin_index, minlength=bins)
    sums = [np.bincount(bin_index, weights=values, minlength=bins) for values in (probability, is_correct)]
    error = float(np.abs(sums[1] - sums[0]).sum() / max(len(probability), 1))
    return Calibration(error=error, count=count, confidence=_divide(sums[0], count), accuracy=_divide(sums[1], count))


def wilson_interval(correct: int, total: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion, without continuity correction.

    Unlike the bootstrap, it covers about `level` also for proportions near 0 and 1, and always has a width.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).

    >>> [round(end, 3) for end in wilson_interval(100, 100)]
    [0.963, 1.0]
    """
    proportion, z = correct / total, NormalDist().inv_cdf((1 + level) / 2)
    center = (proportion + z**2 / (2 * total)) / (1 + z**2 / total)
    margin = z * math.sqrt(proportion * (1 - proportion) / total + z**2 / (4 * total**2)) / (1 + z**2 / total)
    low = 0.0 if correct == 0 else max(0.0, center - margin)
    high = 1.0 if correct == total else min(1.0, center + margin)
    return low, high


def _logsumexp(logits: Float[Tensor, "B Y"]) -> Float[Tensor, "B"]:
    """Sum in double precision, but not the exponentials: 50,000 × 1,000 of them would take 400 MB."""
    logits = logits.float() if logits.dtype != torch.float64 else logits  # half precision cannot hold differences
    largest = logits.amax(dim=1, keepdim=True)
    return largest[:, 0].double() + (logits - largest).exp_().sum(dim=1, dtype=torch.float64).log()


def _divide(part: NDArray[np.generic], whole: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return part / whole, NaN where whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole != 0)
