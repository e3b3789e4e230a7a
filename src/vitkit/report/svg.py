"""SVG elements, axes and ticks of the charts, colored by the style sheet of the page.

Names are untrusted and pass through `visible` and escaping.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from vitkit.report.html import asset, escape_text, visible

Number = int | float
Box = tuple[Number, Number, Number, Number]
"""Left, top, right, bottom."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Mapping from data to the coordinates of a drawing; x is in powers of ten if `log_x`, likewise y."""

    box: Box
    x: tuple[Number, Number]
    y: tuple[Number, Number]
    log_x: bool = False
    log_y: bool = False

    def to_x(self, value: Number) -> float:
        """Return the horizontal coordinate of a value."""
        return self.box[0] + (self.box[2] - self.box[0]) * _position(value, self.x, log=self.log_x)

    def to_y(self, value: Number) -> float:
        """Return the vertical coordinate of a value."""
        return self.box[3] - (self.box[3] - self.box[1]) * _position(value, self.y, log=self.log_y)

    def y_grid(self, ticks: Sequence[Number], label: Callable[[Number], str]) -> Iterator[str]:
        """Yield a horizontal line and a label for each tick."""
        left, _, right, _ = self.box
        for tick in ticks:
            y = self.to_y(tick)
            yield svg_path("grid", f"M{left:.1f} {y:.1f}H{right:.1f}")
            yield svg_text(left - 8, y + 4, label(tick), anchor="end")

    def x_grid(self, ticks: Sequence[Number], label: Callable[[Number], str], *, style: str = "grid") -> Iterator[str]:
        """Yield a vertical line and a label for each tick."""
        _, top, _, bottom = self.box
        for tick in ticks:
            x = self.to_x(tick)
            yield svg_path(style, f"M{x:.1f} {top:.1f}V{bottom + 4:.1f}")
            yield svg_text(x, bottom + 18, label(tick), anchor="middle")

    def x_axis(self, title: str = "", *, offset: Number = 34) -> Iterator[str]:
        """Yield the horizontal axis and its title."""
        left, _, right, bottom = self.box
        yield svg_path("axis", f"M{left:.1f} {bottom:.1f}H{right:.1f}")
        if title:
            yield svg_text((left + right) / 2, bottom + offset, title, anchor="middle")


def _position(value: Number, limits: tuple[Number, Number], *, log: bool) -> float:
    low, high, value = (math.log10(each) for each in (*limits, value)) if log else (*limits, value)
    return (value - low) / (high - low)


def svg_figure(parts: Sequence[str], *, width: Number, height: Number, title: str) -> Markup:
    """Return a drawing of a size, with a title for screen readers."""
    content = Markup("").join(map(Markup, parts))
    return Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        width, height, visible(title), content
    )


def svg_path(style: str, d: str, *, tooltip: str = "", css: str = "") -> str:
    """Return a path; `style` is a class of the style sheet."""
    inline = f' style="{css}"' if css else ""
    return f'<path class="{style}"{inline} d="{d}"' + (f">{_title(tooltip)}</path>" if tooltip else "/>")


def svg_rect(
    style: str, x: Number, y: Number, width: Number, height: Number, *, tooltip: str = "", more: str = ""
) -> str:
    """Return a rectangle; `more` are further attributes."""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {box}{more}' + (f">{_title(tooltip)}</rect>" if tooltip else "/>")


def svg_circle(style: str, x: Number, y: Number, *, radius: Number, tooltip: str = "", css: str = "") -> str:
    """Return a circle."""
    inline = f' style="{css}"' if css else ""
    circle = f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"{inline}'
    return circle + (f">{_title(tooltip)}</circle>" if tooltip else "/>")


def svg_text(x: Number, y: Number, text: str, *, anchor: str = "start", css: str = "", style: str = "tick") -> str:
    """Return a line of text, escaped."""
    inline = f' style="{css}"' if css else ""
    content = escape_text(text)
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{inline}>{content}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def standalone_svg(drawing: str) -> str:
    """Turn an inline drawing into an SVG file with the style sheet inside."""
    rules = f"{asset('report.css')} svg {{ background: var(--card); width: auto; font-family: system-ui, sans-serif; }}"
    opening, _, rest = str(drawing).partition(">")
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{opening}><style><![CDATA[{rules}]]></style>{rest}\n"


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


def percent_label(fraction: Number) -> str:
    """Return the label of a fraction on an axis."""
    return f"{fraction * 100:.4g} %"
