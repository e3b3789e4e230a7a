"""Tests of claims: verdicts with intervals over seeds, paired by seed."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vitkit.studies.statistics import SIGNIFICANCE, Estimate, equivalence_p_value, estimate, logit, slope
from vitkit.studies.study import SEED, Claim

Row = Mapping[str, object]
Verdict = Literal["shows", "does not show", "contradicts", "no data"]


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim with its verdict and the estimate that it rests on; of several, the least favorable one."""

    text: str
    expected: str
    verdict: Verdict
    estimate: Estimate | None
    detail: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the estimate over seeds, 95 %."""
        return self.estimate.interval if self.estimate else None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        values: dict[str, object] = (
            self.estimate.to_dict() if self.estimate else {"mean": None, "interval": None, "seeds": 0}
        )
        plain: dict[str, object] = {"text": self.text, "verdict": self.verdict, "expected": self.expected}
        return plain | {"detail": self.detail} | values


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One comparison of a claim."""

    name: str
    verdict: Verdict
    estimate: Estimate


def evaluate_claim(claim: Claim, rows: Sequence[Row]) -> ClaimResult:
    """Test a claim on the rows of a table."""
    conditions = claim.conditions
    selected = [
        row
        for row in rows
        if all(condition.holds(row) for condition in conditions) and isinstance(row.get(claim.column), int | float)
    ]
    parts = _TESTS[claim.kind](claim, selected)
    if not parts:
        return ClaimResult(
            text=claim.text,
            expected=claim.expected,
            verdict="no data",
            estimate=None,
            detail="no finished runs have its labels",
        )
    order: dict[Verdict, int] = {"contradicts": 0, "no data": 1, "does not show": 2, "shows": 3}
    worst = min(parts, key=lambda part: order[part.verdict])
    points = claim.kind in POINT_KINDS and claim.column != "distance"
    detail = "; ".join(f"{part.name}: {format_estimate(part.estimate, points=points)}" for part in parts)
    return ClaimResult(
        text=claim.text, expected=claim.expected, verdict=worst.verdict, estimate=worst.estimate, detail=detail
    )


POINT_KINDS = ("greater", "equal", "order")
"""Kinds whose estimate is a difference, which is printed in points if it is one of accuracies."""


def format_estimate(value: Estimate, *, points: bool) -> str:
    """Format a mean and its interval; differences of accuracies in points.

    >>> format_estimate(Estimate(mean=0.021, interval=(0.01, 0.032), seeds=3), points=True)
    '+2.1 points (+1.0 to +3.2)'
    """
    scale, unit = (100, " points") if points else (1, "")
    form = "{:+.1f}" if points else "{:+.3g}"
    low_high = (
        f" ({form.format(value.interval[0] * scale)} to {form.format(value.interval[1] * scale)})"
        if value.interval
        else " (one seed)"
    )
    return f"{form.format(value.mean * scale)}{unit}{low_high}"


def means_by_seed(claim: Claim, rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the mean of the column by label and seed; with `best_of`, of the best value of that axis."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row[claim.axis]), int(str(row[SEED]))].append(row)
    result: dict[str, dict[int, float]] = defaultdict(dict)
    for (label, seed), members in groups.items():
        if claim.best_of is not None:
            best = max(members, key=lambda row: _number(row.get("val_top1")))
            result[label][seed] = _number(best[claim.column])
            continue
        values = [_number(row[claim.column]) for row in members]
        result[label][seed] = sum(values) / len(values)
    return result


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else -math.inf


def _paired(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    return [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]


def _decide(value: Estimate, *, margin: float) -> Verdict:
    """Return whether a mean is above a margin, by its interval."""
    if value.interval is None:
        return "does not show"
    return "shows" if value.interval[0] > margin else "contradicts" if value.interval[1] < margin else "does not show"


def _greater(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    means = means_by_seed(claim, rows)
    parts = []
    for left, right in zip(claim.labels, claim.labels[1:], strict=False):
        differences = _paired(means.get(left, {}), means.get(right, {}))
        if not differences:
            return []
        value = estimate(differences)
        parts.append(_Part(name=f"{left} − {right}", verdict=_decide(value, margin=claim.margin), estimate=value))
    return parts


def _equal(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    means, parts = means_by_seed(claim, rows), []
    first = claim.labels[0]
    for other in claim.labels[1:]:
        differences = _paired(means.get(other, {}), means.get(first, {}))
        if not differences:
            return []
        value = estimate(differences)
        is_equal = equivalence_p_value(differences, margin=claim.margin) < SIGNIFICANCE
        low, high = value.interval or (-math.inf, math.inf)
        verdict: Verdict = (
            "shows" if is_equal else "contradicts" if low > claim.margin or high < -claim.margin else "does not show"
        )
        parts.append(_Part(name=f"{other} − {first}", verdict=verdict, estimate=value))
    return parts


def _slopes(claim: Claim, rows: Sequence[Row], value: Callable[[float], float]) -> dict[str, dict[int, float]]:
    """Return the slope of the column over log10 of x, by label and seed."""
    points: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        x = float(str(row[claim.x or ""]))
        points[str(row[claim.axis]), int(str(row[SEED]))][math.log10(x)].append(value(_number(row[claim.column])))
    result: dict[str, dict[int, float]] = defaultdict(dict)
    for (label, seed), values in points.items():
        if len(values) > 1:
            result[label][seed] = slope(list(values), [sum(each) / len(each) for each in values.values()])
    return result


def _steeper(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    slopes, parts = _slopes(claim, rows, logit if claim.logits else float), []
    for left, right in zip(claim.labels, claim.labels[1:], strict=False):
        differences = _paired(slopes.get(left, {}), slopes.get(right, {}))
        if not differences:
            return []
        value = estimate(differences)
        parts.append(
            _Part(name=f"slope of {left} − {right}", verdict=_decide(value, margin=claim.margin), estimate=value)
        )
    return parts


def _shrinks(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    slopes = _slopes(claim, rows, logit if claim.logits else float)
    left, right = claim.labels
    differences = _paired(slopes.get(right, {}), slopes.get(left, {}))
    if not differences:
        return []
    value = estimate(differences)
    return [_Part(name=f"slope of {right} − {left}", verdict=_decide(value, margin=claim.margin), estimate=value)]


def _rises(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    slopes, parts = _slopes(claim, rows, logit if claim.logits else float), []
    for label in claim.labels:
        if label in slopes:
            value = estimate(list(slopes[label].values()))
            parts.append(_Part(name=f"slope of {label}", verdict=_decide(value, margin=claim.margin), estimate=value))
    return parts


def _best_differs(claim: Claim, rows: Sequence[Row]) -> list[_Part]:
    """Compare log10 of the best x of two labels, by seed."""
    best: dict[str, dict[int, float]] = defaultdict(dict)
    scores: dict[tuple[str, int], float] = {}
    for row in rows:
        key, score = (str(row[claim.axis]), int(str(row[SEED]))), _number(row[claim.column])
        if score > scores.get(key, -math.inf):
            scores[key] = score
            best[key[0]][key[1]] = math.log10(float(str(row[claim.x or ""])))
    left, right = claim.labels
    differences = _paired(best.get(left, {}), best.get(right, {}))
    if not differences:
        return []
    value = estimate(differences)
    low, high = value.interval or (0.0, 0.0)
    verdict: Verdict = "shows" if low > 0 or high < 0 else "does not show"
    return [_Part(name=f"log10 of the best {claim.x}, {left} − {right}", verdict=verdict, estimate=value)]


_TESTS: dict[str, Callable[[Claim, Sequence[Row]], list[_Part]]] = {
    "greater": _greater,
    "order": _greater,
    "equal": _equal,
    "steeper": _steeper,
    "shrinks": _shrinks,
    "rises": _rises,
    "best_differs": _best_differs,
}
