"""The logits of a split and its labels go in; a Judgement comes out: every number that says how good the model is."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import DataError, InputError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.objectives.metrics import (
    Calibration,
    bootstrap_interval,
    calibration,
    class_scores,
    confidences,
    confusion_matrix,
    negative_log_likelihood,
    top_k,
)

__all__ = ["ClassJudgement", "Judgement", "Mistake", "judge"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, kw_only=True)
class ClassJudgement:
    """How well one class is told from the others; None where there is nothing to divide by."""

    name: str
    count: int
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A wrong answer: which image, what it is, what it was taken for, and the probabilities of both."""

    index: int
    label: int
    predicted: int
    probability: float
    label_probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Judgement:
    """How good a model is on a split. Shares and probabilities are 0…1; probabilities are the softmax's."""

    classes: tuple[str, ...]
    count: int
    """Images judged."""
    top1: float
    top5: float
    """Share of images whose label is among the five likeliest, or among all where there are fewer classes."""
    ece: float
    nll: float
    """Mean negative log-likelihood of the labels, in nats."""
    intervals: dict[str, tuple[float, float]]
    """95 % bootstrap intervals of top1 and top5."""
    per_class: list[ClassJudgement]
    confusion: NDArray[np.int64]
    """How often each class (row) was taken for each class (column)."""
    calibration: Calibration
    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    """Of each image's prediction."""
    label_probabilities: NDArray[np.float64]
    """Of each image's label."""

    def most_confident_mistakes(self, n: int) -> list[Mistake]:
        """The n wrong answers the model was surest of, surest first; fewer where it made fewer.

        >>> judgement = judge(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 1]), classes=("cat", "dog"))
        >>> [(mistake.index, round(mistake.probability, 3)) for mistake in judgement.most_confident_mistakes(5)]
        [(0, 0.953), (1, 0.731)]
        """
        wrong = np.flatnonzero(self.labels != self.predictions)
        surest = wrong[np.argsort(-self.probabilities[wrong], kind="stable")][:n]
        return [
            Mistake(
                index=int(index),
                label=int(self.labels[index]),
                predicted=int(self.predictions[index]),
                probability=float(self.probabilities[index]),
                label_probability=float(self.label_probabilities[index]),
            )
            for index in surest
        ]

    def to_json(self) -> dict[str, Json]:
        """What `vitkit eval --json` prints; plain data that strict JSON can hold, null where there is no number.

        >>> judgement = judge(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), classes=("cat", "dog"))
        >>> judgement.to_json()["per_class"][0]
        {'name': 'cat', 'count': 1, 'recall': 1.0, 'precision': 1.0, 'f1': 1.0}
        """
        return {
            "top1": self.top1,
            "top5": self.top5,
            "count": self.count,
            "ece": self.ece,
            "nll": self.nll,
            "intervals": {name: [low, high] for name, (low, high) in self.intervals.items()},
            "per_class": [
                {
                    "name": scores.name,
                    "count": scores.count,
                    "recall": scores.recall,
                    "precision": scores.precision,
                    "f1": scores.f1,
                }
                for scores in self.per_class
            ],
            "confusion": self.confusion.tolist(),
            "calibration": [
                {
                    "above": number / len(self.calibration.count),
                    "to": (number + 1) / len(self.calibration.count),
                    "count": int(self.calibration.count[number]),
                    "confidence": _number(self.calibration.confidence[number]),
                    "accuracy": _number(self.calibration.accuracy[number]),
                }
                for number in range(len(self.calibration.count))
            ],
        }


def judge(
    logits: Float[Tensor, "B Y"], labels: Int[Tensor, "B"], *, classes: tuple[str, ...], seed: int = 0
) -> Judgement:
    """Judge the logits of a split against its labels; `seed` draws the bootstrap.

    >>> judgement = judge(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), classes=("cat", "dog"))
    >>> judgement.top1, judgement.top5, judgement.confusion.tolist()
    (0.5, 1.0, [[1, 0], [1, 0]])
    """
    _check(logits, labels, classes=classes)
    labels = labels.long()
    predictions = logits.argmax(dim=1)
    right = {"top1": top_k(logits, labels, k=1), "top5": top_k(logits, labels, k=5)}
    probabilities = confidences(logits)
    surprise = negative_log_likelihood(logits, labels)
    confusion = confusion_matrix(labels, predictions, classes=len(classes))
    bins = calibration(probabilities, right["top1"])
    return Judgement(
        classes=classes,
        count=len(labels),
        top1=right["top1"].double().mean().item(),
        top5=right["top5"].double().mean().item(),
        ece=bins.error,
        nll=surprise.mean().item(),
        intervals={name: bootstrap_interval(correct, seed=seed) for name, correct in right.items()},
        per_class=_per_class(confusion, classes=classes),
        confusion=confusion.cpu().numpy(),
        calibration=bins,
        labels=labels.cpu().numpy(),
        predictions=predictions.cpu().numpy(),
        probabilities=probabilities.cpu().numpy(),
        label_probabilities=torch.exp(-surprise).cpu().numpy(),
    )


def _check(logits: Float[Tensor, "B Y"], labels: Int[Tensor, "B"], *, classes: tuple[str, ...]) -> None:
    """Refuse what would give numbers that mean nothing."""
    if len(labels) == 0:
        raise DataError("there are no images to judge", hint="name a split that has images")
    if logits.shape[1] != len(classes):
        raise InputError("logits and class names do not match", expected=f"{len(classes)} classes", got=logits.shape[1])
    if not logits.isfinite().all():
        raise InputError("the model's logits are not finite", hint="its weights or its input hold NaN or infinity")
    if labels.min() < 0 or labels.max() >= len(classes):
        outside = labels[(labels < 0) | (labels >= len(classes))][0].item()
        raise InputError("a label names no class", expected=f"0…{len(classes) - 1}", got=outside)


def _per_class(confusion: Int[Tensor, "Y Y"], *, classes: tuple[str, ...]) -> list[ClassJudgement]:
    scores = class_scores(confusion)
    return [
        ClassJudgement(
            name=name,
            count=int(scores.count[label]),
            recall=_number(scores.recall[label]),
            precision=_number(scores.precision[label]),
            f1=_number(scores.f1[label]),
        )
        for label, name in enumerate(classes)
    ]


def _number(value: float | np.floating) -> float | None:
    """A number that JSON can hold: None for NaN."""
    return None if math.isnan(value) else float(value)
