"""Contenders that compute the same thing go in, the times of interleaved runs come out."""

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
from peers import CONTENDERS, Activation, Contender, build_equal, logits
from rows import Row
from torch import Tensor, nn
from torch.nn import functional

Name = TypeVar("Name", bound=str)

CLOSE = 0.02
"""A ratio this near to 1 is measured again before it is believed."""
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
"""How far logits of one function may be apart, relative to the largest: rounding, through twelve blocks."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure: rounds that fill `seconds`, and as many again while the result is close.

    They are repeated `retries` times at most, and no more after `patience` seconds.
    """

    seconds: float = 10.0
    fewest: int = 4
    most: int = 300
    retries: int = 4
    patience: float = 60.0

    def rounds(self, seconds_a_round: float) -> int:
        """Rounds that fill the time, within bounds."""
        return max(self.fewest, min(self.most, int(self.seconds / seconds_a_round)))


QUICK = Effort(seconds=2.0, fewest=2, retries=0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every run, by contender."""

    seconds: dict[Contender, list[float]] = field(default_factory=lambda: {name: [] for name in CONTENDERS})

    @property
    def rounds(self) -> int:
        """How often each contender ran."""
        return len(self.seconds["vitkit"])

    def best(self) -> dict[Contender, float]:
        """The shortest time of each contender."""
        return {name: min(times) for name, times in self.seconds.items()}

    def median(self) -> dict[Contender, float]:
        """The median time of each contender."""
        return {name: statistics.median(times) for name, times in self.seconds.items()}

    def is_close(self) -> bool:
        """Whether noise could turn the result of this row round."""
        return any(abs(ratio(times) - 1) <= CLOSE for times in (self.best(), self.median()))


def ratio(times: Mapping[Contender, float]) -> float:
    """The faster peer's time over ours: above 1, ours is faster.

    >>> ratio({"vitkit": 2.0, "timm": 3.0, "transformers": 4.0})
    1.5
    """
    return min(times["timm"], times["transformers"]) / times["vitkit"]


def race(row: Row, *, effort: Effort) -> tuple[Times, float]:
    """Time all contenders on one row; with the times comes the largest difference between their logits."""
    models = prepare_models(row)
    images, labels = make_batch(row)
    difference = check_agreement(row, models, images)
    runs = {name: one_run(row, model, images, labels) for name, model in models.items()}
    times = Times()
    with no_collection():
        rounds = effort.rounds(sum(warm_up(run) for run in runs.values()))
        start = time.perf_counter()
        for _ in range(1 + effort.retries):
            interleave(runs, times.seconds, rounds=rounds)
            if not times.is_close() or time.perf_counter() - start > effort.patience:
                break
    return times, difference


def interleave(runs: Mapping[Name, Callable[[], float]], seconds: Mapping[Name, list[float]], *, rounds: int) -> None:
    """Run each contender once a round. The order changes, so that each follows each of the others equally often."""
    orders = itertools.cycle(itertools.permutations(runs))
    for order in itertools.islice(orders, rounds):
        for name in order:
            seconds[name].append(runs[name]())


def warm_up(run: Callable[[], float], *, seconds: float = 0.5) -> float:
    """Run once, or for half a second of runs, and give the time of the last."""
    start = time.perf_counter()
    last = run()
    while time.perf_counter() - start < seconds:
        last = run()
    return last


def one_run(row: Row, model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], float]:
    """A function that runs the row once and gives the seconds it took; gradients go before the clock starts."""

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
def cached_models(model: str, activation: Activation) -> dict[Contender, nn.Module]:
    """The models of the last row in float32; rows of one model follow each other."""
    return build_equal(model, activation=activation)


def prepare_models(row: Row) -> dict[Contender, nn.Module]:
    """The contenders in the row's mode, and in its precision where that is one of the weights."""
    return {
        name: prepare(row, copy.deepcopy(model)) for name, model in cached_models(row.model, row.activation).items()
    }


def prepare(row: Row, model: nn.Module) -> nn.Module:
    """A model in the row's mode: inference in bf16 has weights in bf16, training has autocast over fp32 weights."""
    if row.trains:
        return model.train()
    return model.eval().to(torch.bfloat16 if row.precision == "bf16" else torch.float32)


def make_batch(row: Row) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(row.batch, 3, 224, 224, generator=generator)
    labels = torch.randint(1000, (row.batch,), generator=generator)
    in_bf16 = row.precision == "bf16" and not row.trains
    return images.to(torch.bfloat16) if in_bf16 else images, labels


@torch.inference_mode()
def check_agreement(row: Row, models: Mapping[Contender, nn.Module], images: Tensor) -> float:
    """The largest difference between our logits and a peer's; too large a one means another function, and is fatal."""
    with torch.autocast("cpu", torch.bfloat16, enabled=row.trains and row.precision == "bf16"):
        outputs = {name: logits(model, images[:2]).float() for name, model in models.items()}
    ours = outputs["vitkit"]
    difference = max(float((ours - outputs[name]).abs().max()) for name in outputs)
    allowed = TOLERANCE[row.precision] * float(ours.abs().max())
    if not difference <= allowed:
        raise SystemExit(f"error: {row}: logits differ by {difference:.2g}, more than {allowed:.2g}")
    return difference


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running in someone's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
