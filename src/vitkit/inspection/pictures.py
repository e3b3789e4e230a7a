"""What the parts of inspection found goes in, drawings come out, each with the words that one needs to read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from vitkit.core.shapes import Float, Tensor
from vitkit.evaluate.plots import nice_ticks
from vitkit.inspection.canvas import SERIES, Canvas, Number, Rgb
from vitkit.inspection.colours import AMOUNT, LIKENESS, array, coloured, hexadecimal, scaled

SIDE = 150
"""Units of a drawing that the longer side of a photo takes."""
GAP = 10


def side_by_side(
    rows: Sequence[Sequence[Rgb]], *, heads: Sequence[str], names: Sequence[Sequence[str]], title: str
) -> Canvas:
    """A table of pictures: a head over each column, words under each picture.

    >>> black = np.zeros((8, 8, 3), dtype=np.uint8)
    >>> side_by_side([[black, black]], heads=["seen", "lit"], names=[["a.jpg", ""]], title="two").width
    310.0
    """
    width, height = fitted(rows[0][0])
    under = 24
    canvas = Canvas(width=len(heads) * (width + GAP) - GAP, height=22 + len(rows) * (height + under + GAP), title=title)
    for column, head in enumerate(heads):
        canvas.text(column * (width + GAP), 14, head, colour="ink", bold=True, limit=26)
    for row, (pictures, said) in enumerate(zip(rows, names, strict=True)):
        top = 22 + row * (height + under + GAP)
        for column, (pixels, below) in enumerate(zip(pictures, said, strict=True)):
            left = column * (width + GAP)
            canvas.picture(left, top, width, height, pixels, told=below)
            canvas.text(left, top + height + 15, below, size=11, limit=26)
    return canvas


def one_above_the_other(
    above: Sequence[Rgb], below: Sequence[Rgb], *, heads: tuple[str, str], names: Sequence[str], title: str
) -> Canvas:
    """Pairs of pictures, each an image and what was made of it, one pair beside the other.

    >>> black = np.zeros((8, 8, 3), dtype=np.uint8)
    >>> one_above_the_other([black] * 3, [black] * 3, heads=("seen", "lit"), names=["a", "b", "c"], title="six").width
    470.0
    """
    width, height = fitted(above[0])
    canvas = Canvas(width=len(above) * (width + GAP) - GAP, height=2 * (height + 22) + 22, title=title)
    canvas.text(0, 14, heads[0], colour="ink", bold=True)
    canvas.text(0, height + 36, heads[1], colour="ink", bold=True)
    for column, (first, second, name) in enumerate(zip(above, below, names, strict=True)):
        left = column * (width + GAP)
        canvas.picture(left, 22, width, height, first, told=name)
        canvas.picture(left, height + 44, width, height, second, told=name)
        canvas.text(left, 2 * height + 59, name, size=11, limit=26)
    return canvas


def fitted(pixels: Rgb, *, side: Number = SIDE) -> tuple[Number, Number]:
    """Width and height of a picture whose longer side is `side`.

    >>> fitted(np.zeros((50, 100, 3), dtype=np.uint8))
    (150.0, 75.0)
    """
    largest = max(pixels.shape[:2])
    return side * pixels.shape[1] / largest, side * pixels.shape[0] / largest


def filter_tiles(components: Float[Tensor, "count C H W"]) -> Canvas:
    """Figure 7, left: components as tiles; one channel as grey, three as colour, of more the first three.

    >>> import torch
    >>> filter_tiles(torch.randn(9, 3, 16, 16)).title
    'The first 9 principal components of the filters that read pixels'
    """
    count, side, columns = len(components), 72, 7
    rows = ceil(count / columns)
    canvas = Canvas(
        width=min(count, columns) * (side + 6) - 6,
        height=rows * (side + 6) - 6,
        title=f"The first {count} principal components of the filters that read pixels",
    )
    for number, component in enumerate(array(components)):
        # Zero is middle grey in every tile, and the strongest number its end: signs stay comparable.
        centred = component / max(float(np.abs(component).max()), 1e-12) / 2 + 0.5
        pixels = as_rgb(centred)
        left, top = (number % columns) * (side + 6), (number // columns) * (side + 6)
        canvas.picture(left, top, side, side, pixels, smooth=False, told=f"component {number + 1}")
    return canvas


def as_rgb(channels: NDArray[np.float32]) -> Rgb:
    """C × H × W shares as pixels: one channel is grey, three are colours, two count as grey, of more the first three.

    >>> as_rgb(np.ones((1, 2, 2), dtype=np.float32)).shape
    (2, 2, 3)
    """
    shown = channels[:3] if channels.shape[0] >= 3 else np.repeat(channels.mean(axis=0, keepdims=True), 3, axis=0)
    return (np.clip(shown, 0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)


def grid_of_grids(similarity: Float[Tensor, "rows columns rows2 columns2"]) -> Canvas:
    """Figure 7, centre: for each patch a small map of how alike its position is to all others.

    >>> import torch
    >>> len(grid_of_grids(torch.rand(2, 3, 2, 3)).marks) > 6
    True
    """
    values = array(similarity)
    rows, columns = values.shape[:2]
    room = 540
    tile = room / max(rows, columns)
    gap = tile * 0.08
    left, top = 46, 26
    canvas = Canvas(
        width=left + columns * tile + 74, height=top + rows * tile + 8, title="Similarity of position embeddings"
    )
    canvas.text(left + columns * tile / 2, 11, "Patch column", anchor="middle")
    for row in range(rows):
        if row % ceil(rows / 16) == 0:
            canvas.text(left - 6, top + (row + 0.5) * tile + 4, str(row + 1), anchor="end", size=10)
        for column in range(columns):
            pixels = coloured((values[row, column] + 1) / 2, knots=LIKENESS)
            canvas.picture(
                left + column * tile,
                top + row * tile,
                tile - gap,
                tile - gap,
                pixels,
                smooth=False,
                told=f"patch in row {row + 1}, column {column + 1}",
            )
    for column in range(0, columns, ceil(columns / 16)):
        canvas.text(left + (column + 0.5) * tile, 23, str(column + 1), anchor="middle", size=10)
    canvas.text(0, 23, "Row", size=11)
    colour_bar(
        canvas, left + columns * tile + 16, top, rows * tile - gap, ends=("-1", "1"), knots=LIKENESS, name="cosine"
    )
    return canvas


def colour_bar(
    canvas: Canvas,
    x: Number,
    y: Number,
    height: Number,
    *,
    ends: tuple[str, str],
    knots: tuple[tuple[int, int, int], ...] = AMOUNT,
    name: str = "",
) -> None:
    """A legend: the colours from the lowest, at the bottom, to the highest."""
    shares = np.linspace(1, 0, 64, dtype=np.float32)[:, None]
    canvas.picture(x, y, 12, height, coloured(shares, knots=knots), smooth=False)
    canvas.text(x + 17, y + 10, ends[1], size=11)
    canvas.text(x + 17, y + height, ends[0], size=11)
    if name:
        canvas.text(x + 17, y + height / 2 + 4, name, size=11)


def distance_chart(distances: Float[Tensor, "layers A"], *, unit: str = "pixels") -> Canvas:
    """Figure 7, right: a dot for each head, by depth and by how far it looks.

    >>> import torch
    >>> distance_chart(torch.rand(12, 3)).title
    'Mean attention distance by depth'
    """
    values = array(distances)
    canvas, axes = chart(
        along=numbered(len(values)),
        below="Depth (layer)",
        highest=float(values.max()),
        named=f"Mean attention distance ({unit})",
        title="Mean attention distance by depth",
    )
    for layer, heads in enumerate(values):
        for head, value in enumerate(heads):
            told = f"layer {layer + 1}, head {head + 1}: {value:.1f} {unit}"
            canvas.dot(
                axes.across(layer), axes.down(float(value)), radius=4, colour=SERIES[head % len(SERIES)], told=told
            )
    return canvas


def lines(
    series: Mapping[str, Sequence[Number]],
    *,
    along: Sequence[str],
    below: str,
    named: str,
    title: str,
    percent: bool = False,
) -> Canvas:
    """A line for each name, with a legend beside it.

    >>> steps = {"along": ["1", "2"], "below": "Depth (layer)"}
    >>> lines({"cat": [0.1, 0.9]}, **steps, named="Probability", title="By layer", percent=True).width
    720
    """
    highest = 1.0 if percent else max(max(values) for values in series.values())
    canvas, axes = chart(
        along=along, below=below, highest=highest, named=named, title=title, percent=percent, legend=200
    )
    for number, (name, values) in enumerate(series.items()):
        colour = SERIES[number % len(SERIES)]
        points = [(axes.across(place), axes.down(value)) for place, value in enumerate(values)]
        canvas.line(points, colour=colour, width=2)
        for (x, y), value, place in zip(points, values, along, strict=True):
            shown = f"{value:.1%}" if percent else f"{value:.3g}"
            canvas.dot(x, y, radius=3, colour=colour, told=f"{name}, {place}: {shown}")
        canvas.box(canvas.width - 188, 24 + 20 * number, 14, 4, colour=colour)
        canvas.text(canvas.width - 168, 30 + 20 * number, name, size=12, colour="ink", limit=26)
    return canvas


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where numbers land on a chart: the range of each axis, and the corners of their box on the drawing."""

    x: tuple[Number, Number]
    y: tuple[Number, Number]
    box: tuple[Number, Number, Number, Number]

    def across(self, value: Number) -> Number:
        """From left to right."""
        left, _, right, _ = self.box
        return left + (right - left) * (value - self.x[0]) / (self.x[1] - self.x[0])

    def down(self, value: Number) -> Number:
        """From top to bottom."""
        _, top, _, bottom = self.box
        return bottom - (bottom - top) * (value - self.y[0]) / (self.y[1] - self.y[0])


def chart(
    *, along: Sequence[str], below: str, highest: Number, named: str, title: str, percent: bool = False, legend: int = 0
) -> tuple[Canvas, Axes]:
    """An empty chart of something that is not negative, and where numbers land on it: 0, 1, … from left to right."""
    canvas = Canvas(width=520 + legend, height=330, title=title)
    ticks = nice_ticks(0.0, highest)
    axes = Axes(x=(-0.5, len(along) - 0.5), y=(0.0, ticks[-1]), box=(54.0, 26.0, 510.0, 284.0))
    left, _, right, bottom = axes.box
    canvas.text(0, 13, named, size=12)
    for tick in ticks:
        height = axes.down(tick)
        canvas.line([(left, height), (right, height)], colour="line")
        canvas.text(left - 8, height + 4, f"{tick:.0%}" if percent else f"{tick:g}", anchor="end", size=11)
    for place in range(0, len(along), ceil(len(along) / 16)):
        canvas.text(axes.across(place), bottom + 17, along[place], anchor="middle", size=11)
    canvas.text((left + right) / 2, bottom + 38, below, anchor="middle", size=12)
    return canvas, axes


def numbered(count: int) -> list[str]:
    """Layers as a reader counts them.

    >>> numbered(3)
    ['1', '2', '3']
    """
    return [str(number) for number in range(1, count + 1)]


def likeness_table(similarity: Float[Tensor, "layers layers2"], *, sides: tuple[str, str]) -> Canvas:
    """How alike layers are, from 0 to 1, as a table of colours.

    >>> import torch
    >>> likeness_table(torch.eye(3), sides=("layer", "layer")).title
    'Similarity of layers (linear CKA)'
    """
    values = array(similarity)
    cell = 420 / max(values.shape)
    left, top = 46, 30
    canvas = Canvas(
        width=left + values.shape[1] * cell + 74,
        height=top + values.shape[0] * cell + 10,
        title="Similarity of layers (linear CKA)",
    )
    canvas.text(left + values.shape[1] * cell / 2, 11, sides[1], anchor="middle", limit=40)
    canvas.text(0, 25, sides[0], limit=40, size=11)
    for row, line in enumerate(values):
        canvas.text(left - 6, top + (row + 0.5) * cell + 4, str(row + 1), anchor="end", size=10)
        for column, value in enumerate(line):
            told = f"{row + 1} and {column + 1}: {value:.2f}"
            canvas.box(
                left + column * cell, top + row * cell, cell - 1, cell - 1, colour=hexadecimal(float(value)), told=told
            )
    for column in range(values.shape[1]):
        canvas.text(left + (column + 0.5) * cell, 26, str(column + 1), anchor="middle", size=10)
    colour_bar(canvas, left + values.shape[1] * cell + 16, top, values.shape[0] * cell, ends=("0", "1"), name="CKA")
    return canvas


def stretched(maps: Float[Tensor, "B rows columns"]) -> list[NDArray[np.float32]]:
    """Each map over 0…1 by itself; what is above 95 % of its patches is as bright as can be.

    A few patches on plain ground may draw far more attention than all else, and leave the rest in the dark.
    """
    return [scaled(np.minimum(each, np.quantile(each, 0.95))) for each in array(maps)]
