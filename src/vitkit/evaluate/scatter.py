"""Points with names go in, accuracy against cost comes out as SVG: the form of the paper's Figures 5 and 12.

The horizontal axis is logarithmic, each family of models has a mark and a colour of its own, whiskers are intervals,
and names stand where they cover neither marks nor each other.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vitkit.evaluate.comparison import Difference, Family
from vitkit.evaluate.plots import escape, nice_ticks, visible
from vitkit.evaluate.shell import asset

WIDTH, HEIGHT = 520, 360
LEFT, TOP, RIGHT, BOTTOM = 56, 40, 18, 48
MARK = 5.5
LETTER, LINE = 7.4, 14.0
"""Sizes of a name's letters, as on a phone, where they are largest."""
NAME = 18
COLOURS: dict[Family, str] = {"ViT": "s0", "hybrid": "s1", "ResNet": "s2"}

Number = int | float
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model on the drawing; `y` and its interval are shares."""

    label: str
    family: Family
    x: float
    y: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What the edges of the drawing stand for: `x` in powers of ten, `y` in shares."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: Number) -> float:
        """Where a value lies from the left."""
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / (high - low)

    def down(self, share: Number) -> float:
        """Where a share lies from the top."""
        low, high = self.y
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (share - low) / (high - low))


def scatter(points: Sequence[Point], *, title: str, cost: str) -> str:
    """The drawing of top-1 against what `cost` names; points that cost nothing, or not a number, are left out.

    >>> point = Point(label="B/16", family="ViT", x=100.0, y=0.8, interval=(0.78, 0.82))
    >>> scatter([point], title="Parameters", cost="parameters").count('class="line s0"')
    2
    """
    drawn = [point for point in points if math.isfinite(point.x) and point.x > 0]
    if not drawn:
        return ""
    ticks = share_ticks(drawn)
    axes = Axes(x=decades(drawn), y=(ticks[0], ticks[-1]))
    parts = [*_grid(axes, ticks), *_legend(drawn)]
    parts += [_whisker(point, axes) for point in drawn]
    parts += [f"{_mark(point, axes)}" for point in drawn]
    parts += [_name(point, *place, axes) for point, place in zip(drawn, placed(drawn, axes), strict=True)]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(cost)}</text>')
    return _drawing(parts, width=WIDTH, height=HEIGHT, title=title)


def whole(drawing: str) -> str:
    """A drawing of a page as a file of its own, with the page's style in it.

    >>> whole('<svg viewBox="0 0 1 1"></svg>').startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    True
    """
    alone = "svg { background: var(--card); width: auto; font-family: system-ui, sans-serif; }"
    style = f"<style><![CDATA[{asset('report.css')} {alone}]]></style>"
    opening, _, rest = drawing.partition(">")
    named = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{named}>{style}{rest}\n"


def share_ticks(points: Sequence[Point]) -> list[float]:
    """Round shares that reach over all whiskers, and not beyond what a share can be.

    >>> share_ticks([Point(label="", family="ViT", x=1.0, y=0.99, interval=(0.98, 1.0))])
    [0.98, 0.985, 0.99, 0.995, 1.0]
    """
    low, high = min(point.interval[0] for point in points), max(point.interval[1] for point in points)
    low, high = min(low, *(point.y for point in points)), max(high, *(point.y for point in points))
    if high - low < 1e-3:
        low, high = max(low - 0.01, 0.0), min(high + 0.01, 1.0)
    return [tick for tick in nice_ticks(low, high) if -1e-9 <= tick <= 1 + 1e-9]


def decades(points: Sequence[Point]) -> tuple[float, float]:
    """The powers of ten between which all points lie, with room for their names."""
    powers = [math.log10(point.x) for point in points]
    low, high = min(powers), max(powers)
    room = max(0.12 * (high - low), 0.15)
    return low - room, high + room


def cost_ticks(low: Number, high: Number) -> list[float]:
    """Round numbers between two powers of ten: as many of 1, 2 and 5 as there is room for.

    >>> cost_ticks(-0.1, 1.1), cost_ticks(0.0, 6.0)
    ([1.0, 2.0, 5.0, 10.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0])
    """
    wanted = (1, 2, 5) if high - low < 2.2 else (1,)
    step = math.ceil((high - low) / 8) if high - low > 8 else 1
    powers = range(math.floor(low), math.ceil(high) + 1, step)
    ticks = [first * 10.0**power for power in powers for first in wanted]
    return [float(f"{tick:.6g}") for tick in ticks if low <= math.log10(tick) <= high]


def amount(value: Number) -> str:
    """A number in a few letters.

    >>> [amount(value) for value in (86_600_000, 0.00018, 250, 1_000_000_000_000)]
    ['86.6M', '0.00018', '250', '1e12']
    """
    if 1e-3 <= value < 1e3:
        return f"{value:.3g}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= value < 1000 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _grid(axes: Axes, ticks: Sequence[float]) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in ticks:
        y = axes.down(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * 100:.4g} %</text>'
    for cost in cost_ticks(*axes.x):
        x = axes.across(cost)
        yield f'<path class="grid faint" d="M{x:.1f} {TOP}V{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{amount(cost)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>'


def _legend(points: Sequence[Point]) -> Iterator[str]:
    x = float(LEFT)
    for family, colour in COLOURS.items():
        if any(point.family == family for point in points):
            yield f'<path class="line {colour}" d="{_shape(family, x + MARK, 16)}"/>'
            yield f'<text class="tick" x="{x + 2 * MARK + 7:.1f}" y="20">{family}</text>'
            x += 2 * MARK + 22 + LETTER * len(family)


def _shape(family: Family, x: Number, y: Number) -> str:
    """A circle, a square on its corner, a triangle."""
    if family == "ViT":
        return f"M{x - MARK:.1f} {y:.1f}a{MARK} {MARK} 0 1 0 {2 * MARK} 0a{MARK} {MARK} 0 1 0 {-2 * MARK} 0z"
    if family == "hybrid":
        side = MARK * 1.25
        return f"M{x:.1f} {y - side:.1f}L{x + side:.1f} {y:.1f}L{x:.1f} {y + side:.1f}L{x - side:.1f} {y:.1f}z"
    side = MARK * 1.15
    return f"M{x:.1f} {y - side:.1f}L{x + side:.1f} {y + side * 0.8:.1f}H{x - side:.1f}z"


def _whisker(point: Point, axes: Axes) -> str:
    low, high = (axes.down(min(max(end, 0.0), 1.0)) for end in point.interval)
    x = axes.across(point.x)
    ends = f"M{x - 3:.1f} {high:.1f}h6M{x - 3:.1f} {low:.1f}h6"
    return f'<path class="raw {COLOURS[point.family]}" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>'


def _mark(point: Point, axes: Axes) -> str:
    low, high = point.interval
    told = f"{visible(point.label)}: {point.y:.2%} ({low:.1%}–{high:.1%}) at {amount(point.x)}"
    shape = _shape(point.family, axes.across(point.x), axes.down(point.y))
    fill = 'style="fill:var(--card)"'  # so that the whisker does not run through the mark
    return f'<path class="line {COLOURS[point.family]}" {fill} d="{shape}"><title>{html.escape(told)}</title></path>'


def _name(point: Point, x: Number, y: Number, axes: Axes) -> str:
    """The name with its middle at a place, and a line to its mark where it stands far off."""
    at, height = axes.across(point.x), axes.down(point.y)
    short = visible(point.label, limit=NAME)
    line = ""
    if abs(y - height) > 2.2 * LINE or abs(x - at) > len(short) * LETTER / 2 + 4 * MARK:
        line = f'<path class="grid" d="M{at:.1f} {height:.1f}L{x:.1f} {y:.1f}"/>'
    return f'{line}<text class="tick" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{html.escape(short)}</text>'


def placed(points: Sequence[Point], axes: Axes) -> list[tuple[float, float]]:
    """The middle of each name, where it covers no mark, no whisker, no other name, and stays on the drawing.

    Places are tried from the nearest on. Where there is none, the nearest is taken after all.
    """
    taken: list[Box] = []
    for point in points:
        x, y = axes.across(point.x), axes.down(point.y)
        taken.append((x - MARK - 2, y - MARK - 2, x + MARK + 2, y + MARK + 2))
        low, high = (axes.down(min(max(end, 0.0), 1.0)) for end in point.interval)
        taken.append((x - 2, high, x + 2, low))
    places = []
    for point in points:
        wide = len(visible(point.label, limit=NAME)) * LETTER
        tried = list(_tries(axes.across(point.x), axes.down(point.y), wide))
        fitting = (place for place in tried if _fits(_box(*place, wide), taken))
        place = next(fitting, tried[0])
        taken.append(_box(*place, wide))
        places.append(place)
    return places


def _tries(x: Number, y: Number, wide: Number) -> Iterator[tuple[float, float]]:
    beside = wide / 2 + MARK + 4
    for ring in range(14):
        up = ring * LINE * 0.6
        for away in (0.0, beside * 0.5) if ring > 3 else (0.0,):
            for side in (beside + away, -beside - away):
                yield x + side, y - up
                yield x + side, y + up
        if ring * LINE * 0.6 > MARK + LINE / 2:
            yield x, y - up
            yield x, y + up


def _box(x: Number, y: Number, wide: Number) -> Box:
    return x - wide / 2, y - LINE / 2, x + wide / 2, y + LINE / 2


def _fits(box: Box, taken: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inside = left >= LEFT and right <= WIDTH - 2 and top >= TOP - LINE / 2 and bottom <= HEIGHT - BOTTOM
    return inside and not any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in taken
    )


# Differences

ROW, NAMES, SIDE = 30, 160, 20


def signed(points: Number) -> str:
    """A difference as people write it.

    >>> signed(2.5), signed(0.0), signed(-1.0)
    ('+2.5', '0', '−1')
    """
    return f"{points:+g}".replace("-", "−") if points else "0"


def interval_chart(differences: Sequence[Difference]) -> str:
    """Each difference as a point with its interval, in points of accuracy, left and right of "no difference"."""
    if not differences:
        return ""
    ends = [100 * end for each in differences for end in (*each.interval, each.difference)]
    ticks = nice_ticks(min(*ends, 0.0), max(*ends, 0.0))
    height = ROW * len(differences) + 56
    room = WIDTH - NAMES - SIDE

    def across(points: Number) -> float:
        return NAMES + room * (points - ticks[0]) / (ticks[-1] - ticks[0])

    parts = []
    for tick in ticks:
        parts.append(f'<path class="{"axis" if tick == 0 else "grid"}" d="M{across(tick):.1f} 8V{height - 44}"/>')
        parts.append(
            f'<text class="tick" x="{across(tick):.1f}" y="{height - 28}" text-anchor="middle">{signed(tick)}</text>'
        )
    for number, each in enumerate(differences):
        y = 8 + ROW * (number + 0.5)
        low, high = (across(100 * end) for end in each.interval)
        colour = "s0" if each.is_sure and each.difference > 0 else "s1" if each.is_sure else "s4"
        short = html.escape(visible(each.run, limit=NAME))
        x = across(100 * each.difference)
        parts.append(f'<text class="tick" x="{NAMES - 10}" y="{y + 4:.1f}" text-anchor="end">{short}</text>')
        parts.append(f'<path class="line {colour}" d="M{low:.1f} {y:.1f}H{high:.1f}"/>')
        parts.append(
            f'<path class="line {colour}" style="fill:var(--card)" d="{_shape("ViT", x, y)}">'
            f"<title>{html.escape(visible(each.in_words(), limit=300))}</title></path>"
        )
    middle = NAMES + room / 2
    said = f"points of top-1 against {escape(differences[0].against, limit=NAME)}"
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{said}</text>')
    return _drawing(parts, width=WIDTH, height=height, title="Differences")


def _drawing(parts: Sequence[str], *, width: Number, height: Number, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
