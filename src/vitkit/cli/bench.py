"""`vitkit bench`: a model goes in; how fast each engine and precision runs it here, and how exactly, comes out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.describing import counted
from vitkit.cli.engines import EngineChoice, build_if_needed, tell
from vitkit.cli.output import format_bytes, print_json, result_console, safe_text, talk_console

if TYPE_CHECKING:
    import torch

    from vitkit.engine.agreement import Agreement
    from vitkit.engine.engine import Engine, Precision
    from vitkit.engine.timing import Speed, Start
    from vitkit.zoo.lookup import Model

WORTH_IT = 1.2
"""How much faster another precision has to be to be recommended."""
SAME_ENOUGH = 0.97
"""The share of images that must keep their class for it."""
AGREEMENT_SECONDS = 10.0
"""What a large model may take in fp32 to answer for the images that agreement is measured on, which are 64 at most."""
ENOUGH_IMAGES = 16
"""Images below which agreement says little."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one engine reached."""

    kind: str
    precision: str
    merge: int = 0
    engine: str
    start: "Start"
    agreement: "Agreement | None"
    speeds: "tuple[Speed, ...]"

    def to_json(self) -> dict[str, object]:
        """As the command prints it."""
        return {
            "kind": self.kind,
            "precision": self.precision,
            "merge": self.merge,
            "engine": self.engine,
            "start_seconds": self.start.seconds,
            "memory_bytes": self.start.memory_bytes,
            "agreement": self.agreement and self.agreement.to_json(),
            "speeds": [asdict(speed) | {"images_per_second": speed.images_per_second} for speed in self.speeds],
        }


class Listed(click.ParamType[list[str]]):
    """Words with commas between them."""

    name = "list"

    def __init__(self, known: Sequence[str] | None = None) -> None:
        self.known = known

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The words, each once; an unknown one, or what is no number from 1 on, is an error."""
        words = list(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        for word in words:
            if self.known is None and not (word.isdecimal() and int(word) > 0):
                self.fail(f"{word!r} is no number of images", param, ctx)
            if self.known is not None and word not in self.known:
                self.fail(f"{word!r} is none of {', '.join(self.known)}", param, ctx)
        return words or self.fail("the list is empty", param, ctx)


@click.command("bench")
@click.argument("model")
@click.option("--images", metavar="PLACE", help="Measure agreement with fp32 on the first images there.")
@click.option("--batch", type=Listed(), default="1,8,32", show_default=True, help="Images at once.")
@click.option(
    "--precision",
    type=Listed(("fp32", "bf16", "int8")),
    default="fp32,bf16,int8",
    show_default=True,
    help="Which to try.",
)
@click.option("--merge", type=click.IntRange(min=0), metavar="R", default=0, help="Try R merged tokens a layer, too.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.0, max=600.0), default=2.0, show_default=True, help="Time for each cell."
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    images: str | None,
    batch: list[str],
    precision: list[str],
    merge: int,
    seconds: float,
    device: str,
    as_json: bool,
) -> None:
    """How fast MODEL, a run, weights of any origin or a name such as B/16, runs on this machine, and how exactly.

    Every engine and precision takes turns with the others, so that they are compared fairly on a busy machine too. What
    bf16 and int8 change is measured beside fp32 as written, on your images if you give some.

    \b
    vitkit bench runs/photos --images photos
    vitkit bench runs/photos --images photos --merge 8
    vitkit bench B/16 --batch 1,8 --precision fp32,int8
    """
    import torch

    from vitkit.core.shapes import sides
    from vitkit.engine.choose import build_failure, reason_against_native
    from vitkit.engine.devices import choose_device
    from vitkit.engine.merging import check_merging

    place = choose_device(device)
    subject, calibration, note = subject_of(model, images)
    check_merging(subject, merge)  # before anything is compiled
    build_if_needed(subject, EngineChoice(), device=place)
    if place.type == "cpu" and (reason := reason_against_native(subject, precision="fp32") or build_failure()):
        tell(f"without the native engine: {reason}")
    makers = makers_of(subject, device=place, precisions=precision, merge=merge)
    rows = measure(subject, makers, calibration, device=place, batches=batch, seconds=seconds)
    advice = recommend(rows)
    threads = torch.get_num_threads()
    if as_json:
        about = {"model": name_for_people(model, subject), "device": str(place), "threads": threads}
        checked = {"images": sum(map(len, calibration)), "place": images, "note": note}
        print_json(about | {"agreement": checked, "results": [row.to_json() for row in rows], "recommendation": advice})
        return
    size = sides(subject.config.image_size)
    where = f"{place.type}, {counted(threads, 'thread')}" if place.type == "cpu" else str(place)
    console = result_console()
    console.print(safe_text(f"{name_for_people(model, subject)}, {size} pixels, {where}"), style="bold", soft_wrap=True)
    print_rows(rows)
    for sentence in (note, advice):
        console.print(safe_text(sentence), soft_wrap=True)


def subject_of(model: str, place: str | None) -> "tuple[Model, list[torch.Tensor], str]":
    """The model, the images that agreement is measured on, and a sentence that says which they are."""
    import torch

    from vitkit.checkpoints.ready import load
    from vitkit.checkpoints.reference import drawn_image
    from vitkit.core.errors import DataError, UnknownNameError
    from vitkit.engine.timing import clocked
    from vitkit.predict.places import images_at
    from vitkit.predict.stream import sample
    from vitkit.zoo.lookup import create, find

    if not Path(model).exists():
        try:
            find(model)
        except UnknownNameError:
            pass  # perhaps the name of weights, which load knows
        else:
            note = "The weights are random, so there is no agreement to measure."
            return create(model).eval(), [], note
    loaded = load(model)
    if place is None:
        note = "Agreement is that on one drawn image; --images PLACE measures it on yours."
        return loaded, [drawn_image(loaded.config)], note
    with torch.inference_mode():
        seconds = clocked(lambda: loaded(drawn_image(loaded.config)))
    most = max(ENOUGH_IMAGES, min(64, int(AGREEMENT_SECONDS / seconds)))
    found = list(sample(images_at([place]), loaded.preprocess.preprocessing, images=most))
    if not found:
        raise DataError("not one image there can be read", got=place)
    return loaded, found, f"Agreement is that on {counted(sum(map(len, found)), 'image')} of {place}."


def name_for_people(asked: str, subject: "Model") -> str:
    """What the model is called."""
    from vitkit.zoo.lookup import name_of

    return str(getattr(subject, "name", None) or name_of(subject.config) or asked)


@dataclass(frozen=True, kw_only=True)
class Maker:
    """An engine to be made."""

    kind: str
    precision: str
    merge: int = 0
    make: Callable[[], "Engine"]


def makers_of(subject: "Model", *, device: "torch.device", precisions: Sequence[str], merge: int) -> list[Maker]:
    """Every engine that can run the model here, and those that merge tokens if that is asked for."""
    from vitkit.core.errors import ConfigError
    from vitkit.engine.choose import kinds, made
    from vitkit.engine.engine import check_precision

    makers = []
    for precision in map(check_precision, precisions):
        known = kinds(subject, precision=precision, device=device)
        for kind in known:
            make = partial(made, kind, subject, precision=precision, device=device)
            makers.append(Maker(kind=kind, precision=precision, make=make))
        if merge and known:
            make = partial(merging_engine, subject, precision=precision, device=device, merge=merge)
            makers.append(Maker(kind="merging", precision=precision, merge=merge, make=make))
    if not makers:
        raise ConfigError("nothing to time", got=f"{', '.join(precisions)} on {device}", hint="int8 is for the CPU")
    return makers


def merging_engine(subject: "Model", *, precision: "Precision", device: "torch.device", merge: int) -> "Engine":
    """The engine that merges tokens; on a GPU compiled from its first batch on, as many images would be answered."""
    from vitkit.engine.choose import engine_for
    from vitkit.engine.compiled import impatient

    return impatient(engine_for(subject, precision=precision, device=device, merge=merge))


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An engine that is made, and what is known of it before it is timed."""

    maker: Maker
    engine: "Engine"
    start: "Start"
    agreement: "Agreement | None"

    def timed(self, speeds: "tuple[Speed, ...]") -> Row:
        """Its row, once it is."""
        return Row(
            kind=self.maker.kind,
            precision=self.maker.precision,
            merge=self.maker.merge,
            engine=self.engine.name,
            start=self.start,
            agreement=self.agreement,
            speeds=speeds,
        )


def measure(
    subject: "Model",
    makers: Sequence[Maker],
    calibration: "list[torch.Tensor]",
    *,
    device: "torch.device",
    batches: Sequence[str],
    seconds: float,
) -> list[Row]:
    """Make every engine, ask each about the images, then time all of them by turns."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from vitkit.core.shapes import pair
    from vitkit.engine.timing import random_images, speeds

    images = partial(random_images, subject.config.channels, pair(subject.config.image_size))
    talk = talk_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
        task = progress.add_task("making engines", total=len(makers) * (1 + len(batches)))
        engines = []
        for ready in made_ready(subject, makers, calibration, first=images(batch=1), device=device):
            engines.append(ready)
            progress.advance(task)
        timed: list[list[Speed]] = []
        for batch in map(int, batches):
            progress.update(task, description=f"timing batches of {batch}")
            asked = [ready.engine for ready in engines]
            advance = partial(progress.advance, task)
            timed.append(speeds(asked, images(batch=batch), seconds=seconds, progress=advance))
    return [ready.timed(reached) for ready, reached in zip(engines, zip(*timed, strict=True), strict=True)]


def made_ready(
    subject: "Model",
    makers: Sequence[Maker],
    calibration: "list[torch.Tensor]",
    *,
    first: "torch.Tensor",
    device: "torch.device",
) -> Iterator[Ready]:
    """Make the engines one by one, and compare what each says of the images with what the model as written does."""
    from vitkit.engine.agreement import asked, compared
    from vitkit.engine.timing import started
    from vitkit.engine.written import written

    reference = written(subject, device=device)
    reference.answer(first)  # what torch sets up once is no engine's cost
    expected = asked(reference, calibration) if calibration else None
    for maker in makers:
        engine, start = started(maker.make, first, device=device)
        agrees = None if expected is None else compared(asked(engine, calibration), expected)
        yield Ready(maker=maker, engine=engine, start=start, agreement=agrees)


def recommend(rows: Sequence[Row]) -> str:
    """What to use, in a sentence: the fastest engine that still says the same, by the largest batch."""
    by_speed = sorted(rows, key=lambda row: -row.speeds[-1].images_per_second)
    exact = next((row for row in by_speed if row.precision == "fp32" and not row.merge), None)
    if exact is None:
        return f"The fastest was {by_speed[0].precision} by {by_speed[0].engine}; fp32 was not tried."
    faster = by_speed[: by_speed.index(exact)]
    if not faster:
        return f"Use fp32, which nothing here outruns: {exact.engine}."
    for row in faster:
        times = row.speeds[-1].images_per_second / exact.speeds[-1].images_per_second
        if times >= WORTH_IT and (row.agreement is None or row.agreement.same_top1 >= SAME_ENOUGH):
            return praise(row, times=times)
    return "Use fp32: nothing else is both faster by a fifth and in agreement with it."


def praise(row: Row, *, times: float) -> str:
    """What speaks for an engine that is so many times as fast as fp32, and what is still to be seen."""
    options = f"--precision {row.precision}" + (f" --merge {row.merge}" if row.merge else "")
    fact = f"{times:.1f} × as fast as fp32 with batches of {row.speeds[-1].batch}"
    agrees = row.agreement
    if agrees is None:
        return f"{options} is {fact}; whether it says the same, your own model and --images tell."
    if agrees.images < ENOUGH_IMAGES:
        return f"{options} is {fact}; before you use it, see what it changes with --images."
    kept = f"{round(agrees.same_top1 * agrees.images)} of {counted(agrees.images, 'image')} kept their"
    if not agrees.of_logits:
        return f"Use {options}: it is {fact}, and the features of {kept} direction."
    return f"Use {options}: it is {fact}, and {kept} class. vitkit eval tells its accuracy on labelled images."


def print_rows(rows: Sequence[Row]) -> None:
    """The table, images a second for each size of batch; and under it what the engines are."""
    head = ["precision", "engine", *(f"batch {speed.batch}" for speed in rows[0].speeds)]
    table = [[*head, "first p50", "start", "memory", "same top-1", "apart"]]
    for row in rows:
        memory, agrees = row.start.memory_bytes, row.agreement
        table.append(
            [
                row.precision,
                row.kind,
                *(f"{speed.images_per_second:.1f}/s" for speed in row.speeds),
                f"{1000 * row.speeds[0].latency_p50:.1f} ms",
                f"{row.start.seconds:.2f} s",
                "–" if memory is None else format_bytes(memory),
                "–" if agrees is None else f"{agrees.same_top1:.1%}",
                "–" if agrees is None else f"{agrees.largest_difference:.2g}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    console = result_console()
    for number, cells in enumerate(table):
        padded = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        console.print("  ".join(padded), style=None if number else "bold", soft_wrap=True)
    names = dict.fromkeys((row.kind, row.engine) for row in rows)
    for kind, name in names:
        console.print(safe_text(f"{kind}: {name}"), style="dim", soft_wrap=True)
