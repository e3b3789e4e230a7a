"""Scatter plot of accuracy against cost (Figures 5 and 12 of the paper), with labels that do not overlap."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vitkit.core.formatting import format_number
from vitkit.evaluation.comparison import ModelFamily
from vitkit.report.charts import Axes, Number, fraction_ticks, log_ticks, percent_ticks
from vitkit.report.html import template_macros, visible

Box = tuple[Number, Number, Number, Number]
"""Left, top, right, bottom."""
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
    x_ticks = [(tick, format_number(tick)) for tick in log_ticks(*(math.log10(end) for end in axes.x))]
    drawn = [_draw_point(point, at, axes) for point, at in zip(points, place_labels(points, axes), strict=True)]
    families, x = [], SCATTER_BOX[0]
    for family, color in FAMILY_COLORS.items():
        if any(point.family == family for point in points):
            marker = _marker_path(family, x + MARKER_RADIUS, 16)
            families.append((x + 2 * MARKER_RADIUS + 7, color, marker, family))
            x += 2 * MARKER_RADIUS + 22 + LETTER_WIDTH * len(family)
    macros = template_macros("charts.html")
    return Markup(macros.scatter(drawn, axes, x_ticks, percent_ticks(ticks), families, SCATTER_SIZE, title, x_title))


def scatter_axes(points: Sequence[Point]) -> tuple[Axes, list[float]]:
    """Return axes that enclose all points with room for their labels, and the ticks of the vertical one."""
    fractions = [value for point in points for value in (point.y, *point.interval)]
    ticks = fraction_ticks(fractions, min_range=1e-3, margin=0.01)
    powers = [math.log10(point.x) for point in points]
    margin = max(0.12 * (max(powers) - min(powers)), 0.15)
    x = (10 ** (min(powers) - margin), 10 ** (max(powers) + margin))
    left, top, right, bottom = SCATTER_BOX
    return Axes(left=left, top=top, right=right, bottom=bottom, x=x, y=(ticks[0], ticks[-1]), log_x=True), ticks


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


def _draw_point(point: Point, label: tuple[float, float], axes: Axes) -> dict[str, object]:
    x, y = axes.to_x(point.x), axes.to_y(point.y)
    low, high = _interval_ends(point, axes)
    max_distance = len(point.text) * LETTER_WIDTH / 2 + 4 * MARKER_RADIUS
    is_far = abs(label[1] - y) > 2.2 * LINE_HEIGHT or abs(label[0] - x) > max_distance
    interval = f"({point.interval[0]:.1%}–{point.interval[1]:.1%})"
    return {
        "color": FAMILY_COLORS[point.family],
        "marker": _marker_path(point.family, x, y),
        "error_bar": f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {high:.1f}h6M{x - 3:.1f} {low:.1f}h6",
        "tooltip": f"{visible(point.label)}: {point.y:.2%} {interval} at {format_number(point.x)}",
        "text": point.text,
        "label": label,
        "leader": f"M{x:.1f} {y:.1f}L{label[0]:.1f} {label[1]:.1f}" if is_far else "",
    }


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
