"""Numbers and names go in, inline SVG comes out: a small chart kit, coloured by the page's own style sheet.

Charts work without scripts: what hovering tells is in `<title>` elements. Names are untrusted, see `visible`.
"""

import html
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitkit.objectives.metrics import Calibration

__all__ = [
    "Panel",
    "Series",
    "bar",
    "escape",
    "heatmap",
    "line_chart",
    "name_tag",
    "nice_ticks",
    "reliability",
    "smoothed",
    "visible",
]

Number = int | float
Scale = Literal["linear", "log"]
_COLOURS = 6  # the style sheet's classes s0 … s5
_POINTS = 300  # a series is drawn with at most about twice as many: more cannot be seen


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart: values by step. NaN and infinities leave a gap."""

    name: str
    steps: tuple[int, ...]
    values: tuple[Number, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of lines. `percent` writes shares as per cent, `smooth` adds a running mean to lines of many points.

    A log scale leaves out what is not positive.
    """

    title: str
    series: tuple[Series, ...]
    percent: bool = False
    smooth: bool = False
    scale: Scale = "linear"


@dataclass(frozen=True)
class _Frame:
    """Where data land on the drawing: the box of the axes, and what its edges stand for."""

    left: Number
    top: Number
    width: Number
    height: Number
    x: tuple[Number, Number]
    y: tuple[Number, Number]
    scale: Scale = "linear"

    def across(self, value: Number) -> float:
        return self.left + self.width * (value - self.x[0]) / (self.x[1] - self.x[0])

    def down(self, value: Number) -> float:
        low, high = (self.height_of(edge) for edge in self.y)
        return self.top + self.height * (1 - (self.height_of(value) - low) / (high - low))

    def height_of(self, value: Number) -> Number:
        return math.log10(value) if self.scale == "log" else value


def visible(text: str, *, limit: int = 60) -> str:
    """The text with nothing hidden: control and direction characters spelled out, the middle of a long one left out.

    >>> visible("cat\\u202egnp.exe"), visible("a" * 50 + ".jpg", limit=12)
    ('cat⟨U+202E⟩gnp.exe', 'aaaaaaa….jpg')
    """
    spelled = "".join(_spelled(character) for character in text)
    if len(spelled) <= limit:
        return spelled
    tail = limit // 3
    return f"{spelled[: limit - tail - 1]}…{spelled[-tail:]}"


def escape(text: str, *, limit: int = 60) -> str:
    """`visible`, ready to stand in HTML or in a quoted attribute.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(visible(text, limit=limit), quote=True)


def name_tag(name: str) -> str:
    """An untrusted name as HTML that cannot turn its surroundings round, with all of it on hovering where it was cut.

    >>> name_tag("<i>")
    '<bdi>&lt;i&gt;</bdi>'
    """
    whole = f' title="{escape(name, limit=400)}"' if len(name) > 60 else ""
    return f"<bdi{whole}>{escape(name)}</bdi>"


def _spelled(character: str) -> str:
    joiners = "\u200c\u200d"  # Persian, Indic and emoji need them, and they turn nothing round
    hidden = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} and character not in joiners
    return f"⟨U+{ord(character):04X}⟩" if hidden else character


def nice_ticks(low: Number, high: Number, *, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten) that reach from at most low to at least high.

    >>> nice_ticks(0.03, 2.31), nice_ticks(7, 7)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [6.0, 6.5, 7.0, 7.5, 8.0])
    """
    if not high > low:
        around = abs(low) / 10 or 1.0
        around = max(around, 1.0) if float(low).is_integer() else around
        low, high = low - around, high + around
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def smoothed(values: Sequence[Number], *, keep: float = 0.9) -> list[float]:
    """A running mean that forgets, without the pull towards zero at its start; what is not finite is left out of it.

    >>> [round(value, 3) for value in smoothed([1.0, 1.0, 4.0], keep=0.5)]
    [1.0, 1.0, 2.714]
    """
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight if weight else math.nan)
    return means


def bar(share: Number, *, kind: str = "good") -> str:
    """A small bar, filled by a share.

    >>> bar(0.5)
    '<svg class="bar good" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rail" width="100" height="8"/><rect class="fill" width="50.0" height="8"/></svg>'
    """  # noqa: E501
    filled = min(max(share, 0.0), 1.0) * 100
    return (
        f'<svg class="bar {kind}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/><rect class="fill" width="{filled:.1f}" height="8"/></svg>'
    )


def line_chart(panel: Panel) -> str:
    """Lines by step with axes, ticks, a legend with the last values, and the numbers under the pointer.

    >>> train = Series(name="train", steps=(1, 2), values=(2.3, 1.9))
    >>> chart = line_chart(Panel(title="Loss", series=(train,)))
    >>> chart.count('class="line'), "train" in chart
    (1, True)
    """
    percent, scale, title = panel.percent, panel.scale, escape(panel.title)
    whole = [drawn for drawn in (_drawable(one, scale=scale) for one in panel.series) if drawn.steps]
    shown = [_picked(one, _seen(one)) for one in whole]
    if not shown:
        return f'<p class="empty">{title}: nothing was logged.</p>'
    frame, y_ticks = _line_frame(shown, percent=percent, scale=scale)
    x_ticks = [tick for tick in nice_ticks(*frame.x, count=5) if frame.x[0] <= tick <= frame.x[1]]
    parts = [_axes(frame, x_ticks=x_ticks, y_ticks=y_ticks, percent=percent)]
    trends = [_picked(_trend(one), _seen(one)) if panel.smooth and len(one.steps) >= 20 else None for one in whole]
    for number, (one, trend) in enumerate(zip(shown, trends, strict=True)):
        parts.append(_line(one, trend=trend, frame=frame, colour=number % _COLOURS))
    parts.append(_strips(shown, frame=frame, percent=percent))
    drawing = f'<svg viewBox="0 0 520 260" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    key = "".join(
        f'<span class="key"><i class="s{number % _COLOURS}"></i><bdi>{escape(one.name)}</bdi> '
        f"<b>{_number((trend or one).values[-1], percent=percent)}</b></span>"
        for number, (one, trend) in enumerate(zip(shown, trends, strict=True))
    )
    caption = f'<figcaption>{title}<span class="keys">{key}</span></figcaption>'
    return f'<figure class="chart">{caption}{drawing}</figure>'


def _drawable(series: Series, *, scale: Scale) -> Series:
    kept = [
        (step, value)
        for step, value in zip(series.steps, series.values, strict=True)
        if math.isfinite(value) and (scale == "linear" or value > 0)
    ]
    return Series(name=series.name, steps=tuple(step for step, _ in kept), values=tuple(value for _, value in kept))


def _seen(series: Series) -> list[int]:
    """Which points to draw: the lowest and the highest of each stretch, so that spikes stay, and the ends."""
    points = len(series.steps)
    if points <= 2 * _POINTS:
        return list(range(points))
    values = np.asarray(series.values, dtype=np.float64)
    kept = {0, points - 1}
    for stretch in np.array_split(np.arange(points), _POINTS):
        kept |= {int(stretch[values[stretch].argmin()]), int(stretch[values[stretch].argmax()])}
    return sorted(kept)


def _picked(series: Series, indices: Sequence[int]) -> Series:
    steps = tuple(series.steps[index] for index in indices)
    return Series(name=series.name, steps=steps, values=tuple(series.values[index] for index in indices))


def _trend(series: Series) -> Series:
    """The running mean over a tenth of 100 points, a fortieth of very many."""
    keep = 1 - 1 / max(10.0, len(series.steps) / 40)
    return Series(name=series.name, steps=series.steps, values=tuple(smoothed(series.values, keep=keep)))


def _line_frame(shown: Sequence[Series], *, percent: bool, scale: Scale) -> tuple[_Frame, list[float]]:
    values = [value for one in shown for value in one.values]
    steps = [step for one in shown for step in one.steps]
    low, high = min(values), max(values)
    if scale == "log":
        bottom = math.floor(math.log10(low))
        ticks = [10.0**decade for decade in range(bottom, max(math.ceil(math.log10(high)), bottom + 1) + 1)]
    elif percent and high <= 1:
        ticks = [tick for tick in nice_ticks(low, high) if tick <= 1 or tick < high] if high > low else [0.0, 0.5, 1.0]
    else:
        ticks = [tick for tick in nice_ticks(0 if 0 < low < high / 3 else low, high) if tick >= 0 or low < 0]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    return _Frame(58, 12, 438, 208, x=(first, last), y=(ticks[0], ticks[-1]), scale=scale), ticks


def _axes(frame: _Frame, *, x_ticks: Sequence[Number], y_ticks: Sequence[Number], percent: bool) -> str:
    right, bottom = frame.left + frame.width, frame.top + frame.height
    middle = frame.left + frame.width / 2
    parts = []
    for tick in y_ticks:
        y = frame.down(tick)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{right:.1f}"/>')
        label = _number(tick, percent=percent)
        parts.append(f'<text class="tick" x="{frame.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x_ticks:
        if float(tick).is_integer():
            x = frame.across(tick)
            parts.append(f'<path class="grid faint" d="M{x:.1f} {frame.top:.1f}V{bottom + 4:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{_step(tick)}</text>'
            )
    parts.append(f'<path class="axis" d="M{frame.left:.1f} {bottom:.1f}H{right:.1f}"/>')
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">step</text>')
    return "".join(parts)


def _line(series: Series, *, trend: Series | None, frame: _Frame, colour: int) -> str:
    if len(series.steps) == 1:
        x, y = frame.across(series.steps[0]), frame.down(series.values[0])
        return f'<circle class="line dot s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    if trend is None:
        return f'<path class="line s{colour}" d="{_path(series, frame=frame)}"/>'
    return (
        f'<path class="raw s{colour}" d="{_path(series, frame=frame)}"/>'
        f'<path class="line s{colour}" d="{_path(trend, frame=frame)}"/>'
    )


def _path(series: Series, *, frame: _Frame) -> str:
    points = zip(series.steps, series.values, strict=True)
    return "M" + "L".join(f"{frame.across(step):.1f} {frame.down(value):.1f}" for step, value in points)


def _strips(shown: Sequence[Series], *, frame: _Frame, percent: bool) -> str:
    """Upright strips that show the numbers of the nearest steps when pointed at."""
    steps = sorted({step for one in shown for step in one.steps})
    picked = sorted({steps[round(at)] for at in np.linspace(0, len(steps) - 1, min(len(steps), 80))})
    width = frame.width / len(picked)
    parts = []
    for step in picked:
        lines = [f"step {step:,}"]
        for one in shown:
            nearest = int(np.abs(np.asarray(one.steps) - step).argmin())
            if abs(frame.across(one.steps[nearest]) - frame.across(step)) <= width:
                lines.append(f"{visible(one.name)}: {_number(one.values[nearest], percent=percent)}")
        x = min(max(frame.across(step) - width / 2, frame.left), frame.left + frame.width - width)
        told = html.escape("\n".join(lines))
        parts.append(
            f'<rect class="strip" x="{x:.1f}" y="{frame.top:.1f}" width="{width:.1f}" height="{frame.height:.1f}">'
            f"<title>{told}</title></rect>"
        )
    return "".join(parts)


def heatmap(counts: NDArray[np.int64], *, names: Sequence[str], totals: NDArray[np.int64]) -> str:
    """A confusion matrix: rows are what the images are, columns what they were taken for, colour the share of the row.

    `totals` are the images of each row's class, also of those taken for a class that is not drawn.

    >>> heatmap(np.array([[3, 1], [0, 4]]), names=["cat", "dog"], totals=np.array([4, 4])).count("<rect")
    4
    """
    classes = len(names)
    cell = 56 if classes <= 4 else 44 if classes <= 6 else 34 if classes <= 12 else 22
    short = [visible(name, limit=18) for name in names]
    margin = max(len(name) for name in short) * 6.6 + 14
    parts = []
    for row, name in enumerate(short):
        at, edge = margin + (row + 0.5) * cell + 3, margin - 7
        text = html.escape(name)
        parts.append(f'<text class="tick" x="{edge:.1f}" y="{at:.1f}" text-anchor="end">{text}</text>')
        parts.append(f'<text class="tick" transform="translate({at:.1f} {edge:.1f}) rotate(-90)">{text}</text>')
        for column in range(classes):
            told = f"{visible(names[row])} taken for {visible(names[column])}"
            corner = (margin + column * cell, margin + row * cell)
            kind = "right" if row == column else "wrong"
            parts.append(
                _cell(int(counts[row, column]), of=int(totals[row]), corner=corner, side=cell, kind=kind, told=told)
            )
    side = f"{margin + classes * cell:.0f}"
    return (
        f'<svg class="heatmap" width="{side}" viewBox="0 0 {side} {side}" role="img" '
        f'aria-label="Confusion matrix">{"".join(parts)}</svg>'
    )


def _cell(count: int, *, of: int, corner: tuple[Number, Number], side: Number, kind: str, told: str) -> str:
    x, y = corner
    share = count / max(of, 1)
    # The square root lifts rare confusions out of the ground: 1 % must be seen beside 99 %.
    look = f'class="cell {kind}" fill-opacity="{math.sqrt(share):.2f}"' if count else 'class="cell none"'
    box = f'x="{x:.1f}" y="{y:.1f}" width="{side - 2}" height="{side - 2}" rx="3"'
    drawn = f"<rect {look} {box}><title>{html.escape(f'{told}: {count:,} ({share:.1%})')}</title></rect>"
    if not count:
        return drawn
    text = f"{count}" if count < 1000 else f"{count / 1000:.2g}k" if count < 10_000 else f"{count / 1000:.0f}k"
    middle = f'x="{x + side / 2 - 1:.1f}" y="{y + side / 2 + 3:.1f}" text-anchor="middle"'
    return f'{drawn}<text class="count {"on" if share > 0.4 else "off"}" {middle}>{text}</text>'


def reliability(bins: Calibration) -> str:
    """Accuracy against confidence, with the diagonal a calibrated model would follow, over the images of each bin.

    >>> import torch
    >>> from vitkit.objectives.metrics import calibration
    >>> reliability(calibration(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))).count('class="fill"')
    2
    """
    frame = _Frame(58, 12, 330, 240, x=(0.0, 1.0), y=(0.0, 1.0))
    bottom = frame.top + frame.height
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = []
    for tick in ticks:
        x, y, label = frame.across(tick), frame.down(tick), _number(tick, percent=True)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}h{frame.width}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 86:.1f}" text-anchor="middle">{label}</text>')
    most, width = max(int(bins.count.max()), 1), frame.width / len(bins.count)
    for number, count in enumerate(bins.count):
        if not count:
            continue
        x, accuracy, sure = frame.left + number * width, float(bins.accuracy[number]), float(bins.confidence[number])
        told = f"<title>{count:,} images: confidence {sure:.1%}, accuracy {accuracy:.1%}</title>"
        box = f'x="{x + 1:.1f}" width="{width - 2:.1f}"'
        top, wanted = frame.down(accuracy), frame.down(sure)
        parts.append(f'<rect class="fill" {box} y="{top:.1f}" height="{bottom - top:.1f}" rx="2">{told}</rect>')
        gap = "over" if sure > accuracy else "under"
        parts.append(f'<rect class="gap {gap}" {box} y="{min(top, wanted):.1f}" height="{abs(top - wanted):.1f}"/>')
        high = 50 * count / most
        parts.append(f'<rect class="much" {box} y="{bottom + 66 - high:.1f}" height="{high:.1f}" rx="1">{told}</rect>')
    parts.append(f'<path class="diagonal" d="M{frame.left} {bottom}L{frame.left + frame.width} {frame.top}"/>')
    parts.append(
        f'<path class="axis" d="M{frame.left} {bottom}h{frame.width}M{frame.left} {bottom + 66}h{frame.width}"/>'
    )
    parts.append(f'<text class="tick" x="{frame.left - 8}" y="{bottom + 46}" text-anchor="end">images</text>')
    return f'<svg viewBox="0 0 410 346" role="img" aria-label="Reliability diagram">{"".join(parts)}</svg>'


def _step(step: Number) -> str:
    if step >= 1_000_000:
        return f"{step / 1_000_000:g}M"
    return f"{step / 1000:g}k" if step >= 10_000 else f"{step:,.0f}"


def _number(value: Number, *, percent: bool) -> str:
    if percent:
        return f"{value * 100:.3g} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")
