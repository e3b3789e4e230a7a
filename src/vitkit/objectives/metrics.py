"""Logits and labels go in, numbers that say how good they are come out; nothing is drawn, stored or averaged twice."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.shapes import Bool, Float, Int, Tensor

__all__ = [
    "Calibration",
    "ClassScores",
    "bootstrap_interval",
    "calibration",
    "class_scores",
    "confidences",
    "confusion_matrix",
    "negative_log_likelihood",
    "top_k",
]


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of each class; NaN where a score has nothing to divide by."""

    count: NDArray[np.int64]
    """Images that are of the class."""
    recall: NDArray[np.float64]
    """Share of the class's images that were found; NaN where the class has none."""
    precision: NDArray[np.float64]
    """Share of the images called this class that are of it; NaN where none was."""
    f1: NDArray[np.float64]
    """Harmonic mean of recall and precision, 0 where one is; NaN where the class neither has nor was given any."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """How far confidence stands from accuracy, overall and in bins of equal width from 0 to 1."""

    error: float
    """Expected calibration error: mean of |accuracy − confidence| over the bins, weighted by their images."""
    count: NDArray[np.int64]
    """Images in each bin."""
    confidence: NDArray[np.float64]
    """Mean confidence in each bin; NaN where it is empty."""
    accuracy: NDArray[np.float64]
    """Share of right answers in each bin; NaN where it is empty."""


def top_k(logits: Float[Tensor, "B Y"], labels: Int[Tensor, "B"], *, k: int) -> Bool[Tensor, "B"]:
    """Whether each image's label is among its k largest logits; of equal logits the lower class comes first.

    So a model that says nothing (a zero head) is right by chance alone, and k = 1 agrees with argmax.

    >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.0, 0.0, 0.0]])
    >>> top_k(logits, torch.tensor([2, 2]), k=2).tolist()
    [True, False]
    """
    of_label = logits.gather(1, labels[:, None])
    index = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > of_label) | ((logits == of_label) & (index < labels[:, None]))
    return before.sum(dim=1) < k


def confusion_matrix(
    labels: Int[Tensor, "B"], predictions: Int[Tensor, "B"], *, classes: int
) -> Int[Tensor, "classes classes"]:
    """How often each class (row) was taken for each class (column).

    >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), classes=2).tolist()
    [[1, 1], [0, 1]]
    """
    pairs = labels.long() * classes + predictions.long()
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def class_scores(confusion: Int[Tensor, "Y Y"]) -> ClassScores:
    """Count, recall, precision and F1 of each class, from how often each was taken for each.

    >>> scores = class_scores(torch.tensor([[1, 1], [0, 2]]))
    >>> scores.recall.tolist(), [round(share, 3) for share in scores.precision.tolist()]
    ([0.5, 1.0], [1.0, 0.667])
    """
    counts: NDArray[np.int64] = confusion.cpu().numpy()
    right, of_class, given = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    return ClassScores(
        count=of_class,
        recall=_share(right, of_class),
        precision=_share(right, given),
        f1=_share(2 * right, of_class + given),
    )


def confidences(logits: Float[Tensor, "B Y"]) -> Float[Tensor, "B"]:
    """The largest softmax probability of each image, in double precision.

    >>> confidences(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.5, 1.0]
    """
    largest = logits.amax(dim=1).double()
    return (largest - _logsumexp(logits)).exp().clamp(max=1.0)


def negative_log_likelihood(logits: Float[Tensor, "B Y"], labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """−log of the softmax probability of each image's label, in double precision.

    >>> negative_log_likelihood(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp().tolist()
    [2.0]
    """
    of_label = logits.gather(1, labels.long()[:, None])[:, 0].double()
    return (_logsumexp(logits) - of_label).clamp(min=0.0)


def calibration(confidence: Float[Tensor, "B"], correct: Bool[Tensor, "B"], *, bins: int = 15) -> Calibration:
    """Expected calibration error over equal-width bins, each open below and closed above.

    Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3, with their 15 bins.

    >>> calibration(torch.full([4], 0.875), torch.tensor([True, True, True, False])).error
    0.125
    """
    sure: NDArray[np.float64] = confidence.cpu().double().numpy()
    right: NDArray[np.float64] = correct.cpu().double().numpy()
    # Rounded to what float32 can tell apart: its 0.2 lies a little above 0.2, which is the third bin's upper end.
    bin_of = np.clip(np.ceil(np.round(sure * bins, 6)) - 1, 0, bins - 1).astype(np.int64)
    count = np.bincount(bin_of, minlength=bins)
    sum_sure, sum_right = (np.bincount(bin_of, weights=of, minlength=bins) for of in (sure, right))
    error = float(np.abs(sum_right - sum_sure).sum() / max(len(sure), 1))
    return Calibration(error=error, count=count, confidence=_share(sum_sure, count), accuracy=_share(sum_right, count))


def bootstrap_interval(
    correct: Bool[Tensor, "B"], *, seed: int = 0, resamples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap interval of the share of right answers, the same for the same seed.

    Drawing n of n answers with replacement and counting the right ones is a binomial draw, so no answer is drawn
    one by one. Where all answers are right, or all wrong, every resample is the same and the interval has no width.

    >>> low, high = bootstrap_interval(torch.arange(1000) < 900)
    >>> round(low, 3), round(high, 3)
    (0.882, 0.918)
    """
    images = len(correct)
    share = correct.double().mean().item()
    shares = np.random.default_rng(seed).binomial(images, share, size=resamples) / images
    low, high = np.quantile(shares, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _logsumexp(logits: Float[Tensor, "B Y"]) -> Float[Tensor, "B"]:
    """Summed in double precision; only the exponentials are not, for 50,000 × 1,000 of them would take 400 MB."""
    logits = logits.float() if logits.dtype != torch.float64 else logits  # half precision cannot hold differences
    largest = logits.amax(dim=1, keepdim=True)
    return largest[:, 0].double() + (logits - largest).exp_().sum(dim=1, dtype=torch.float64).log()


def _share(part: NDArray[np.generic], whole: NDArray[np.generic]) -> NDArray[np.float64]:
    """part / whole, NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole != 0)
