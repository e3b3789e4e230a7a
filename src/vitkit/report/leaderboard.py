"""Leaderboard report: the table of models on datasets (Table 2 of the paper) and its charts (Figure 2)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from markupsafe import Markup

from vitkit.core.formatting import format_percent, format_plural
from vitkit.evaluation.leaderboard import Leaderboard, LeaderboardRow
from vitkit.report.charts import Dot, DotGroup, column_chart, fraction_ticks, percent_ticks, row_chart, standalone_svg
from vitkit.report.html import Card, Section, name_tag, render_page, template_macros, visible


def render_leaderboard(board: Leaderboard) -> str:
    """Render the page: mean scores, the table and the charts."""
    macros = template_macros("leaderboard.html")
    sections = [Section("table", "Table", macros.table(board, list(board.rows())))]
    if board.groups:
        sections.append(Section("groups", "Groups", macros.figure(group_chart(board))))
    sections.append(Section("datasets", "Datasets", macros.figure(dataset_chart(board))))
    notices = [] if board.is_complete else ["Not everything is finished: run the suite again to resume."]
    if board.missing:
        names = ", ".join(visible(dataset.title) for dataset in board.missing)
        notices.append(f"Left out, because their images are missing: {names}.")
    return render_page(
        title=board.title,
        lead=f"{format_plural(len(board.datasets), 'dataset')}, {format_plural(len(board.models), 'model')}",
        sections=sections,
        cards=_cards(board),
        notices=notices,
    )


def leaderboard_svg(board: Leaderboard) -> str:
    """Return the chart as an SVG file: groups if there are any, else datasets."""
    drawing = group_chart(board) if board.groups else dataset_chart(board)
    macros = template_macros("charts.html")
    title = macros.text(12, -8, board.title, css=macros.bold)
    opening, _, rest = str(drawing).partition(">")
    _, _, width, height = opening.partition('viewBox="')[2].partition('"')[0].split()
    size = f'viewBox="0 -30 {width} {int(height) + 30}" width="{width}" height="{int(height) + 30}"'
    opening = opening.replace(f'viewBox="0 0 {width} {height}"', size)
    return standalone_svg(f"{opening}>{title}{rest}")


def _cards(board: Leaderboard) -> list[Card]:
    means = [row for row in board.mean_rows() if row.kind == "mean"]
    cards = []
    for row, model in product(means, board.models):
        top1 = row.scores[model].top1 if model in row.scores else None
        cards.append(Card(name_tag(model), format_percent(top1, 2), f"{visible(row.title)}, {row.description}"))
    return cards


def dataset_chart(board: Leaderboard) -> Markup:
    """Draw a row for each dataset and mean, with a dot and an interval for each model."""
    rows = list(board.rows())
    groups = [_dot_group(board, row, limit=24 if row.kind == "dataset" else 16) for row in rows]
    return row_chart(groups, ticks=_ticks(rows), title="Accuracy by dataset", legend=board.models)


def group_chart(board: Leaderboard) -> Markup:
    """Draw the means side by side: over all datasets, then by group, with a dot for each model (Figure 2)."""
    rows = board.mean_rows()
    groups = [replace(_dot_group(board, row, limit=14), bold=row.kind == "mean") for row in rows]
    return column_chart(groups, ticks=_ticks(rows), title="Mean accuracy by group", legend=board.models)


def _dot_group(board: Leaderboard, row: LeaderboardRow, *, limit: int) -> DotGroup:
    is_mean = row.kind != "dataset"
    dots = [
        Dot(
            value=score.top1,
            color=board.models.index(model),
            tooltip=f"{visible(model)} on {visible(row.title)}: {score.top1:.2%}",
            interval=score.interval,
        )
        for model, score in row.scores.items()
    ]
    name = visible(row.title, limit=limit) + (f" ({row.count})" if is_mean else "")
    return DotGroup(name=name, dots=dots, bold=is_mean)


def _ticks(rows: Sequence[LeaderboardRow]) -> list[tuple[float, str]]:
    scores = [score for row in rows for score in row.scores.values()]
    fractions = [value for score in scores for value in (score.top1, *(score.interval or ()))]
    return percent_ticks(fraction_ticks(fractions, min_range=0.02, margin=0.05))
