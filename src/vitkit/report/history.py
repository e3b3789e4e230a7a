"""Curves of a run over its steps."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from vitkit.report.figures import THEME, add_axes, add_text, new_figure, series_color

PANELS = {
    "Loss": {"train": "loss", "val": "val_loss"},
    "Accuracy": {"train": "top1", "val": "val_top1"},
    "Patch accuracy": {"train": "patch_accuracy", "val": "val_patch_accuracy"},
    "Learning rate": {"rate": "lr"},
    "Gradient norm": {"norm": "gradient_norm"},
}
"""Metrics of each panel, by the names of their lines."""
WIDTH, HEIGHT, MARGIN = 300, 150, 56


def plot_history(steps: Sequence[int], metrics: Mapping[str, Sequence[float | None]]) -> Figure:
    """Draw the metrics over the steps, in panels next to each other; values that are None are left out."""
    panels = {
        title: {name: key for name, key in lines.items() if any(value is not None for value in metrics.get(key, ()))}
        for title, lines in PANELS.items()
    }
    panels = {title: lines for title, lines in panels.items() if lines}
    rows = max(1, -(-len(panels) // 2))
    figure = new_figure(2 * (WIDTH + MARGIN), rows * (HEIGHT + 2 * MARGIN))
    for number, (title, lines) in enumerate(panels.items()):
        left, top = MARGIN + number % 2 * (WIDTH + MARGIN), MARGIN + number // 2 * (HEIGHT + 2 * MARGIN)
        axes = add_axes(figure, left, top, WIDTH - MARGIN / 2, HEIGHT)
        add_text(figure, left, top - 16, title, size=14, color="ink", bold=True)
        axes.grid(visible=True, color=THEME["line"])
        for series, (name, key) in enumerate(lines.items()):
            points = [(step, value) for step, value in zip(steps, metrics[key], strict=True) if value is not None]
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), color=series_color(series), label=name, marker=marker)
        axes.set_xlabel("step", color=THEME["soft"])
        if len(lines) > 1:
            axes.legend(frameon=False)
    return figure
