"""Standings of models on data sets go in; a page and pictures come out, in the form of Table 2 and Figure 2."""

import html
from collections.abc import Sequence

from vitkit.evaluate.plots import bar, escape, name_tag, nice_ticks, visible
from vitkit.evaluate.shell import asset, document
from vitkit.evaluate.standings import Line, Standings

_COLOURS = 6  # the style sheet's classes s0 … s5
_WIDTH, _LEFT, _RIGHT = 560, 176, 20
_ROW, _TITLE = 24, 30
_STRONG = 'style="font-weight:600;fill:var(--ink)"'
Number = int | float
Drawing = tuple[str, Number]
"""The marks of a picture, and how high it is."""


def picture(standings: Standings) -> str:
    """The picture as a file of its own: the groups side by side where there are groups, else every data set.

    >>> from vitkit.evaluate.standings import Place, Score
    >>> pets = Place(name="pets", title="Pets")
    >>> table = Standings(title="One", models=("B/16",), places=(pets,), scores={("pets", "B/16"): Score(top1=0.9)})
    >>> picture(table).startswith("<svg xmlns"), "B/16 on Pets: 90.00%" in picture(table)
    (True, True)
    """
    marks, height = groups_drawing(standings) if standings.groups else sets_drawing(standings)
    style = asset("report.css").replace("]]>", "")
    title = html.escape(visible(standings.title, limit=60))
    size = f'width="{_WIDTH}" height="{height + _TITLE:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + _TITLE:.0f}" {size} '
        f'font-family="sans-serif"><style><![CDATA[{style}]]></style><rect {size} style="fill:var(--card)"/>'
        f'<text x="12" y="26" style="font-weight:600;fill:var(--ink)">{title}</text>'
        f'<g transform="translate(0 {_TITLE})">{marks}</g></svg>\n'
    )


def page(standings: Standings) -> str:
    """The page: cards, the table, and the pictures. Names come from strangers and are escaped.

    >>> page(Standings(title="None yet", models=(), places=(), scores={})).startswith("<!doctype html>")
    True
    """
    sections = [("table", "Table", _table(standings))]
    if standings.groups:
        sections.append(("groups", "Groups", _figure(groups_drawing(standings), title="Mean accuracy by group")))
    sections.append(("sets", "Data sets", _figure(sets_drawing(standings), title="Accuracy by data set")))
    models = "1 model" if len(standings.models) == 1 else f"{len(standings.models):,} models"
    sets = "1 data set" if len(standings.places) == 1 else f"{len(standings.places):,} data sets"
    notes = [] if standings.is_complete else ["Not everything is finished: run the suite again to go on."]
    if standings.left_out:
        names = ", ".join(visible(place.title) for place in standings.left_out)
        notes.append(f"Left out, since their images are not there: {names}.")
    notices = "".join(f'<div class="notice">{escape(note, limit=2000)}</div>' for note in notes)
    return document(title=standings.title, lead=f"{sets}, {models}", top=_cards(standings) + notices, sections=sections)


def _cards(standings: Standings) -> str:
    """What each model has in the mean, or where there is none the share of data sets that are done."""
    means = [line for line in standings.means() if line.kind == "mean"]
    if not means:
        return ""
    tiles = "".join(
        f'<div class="card{" first" if number == 0 else ""}"><div class="what">{name_tag(model)}</div>'
        f'<div class="number">{_percent(means[0], model)}</div>'
        f'<div class="more">{escape(means[0].title)}, {means[0].about}</div></div>'
        for number, model in enumerate(standings.models)
    )
    return f'<div class="cards">{tiles}</div>'


def _percent(line: Line, model: str) -> str:
    return f"{line.scores[model].top1 * 100:.2f} %" if model in line.scores else "–"


def _table(standings: Standings) -> str:
    alone = len(standings.models) == 1
    heads = "".join(
        f'<th class="n" title="{escape(model, limit=400)}"><bdi>{escape(model, limit=24)}</bdi></th>'
        for model in standings.models
    )
    rows = []
    for line in standings.lines():
        best = max((score.top1 for score in line.scores.values()), default=None)
        cells = "".join(_cell(line, model, best=None if alone else best) for model in standings.models)
        title = name_tag(line.title)
        if line.kind != "set":
            title = f"<b>{title}</b>, {line.about}"
        only = next(iter(line.scores.values()), None) if alone else None
        barred = f'<td class="barred wide">{bar(only.top1) if only else ""}</td>' if alone else ""
        rows.append(f"<tr><td>{title}</td>{cells}{barred}</tr>")
    beside = '<th class="wide"></th>' if alone else ""
    head = f"<tr><th></th>{heads}{beside}</tr>"
    about = '<p class="about">Share of right answers on the test images, in per cent.</p>'
    return f'{about}<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cell(line: Line, model: str, *, best: float | None) -> str:
    score = line.scores.get(model)
    if score is None:
        return '<td class="n">–</td>'
    told = "" if score.interval is None else f"95 %: {score.interval[0] * 100:.1f}–{score.interval[1] * 100:.1f}"
    told += "" if score.count is None else f" of {score.count:,} images"
    number = f"{score.top1 * 100:.2f}"
    shown = f"<b>{number}</b>" if score.top1 == best else number
    return f'<td class="n" title="{html.escape(told)}">{shown}</td>'


def _figure(drawing: Drawing, *, title: str) -> str:
    marks, height = drawing
    size = "min-width:460px;max-width:780px"  # on a phone it is pushed aside rather than made too small to read
    return (
        f'<div class="scroll"><figure class="chart" style="{size}"><svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{title}">{marks}</svg></figure></div>'
    )


# Pictures


def _legend(models: Sequence[str], *, top: Number) -> Drawing:
    """A dot and a name for each model, in as many lines as they need."""
    parts, x, y = [], 12.0, float(top)
    for number, model in enumerate(models):
        name = visible(model, limit=36)
        width = 26 + 7.0 * len(name)
        if x > 12 and x + width > _WIDTH:
            x, y = 12.0, y + 18
        parts.append(_dot(x + 5, y - 4, number % _COLOURS))
        parts.append(f'<text class="tick" x="{x + 15:.1f}" y="{y:.1f}">{html.escape(name)}</text>')
        x += width
    return "".join(parts), y + 12


def _dot(x: Number, y: Number, colour: int, told: str = "") -> str:
    title = f"<title>{html.escape(told)}</title>" if told else ""
    place, filled = f'cx="{x:.1f}" cy="{y:.1f}" r="3"', f"fill:var(--s{colour});stroke-width:4"
    return f'<circle class="line s{colour}" {place} style="{filled}">{title}</circle>'


def _ticks(lines: Sequence[Line]) -> list[float]:
    """Round shares around everything that is drawn."""
    shares = [share for line in lines for score in line.scores.values() for share in (score.interval or (score.top1,))]
    shares += [score.top1 for line in lines for score in line.scores.values()]
    if not shares:
        return [0.0, 0.5, 1.0]
    low, high = min(shares), max(shares)
    if high - low < 0.02:
        low, high = max(low - 0.05, 0.0), min(high + 0.05, 1.0)
    return [tick for tick in nice_ticks(low, high) if -1e-9 <= tick <= 1 + 1e-9] or [0.0, 1.0]


def sets_drawing(standings: Standings) -> Drawing:
    """A row for each line of the table, a dot for each model, and a thin line for its interval."""
    lines = list(standings.lines())
    ticks = _ticks(lines)
    legend, top = _legend(standings.models, top=20)
    bottom = top + _ROW * len(lines) + 4
    wide = _WIDTH - _LEFT - _RIGHT

    def across(share: Number) -> float:
        return _LEFT + wide * (share - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [legend]
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{across(tick):.1f} {top:.1f}V{bottom:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{across(tick):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">'
            f"{tick * 100:g} %</text>"
        )
    for number, line in enumerate(lines):
        y = top + _ROW * (number + 0.5) + 2
        parts.append(_row_title(line, y=y))
        for model, score in line.scores.items():
            place, models = standings.models.index(model), len(standings.models)
            colour, lane = place % _COLOURS, y + (place - (models - 1) / 2) * min(5, 14 / models)
            if score.interval is not None:
                low, high = (across(min(max(share, ticks[0]), ticks[-1])) for share in score.interval)
                parts.append(
                    f'<path class="raw s{colour}" style="stroke-width:3" d="M{low:.1f} {lane:.1f}H{high:.1f}"/>'
                )
            told = f"{visible(model)} on {visible(line.title)}: {score.top1:.2%}"
            parts.append(_dot(across(score.top1), lane, colour, told))
    return "".join(parts), bottom + 28


def _row_title(line: Line, *, y: Number) -> str:
    title = html.escape(visible(line.title, limit=24 if line.kind == "set" else 16))
    words = title if line.kind == "set" else f"{title} ({line.of})"
    strong = "" if line.kind == "set" else _STRONG
    return f'<text class="tick" x="{_LEFT - 14}" y="{y + 4:.1f}" text-anchor="end" {strong}>{words}</text>'


def groups_drawing(standings: Standings) -> Drawing:
    """The means side by side: over all, then group by group; a dot with its number for each model (Figure 2)."""
    lines = standings.means()
    ticks = _ticks(lines)
    legend, top = _legend(standings.models, top=20)
    top, high, left = top + 16, 210.0, 56
    bottom, slot = top + high, (_WIDTH - left - 10) / max(len(lines), 1)

    def down(share: Number) -> float:
        return bottom - high * (share - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [legend]
    for tick in ticks:
        y = down(tick)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{_WIDTH - 10}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick * 100:g} %</text>')
    for number, line in enumerate(lines):
        middle = left + slot * (number + 0.5)
        title = html.escape(visible(line.title, limit=14))
        strong = _STRONG if line.kind == "mean" else ""
        parts.append(
            f'<text class="tick" x="{middle:.1f}" y="{bottom + 20:.1f}" text-anchor="middle" {strong}>'
            f"{title} ({line.of})</text>"
        )
        if number:
            parts.append(f'<path class="grid faint" d="M{middle - slot / 2:.1f} {top:.1f}V{bottom:.1f}"/>')
        step = min(slot / (len(standings.models) + 1), 34)
        for model, score in line.scores.items():
            place = standings.models.index(model)
            x, y = middle + step * (place - (len(standings.models) - 1) / 2), down(score.top1)
            told = f"{visible(model)}, {visible(line.title)}: {score.top1:.2%}"
            parts.append(_dot(x, y, place % _COLOURS, told))
            if len(standings.models) <= 3:  # more would stand in each other's way
                parts.append(
                    f'<text class="tick" x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{score.top1 * 100:.1f}</text>'
                )
    parts.append(f'<path class="axis" d="M{left} {bottom:.1f}H{_WIDTH - 10}"/>')
    return "".join(parts), bottom + 32
