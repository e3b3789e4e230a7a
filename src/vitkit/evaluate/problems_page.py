"""What is wrong with a data set goes in, one HTML page of pictures comes out: pairs side by side, doubtful labels.

Names of classes and files come from strangers: everything passes through `escape`.
"""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.decode import decode
from vitkit.data.verify import read_image
from vitkit.evaluate.findings import Findings
from vitkit.evaluate.page import thumbnail
from vitkit.evaluate.plots import escape, name_tag
from vitkit.evaluate.problems import Doubt, Match, Place
from vitkit.evaluate.shell import Section, asset, document, picture_tag

SHOWN = 60
"""Pairs, and doubtful labels, that have pictures; the CSV files have all."""
SIDE = 200
_CONFUSIONS = 10

NEED_A_MODEL = "Labels were not judged: that needs a model's features, which --weights gives."


def render(findings: Findings) -> str:
    """The page. The same findings give the same page, byte for byte."""
    data = findings.data
    sections: list[Section] = [("duplicates", "Near-duplicates", _matches(findings))]
    if findings.doubts is not None:
        sections.append(("labels", "Doubtful labels", _doubts(findings, findings.doubts)))
    sections.append(("files", "Files", _files(findings)))
    name = Path(data.place).name or data.place
    by = f", judged by {escape(findings.model)}" if findings.model else ""
    return document(
        title=f"Problems in {name}",
        lead=f"{escape(data.kind)}, {len(data.classes):,} classes{by}",
        top=_cards(findings) + ("" if findings.doubts is not None else f'<div class="notice">{NEED_A_MODEL}</div>'),
        sections=sections,
        script=asset("report.js"),
    )


def _cards(findings: Findings) -> str:
    splits = findings.data.splits
    counts = " · ".join(f"{escape(split)} {len(source):,}" for split, source in splits.items())
    cards = []
    if len(splits) > 1:
        shares = " · ".join(
            f"{count:,} of {escape(split)} ({100 * count / len(splits[split]):.1f} %)"
            for split, count in findings.leaked().items()
        )
        cards.append(("Pairs across splits", f"{len(findings.across):,}", shares))
    if findings.within:
        pairs = len(findings.matches) - len(findings.across)
        cards.append(("Pairs within a split", f"{pairs:,}", "near-duplicates"))
    cards.append(("Pairs with two labels", f"{len(findings.conflicts):,}", "one of the two is wrong"))
    if findings.doubts is not None:
        images = sum(map(len, splits.values()))
        share = f"{100 * len(findings.doubts) / max(images, 1):.1f} % of all images"
        cards.append(("Doubtful labels", f"{len(findings.doubts):,}", share))
    cards.append(("Images", f"{sum(map(len, splits.values())):,}", counts))
    tiles = "".join(
        f'<div class="card{" first" if number == 0 else ""}"><div class="what">{what}</div>'
        f'<div class="number">{value}</div><div class="more">{more}</div></div>'
        for number, (what, value, more) in enumerate(cards)
    )
    return f'<div class="cards">{tiles}</div>'


# Near-duplicates


def _matches(findings: Findings) -> str:
    where = "of different splits, or of one" if findings.within else "of different splits"
    if not findings.matches:
        return f'<p class="about">No two images {where} show the same.</p>'
    conflicts = findings.conflicts
    two_labels = set(conflicts)
    others = [match for match in findings.matches if match not in two_labels]
    about = (
        f"Pairs of images {where} that show the same, the most alike first. An image to test on that is also one to "
        "learn from makes scores too good. Pixels: how well their edges agree"
        + (", features: how alike they are to the model." if findings.model else ".")
    )
    parts = [f'<p class="about">{about}</p>']
    for title, some in (("With two labels", conflicts), ("With one label", others)):
        if some:
            pairs = "".join(_match(findings, match) for match in some[:SHOWN])
            parts.append(f'<h3>{title}: {len(some):,}</h3><div class="two">{pairs}</div>{_more(some)}')
    return "".join(parts)


def _match(findings: Findings, match: Match) -> str:
    numbers = [f"pixels {match.pixels:.3f}"]
    if match.similarity is not None:
        numbers.append(f"features {match.similarity:.3f}")
    if match.mirrored:
        numbers.append("mirrored")
    differ = findings.label(match.one) != findings.label(match.other)
    images = "".join(f"<li>{_image(findings, place, wrong=differ)}</li>" for place in (match.one, match.other))
    return f'<figure>{_row(images, 2)}<figcaption><span class="keys">{" · ".join(numbers)}</span></figcaption></figure>'


def _more(things: Sequence[object]) -> str:
    more = len(things) - SHOWN
    return f'<p class="about">{more:,} more are in the CSV file.</p>' if more > 0 else ""


# Doubtful labels


def _doubts(findings: Findings, doubts: Sequence[Doubt]) -> str:
    about = (
        f"Images whose nearest in {escape(findings.voting)}, by the model's features, "
        "are of another class. Beside each image its three nearest. The score is the share of votes for the suggested "
        "class less that for the given one. Not every one is a mistake: rare views of a class look like another."
    )
    if not doubts:
        return f'<p class="about">{about}</p><p>None.</p>'
    rows = "".join(
        f'<tr><td>{name_tag(given)}</td><td>{name_tag(suggested)}</td><td class="n">{count:,}</td></tr>'
        for given, suggested, count in findings.confusions()[:_CONFUSIONS]
    )
    head = '<tr><th>Given</th><th>Suggested</th><th class="n">Images</th></tr>'
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    shown = "".join(_doubt(findings, doubt) for doubt in doubts[:SHOWN])
    return f'<p class="about">{about}</p>{table}<h3>The worst first</h3><div class="two">{shown}</div>{_more(doubts)}'


def _doubt(findings: Findings, doubt: Doubt) -> str:
    classes = findings.data.classes
    chance = "" if doubt.probability is None else f" · probability of the label {100 * doubt.probability:.1f} %"
    items = [f"<li>{_image(findings, doubt.place, wrong=True)}</li>"]
    items += [f"<li>{_image(findings, place)}</li>" for place in findings.neighbours(doubt)]
    said = f"{name_tag(classes[doubt.given])} → {name_tag(classes[doubt.suggested])}"
    numbers = f'<span class="keys">score {doubt.score:.2f}{chance}</span>'
    return f"<figure><figcaption><span>{said}</span>{numbers}</figcaption>{_row(''.join(items), 4)}</figure>"


# Pictures


def _row(items: str, columns: int) -> str:
    """Pictures side by side, on a phone too."""
    return f'<ul class="gallery" style="grid-template-columns:repeat({columns},minmax(0,1fr))">{items}</ul>'


def _image(findings: Findings, place: Place, *, wrong: bool = False) -> str:
    label = findings.label(place)
    named = name_tag("no label" if label is None else label)
    file = findings.file(place)
    return (
        f"{_picture(findings, place, file)}"
        f'<p class="said{" not" if wrong else ""}">{named}</p>'
        f'<div class="file">{escape(place.split)}: {name_tag(file)}</div>'
    )


def _picture(findings: Findings, place: Place, file: str) -> str:
    """The image as it is now; words where it has gone since it was looked at."""
    try:
        picture = decode(read_image(findings.data.splits[place.split], place.index), fit=(SIDE, SIDE))
    except DataError:
        return picture_tag(None, file=file)
    shown = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    return picture_tag(thumbnail(shown, side=SIDE), file=file)


def _files(findings: Findings) -> str:
    rows = [
        ("near_duplicates.csv", "every pair: file, split and class of both, likeness of pixels and features, mirrored"),
        ("mislabelled.csv", "every doubtful label: file, split, given, suggested, score, shares of votes, neighbours"),
        ("problems.json", "all of it for programs"),
    ]
    kept = [row for row in rows if findings.doubts is not None or row[0] != "mislabelled.csv"]
    lines = "".join(f"<tr><td><code>{file}</code></td><td>{what}</td></tr>" for file, what in kept)
    return f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>'
