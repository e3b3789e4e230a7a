"""`vitkit inspect`: a model and images go in, a report of what it looks at and has learnt comes out."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.output import print_json, safe_text, talk_console

if TYPE_CHECKING:
    from vitkit.checkpoints.ready import Loaded

MOST_OF_A_FOLDER = 128
"""Images of a folder that are looked at: as many as the paper measures attention distance on."""


@click.command("inspect")
@click.argument("model")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write the report into.")
@click.option("--only", help="Parts to make, such as rollout,distance; all where not given.")
@click.option("--class", "chosen", help="Also explain this class, by label or number.")
@click.option("--with", "other", help="Another model, to compare layers with.")
@click.option(
    "--layer", type=int, default=-1, show_default=True, help="Whose heads and features to draw; -1 is the last."
)
@click.option("--labels", type=click.Path(path_type=Path), help="Names of the classes, where the weights have none.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    model: str,
    images: tuple[Path, ...],
    out: Path,
    only: str | None,
    chosen: str | None,
    other: str | None,
    layer: int,
    labels: Path | None,
    as_json: bool,
) -> None:
    """Look inside MODEL, a run or weights of any origin, on IMAGES, files or folders of them.

    Writes report.html, every picture as PNG and SVG, and numbers.json into --out. Up to eight images are drawn; means,
    such as attention distance, are of all of them.

    \b
    vitkit inspect runs/photos photos/cat.jpg photos/dog.jpg --out look
    vitkit inspect weights.npz photos/ --out look --only rollout,distance
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from vitkit.checkpoints.pretraining import pretraining_beside
    from vitkit.checkpoints.ready import load
    from vitkit.inspection.parts import PARTS, chosen_parts, make_part
    from vitkit.inspection.report import Inspection, shown_names
    from vitkit.inspection.subject import Subject, class_named

    wanted = chosen_parts(only)
    files = image_files(images)
    loaded = named(load(model), labels)
    subject = Subject(
        model=loaded,
        images=files,
        names=shown_names(files),
        chosen=None if chosen is None else class_named(loaded, chosen),
        other=None if other is None else load(other),
        pretraining=pretraining_beside(model),
        layer=layer,
    )
    talk = talk_console()
    talk.print(safe_text(f"{loaded.name} on {len(files):,} image{'s' if len(files) > 1 else ''}"), soft_wrap=True)
    parts = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
        task = progress.add_task("looking", total=len(wanted))
        for name in wanted:
            progress.update(task, description=PARTS[name][0])
            parts.append(make_part(name, subject))
            progress.advance(task)
    for part in parts:
        if part.missing:
            talk.print(safe_text(f"left out {part.name}: {part.missing}"), style="yellow", soft_wrap=True)
    found = Inspection(subject=subject, parts=tuple(parts))
    found.write(out)
    if as_json:
        print_json(found.numbers())
        return
    click.echo(safe_text(str(out / "report.html")))


def named(model: "Loaded", labels: Path | None) -> "Loaded":
    """The model with the names of its classes from a file, if one is given."""
    from vitkit.cli.reshaping import read_labels
    from vitkit.core.errors import ConfigError

    if labels is not None:
        names = read_labels(labels)
        if len(names) != model.config.classes:
            raise ConfigError(f"{labels}: not this model's labels", expected=model.config.classes, got=len(names))
        model.labels = names
    return model


def image_files(places: tuple[Path, ...]) -> list[Path]:
    """The files named, and of folders the images in them, evenly spread where they are very many.

    >>> image_files((Path("a.jpg"),))
    [PosixPath('a.jpg')]
    """
    from vitkit.core.errors import DataError
    from vitkit.data.sources.base import is_image, walk

    files: list[Path] = []
    for place in places:
        if not place.is_dir():
            files.append(place)
            continue
        inside = [place / name for name in sorted(walk(place)) if is_image(name)]
        if not inside:
            raise DataError(f"{place}: no images in this folder", hint="name image files, or a folder that holds some")
        step = max(1, len(inside) // MOST_OF_A_FOLDER)
        files += inside[::step][:MOST_OF_A_FOLDER]
    return files
