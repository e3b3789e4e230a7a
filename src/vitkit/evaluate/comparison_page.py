"""A comparison of models goes in; a page with its table and pictures, CSV and JSON come out."""

from dataclasses import dataclass
from typing import Literal

from vitkit.evaluate.comparison import Contender, Difference
from vitkit.evaluate.plots import escape, name_tag
from vitkit.evaluate.scatter import Point, amount, interval_chart, scatter, whole
from vitkit.evaluate.shell import Section, asset, document

MISSING = "–"
Cost = Literal["exaflops", "parameters", "speed", "training_speed"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several models side by side. `data` is in words what all were judged on, None where each has its own."""

    contenders: tuple[Contender, ...]
    differences: tuple[Difference, ...] = ()
    data: str | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """What `vitkit compare --json` prints."""
        return {
            "data": self.data,
            "runs": [each.to_json() for each in self.contenders],
            "differences": [each.to_json() for each in self.differences],
            "warnings": list(self.warnings),
        }

    @property
    def best(self) -> float | None:
        """The highest top-1."""
        return max((each.scores.top1 for each in self.contenders if each.scores), default=None)


CSV_COLUMNS = (
    *("label", "model", "family", "top1", "low", "high", "top5", "mean_per_class", "ece", "count", "judged_on"),
    *("parameters", "gflops", "exaflops", "seconds", "training_speed", "speed"),
)


def csv_rows(comparison: Comparison) -> list[dict[str, object]]:
    """A row a model, under CSV_COLUMNS."""
    rows = []
    for each in comparison.contenders:
        plain = each.to_json()
        low, high = each.scores.interval if each.scores else (None, None)
        plain |= {"low": low, "high": high}
        rows.append({name: plain[name] for name in CSV_COLUMNS})
    return rows


def pictures(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """The drawings by the names of their files, each behind its title; one without a point is left out."""
    measured = any(each.speed for each in comparison.contenders)
    axes: dict[str, tuple[str, str, Cost]] = {
        "exaflops": ("Accuracy against training", "training, exaFLOPs", "exaflops"),
        "parameters": ("Accuracy against size", "parameters", "parameters"),
        # A run's own log is of its own machine and load: what was measured side by side says more.
        "speed": ("Accuracy against speed", "images a second", "speed")
        if measured
        else ("Accuracy against training speed", "images a second in training", "training_speed"),
    }
    drawn = {}
    for name, (title, cost, value) in axes.items():
        points = [
            Point(
                label=each.label,
                family=each.family,
                x=float(cost_of),
                y=each.scores.top1,
                interval=each.scores.interval,
            )
            for each in comparison.contenders
            if each.scores and (cost_of := getattr(each, value))
        ]
        if drawing := scatter(points, title=title, cost=cost):
            drawn[name] = (title, drawing)
    if comparison.differences:
        drawn["differences"] = ("Differences", interval_chart(comparison.differences))
    return drawn


def files(comparison: Comparison) -> dict[str, str]:
    """The page, and every drawing as a file of its own."""
    drawn = pictures(comparison)
    return {f"{name}.svg": whole(drawing) for name, (_, drawing) in drawn.items()} | {"report.html": render(comparison)}


def render(comparison: Comparison) -> str:
    """The page. The same comparison gives the same page, byte for byte."""
    drawn = pictures(comparison)
    sections: list[Section] = [("results", "Results", _table(comparison))]
    if comparison.differences:
        sections.append(("differences", "Differences", _differences(comparison, drawn.pop("differences")[1])))
    figures = "".join(
        f'<figure class="chart"><figcaption>{title}</figcaption>{drawing}</figure>' for title, drawing in drawn.values()
    )
    if figures:
        about = "Whiskers are 95 % intervals. The cost grows by factors to the right."
        sections.append(
            ("pictures", "Accuracy and cost", f'<p class="about">{about}</p><div class="two">{figures}</div>')
        )
    sections.append(("models", "Models", _models(comparison)))
    judged = f"all judged on {escape(comparison.data, limit=160)}" if comparison.data else "each by its own judgement"
    notices = "".join(f'<div class="notice">{escape(said, limit=600)}</div>' for said in comparison.warnings)
    return document(
        title=f"{len(comparison.contenders)} models compared",
        lead=judged,
        top=_cards(comparison) + notices,
        sections=sections,
        script=asset("report.js"),
    )


def _cards(comparison: Comparison) -> str:
    judged = [each for each in comparison.contenders if each.scores]
    cards = []
    if judged:
        best = max(judged, key=lambda each: each.scores.top1 if each.scores else 0.0)
        small = min(judged, key=lambda each: each.parameters)
        cards.append(("Best", percent(best.scores.top1 if best.scores else None), name_tag(best.label)))
        cards.append(("Smallest", amount(small.parameters), name_tag(small.label)))
    trained = [each for each in comparison.contenders if each.exaflops]
    if trained:
        cheap = min(trained, key=lambda each: each.exaflops or 0.0)
        cards.append(("Least training", f"{amount(cheap.exaflops or 0.0)}", f"exaFLOPs: {name_tag(cheap.label)}"))
    fast = max((each for each in comparison.contenders if each.speed), key=lambda each: each.speed or 0.0, default=None)
    if fast is not None:
        cards.append(("Fastest", amount(fast.speed or 0.0), f"images a second: {name_tag(fast.label)}"))
    tiles = "".join(
        f'<div class="card{" first" if number == 0 else ""}"><div class="what">{what}</div>'
        f'<div class="number">{value}</div><div class="more">{more}</div></div>'
        for number, (what, value, more) in enumerate(cards)
    )
    return f'<div class="cards">{tiles}</div>' if tiles else ""


HEADS = (
    *("Top-1", "95 % interval", "Top-5", "Per class", "ECE"),
    *("Parameters", "GFLOPs", "ExaFLOPs", "Images/s", "Trained at", "Time"),
)


def _table(comparison: Comparison) -> str:
    head = "".join(f'<th class="n" data-sort>{name}</th>' for name in HEADS)
    rows = "".join(_row(each, best=comparison.best) for each in comparison.contenders)
    table = f'<table class="sorts"><thead><tr><th data-sort>Run</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    about = (
        "Per class is the mean of the classes' recalls. GFLOPs are of one forward pass, exaFLOPs of all training. "
        "Images/s were measured side by side; trained at is the run's own log, on its own machine."
    )
    return f'<div class="scroll">{table}</div><p class="legend">{about}</p>'


def _row(each: Contender, *, best: int | float | None) -> str:
    scores = each.scores
    top1, top5, mean, ece = (
        (scores.top1, scores.top5, scores.mean_per_class, scores.ece) if scores else (None, None, None, None)
    )
    low, high = scores.interval if scores else (None, None)
    interval = MISSING if low is None or high is None else f"{100 * low:.1f}–{percent(high)}"
    shown = percent(top1, digits=2)
    cells = [
        (f"<b>{shown}</b>" if scores and top1 == best else shown, top1),
        (interval, low),
        (percent(top5), top5),
        (percent(mean), mean),
        (MISSING if ece is None else f"{ece:.3f}", ece),
        (amount(each.parameters), each.parameters),
        (f"{each.gflops:.3g}", each.gflops),
        *((amount(value) if value else MISSING, value) for value in (each.exaflops, each.speed, each.training_speed)),
        (on_the_clock(each.seconds), each.seconds),
    ]
    line = "".join(
        f'<td class="n" data-value="{-1 if value is None else value}">{shown}</td>' for shown, value in cells
    )
    return f"<tr><td>{name_tag(each.label)}</td>{line}</tr>"


def percent(share: int | float | None, *, digits: int = 1) -> str:
    """A share as the page writes it.

    >>> percent(0.8415), percent(None)
    ('84.2 %', '–')
    """
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def on_the_clock(seconds: int | float | None) -> str:
    """A time in the two units that matter.

    >>> on_the_clock(95), on_the_clock(7260), on_the_clock(None)
    ('1 min 35 s', '2 h 1 min', '–')
    """
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _differences(comparison: Comparison, drawing: str) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.in_words(), limit=200)}</td>"
        f'<td class="n">{each.only:,} : {each.only_other:,}</td><td class="n">{each.p_value:.2g}</td></tr>'
        for each in comparison.differences
    )
    head = '<tr><th></th><th class="n">Only one right</th><th class="n">p</th></tr>'
    about = (
        "The same images were judged by all, so differences are surer than the intervals of each alone. Intervals are "
        "of a paired bootstrap, p is McNemar's exact test. Of twenty differences that are none, one will look sure."
    )
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    return f'<p class="about">{about}</p><div class="two"><figure class="chart">{drawing}</figure>{table}</div>'


def _models(comparison: Comparison) -> str:
    """What each is, and what each was judged on where that is not the same."""
    apart = comparison.data is None
    rows = "".join(
        f"<tr><td>{name_tag(each.label)}</td><td>{name_tag(each.model)}</td><td>{each.family}</td>"
        + (f"<td>{name_tag(each.judged_on) if each.judged_on else MISSING}</td></tr>" if apart else "</tr>")
        for each in comparison.contenders
    )
    head = f"<tr><th>Run</th><th>Model</th><th>Family</th>{'<th>Judged on</th>' if apart else ''}</tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
