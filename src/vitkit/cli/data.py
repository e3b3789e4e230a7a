"""`vitkit data`: the place of a data set goes in, what it holds and what is wrong with it come out."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli import problems
from vitkit.cli.output import print_json, print_sections, result_console, safe_text, talk_console

if TYPE_CHECKING:
    import vitkit.data.survey

# Of long lists a person sees this many; --json gives all.
SHOWN = 20


@click.group("data")
def command() -> None:
    """Look at data sets before anything is learned from them."""


command.add_command(problems.command)


@command.command("check")
@click.argument("place", metavar="DIR")
@click.option("--kind", help="What it is, if it should not be guessed from what is there.")
@click.option("--contact-sheet", type=click.Path(path_type=Path), metavar="FILE.png", help="Write a picture of it.")
@click.option("--channels", type=click.IntRange(min=1), default=3, show_default=True, help="Channels wanted of images.")
@click.option("--workers", type=click.IntRange(min=0), help="Processes that decode; one a core if not given.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(
    place: str, kind: str | None, contact_sheet: Path | None, channels: int, workers: int | None, as_json: bool
) -> None:
    """Decode every image in DIR, a folder or archive: classes, counts, sizes, modes, duplicates, broken files.

    Nothing is changed, and nothing is written but the contact sheet where you ask for it. Broken files are reported
    and are no failure of this command.

    \b
    vitkit data check photos
    vitkit data check photos --contact-sheet photos.png
    vitkit data check photos --json
    """
    from vitkit.data.sources.detect import open_data
    from vitkit.data.survey import contact_sheet as write_sheet
    from vitkit.data.survey import survey

    dataset = open_data(place, kind=kind)
    total = sum(map(len, dataset.splits.values()))
    if not as_json:
        talk_console().print(f"{safe_text(dataset.place)}: {dataset.kind}, {total:,} images")
    with progress_bar(total) as progress:
        found = survey(dataset, channels=channels, workers=_cores() if workers is None else workers, progress=progress)
    if contact_sheet is not None:
        write_sheet(dataset, contact_sheet)
    if as_json:
        print_json(as_mapping(found) | {"contact_sheet": None if contact_sheet is None else str(contact_sheet)})
        return
    print_survey(found)
    remark = "See the images with --contact-sheet FILE.png" if contact_sheet is None else f"Written: {contact_sheet}"
    result_console().print(f"\n{safe_text(remark)}", style="dim")


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told how many images are done, and leaves nothing behind; none where nobody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = talk_console()
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def as_mapping(found: "vitkit.data.survey.Survey") -> dict[str, Any]:
    """The findings under the names that scripts rely on."""
    sizes = None
    if found.height and found.width:
        sizes = {"height": found.height._asdict(), "width": found.width._asdict()}
    return {
        "place": found.place,
        "kind": found.kind,
        "classes": list(found.classes),
        "counts": dict(zip(found.classes, found.class_counts, strict=True)),
        "images": found.images,
        "unlabelled": found.unlabelled,
        "splits": {
            split: {"images": images, "counts": dict(zip(found.classes, found.counts[split], strict=True))}
            for split, images in found.splits.items()
        },
        "bad": [{"file": file.name, "reason": file.reason, "split": split} for split, file in found.bad],
        "sizes": sizes,
        "modes": dict(found.modes),
        "duplicates": [
            {
                "files": [
                    {
                        "file": member.name,
                        "split": member.split,
                        "class": found.classes[member.label] if member.label >= 0 else None,
                    }
                    for member in group.members
                ],
                "leak": group.leak,
                "conflict": group.conflict,
            }
            for group in found.duplicates
        ],
        "warnings": list(found.warnings),
    }


def print_survey(found: "vitkit.data.survey.Survey") -> None:
    """Print the findings for a reader."""
    splits = ", ".join(f"{images:,} in {split}" for split, images in found.splits.items())
    rows = [("kind", found.kind), ("images", splits), ("classes", f"{len(found.classes):,}")]
    if found.unlabelled:
        rows.append(("unlabelled", f"{found.unlabelled:,}"))
    if found.height and found.width:
        spreads = {"height": found.height, "width": found.width}
        rows += [
            (side, f"{spread.minimum:,} to {spread.maximum:,} pixels, median {spread.median:,}")
            for side, spread in spreads.items()
        ]
    if found.modes:
        rows.append(("modes", ", ".join(f"{mode} ({count:,})" for mode, count in found.modes.items())))
    print_sections(
        {
            found.place: rows,
            f"Images of each class in {', '.join(found.splits)}": _class_rows(found),
            f"Bad files: {len(found.bad):,}": _some([(file.name, file.reason) for _, file in found.bad]),
            "Worth a look": [("!", warning) for warning in found.warnings],
        }
    )
    if not found.warnings:
        result_console().print("\nNothing to worry about.", style="green")


def _class_rows(found: "vitkit.data.survey.Survey") -> list[tuple[str, str]]:
    """A line a class: its images in each split, and a bar."""
    longest = max(found.class_counts, default=0)
    digits = len(f"{longest:,}")
    rows = []
    for label, (name, count) in enumerate(zip(found.classes, found.class_counts, strict=True)):
        numbers = "  ".join(f"{counts[label]:>{digits},}" for counts in found.counts.values())
        rows.append((name, f"{numbers}  {'█' * round(24 * count / max(longest, 1))}".rstrip()))
    return _some(rows)


def _some(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    more = [("…", f"and {len(rows) - SHOWN:,} more, all of them with --json")] if len(rows) > SHOWN else []
    return [*rows[:SHOWN], *more]
