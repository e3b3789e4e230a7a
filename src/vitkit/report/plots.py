"""Figures of results: what `plot()` of each result draws."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitkit.core.formatting import format_number, format_plural
from vitkit.data.contact_sheet import draw_contact_sheet
from vitkit.data.dataset import Dataset
from vitkit.data.summary import DataSummary
from vitkit.data_quality.check import DataQualityReport
from vitkit.data_quality.near_duplicates import ImageRef
from vitkit.evaluation.comparison import ComparisonResult
from vitkit.evaluation.evaluation import EvaluationResult
from vitkit.evaluation.fewshot import FewShotResult
from vitkit.evaluation.leaderboard import Leaderboard
from vitkit.inference.benchmark import BenchmarkResult, BenchmarkRow
from vitkit.inference.predictions import ImagePrediction, Predictions
from vitkit.report.charts import Number, nice_ticks
from vitkit.report.colors import Rgb
from vitkit.report.figures import MARKERS, SERIES, THEME, ImageGrid, add_axes, add_text, new_figure, series_color
from vitkit.report.html import read_picture, visible
from vitkit.zoo.cost import Cost

MAX_CLASSES = 40
"""Classes that are drawn; of more, those with the most errors."""
MAX_EXAMPLES = 6
"""Pairs of near-duplicates and label issues that are drawn."""
CHARACTER = 6.6
"""Width of a character of 11 points, in points."""
EMPTY = "#f1f3f5"
"""Color beside a picture."""


# Evaluation


def plot_confusion(result: EvaluationResult) -> Figure:
    """Draw the confusion matrix; the color is the fraction of the true class."""
    wrong = result.targets != result.predictions
    involved = np.concatenate([result.targets[wrong], result.predictions[wrong]])
    errors = np.bincount(involved, minlength=len(result.labels))
    drawn = np.sort(np.argsort(-errors, kind="stable")[:MAX_CLASSES])
    counts = result.confusion.matrix(drawn)
    totals = np.bincount(result.targets, minlength=len(result.labels))[drawn]
    names = [visible(result.labels[label], limit=22) for label in drawn]
    cell = 72 if len(drawn) <= 4 else 40 if len(drawn) <= 12 else 24
    side, margin = cell * len(drawn), _label_width(names)
    width = max(margin + side + 12, 420)
    figure = new_figure(width, 58 + margin + side + 24)
    title = f"{result.top1:.1%} of {format_plural(result.count, 'image')} correct"
    hidden = len(result.labels) - len(drawn)
    add_text(figure, 8, 22, title, size=14, color="ink", bold=True)
    subtitle = "rows: true class, columns: predicted class"
    more = f"; {hidden:,} classes with fewer errors are not drawn" if hidden else ""
    add_text(figure, 8, 40, subtitle + more, limit=120)
    axes = add_axes(figure, margin, 48 + margin, side, side)
    fractions = counts / np.maximum(totals, 1)[:, None]
    axes.imshow(_confusion_colors(fractions), aspect="auto", interpolation="none")
    for (row, column), count in np.ndenumerate(counts):
        if count:
            text = format_number(int(count))
            color = "white" if fractions[row, column] > 0.4 else THEME["ink"]
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8 if cell < 40 else 11)
    ticks = range(len(drawn))
    axes.set_xticks(ticks, names, rotation=90, parse_math=False)
    axes.set_yticks(ticks, names, parse_math=False)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(len(drawn) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(drawn) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    return figure


def _confusion_colors(fractions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return blue for correct and orange for wrong predictions; the root makes rare confusions visible."""
    opacity = np.sqrt(fractions)[..., None]
    is_correct = np.eye(len(fractions), dtype=np.bool_)[..., None]
    color = np.where(is_correct, to_rgba(THEME["s0"])[:3], to_rgba(THEME["s1"])[:3])
    empty = np.array(to_rgba("#f1f3f7")[:3])
    return empty * (1 - opacity) + color * opacity


def plot_calibration(result: EvaluationResult) -> Figure:
    """Draw accuracy by confidence next to the diagonal of a calibrated model, above the images of each bin."""
    bins = result.calibration
    figure = new_figure(450, 470)
    add_text(figure, 8, 22, f"Calibration error {result.ece:.3f}", size=14, color="ink", bold=True)
    axes = add_axes(figure, 60, 46, 360, 290)
    centers, width = (np.arange(len(bins.count)) + 0.5) / len(bins.count), 0.9 / len(bins.count)
    filled = bins.count > 0
    axes.bar(centers[filled], bins.accuracy[filled], width, color=THEME["s0"], label="accuracy")
    axes.plot(bins.confidence[filled], bins.accuracy[filled], ".", color=THEME["ink"])
    axes.plot([0, 1], [0, 1], "--", color=THEME["s1"], linewidth=1.5, label="calibrated")
    _percent_axis(axes, 0, 1)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.legend(frameon=False, fontsize=10, loc="upper left", labelcolor=THEME["soft"])
    below = add_axes(figure, 60, 350, 360, 66)
    below.bar(centers, bins.count, width, color=THEME["soft"], alpha=0.6)
    below.set_xlim(0, 1)
    below.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    below.set_yticks([0, int(bins.count.max())])
    add_text(figure, 240, 456, "confidence", align="center")
    add_text(figure, 8, 40, "accuracy, and images below")
    return figure


def plot_per_class(result: EvaluationResult) -> Figure:
    """Draw recall and precision of each class, the lowest recall first."""
    metrics = [each for each in result.per_class if each.recall is not None or each.precision is not None]
    metrics = sorted(metrics, key=lambda each: -1.0 if each.recall is None else each.recall)[:MAX_CLASSES]
    names = [f"{visible(each.name, limit=22)} ({each.count:,})" for each in metrics]
    figure, axes = _row_figure(names, title="Recall and precision by class", legend=("recall", "precision"))
    rows = range(len(metrics))
    axes.barh(rows, [each.recall or 0.0 for each in metrics], height=0.6, color=THEME["s0"], alpha=0.85)
    axes.plot([each.precision for each in metrics], rows, "o", color=THEME["s1"], markersize=7, linestyle="")  # type: ignore[arg-type]
    axes.set_xlim(0, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    return figure


# Several models or methods


def plot_fewshot(result: FewShotResult) -> Figure:
    """Draw the mean accuracy over shots of each method, with the standard deviation over seeds."""
    figure = new_figure(520, 340)
    title = f"Few-shot accuracy of {visible(result.model, limit=30)}"
    add_text(figure, 8, 22, title, size=14, color="ink", bold=True)
    axes = add_axes(figure, 60, 40, 440, 236)
    shots = list(result.shots)
    scores = [score for scores in result.methods.values() for score in scores.values()]
    for index, (method, by_shots) in enumerate(result.methods.items()):
        means, errors = zip(*((each.mean, each.std) for each in by_shots.values()), strict=True)
        positions = np.arange(len(shots)) + (index - (len(result.methods) - 1) / 2) * 0.06
        axes.errorbar(
            positions, means, errors, color=series_color(index), marker="o", linewidth=2, capsize=3, label=method
        )
    low, high = min(each.mean - each.std for each in scores), max(each.mean + each.std for each in scores)
    _percent_axis(axes, max(low, 0.0), min(high, 1.0))
    axes.set_xlim(-0.4, len(shots) - 0.6)
    axes.set_xticks(range(len(shots)), [str(count) for count in shots])
    if len(result.methods) > 1:
        axes.legend(frameon=False, fontsize=11, loc="lower right", labelcolor=THEME["soft"])
    add_text(figure, 280, 318, "training images of each class", align="center")
    return figure


def plot_comparison(result: ComparisonResult) -> Figure:
    """Draw the accuracy of each model over its training compute, or over its parameters, with 95 % intervals."""
    fields = {"exaflops": "training, exaFLOPs", "parameters": "parameters"}
    scored = [(model, model.scores) for model in result.models if model.scores]
    field = next(name for name in fields if name == "parameters" or all(getattr(model, name) for model, _ in scored))
    names = [f"{visible(model.label, limit=26)}  {scores.top1:.1%}" for model, scores in scored]
    legend = _label_width(names) + 26 if names else 0
    figure = new_figure(500 + legend, 360)
    add_text(figure, 8, 22, "Accuracy and cost", size=14, color="ink", bold=True)
    axes = add_axes(figure, 60, 44, 420, 256)
    ends = [end for _, scores in scored for end in scores.interval] or [0.0, 1.0]
    _percent_axis(axes, min(ends), max(ends))
    for index, ((model, scores), name) in enumerate(zip(scored, names, strict=True)):
        x, (low, high) = getattr(model, field), scores.interval
        error = [[max(scores.top1 - low, 0.0)], [max(high - scores.top1, 0.0)]]
        marker = MARKERS[index // len(SERIES) % len(MARKERS)]
        axes.errorbar(
            [x], [scores.top1], error, color=series_color(index), marker=marker, markersize=8, capsize=3, linestyle=""
        )
        key = add_axes(figure, 500, 50 + 20 * index, 12, 12)
        key.set_axis_off()
        key.plot([0], [0], marker, color=series_color(index), markersize=7)
        add_text(figure, 518, 60 + 20 * index, name, color="ink")
    _cost_axis(axes, [float(getattr(model, field)) for model, _ in scored])
    if not scored:
        add_text(figure, 270, 170, "no model was evaluated", align="center")
    add_text(figure, 270, 346, fields[field], align="center")
    return figure


def _cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """Use powers of ten with at most five ticks at the costs of models."""
    if not costs:
        axes.set_xticks([])
        return
    axes.set_xscale("log")
    low, high = min(costs), max(costs)
    axes.set_xlim(low / 1.6, high * 1.6)
    ticks = np.geomspace(low, high, 4).tolist() if high > 2 * low else [(low * high) ** 0.5]
    axes.set_xticks(ticks, [format_number(float(f"{tick:.2g}")) for tick in ticks])
    axes.set_xticks([], minor=True)


def plot_leaderboard(board: Leaderboard) -> Figure:
    """Draw the accuracy of each model by group of datasets, or by dataset if there are no groups."""
    rows = board.mean_rows() or list(board.rows())
    names = [visible(row.title, limit=22) for row in rows]
    figure, axes = _row_figure(names, title=visible(board.title), legend=board.models)
    values = [0.0]
    for index, row in enumerate(rows):
        for model, score in row.scores.items():
            color = board.models.index(model)
            offset = (color - (len(board.models) - 1) / 2) * min(0.16, 0.7 / len(board.models))
            values.append(score.top1)
            if score.interval is not None:
                axes.plot(score.interval, [index + offset] * 2, color=series_color(color), linewidth=3, alpha=0.35)
            axes.plot([score.top1], [index + offset], "o", color=series_color(color), markersize=6)
    axes.set_xlim(max(0.0, min(values[1:], default=0.0) - 0.05), 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    return figure


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
    picture = read_picture(result.images, index, side=2 * TILE)
    return None if picture is None else np.asarray(picture)


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
            color = series_color(index)
            axes.barh(top + bar / 2, row.images_per_second, height=bar - 2, color=color, linewidth=0)
            speed = f"{row.images_per_second:,.0f}" if row.images_per_second >= 100 else f"{row.images_per_second:.1f}"
            end = row.images_per_second + axes.get_xlim()[1] * 0.01
            axes.text(end, top + bar / 2, speed, va="center", fontsize=10, color=THEME["soft"])
    return figure


# Data


def plot_contact_sheet(summary: DataSummary) -> Figure:
    """Draw thumbnails of each class."""
    sheet = draw_contact_sheet(summary.data)
    figure = new_figure(sheet.width / 2, sheet.height / 2)
    axes = add_axes(figure, 0, 0, sheet.width / 2, sheet.height / 2)
    axes.set_axis_off()
    axes.imshow(np.asarray(sheet), aspect="auto", interpolation="none")
    return figure


def plot_data_quality(report: DataQualityReport) -> Figure:
    """Draw near-duplicates next to each other, and images with label issues next to their neighbors."""
    conflicts = set(report.conflicts)
    pairs = [*report.conflicts, *(pair for pair in report.near_duplicates if pair not in conflicts)]
    rows, heads = [], []
    for pair in pairs[:MAX_EXAMPLES]:
        rows.append([pair.one, pair.other])
        kind = "Near-duplicates with different labels" if pair in conflicts else "Near-duplicates"
        heads.append(f"{kind}, similarity {pair.pixels:.2f}")
    for issue in (report.label_issues or ())[:MAX_EXAMPLES]:
        rows.append([issue.image, *report.get_neighbors(issue)])
        suggested = report.data.classes[issue.suggested_label]
        heads.append(f"Suggested label: {visible(suggested, limit=22)}, score {issue.score:.2f}")
    if not rows:
        figure = new_figure(420, 60)
        add_text(figure, 8, 34, "No near-duplicates or label issues were found.", size=12, color="ink")
        return figure
    captions = [[f"{report.get_class(image) or 'no label'} · {image.split}" for image in row] for row in rows]
    pictures = [[_thumbnail(report.data, image) for image in row] for row in rows]
    return ImageGrid(rows=pictures, row_heads=heads, captions=captions, title="Data quality").to_figure(min_width=360)


def _thumbnail(data: Dataset, image: ImageRef, *, side: int = 192) -> Rgb:
    """Return an image on a gray square, which is empty if the image cannot be drawn."""
    picture = read_picture(data.splits[image.split], image.index, side=side) or Image.new("RGB", (1, 1), EMPTY)
    return np.asarray(ImageOps.pad(picture, (side, side), color=EMPTY))


# Parts


def _label_width(names: Sequence[str]) -> float:
    return max(map(len, names), default=0) * CHARACTER + 14


def _percent_axis(axes: Axes, low: Number, high: Number) -> None:
    """Use a vertical axis of fractions with horizontal lines."""
    ticks = [tick for tick in nice_ticks(low, high) if -0.001 <= tick <= 1.001]
    margin = 0.03 * (ticks[-1] - ticks[0])
    axes.set_ylim(ticks[0] - margin, ticks[-1] + margin)
    axes.set_yticks(ticks, [f"{100 * tick:.3g} %" for tick in ticks])
    axes.grid(axis="y", color=THEME["line"], linewidth=1)
    axes.set_axisbelow(True)


def _row_figure(names: Sequence[str], *, title: str, legend: Sequence[str]) -> tuple[Figure, Axes]:
    """Return axes with a row for each name, below a title and a legend."""
    left, height = _label_width(names), 22 * max(len(names), 1)
    width = left + 400
    figure = new_figure(width, 62 + height + 40)
    add_text(figure, 8, 22, title, size=14, color="ink", bold=True)
    x = 12.0
    for index, each in enumerate(legend):
        name = visible(each, limit=30)
        key = add_axes(figure, x, 36, 10, 10)
        key.set_axis_off()
        key.plot([0], [0], "o", color=series_color(index), markersize=7)
        add_text(figure, x + 14, 45, name)
        x += 30 + CHARACTER * len(name)
    axes = add_axes(figure, left, 58, width - left - 24, height)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.grid(axis="x", color=THEME["line"], linewidth=1)
    axes.set_axisbelow(True)
    return figure, axes


# Cost


def plot_cost(result: Cost) -> Figure:
    """Draw the forward FLOPs of each part of a model as bars."""
    bar, left, width = 22, 150, 380
    height = bar * len(result.parts)
    figure = new_figure(left + width + 90, 64 + height)
    title = f"{result.model}: {result.forward_flops / 1e9:.1f} GFLOPs per image"
    add_text(figure, 8, 22, title, size=14, color="ink", bold=True)
    axes = add_axes(figure, left, 44, width, height)
    axes.set_xlim(0, max(result.parts.values()))
    axes.set_ylim(len(result.parts) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(len(result.parts)), list(result.parts))
    axes.barh(range(len(result.parts)), list(result.parts.values()), height=0.8, color=SERIES["s0"], linewidth=0)
    for number, flops in enumerate(result.parts.values()):
        text = f" {flops / 1e9:.2f} ({flops / result.forward_flops:.1%})"
        axes.text(flops, number, text, va="center", fontsize=10, color=THEME["soft"])
    return figure
