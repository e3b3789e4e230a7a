"""A program, the model that it was made of and images go in; whether their answers are the same comes out, in numbers.

Logits may differ by 1e-4, and where the largest of them is above 10 by 1e-5 of it, as float32's own spacing grows. The
first class must be the same for every image, unless the model's two first logits lie so near each other that a
difference which is allowed can exchange them: such ties are counted, and said.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch

from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.export.program import FEATURES, LOGITS, Program
from vitkit.export.runtime import Numbers, Run

DIFFERENCE, RELATIVE = 1e-4, 1e-5
"""How far logits may be apart: absolutely, and as a share of the largest."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How near the answers are to the model's; `top1_agreement` leaves ties out, and is None without classes."""

    images: int
    batch_sizes: tuple[int, ...]
    top1_agreement: float | None
    ties: int
    largest_difference: float
    allowed_difference: float
    largest_answer: float
    features_difference: float | None
    """None where features were not asked for."""
    features_allowed: float

    def to_json(self) -> dict[str, object]:
        """For proof.json, where what is not finite has no number."""
        figures = asdict(self) | {"batch_sizes": list(self.batch_sizes)}
        return {key: None if _is_endless(value) else value for key, value in figures.items()}

    def in_words(self) -> str:
        """One line for people.

        >>> compare(lambda pixels: {}, lambda pixels: {}, []).in_words()
        'no images'
        """
        if not self.images:
            return "no images"
        count = f"{self.images:,} image{'' if self.images == 1 else 's'}"
        top = "" if self.top1_agreement is None else f"first class the same for {self.top1_agreement:.2%}, "
        ties = f" ({self.ties:,} ties aside)" if self.ties else ""
        what = "features" if self.top1_agreement is None else "logits"
        return f"{count}: {top}{what} within {self.largest_difference:.1e}{ties}"


@dataclass(kw_only=True)
class _Tally:
    """Largest difference and largest number of one kind of answer."""

    difference: float = 0.0
    largest: float = 0.0
    asked: bool = False

    def add(self, found: Numbers, expected: Numbers) -> None:
        self.asked = True
        if found.shape != expected.shape or not (np.isfinite(found).all() and np.isfinite(expected).all()):
            self.difference = math.inf
        elif found.size:
            self.difference = max(self.difference, float(np.abs(found.astype(np.float64) - expected).max()))
        self.largest = max(self.largest, float(np.abs(expected).max()) if expected.size else 0.0)

    @property
    def allowed(self) -> float:
        return max(DIFFERENCE, RELATIVE * self.largest)


def compare(run: Run, model: Run, batches: Iterable[Tensor]) -> Comparison:
    """Ask both for every batch, B × C × H × W and each of its own size."""
    logits, features = _Tally(), _Tally()
    sizes: dict[int, None] = {}
    firsts: list[tuple[Numbers, Numbers]] = []
    images = 0
    for batch in batches:
        pixels = batch.numpy()
        found, expected = run(pixels), model(pixels)
        if found.keys() != expected.keys():
            raise WeightsError("the program answers otherwise", expected=list(expected), got=list(found))
        if FEATURES in expected:
            features.add(found[FEATURES], expected[FEATURES])
        if LOGITS in expected:
            logits.add(found[LOGITS], expected[LOGITS])
            firsts.append(_firsts(found[LOGITS], expected[LOGITS]))
        images += len(pixels)
        sizes[len(pixels)] = None
    main = logits if firsts else features
    agreement, ties = _agreement(firsts, allowed=main.allowed)
    return Comparison(
        images=images,
        batch_sizes=tuple(sizes),
        top1_agreement=agreement,
        ties=ties,
        largest_difference=main.difference,
        allowed_difference=main.allowed,
        largest_answer=main.largest,
        features_difference=features.difference if features.asked else None,
        features_allowed=features.allowed,
    )


def _firsts(found: Numbers, expected: Numbers) -> tuple[Numbers, Numbers]:
    """For each image whether the first class is the same, and how far the model's first is ahead of its second."""
    if found.shape != expected.shape:
        return np.zeros(len(expected), dtype=np.float32), np.full(len(expected), np.inf, dtype=np.float32)
    same = (found.argmax(axis=1) == expected.argmax(axis=1)).astype(np.float32)
    if expected.shape[1] < 2:
        return same, np.full(len(expected), np.inf, dtype=np.float32)
    second, first = np.sort(expected, axis=1)[:, -2:].T
    return same, first - second


def _agreement(firsts: list[tuple[Numbers, Numbers]], *, allowed: float) -> tuple[float | None, int]:
    """The share of images whose first class is the same among those that are no ties, and how many are ties."""
    if not firsts:
        return None, 0
    same, ahead = (np.concatenate(parts) for parts in zip(*firsts, strict=True))
    # Each of two logits may move by what is allowed.
    tied = ahead <= 2 * allowed
    return (float(same[~tied].mean()) if (~tied).any() else 1.0), int(tied.sum())


def check(found: Comparison, *, title: str) -> None:
    """Refuse answers that are not the model's."""
    if found.top1_agreement is not None and found.top1_agreement < 1:
        raise WeightsError(
            f"{title} gives another first class than the model",
            expected=f"the same for all of {found.images:,} images",
            got=f"{found.top1_agreement:.2%}, and logits that differ by {found.largest_difference:.2g}",
            hint="nothing was written; vitkit export --to torch is the nearest to the model itself",
        )
    pairs = (
        (LOGITS if found.top1_agreement is not None else FEATURES, found.largest_difference, found.allowed_difference),
        (FEATURES, found.features_difference, found.features_allowed),
    )
    for name, difference, allowed in pairs:
        if difference is not None and not difference <= allowed:
            raise WeightsError(
                f"{title} does not give the model's {name}",
                expected=f"a difference of at most {allowed:.2g}",
                got=f"{difference:.2g}, {difference / allowed:.1f} times as much",
                hint="nothing was written; vitkit export --to torch is the nearest to the model itself",
            )


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def as_run(program: Callable[[Tensor], Mapping[str, Tensor]]) -> Run:
    """A module of torch as what a runtime is."""

    def run(pixels: Numbers) -> dict[str, Numbers]:
        with torch.inference_mode():
            return {name: answer.numpy() for name, answer in program(torch.from_numpy(pixels)).items()}

    return run


def judged(program: Program) -> Run:
    """The model as vitkit evaluates it, in float32."""
    return as_run(program.eval())
