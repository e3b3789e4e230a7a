"""`vitkit data`: check datasets before training on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_json, print_result, print_sections, stdout_console
from vitkit.cli.options import device_option, json_option, workers_option
from vitkit.core.formatting import format_percent, format_plural, safe_text

if TYPE_CHECKING:
    from vitkit.data.summary import DataSummary
    from vitkit.data_quality.check import DataQualityReport

MAX_ROWS, MAX_EXAMPLES = 20, 5
"""Rows of a list that are printed; --json and the files have all."""


@click.group("data")
def command() -> None:
    """Check datasets before training on them."""


@command.command("check")
@click.argument("data")
@click.option("--layout", help="Layout of the dataset, instead of detecting it.")
@click.option("--contact-sheet", type=click.Path(path_type=Path), metavar="FILE.png", help="Write thumbnails.")
@click.option("--channels", type=click.IntRange(min=1), default=3, show_default=True, help="Channels to decode.")
@click.option("--workers", type=click.IntRange(min=0), help="Number of processes.  [default: one per core]")
@json_option
def check(
    data: str, layout: str | None, contact_sheet: Path | None, channels: int, workers: int | None, as_json: bool
) -> None:
    """Decode every image in DATA, and report classes, counts, sizes, modes, duplicates and broken files.

    DATA is a folder or an archive. It is not changed. Broken files are reported and do not make this command fail.

    \b
    vitkit data check photos
    vitkit data check photos --contact-sheet photos.png
    vitkit data check photos --json
    """
    from vitkit.api.data import check_data

    summary = check_data(data, layout=layout, channels=channels, contact_sheet=contact_sheet, workers=workers)
    if as_json:
        print_json(summary.to_dict())
        return
    print_summary(summary)
    note = "See the images with --contact-sheet FILE.png" if contact_sheet is None else f"Wrote {contact_sheet}"
    stdout_console().print(f"\n{safe_text(note)}", style="dim")


@command.command("quality")
@click.argument("data")
@click.option("--model", metavar="RUN", help="Run or weights whose features find label errors.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of the report.")
@click.option("--within-splits", is_flag=True, help="Also search near-duplicates within each split.")
@click.option("--match-flips", is_flag=True, help="Also match horizontally flipped images.")
@click.option("--min-score", type=click.FloatRange(-1, 1), help="Smallest score of a label issue.  [default: 0.5]")
@click.option("--probability", is_flag=True, help="Add the probability of each label by a head not trained on it.")
@workers_option
@device_option
@json_option
def quality(model: str | None, min_score: float | None, probability: bool, as_json: bool, **options: Any) -> None:
    """Find near-duplicates and wrong labels in DATA.

    Near-duplicates are found by pixels, despite other sizes, light, compression and small shifts. With --model they are
    also found by features, and each label is compared with those of the nearest training images. Writes report.html,
    near_duplicates.csv, label_issues.csv and data_quality.json. DATA is not changed.

    \b
    vitkit data quality photos --out quality
    vitkit data quality photos --model runs/photos --out quality
    """
    from vitkit.api.data import check_data_quality

    if model is None and (probability or min_score is not None):
        raise click.UsageError("--probability and --min-score are for label issues, which need --model")
    report = check_data_quality(model=model, min_score=min_score, probability=probability, **options)
    print_result(report, print_report, as_json=as_json)


def print_summary(summary: "DataSummary") -> None:
    """Print the result of `check_data`."""
    splits = ", ".join(f"{images:,} in {split}" for split, images in summary.splits.items())
    rows = [("layout", summary.layout), ("images", splits), ("classes", f"{len(summary.classes):,}")]
    if summary.unlabeled:
        rows.append(("unlabeled", f"{summary.unlabeled:,}"))
    for side, size in (summary.sizes._asdict() if summary.sizes else {}).items():
        rows.append((side, f"{size.minimum:,} to {size.maximum:,} pixels, median {size.median:,}"))
    if summary.modes:
        rows.append(("modes", ", ".join(f"{mode} ({count:,})" for mode, count in summary.modes.items())))
    print_sections(
        {
            summary.path: rows,
            f"Images per class in {', '.join(summary.splits)}": _class_rows(summary),
            f"Bad files: {len(summary.bad):,}": _shorten([(file.name, file.reason) for _, file in summary.bad]),
            "Warnings": [("!", warning) for warning in summary.warnings],
        }
    )
    if not summary.warnings:
        stdout_console().print("\nNo problems found.", style="green")


def _class_rows(summary: "DataSummary") -> list[tuple[str, str]]:
    """Return the counts of each class per split, with a bar."""
    largest = max(summary.counts.values(), default=0)
    digits = len(f"{largest:,}")
    rows = []
    for label, (name, count) in enumerate(summary.counts.items()):
        numbers = "  ".join(f"{counts[label]:>{digits},}" for counts in summary.split_counts.values())
        rows.append((name, f"{numbers}  {'█' * round(24 * count / max(largest, 1))}".rstrip()))
    return _shorten(rows)


def _shorten(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    more = [("…", f"and {len(rows) - MAX_ROWS:,} more; --json prints all")] if len(rows) > MAX_ROWS else []
    return [*rows[:MAX_ROWS], *more]


def print_report(report: "DataQualityReport") -> None:
    """Print the counts of `check_data_quality`, the first examples and the path of the report."""
    splits = report.data.splits
    across = len(report.across_splits)
    duplicates = [("across splits", format_plural(across, "pair"))] if len(splits) > 1 else []
    if report.within_splits:
        duplicates.append(("within a split", format_plural(len(report.near_duplicates) - across, "pair")))
    duplicates.append(("with different labels", format_plural(len(report.conflicts), "pair")))
    for row in report.near_duplicate_rows()[:MAX_EXAMPLES]:
        files = f"{row['split']}: {row['file']} = {row['other_split']}: {row['other_file']}"
        duplicates.append((f"{row['pixels']:.3f}", files))
    leaked = [
        (split, f"{format_plural(count, 'image')} ({format_percent(count / len(splits[split]))})")
        for split, count in report.count_leaked().items()
    ]
    if report.label_issues is None:
        labels = [("not checked", "use --model with a run or weights of any format")]
    else:
        labels = [("issues", f"{len(report.label_issues):,}")]
        for row in report.label_issue_rows()[:MAX_EXAMPLES]:
            issue = f"{row['split']}: {row['file']} is labeled {row['given_label']}, suggested {row['suggested_label']}"
            labels.append((f"{row['score']:.2f}", issue))
    print_sections({"Near-duplicates": duplicates, "In more than one split": leaked, "Labels": labels})
    click.echo("\n" + safe_text(str(report.report_path)))
