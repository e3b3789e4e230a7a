"""Statistics over seeds: t-intervals, equivalence tests, slopes and power-law fits, in NumPy alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE, SIGNIFICANCE = 0.95, 0.05
"""Confidence of intervals, and level of equivalence tests."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds with its t-interval, which is None for fewer than two seeds."""

    mean: float
    interval: tuple[float, float] | None
    seeds: int

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {"mean": self.mean, "interval": list(self.interval) if self.interval else None, "seeds": self.seeds}


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its t-interval.

    >>> result = estimate([1.0, 2.0, 3.0])
    >>> result.mean, [round(limit, 3) for limit in result.interval]
    (2.0, [-0.484, 4.484])
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return Estimate(mean=mean, interval=None, seeds=len(array))
    half = t_quantile(0.5 + CONFIDENCE / 2, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
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
    """Return P(T ≤ t) of Student's t-distribution, which has a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(t_probability(2.0, 4), 4)
    0.9419
    """
    angle, is_odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    total, term = 0.0, math.sin(angle) * math.cos(angle) ** is_odd
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    return 0.5 + ((angle + total) / math.pi if is_odd else total / 2)


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
    """err = a · C^−b + c, by least squares.

    Args:
        covariance: Covariance of a, b and c; None if there are not more points than parameters. If c is at its limit 0,
            it is fixed, and its row is zero.
        freedom: Points minus fitted parameters.
    """

    a: float
    b: float
    c: float
    covariance: Floats | None = None
    freedom: int = 0

    def __call__(self, compute: Floats) -> Floats:
        """Return the error at some compute."""
        return np.asarray(self.a * compute**-self.b + self.c, dtype=np.float64)

    def intervals(self) -> dict[str, tuple[float, float]] | None:
        """Return the intervals of a, b and c."""
        if self.covariance is None:
            return None
        half = t_quantile(0.5 + CONFIDENCE / 2, self.freedom) * np.sqrt(np.diag(self.covariance))
        values = zip("abc", (self.a, self.b, self.c), half.tolist(), strict=True)
        return {name: (value - width, value + width) for name, value, width in values}

    def band(self, compute: Floats) -> Floats | None:
        """Return half the width of the interval of the fitted error at some compute."""
        if self.covariance is None:
            return None
        slopes = power_law_jacobian(np.array([self.a, self.b, self.c]), compute)
        variance = np.einsum("ni,ij,nj->n", slopes, self.covariance, slopes)
        return np.asarray(t_quantile(0.5 + CONFIDENCE / 2, self.freedom) * np.sqrt(variance))


def power_law_jacobian(values: Floats, compute: Floats) -> Floats:
    """Return the derivatives of a · C^−b + c with respect to a, b and c."""
    power = compute ** -values[1]
    return np.stack([power, -values[0] * power * np.log(compute), np.ones_like(compute)], axis=1)


def fit_power_law(compute: Sequence[float], errors: Sequence[float]) -> PowerLaw | None:
    """Fit err = a · C^−b + c with c ≥ 0; None for fewer than three different C.

    Levenberg-Marquardt with C divided by its geometric mean, from the line in logarithms.

    >>> law = fit_power_law([1e3, 1e4, 1e5, 1e6], [2 * compute**-0.3 + 0.1 for compute in (1e3, 1e4, 1e5, 1e6)])
    >>> round(law.a, 2), round(law.b, 3), round(law.c, 3)
    (2.0, 0.3, 0.1)
    """
    if len(set(compute)) < 3 or min(errors) <= 0:
        return None
    x, y = np.asarray(compute, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    scale = float(np.exp(np.log(x).mean()))
    x = x / scale
    laws = [_refine(x, y, c=fraction * y.min()) for fraction in (0.5, 0.9)]
    law = min(laws, key=lambda law: float(((law(x) - y) ** 2).sum()))
    if law.c < 0:
        law = _refine(x, y, c=None)
    # a of the scaled C is a · scale^−b of C itself.
    factor = scale**law.b
    covariance = law.covariance
    if covariance is not None:
        to_unscaled = np.array([[factor, law.a * factor * np.log(scale), 0], [0, 1, 0], [0, 0, 1]])
        covariance = to_unscaled @ covariance @ to_unscaled.T
    return PowerLaw(a=law.a * factor, b=law.b, c=law.c, covariance=covariance, freedom=law.freedom)


def _refine(x: Floats, y: Floats, *, c: float | None) -> PowerLaw:
    """Return the least-squares fit that starts from a line in logarithms above c; None fixes c at 0."""
    free = 2 if c is None else 3
    steepness, offset = np.polyfit(np.log(x), np.log(y - (c or 0.0)), 1)
    values, damping = np.array([np.exp(offset), -steepness, c or 0.0]), 1e-3

    def loss(values: Floats) -> float:
        with np.errstate(over="ignore"):
            return float(((values[0] * x ** -values[1] + values[2] - y) ** 2).sum())

    for _ in range(500):
        jacobian = power_law_jacobian(values, x)[:, :free]
        gradient = jacobian.T @ (values[0] * x ** -values[1] + values[2] - y)
        normal = jacobian.T @ jacobian
        step = np.zeros(3)
        step[:free] = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-15), gradient)
        if loss(values - step) < loss(values):
            values, damping = values - step, max(damping / 10, 1e-15)
            if np.all(np.abs(step) <= 1e-12 * (np.abs(values) + 1e-12)):
                break
        else:
            damping *= 10
            if damping > 1e12:
                break
    freedom = len(y) - free
    covariance = None
    if freedom > 0:
        jacobian = power_law_jacobian(values, x)[:, :free]
        covariance = np.zeros((3, 3))
        covariance[:free, :free] = np.linalg.pinv(jacobian.T @ jacobian) * loss(values) / freedom
    a, b, c = values.tolist()
    return PowerLaw(a=a, b=b, c=c, covariance=covariance, freedom=freedom)
