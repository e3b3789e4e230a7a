"""Statistics over seeds: t-intervals, equivalence tests, slopes and power-law fits, in NumPy alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds with its t-interval, which is None for fewer than two seeds."""

    mean: float
    interval: tuple[float, float] | None
    seeds: int

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {"mean": self.mean, "interval": list(self.interval) if self.interval else None, "seeds": self.seeds}


def estimate(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean with its t-interval.

    >>> result = estimate([1.0, 2.0, 3.0])
    >>> result.mean, [round(limit, 3) for limit in result.interval]
    (2.0, [-0.484, 4.484])
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return Estimate(mean=mean, interval=None, seeds=len(array))
    half = t_quantile(0.5 + confidence / 2, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(mean=mean, interval=(mean - half, mean + half), seeds=len(array))


def equivalence_p_value(values: Sequence[float], *, margin: float) -> float:
    """Return the p-value of two one-sided t-tests that the mean lies within ±margin (TOST).

    >>> round(equivalence_p_value([0.1, -0.2, 0.1, 0.0], margin=1.0), 4)
    0.0004
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return 1.0
    error, mean = float(array.std(ddof=1)) / math.sqrt(len(array)), float(array.mean())
    if error == 0.0:
        return 0.0 if abs(mean) < margin else 1.0
    above, below = (mean + margin) / error, (margin - mean) / error
    return 1.0 - min(t_probability(above, len(array) - 1), t_probability(below, len(array) - 1))


def t_probability(t: float, freedom: int) -> float:
    """Return P(T ≤ t) of Student's t-distribution.

    >>> round(t_probability(2.0, 4), 4)
    0.9419
    """
    if t * t < freedom:  # near the median the tail loses digits
        return 0.5 + math.copysign(0.5 * incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t)), t)
    tail = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1.0 - tail if t > 0 else tail


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t-distribution, by bisection.

    >>> round(t_quantile(0.975, 2), 4)
    4.3027
    """
    low, high = -1e9, 1e9
    while high - low > 1e-13 * max(1.0, abs(low)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_probability(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function by its continued fraction (modified Lentz).

    >>> round(incomplete_beta(2.0, 3.0, 0.4), 4)
    0.5248
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny, c, d = 1e-300, 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 400):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + numerator * d or tiny)
            c = 1.0 + numerator / c or tiny
            total *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * total


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    across = np.asarray(x, dtype=np.float64) - np.mean(x)
    return float(across @ np.asarray(y, dtype=np.float64) / (across @ across))


def logit(fraction: float) -> float:
    """Return log(p / (1 − p)); 0 and 1 are moved inside by 1e-4."""
    inside = min(max(fraction, 1e-4), 1 - 1e-4)
    return math.log(inside / (1 - inside))


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """err = a · C^−b + c."""

    a: float
    b: float
    c: float

    def __call__(self, compute: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the error at some compute."""
        return np.asarray(self.a * compute**-self.b + self.c, dtype=np.float64)


def fit_power_law(compute: Sequence[float], errors: Sequence[float]) -> PowerLaw | None:
    """Fit err = a · C^−b + c with 0 ≤ c below all errors; None for fewer than three points.

    For each c the rest is a line in logarithms; the c with the least squared error is refined by a finer grid.

    >>> law = fit_power_law([1e3, 1e4, 1e5, 1e6], [2 * compute**-0.3 + 0.1 for compute in (1e3, 1e4, 1e5, 1e6)])
    >>> round(law.a, 2), round(law.b, 3), round(law.c, 3)
    (2.0, 0.3, 0.1)
    """
    if len(set(compute)) < 3 or min(errors) <= 0:
        return None
    x, y = np.log(np.asarray(compute, dtype=np.float64)), np.asarray(errors, dtype=np.float64)
    low, high, best = 0.0, float(y.min()) * (1 - 1e-6), (math.inf, PowerLaw(a=0.0, b=0.0, c=0.0))
    for _ in range(8):
        grid = np.linspace(low, high, 41)
        for c in grid:
            steepness, offset = np.polyfit(x, np.log(np.maximum(y - c, 1e-12)), 1)
            law = PowerLaw(a=float(np.exp(offset)), b=float(-steepness), c=float(c))
            best = min(best, (float(((law(np.exp(x)) - y) ** 2).sum()), law), key=lambda pair: pair[0])
        step = (high - low) / 40
        low, high = max(best[1].c - step, 0.0), min(best[1].c + step, float(y.min()) * (1 - 1e-6))
    return best[1]
