"""Interleaved timing of candidates that compute the same function."""

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from peers import CANDIDATES, Activation, Candidate, build_equal, logits
from rows import Row
from torch import Tensor, nn
from torch.nn import functional

Name = TypeVar("Name", bound=str)

CLOSE = 0.02
"""A ratio this close to 1 is measured again."""
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
"""Largest difference of logits relative to the largest logit: rounding through twelve blocks."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Duration of a measurement: rounds that fill `seconds`, and as many again while the result is close.

    They are repeated at most `retries` times, and not after `max_seconds` seconds.
    """

    seconds: float = 10.0
    min_rounds: int = 4
    max_rounds: int = 300
    retries: int = 4
    max_seconds: float = 60.0

    def rounds(self, seconds_per_round: float) -> int:
        """Return the number of rounds that fill the time, within bounds."""
        return max(self.min_rounds, min(self.max_rounds, int(self.seconds / seconds_per_round)))


QUICK = Effort(seconds=2.0, min_rounds=2, retries=0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every run by candidate."""

    seconds: dict[Candidate, list[float]] = field(default_factory=lambda: {name: [] for name in CANDIDATES})

    @property
    def rounds(self) -> int:
        """Return the number of runs of each candidate."""
        return len(self.seconds["vitkit"])

    def best(self) -> dict[Candidate, float]:
        """Return the shortest time of each candidate."""
        return {name: min(times) for name, times in self.seconds.items()}

    def median(self) -> dict[Candidate, float]:
        """Return the median time of each candidate."""
        return {name: statistics.median(times) for name, times in self.seconds.items()}

    def is_close(self) -> bool:
        """Return whether noise could reverse the result of this row."""
        return any(abs(ratio(times) - 1) <= CLOSE for times in (self.best(), self.median()))


def ratio(times: Mapping[Candidate, float]) -> float:
    """Return the faster peer's time over vitkit's: above 1, vitkit is faster.

    >>> ratio({"vitkit": 2.0, "timm": 3.0, "transformers": 4.0})
    1.5
    """
    return min(times["timm"], times["transformers"]) / times["vitkit"]


def time_row(row: Row, *, effort: Effort) -> tuple[Times, float]:
    """Time all candidates on one row; return the times and the largest difference of their logits."""
    models = prepare_models(row)
    images, labels = make_batch(row)
    difference = check_agreement(row, models, images)
    runs = {name: make_run(row, model, images, labels) for name, model in models.items()}
    times = Times()
    with gc_disabled():
        rounds = effort.rounds(sum(warm_up(run) for run in runs.values()))
        start = time.perf_counter()
        for _ in range(1 + effort.retries):
            interleave(runs, times.seconds, rounds=rounds)
            if not times.is_close() or time.perf_counter() - start > effort.max_seconds:
                break
    return times, difference


def interleave(runs: Mapping[Name, Callable[[], float]], seconds: Mapping[Name, list[float]], *, rounds: int) -> None:
    """Run each candidate once per round in changing order, so that each follows every other equally often."""
    orders = itertools.cycle(itertools.permutations(runs))
    for order in itertools.islice(orders, rounds):
        for name in order:
            seconds[name].append(runs[name]())


def warm_up(run: Callable[[], float], *, seconds: float = 0.5) -> float:
    """Run once, or for half a second, and return the time of the last run."""
    start = time.perf_counter()
    last = run()
    while time.perf_counter() - start < seconds:
        last = run()
    return last


def make_run(row: Row, model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], float]:
    """Return a function that runs the row once and returns its seconds; gradients are cleared before."""

    def forward() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            logits(model, images)
        return time.perf_counter() - start

    def forward_and_backward() -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=row.precision == "bf16"):
            loss = functional.cross_entropy(logits(model, images), labels)
        loss.backward()
        return time.perf_counter() - start

    return forward_and_backward if row.trains else forward


@lru_cache(maxsize=1)
def cached_models(model: str, activation: Activation) -> dict[Candidate, nn.Module]:
    """Return the models of the last row in float32; rows of one model follow each other."""
    return build_equal(model, activation=activation)


def prepare_models(row: Row) -> dict[Candidate, nn.Module]:
    """Return the candidates in the row's mode and precision."""
    return {
        name: prepare(row, copy.deepcopy(model)) for name, model in cached_models(row.model, row.activation).items()
    }


def prepare(row: Row, model: nn.Module) -> nn.Module:
    """Set a model to the row's mode: bf16 inference has bf16 weights, training uses autocast."""
    if row.trains:
        return model.train()
    return model.eval().to(torch.bfloat16 if row.precision == "bf16" else torch.float32)


def make_batch(row: Row) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(row.batch, 3, 224, 224, generator=generator)
    labels = torch.randint(1000, (row.batch,), generator=generator)
    in_bf16 = row.precision == "bf16" and not row.trains
    return images.to(torch.bfloat16) if in_bf16 else images, labels


@torch.inference_mode()
def check_agreement(row: Row, models: Mapping[Candidate, nn.Module], images: Tensor) -> float:
    """Return the largest difference between vitkit's logits and a peer's; fail if it means another function."""
    with torch.autocast("cpu", torch.bfloat16, enabled=row.trains and row.precision == "bf16"):
        outputs = {name: logits(model, images[:2]).float() for name, model in models.items()}
    ours = outputs["vitkit"]
    difference = max(float((ours - outputs[name]).abs().max()) for name in outputs)
    allowed = TOLERANCE[row.precision] * float(ours.abs().max())
    if not difference <= allowed:
        raise SystemExit(f"error: {row}: logits differ by {difference:.2g}, more than {allowed:.2g}")
    return difference


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector during a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
