"""Figures of results: what `plot()` of each result draws."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.decode import decode
from vitkit.data.verify import read_image
from vitkit.inference.benchmark import BenchmarkResult, BenchmarkRow
from vitkit.inference.predictions import ImagePrediction, Predictions
from vitkit.report.colors import Rgb
from vitkit.report.figures import SERIES, THEME, add_axes, add_text, new_figure
from vitkit.report.html import visible

# Predictions

TILE, TILE_GAP, TILE_TEXT = 150, 16, 58
"""Side of a picture, gap between pictures, and height of the text below one, in points."""
TILE_COLUMNS = 4


def plot_predictions(result: Predictions) -> Figure:
    """Draw each image with its class, its probability as a bar, and its name."""
    columns = min(max(len(result), 1), TILE_COLUMNS)
    rows = -(-max(len(result), 1) // TILE_COLUMNS)
    margin = TILE_GAP / 2
    figure = new_figure(columns * (TILE + TILE_GAP), rows * (TILE + TILE_TEXT + TILE_GAP))
    for index, prediction in enumerate(result):
        row, column = divmod(index, TILE_COLUMNS)
        left, top = margin + column * (TILE + TILE_GAP), margin + row * (TILE + TILE_TEXT + TILE_GAP)
        _draw_picture(add_axes(figure, left, top, TILE, TILE), _read_picture(result, index))
        _describe_prediction(figure, prediction, left=left, top=top + TILE)
    return figure


def _read_picture(result: Predictions, index: int) -> Rgb | None:
    if result.images is None or result[index].error is not None:
        return None
    try:
        picture = decode(read_image(result.images, index), draft_size=(2 * TILE, 2 * TILE))
    except DataError:  # removed since
        return None
    assert isinstance(picture, Image.Image)
    picture.thumbnail((2 * TILE, 2 * TILE))
    return np.asarray(picture)


def _draw_picture(axes: Axes, picture: Rgb | None) -> None:
    """Draw a picture in the middle of its square; without one, an empty frame."""
    axes.set_axis_off()
    if picture is not None:
        axes.imshow(picture, aspect="equal", interpolation="antialiased")
        return
    axes.add_patch(Rectangle((0, 0), 1, 1, facecolor=THEME["line"], linewidth=0))
    axes.text(0.5, 0.5, "no picture", ha="center", va="center", color=THEME["soft"], fontsize=11)


def _describe_prediction(figure: Figure, prediction: ImagePrediction, *, left: float, top: float) -> None:
    if prediction.probability is not None:
        bar = add_axes(figure, left, top + 6, TILE, 4)
        bar.set_axis_off()
        bar.set_xlim(0, 1)
        bar.set_ylim(0, 1)
        bar.add_patch(Rectangle((0, 0), 1, 1, facecolor=THEME["line"], linewidth=0))
        bar.add_patch(Rectangle((0, 0), prediction.probability, 1, facecolor=THEME["s0"], linewidth=0))
        add_text(figure, left, top + 26, str(prediction.label), color="ink", bold=True, limit=16)
        add_text(figure, left + TILE, top + 26, f"{prediction.probability:.1%}", align="right")
    elif prediction.error is not None:
        add_text(figure, left, top + 26, prediction.error, color="s5", limit=26)
    name = visible(prediction.file, limit=200)
    add_text(figure, left, top + 43, name if len(name) <= 26 else f"…{name[-25:]}", size=10)


# Benchmark


def plot_benchmark(result: BenchmarkResult) -> Figure:
    """Draw images per second as bars, by engine and batch size."""
    engines: dict[str, list[BenchmarkRow]] = {}
    for row in result.rows:
        engines.setdefault(f"{row.precision} {row.kind}", []).append(row)
    sizes = list(dict.fromkeys(row.batch_size for row in result.rows))
    bar, gap, left, width = 15, 16, 112, 420
    height = len(engines) * (bar * len(sizes) + gap)
    figure = new_figure(left + width + 76, 76 + height)
    add_text(figure, 8, 22, f"{result.model} on {result.device}", size=14, color="ink", bold=True)
    add_text(figure, 8, 40, "images per second; higher is faster")
    for index, size in enumerate(sizes):
        x = left + width + 68 - 76 * (len(sizes) - index)
        add_text(figure, x, 40, "■", color=f"s{index % len(SERIES)}")
        add_text(figure, x + 12, 40, f"batch {size}")
    axes = add_axes(figure, left, 56, width, height)
    axes.set_xlim(0, max(row.images_per_second for row in result.rows))
    axes.set_ylim(height, 0)
    axes.set_xticks([])
    axes.set_yticks(
        [number * (bar * len(sizes) + gap) + bar * len(sizes) / 2 for number in range(len(engines))], list(engines)
    )
    for number, rows in enumerate(engines.values()):
        for index, row in enumerate(rows):
            top = number * (bar * len(sizes) + gap) + index * bar
            color = SERIES[f"s{index % len(SERIES)}"]
            axes.barh(top + bar / 2, row.images_per_second, height=bar - 2, color=color, linewidth=0)
            speed = f"{row.images_per_second:,.0f}" if row.images_per_second >= 100 else f"{row.images_per_second:.1f}"
            end = row.images_per_second + axes.get_xlim()[1] * 0.01
            axes.text(end, top + bar / 2, speed, va="center", fontsize=10, color=THEME["soft"])
    return figure
