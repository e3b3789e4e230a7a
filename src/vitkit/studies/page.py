"""Report page of a study: verdicts, figure, the paper's numbers, means, table and links to the runs."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vitkit.core.formatting import MISSING, format_hours, format_plural
from vitkit.report.figures import Chart
from vitkit.report.html import Card, Section, render_page, template_macros
from vitkit.studies.dispatch import REPORT_SECONDS
from vitkit.studies.figures import describe_name, draw_figure, estimate_groups, fit_lines, format_tick
from vitkit.studies.statistics import PowerLaw
from vitkit.studies.study import SEED, Study, is_fraction

if TYPE_CHECKING:
    from vitkit.studies.runner import StudyResult

Rows = Sequence[Mapping[str, object]]


def render_study(result: "StudyResult", *, drawings: Mapping[str, Sequence[tuple[str, Chart]]]) -> str:
    """Render the page; `drawings` are further ones by model."""
    study, macros = result.study, template_macros("study.html")
    chart = Chart(title=study.title, figure=draw_figure(study, result.table))
    fits = [format_fit(name, law) for name, law in fit_lines(study, result.table).items()]
    heads, rows = average_rows(study, result.table)
    cells = [[format_cell(column, row[column]) for column in study.columns] for row in result.table]
    sections = [
        Section("claims", "Claims", macros.claims(result.claims)),
        Section("figure", "Figure", macros.figure(chart.to_html(), study, fits)),
        Section("means", "Means over seeds", macros.means(heads, rows)),
        Section("table", "Table", macros.table(list(map(describe_name, study.columns)), cells)),
        Section("runs", "Runs", macros.runs(result.runs, link_runs(result))),
    ]
    if drawings:
        charts_by_model = {
            name: [(title, each.to_html()) for title, each in charts] for name, charts in drawings.items()
        }
        sections.insert(2, Section("models", "Filters and positions", macros.models(charts_by_model)))
    notices, left = list(result.warnings), len(result.runs) - result.finished
    if left:
        notices.append(
            f"{format_plural(left, 'run')} left, about {format_hours(result.hours)}: the same command resumes."
        )
    verdicts = [
        Card(f"Claim {number}", claim.verdict, claim.text) for number, claim in enumerate(result.claims, start=1)
    ]
    quick = "quick, " if result.quick else ""
    if result.steps:
        quick += f"{format_range(*result.steps)} steps a run, "
    lead = f"{study.paper or 'A study'}, {quick}{result.finished} of {format_plural(len(result.runs), 'run')} finished"
    refresh = REPORT_SECONDS if left else None
    return render_page(
        title=study.title, lead=lead, sections=sections, cards=verdicts, notices=notices, refresh=refresh
    )


def format_range(low: int, high: int) -> str:
    """Format a range of whole numbers.

    >>> format_range(20, 20), format_range(100, 3900)
    ('20', '100 to 3,900')
    """
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def link_runs(result: "StudyResult") -> dict[str, str]:
    """Return the addresses of the reports of finished runs, relative to the page."""
    assert result.report_path is not None
    directory = result.report_path.parent
    return {
        run.name: os.path.relpath(run.path / "report.html", directory)
        for run in result.runs
        if run.status == "finished"
    }


def average_rows(study: Study, table: Rows) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the means over seeds, with the paper's number where there is one."""
    axes = ["model", "layer"] if study.inspects else list(study.all_axes)
    numbers = [study.figure.column, *filter(is_fraction, study.columns)]
    numbers = list(dict.fromkeys(name for name in numbers if any(row[name] is not None for row in table)))
    extra = [] if study.inspects else ["flops", "images_per_second", "hours"]
    groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for row in table:
        groups.setdefault(tuple(str(row[axis]) for axis in axes), []).append(row)
    rows, previous = [], set[str]()
    for labels, members in groups.items():
        means = [format_mean(name, members) for name in (*numbers, *extra)]
        paper = next((study.paper_numbers[label] for label in labels if label in study.paper_numbers), MISSING)
        paper = "" if paper in previous else paper  # a statement about several rows stands in the first
        previous.update({paper} - {MISSING})
        seeds = str(len({row[SEED] for row in members}))
        rows.append([*labels, seeds, *means[:1], *([paper] if study.paper_numbers else []), *means[1:]])
    heads = [*axes, "seeds", *numbers[:1], *(["in the paper"] if study.paper_numbers else []), *numbers[1:], *extra]
    return list(map(describe_name, heads)), rows


def format_mean(column: str, rows: Rows) -> str:
    """Format the mean of a column over seeds with its interval."""
    mean = estimate_groups(rows, column, lambda row: None).get(None)
    if mean is None:
        return MISSING
    if not is_fraction(column):
        return format_cell(column, mean.mean)
    half = f" ± {(mean.interval[1] - mean.mean) * 100:.1f}" if mean.interval else ""
    return f"{mean.mean * 100:.1f}{half} %"


def format_cell(column: str, value: object) -> str:
    """Format a value of the table.

    >>> format_cell("top1", 0.5), format_cell("flops", 3e14), format_cell("seed", 1)
    ('50.00 %', '3·10¹⁴', '1')
    """
    if value is None:
        return MISSING
    if isinstance(value, float):
        if is_fraction(column):
            return f"{value * 100:.2f} %"
        return format_tick(value) if column == "flops" else f"{value:.3g}"
    return str(value)


def format_fit(name: str, law: PowerLaw) -> tuple[str, ...]:
    """Format a fitted curve: its name, a, b and c with intervals."""
    intervals = law.intervals()
    values = zip("abc", (law.a, law.b, law.c), strict=True)
    if intervals is None:
        return (name, *(f"{value:.3g}" for _, value in values))
    return (name, *(f"{value:.3g} ({intervals[key][0]:.3g} to {intervals[key][1]:.3g})" for key, value in values))
