"""Data quality report: near-duplicates side by side, and images whose label may be wrong."""

from pathlib import Path

from markupsafe import Markup

from vitkit.core.files import write_csv, write_json, write_text
from vitkit.core.formatting import format_percent
from vitkit.data_quality.check import LABEL_ISSUE_COLUMNS, NEAR_DUPLICATE_COLUMNS, DataQualityReport
from vitkit.data_quality.label_errors import LabelIssue
from vitkit.data_quality.near_duplicates import ImageRef, NearDuplicate
from vitkit.report.html import Card, Section, asset, read_picture, render_page, template_macros, thumbnail, visible

MAX_EXAMPLES = 60
"""Pairs and label issues with images; the CSV files have all."""
SIDE = 200
MAX_CONFUSIONS = 10

NEEDS_MODEL = "Labels were not checked. Use --model with a run or weights."


def write_report(report: DataQualityReport, directory: Path) -> None:
    """Write report.html, near_duplicates.csv, label_issues.csv and data_quality.json, each atomically."""
    page = render(report)
    directory.mkdir(parents=True, exist_ok=True)
    write_csv(directory / "near_duplicates.csv", report.near_duplicate_rows(), NEAR_DUPLICATE_COLUMNS)
    if report.label_issues is None:
        (directory / "label_issues.csv").unlink(missing_ok=True)  # of an earlier call with a model
    else:
        write_csv(directory / "label_issues.csv", report.label_issue_rows(), LABEL_ISSUE_COLUMNS)
    write_json(directory / "data_quality.json", report.to_dict())
    write_text(directory / "report.html", page)


def render(report: DataQualityReport) -> str:
    """Render the page; equal reports give equal pages."""
    data, macros = report.data, template_macros("data_quality.html")
    sections = [Section("duplicates", "Near-duplicates", _near_duplicates(report))]
    if report.label_issues is not None:
        confusions = report.count_confusions()[:MAX_CONFUSIONS]
        issues = [_label_issue(report, issue) for issue in report.label_issues[:MAX_EXAMPLES]]
        body = macros.labels(report.voting_split, confusions, len(report.label_issues), issues)
        sections.append(Section("labels", "Label issues", body))
    files = [
        ("near_duplicates.csv", "all pairs: file, split and class of both, similarity of pixels and features, flipped"),
        ("label_issues.csv", "all label issues: file, split, given, suggested, score, fractions of votes, neighbors"),
        ("data_quality.json", "everything, for programs"),
    ]
    files = [row for row in files if report.label_issues is not None or row[0] != "label_issues.csv"]
    sections.append(Section("files", "Files", macros.files(files)))
    model = f", checked with {visible(report.model)}" if report.model else ""
    return render_page(
        title=f"Data quality of {Path(data.path).name or data.path}",
        lead=f"{visible(data.layout)}, {len(data.classes):,} classes{model}",
        sections=sections,
        cards=_cards(report),
        notices=[] if report.label_issues is not None else [NEEDS_MODEL],
        script=asset("report.js"),
    )


def _cards(report: DataQualityReport) -> list[Card]:
    splits = report.data.splits
    images = sum(map(len, splits.values()))
    cards = []
    if len(splits) > 1:
        leaked = " · ".join(
            f"{count:,} of {visible(split)} ({format_percent(count / len(splits[split]))})"
            for split, count in report.count_leaked().items()
        )
        cards.append(Card("Pairs across splits", f"{len(report.across_splits):,}", leaked))
    if report.within_splits:
        pairs = len(report.near_duplicates) - len(report.across_splits)
        cards.append(Card("Pairs within a split", f"{pairs:,}", "near-duplicates"))
    cards.append(Card("Pairs with different labels", f"{len(report.conflicts):,}", "one of them is wrong"))
    if report.label_issues is not None:
        fraction = format_percent(len(report.label_issues) / max(images, 1))
        cards.append(Card("Label issues", f"{len(report.label_issues):,}", f"{fraction} of all images"))
    counts = " · ".join(f"{visible(split)} {len(source):,}" for split, source in splits.items())
    return [*cards, Card("Images", f"{images:,}", counts)]


def _near_duplicates(report: DataQualityReport) -> Markup:
    conflicts = set(report.conflicts)
    others = [pair for pair in report.near_duplicates if pair not in conflicts]
    groups = [
        {"title": title, "count": len(pairs), "pairs": [_near_duplicate(report, pair) for pair in pairs[:MAX_EXAMPLES]]}
        for title, pairs in (("With different labels", report.conflicts), ("With the same label", others))
        if pairs
    ]
    scope = "in different splits or within one" if report.within_splits else "in different splits"
    return Markup(template_macros("data_quality.html").duplicates(scope, report.model is not None, groups))


def _near_duplicate(report: DataQualityReport, pair: NearDuplicate) -> dict[str, object]:
    numbers = [f"pixels {pair.pixels:.3f}"]
    numbers += [] if pair.features is None else [f"features {pair.features:.3f}"]
    numbers += ["flipped"] if pair.flipped else []
    differ = report.get_class(pair.one) != report.get_class(pair.other)
    images = [_image(report, each, is_suspect=differ) for each in (pair.one, pair.other)]
    return {"numbers": " · ".join(numbers), "images": images}


def _label_issue(report: DataQualityReport, issue: LabelIssue) -> dict[str, object]:
    probability = issue.probability
    detail = "" if probability is None else f" · probability of the label {format_percent(probability)}"
    neighbors = [_image(report, neighbor) for neighbor in report.get_neighbors(issue)]
    return {
        "given": report.data.classes[issue.given_label],
        "suggested": report.data.classes[issue.suggested_label],
        "numbers": f"score {issue.score:.2f}{detail}",
        "images": [_image(report, issue.image, is_suspect=True), *neighbors],
    }


def _image(report: DataQualityReport, image: ImageRef, *, is_suspect: bool = False) -> dict[str, object]:
    label = report.get_class(image)
    picture = read_picture(report.data.splits[image.split], image.index, side=SIDE)
    return {
        "picture": None if picture is None else thumbnail(picture, side=SIDE),
        "file": report.get_file(image),
        "split": image.split,
        "label": "no label" if label is None else label,
        "is_suspect": is_suspect,
    }
