"""`vitkit data problems`: a data set goes in; near-duplicates and doubtful labels come out, as a page and as tables."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.checking import sound_images
from vitkit.cli.describing import counted
from vitkit.cli.output import print_json, print_sections, safe_text, talk_console

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitkit.checkpoints.native import Artefact
    from vitkit.data.source import DataSet, Source
    from vitkit.data.verify import BadFile
    from vitkit.evaluate.findings import Findings
    from vitkit.evaluate.problems import Doubt, Looks

SHOWN = 5
"""Of each list a person sees so many; the files have all."""


@click.command("problems")
@click.argument("place", metavar="DATA")
@click.option("--weights", metavar="RUN", help="A run or weights of any origin, whose features judge labels.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write the page into.")
@click.option("--within", is_flag=True, help="Also look for near-duplicates inside each split.")
@click.option("--mirrored", is_flag=True, help="Also look for near-duplicates in a mirror.")
@click.option("--least-score", type=click.FloatRange(-1, 1), help="Report labels from this score on; 0.5 if not given.")
@click.option("--probability", is_flag=True, help="Add the label's probability by a head that did not see the image.")
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read images.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def command(
    place: str,
    weights: str | None,
    out: Path,
    within: bool,
    mirrored: bool,
    least_score: float | None,
    probability: bool,
    workers: int,
    device: str,
    as_json: bool,
) -> None:
    """Find images of DATA that are in two splits, and labels that are likely wrong.

    Near-duplicates are found by their pixels: other sizes, light, compression and small shifts do not hide them. With
    --weights they are found by features too, and each label is judged by the nearest images of the training split.
    Writes report.html, near_duplicates.csv, mislabelled.csv and problems.json. Nothing of DATA is changed.

    \b
    vitkit data problems photos --out problems
    vitkit data problems photos --weights runs/photos --out problems
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vitkit.data.sources.detect import open_data
    from vitkit.evaluate.findings import Findings
    from vitkit.evaluate.problems import near_duplicates, searches

    if weights is None and (probability or least_score is not None):
        raise click.UsageError("--probability and --least-score are about labels: they need --weights")
    artefact = load_model(weights)
    dataset, talk = open_data(place), talk_console()
    voting = next((name for name in ("train", "all") if name in dataset.splits), next(iter(dataset.splits)))
    within = within or len(dataset.splits) == 1  # there is nothing else to compare
    counts = ", ".join(f"{len(source):,} in {name}" for name, source in dataset.splits.items())
    talk.print(safe_text(f"{dataset.kind}: {counts}"), soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
        dataset, bad = readable(dataset, artefact, workers=workers, progress=progress)
        looks = {
            name: looked_at(source, artefact, workers=workers, device=device, progress=progress)
            for name, source in dataset.splits.items()
        }
        once = sum(min(len(looks[one]), len(looks[other])) for one, other in searches(looks, within=within))
        advance = task(progress, "searching", once * (2 if mirrored else 1))
        matches = near_duplicates(looks, within=within, in_mirror=mirrored, progress=advance)
        doubts = None
        if artefact is not None and dataset.classes:
            doubts = judged_labels(
                looks,
                dataset,
                voting=voting,
                least=least_score,
                probability=probability,
                progress=progress,
            )
    found = Findings(
        data=dataset,
        matches=matches,
        doubts=doubts,
        voting=voting,
        model=artefact.name if artefact else None,
        within=within,
    )
    write(found, out, bad=bad)
    if as_json:
        print_json(as_mapping(found, bad))
        return
    print_findings(found, out)


def load_model(weights: str | None) -> "Artefact | None":
    """The model whose features are asked."""
    from vitkit.checkpoints.foreign import load

    return None if weights is None else load(weights)


def task(progress: "Progress", what: str, total: int) -> Callable[[int], None]:
    """A line of progress, to be told how many more are done."""
    number = progress.add_task(what, total=total)
    return lambda images: progress.advance(number, images)


def readable(
    dataset: "DataSet", artefact: "Artefact | None", *, workers: int, progress: "Progress"
) -> "tuple[DataSet, list[tuple[str, BadFile]]]":
    """The data set without the images that cannot be read, and those, each behind its split."""
    from vitkit.data.source import DataSet

    splits: dict[str, Source] = {}
    bad: list[tuple[str, BadFile]] = []
    for name, source in dataset.splits.items():
        channels = artefact.preprocessing.channels if artefact else 3
        sound, files = sound_images(source, place=dataset.place, channels=channels, workers=workers, progress=progress)
        splits[name] = sound
        bad += [(name, file) for file in files]
    return DataSet(dataset.place, splits), bad


def looked_at(
    source: "Source", artefact: "Artefact | None", *, workers: int, device: str, progress: "Progress"
) -> "Looks":
    """Small pictures of the images, and their features if there is a model."""
    from vitkit.engine.devices import choose_device
    from vitkit.evaluate.features import cache_folder, cached_features
    from vitkit.evaluate.problems import Looks
    from vitkit.evaluate.thumbnails import thumbnails

    small = thumbnails(source, workers=workers, progress=task(progress, "looking", len(source)))
    if artefact is None:
        return Looks.of(small)
    features = cached_features(
        artefact,
        source,
        folder=cache_folder(),
        workers=workers,
        device=choose_device(device),
        progress=task(progress, "features", len(source)),
    )
    return Looks.of(small, features)


def judged_labels(
    looks: "dict[str, Looks]",
    dataset: "DataSet",
    *,
    voting: str,
    least: float | None,
    probability: bool,
    progress: "Progress",
) -> "list[Doubt]":
    """The labels that neighbours doubt, with their probabilities where asked."""
    from dataclasses import replace

    from vitkit.evaluate.problems import DOUBTFUL, doubtful_labels, label_probabilities

    labels = {name: source.labels for name, source in dataset.splits.items()}
    found = doubtful_labels(
        looks,
        labels,
        classes=len(dataset.classes),
        voting=voting,
        least=DOUBTFUL if least is None else least,
        progress=task(progress, "judging labels", sum(map(len, looks.values()))),
    )
    if not probability:
        return found
    chances = label_probabilities(looks, labels, classes=len(dataset.classes), voting=voting)
    return [replace(each, probability=float(chances[each.place.split][each.place.index])) for each in found]


def as_mapping(found: "Findings", bad: "list[tuple[str, BadFile]]") -> dict[str, object]:
    """The findings under the names that scripts rely on."""
    return found.to_json() | {
        "bad": [{"file": file.name, "reason": file.reason, "split": split} for split, file in bad]
    }


def write(found: "Findings", folder: Path, *, bad: "list[tuple[str, BadFile]]") -> None:
    """Write the page, the tables and the JSON; each file whole or not at all."""
    import json

    from vitkit.core.files import write_bytes, write_text
    from vitkit.evaluate.findings import DOUBT_COLUMNS, MATCH_COLUMNS
    from vitkit.evaluate.problems_page import render
    from vitkit.evaluate.tables import as_csv

    page = render(found)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "near_duplicates.csv", as_csv(found.match_rows(), MATCH_COLUMNS))
    if found.doubts is None:
        (folder / "mislabelled.csv").unlink(missing_ok=True)  # of an earlier call with a model
    else:
        write_bytes(folder / "mislabelled.csv", as_csv(found.doubt_rows(), DOUBT_COLUMNS))
    write_text(folder / "problems.json", json.dumps(as_mapping(found, bad), indent=2, allow_nan=False) + "\n")
    write_text(folder / "report.html", page)


def print_findings(found: "Findings", folder: Path) -> None:
    """Print the counts, and the first of each list."""
    splits = found.data.splits
    leaked = [
        (split, f"{counted(count, 'image')} ({count / len(splits[split]):.1%})")
        for split, count in found.leaked().items()
    ]
    inside = len(found.matches) - len(found.across)
    pairs = [("across splits", counted(len(found.across), "pair"))] if len(splits) > 1 else []
    pairs += [("within a split", counted(inside, "pair"))] if found.within else []
    pairs += [("with two labels", counted(len(found.conflicts), "pair"))]
    labels = (
        [("not judged", "give --weights, a run or weights of any origin")]
        if found.doubts is None
        else [("doubtful", f"{len(found.doubts):,}")]
        + [
            (f"{row['score']:.2f}", f"{row['split']}: {row['file']} is {row['given']}, or {row['suggested']}?")
            for row in found.doubt_rows()[:SHOWN]
        ]
    )
    print_sections(
        {
            "Near-duplicates": [
                *pairs,
                *(
                    (
                        f"{row['pixels']:.3f}",
                        f"{row['split']}: {row['file']} = {row['other_split']}: {row['other_file']}",
                    )
                    for row in found.match_rows()[:SHOWN]
                ),
            ],
            "In more than one split": leaked,
            "Labels": labels,
        }
    )
    click.echo("\n" + safe_text(str(folder / "report.html")))
