"""What is known about a finished run goes in, one HTML page comes out that needs nothing else to be read or printed.

Names of classes and files come from strangers: everything passes through `escape`, and the page's own policy lets no
script run but its one, nor anything be fetched.
"""

import base64
import html
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from vitkit.evaluate.judgement import ClassJudgement, Judgement
from vitkit.evaluate.plots import Panel, bar, escape, heatmap, line_chart, name_tag, reliability, visible
from vitkit.evaluate.shell import asset, document, picture_tag

__all__ = ["ComparisonRow", "DataDescription", "Panel", "RunReport", "ShownMistake", "render", "thumbnail"]

_DRAWN_CLASSES = 30  # of a confusion matrix: more cannot be read
_PAIRS = 12
_TALL = 25  # rows from which a table scrolls by itself

Rows = tuple[tuple[str, str], ...]
"""Labels with what they say."""


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """What the run learnt from: the kind of data set, its name, its classes, and the images of each split."""

    kind: str
    place: str
    classes: tuple[str, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ShownMistake:
    """A wrong answer with its picture, a PNG or JPEG as `thumbnail` makes it, or None where it cannot be shown."""

    picture: bytes | None
    file: str
    label: str
    predicted: str
    probability: float
    label_probability: float


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One way to train among several: its name, the share of right answers, and further columns by name."""

    label: str
    top1: float
    interval: tuple[float, float] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything the page shows; what is empty is left out, or said to be missing where one would look for it."""

    title: str
    model: str
    parameters: int
    data: DataDescription
    config: str
    """The resolved config as TOML."""
    curves: tuple[Panel, ...] = ()
    judgements: Mapping[str, Judgement] = field(default_factory=dict)
    """By split; the page is about test where there is one, else about the last."""
    mistakes: tuple[ShownMistake, ...] = ()
    """Of the split the page is about."""
    comparison: tuple[ComparisonRow, ...] = ()
    ledger: Rows = ()
    speed: tuple[Panel, ...] = ()
    wall_time: str | None = None
    environment: Rows = ()
    bad_files: int = 0
    notes: tuple[str, ...] = ()
    unjudged: str = "There were no images to validate or test on: accuracy was not measured."
    """What is said where there is no judgement."""
    reconstructions: bytes | None = None
    """A PNG: images, what a model that learns without labels saw of them, and what it made of that."""
    next_steps: Rows = ()
    """What a command does, and the command."""


def thumbnail(image: Image.Image, *, side: int = 160) -> bytes:
    """The picture as a small JPEG (PNG where that is as exact and tiny) with no more in it than its pixels.

    >>> small = Image.open(io.BytesIO(thumbnail(Image.new("RGB", (400, 200)))))
    >>> small.format, small.size
    ('JPEG', (160, 80))
    """
    small = image.convert("L" if image.mode in {"1", "L"} else "RGB")
    small.thumbnail((side, side))
    # Made anew from its pixels: a copy would carry the photo's EXIF, and with it where it was taken.
    clean = Image.frombytes(small.mode, small.size, small.tobytes())
    content = io.BytesIO()
    clean.save(content, format="PNG" if max(small.size) <= 64 else "JPEG", quality=82)
    return content.getvalue()


def render(report: RunReport) -> str:
    """The page. The same report gives the same page, byte for byte.

    >>> data = DataDescription(kind="class folders", place="pets", classes=("cat", "dog"), counts={"train": 160})
    >>> page = render(RunReport(title="Pets", model="Ti/16", parameters=5_526_722, data=data, config="seed = 0"))
    >>> page.startswith("<!doctype html>"), "accuracy was not measured" in page
    (True, True)
    """
    judged = _judged(report)
    sections = [
        ("curves", "Curves", _panels(report.curves)),
        *(
            [("reconstructions", "Reconstructions", _reconstructions(report.reconstructions))]
            if report.reconstructions
            else []
        ),
        *([("comparison", "Comparison", _comparison(report.comparison))] if report.comparison else []),
        *(_judged_sections(report, *judged) if judged else []),
        ("compute", "Compute", _ledger(report)),
        ("data", "Data", _data(report.data)),
        ("configuration", "Configuration", _configuration(report)),
        *([("next", "Next steps", _next_steps(report.next_steps))] if report.next_steps else []),
    ]
    return document(
        title=report.title,
        lead=f"{escape(report.model)} on <bdi>{escape(report.data.place)}</bdi> ({escape(report.data.kind)})",
        top=f"{_cards(report, judged)}{_notices(report, judged)}",
        sections=sections,
        script=asset("report.js"),
    )


def _judged(report: RunReport) -> tuple[str, Judgement] | None:
    if not report.judgements:
        return None
    split = "test" if "test" in report.judgements else list(report.judgements)[-1]
    return split, report.judgements[split]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.1f} %"


def _interval(interval: tuple[float, float] | None) -> str:
    """Nothing where there is no width: all answers were right, or all wrong, and the bootstrap knows no better."""
    if interval is None or interval[0] == interval[1]:
        return ""
    return f"{interval[0] * 100:.1f}–{interval[1] * 100:.1f} %"


def _cards(report: RunReport, judged: tuple[str, Judgement] | None) -> str:
    cards: list[tuple[str, str, str]] = []
    if judged:
        split, judgement = judged
        likely = _interval(judgement.intervals.get("top1"))
        cards.append((f"Top-1 on {escape(split)}", _percent(judgement.top1), f"95 %: {likely}" if likely else ""))
        if len(judgement.classes) > 5:
            cards.append(("Top-5", _percent(judgement.top5), "true class among five likeliest"))
        cards.append(("Calibration error", _percent(judgement.ece), "ECE: confidence against accuracy"))
    images = sum(report.data.counts.values())
    splits = " · ".join(f"{escape(split)} {count:,}" for split, count in report.data.counts.items())
    cards.append(("Images", f"{images:,}", splits))
    cards.append(("Parameters", _short(report.parameters), f"{escape(report.model)}, {report.parameters:,}"))
    if report.wall_time is not None:
        cards.append(("Time", escape(report.wall_time), "from start to end"))
    tiles = "".join(
        f'<div class="card{" first" if number == 0 else ""}"><div class="what">{what}</div>'
        f'<div class="number">{value}</div><div class="more">{more}</div></div>'
        for number, (what, value, more) in enumerate(cards)
    )
    return f'<div class="cards">{tiles}</div>'


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def _notices(report: RunReport, judged: tuple[str, Judgement] | None) -> str:
    notices = []
    if judged is None:
        notices.append(escape(report.unjudged, limit=600))
    if report.bad_files:
        count = "1 file" if report.bad_files == 1 else f"{report.bad_files:,} files"
        notices.append(f"{count} could not be read and took no part; bad_files.csv says why.")
    notices += [escape(note, limit=600) for note in report.notes]
    return "".join(f'<div class="notice">{notice}</div>' for notice in notices)


def _panels(panels: tuple[Panel, ...]) -> str:
    if not panels:
        return '<p class="empty">Nothing was logged.</p>'
    return f'<div class="two">{"".join(line_chart(panel) for panel in panels)}</div>'


def _reconstructions(picture: bytes) -> str:
    about = "Above: validation images. Middle: in grey, the patches that the model was asked for. Below: its answer."
    encoded = base64.b64encode(picture).decode()
    image = f'<img class="tiny" alt="{about}" src="data:image/png;base64,{encoded}" style="max-width:max(100%,560px)">'
    return f'<p class="about">{about}</p><div class="scroll">{image}</div>'


def _comparison(rows: tuple[ComparisonRow, ...]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    head = "".join(f'<th class="n">{escape(name)}</th>' for name in names)
    best = max(row.top1 for row in rows)
    lines = []
    for row in rows:
        top1 = f"<b>{_percent(row.top1)}</b>" if row.top1 == best else _percent(row.top1)
        cells = "".join(f'<td class="n">{escape(row.columns.get(name, "–"))}</td>' for name in names)
        lines.append(
            f'<tr><td>{name_tag(row.label)}</td><td class="n">{top1}</td><td class="barred wide">{bar(row.top1)}</td>'
            f'<td class="n">{_interval(row.interval) or "–"}</td>{cells}</tr>'
        )
    columns = f'<th></th><th class="n">Top-1</th><th class="wide"></th><th class="n">95 % interval</th>{head}'
    return f'<div class="scroll"><table><thead><tr>{columns}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _judged_sections(report: RunReport, split: str, judgement: Judgement) -> list[tuple[str, str, str]]:
    splits = [("splits", "Splits", _splits(report.judgements))] if len(report.judgements) > 1 else []
    return [
        *splits,
        ("confusion", "Confusion", _confusion(judgement, split=split)),
        ("calibration", "Calibration", _calibration(judgement)),
        ("classes", "Classes", _per_class(judgement.per_class)),
        ("mistakes", "Mistakes", _mistakes(report.mistakes, judgement)),
    ]


def _splits(judgements: Mapping[str, Judgement]) -> str:
    lines = "".join(
        f'<tr><td>{escape(split)}</td><td class="n">{one.count:,}</td><td class="n">{_percent(one.top1)}</td>'
        f'<td class="n">{_interval(one.intervals.get("top1")) or "–"}</td><td class="n">{_percent(one.top5)}</td>'
        f'<td class="n">{_percent(one.ece)}</td><td class="n">{one.nll:.3f}</td></tr>'
        for split, one in judgements.items()
    )
    heads = ("Images", "Top-1", "95 % interval", "Top-5", "ECE", "NLL")
    head = "".join(f'<th class="n">{name}</th>' for name in heads)
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _confusion(judgement: Judgement, *, split: str) -> str:
    pairs = _confused_pairs(judgement)
    chosen = list(range(len(judgement.classes)))
    about = f"Rows are what the {judgement.count:,} images of {escape(split)} show, columns what they were taken for."
    if len(chosen) > _DRAWN_CLASSES:
        of_pairs = dict.fromkeys([label for row, column, _ in pairs for label in (row, column)] + chosen)
        chosen = sorted(list(of_pairs)[:_DRAWN_CLASSES])
        about += f" Of {len(judgement.classes):,} classes, the {_DRAWN_CLASSES} that are confused most are drawn."
    drawing = heatmap(
        judgement.confusion[np.ix_(chosen, chosen)],
        names=[judgement.classes[label] for label in chosen],
        totals=judgement.confusion.sum(axis=1)[chosen],
    )
    legend = '<p class="legend">Blue: right. Orange: wrong. The stronger, the larger the share of the row.</p>'
    table = _pairs_table(pairs[:_PAIRS], judgement) if len(judgement.classes) > 2 else ""
    matrix = f'<div class="scroll">{drawing}{legend}</div>'
    return f'<p class="about">{about}</p><div class="beside">{matrix}{table}</div>'


def _confused_pairs(judgement: Judgement) -> list[tuple[int, int, int]]:
    """What was taken for what, and how often, most often first."""
    wrong = judgement.confusion.copy()
    np.fill_diagonal(wrong, 0)
    rows, columns = np.nonzero(wrong)
    counts = wrong[rows, columns]
    order = np.argsort(-counts, kind="stable")
    return [(int(rows[at]), int(columns[at]), int(counts[at])) for at in order]


def _pairs_table(pairs: list[tuple[int, int, int]], judgement: Judgement) -> str:
    if not pairs:
        return '<p class="about">No image was taken for another class.</p>'
    lines = "".join(
        f"<tr><td>{name_tag(judgement.classes[row])}</td><td>{name_tag(judgement.classes[column])}</td>"
        f'<td class="n">{count:,}</td><td class="n">{_percent(count / judgement.per_class[row].count)}</td></tr>'
        for row, column, count in pairs
    )
    head = '<tr><th>What it is</th><th>Taken for</th><th class="n">Images</th><th class="n">Of its class</th></tr>'
    table = f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>"
    return f'<div class="pairs"><h3>Most confused pairs</h3><div class="scroll">{table}</div></div>'


def _calibration(judgement: Judgement) -> str:
    sure, right = float(judgement.probabilities.mean()), judgement.top1
    leaning = "surer than it is right" if sure > right else "right more often than it is sure"
    about = (
        f"On average the model is {_percent(sure)} sure and {_percent(right)} right: {leaning}. "
        f"Expected calibration error {_percent(judgement.ece)} over {len(judgement.calibration.count)} bins; "
        f"negative log-likelihood {judgement.nll:.3f}."
    )
    legend = (
        "Bars: share of right answers among images of that confidence. Orange gap: too sure. Green gap: not sure "
        "enough. Dashed: a calibrated model. Below: how many images have that confidence."
    )
    drawing = f'<div class="reliability">{reliability(judgement.calibration)}</div>'
    return f'<div class="two">{drawing}<div><p>{about}</p><p class="legend">{legend}</p></div></div>'


def _per_class(classes: list[ClassJudgement]) -> str:
    order = sorted(classes, key=lambda one: 2.0 if one.recall is None else one.recall)
    lines = "".join(
        f'<tr><td>{name_tag(one.name)}</td><td class="n" data-value="{one.count}">{one.count:,}</td>'
        f'{_share_cell(one.recall)}<td class="barred wide">{bar(one.recall or 0.0)}</td>'
        f"{_share_cell(one.precision)}{_share_cell(one.f1)}</tr>"
        for one in order
    )
    images, recall, precision, f1 = (
        f'<th class="n" data-sort>{name}</th>' for name in ("Images", "Recall", "Precision", "F1")
    )
    heads = f'<th data-sort>Class</th>{images}{recall}<th class="wide"></th>{precision}{f1}'
    tall = " tall" if len(classes) > _TALL else ""
    table = f'<table class="sorts"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
    about = "Weakest first. Recall: share of the class's images found. Precision: share of images so named that are."
    return f'<p class="about">{about}</p><div class="scroll{tall}">{table}</div>'


def _share_cell(share: float | None) -> str:
    return f'<td class="n" data-value="{-1 if share is None else round(share, 6)}">{_percent(share)}</td>'


def _mistakes(mistakes: tuple[ShownMistake, ...], judgement: Judgement) -> str:
    wrong = int((judgement.labels != judgement.predictions).sum())
    if wrong == 0:
        return '<p class="about">None: every image was named rightly.</p>'
    about = f'<p class="about">{wrong:,} of {judgement.count:,} images were named wrongly; these are the surest.</p>'
    items = "".join(f"<li>{_mistake(mistake)}</li>" for mistake in mistakes)
    return f'{about}<ul class="gallery">{items}</ul>' if items else about


def _mistake(mistake: ShownMistake) -> str:
    said, true = _percent(mistake.probability), _percent(mistake.label_probability)
    return (
        f"{picture_tag(mistake.picture, file=mistake.file)}"
        f'<p class="said not"><span class="share">{said}</span>{name_tag(mistake.predicted)}</p>'
        f'<p class="said"><span class="share">{true}</span>is {name_tag(mistake.label)}</p>'
        f'<div class="file">{name_tag(mistake.file)}</div>'
    )


def _rows(rows: Rows) -> str:
    pairs = (f"<div><dt>{escape(label)}</dt><dd>{escape(said, limit=200)}</dd></div>" for label, said in rows)
    return f"<dl>{''.join(pairs)}</dl>"


def _ledger(report: RunReport) -> str:
    if not report.ledger and not report.speed:
        return '<p class="empty">Nothing was measured.</p>'
    return (_rows(report.ledger) if report.ledger else "") + (_panels(report.speed) if report.speed else "")


def _data(data: DataDescription) -> str:
    names = ", ".join(f"<bdi>{escape(name)}</bdi>" for name in data.classes[:40])
    more = f" and {len(data.classes) - 40:,} more" if len(data.classes) > 40 else ""
    splits = tuple((f"{split} images", f"{count:,}") for split, count in data.counts.items())
    rows = (("kind", data.kind), ("place", data.place), ("classes", f"{len(data.classes):,}"), *splits)
    return _rows(rows) + (f'<p class="about">{names}{more}</p>' if names else "")


def _configuration(report: RunReport) -> str:
    lines = "\n".join(visible(line, limit=2000) for line in report.config.splitlines())
    config = f"<details><summary>config.toml</summary><pre>{html.escape(lines)}</pre></details>"
    return (_rows(report.environment) if report.environment else "") + config


def _next_steps(steps: Rows) -> str:
    return "".join(
        f'<div class="step">{escape(what, limit=300)}<pre>{escape(command, limit=1000)}</pre></div>'
        for what, command in steps
    )
