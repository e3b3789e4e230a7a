"""Figure of a study in the paper's form: one line per family with intervals, or one row of dots per label."""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from vitkit.core.files import write_bytes, write_text
from vitkit.core.formatting import format_plural
from vitkit.report.figures import MARKERS, SERIES, THEME, add_axes, add_text, new_figure, save_png, save_svg
from vitkit.studies.statistics import Estimate, PowerLaw, estimate, fit_power_law
from vitkit.studies.study import SEED, Study, is_fraction

Row = Mapping[str, object]
Rows = Sequence[Row]
Key = TypeVar("Key", bound=Hashable)
COLORS = tuple(SERIES.values())
MAX_LINES = 2 * len(COLORS)
WIDTH, LEFT, RIGHT = 720, 60, 200
"""Width of a figure, of its tick labels and of its legend, in points."""
MIN_POINTS = 4.0
MAX_TICKS = 12
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def estimate_groups(rows: Rows, column: str, key: Callable[[Row], Key]) -> dict[Key, Estimate]:
    """Return the mean of a column with its interval over seeds, by a key of the rows."""
    values: dict[Key, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        y = row.get(column)
        if isinstance(y, int | float):
            values[key(row)][row.get(SEED)].append(float(y))
    return {each: estimate([sum(ys) / len(ys) for ys in seeds.values()]) for each, seeds in values.items()}


def select_points(study: Study, rows: Rows) -> list[Row]:
    """Return the rows that have a value of the figure's column and an x."""
    column, x = study.figure.column, str(study.figure.x)
    return [
        row for row in study.spread_base(rows) if isinstance(row.get(column), int | float) and row.get(x) is not None
    ]


def group_lines(study: Study, rows: Rows) -> dict[str, dict[float, Estimate]]:
    """Return the estimates of each line in order of x; lines in the order of their labels, at most `MAX_LINES`."""
    figure = study.figure
    points = estimate_groups(
        select_points(study, rows), figure.column, lambda row: (str(row[figure.lines]), x_of(study, row))
    )
    lines: dict[str, dict[float, Estimate]] = {}
    for (line, x), point in points.items():
        lines.setdefault(line, {})[x] = point
    return {name: dict(sorted(lines[name].items())) for name in list(lines)[:MAX_LINES]}


def x_of(study: Study, row: Row) -> float:
    """Return the x of a row; a measured one, which differs by seed through early stopping, rounded to two digits."""
    value = float(str(row[str(study.figure.x)]))
    return value if study.figure.x in study.all_axes else float(f"{value:.2g}")


def fit_lines(study: Study, rows: Rows) -> dict[str, PowerLaw]:
    """Return the power law of the error of each line, over all seeds."""
    if not study.figure.fit:
        return {}
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in select_points(study, rows):
        points[str(row[study.figure.lines])].append((x_of(study, row), 1.0 - float(str(row[study.figure.column]))))
    fits = {name: fit_power_law(*zip(*sorted(pairs), strict=True)) for name, pairs in points.items()}
    return {name: law for name, law in fits.items() if law is not None and np.isfinite(law.a)}


def describe_column(study: Study) -> tuple[float, str]:
    """Return the scale and the label of the figure's column."""
    column = study.figure.column
    if column == "distance":
        return 1.0, "Mean attention distance, pixels"
    name = describe_name(column)
    return (100.0, f"{name}, %") if is_fraction(column) else (1.0, name)


def describe_name(column: str) -> str:
    """Return the name of a column in words.

    >>> describe_name("downstream_10shot"), describe_name("top1"), describe_name("family")
    ('10-shot accuracy on downstream data', 'Test accuracy', 'Family')
    """
    if match := re.fullmatch(r"(\w+)_(\d+)shot", column):
        return f"{match[2]}-shot accuracy on {match[1]} data"
    names = {"top1": "Test accuracy", "val_top1": "Validation accuracy", "lr": "Learning rate", "flops": "FLOPs"}
    return names.get(column, column[:1].upper() + column[1:].replace("_", " "))


def format_tick(value: float) -> str:
    """Format a number of an axis.

    >>> format_tick(0.03), format_tick(3e14), format_tick(1e14), format_tick(0.0)
    ('0.03', '3·10¹⁴', '10¹⁴', '0')
    """
    if 1e-3 <= abs(value) < 1e5 or value == 0:
        return f"{value:g}"
    digits, _, power = f"{value:.1e}".partition("e")
    text = f"10{str(int(power)).translate(SUPERSCRIPTS)}"
    return text if float(digits) == 1.0 else f"{float(digits):g}·{text}"


def draw_figure(study: Study, rows: Rows) -> Drawing:
    """Draw the figure of a study, as far as its runs are finished."""
    return draw_lines(study, rows) if study.figure.x else draw_rows(study, rows)


def draw_lines(study: Study, rows: Rows) -> Drawing:
    """Draw one line per label over x, with intervals over seeds."""
    figure, lines, fits = study.figure, group_lines(study, rows), fit_lines(study, rows)
    drawing, axes, scale = new_axes(study, rows, left=LEFT, height=280)
    axes.grid(axis="y", color=THEME["line"])
    axes.margins(x=0.06, y=0.1)
    if figure.log_x:
        axes.set_xscale("log")
    for index, (name, points) in enumerate(lines.items()):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        shift = 0.012 * (index - (len(lines) - 1) / 2)
        x = [each * (1 + shift) if figure.log_x else each + 3 * shift for each in points]
        y = [point.mean * scale for point in points.values()]
        half = None if figure.dots else half_widths(points.values(), scale)
        bars = axes.errorbar(
            x, y, yerr=half, label=name, color=color, marker=marker, capsize=3, markersize=6, linewidth=1.6
        )
        line: Line2D = bars[0]
        line.set_linestyle("none" if name in fits else "--" if index >= len(COLORS) else "-")
        if figure.dots:
            members = [row for row in select_points(study, rows) if str(row[figure.lines]) == name]
            across = [x_of(study, row) + 3 * shift for row in members]
            values = [float(str(row[figure.column])) * scale for row in members]
            axes.scatter(across, values, s=10, alpha=0.45, color=color, marker=marker)
        if name in fits:
            draw_fit(axes, fits[name], list(points), scale=scale, color=color)
    if is_fraction(figure.column):
        axes.set_ylim(*widen(*axes.get_ylim()))
    set_ticks(axes, study, sorted({x for points in lines.values() for x in points}))
    axes.set_xlabel(figure.x_label, color=THEME["soft"], fontsize=11, labelpad=6)
    add_legend(axes)
    return drawing


def half_widths(points: Iterable[Estimate], scale: float) -> list[float] | None:
    """Return half the widths of intervals; None if there are none, so that no bars are drawn."""
    half = [(point.interval[1] - point.mean) * scale if point.interval else 0.0 for point in points]
    return half if any(half) else None


def set_ticks(axes: Axes, study: Study, values: Sequence[float]) -> None:
    """Label the values of a numeric axis of the study; of a measured x, which may be many, round numbers."""
    if values and (study.figure.x in study.all_axes or not study.figure.log_x) and len(values) <= MAX_TICKS:
        axes.set_xticks(values, [format_tick(value) for value in values])
        axes.minorticks_off()
    elif study.figure.log_x:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
        axes.minorticks_off()


def draw_fit(axes: Axes, law: PowerLaw, x: Sequence[float], *, scale: float, color: str) -> None:
    """Draw a fitted curve with its interval."""
    across = np.geomspace(min(x), max(x), 50)
    axes.plot(across, (1 - law(across)) * scale, color=color, linewidth=1.6)
    half = law.band(across)
    if half is not None:
        limits, middle = axes.get_ylim(), 1 - law(across)
        axes.fill_between(across, (middle - half) * scale, (middle + half) * scale, color=color, alpha=0.12)
        low, high = axes.get_ylim()  # a wide interval does not hide the points
        axes.set_ylim(max(low, limits[0] - 10), min(high, limits[1] + 10))


def draw_rows(study: Study, rows: Rows) -> Drawing:
    """Draw one row per label with a dot and its interval, and the paper's number where it is one."""
    figure = study.figure
    keys, has_series = figure.rows or (figure.lines,), bool(figure.rows)

    def name_point(row: Row) -> tuple[str, str]:
        return ", ".join(str(row[axis]) for axis in keys), str(row[figure.lines]) if has_series else ""

    points = estimate_groups(rows, figure.column, name_point)
    names = list(dict.fromkeys(name for name, _ in points))
    drawing, axes, scale = new_axes(study, rows, left=170, height=30 * max(1, len(names)))
    axes.grid(axis="x", color=THEME["line"])
    for index, label in enumerate(dict.fromkeys(label for _, label in points)):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        chosen = {name: point for (name, other), point in points.items() if other == label}
        half = half_widths(chosen.values(), scale)
        x, y = [p.mean * scale for p in chosen.values()], [names.index(name) for name in chosen]
        text = f"{figure.lines} {label}" if has_series else None
        axes.errorbar(
            x, y, xerr=half, linestyle="none", color=color, marker=marker, capsize=3, markersize=7, label=text
        )
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    if is_fraction(figure.column):
        axes.set_xlim(*widen(*axes.get_xlim()))
    if has_series and points:
        add_legend(axes)
    for index, name in enumerate(names):
        if re.fullmatch(r"[.\d]+", study.paper_numbers.get(name, "")):
            text = f"paper: {float(study.paper_numbers[name]) * scale:.1f}"
            axes.text(1.03, index, text, transform=axes.get_yaxis_transform(), va="center", color=THEME["soft"])
    return drawing


def widen(low: float, high: float) -> tuple[float, float]:
    """Return limits of at least `MIN_POINTS` points of accuracy, so that small differences look small.

    >>> widen(50.0, 51.0)
    (48.5, 52.5)
    """
    margin = max(0.08 * (high - low), (MIN_POINTS - (high - low)) / 2)
    return low - margin, high + margin


def new_axes(study: Study, rows: Rows, *, left: int, height: int) -> tuple[Drawing, Axes, float]:
    """Return a figure with title, unit and number of seeds, its axes, and the scale of its numbers."""
    drawing = new_figure(WIDTH, height + 110)
    scale, label = describe_column(study)
    if seeds := len({row.get(SEED) for row in rows}):
        label += f" · {format_plural(seeds, 'seed')}"
    add_text(
        drawing,
        16,
        24,
        f"{study.title} ({study.paper})" if study.paper else study.title,
        size=14,
        color="ink",
        bold=True,
    )
    add_text(drawing, 16, 42, label)
    return drawing, add_axes(drawing, left, 56, WIDTH - left - RIGHT, height), scale


def add_legend(axes: Axes) -> None:
    """Name the lines to the right of the axes."""
    if axes.get_legend_handles_labels()[1]:
        legend = axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=11)
        for text in legend.get_texts():
            text.set_parse_math(False)


def save_figures(study: Study, rows: Rows, out: Path) -> None:
    """Write figure.png, figure.svg and figure.pdf."""
    drawing = draw_figure(study, rows)
    write_bytes(out / "figure.png", save_png(drawing))
    write_text(out / "figure.svg", save_svg(drawing, title=study.title))
    content = io.BytesIO()
    FigureCanvasPdf(drawing).print_figure(content, format="pdf", metadata={"CreationDate": None})
    write_bytes(out / "figure.pdf", content.getvalue())
