"""Plan of a run with a time budget: what to try, for how long, what to keep, and what would help most.

Pure functions of measured seconds and scores. `training/auto.py` carries the plan out.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitkit.core.formatting import format_plural
from vitkit.training.config import RunConfig

DEFAULT_MINUTES = 10.0
PROBE_FRACTION, TRIALS_FRACTION = 0.25, 0.35
"""Parts of the time for closed-form probes and for trials; the final run gets the rest."""
SCRATCH = "scratch"
"""Name of the trial from random weights."""
MIN_TRIAL_SECONDS, MAX_TRIAL_SECONDS = 20.0, 120.0
SAFETY = 0.8
"""Part of the remaining time that is planned: machines are not equally fast all the time."""
REPORT_SECONDS = 8.0
"""Time for the report and the files at the end."""
MAX_EPOCHS = 40.0
"""Longest final run from pretrained weights, in passes over the images: more would only overfit."""
MIN_SHOTS = 20
"""Images of each class below which a probe at a larger size is not worth its time."""
HELD_OUT_IMAGES, MAX_HELD_OUT = 100, 0.3
"""Number of images to hold out, and the largest fraction of the training images that this may be."""


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """Seconds of a run, by a clock that was at `started`; `spent` are those of earlier calls that were interrupted."""

    seconds: float
    clock: Callable[[], float]
    started: float
    spent: float = 0.0

    def elapsed(self) -> float:
        """Return the seconds spent so far."""
        return self.spent + self.clock() - self.started

    def remaining(self) -> float:
        """Return the seconds left; negative if the time is over."""
        return self.seconds - self.elapsed()


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """A trial: settings that differ from the base configuration."""

    name: str
    settings: Mapping[str, object]
    is_scratch: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """Result of a probe or a trial on held-out images."""

    name: str
    top1: float
    loss: float
    seconds: float
    steps: int = 0
    seconds_per_step: float = 0.0

    @property
    def score(self) -> tuple[float, float]:
        """Accuracy, then loss: larger is better."""
        return self.top1, -self.loss


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Records of probes and trials before the final run, and the best of them, whose model the final one must beat."""

    records: tuple[TrialRecord, ...]
    best: TrialRecord
    path: Path
    """Directory of the best model."""
    minutes: float
    advice: str | None = None
    """Where to get better initial weights."""


def held_out_fraction(images: int) -> float:
    """Return the fraction of the images to hold out: a tenth, and more of few images.

    >>> held_out_fraction(5000), held_out_fraction(500), held_out_fraction(100)
    (0.1, 0.2, 0.3)
    """
    return min(max(0.1, round(HELD_OUT_IMAGES / max(images, 1), 2)), MAX_HELD_OUT)


def plan_probes(
    sizes: Sequence[int], *, seconds_per_image: float, images: int, seconds: float, num_classes: int
) -> tuple[tuple[int, ...], int]:
    """Return the image sizes to probe, and the number of images, the same for all.

    `seconds_per_image` was measured at the first size; the time grows with the area.

    >>> plan_probes((64, 128), seconds_per_image=0.01, images=1000, seconds=100.0, num_classes=2)
    ((64, 128), 1000)
    >>> plan_probes((64, 128), seconds_per_image=0.01, images=1000, seconds=5.0, num_classes=10)
    ((64,), 500)
    """
    chosen = tuple(sizes)
    while True:
        per_image = seconds_per_image * sum((size / sizes[0]) ** 2 for size in chosen)
        count = min(images, int(seconds / max(per_image, 1e-9)))
        if len(chosen) == 1 or count >= min(images, MIN_SHOTS * num_classes):
            return chosen, max(count, min(images, 2 * num_classes))
        chosen = chosen[:-1]


def plan_trials(
    config: RunConfig, *, fixed: Collection[str], is_pretrained: bool, with_scratch: bool
) -> list[TrialPlan]:
    """Return trials, the most promising first; settings in `fixed` were given and are not varied."""
    trials: list[TrialPlan] = []
    if is_pretrained:
        grid = [("all", 1e-4), ("all", 3e-4), ("lora", 1e-3), ("head", 1e-3), ("all", 1e-3), ("all", 3e-5)]
        for trainable, lr in grid:
            settings: dict[str, object] = {"optimizer.trainable": trainable, "schedule.lr": lr}
            settings = {key: value for key, value in settings.items() if key not in fixed}
            if "optimizer.trainable" in fixed and trainable != config.optimizer.trainable:
                continue
            if all(each.settings != settings for each in trials):
                rate = config.schedule.lr if "schedule.lr" in fixed else lr
                trials.append(TrialPlan(name=f"{trainable}-lr-{rate:g}", settings=settings))
    if with_scratch:
        trials.insert(1, TrialPlan(name=SCRATCH, settings={}, is_scratch=True))
    return trials


def count_trials(seconds: float) -> tuple[int, float]:
    """Return how many trials fit into some seconds, and the seconds of each.

    >>> count_trials(70.0), count_trials(5.0), count_trials(2000.0)
    ((3, 23.3), (1, 5.0), (7, 120.0))
    """
    count = max(1, min(7, int(seconds / MIN_TRIAL_SECONDS)))
    return count, round(min(seconds / count, MAX_TRIAL_SECONDS), 1)


def plan_steps(seconds: float, *, seconds_per_step: float, images: int, batch_size: int, max_epochs: float) -> int:
    """Return the number of steps that fit into some seconds, at least one and at most those of `max_epochs`.

    >>> plan_steps(10.0, seconds_per_step=0.5, images=1000, batch_size=32, max_epochs=40.0)
    20
    >>> plan_steps(100.0, seconds_per_step=0.1, images=64, batch_size=32, max_epochs=40.0)
    80
    """
    longest = math.ceil(max_epochs * images / batch_size)
    return max(1, min(int(seconds / max(seconds_per_step, 1e-6)), longest))


def schedule_settings(steps: int) -> dict[str, object]:
    """Return the settings of a run of this many steps: a tenth of warm-up, and three evaluations."""
    return {"steps": steps, "schedule.warmup_steps": steps // 10, "evaluation.every": max(1, math.ceil(steps / 3))}


def choose_batch_size(images: int, *, largest: int, ranks: int = 1) -> int:
    """Return a batch size that gives several steps per pass over few images, as a multiple of the number of ranks.

    >>> choose_batch_size(1000, largest=32), choose_batch_size(30, largest=32)
    (32, 8)
    >>> choose_batch_size(30, largest=32, ranks=3)
    9
    """
    return -(-min(largest, max(8, images // 8)) // ranks) * ranks


def standard_error(top1: float, *, images: int) -> float:
    """Return the standard error of an accuracy, which is not 0 if all of a few images are recognized.

    >>> round(standard_error(0.5, images=100), 3), round(standard_error(1.0, images=8), 3)
    (0.05, 0.112)
    """
    return math.sqrt(max(top1 * (1 - top1), 1 / (images + 2)) / max(images, 1))


def best_record(records: Sequence[TrialRecord], *, images: int) -> TrialRecord:
    """Return the record with the lowest loss among those within a standard error of the highest accuracy.

    On few images accuracies differ by chance, and the loss tells more.
    """
    top = max(record.top1 for record in records)
    error = standard_error(top, images=images)
    return min((record for record in records if record.top1 >= top - error), key=lambda record: record.loss)


def advise(
    selection: Selection, *, counts: Mapping[str, int], recalls: Mapping[str, float], top1: float, final_top1: float
) -> list[str]:
    """Return what would help most: photos of the weakest class, other weights, or more minutes.

    `final_top1` is the accuracy of the final run on held-out images, as those of the trials.
    """
    advice = []
    weakest = min(recalls, key=lambda name: recalls[name], default=None)
    if weakest is not None and recalls[weakest] < 0.95:
        number = format_plural(counts.get(weakest, 0), "photo")
        advice.append(f"more photos of {weakest}: {recalls[weakest]:.0%} of them are recognized, from {number}")
    if selection.advice and top1 < 0.99:
        advice.append(selection.advice)
    if top1 < 0.99 and final_top1 > selection.best.top1:
        advice.append(f"more minutes: the final run improved on the trials (--minutes {3 * selection.minutes:g})")
    return advice
