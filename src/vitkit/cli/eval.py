"""`vitkit eval`: a trained model and labelled images go in, how good it is comes out."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.checking import sound_images
from vitkit.cli.output import print_json, print_sections, safe_text, talk_console

if TYPE_CHECKING:
    from vitkit.evaluate.judgement import Judgement


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data")
@click.option("--split", help="Which split to judge on; test, else val, else all images, where not given.")
@click.option("--kind", help="The kind of data set, where it is not found right by itself.")
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read images.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images at a time.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    run: Path, data: str, split: str | None, kind: str | None, workers: int, batch_size: int, device: str, as_json: bool
) -> None:
    """Judge the model in the folder RUN on DATA: top-1, top-5, per class, calibration, confusion.

    On the data set that it learned from, it is judged by the images that were held out.

    \b
    vitkit eval runs/photos photos/
    vitkit eval runs/photos holidays/ --json
    """
    from rich.progress import Progress

    from vitkit.checkpoints.foreign import load
    from vitkit.data.sources.detect import open_data
    from vitkit.evaluate.judging import choose_split, judge_artefact, known_classes
    from vitkit.train.folder import RunFolder
    from vitkit.train.images import as_divided_for
    from vitkit.train.parallel import choose_device

    artefact, place = load(run), choose_device(device)
    found = as_divided_for(RunFolder(run), open_data(data, kind=kind))
    name, source = choose_split(found, split)
    known_classes(artefact, source)  # before time is spent on looking at images
    talk = talk_console()
    if name == "train":
        talk.print("warning: these are images to learn from; the model may have seen them", style="yellow")
    talk.print(safe_text(f"{found.kind}: {len(source):,} images of split {name}"), soft_wrap=True)
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as progress:
        sound, bad = sound_images(
            source, place=data, channels=artefact.preprocessing.channels, workers=workers, progress=progress
        )
        task = progress.add_task("judging", total=len(sound))
        judgement = judge_artefact(
            artefact,
            sound,
            workers=workers,
            batch_size=batch_size,
            device=place,
            progress=lambda images: progress.advance(task, images),
        )
    if as_json:
        files = [{"file": file.name, "reason": file.reason} for file in bad]
        print_json(judgement.to_json() | {"split": name, "bad": files})
        return
    print_judgement(judgement, split=name)


def print_judgement(judgement: "Judgement", *, split: str) -> None:
    """Print the numbers, and the classes that are told worst."""
    low, high = judgement.intervals["top1"]
    worst = sorted(
        (each for each in judgement.per_class if each.recall is not None), key=lambda each: each.recall or 0.0
    )
    print_sections(
        {
            f"On {judgement.count:,} images ({split})": [
                ("top-1", f"{judgement.top1:.2%} (95 % interval {low:.1%}–{high:.1%})"),
                ("top-5", f"{judgement.top5:.2%}"),
                ("calibration", f"{judgement.ece:.3f} expected calibration error"),
                ("log-likelihood", f"{-judgement.nll:.3f} nats an image"),
            ],
            "Classes found least often": [
                (
                    each.name,
                    f"{each.recall or 0.0:.1%} of {each.count} found, {each.precision or 0.0:.1%} of guesses right",
                )
                for each in worst[:5]
            ],
        }
    )
