"""Scatter plot of accuracy against cost (Figures 5 and 12 of the paper), with labels that do not overlap."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vitkit.core.formatting import format_number
from vitkit.evaluation.comparison import ModelFamily
from vitkit.report.html import visible
from vitkit.report.svg import (
    Axes,
    Box,
    Number,
    fraction_ticks,
    log_ticks,
    percent_label,
    svg_figure,
    svg_path,
    svg_text,
)

LABEL_LIMIT = 18
"""Characters of a label."""
SCATTER_SIZE = (520, 360)
SCATTER_BOX: Box = (56, 40, 502, 312)
MARKER_RADIUS = 5.5
LETTER_WIDTH, LINE_HEIGHT = 7.4, 14.0
FAMILY_COLORS: dict[ModelFamily, str] = {"ViT": "s0", "hybrid": "s1", "ResNet": "s2"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model in a scatter plot; `y` and its interval are fractions."""

    label: str
    family: ModelFamily
    x: float
    y: float
    interval: tuple[float, float]

    @property
    def text(self) -> str:
        """Return the label that is drawn."""
        return visible(self.label, limit=LABEL_LIMIT)


def scatter(points: Sequence[Point], *, title: str, x_title: str) -> Markup:
    """Draw accuracy against a cost on a logarithmic axis; points whose cost is zero or not finite are omitted."""
    points = [point for point in points if math.isfinite(point.x) and point.x > 0]
    if not points:
        return Markup()
    axes, ticks = scatter_axes(points)
    low, high = (math.log10(end) for end in axes.x)
    parts = [*axes.y_grid(ticks, percent_label)]
    parts += [*axes.x_grid(log_ticks(low, high), format_number, style="grid faint"), *axes.x_axis(x_title, offset=40)]
    parts += _family_legend(points)
    parts += [_error_bar(point, axes) for point in points]
    parts += [_point_marker(point, axes) for point in points]
    parts += [_point_label(point, at, axes) for point, at in zip(points, place_labels(points, axes), strict=True)]
    return svg_figure(parts, width=SCATTER_SIZE[0], height=SCATTER_SIZE[1], title=title)


def scatter_axes(points: Sequence[Point]) -> tuple[Axes, list[float]]:
    """Return axes that enclose all points with room for their labels, and the ticks of the vertical one."""
    fractions = [value for point in points for value in (point.y, *point.interval)]
    ticks = fraction_ticks(fractions, min_range=1e-3, margin=0.01)
    powers = [math.log10(point.x) for point in points]
    margin = max(0.12 * (max(powers) - min(powers)), 0.15)
    x = (10 ** (min(powers) - margin), 10 ** (max(powers) + margin))
    return Axes(box=SCATTER_BOX, x=x, y=(ticks[0], ticks[-1]), log_x=True), ticks


def _family_legend(points: Sequence[Point]) -> Iterator[str]:
    x = SCATTER_BOX[0]
    for family, color in FAMILY_COLORS.items():
        if any(point.family == family for point in points):
            yield svg_path(f"line {color}", _marker_path(family, x + MARKER_RADIUS, 16))
            yield svg_text(x + 2 * MARKER_RADIUS + 7, 20, family)
            x += 2 * MARKER_RADIUS + 22 + LETTER_WIDTH * len(family)


def _marker_path(family: ModelFamily, x: Number, y: Number) -> str:
    """Return the outline of a circle, a diamond or a triangle."""
    r = MARKER_RADIUS
    if family == "ViT":
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    if family == "hybrid":
        r *= 1.25
        return f"M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}z"
    r *= 1.15
    return f"M{x:.1f} {y - r:.1f}L{x + r:.1f} {y + r * 0.8:.1f}H{x - r:.1f}z"


def _interval_ends(point: Point, axes: Axes) -> tuple[float, float]:
    low, high = (axes.to_y(min(max(end, 0.0), 1.0)) for end in point.interval)
    return low, high


def _error_bar(point: Point, axes: Axes) -> str:
    (low, high), x = _interval_ends(point, axes), axes.to_x(point.x)
    d = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {high:.1f}h6M{x - 3:.1f} {low:.1f}h6"
    return svg_path(f"raw {FAMILY_COLORS[point.family]}", d)


def _point_marker(point: Point, axes: Axes) -> str:
    low, high = point.interval
    tooltip = f"{visible(point.label)}: {point.y:.2%} ({low:.1%}–{high:.1%}) at {format_number(point.x)}"
    d = _marker_path(point.family, axes.to_x(point.x), axes.to_y(point.y))
    # Filled, so that the error bar does not cross the marker.
    return svg_path(f"line {FAMILY_COLORS[point.family]}", d, tooltip=tooltip, css="fill:var(--card)")


def _point_label(point: Point, at: tuple[float, float], axes: Axes) -> str:
    (x, y), marker = at, (axes.to_x(point.x), axes.to_y(point.y))
    max_distance = len(point.text) * LETTER_WIDTH / 2 + 4 * MARKER_RADIUS
    is_far = abs(y - marker[1]) > 2.2 * LINE_HEIGHT or abs(x - marker[0]) > max_distance
    leader = svg_path("grid", f"M{marker[0]:.1f} {marker[1]:.1f}L{x:.1f} {y:.1f}") if is_far else ""
    return leader + svg_text(x, y + 4, point.text, anchor="middle")


def place_labels(points: Sequence[Point], axes: Axes) -> list[tuple[float, float]]:
    """Return the center of each label: the candidate nearest to the marker that covers no marker, bar or label."""
    occupied: list[Box] = []
    for point in points:
        x, y, r = axes.to_x(point.x), axes.to_y(point.y), MARKER_RADIUS + 2
        low, high = _interval_ends(point, axes)
        occupied += [(x - r, y - r, x + r, y + r), (x - 2, high, x + 2, low)]
    centers = []
    for point in points:
        width = len(point.text) * LETTER_WIDTH
        candidates = list(_label_candidates(axes.to_x(point.x), axes.to_y(point.y), width))
        free = (center for center in candidates if _is_free(label_box(center, width), occupied))
        centers.append(next(free, candidates[0]))
        occupied.append(label_box(centers[-1], width))
    return centers


def _label_candidates(x: Number, y: Number, width: Number) -> Iterator[tuple[float, float]]:
    beside = width / 2 + MARKER_RADIUS + 4
    for ring in range(14):
        up = ring * LINE_HEIGHT * 0.6
        for away in (0.0, beside * 0.5) if ring > 3 else (0.0,):
            for side in (beside + away, -beside - away):
                yield x + side, y - up
                yield x + side, y + up
        if up > MARKER_RADIUS + LINE_HEIGHT / 2:
            yield x, y - up
            yield x, y + up


def label_box(center: tuple[Number, Number], width: Number) -> Box:
    """Return the area that a label covers."""
    x, y = center
    return x - width / 2, y - LINE_HEIGHT / 2, x + width / 2, y + LINE_HEIGHT / 2


def _is_free(box: Box, occupied: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inner = SCATTER_BOX[0], SCATTER_BOX[1] - LINE_HEIGHT / 2, SCATTER_SIZE[0] - 2, SCATTER_BOX[3]
    is_inside = left >= inner[0] and right <= inner[2] and top >= inner[1] and bottom <= inner[3]
    return is_inside and not any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in occupied
    )
