"""Charts of the reports as inline SVG.

They need no script: tooltips are `<title>` elements.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitkit.evaluation.metrics import Calibration
from vitkit.report.html import visible
from vitkit.report.svg import (
    Axes,
    Number,
    nice_ticks,
    percent_label,
    svg_circle,
    svg_figure,
    svg_path,
    svg_rect,
    svg_text,
)

Scale = Literal["linear", "log"]

COLORS = 6
"""Series colors s0 … s5 of the style sheet."""
MAX_POINTS = 300
"""Intervals that a long line is thinned to; each keeps its minimum and maximum."""


# Bars and lines


def bar(fraction: Number) -> Markup:
    """Draw a small bar that is filled by a fraction."""
    filled = min(max(fraction, 0.0), 1.0) * 100
    return Markup(
        '<svg class="bar good" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/><rect class="fill" width="{filled:.1f}" height="8"/></svg>'
    )


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


def line_chart(panel: Panel) -> Markup:
    """Draw lines by step with axes, tooltips and a legend that has the last values."""
    finite = [line for line in (_finite(each, log=panel.scale == "log") for each in panel.series) if line.steps]
    if not finite:
        return Markup('<p class="empty">{}: nothing was logged.</p>').format(visible(panel.title))
    lines = [each.select(_thin(each)) for each in finite]
    trends = [_trend(each).select(_thin(each)) if panel.smooth and len(each.steps) >= 20 else None for each in finite]
    axes, y_ticks = _line_axes(lines, panel)
    x_ticks = [tick for tick in nice_ticks(*axes.x) if axes.x[0] <= tick <= axes.x[1] and float(tick).is_integer()]
    parts = [*axes.y_grid(y_ticks, lambda tick: _value_label(tick, percent=panel.percent))]
    parts += [*axes.x_grid(x_ticks, _step_label, style="grid faint"), *axes.x_axis("step")]
    for index, (line, trend) in enumerate(zip(lines, trends, strict=True)):
        parts += _line(line, trend, axes=axes, color=index % COLORS)
    parts += _line_tooltips(lines, axes=axes, percent=panel.percent)
    legend = Markup("").join(
        Markup('<span class="key"><i class="s{}"></i><bdi>{}</bdi> <b>{}</b></span>').format(
            index % COLORS, visible(line.name), _value_label((trend or line).values[-1], percent=panel.percent)
        )
        for index, (line, trend) in enumerate(zip(lines, trends, strict=True))
    )
    return Markup('<figure class="chart"><figcaption>{}<span class="keys">{}</span></figcaption>{}</figure>').format(
        visible(panel.title), legend, svg_figure(parts, width=520, height=260, title=panel.title)
    )


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
    axes = Axes(box=(58, 12, 496, 220), x=(first, last), y=(ticks[0], ticks[-1]), log_y=panel.scale == "log")
    return axes, ticks


def _line(line: Series, trend: Series | None, *, axes: Axes, color: int) -> list[str]:
    if len(line.steps) == 1:
        x, y = axes.to_x(line.steps[0]), axes.to_y(line.values[0])
        return [svg_circle(f"line dot s{color}", x, y, radius=2)]
    raw = [] if trend is None else [svg_path(f"raw s{color}", _line_path(line, axes))]
    return [*raw, svg_path(f"line s{color}", _line_path(trend or line, axes))]


def _line_path(line: Series, axes: Axes) -> str:
    points = zip(line.steps, line.values, strict=True)
    return "M" + "L".join(f"{axes.to_x(step):.1f} {axes.to_y(value):.1f}" for step, value in points)


def _line_tooltips(lines: Sequence[Series], *, axes: Axes, percent: bool) -> Iterator[str]:
    """Yield vertical strips that show the values of the nearest steps on hover."""
    steps = sorted({step for line in lines for step in line.steps})
    chosen = sorted({steps[round(at)] for at in np.linspace(0, len(steps) - 1, min(len(steps), 80))})
    left, top, right, bottom = axes.box
    width = (right - left) / len(chosen)
    for step in chosen:
        rows = [f"step {step:,}"]
        for line in lines:
            nearest = int(np.abs(np.asarray(line.steps) - step).argmin())
            if abs(axes.to_x(line.steps[nearest]) - axes.to_x(step)) <= width:
                rows.append(f"{visible(line.name)}: {_value_label(line.values[nearest], percent=percent)}")
        x = min(max(axes.to_x(step) - width / 2, left), right - width)
        yield svg_rect("strip", x, top, width, bottom - top, tooltip="\n".join(rows))


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
BOLD = "font-weight:600;fill:var(--ink)"


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
    ticks: Sequence[float],
    title: str,
    tick_label: Callable[[Number], str] = percent_label,
    x_title: str = "",
    legend: Sequence[str] = (),
) -> Markup:
    """Draw a row for each group; the dots of different series are above each other."""
    parts, top = _dot_legend(legend)
    bottom = top + DOT_ROW * len(groups) + 4
    axes = Axes(box=(176, top, DOT_WIDTH - 20, bottom), x=(ticks[0], ticks[-1]), y=(0, 1))
    for tick in ticks:
        parts += axes.x_grid([tick], tick_label, style="grid" if tick else "axis")
    for index, group in enumerate(groups):
        center = top + DOT_ROW * (index + 0.5) + 2
        parts.append(svg_text(162, center + 4, group.name, anchor="end", css=BOLD if group.bold else ""))
        for dot in group.dots:
            y = center + (dot.color - (len(legend) - 1) / 2) * min(5, 14 / len(legend)) if legend else center
            if dot.interval is not None:
                low, high = (axes.to_x(min(max(end, ticks[0]), ticks[-1])) for end in dot.interval)
                style = f"raw s{dot.color % COLORS}"
                parts.append(svg_path(style, f"M{low:.1f} {y:.1f}H{high:.1f}", css="stroke-width:3"))
            parts.append(_dot(axes.to_x(dot.value), y, dot.color, dot.tooltip))
    if x_title:
        parts.append(svg_text((axes.box[0] + axes.box[2]) / 2, bottom + 40, x_title, anchor="middle"))
    return svg_figure(parts, width=DOT_WIDTH, height=bottom + (50 if x_title else 28), title=title)


def column_chart(
    groups: Sequence[DotGroup], *, ticks: Sequence[float], title: str, legend: Sequence[str] = ()
) -> Markup:
    """Draw a column for each group; the dots of different series are next to each other (Figure 2)."""
    parts, top = _dot_legend(legend)
    box = (56, top + 16, DOT_WIDTH - 10, top + 226)
    axes = Axes(box=box, x=(0, max(len(groups), 1)), y=(ticks[0], ticks[-1]))
    left, top, right, bottom = axes.box
    parts += axes.y_grid(ticks, percent_label)
    spacing = min((right - left) / max(len(groups), 1) / (len(legend) + 1), 34)
    for index, group in enumerate(groups):
        center = axes.to_x(index + 0.5)
        parts.append(svg_text(center, bottom + 20, group.name, anchor="middle", css=BOLD if group.bold else ""))
        if index:
            parts.append(svg_path("grid faint", f"M{axes.to_x(index):.1f} {top:.1f}V{bottom:.1f}"))
        for dot in group.dots:
            x, y = center + spacing * (dot.color - (len(legend) - 1) / 2), axes.to_y(dot.value)
            parts.append(_dot(x, y, dot.color, dot.tooltip))
            if len(legend) <= 3:  # with more series the labels would overlap
                parts.append(svg_text(x, y - 9, f"{dot.value * 100:.1f}", anchor="middle"))
    return svg_figure([*parts, *axes.x_axis()], width=DOT_WIDTH, height=bottom + 32, title=title)


def _dot(x: Number, y: Number, color: int, tooltip: str = "") -> str:
    index = color % COLORS
    css = f"fill:var(--s{index});stroke-width:4"
    return svg_circle(f"line s{index}", x, y, radius=3, tooltip=visible(tooltip, limit=300), css=css)


def _dot_legend(names: Sequence[str]) -> tuple[list[str], float]:
    """Return a dot and a name for each series, in as many lines as needed, and the lower end of the last line."""
    parts, x, y = [], 12.0, 20.0
    for index, each in enumerate(names):
        name = visible(each, limit=36)
        width = 26 + 7.0 * len(name)
        if x > 12 and x + width > DOT_WIDTH:
            x, y = 12.0, y + 18
        parts += [_dot(x + 5, y - 4, index), svg_text(x + 15, y, name)]
        x += width
    return parts, y + 12 if names else 8.0


# Confusion and calibration


def confusion_heatmap(counts: NDArray[np.int64], *, names: Sequence[str], totals: NDArray[np.int64]) -> Markup:
    """Draw a confusion matrix: rows are true classes, columns predicted classes, color is the fraction of the row.

    Args:
        counts: Images by true and predicted class, for the classes that are drawn.
        names: Class names.
        totals: Images of each true class, including those predicted as a class that is not drawn.
    """
    classes = len(names)
    cell = 56 if classes <= 4 else 44 if classes <= 6 else 34 if classes <= 12 else 22
    short = [visible(name, limit=18) for name in names]
    margin = max(len(name) for name in short) * 6.6 + 14
    parts = []
    for row, name in enumerate(short):
        at, edge = margin + (row + 0.5) * cell + 3, margin - 7
        parts.append(svg_text(edge, at, name, anchor="end"))
        parts.append(f'<text class="tick" transform="translate({at:.1f} {edge:.1f}) rotate(-90)">{escape(name)}</text>')
        for column in range(classes):
            count, total = int(counts[row, column]), int(totals[row])
            tooltip = f"{visible(names[row])} predicted as {visible(names[column])}: "
            corner = (margin + column * cell, margin + row * cell)
            style = "right" if row == column else "wrong"
            parts.append(_confusion_cell(count, total, corner=corner, side=cell, style=style, tooltip=tooltip))
    side = f"{margin + classes * cell:.0f}"
    return Markup(
        f'<svg class="heatmap" width="{side}" viewBox="0 0 {side} {side}" role="img" '
        f'aria-label="Confusion matrix">{"".join(parts)}</svg>'
    )


def _confusion_cell(
    count: int, total: int, *, corner: tuple[Number, Number], side: Number, style: str, tooltip: str
) -> str:
    x, y = corner
    fraction = count / max(total, 1)
    tooltip += f"{count:,} ({fraction:.1%})"
    if not count:
        return svg_rect("cell none", x, y, side - 2, side - 2, tooltip=tooltip, more=' rx="3"')
    # The square root makes rare confusions visible: 1 % next to 99 %.
    more = f' rx="3" fill-opacity="{math.sqrt(fraction):.2f}"'
    text = f"{count}" if count < 1000 else f"{count / 1000:.2g}k" if count < 10_000 else f"{count / 1000:.0f}k"
    color = "on" if fraction > 0.4 else "off"
    label = svg_text(x + side / 2 - 1, y + side / 2 + 3, text, anchor="middle", style=f"count {color}")
    return svg_rect(f"cell {style}", x, y, side - 2, side - 2, tooltip=tooltip, more=more) + label


def reliability_diagram(bins: Calibration) -> Markup:
    """Draw accuracy by confidence next to the diagonal of a calibrated model, above the images of each bin."""
    axes = Axes(box=(58, 12, 388, 252), x=(0.0, 1.0), y=(0.0, 1.0))
    left, top, right, bottom = axes.box
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = [*axes.y_grid(ticks, percent_label)]
    parts += [svg_text(axes.to_x(tick), bottom + 86, percent_label(tick), anchor="middle") for tick in ticks]
    largest, width = max(int(bins.count.max()), 1), (right - left) / len(bins.count)
    for index in np.flatnonzero(bins.count):
        count, accuracy, confidence = int(bins.count[index]), bins.accuracy[index], bins.confidence[index]
        tooltip = f"{count:,} images: confidence {confidence:.1%}, accuracy {accuracy:.1%}"
        x, y, expected = left + index * width + 1, axes.to_y(accuracy), axes.to_y(confidence)
        parts.append(svg_rect("fill", x, y, width - 2, bottom - y, tooltip=tooltip, more=' rx="2"'))
        gap = "over" if confidence > accuracy else "under"
        parts.append(svg_rect(f"gap {gap}", x, min(y, expected), width - 2, abs(y - expected)))
        height = 50 * count / largest
        parts.append(svg_rect("histogram", x, bottom + 66 - height, width - 2, height, tooltip=tooltip, more=' rx="1"'))
    parts.append(svg_path("diagonal", f"M{left} {bottom}L{right} {top}"))
    parts.append(svg_path("axis", f"M{left} {bottom}H{right}M{left} {bottom + 66}H{right}"))
    parts.append(svg_text(left - 8, bottom + 46, "images", anchor="end"))
    return svg_figure(parts, width=410, height=346, title="Reliability diagram")
