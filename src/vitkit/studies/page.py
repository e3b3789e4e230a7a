"""Report page of a study: verdicts, figure, the paper's numbers, table and links to the runs."""

from typing import TYPE_CHECKING

from vitkit.core.formatting import MISSING, format_plural
from vitkit.report.figures import Chart
from vitkit.report.html import Card, Section, render_page, template_macros
from vitkit.studies.figures import draw_figure

if TYPE_CHECKING:
    from vitkit.studies.runner import StudyResult


def render_study(result: "StudyResult") -> str:
    """Render the page."""
    study, macros = result.study, template_macros("study.html")
    finished = sum(run.status == "finished" for run in result.runs)
    chart = Chart(title=study.title, figure=draw_figure(study, result.table))
    sections = [
        Section("claims", "Claims", macros.claims(result.claims)),
        Section("figure", "Figure", macros.figure(chart.to_html(), study)),
        Section(
            "table",
            "Table",
            macros.table(study.columns, [[_cell(row[column]) for column in study.columns] for row in result.table]),
        ),
        Section("runs", "Runs", macros.runs(result.runs)),
    ]
    notices = list(result.warnings)
    if finished < len(result.runs):
        left = format_plural(len(result.runs) - finished, "run")
        notices.append(f"{left} left, about {result.hours:.1f} hours: the same command resumes.")
    verdicts = [
        Card(f"Claim {number}", claim.verdict, claim.text) for number, claim in enumerate(result.claims, start=1)
    ]
    quick = "quick, " if result.quick else ""
    lead = f"{study.paper or 'A study'}, {quick}{finished} of {format_plural(len(result.runs), 'run')} finished"
    return render_page(title=study.title, lead=lead, sections=sections, cards=verdicts, notices=notices)


def _cell(value: object) -> str:
    if value is None:
        return MISSING
    return f"{value:.4g}" if isinstance(value, float) else str(value)
