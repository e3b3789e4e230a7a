"""Draw learning.svg, the learning curves of the small runs in docs/experiments.md.

Run it in the root of the repository, next to `runs/`: .venv/bin/python docs/pictures/curves.py
Missing runs are skipped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitkit.report.charts import nice_ticks

RUNS = Path("runs")
PICTURE = Path(__file__).with_name("learning.svg")
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 400, 250, 56, 60, 70
INK, QUIET, LINE, PAPER = "#1f2933", "#5b6875", "#dde3e9", "#ffffff"
COLORS = ("#2563eb", "#d9480f", "#6b7280")
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Curve:
    """Accuracy over thousands of training images, which does not depend on the speed of the machine."""

    name: str
    images: tuple[float, ...]
    accuracy: tuple[float, ...]


def read_run(name: str, directory: Path) -> list[Curve]:
    """Read the validation accuracy of a finished run of vitkit."""
    if not (directory / "summary.json").is_file():
        return []
    compute = json.loads((directory / "summary.json").read_bytes())["compute"]
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [(record["step"], record["val_top1"]) for record in records if "val_top1" in record]
    thousands = compute["images_seen"] / 1000 / max(record["step"] for record in records)
    return [Curve(name, tuple(step * thousands for step, _ in evaluations), tuple(top1 for _, top1 in evaluations))]


def read_timm(name: str, file: Path) -> list[Curve]:
    """Read the test accuracy of the run of bench/timm_cifar10.py."""
    if not file.is_file():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    images = (row["seconds"] * row["images_per_second"] / 1000 for row in rows)
    return [Curve(name, tuple(images), tuple(row["top1"] for row in rows))]


def text(x: float, y: float, content: str, *, anchor: str = "middle", fill: str = QUIET, weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{content}</text>'


def panel(title: str, curves: Sequence[Curve], *, left: float) -> str:
    """Draw one chart with axes and a legend."""
    x_ticks = nice_ticks(0, max(curve.images[-1] for curve in curves))
    y_ticks = nice_ticks(min(min(curve.accuracy) for curve in curves), max(max(curve.accuracy) for curve in curves))

    def position(images: float, accuracy: float) -> tuple[float, float]:
        across = (images - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (accuracy - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + across * PANEL_WIDTH, TOP + (1 - up) * PANEL_HEIGHT

    parts = [text(left, 26, title, anchor="start", fill=INK, weight=600)]
    for tick in y_ticks:
        x, y = position(x_ticks[0], tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}h{PANEL_WIDTH}" stroke="{LINE}"/>')
        parts.append(text(x - 8, y + 4, f"{tick:.0%}", anchor="end"))
    for tick in x_ticks:
        x, _ = position(tick, y_ticks[0])
        parts.append(text(x, TOP + PANEL_HEIGHT + 20, f"{tick:g}"))
    parts.append(text(left + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 40, "thousand images seen"))
    for number, (curve, color) in enumerate(zip(curves, COLORS, strict=False)):
        points = [position(*point) for point in zip(curve.images, curve.accuracy, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        # The legend is below the curves, which rise.
        across, down = left + PANEL_WIDTH - 12, TOP + PANEL_HEIGHT - 14 - 20 * (len(curves) - 1 - number)
        parts.append(
            text(across, down, f"{curve.name}: {curve.accuracy[-1]:.1%}", anchor="end", fill=color, weight=600)
        )
    return "".join(parts)


def main() -> None:
    """Draw the curves of all runs that exist."""
    panels = {
        "Fashion-MNIST, held-out images": read_run("from scratch", RUNS / "fashion"),
        "CIFAR-10, held-out images": [
            *read_run("after fractals", RUNS / "cifar10-after"),
            *read_run("from scratch", RUNS / "cifar10"),
            *read_timm("timm's ViT and defaults", RUNS / "timm-cifar10.jsonl"),
        ],
    }
    drawn = {title: curves for title, curves in panels.items() if curves}
    width, height = LEFT + len(drawn) * (PANEL_WIDTH + GAP), TOP + PANEL_HEIGHT + 56
    body = "".join(
        panel(title, curves, left=LEFT + number * (PANEL_WIDTH + GAP))
        for number, (title, curves) in enumerate(drawn.items())
    )
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{SANS}" font-size="13" role="img" aria-label="Accuracy over images seen">'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>{body}</svg>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
