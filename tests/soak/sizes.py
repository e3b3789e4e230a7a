"""The name of a size goes in; how long and how often each promise of serving is tried comes out."""

from dataclasses import dataclass
from typing import Literal

Size = Literal["small", "medium", "full"]


@dataclass(frozen=True)
class Counts:
    """How long and how often each promise is tried."""

    front: int
    """Requests that the cost of HTTP is measured on."""
    peak: float
    """Seconds of the closed loop that finds the capacity, and of the loop without a server."""
    rounds: int
    """How often what depends on the speed of the machine is measured anew, in turns with what is compared to it."""
    steady: float
    even: float
    overload: float
    slow: int
    beside: float
    """Seconds of a round in which honest clients ask beside the slow ones, and of one without those."""
    faults: int
    stops: int
    generations: int


COUNTS: dict[Size, Counts] = {
    "small": Counts(600, 3.0, 1, 6.0, 4.0, 3.0, 120, 14.0, 2, 2, 2),
    "medium": Counts(5_000, 6.0, 2, 60.0, 60.0, 20.0, 1_000, 20.0, 4, 4, 3),
    "full": Counts(20_000, 10.0, 5, 300.0, 300.0, 60.0, 1_000, 30.0, 20, 20, 10),
}
