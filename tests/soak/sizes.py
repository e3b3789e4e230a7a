"""Durations and counts of the serving campaigns, by size."""

from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "medium", "full"]


@dataclass(frozen=True)
class Counts:
    """Durations and counts of one size."""

    front: int
    """Requests to measure the cost of HTTP."""
    peak: float
    """Seconds of the closed loop that measures the capacity, and of the loop without a server."""
    rounds: int
    """Repetitions of measurements that depend on the machine, interleaved with their reference."""
    steady: float
    even: float
    overload: float
    slow: int
    beside: float
    """Seconds of a round with ordinary clients next to slow ones, and of a round without slow ones."""
    faults: int
    stops: int
    generations: int


COUNTS: dict[Size, Counts] = {
    "small": Counts(600, 3.0, 1, 6.0, 4.0, 3.0, 120, 14.0, 2, 2, 2),
    "medium": Counts(5_000, 6.0, 2, 60.0, 60.0, 20.0, 1_000, 20.0, 4, 4, 3),
    "full": Counts(20_000, 10.0, 5, 300.0, 300.0, 60.0, 1_000, 30.0, 20, 20, 10),
}
