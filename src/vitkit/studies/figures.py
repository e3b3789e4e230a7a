"""Figure of a study in the paper's form: one line per family with intervals, or one row of dots per label."""

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure as Drawing

from vitkit.core.files import write_bytes, write_text
from vitkit.report.figures import SERIES, THEME, add_axes, add_text, new_figure, save_png, save_svg
from vitkit.studies.statistics import Estimate, estimate, fit_power_law
from vitkit.studies.study import Study

Rows = Sequence[Mapping[str, object]]
MARKERS = ("o", "s", "^", "D", "v", "P")
COLORS = tuple(SERIES.values())


def group_points(study: Study, rows: Rows) -> dict[str, dict[float, Estimate]]:
    """Return the mean with its interval over seeds, by line and x."""
    figure = study.figure
    values: dict[tuple[str, float], dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        y, x = row.get(figure.column), row.get(figure.x) if figure.x else 0.0
        if isinstance(y, int | float) and x is not None:
            values[str(row[figure.lines]), float(str(x))][row.get("seed")].append(float(y))
    lines: dict[str, dict[float, Estimate]] = defaultdict(dict)
    for (line, x), seeds in sorted(values.items(), key=lambda item: item[0][1]):
        lines[line][x] = estimate([sum(each) / len(each) for each in seeds.values()])
    return lines


def draw_figure(study: Study, rows: Rows) -> Drawing:
    """Draw the figure of a study, as far as its runs are finished."""
    lines = group_points(study, rows)
    return _draw_lines(study, lines) if study.figure.x else _draw_rows(study, lines)


def _scale(study: Study) -> tuple[float, str]:
    return (
        (1.0, study.figure.column)
        if study.figure.column == "distance"
        else (100.0, f"{study.figure.column.replace('_', ', ')} accuracy, %")
    )


def _draw_lines(study: Study, lines: Mapping[str, Mapping[float, Estimate]]) -> Drawing:
    shown = list(lines)[: 2 * len(COLORS)]
    drawing = new_figure(640, 380)
    add_text(drawing, 16, 24, study.title, size=14, color="ink", bold=True)
    scale, label = _scale(study)
    add_text(drawing, 16, 42, label)
    axes = add_axes(drawing, 56, 54, 420, 270)
    axes.grid(axis="y", color=THEME["line"])
    if study.figure.log_x:
        axes.set_xscale("log")
    ticks = sorted({x for points in lines.values() for x in points})
    for index, name in enumerate(shown):
        points, color = lines[name], COLORS[index % len(COLORS)]
        x, y = list(points), [point.mean * scale for point in points.values()]
        half = [(p.interval[1] - p.mean) * scale if p.interval else 0.0 for p in points.values()]
        offset = [each * (1 + 0.012 * (index - len(shown) / 2)) for each in x] if study.figure.log_x else x
        axes.errorbar(
            offset,
            y,
            yerr=half,
            color=color,
            marker=MARKERS[index % len(MARKERS)],
            capsize=3,
            markersize=6,
            linewidth=1.8,
        )
        if study.figure.fit and (law := fit_power_law(x, [1 - each / scale for each in y])) and math.isfinite(law.a):
            across = np.geomspace(min(x), max(x), 50)
            axes.plot(across, (1 - law(across)) * scale, color=color, linestyle=":", linewidth=1.2)
        drawing.text(490 / 640, 1 - (70 + 20 * index) / 380, f"● {name}", color=color, fontsize=11, parse_math=False)
    if study.figure.log_x and len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    add_text(drawing, 266, 364, study.figure.x_label, align="center")
    return drawing


def _draw_rows(study: Study, lines: Mapping[str, Mapping[float, Estimate]]) -> Drawing:
    names, height = list(lines), 28 * max(1, len(lines))
    drawing = new_figure(640, 110 + height)
    add_text(drawing, 16, 24, study.title, size=14, color="ink", bold=True)
    scale, label = _scale(study)
    add_text(drawing, 16, 42, label)
    axes = add_axes(drawing, 150, 54, 450, height)
    axes.grid(axis="x", color=THEME["line"])
    for index, name in enumerate(names):
        point = next(iter(lines[name].values()))
        half = (point.interval[1] - point.mean) * scale if point.interval else 0.0
        axes.errorbar([point.mean * scale], [index], xerr=[half], color=COLORS[0], marker="o", capsize=3, markersize=7)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    return drawing


def save_figures(study: Study, rows: Rows, out: Path) -> None:
    """Write figure.png, figure.svg and figure.pdf."""
    drawing = draw_figure(study, rows)
    write_bytes(out / "figure.png", save_png(drawing))
    write_text(out / "figure.svg", save_svg(drawing, title=study.title))
    content = io.BytesIO()
    FigureCanvasPdf(drawing).print_figure(content, format="pdf", metadata={"CreationDate": None})
    write_bytes(out / "figure.pdf", content.getvalue())
