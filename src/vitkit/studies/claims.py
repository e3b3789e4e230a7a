"""Tests of claims: verdicts with intervals over seeds, paired by seed."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from vitkit.core.result import select
from vitkit.studies.statistics import SIGNIFICANCE, Estimate, equivalence_p_value, estimate, logit, slope
from vitkit.studies.study import SEED, Claim, is_fraction

Row = Mapping[str, object]
Measure = Callable[[Claim, Sequence[Row]], float | None]
Verdict = Literal["contradicts", "does not show", "shows", "no data"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the least favorable one."""


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
        values = self.estimate.to_dict() if self.estimate else {"mean": None, "interval": None, "seeds": 0}
        return select(self, "text", "verdict", "expected", "detail") | values


class LabelComparison(NamedTuple):
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
    result = ClaimResult(
        text=claim.text,
        expected=claim.expected,
        verdict="no data",
        estimate=None,
        detail="no finished runs have its labels",
    )
    comparisons = compare_labels(claim, selected)
    if not comparisons:
        return result
    worst = min(comparisons, key=lambda each: VERDICTS.index(each.verdict))
    points = claim.kind in ("greater", "equal", "order") and is_fraction(claim.column)
    detail = "; ".join(f"{each.name}: {format_estimate(each.estimate, points=points)}" for each in comparisons)
    return replace(result, verdict=worst.verdict, estimate=worst.estimate, detail=detail)


def format_estimate(value: Estimate, *, points: bool) -> str:
    """Format a mean and its interval; differences of accuracies in points.

    >>> format_estimate(Estimate(mean=0.021, interval=(0.01, 0.032), seeds=3), points=True)
    '+2.1 points (+1.0 to +3.2)'
    """
    scale, digits, unit = (100, "+.1f", " points") if points else (1, "+.3g", "")
    mean, *ends = (format(each * scale, digits) for each in (value.mean, *(value.interval or ())))
    return f"{mean}{unit} ({' to '.join(ends) or 'one seed'})"


def compare_labels(claim: Claim, rows: Sequence[Row]) -> list[LabelComparison]:
    """Compare the labels of a claim in pairs, or each with 0; return nothing if a pair has no seed in common."""
    measure, prefix = MEASURES[claim.kind]
    prefix, values = prefix.format(x=claim.x), measure_labels(claim, rows, measure)
    if claim.kind == "rises":
        labels = [label for label in claim.labels if label in values]
        return [decide(claim, f"{prefix}{label}", list(values[label].values())) for label in labels]
    comparisons = []
    for left, right in pair_labels(claim):
        seeds = sorted(values[left].keys() & values[right].keys())
        if not seeds:
            return []
        differences = [values[left][seed] - values[right][seed] for seed in seeds]
        comparisons.append(decide(claim, f"{prefix}{left} − {right}", differences))
    return comparisons


def pair_labels(claim: Claim) -> list[tuple[str, str]]:
    """Return the pairs of labels whose difference is tested."""
    first, *others = claim.labels
    if claim.kind == "equal":
        return [(other, first) for other in others]
    return [(others[0], first)] if claim.kind == "shrinks" else list(pairwise(claim.labels))


def measure_labels(claim: Claim, rows: Sequence[Row], measure: Measure) -> dict[str, dict[int, float]]:
    """Return what a claim compares, by label and seed."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[str(row[claim.axis]), int(str(row[SEED]))].append(row)
    result: dict[str, dict[int, float]] = defaultdict(dict)
    for (label, seed), members in groups.items():
        if (value := measure(claim, members)) is not None:
            result[label][seed] = value
    return result


def measure_mean(claim: Claim, rows: Sequence[Row]) -> float:
    """Return the mean of the column; with `best_of`, the value of the row that is best on held-out images."""
    if claim.best_of is not None:
        return _number(max(rows, key=lambda row: _number(row.get("val_top1")))[claim.column])
    return sum(_number(row[claim.column]) for row in rows) / len(rows)


def measure_slope(claim: Claim, rows: Sequence[Row]) -> float | None:
    """Return the slope of the column, or of its logit, over log10 of x; None for a single x."""
    points: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        value = _number(row[claim.column])
        points[_log_x(claim, row)].append(logit(value) if claim.logits else value)
    return slope(list(points), [sum(each) / len(each) for each in points.values()]) if len(points) > 1 else None


def find_best_x(claim: Claim, rows: Sequence[Row]) -> float:
    """Return log10 of the x with the largest value of the column."""
    return _log_x(claim, max(rows, key=lambda row: _number(row[claim.column])))


def _log_x(claim: Claim, row: Row) -> float:
    return math.log10(float(str(row[str(claim.x)])))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else -math.inf


MEASURES: dict[str, tuple[Measure, str]] = {
    "greater": (measure_mean, ""),
    "order": (measure_mean, ""),
    "equal": (measure_mean, ""),
    "steeper": (measure_slope, "slope of "),
    "shrinks": (measure_slope, "slope of "),
    "rises": (measure_slope, "slope of "),
    "best_differs": (find_best_x, "log10 of the best {x}, "),
}
"""What each kind of claim compares, from the rows of a label and a seed, and its name before those of the labels."""


def decide(claim: Claim, name: str, differences: Sequence[float]) -> LabelComparison:
    """Decide by the interval over seeds whether a mean is above the margin, within it, or not 0, by kind."""
    value = estimate(differences)
    verdict: Verdict = "does not show"
    low, high = value.interval or (-math.inf, math.inf)
    if claim.kind == "best_differs":
        verdict = "shows" if low > 0 or high < 0 else verdict
    elif claim.kind == "equal":
        is_equal = equivalence_p_value(differences, margin=claim.margin) < SIGNIFICANCE
        is_outside = low > claim.margin or high < -claim.margin
        verdict = "shows" if is_equal else "contradicts" if is_outside else verdict
    else:
        verdict = "shows" if low > claim.margin else "contradicts" if high < claim.margin else verdict
    return LabelComparison(name, verdict, value)
