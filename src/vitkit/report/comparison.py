"""Comparison report: tables, differences with intervals, and accuracy against cost."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from vitkit.core.files import write_csv, write_json, write_text
from vitkit.core.formatting import format_number, format_percent
from vitkit.evaluation.comparison import ComparisonResult, Difference
from vitkit.report.charts import Dot, DotGroup, nice_ticks, row_chart, standalone_svg
from vitkit.report.html import Card, Section, asset, name_tag, render_page, template_macros, visible
from vitkit.report.scatter import LABEL_LIMIT, Point, scatter

COSTS = {
    "exaflops": ("exaflops", "Accuracy against training compute", "training, exaFLOPs"),
    "parameters": ("parameters", "Accuracy against size", "parameters"),
    "speed": ("speed", "Accuracy against speed", "images per second"),
}
"""Field of a model, title and horizontal axis of each chart."""


def render_comparison(comparison: ComparisonResult) -> str:
    """Render the page; equal comparisons give equal pages."""
    macros = template_macros("comparison.html")
    charts = draw_charts(comparison)
    sections = [Section("results", "Results", macros.results(comparison))]
    if comparison.differences:
        body = macros.differences(comparison.differences, charts.pop("differences")[1])
        sections.append(Section("differences", "Differences", body))
    if charts:
        sections.append(Section("charts", "Accuracy and cost", macros.charts(charts.values())))
    sections.append(Section("models", "Models", macros.models(comparison)))
    lead = (
        f"all evaluated on {visible(comparison.data, limit=160)}" if comparison.data else "each as evaluated by its run"
    )
    return render_page(
        title=f"{len(comparison.models)} models compared",
        lead=lead,
        sections=sections,
        cards=_cards(comparison),
        notices=comparison.warnings,
        script=asset("report.js"),
    )


def render_comparison_files(comparison: ComparisonResult) -> dict[str, str]:
    """Return the contents of report.html and of an SVG file for each chart."""
    charts = {f"{name}.svg": standalone_svg(drawing) for name, (_, drawing) in draw_charts(comparison).items()}
    return charts | {"report.html": render_comparison(comparison)}


def write_comparison(comparison: ComparisonResult, directory: Path) -> None:
    """Write the page, the charts, compare.csv and compare.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "compare.json", comparison.to_dict())
    write_csv(directory / "compare.csv", csv_rows(comparison), CSV_COLUMNS)
    for name, content in render_comparison_files(comparison).items():
        write_text(directory / name, content)


CSV_COLUMNS = (
    *("label", "model", "family", "top1", "low", "high", "top5", "mean_per_class", "ece", "count", "evaluated_on"),
    *("parameters", "gflops", "exaflops", "seconds", "training_speed", "speed"),
)


def csv_rows(comparison: ComparisonResult) -> list[dict[str, object]]:
    """Return a row for each model, with the keys of CSV_COLUMNS."""
    rows = []
    for model in comparison.models:
        low, high = model.scores.interval if model.scores else (None, None)
        row = model.to_dict() | {"low": low, "high": high}
        rows.append({name: row[name] for name in CSV_COLUMNS})
    return rows


def draw_charts(comparison: ComparisonResult) -> dict[str, tuple[str, Markup]]:
    """Return title and drawing of each chart by file name; a chart without points is omitted."""
    costs = dict(COSTS)
    # Training speed depends on the machine and load of each run, so speeds measured side by side are preferred.
    if not any(model.speed for model in comparison.models):
        costs["speed"] = ("training_speed", "Accuracy against training speed", "images per second in training")
    charts = {}
    for name, (field, title, x_title) in costs.items():
        points = [
            Point(label=model.label, family=model.family, x=float(x), y=scores.top1, interval=scores.interval)
            for model in comparison.models
            if (scores := model.scores) and (x := getattr(model, field))
        ]
        if drawing := scatter(points, title=title, x_title=x_title):
            charts[name] = (title, drawing)
    if comparison.differences:
        charts["differences"] = ("Differences", difference_chart(comparison.differences))
    return charts


def difference_chart(differences: Sequence[Difference]) -> Markup:
    """Draw each difference with its interval, in percentage points of accuracy."""
    groups, ends = [], [0.0]
    for each in differences:
        low, high = (100 * end for end in each.interval)
        ends += [low, high, 100 * each.estimate]
        color = 4 if not each.is_significant else 0 if each.estimate > 0 else 1
        dot = Dot(value=100 * each.estimate, color=color, tooltip=each.describe(), interval=(low, high))
        groups.append(DotGroup(name=visible(each.model, limit=LABEL_LIMIT), dots=[dot]))
    return row_chart(
        groups,
        ticks=[(tick, f"{tick:+g}".replace("-", "−") if tick else "0") for tick in nice_ticks(min(ends), max(ends))],
        title="Differences",
        x_title=f"points of top-1 against {visible(differences[0].baseline, limit=LABEL_LIMIT)}",
    )


def _cards(comparison: ComparisonResult) -> list[Card]:
    cards = []
    scored = [(model, model.scores) for model in comparison.models if model.scores]
    if scored:
        best, scores = max(scored, key=lambda pair: pair[1].top1)
        smallest, _ = min(scored, key=lambda pair: pair[0].parameters)
        cards.append(Card("Best", format_percent(scores.top1), name_tag(best.label)))
        cards.append(Card("Smallest", format_number(smallest.parameters), name_tag(smallest.label)))
    trained = [(model.exaflops, model.label) for model in comparison.models if model.exaflops]
    if trained:
        exaflops, label = min(trained)
        cards.append(Card("Least training", format_number(exaflops), Markup("exaFLOPs: ") + name_tag(label)))
    speeds = [(model.speed, model.label) for model in comparison.models if model.speed]
    if speeds:
        speed, label = max(speeds, key=lambda pair: pair[0])
        cards.append(Card("Fastest", format_number(speed), Markup("images per second: ") + name_tag(label)))
    return cards
