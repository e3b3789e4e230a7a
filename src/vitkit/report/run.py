"""Run report: curves, metrics, mistakes, compute and configuration of a finished run on one page."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from vitkit.core.formatting import format_count, format_percent, format_plural
from vitkit.evaluation.evaluation import EvaluationResult
from vitkit.report.charts import Panel, confusion_heatmap, line_chart, reliability_diagram
from vitkit.report.html import Card, Section, asset, format_interval, render_page, template_macros, visible

MAX_DRAWN_CLASSES = 30
MAX_PAIRS = 12

Rows = tuple[tuple[str, str], ...]
"""Labels with their values."""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The dataset of a run: its layout, its name, its classes and the images of each split."""

    layout: str
    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class MistakeExample:
    """A wrong prediction with its picture (a file made by `thumbnail`), or None if it cannot be shown."""

    picture: bytes | None
    file: str
    target: str
    predicted: str
    probability: float
    target_probability: float


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A run in the comparison table, with further columns by name."""

    label: str
    top1: float
    interval: tuple[float, float] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Content of the page. Empty parts are omitted, or stated to be missing where a reader expects them."""

    title: str
    model: str
    parameters: int
    data: ReportData
    config: str
    """The resolved configuration as TOML."""
    curves: tuple[Panel, ...] = ()
    evaluations: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """By split; the page shows `test`, else the last."""
    mistakes: tuple[MistakeExample, ...] = ()
    """Of the split that the page shows."""
    comparison: tuple[ComparisonRow, ...] = ()
    trials: tuple[ComparisonRow, ...] = ()
    """Models that were tried on held-out images before this one."""
    compute: Rows = ()
    speed: tuple[Panel, ...] = ()
    wall_time: str | None = None
    environment: Rows = ()
    bad_files: int = 0
    notes: tuple[str, ...] = ()
    not_evaluated: str = "There were no images to validate or test on: accuracy was not measured."
    """Notice if there is no evaluation."""
    reconstructions: bytes | None = None
    """PNG of images, the input of a self-supervised model and its reconstruction."""
    next_steps: Rows = ()
    """Descriptions and commands."""


def render_run_report(report: RunReport) -> str:
    """Render the page; equal reports give equal pages."""
    macros = template_macros("run.html")
    split = "test" if "test" in report.evaluations else next(iter(reversed(list(report.evaluations))), None)
    sections = [Section("curves", "Curves", macros.panels(list(map(line_chart, report.curves))))]
    if report.reconstructions:
        sections.append(Section("reconstructions", "Reconstructions", macros.reconstructions(report.reconstructions)))
    for name, rows in (("comparison", report.comparison), ("trials", report.trials)):
        if rows:
            columns = list(dict.fromkeys(column for row in rows for column in row.columns))
            best = max(row.top1 for row in rows)
            sections.append(Section(name, name.capitalize(), macros.comparison(rows, columns, best)))
    if split is not None:
        sections += _evaluation_sections(report, split)
    counts = ((f"{name} images", f"{count:,}") for name, count in report.data.counts.items())
    classes = f"{len(report.data.classes):,}"
    facts = (("layout", report.data.layout), ("source", report.data.source), ("classes", classes))
    sections += [
        Section("compute", "Compute", macros.compute(report.compute, list(map(line_chart, report.speed)))),
        Section("data", "Data", macros.data((*facts, *counts), report.data.classes)),
        Section("configuration", "Configuration", macros.configuration(report.environment, report.config)),
    ]
    if report.next_steps:
        sections.append(Section("next", "Next steps", macros.next_steps(report.next_steps)))
    return render_page(
        title=report.title,
        lead=macros.lead(report),
        sections=sections,
        cards=_cards(report, split),
        notices=_notices(report, split),
        script=asset("report.js"),
    )


def _cards(report: RunReport, split: str | None) -> list[Card]:
    cards = []
    if split is not None:
        result = report.evaluations[split]
        interval = format_interval(result.intervals.get("top1"))
        detail = f"95 %: {interval}" if interval else ""
        cards.append(Card(f"Top-1 on {visible(split)}", format_percent(result.top1), detail))
        if len(result.labels) > 5:
            cards.append(Card("Top-5", format_percent(result.top5), "true class among the five likeliest"))
        cards.append(Card("Calibration error", format_percent(result.ece), "ECE: confidence against accuracy"))
    images = sum(report.data.counts.values())
    splits = " · ".join(f"{visible(name)} {count:,}" for name, count in report.data.counts.items())
    cards.append(Card("Images", f"{images:,}", splits))
    parameters = f"{visible(report.model)}, {report.parameters:,}"
    cards.append(Card("Parameters", format_count(report.parameters), parameters))
    if report.wall_time is not None:
        cards.append(Card("Time", visible(report.wall_time), "from start to end"))
    return cards


def _notices(report: RunReport, split: str | None) -> list[str]:
    notices = [] if split is not None else [report.not_evaluated]
    if report.bad_files:
        count = format_plural(report.bad_files, "file")
        notices.append(f"{count} could not be read and took no part; bad_files.csv has the reasons.")
    return [visible(notice, limit=600) for notice in (*notices, *report.notes)]


def _evaluation_sections(report: RunReport, split: str) -> list[Section]:
    macros, result = template_macros("run.html"), report.evaluations[split]
    splits = Section("splits", "Splits", macros.splits(report.evaluations))
    classes = sorted(result.per_class, key=lambda each: 2.0 if each.recall is None else each.recall)
    confidence = float(result.confidences.mean())
    diagram = reliability_diagram(result.calibration)
    wrong = int((result.targets != result.predictions).sum())
    return [
        *([splits] if len(report.evaluations) > 1 else []),
        Section("confusion", "Confusion", _confusion(result, split)),
        Section("calibration", "Calibration", macros.calibration(result, confidence, diagram)),
        Section("classes", "Classes", macros.classes(classes)),
        Section("mistakes", "Mistakes", macros.mistakes(result, wrong, report.mistakes)),
    ]


def _confusion(result: EvaluationResult, split: str) -> Markup:
    confusion, counts = result.confusion, [each.count for each in result.per_class]
    wrong = np.flatnonzero(confusion.row != confusion.column)
    wrong = wrong[np.argsort(-confusion.count[wrong], kind="stable")]
    confused = np.stack([confusion.row, confusion.column, confusion.count], axis=1)[wrong]
    drawn = list(range(len(result.labels)))
    if len(drawn) > MAX_DRAWN_CLASSES:
        drawn = sorted(list(dict.fromkeys([*confused[:, :2].ravel().tolist(), *drawn]))[:MAX_DRAWN_CLASSES])
    heatmap = confusion_heatmap(
        confusion.matrix(np.array(drawn)),
        names=[result.labels[label] for label in drawn],
        totals=np.array([counts[label] for label in drawn]),
    )
    pairs = [
        {
            "target": result.labels[target],
            "predicted": result.labels[predicted],
            "images": images,
            "fraction": images / counts[target],
        }
        for target, predicted, images in confused[:MAX_PAIRS].tolist()
    ]
    return Markup(template_macros("run.html").confusion(result, split, len(drawn), heatmap, pairs))
