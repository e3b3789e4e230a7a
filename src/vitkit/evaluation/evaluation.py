"""Evaluation of a classifier: the result type, and the functions that compute it from logits or from a model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import ConfigError, DataError, InputError, did_you_mean
from vitkit.core.formatting import shorten_list
from vitkit.core.result import Result, draw, select, to_json
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.data.dataset import Dataset, ImageSource
from vitkit.data.verify import BadFile
from vitkit.evaluation.metrics import (
    Calibration,
    ClassMetrics,
    Confusion,
    calibration,
    class_metrics,
    confidences,
    count_confusion,
    negative_log_likelihood,
    none_if_nan,
    target_ranks,
    wilson_interval,
)
from vitkit.weights.bundle import ModelBundle

if TYPE_CHECKING:
    import matplotlib.figure

PLOTS = ("confusion", "calibration", "per_class")
"""Figures of an evaluation."""
SPLIT_ORDER = ("test", "val", "all", "train")
"""Splits in the order in which they are preferred for evaluation."""


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction: image index, true and predicted class, and the probabilities of both."""

    index: int
    target: int
    predicted: int
    probability: float
    target_probability: float


@dataclass(frozen=True, kw_only=True)
class EvaluatedEngine:
    """Engine that was evaluated instead of the unmodified model in fp32."""

    name: str
    precision: str
    merge: int
    fallback_reason: str | None
    """Reason why no faster engine was used."""


@dataclass(frozen=True, kw_only=True)
class RealAccuracy:
    """Accuracy on the ImageNet validation images that have ReaL labels."""

    top1: float
    count: int
    skipped: int
    """Images without labels."""
    interval: tuple[float, float]
    """95 % interval (Wilson)."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EvaluationResult(Result):
    """Metrics of a model on a split. Fractions and probabilities are 0..1; arrays are by image."""

    labels: tuple[str, ...]
    count: int
    top1: float
    top5: float
    """Fraction of images whose class is among the five likeliest, or among all if there are fewer classes."""
    ece: float
    nll: float
    """Mean negative log-likelihood in nats."""
    intervals: dict[str, tuple[float, float]]
    """95 % intervals (Wilson) of top1 and top5."""
    per_class: list[ClassMetrics]
    confusion: Confusion
    """Images by true and predicted class, for the pairs that occur."""
    calibration: Calibration
    targets: NDArray[np.int64]
    """Index of the true class."""
    predictions: NDArray[np.int64]
    """Index of the predicted class."""
    confidences: NDArray[np.float64]
    """Probability of the prediction."""
    target_probabilities: NDArray[np.float64]
    """Probability of the true class."""
    probabilities: NDArray[np.float32] | None = None
    """Probability of every class, N × classes, if it was to be kept."""
    split: str | None = None
    skipped: tuple[BadFile, ...] = ()
    """Files that could not be read."""
    label_map: dict[str, object] | None = None
    images_left_out: int = 0
    """Images whose class the label map does not cover."""
    real: RealAccuracy | None = None
    engine: EvaluatedEngine | None = None
    fp32: "EvaluationResult | None" = None
    """Metrics of the unmodified model on the same images, if an engine was evaluated."""

    @property
    def accuracy(self) -> float:
        """Return top1."""
        return self.top1

    def confusion_matrix(self) -> NDArray[np.int64]:
        """Return the number of images by true class (row) and predicted class (column)."""
        return self.confusion.matrix(np.arange(len(self.labels)))

    def plot(self, kind: Literal["confusion", "calibration", "per_class"] = "confusion") -> "matplotlib.figure.Figure":
        """Draw the confusion matrix, accuracy by confidence, or recall and precision of each class."""
        if kind not in PLOTS:
            raise ConfigError(f"there is no plot {kind!r}", expected=", ".join(PLOTS), hint=did_you_mean(kind, PLOTS))
        return draw(f"plot_{kind}", self)

    def highlights(self) -> dict[str, object]:
        """Return the main metrics."""
        return self._summary() | {"count": self.count, "split": self.split}

    def mistakes(self, n: int) -> list[Mistake]:
        """Return the n wrong predictions with the highest probability, or fewer."""
        wrong = np.flatnonzero(self.targets != self.predictions)
        order = wrong[np.argsort(-self.confidences[wrong], kind="stable")][:n]
        columns = (order, self.targets[order], self.predictions[order])
        probabilities = (self.confidences[order], self.target_probabilities[order])
        return [Mistake(*row) for row in zip(*(column.tolist() for column in (*columns, *probabilities)), strict=True)]

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit eval --json` prints; None where a number does not exist."""
        bins = self.calibration
        columns = zip(bins.count.tolist(), bins.confidence, bins.accuracy, strict=True)
        result = self._summary() | select(self, "count", "labels", "intervals", "per_class")
        result |= {
            "confusion": {name: pairs.tolist() for name, pairs in vars(self.confusion).items()},
            "calibration": [
                {"above": index / len(bins.count), "to": (index + 1) / len(bins.count), "count": count}
                | {"confidence": none_if_nan(confidence), "accuracy": none_if_nan(accuracy)}
                for index, (count, confidence, accuracy) in enumerate(columns)
            ],
        }
        if self.split is not None:
            result |= select(self, "split", "skipped")
        if self.label_map is not None:
            result |= select(self, "label_map", "images_left_out")
        if self.real is not None:
            result["real"] = to_json(self.real)
        if self.engine is not None and self.fp32 is not None:
            engine, fp32 = self.engine, self.fp32
            result |= {"precision": engine.precision, "merge": engine.merge, "engine": engine.name}
            result |= {"fp32": fp32._summary()}
            result |= {"difference": {"top1": self.top1 - fp32.top1, "top5": self.top5 - fp32.top5}}
        return result

    def _summary(self) -> dict[str, object]:
        return {"top1": self.top1, "top5": self.top5, "ece": self.ece, "nll": self.nll}


class ImageMetrics:
    """Metrics of single images, collected batch by batch: a few numbers per image are held, but no logits.

    >>> images = ImageMetrics(("cat", "dog"), count=2)
    >>> for target in (0, 1):
    ...     images.add(torch.tensor([[2.0, 0.0]]), torch.tensor([target]))
    >>> images.result().top1
    0.5
    """

    def __init__(self, labels: tuple[str, ...], *, count: int, keep_probabilities: bool = False) -> None:
        if not count:
            raise DataError("there are no images to evaluate on", hint="choose a split that has images")
        self.labels, self.count, self.keep_probabilities = labels, count, keep_probabilities
        self._columns: dict[str, Tensor] = {}
        self._added = 0

    def add(
        self, logits: Float[Tensor, "B Y"], targets: Int[Tensor, "B"], *, ranks: Int[Tensor, "B"] | None = None
    ) -> None:
        """Add a batch. `ranks` are those of the targets if they are not to be computed from these logits."""
        self._check(logits, targets)
        targets = targets.long()
        columns = {
            "targets": targets,
            "predictions": logits.argmax(dim=1),
            "ranks": target_ranks(logits, targets) if ranks is None else ranks,
            "confidences": confidences(logits),
            "nll": negative_log_likelihood(logits, targets),
        }
        if self.keep_probabilities:
            columns["probabilities"] = logits.float().softmax(dim=1)
        # Allocated once: small tensors of every batch would keep malloc from reusing the memory of the logits.
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = torch.empty(self.count, *values.shape[1:], dtype=values.dtype)
            self._columns[name][self._added : self._added + len(values)] = values
        self._added += len(targets)

    def result(self) -> EvaluationResult:
        """Return the metrics of all images that were added."""
        if self._added != self.count:
            raise InputError("not all images were added", expected=self.count, got=self._added)
        columns = self._columns
        correct = {"top1": columns["ranks"] < 1, "top5": columns["ranks"] < 5}
        targets, predictions = columns["targets"].numpy(), columns["predictions"].numpy()
        confusion = count_confusion(targets, predictions, num_classes=len(self.labels))
        bins = calibration(columns["confidences"], correct["top1"])
        return EvaluationResult(
            labels=self.labels,
            count=self.count,
            top1=correct["top1"].double().mean().item(),
            top5=correct["top5"].double().mean().item(),
            ece=bins.error,
            nll=columns["nll"].mean().item(),
            intervals={name: wilson_interval(int(each.sum()), len(each)) for name, each in correct.items()},
            per_class=class_metrics(confusion, self.labels),
            confusion=confusion,
            calibration=bins,
            targets=targets,
            predictions=predictions,
            confidences=columns["confidences"].numpy(),
            target_probabilities=torch.exp(-columns["nll"]).numpy(),
            probabilities=columns["probabilities"].numpy() if self.keep_probabilities else None,
        )

    def _check(self, logits: Float[Tensor, "B Y"], targets: Int[Tensor, "B"]) -> None:
        classes = len(self.labels)
        if logits.shape[1] != classes:
            raise InputError("logits and class names do not match", expected=f"{classes} classes", got=logits.shape[1])
        check_finite(logits)
        if len(outside := targets[(targets < 0) | (targets >= classes)]):
            raise InputError("a label is out of range", expected=f"0…{classes - 1}", got=outside[0].item())


def evaluate_logits(
    logits: Float[Tensor, "B Y"],
    targets: Int[Tensor, "B"],
    *,
    labels: tuple[str, ...],
    keep_probabilities: bool = False,
) -> EvaluationResult:
    """Compute all metrics of logits.

    >>> result = evaluate_logits(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), labels=("cat", "dog"))
    >>> result.top1, result.top5, result.confusion_matrix().tolist()
    (0.5, 1.0, [[1, 0], [1, 0]])
    """
    images = ImageMetrics(labels, count=len(targets), keep_probabilities=keep_probabilities)
    images.add(logits, targets)
    return images.result()


def check_finite(logits: Float[Tensor, "B Y"]) -> None:
    """Raise InputError if a logit is NaN or infinite."""
    if not logits.isfinite().all():
        raise InputError("the model's logits are not finite", hint="its weights or its input hold NaN or infinity")


def choose_split(data: Dataset, name: str | None = None) -> tuple[str, ImageSource]:
    """Return the named split, or the first of SPLIT_ORDER that exists."""
    if name is None:
        name = next(split for split in SPLIT_ORDER if split in data.splits)
    if name not in data.splits:
        raise DataError(f"{data.path} has no split {name}", expected=" or ".join(data.splits), got=name)
    return name, data.splits[name]


def require_labels(source: ImageSource) -> None:
    """Raise DataError if the images have no labels."""
    if not source.classes:
        hint = "use one directory per class, or a CSV file with file_name,label"
        raise DataError(f"the images have no labels ({source.layout})", hint=hint)


def class_indices(bundle: ModelBundle, source: ImageSource) -> NDArray[np.int64]:
    """Return the index in the model of each class of a source; raise DataError if the model lacks one."""
    require_labels(source)
    if not bundle.labels:
        hint = "use fewshot, which evaluates features, or add classes with fewshot(save=…) or finetune"
        raise DataError("the model has no classes", hint=hint)
    indices = {label: index for index, label in enumerate(bundle.labels)}
    if unknown := [name for name in source.classes if name not in indices]:
        raise DataError(
            f"the model does not have the class {shorten_list(unknown, limit=1)}",
            expected=", ".join(bundle.labels[:5]) + (" …" if len(bundle.labels) > 5 else ""),
            hint="evaluate it on images of its own classes, or fine-tune it on these",
        )
    return np.array([indices[name] for name in source.classes], dtype=np.int64)
