"""`vitkit compare`: several runs or weights go in; one table, pictures, and how sure each difference is, come out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from vitkit.cli.checking import sound_images
from vitkit.cli.output import format_count, print_json, result_console, safe_text, talk_console

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitkit.checkpoints.native import Artefact
    from vitkit.data.source import Source
    from vitkit.evaluate.comparison import Contender, Difference
    from vitkit.evaluate.comparison_page import Comparison
    from vitkit.evaluate.judgement import Judgement
    from vitkit.train.folder import RunFolder


class Entrant(NamedTuple):
    """A model that was named on the command line."""

    label: str
    place: str
    artefact: "Artefact"


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN …")
@click.option("--data", metavar="DIR", help="Judge all of them anew on these images, and test the differences.")
@click.option("--split", help="Which split of --data; test, else val, else all images, where not given.")
@click.option("--kind", help="The kind of --data, where it is not found right by itself.")
@click.option(
    "--against",
    type=click.Choice(["first", "best"]),
    default="first",
    show_default=True,
    help="What differences are measured against.",
)
@click.option("--measure", is_flag=True, help="Measure images a second through each model, all taking turns.")
@click.option("--out", type=click.Path(path_type=Path), help="Write report.html, pictures, CSV and JSON here.")
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read images.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    runs: tuple[str, ...],
    data: str | None,
    split: str | None,
    kind: str | None,
    against: Literal["first", "best"],
    measure: bool,
    out: Path | None,
    workers: int,
    device: str,
    as_json: bool,
) -> None:
    """Put several RUNs, or weights of any origin, side by side: accuracy, calibration, size, cost and speed.

    Without --data each run is shown as it was judged when it finished. With it, all are judged on the same images,
    on those that none of them has learned from, and differences come with an interval and a test.

    \b
    vitkit compare runs/first runs/second --out compared
    vitkit compare runs/first runs/second --data photos --measure --out compared
    """
    from vitkit.core.errors import ConfigError
    from vitkit.evaluate.comparison_page import Comparison

    if (split is not None or kind is not None) and data is None:
        raise click.UsageError("--split and --kind are those of --data, which is not given")
    twice = next((run for number, run in enumerate(runs) if run in runs[:number]), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice", expected="different runs")
    entrants = enter(runs)
    warnings: list[str] = []
    judgements: list[Judgement] | None = None
    described = None
    talk = talk_console()
    if data is not None:
        described, judgements, warnings = judge_all(
            entrants, data, split=split, kind=kind, workers=workers, device=device
        )
    contenders, own_warnings = describe(entrants, judgements, judged_on=described)
    if measure:
        contenders = with_speeds(entrants, contenders, device=device)
    found = Comparison(
        contenders=contenders,
        differences=differences(entrants, judgements, against=against) if judgements else (),
        data=described,
        warnings=(*warnings, *own_warnings),
    )
    for warning in found.warnings:
        talk.print(safe_text(f"warning: {warning}"), style="yellow", soft_wrap=True)
    if out is not None:
        write(found, out)
    if as_json:
        print_json(found.to_json())
        return
    print_comparison(found)
    if out is not None:
        click.echo(safe_text(str(out / "report.html")))


def enter(runs: Sequence[str]) -> list[Entrant]:
    """The models, under the names of their folders, or all of the path where two folders have the same name."""
    from vitkit.checkpoints.foreign import load
    from vitkit.core.errors import WeightsError
    from vitkit.train.folder import RunFolder

    names = [Path(run).resolve().name or run for run in runs]
    entrants = []
    for run, name in zip(runs, names, strict=True):
        folder = RunFolder(Path(run))
        if folder.config.exists() and folder.result() is None:
            raise WeightsError(f"{run} is a run that is not finished", hint="run its command again: it goes on")
        entrants.append(Entrant(label=run if names.count(name) > 1 else name, place=run, artefact=load(run)))
    return entrants


# Judging


def judge_all(
    entrants: Sequence[Entrant], data: str, *, split: str | None, kind: str | None, workers: int, device: str
) -> "tuple[str, list[Judgement], list[str]]":
    """What was judged in words, each model's judgement on the same images, and what to beware of."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vitkit.core.errors import DataError
    from vitkit.engine.devices import choose_device
    from vitkit.evaluate.judging import judge_artefact, known_classes

    words, source, warnings = common_images(entrants, data, split=split, kind=kind)
    for entrant in entrants:  # before time is spent on looking at images
        try:
            known_classes(entrant.artefact, source)
        except DataError as error:
            raise DataError(f"{entrant.label}: {error}", hint=error.hint) from error
    talk = talk_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    judgements = []
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
        source = readable(entrants, source, data=data, workers=workers, progress=progress)
        task = progress.add_task("judging", total=len(source) * len(entrants))
        for entrant in entrants:
            progress.update(task, description=safe_text(f"judging {entrant.label}"))
            judgements.append(
                judge_artefact(
                    entrant.artefact,
                    source,
                    workers=workers,
                    device=choose_device(device),
                    progress=lambda images: progress.advance(task, images),
                )
            )
    return f"{len(source):,} images of {words}", judgements, warnings


def common_images(
    entrants: Sequence[Entrant], data: str, *, split: str | None, kind: str | None
) -> "tuple[str, Source, list[str]]":
    """The images that all can be judged by: of a run's own data set, those that it was not taught."""
    from vitkit.core.errors import DataError
    from vitkit.data.source import Subset
    from vitkit.data.sources.detect import open_data
    from vitkit.evaluate.judging import choose_split
    from vitkit.train.folder import RunFolder
    from vitkit.train.images import as_divided_for

    found = open_data(data, kind=kind)
    chosen = [choose_split(as_divided_for(RunFolder(Path(each.place)), found), split) for each in entrants]
    warnings = [
        f"{each.label} may have learned from these images"
        for each, (name, _) in zip(entrants, chosen, strict=True)
        if name == "train"
    ]
    names = [{source.name(index) for index in range(len(source))} for _, source in chosen]
    shared = set.intersection(*names)
    if not shared:
        raise DataError(
            f"{data}: there is no image that all can be judged by",
            expected="images that no run learned from",
            hint="name another data set, or a split with --split",
        )
    smallest = min(range(len(chosen)), key=lambda number: len(names[number]))
    split_name, source = chosen[smallest]
    if any(len(each) != len(shared) for each in names):
        warnings.append(f"the runs held out different images: {len(shared):,} that all of them held out are judged")
        source = Subset(source, [index for index in range(len(source)) if source.name(index) in shared])
    return f"{split_name} of {Path(data).name or data}", source, warnings


def readable(
    entrants: Sequence[Entrant], source: "Source", *, data: str, workers: int, progress: "Progress"
) -> "Source":
    """The images that every model can be given."""
    for channels in sorted({entrant.artefact.preprocessing.channels for entrant in entrants}):
        source, _ = sound_images(source, place=data, channels=channels, workers=workers, progress=progress)
    return source


def differences(
    entrants: Sequence[Entrant], judgements: "Sequence[Judgement]", *, against: Literal["first", "best"]
) -> "tuple[Difference, ...]":
    """Each model against the first, or against the best."""
    from vitkit.evaluate.comparison import paired_difference

    base = 0 if against == "first" else max(range(len(judgements)), key=lambda number: judgements[number].top1)
    right = [each.labels == each.predictions for each in judgements]
    return tuple(
        paired_difference(right[number], right[base], names=(entrant.label, entrants[base].label))
        for number, entrant in enumerate(entrants)
        if number != base
    )


# What is known of each


def describe(
    entrants: Sequence[Entrant], judgements: "Sequence[Judgement] | None", *, judged_on: str | None
) -> "tuple[tuple[Contender, ...], list[str]]":
    """The rows of the table, and what to beware of where each has been judged apart."""
    from vitkit.evaluate.comparison import Contender, family_of, scores_in, scores_of
    from vitkit.train.folder import RunFolder
    from vitkit.zoo.flops import forward_flops

    contenders, images = [], {}
    for number, entrant in enumerate(entrants):
        folder, artefact = RunFolder(Path(entrant.place)), entrant.artefact
        summary = folder.result() or {}
        ledger = mapping(summary.get("ledger"))
        result = mapping(summary.get("result"))
        scores, said = (scores_in(result), own_images(folder, summary)) if result else (None, None)
        if judgements is not None:
            scores, said = scores_of(judgements[number]), judged_on
        elif said is not None:
            images[entrant.label] = (said, fingerprint(folder, summary))
        contenders.append(
            Contender(
                label=entrant.label,
                model=artefact.name,
                family=family_of(artefact.config),
                parameters=sum(parameter.numel() for parameter in artefact.model().parameters()),
                gflops=sum(forward_flops(artefact.config).values()) / 1e9,
                scores=scores,
                judged_on=said,
                exaflops=number_in(ledger, "exaflops"),
                seconds=number_in(ledger, "seconds"),
                training_speed=number_in(ledger, "images_per_second"),
            )
        )
    return tuple(contenders), beware(contenders, images) if judgements is None else []


def beware(contenders: "Sequence[Contender]", images: dict[str, tuple[str, str | None]]) -> list[str]:
    """What makes the runs' own judgements hard to compare."""
    warnings = []
    unjudged = [each.label for each in contenders if each.scores is None]
    if unjudged:
        warnings.append(f"{', '.join(unjudged)}: no judgement of its own; --data DIR judges all of them")
    if len({digest or said for said, digest in images.values()}) > 1:
        kinds = "; ".join(f"{label} on {said}" for label, (said, _) in images.items())
        warnings.append(f"these were judged on different images, so their scores do not compare: {kinds}")
    return warnings


def mapping(value: object) -> dict[str, object]:
    """The value where it is a mapping; an empty one where it is not."""
    return value if isinstance(value, dict) else {}


def number_in(ledger: dict[str, object], key: str) -> float | None:
    """A number of the ledger, if it has it."""
    value = ledger.get(key)
    return float(value) if isinstance(value, int | float) else None


def own_images(folder: "RunFolder", summary: dict[str, object]) -> str:
    """In words, what a run was judged on."""
    split = str(summary.get("judged_on"))
    kind = data_of(folder).get("kind", "images")
    count = mapping(summary.get("result")).get("count", "?")
    return f"{count} images of {split} ({kind})"


def fingerprint(folder: "RunFolder", summary: dict[str, object]) -> str | None:
    """A checksum of the images that a run was judged on."""
    found = mapping(data_of(folder).get("fingerprints")).get(str(summary.get("judged_on")))
    return found if isinstance(found, str) else None


def data_of(folder: "RunFolder") -> dict[str, object]:
    """What a run wrote down of its images."""
    import json

    try:
        return mapping(json.loads(folder.data.read_bytes()))
    except (OSError, ValueError):
        return {}


def with_speeds(
    entrants: Sequence[Entrant], contenders: "tuple[Contender, ...]", *, device: str
) -> "tuple[Contender, ...]":
    """The rows with speeds that were measured in turns."""
    from dataclasses import replace

    from rich.progress import Progress

    from vitkit.engine.devices import choose_device
    from vitkit.evaluate.comparison import ROUNDS, measured_speeds

    talk = talk_console()
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as progress:
        task = progress.add_task("measuring", total=(ROUNDS + 1) * len(entrants))
        speeds = measured_speeds(
            [entrant.artefact.model() for entrant in entrants],
            device=choose_device(device),
            progress=lambda batches: progress.advance(task, batches),
        )
    return tuple(replace(each, speed=speed) for each, speed in zip(contenders, speeds, strict=True))


# Saying


def write(found: "Comparison", folder: Path) -> None:
    """Write the page, the pictures, the table and the JSON; each file whole or not at all."""
    import json

    from vitkit.core.files import write_bytes, write_text
    from vitkit.evaluate.comparison_page import CSV_COLUMNS, csv_rows, files
    from vitkit.evaluate.tables import as_csv

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "compare.json", json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
    write_bytes(folder / "compare.csv", as_csv(csv_rows(found), CSV_COLUMNS))
    for name, content in files(found).items():
        write_text(folder / name, content)


def print_comparison(found: "Comparison") -> None:
    """Print how good each is, what each costs, and each difference in a sentence."""
    from rich.text import Text

    from vitkit.evaluate.comparison_page import MISSING, on_the_clock

    quality, cost = [], []
    for each in found.contenders:
        scores = each.scores
        if scores is None:
            quality.append((each.label, *[MISSING] * 5))
        else:
            low, high = scores.interval
            mean = MISSING if scores.mean_per_class is None else f"{scores.mean_per_class:.1%}"
            shares = (f"{scores.top1:.2%}", f"{low:.1%}–{high:.1%}", f"{scores.top5:.1%}", mean)
            quality.append((each.label, *shares, f"{scores.ece:.3f}"))
        speed = each.speed or each.training_speed
        cost.append(
            (
                each.label,
                format_count(each.parameters),
                f"{each.gflops:.3g}",
                MISSING if each.exaflops is None else f"{each.exaflops:.3g}",
                MISSING if speed is None else f"{speed:,.0f}",
                on_the_clock(each.seconds),
            )
        )
    measured = any(each.speed for each in found.contenders)
    print_table(("run", "top-1", "95 %", "top-5", "per class", "ECE"), quality)
    rate = "images/s" if measured else "trained at"
    print_table(("run", "parameters", "GFLOPs", "exaFLOPs", rate, "time"), cost)
    for difference in found.differences:
        said = f"{difference.in_words()}, p = {difference.p_value:.2g}"
        result_console().print(Text(safe_text(said)), soft_wrap=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their heads; the first column is names, which may be strangers'."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, head in enumerate(heads):
        # Numbers are never cut: a name gives way.
        table.add_column(head, justify="right" if number else "left", no_wrap=True, min_width=6 if number else None)
    for name, *cells in rows:
        table.add_row(Text(safe_text(name)), *cells)
    console = result_console()
    console.print(table)
    console.print()
