"""`vitkit fewshot`: a model and labelled images go in; how much a few examples of each class teach comes out."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vitkit.cli.checking import sound_images
from vitkit.cli.output import print_json, safe_text, talk_console

if TYPE_CHECKING:
    from vitkit.checkpoints.native import Artefact
    from vitkit.evaluate.fewshot import Labelled, Method, Shots

METHODS = ("ridge", "knn", "logistic")
WORKERS = 2


class ShotList(click.ParamType[tuple[int, ...]]):
    """Numbers of shots, such as 1,5,10,25."""

    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, from the smallest."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} is no list of numbers such as 1,5,10,25", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


@click.command("fewshot")
@click.argument("model")
@click.argument("data")
@click.option("--shots", type=ShotList(), default="1,5,10,25", show_default=True, help="Examples of each class.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Draws of examples.")
@click.option(
    "--method", type=click.Choice([*METHODS, "all"]), default="ridge", show_default=True, help="How to learn."
)
@click.option("--sweep-l2", "sweep", is_flag=True, help="Choose l2 on examples held out, instead of 2^10.")
@click.option("--released-crop", is_flag=True, help="Squash to 8/7 of the size and crop, as the released probe does.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the model with a head from the most shots.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    model: str,
    data: str,
    shots: tuple[int, ...],
    seeds: int,
    method: "Method | Literal['all']",
    sweep: bool,
    released_crop: bool,
    save: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """How well MODEL tells the classes of DATA after a few examples of each, without training.

    The paper's probe: regularised least squares on frozen features, in closed form, the mean over draws of examples.
    Features are computed once and kept in the user's cache. It learns from training images and is judged on test
    images; where DATA has no such splits, a fifth of each class is held out.

    \b
    vitkit fewshot runs/photos new-photos --shots 1,5
    vitkit fewshot runs/photos new-photos --shots 5 --save few
    """
    from rich.progress import Progress

    from vitkit.checkpoints.foreign import load
    from vitkit.data.sources.detect import open_data
    from vitkit.engine.devices import choose_device
    from vitkit.evaluate.fewshot import few_shot
    from vitkit.evaluate.probing import as_released, labelled_features, learn_and_judge

    artefact, place = load(model), choose_device(device)
    if save is not None:
        check_free(save)
    train, test = learn_and_judge(open_data(data))
    talk = talk_console()
    said = f"{artefact.name}: {len(train.classes)} classes, {len(train):,} to learn from, {len(test):,} to judge by"
    talk.print(safe_text(said), soft_wrap=True)
    how = as_released(artefact.preprocessing) if released_crop else artefact.preprocessing
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as progress:
        looked = [
            sound_images(source, place=data, channels=how.channels, workers=WORKERS, progress=progress)
            for source in (train, test)
        ]
        taught, asked = (
            labelled_features(
                artefact,
                sound,
                preprocessing=how,
                workers=WORKERS,
                device=place,
                progress=partial(progress.advance, progress.add_task("features", total=len(sound))),
            )
            for sound, _ in looked
        )
    wanted: list[Method] = ["ridge", "knn", "logistic"] if method == "all" else [method]
    count = len(train.classes)
    found = {
        each: few_shot(taught, asked, classes=count, shots=shots, seeds=range(seeds), method=each, sweep=sweep)
        for each in wanted
    }
    if save is not None:
        save_taught(save, replace(artefact, preprocessing=how), taught, labels=train.classes, shots=max(shots))
        talk.print(safe_text(f"wrote {save}: a model that tells {count} classes"), soft_wrap=True)
    if as_json:
        first, *others = wanted
        print_json(
            {"model": artefact.name, "classes": count, "method": first, "shots": in_numbers(found[first])}
            | {"bad": [{"file": file.name, "reason": file.reason} for _, bad in looked for file in bad]}
            | {each: in_numbers(found[each]) for each in others}
        )
        return
    print_table(found)


def check_free(place: Path) -> None:
    """Refuse to write over anything, before time is spent."""
    from vitkit.core.errors import WeightsError

    if place.exists() and (place.is_file() or any(place.iterdir())):
        raise WeightsError(f"{place} is there already", hint="choose another place for --save")


def save_taught(place: Path, artefact: "Artefact", taught: "Labelled", *, labels: tuple[str, ...], shots: int) -> None:
    """Write the model with a head of the first draw of so many examples, with probabilities made honest."""
    from vitkit.checkpoints import native
    from vitkit.evaluate.fewshot import chosen_images
    from vitkit.evaluate.least_squares import left_out, sharpened, solve
    from vitkit.evaluate.probing import with_head

    some = taught.at(chosen_images(taught.labels, classes=len(labels), shots=shots, seed=0))
    solved = solve(some.features, some.labels, classes=len(labels))
    head = sharpened(solved.head(), left_out(solved, some.features, some.labels), some.labels)
    native.save(place, with_head(artefact, head, labels=labels, preprocessing=artefact.preprocessing))


def in_numbers(found: "dict[int, Shots]") -> dict[str, dict[str, object]]:
    """By number of shots: the mean, the spread, and each seed."""
    return {
        str(shots): {"mean": each.mean, "std": each.deviation, "seeds": list(each.accuracies)}
        | ({"l2": list(each.l2)} if each.l2 else {})
        for shots, each in found.items()
    }


def print_table(found: "dict[Method, dict[int, Shots]]") -> None:
    """A row for each number of shots, a column for each method."""
    rows = [["shots", *found]]
    for shots in next(iter(found.values())):
        each = [f"{found[method][shots].mean:.1%} ± {found[method][shots].deviation:.1%}" for method in found]
        rows.append([str(shots), *each])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
