"""Judgements, costs and right answers of several models go in; one table, and how sure each difference is, come out."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import InputError
from vitkit.core.shapes import pair
from vitkit.data.loader import CPU
from vitkit.evaluate.judgement import Judgement
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import Model
from vitkit.zoo.variants import ModelConfig

Family = Literal["ViT", "hybrid", "ResNet"]
"""The paper's three kinds of model."""
RESAMPLES, LEVEL = 10_000, 0.95
ROUNDS = 8
"""Turns that each model gets when speeds are measured; the first is not counted."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a model is on the images that it was judged by. Shares are 0…1."""

    count: int
    top1: float
    interval: tuple[float, float]
    """95 % bootstrap interval of top1."""
    top5: float
    mean_per_class: float | None
    """The mean of the shares of each class's images that were found."""
    ece: float


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of the models to compare: what it is, how good it is, and what it cost. None where nobody has said."""

    label: str
    model: str
    family: Family
    parameters: int
    gflops: float
    """Of a forward pass over one image, 2 × multiply-adds."""
    scores: Scores | None = None
    judged_on: str | None = None
    """In words: which images."""
    exaflops: float | None = None
    """Of training, from the run's ledger."""
    seconds: float | None = None
    """Of training, in its steps."""
    training_speed: float | None = None
    """Images a second in training, from the run's own log."""
    speed: float | None = None
    """Images a second through the model, measured beside the others."""

    def to_json(self) -> dict[str, object]:
        """The contender as plain data, its scores beside the rest."""
        plain = asdict(self)
        scores = plain.pop("scores") or dict.fromkeys(Scores.__dataclass_fields__)
        return plain | scores


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much better one model is than another on the same images, and how sure that is."""

    run: str
    """The label of the one."""
    against: str
    """The label of the other."""
    images: int
    difference: float
    """top1 of the one less that of the other: −1…1."""
    interval: tuple[float, float]
    """95 % paired bootstrap interval."""
    only: int
    """Images that only the one is right about."""
    only_other: int
    p_value: float
    """McNemar's exact test: how often chance alone parts them as far."""

    @property
    def is_sure(self) -> bool:
        """Whether there is little doubt which is better: by the interval, and by the test.

        Where only few images part the two, resamples of these few are too much alike, and the interval is too narrow.
        """
        return (self.interval[0] > 0 or self.interval[1] < 0) and self.p_value < 1 - LEVEL

    def in_words(self) -> str:
        """One sentence.

        >>> paired_difference([True] * 90 + [False] * 10, [True] * 70 + [False] * 30, names=("B", "A")).in_words()
        'B is better than A by 20.0 points (95 % interval 12.0…28.0)'
        """
        low, high = (100 * end for end in self.interval)
        points = 100 * self.difference
        if not self.is_sure:
            told = f"{points:+.1f} points (95 % interval {low:.1f}…{high:.1f})".replace("-", "−")
            return f"{self.run} and {self.against} cannot be told apart: {told}"
        if self.difference < 0:
            low, high = -high, -low
        word = "better" if self.difference > 0 else "worse"
        return (
            f"{self.run} is {word} than {self.against} by {abs(points):.1f} points (95 % interval {low:.1f}…{high:.1f})"
        )

    def to_json(self) -> dict[str, object]:
        """The difference as plain data."""
        return asdict(self) | {"sure": self.is_sure, "text": self.in_words()}


def family_of(config: ModelConfig) -> Family:
    """Which of the paper's three kinds a model is.

    >>> from vitkit.zoo.lookup import configure
    >>> [family_of(configure(name)) for name in ("B/16", "R50+B/16", "BiT-R50x1")]
    ['ViT', 'hybrid', 'ResNet']
    """
    if isinstance(config, BiTConfig):
        return "ResNet"
    return "hybrid" if config.backbone else "ViT"


def scores_of(judgement: Judgement) -> Scores:
    """The scores of a model that was judged just now."""
    return scores_in(judgement.to_json())


def scores_in(result: Mapping[str, object]) -> Scores:
    """The scores in a run's own result, as `Judgement.to_json` wrote it.

    >>> per_class = [{"recall": 1.0}, {"recall": 0.5}, {"recall": None}]
    >>> result = {"count": 9, "top1": 0.9, "top5": 1.0, "ece": 0.1, "intervals": {"top1": [0.8, 1.0]}}
    >>> scores_in(result | {"per_class": per_class}).mean_per_class
    0.75
    """
    try:
        low, high = result["intervals"]["top1"]  # type: ignore[index]
        recalls = [each["recall"] for each in result["per_class"]]  # type: ignore[attr-defined]
        found = [float(recall) for recall in recalls if recall is not None]
        return Scores(
            count=int(str(result["count"])),
            top1=float(str(result["top1"])),
            interval=(float(low), float(high)),
            top5=float(str(result["top5"])),
            mean_per_class=statistics.fmean(found) if found else None,
            ece=float(str(result["ece"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is no result of a run: {error}", hint="judge the run anew with --data") from error


# Differences


def paired_difference(
    right: Sequence[bool] | NDArray[np.bool_],
    other: Sequence[bool] | NDArray[np.bool_],
    *,
    names: tuple[str, str],
    seed: int = 0,
) -> Difference:
    """How much more often the one is right than the other about the same images, with a paired bootstrap interval.

    Drawing images with replacement draws three kinds of them: only the one right, only the other right, no
    difference. So a resample is a multinomial draw, and no image is drawn one by one.
    """
    one, two = np.asarray(right, dtype=np.bool_), np.asarray(other, dtype=np.bool_)
    if len(one) != len(two) or not len(one):
        raise InputError("the two were not judged on the same images", expected=len(one), got=len(two))
    only, only_other, images = int((one & ~two).sum()), int((two & ~one).sum()), len(one)
    shares = np.array([only, only_other, images - only - only_other]) / images
    drawn = np.random.default_rng(seed).multinomial(images, shares, size=RESAMPLES)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / images, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(
        run=names[0],
        against=names[1],
        images=images,
        difference=(only - only_other) / images,
        interval=(float(low), float(high)),
        only=only,
        only_other=only_other,
        p_value=mcnemar(only, only_other),
    )


def mcnemar(only: int, only_other: int) -> float:
    """McNemar's exact test, two-sided: whether the images that one alone is right about are more than chance parts.

    >>> mcnemar(0, 5), mcnemar(3, 3)
    (0.0625, 1.0)
    """
    apart, fewer = only + only_other, min(only, only_other)
    if apart == 0:
        return 1.0
    counts = torch.arange(fewer + 1, dtype=torch.float64)
    # In logarithms: with thousands of images the numbers of ways do not fit a float.
    ways = torch.lgamma(torch.tensor(apart + 1.0, dtype=torch.float64))
    ways = ways - torch.lgamma(counts + 1) - torch.lgamma(apart - counts + 1)
    return min(1.0, 2 * float(torch.exp(torch.logsumexp(ways, dim=0) - apart * math.log(2))))


# Speed


@torch.inference_mode()
def measured_speeds(
    models: Sequence[Model],
    *,
    batch_size: int = 16,
    rounds: int = ROUNDS,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda batches: None,
) -> list[float]:
    """Images a second through each model: the median of turns that the models take one after the other.

    Because they take turns, whatever else slows the machine slows all of them, and ratios hold.
    """
    batches = [torch.randn(batch_size, each.config.channels, *pair(each.config.image_size)) for each in models]
    placed = [each.to(device).eval() for each in models]
    times: list[list[float]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for number, (model, images) in enumerate(zip(placed, batches, strict=True)):
            there = images.to(device)
            start = time.perf_counter()
            model(there).sum().item()  # reading the sum waits for a device that runs ahead
            if turn:
                times[number].append(time.perf_counter() - start)
            progress(1)
    return [batch_size / statistics.median(each) for each in times]
