"""`vitkit predict`: a model and images go in, what it says of each comes out, on the screen or in a file."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.checking import warn_of
from vitkit.cli.engines import (
    EngineChoice,
    asked,
    calibration_option,
    engine_options,
    ready_predictor,
    tell,
    tell_agreement,
)
from vitkit.cli.output import print_json, safe_text, talk_console

if TYPE_CHECKING:
    from vitkit.data.source import Source
    from vitkit.predict.predictor import Predictor
    from vitkit.predict.stream import Answer, Question
    from vitkit.predict.tables import AnswerFile

WORKERS = 2


@click.command("predict")
@click.argument("model")
@click.argument("images", nargs=-1, required=True)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="How many classes to name.")
@click.option("--features", is_flag=True, help="Give the features of each image too; needs --out or --json.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the answers to this .csv, .jsonl or .parquet file.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Images at once.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=WORKERS, show_default=True, help="Processes that decode."
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@engine_options
@calibration_option
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each image.")
def command(
    model: str,
    images: tuple[str, ...],
    top: int,
    features: bool,
    out: Path | None,
    batch_size: int,
    workers: int,
    device: str,
    as_json: bool,
) -> None:
    """What MODEL, a run or weights of any origin, says of IMAGES: files, folders, tars or parquet files of them.

    Images are prepared as when the model was judged. One that cannot be read is named, and the others are answered.
    With --out any number of images will do: an interrupted command goes on where it was, and under torchrun each
    process writes a part of its own. In any precision but fp32, and with merged tokens, how far the answers agree with
    fp32 is measured on your images first and said.

    \b
    vitkit predict runs/photos cat.jpg dog.jpg
    vitkit predict runs/photos new-photos --out answers.csv
    vitkit predict runs/photos new-photos --out answers.csv --precision int8
    """
    from vitkit.core.errors import ConfigError
    from vitkit.engine.devices import choose_device
    from vitkit.predict.identity import marks
    from vitkit.predict.places import images_at
    from vitkit.predict.stream import Question
    from vitkit.predict.tables import AnswerFile

    if features and out is None and not as_json:
        raise ConfigError("features are too many to print", hint="add --out FILE.parquet, or --json")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and out is None:
        raise ConfigError("several processes need a file to write to", hint="add --out FILE.csv")
    source, question, choice, file = images_at(images), Question(top=top, features=features), asked(), None
    part = shared_out(source, rank=rank, ranks=ranks)
    place = choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if out is not None:
        identity = {"model": model, "images": list(images), "top": top, "features": features, "part": [rank, ranks]}
        path = part_of(out, rank=rank, ranks=ranks)
        file = AnswerFile(path, identity | choice.identity(), seen=marks(model, part))
        if file.is_done():  # which takes no model and no engine to say
            tell(f"done already: {file.path}")
            return
    predictor = ready_predictor(model, choice, device=place, batch_size=batch_size)
    if not features:
        predictor.check_classes()
    about = measured(predictor, source, choice)
    if file is None:
        show(predictor, source, question, workers=workers, as_json=as_json)
        return
    write(predictor, part, question, file, about, workers=workers, as_json=as_json)


def measured(predictor: "Predictor", source: "Source", choice: EngineChoice) -> dict[str, object]:
    """What is to be known of the engine; where it may answer otherwise than fp32, how often is found and said."""
    about: dict[str, object] = {"precision": choice.precision, "merge": choice.merge, "engine": predictor.engine.name}
    if not choice.changes_answers:
        return about
    from vitkit.engine.agreement import agreement
    from vitkit.engine.compiled import PATIENCE, impatient
    from vitkit.engine.written import written
    from vitkit.predict.places import images_at
    from vitkit.predict.stream import sample

    images = images_at([choice.calibration]) if choice.calibration else source
    with talk_console().status("measuring agreement with fp32 …"):
        batches = list(sample(images, predictor.preprocessing))
        if len(batches) + len(source) / predictor.batch_size > PATIENCE:
            impatient(predictor.engine)  # it will compile, and what is compared is what answers
        reference = written(predictor.model, device=predictor.device)
        found = agreement(predictor.engine, reference, batches) if batches else None
    about["engine"] = predictor.engine.name  # another, where it could not compile
    if found is None:
        tell("agreement with fp32 is not known: no image could be read")
        return about | {"agreement": None}
    tell_agreement(found, choice)
    return about | {"agreement": found.to_json()}


def show(predictor: "Predictor", source: "Source", question: "Question", *, workers: int, as_json: bool) -> None:
    """Print what is said of each image as it comes; where not one could be read, that is a failure."""
    from vitkit.predict.stream import answers

    bad = 0
    for batch in answers(predictor, source, question, workers=workers if len(source) > predictor.batch_size else 0):
        for answer in batch:
            bad += answer.error is not None
            if as_json:
                print_json_line(answer)
            else:
                print_answer(answer)
    if bad == len(source):
        click.get_current_context().exit(1)


def write(
    predictor: "Predictor",
    source: "Source",
    question: "Question",
    file: "AnswerFile",
    about_engine: Mapping[str, object],
    *,
    workers: int,
    as_json: bool,
) -> None:
    """Write the answers to a file, from where it was left; asked to stop, leave it so that it can be gone on with."""
    from vitkit.core.stopping import SAVED_AND_STOPPED, listening
    from vitkit.data.source import Subset
    from vitkit.data.verify import BadFile
    from vitkit.predict.stream import answers, extent

    talk = talk_console()
    with file.begun() as done:
        if done:
            talk.print(f"going on after {done:,} of {len(source):,} images", soft_wrap=True)
        rest = Subset(source, range(done, len(source)))
        with listening() as stop, progress_of(len(source), done=done) as advance:
            for batch in file.add(answers(predictor, rest, question, workers=workers)) if len(rest) else ():
                advance(batch)
                if stop:
                    break
        if stop:
            talk.print(safe_text("stopped; the same command goes on"), soft_wrap=True)
            click.get_current_context().exit(SAVED_AND_STOPPED)
        classes, features = extent(predictor, question)
        about = file.finish(model=predictor.model.name, classes=classes, features=features, engine=about_engine)
    warn_of([BadFile(bad["file"], bad["reason"]) for bad in about["bad"]], talk)
    if as_json:
        print_json(about)
        return
    click.echo(safe_text(str(file.path)))


def part_of(out: Path, *, rank: int, ranks: int) -> Path:
    """The file of one process among several.

    >>> part_of(Path("answers.csv"), rank=1, ranks=4).name
    'answers-00001-of-00004.csv'
    """
    return out if ranks == 1 else out.with_name(f"{out.stem}-{rank:05}-of-{ranks:05}{out.suffix}")


def shared_out(source: "Source", *, rank: int, ranks: int) -> "Source":
    """The images of one process: an equal piece, so that the parts one after the other are in order."""
    from vitkit.data.source import Subset

    if ranks == 1:
        return source
    ends = [len(source) * part // ranks for part in (rank, rank + 1)]
    return Subset(source, range(*ends))


@contextmanager
def progress_of(total: int, *, done: int) -> "Iterator[Callable[[list[Answer]], None]]":
    """A bar with images, images a second and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    talk = talk_console()
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda batch: progress.advance(task, len(batch))


def print_json_line(answer: "Answer") -> None:
    """One line of JSON."""
    import json

    click.echo(json.dumps(answer.to_json()))


def print_answer(answer: "Answer") -> None:
    """A line for the image, and one for each class."""
    if answer.error is not None:
        click.echo(safe_text(f"{answer.file}: {answer.error}"), err=True)
        return
    click.echo(safe_text(answer.file))
    width = max(len(each.label) for each in answer.predictions)
    for each in answer.predictions:
        click.echo(safe_text(f"  {each.label:{width}}  {each.probability:6.1%}"))
