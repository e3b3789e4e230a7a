"""Charts of the reports: geometry and labels; `templates/charts.html` draws them as inline SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitkit.evaluation.metrics import Calibration
from vitkit.report.html import asset, template_macros, visible

Number = int | float
Scale = Literal["linear", "log"]

COLORS = 6
"""Series colors s0 … s5 of the style sheet."""
MAX_POINTS = 300
"""Intervals that a long line is thinned to; each keeps its minimum and maximum."""


# Axes and ticks


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Mapping from data to the coordinates of a drawing; x is in powers of ten if `log_x`, likewise y."""

    left: Number
    top: Number
    right: Number
    bottom: Number
    x: tuple[Number, Number] = (0.0, 1.0)
    y: tuple[Number, Number] = (0.0, 1.0)
    log_x: bool = False
    log_y: bool = False

    def to_x(self, value: Number) -> float:
        """Return the horizontal coordinate of a value."""
        return self.left + (self.right - self.left) * _position(value, self.x, log=self.log_x)

    def to_y(self, value: Number) -> float:
        """Return the vertical coordinate of a value."""
        return self.bottom - (self.bottom - self.top) * _position(value, self.y, log=self.log_y)


def _position(value: Number, limits: tuple[Number, Number], *, log: bool) -> float:
    low, high, value = (math.log10(each) for each in (*limits, value)) if log else (*limits, value)
    return (value - low) / (high - low)


def nice_ticks(low: Number, high: Number, *, count: int = 5) -> list[float]:
    """Return about `count` round numbers (1, 2, 2.5 or 5 times a power of ten) that enclose low and high.

    >>> nice_ticks(0.03, 2.31), nice_ticks(7, 7)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [6.0, 6.5, 7.0, 7.5, 8.0])
    """
    if not high > low:
        margin = abs(low) / 10 or 1.0
        margin = max(margin, 1.0) if float(low).is_integer() else margin
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def fraction_ticks(fractions: Sequence[Number], *, min_range: float, margin: float) -> list[float]:
    """Return round fractions within 0..1 that enclose the given ones.

    >>> fraction_ticks([0.98, 0.99, 1.0], min_range=1e-3, margin=0.01)
    [0.98, 0.985, 0.99, 0.995, 1.0]
    """
    if not fractions:
        return [0.0, 0.5, 1.0]
    low, high = min(fractions), max(fractions)
    if high - low < min_range:
        low, high = max(low - margin, 0.0), min(high + margin, 1.0)
    return [tick for tick in nice_ticks(low, high) if -1e-9 <= tick <= 1 + 1e-9] or [0.0, 1.0]


def log_ticks(low: Number, high: Number) -> list[float]:
    """Return round numbers between two powers of ten.

    >>> log_ticks(-0.1, 1.1)
    [1.0, 2.0, 5.0, 10.0]
    """
    digits = (1, 2, 5) if high - low < 2.2 else (1,)
    step = math.ceil((high - low) / 8) if high - low > 8 else 1
    powers = range(math.floor(low), math.ceil(high) + 1, step)
    ticks = [first * 10.0**power for power in powers for first in digits]
    return [float(f"{tick:.6g}") for tick in ticks if low <= math.log10(tick) <= high]


def percent_ticks(fractions: Sequence[float]) -> list[tuple[float, str]]:
    """Return fractions with their labels on an axis."""
    return [(fraction, f"{fraction * 100:.4g} %") for fraction in fractions]


def standalone_svg(drawing: str) -> str:
    """Turn an inline drawing into an SVG file with the style sheet inside."""
    rules = f"{asset('report.css')} svg {{ background: var(--card); width: auto; font-family: system-ui, sans-serif; }}"
    opening, _, rest = str(drawing).strip().partition(">")
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{opening}><style><![CDATA[{rules}]]></style>{rest}\n"


# Lines


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart: values by step. NaN and infinities leave a gap."""

    name: str
    steps: tuple[int, ...]
    values: tuple[Number, ...]

    def select(self, indices: Sequence[int]) -> "Series":
        """Return the points at some indices."""
        steps = tuple(self.steps[index] for index in indices)
        return Series(name=self.name, steps=steps, values=tuple(self.values[index] for index in indices))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A line chart. `percent` labels fractions in percent, `smooth` adds a running mean, log omits values <= 0."""

    title: str
    series: tuple[Series, ...]
    percent: bool = False
    smooth: bool = False
    scale: Scale = "linear"


def smooth(values: Sequence[Number], *, decay: float = 0.9) -> list[float]:
    """Return the bias-corrected exponential moving average; values that are not finite are skipped."""
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        means.append(total / weight if weight else math.nan)
    return means


class _Line(NamedTuple):
    name: str
    color: str
    last: str
    points: list[tuple[float, float]]
    trend: list[tuple[float, float]]


def line_chart(panel: Panel) -> Markup:
    """Draw lines by step with axes, tooltips and a legend that has the last values."""
    finite = [line for line in (_finite(each, log=panel.scale == "log") for each in panel.series) if line.steps]
    if not finite:
        return Markup('<p class="empty">{}: nothing was logged.</p>').format(visible(panel.title))
    series = [each.select(_thin(each)) for each in finite]
    axes, ticks = _line_axes(series, panel)
    x_ticks = [tick for tick in nice_ticks(*axes.x) if axes.x[0] <= tick <= axes.x[1] and float(tick).is_integer()]
    lines = []
    for index, (full, each) in enumerate(zip(finite, series, strict=True)):
        trend = _trend(full).select(_thin(full)) if panel.smooth and len(full.steps) >= 20 else None
        last, points = _value_label((trend or each).values[-1], percent=panel.percent), _points(each, axes)
        lines.append(_Line(each.name, f"s{index % COLORS}", last, points, _points(trend, axes) if trend else []))
    x_labels = [(tick, _step_label(tick)) for tick in x_ticks]
    y_labels = [(tick, _value_label(tick, percent=panel.percent)) for tick in ticks]
    strips = _line_tooltips(series, axes=axes, percent=panel.percent)
    return Markup(template_macros("charts.html").line_chart(panel.title, axes, x_labels, y_labels, lines, strips))


def _points(line: Series, axes: Axes) -> list[tuple[float, float]]:
    return [(axes.to_x(step), axes.to_y(value)) for step, value in zip(line.steps, line.values, strict=True)]


def _finite(series: Series, *, log: bool) -> Series:
    return series.select(
        [i for i, value in enumerate(series.values) if math.isfinite(value) and (value > 0 or not log)]
    )


def _thin(series: Series) -> list[int]:
    """Return the indices of the points to draw: the extremes of each interval, so that spikes stay."""
    count = len(series.steps)
    if count <= 2 * MAX_POINTS:
        return list(range(count))
    values = np.asarray(series.values, dtype=np.float64)
    chosen = {0, count - 1}
    for interval in np.array_split(np.arange(count), MAX_POINTS):
        chosen |= {int(interval[values[interval].argmin()]), int(interval[values[interval].argmax()])}
    return sorted(chosen)


def _trend(series: Series) -> Series:
    decay = 1 - 1 / max(10.0, len(series.steps) / 40)
    return replace(series, values=tuple(smooth(series.values, decay=decay)))


def _line_axes(lines: Sequence[Series], panel: Panel) -> tuple[Axes, list[float]]:
    values = [value for line in lines for value in line.values]
    steps = [step for line in lines for step in line.steps]
    low, high = min(values), max(values)
    if panel.scale == "log":
        bottom = math.floor(math.log10(low))
        ticks = [10.0**power for power in range(bottom, max(math.ceil(math.log10(high)), bottom + 1) + 1)]
    elif panel.percent and high <= 1:
        ticks = [tick for tick in nice_ticks(low, high) if tick <= 1 or tick < high] if high > low else [0.0, 0.5, 1.0]
    else:
        ticks = [tick for tick in nice_ticks(0 if 0 < low < high / 3 else low, high) if tick >= 0 or low < 0]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    x, y, log_y = (first, last), (ticks[0], ticks[-1]), panel.scale == "log"
    return Axes(left=58, top=12, right=496, bottom=220, x=x, y=y, log_y=log_y), ticks


def _line_tooltips(lines: Sequence[Series], *, axes: Axes, percent: bool) -> Iterator[tuple[float, float, str]]:
    """Yield position and width of vertical strips, and the values of the nearest steps, which they show on hover."""
    steps = sorted({step for line in lines for step in line.steps})
    chosen = sorted({steps[round(at)] for at in np.linspace(0, len(steps) - 1, min(len(steps), 80))})
    width = (axes.right - axes.left) / len(chosen)
    for step in chosen:
        rows = [f"step {step:,}"]
        for line in lines:
            nearest = int(np.abs(np.asarray(line.steps) - step).argmin())
            if abs(axes.to_x(line.steps[nearest]) - axes.to_x(step)) <= width:
                rows.append(f"{visible(line.name)}: {_value_label(line.values[nearest], percent=percent)}")
        yield min(max(axes.to_x(step) - width / 2, axes.left), axes.right - width), width, "\n".join(rows)


def _step_label(step: Number) -> str:
    if step >= 1_000_000:
        return f"{step / 1_000_000:g}M"
    return f"{step / 1000:g}k" if step >= 10_000 else f"{step:,.0f}"


def _value_label(value: Number, *, percent: bool) -> str:
    if percent:
        return f"{value * 100:.3g} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")


# Dots with intervals

DOT_WIDTH, DOT_ROW = 560, 24
"""Width of the charts, and height of a row."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A value with an interval; `color` is the index of its series."""

    value: float
    color: int
    tooltip: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class DotGroup:
    """The dots of one name."""

    name: str
    dots: Sequence[Dot]
    bold: bool = False


def row_chart(
    groups: Sequence[DotGroup],
    *,
    ticks: Sequence[tuple[float, str]],
    title: str,
    x_title: str = "",
    legend: Sequence[str] = (),
) -> Markup:
    """Draw a row for each group; the dots of different series are above each other."""
    keys, top = _dot_legend(legend)
    x = low, high = ticks[0][0], ticks[-1][0]
    axes = Axes(left=176, top=top, right=DOT_WIDTH - 20, bottom=top + DOT_ROW * len(groups) + 4, x=x)
    spacing = min(5, 14 / max(len(legend), 1)) if legend else 0
    rows = []
    for index, group in enumerate(groups):
        center, dots = top + DOT_ROW * (index + 0.5) + 2, []
        for dot in group.dots:
            ends = [axes.to_x(min(max(end, low), high)) for end in dot.interval or ()]
            dots.append((dot, center + spacing * (dot.color - (len(legend) - 1) / 2), f"s{dot.color % COLORS}", ends))
        rows.append((group, center, dots))
    return Markup(template_macros("charts.html").row_chart(rows, axes, ticks, keys, DOT_WIDTH, title, x_title))


def column_chart(
    groups: Sequence[DotGroup], *, ticks: Sequence[tuple[float, str]], title: str, legend: Sequence[str] = ()
) -> Markup:
    """Draw a column for each group; the dots of different series are next to each other (Figure 2)."""
    keys, top = _dot_legend(legend)
    x, y = (0, max(len(groups), 1)), (ticks[0][0], ticks[-1][0])
    axes = Axes(left=56, top=top + 16, right=DOT_WIDTH - 10, bottom=top + 226, x=x, y=y)
    spacing = min((axes.right - axes.left) / x[1] / (len(legend) + 1), 34)
    columns = []
    for index, group in enumerate(groups):
        center, offset = axes.to_x(index + 0.5), (len(legend) - 1) / 2
        dots = [(dot, center + spacing * (dot.color - offset), f"s{dot.color % COLORS}") for dot in group.dots]
        columns.append((group, center, dots))
    return Markup(template_macros("charts.html").column_chart(columns, axes, ticks, keys, DOT_WIDTH, title))


def _dot_legend(names: Sequence[str]) -> tuple[list[tuple[float, float, str, str]], float]:
    """Return position, color and name of each series, in as many lines as needed, and the end of the last line."""
    keys, x, y = [], 12.0, 20.0
    for index, each in enumerate(names):
        name = visible(each, limit=36)
        width = 26 + 7.0 * len(name)
        if x > 12 and x + width > DOT_WIDTH:
            x, y = 12.0, y + 18
        keys.append((x, y, f"s{index % COLORS}", name))
        x += width
    return keys, y + 12 if names else 8.0


# Confusion and calibration


def confusion_heatmap(counts: NDArray[np.int64], *, names: Sequence[str], totals: NDArray[np.int64]) -> Markup:
    """Draw a confusion matrix: rows are true classes, columns predicted classes, color is the fraction of the row.

    `totals` are the images of each true class, including those predicted as a class that is not drawn.
    """
    classes = len(names)
    cell = 56 if classes <= 4 else 44 if classes <= 6 else 34 if classes <= 12 else 22
    short = [visible(name, limit=18) for name in names]
    margin = max(len(name) for name in short) * 6.6 + 14
    macros = template_macros("charts.html")
    return Markup(macros.heatmap(counts.tolist(), totals.tolist(), names, short, cell, margin))


def reliability_diagram(bins: Calibration) -> Markup:
    """Draw accuracy by confidence next to the diagonal of a calibrated model, above the images of each bin."""
    axes = Axes(left=58, top=12, right=388, bottom=252)
    width = (axes.right - axes.left) / len(bins.count)
    rows = [
        (axes.left + index * width, int(bins.count[index]), bins.accuracy[index], bins.confidence[index])
        for index in np.flatnonzero(bins.count).tolist()
    ]
    ticks, largest = percent_ticks([0.0, 0.25, 0.5, 0.75, 1.0]), max(int(bins.count.max()), 1)
    return Markup(template_macros("charts.html").reliability_diagram(axes, ticks, rows, width, largest))
