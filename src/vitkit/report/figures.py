"""Matplotlib figures of the reports, saved as PNG and SVG files or inlined in a page in its colors.

One point of a figure is one unit of its SVG file and two pixels of its PNG file.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from math import ceil

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitkit.core.shapes import Float, Tensor
from vitkit.report.charts import Number, nice_ticks
from vitkit.report.colors import DIVERGING, SEQUENTIAL, Rgb, apply_colormap, to_array, to_rgb
from vitkit.report.html import data_url, template_macros, visible

SERIES = {"s0": "#2f5bea", "s1": "#e0661a", "s2": "#12946f", "s3": "#a33fc4", "s4": "#b58a00", "s5": "#c22f5b"}
THEME = {"ink": "#161b26", "soft": "#5b6478", "line": "#e3e6ee"} | SERIES
"""Colors of the style sheet in light mode; in a page they follow its theme."""
MARKERS = ("o", "s", "^", "D", "v", "P")
POINTS_PER_INCH = 72
PNG_DPI = 2 * POINTS_PER_INCH


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with a title and tooltips."""

    title: str
    figure: Figure
    tooltips: dict[str, str] = field(default_factory=dict)

    @property
    def width(self) -> float:
        """Return the width in points."""
        return float(self.figure.get_figwidth() * POINTS_PER_INCH)

    def add_tooltip(self, artist: Artist, text: str) -> None:
        """Show a text when the pointer is over an artist."""
        name = f"tooltip-{len(self.tooltips)}"
        artist.set_gid(name)
        self.tooltips[name] = text

    def to_figure(self) -> Figure:
        """Return the figure."""
        return self.figure

    def to_svg(self) -> str:
        """Return the figure as an SVG file."""
        return save_svg(self.figure, title=self.title, tooltips=self.tooltips)

    def to_html(self) -> Markup:
        """Return the figure for a page, in the colors of its theme."""
        svg = self.to_svg()
        for name, color in THEME.items():
            svg = svg.replace(color, f"var(--{name}, {color})")
        return Markup(svg)


def new_figure(width: Number, height: Number) -> Figure:
    """Return an empty figure of a size in points, without pyplot."""
    return NotebookFigure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH), facecolor="white")


class NotebookFigure(Figure):
    """A figure that notebooks show as a picture; a plain one without pyplot is shown as text."""

    def _repr_png_(self) -> bytes:
        return save_png(self)


def add_axes(figure: Figure, left: Number, top: Number, width: Number, height: Number) -> Axes:
    """Add axes at a position in points from the upper left corner."""
    total_width, total_height = (float(size * POINTS_PER_INCH) for size in figure.get_size_inches())
    bottom = total_height - top - height
    rectangle = (left / total_width, bottom / total_height, width / total_width, height / total_height)
    axes: Axes = figure.add_axes(rectangle, facecolor="none")
    axes.tick_params(length=0, labelsize=11, labelcolor=THEME["soft"], pad=6)
    axes.spines[:].set_visible(False)
    return axes


def add_text(
    figure: Figure,
    x: Number,
    y: Number,
    text: str,
    *,
    size: Number = 11,
    color: str = "soft",
    bold: bool = False,
    align: str = "left",
    limit: int = 60,
) -> None:
    """Add an untrusted line of text; y is its baseline in points from the top."""
    width, height = (float(each * POINTS_PER_INCH) for each in figure.get_size_inches())
    figure.text(
        x / width,
        1 - y / height,
        visible(text, limit=limit),
        fontsize=size,
        color=THEME[color],
        fontweight="bold" if bold else "normal",
        horizontalalignment=align,
        verticalalignment="baseline",
        parse_math=False,
    )


def save_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file on white."""
    content = io.BytesIO()
    with _no_glyph_warnings():
        FigureCanvasAgg(figure).print_figure(content, format="png", dpi=PNG_DPI, facecolor="white")
    return content.getvalue()


def save_svg(figure: Figure, *, title: str = "", tooltips: dict[str, str] | None = None) -> str:
    """Return a figure as an SVG element without metadata, external references or style rules."""
    content = io.StringIO()
    # Text stays text, and ids do not depend on the time.
    with _no_glyph_warnings(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": visible(title) or "vitkit"}):
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_figure(content, format="svg", dpi=PNG_DPI, metadata=empty, facecolor="none")
    svg = content.getvalue()
    svg = svg[svg.index("<svg") :]
    # Rules for `*` would apply to the whole page.
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(font(?:-family)?:[^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1system-ui, sans-serif", svg)
    for name, text in (tooltips or {}).items():
        svg = svg.replace(f'<g id="{name}">', f"<g><title>{escape(visible(text, limit=200))}</title>")
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (width|height)="[^"]*pt"', "", opening)
    return f'{opening} role="img" aria-label="{escape(visible(title))}" stroke-linejoin="round">{rest}'


@contextmanager
def _no_glyph_warnings() -> Iterator[None]:
    """Ignore missing glyphs: class names may be in any script, and SVG files hold them as text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .* natively")
        yield


# Image grids

SIDE, GAP = 150, 10
"""Longer side of a picture and the gap between pictures, in points."""
HEAD, CAPTION = 22, 24
"""Heights of a head and a caption."""


@dataclass(frozen=True, kw_only=True)
class ImageGrid:
    """Images in rows with captions; the heads are those of columns, or of rows."""

    rows: Sequence[Sequence[Rgb]]
    title: str
    captions: Sequence[Sequence[str]]
    column_heads: Sequence[str] = ()
    row_heads: Sequence[str] = ()

    @property
    def picture_size(self) -> tuple[float, float]:
        """Return the width and height of a picture in points."""
        height, width = self.rows[0][0].shape[:2]
        return SIDE * width / max(width, height), SIDE * height / max(width, height)

    @property
    def width(self) -> float:
        """Return the width in points."""
        return max(map(len, self.rows)) * (self.picture_size[0] + GAP) - GAP

    def to_figure(self, *, min_width: int = 0) -> Figure:
        """Return the grid as a figure; long heads may need more width than the pictures."""
        width, height = self.picture_size
        heads = HEAD * (len(self.row_heads) or 1)
        figure = new_figure(max(self.width, min_width), heads + len(self.rows) * (height + CAPTION + GAP))
        for column, head in enumerate(self.column_heads):
            add_text(figure, column * (width + GAP), 14, head, size=12, color="ink", bold=True, limit=26)
        top = float(0 if self.row_heads else HEAD)
        for row, pictures in enumerate(self.rows):
            if self.row_heads:
                add_text(figure, 0, top + 14, self.row_heads[row], size=12, color="ink", bold=True)
                top += HEAD
            for column, picture in enumerate(pictures):
                left = column * (width + GAP)
                axes = add_axes(figure, left, top, width, height)
                axes.set_axis_off()
                axes.imshow(picture, aspect="auto", interpolation="bicubic")
                add_text(figure, left, top + height + 15, self.captions[row][column], limit=26)
            top += height + CAPTION + GAP
        return figure

    def to_svg(self) -> str:
        """Return the grid as an SVG file."""
        return save_svg(self.to_figure(), title=self.title)

    def to_html(self) -> Markup:
        """Return the grid for a page."""
        rows = [
            [(data_url(picture), caption) for picture, caption in zip(*row, strict=True)]
            for row in zip(self.rows, self.captions, strict=True)
        ]
        return Markup(template_macros("inspection.html").image_grid(self, rows))


Drawing = ImageGrid | Chart


def filter_chart(components: Float[Tensor, "count C H W"]) -> Chart:
    """Draw principal components of filters as tiles (Figure 7, left)."""
    count, columns, side, gap = len(components), 7, 72, 6
    rows = ceil(count / columns)
    width, height = min(count, columns) * (side + gap) - gap, rows * (side + gap) - gap
    title = f"The first {count} principal components of the input filters"
    chart = Chart(title=title, figure=new_figure(width, height))
    for index, component in enumerate(to_array(components)):
        axes = add_axes(chart.figure, (index % columns) * (side + gap), (index // columns) * (side + gap), side, side)
        axes.set_axis_off()
        # Zero is mid-gray and the largest absolute value is an end of the scale, so signs are comparable.
        scaled = component / max(float(np.abs(component).max()), 1e-12) / 2 + 0.5
        chart.add_tooltip(axes, f"component {index + 1}")
        axes.imshow(to_rgb(scaled), aspect="auto", interpolation="none")
    return chart


def position_chart(similarity: Float[Tensor, "rows columns rows2 columns2"]) -> Chart:
    """Draw, for each patch, the similarity of its position embedding to all others (Figure 7, center)."""
    values = to_array(similarity)
    rows, columns = values.shape[:2]
    names, ends, title = ("Row", "Patch column"), ("-1", "cosine", "1"), "Similarity of position embeddings"
    chart, axes = _cell_chart((rows, columns), side=540, title=title, names=names, scale=ends, colormap=DIVERGING)
    for row, column in product(range(rows), range(columns)):
        extent = (column + 0.04, column + 0.96, row + 0.96, row + 0.04)
        pixels = apply_colormap((values[row, column] + 1) / 2, DIVERGING)
        image = axes.imshow(pixels, extent=extent, interpolation="none", aspect="auto")
        chart.add_tooltip(image, f"patch in row {row + 1}, column {column + 1}")
    return chart


def similarity_chart(similarity: Float[Tensor, "layers layers2"], *, names: tuple[str, str]) -> Chart:
    """Draw the similarity of layers as a heatmap from 0 to 1."""
    values = to_array(similarity)
    ends, title = ("0", "CKA", "1"), "Similarity of layers (linear CKA)"
    chart, axes = _cell_chart(values.shape, side=420, title=title, names=names, scale=ends, colormap=SEQUENTIAL)
    for (row, column), value in np.ndenumerate(values):
        patch = Rectangle((column, row), 0.98, 0.98, color=SEQUENTIAL(float(value)), linewidth=0)
        axes.add_patch(patch)
        chart.add_tooltip(patch, f"{row + 1} and {column + 1}: {value:.2f}")
    return chart


def _cell_chart(
    shape: tuple[int, ...],
    *,
    side: Number,
    title: str,
    names: tuple[str, str],
    scale: tuple[str, str, str],
    colormap: LinearSegmentedColormap,
) -> tuple[Chart, Axes]:
    """Return axes with a square cell for each row and column, their names and numbers, and a color bar.

    `scale` are the labels of the lower end, the middle and the upper end of the color bar.
    """
    height, width = (count * side / max(shape) for count in shape)
    chart = Chart(title=title, figure=new_figure(46 + width + 74, 30 + height + 10))
    add_text(chart.figure, 46 + width / 2, 11, names[1], align="center", limit=40)
    add_text(chart.figure, 0, 25, names[0], limit=40)
    axes = add_axes(chart.figure, 46, 30, width, height)
    axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0))
    axes.xaxis.tick_top()
    for axis, count in zip((axes.yaxis, axes.xaxis), shape, strict=True):
        chosen = range(0, count, ceil(count / 16))
        axis.set_ticks([index + 0.5 for index in chosen], [str(index + 1) for index in chosen])
    axes.tick_params(labelsize=10, pad=3)
    bar = add_axes(chart.figure, chart.width - 58, 30, 12, height)
    bar.set_axis_off()
    bar.imshow(np.linspace(1, 0, 64)[:, None], cmap=colormap, aspect="auto", interpolation="none")
    for y, text in zip((30 + height, 34 + height / 2, 40), scale, strict=True):
        add_text(chart.figure, chart.width - 41, y, text)
    return chart, axes


def distance_chart(distances: Float[Tensor, "layers A"]) -> Chart:
    """Draw the mean attention distance of each head by depth (Figure 7, right)."""
    values = to_array(distances)
    title, y_title = "Mean attention distance by depth", "Mean attention distance (pixels)"
    chart, axes = _depth_chart(len(values), top=float(values.max()), y_title=y_title, title=title)
    for (layer, head), value in np.ndenumerate(values):
        (dot,) = axes.plot([layer], [value], "o", markersize=8, alpha=0.75, color=series_color(head), markeredgewidth=0)
        chart.add_tooltip(dot, f"layer {layer + 1}, head {head + 1}: {value:.1f} pixels")
    return chart


def series_chart(
    series: Mapping[str, Sequence[Number]],
    *,
    y_title: str,
    title: str,
    ticks: Sequence[str] | None = None,
    x_title: str = "Depth (layer)",
    percent: bool = False,
) -> Chart:
    """Draw a line for each name, by layer unless `ticks` has other labels, with a legend."""
    top = 1.0 if percent else max(max(values) for values in series.values())
    count = len(next(iter(series.values())))
    chart, axes = _depth_chart(
        count, top=top, y_title=y_title, title=title, ticks=ticks, x_title=x_title, percent=percent, legend=200
    )
    for index, (name, values) in enumerate(series.items()):
        axes.plot(range(count), values, color=series_color(index), linewidth=2)
        for position, value in enumerate(values):
            (dot,) = axes.plot([position], [value], "o", markersize=6, color=series_color(index), markeredgewidth=0)
            label = ticks[position] if ticks else str(position + 1)
            chart.add_tooltip(dot, f"{name}, {label}: {f'{value:.1%}' if percent else f'{value:.3g}'}")
        y = 26 + 20 * index
        marker = add_axes(chart.figure, chart.width - 188, y - 2, 14, 4)
        marker.set_axis_off()
        marker.add_patch(Rectangle((0, 0), 1, 1, color=series_color(index), linewidth=0))
        add_text(chart.figure, chart.width - 168, y + 4, name, size=12, color="ink", limit=26)
    return chart


def _depth_chart(
    count: int,
    *,
    top: Number,
    y_title: str,
    title: str,
    ticks: Sequence[str] | None = None,
    x_title: str = "Depth (layer)",
    percent: bool = False,
    legend: int = 0,
) -> tuple[Chart, Axes]:
    chart = Chart(title=title, figure=new_figure(520 + legend, 330))
    axes = add_axes(chart.figure, 54, 26, 456, 258)
    y_ticks = nice_ticks(0.0, top)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(0, y_ticks[-1])
    axes.set_yticks(y_ticks, [f"{tick:.0%}" if percent else f"{tick:g}" for tick in y_ticks])
    axes.grid(axis="y", color=THEME["line"], linewidth=1)
    axes.set_axisbelow(True)
    labels = ticks or [str(index + 1) for index in range(count)]
    chosen = range(0, count, ceil(count / 16))
    axes.set_xticks(list(chosen), [visible(labels[index]) for index in chosen])
    add_text(chart.figure, 0, 13, y_title, size=12)
    add_text(chart.figure, 282, 322, x_title, size=12, align="center")
    return chart, axes


def series_color(index: int) -> str:
    """Return the color of a series; they repeat after the last."""
    return SERIES[f"s{index % len(SERIES)}"]
