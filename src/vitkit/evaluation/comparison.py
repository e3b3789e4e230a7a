"""Comparison of models: scores, costs, speeds, and paired differences with intervals and tests."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import InputError
from vitkit.core.result import Result, draw, select
from vitkit.core.sizes import pair
from vitkit.data.loader import CPU
from vitkit.evaluation.evaluation import EvaluationResult
from vitkit.model.config import BiTConfig
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig

if TYPE_CHECKING:
    import matplotlib.figure

ModelFamily = Literal["ViT", "hybrid", "ResNet"]
"""The three model families of the paper."""
RESAMPLES, LEVEL = 10_000, 0.95
ROUNDS = 8
"""Timed batches of each model, after one for warm-up."""


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """Metrics of a model on the images that it was evaluated on. Fractions are 0..1."""

    count: int
    top1: float
    interval: tuple[float, float]
    """95 % interval (Wilson) of top1."""
    top5: float
    mean_per_class: float | None
    """Mean recall over classes."""
    ece: float


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model with its scores and costs; None where a value is unknown."""

    label: str
    model: str
    family: ModelFamily
    parameters: int
    gflops: float
    """Of a forward pass of one image, 2 × multiply-adds."""
    scores: ModelScores | None = None
    evaluated_on: str | None = None
    """Description of the images."""
    exaflops: float | None = None
    """Of the whole training."""
    seconds: float | None = None
    """Of all training steps."""
    training_speed: float | None = None
    """Images per second in training, from the log of the run."""
    speed: float | None = None
    """Images per second in inference, measured side by side."""

    def to_dict(self) -> dict[str, object]:
        """Return plain data, with the scores next to the other values."""
        plain = asdict(self)
        scores = plain.pop("scores") or dict.fromkeys(ModelScores.__dataclass_fields__)
        return plain | scores


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference in top-1 accuracy between a model and a baseline on the same images."""

    model: str
    baseline: str
    images: int
    estimate: float
    """top1 of the model minus that of the baseline: −1..1."""
    interval: tuple[float, float]
    """95 % paired bootstrap interval."""
    only_model: int
    """Images that only the model classifies correctly."""
    only_baseline: int
    p_value: float
    """McNemar's exact test, two-sided."""

    @property
    def is_significant(self) -> bool:
        """Return whether interval and test agree that the models differ.

        The test is needed because the bootstrap interval is too narrow if the models disagree on only a few images.
        """
        return (self.interval[0] > 0 or self.interval[1] < 0) and self.p_value < 1 - LEVEL

    def describe(self) -> str:
        """Return the difference in a sentence."""
        low, high = (100 * end for end in self.interval)
        points = 100 * self.estimate
        if not self.is_significant:
            interval = f"{points:+.1f} points (95 % interval {low:.1f}…{high:.1f})".replace("-", "−")
            return f"no significant difference between {self.model} and {self.baseline}: {interval}"
        word, low, high = ("better", low, high) if points > 0 else ("worse", -high, -low)
        interval = f"(95 % interval {low:.1f}…{high:.1f})"
        return f"{self.model} is {word} than {self.baseline} by {abs(points):.1f} points {interval}"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self) | {"is_significant": self.is_significant, "text": self.describe()}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComparisonResult(Result):
    """Models side by side; `data` describes the images of all evaluations, None if each run has its own."""

    models: tuple[ComparedModel, ...]
    differences: tuple[Difference, ...] = ()
    data: str | None = None
    report_path: Path | None = None

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw accuracy over cost: training compute if it is known, else parameters."""
        return draw("plot_comparison", self)

    def highlights(self) -> dict[str, object]:
        """Return the accuracy of each model."""
        return {model.label: model.scores.top1 if model.scores else None for model in self.models}

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit compare --json` prints."""
        return select(self, "data", "models", "differences", "warnings")

    @property
    def best_top1(self) -> float | None:
        """Return the highest top-1 accuracy."""
        return max((model.scores.top1 for model in self.models if model.scores), default=None)


def model_family(config: ModelConfig) -> ModelFamily:
    """Return the family of a model."""
    return "ResNet" if isinstance(config, BiTConfig) else "hybrid" if config.backbone else "ViT"


def scores_from_dict(result: Mapping[str, Any]) -> ModelScores:
    """Return the scores of an evaluation, from `EvaluationResult.to_dict` or as a run has stored it."""
    try:
        low, high = result["intervals"]["top1"]
        recalls = [float(each["recall"]) for each in result["per_class"] if each["recall"] is not None]
        return ModelScores(
            count=int(result["count"]),
            top1=float(result["top1"]),
            interval=(float(low), float(high)),
            top5=float(result["top5"]),
            mean_per_class=statistics.fmean(recalls) if recalls else None,
            ece=float(result["ece"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not an evaluation result: {error}", hint="evaluate the run again with --data") from error


def paired_difference(
    correct: Sequence[bool] | NDArray[np.bool_], baseline: Sequence[bool] | NDArray[np.bool_], *, names: tuple[str, str]
) -> Difference:
    """Compare which images a model and a baseline classify correctly, with a paired bootstrap and McNemar's test.

    Each image is one of three kinds: only the model correct, only the baseline correct, or equal. So a bootstrap
    resample is one multinomial draw.
    """
    ours, theirs = np.asarray(correct, dtype=np.bool_), np.asarray(baseline, dtype=np.bool_)
    if len(ours) != len(theirs) or not len(ours):
        raise InputError("the models were not evaluated on the same images", expected=len(ours), got=len(theirs))
    only_model, only_baseline, images = int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), len(ours)
    rates = np.array([only_model, only_baseline, images - only_model - only_baseline]) / images
    samples = np.random.default_rng(0).multinomial(images, rates, size=RESAMPLES)
    low, high = np.quantile((samples[:, 0] - samples[:, 1]) / images, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(
        model=names[0],
        baseline=names[1],
        images=images,
        estimate=(only_model - only_baseline) / images,
        interval=(float(low), float(high)),
        only_model=only_model,
        only_baseline=only_baseline,
        p_value=mcnemar_p_value(only_model, only_baseline),
    )


def mcnemar_p_value(only_model: int, only_baseline: int) -> float:
    """Return the two-sided p-value of McNemar's exact test from the counts of discordant images."""
    total, fewer = only_model + only_baseline, min(only_model, only_baseline)
    counts = torch.arange(fewer + 1, dtype=torch.float64)
    # In logarithms: binomial coefficients of thousands of images overflow a float.
    log_coefficients = torch.lgamma(torch.tensor(total + 1.0, dtype=torch.float64))
    log_coefficients = log_coefficients - torch.lgamma(counts + 1) - torch.lgamma(total - counts + 1)
    return min(1.0, 2 * float(torch.exp(torch.logsumexp(log_coefficients, dim=0) - total * math.log(2))))


def compare_results(
    results: Sequence[EvaluationResult], names: Sequence[str], *, against: Literal["first", "best"] = "first"
) -> tuple[Difference, ...]:
    """Compare evaluations on the same images with the first, or with the best."""
    correct = {name: result.targets == result.predictions for name, result in zip(names, results, strict=True)}
    base = names[0] if against == "first" else max(names, key=lambda name: float(correct[name].mean()))
    return tuple(paired_difference(correct[name], correct[base], names=(name, base)) for name in names if name != base)


@torch.inference_mode()
def measure_speeds(
    models: Sequence[Model],
    *,
    batch_size: int = 16,
    rounds: int = ROUNDS,
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] = lambda batches: None,
) -> list[float]:
    """Return the median images per second of each model.

    Models take turns, so that other load on the machine affects all of them and ratios hold.
    """
    batches = [torch.randn(batch_size, each.config.channels, *pair(each.config.image_size)) for each in models]
    modules = [each.to(device).eval() for each in models]
    times: list[list[float]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for index, (model, images) in enumerate(zip(modules, batches, strict=True)):
            inputs = images.to(device)
            start = clock()
            model(inputs).sum().item()  # waits for an asynchronous device
            if turn:
                times[index].append(clock() - start)
            progress(1)
    return [batch_size / statistics.median(each) for each in times]
