"""Throughput and latency of vitkit's engines beside timm, transformers, ONNX Runtime and OpenVINO, in interleaved runs.

python bench/engines.py --write BENCHMARKS.md        everything, about a quarter of an hour; writes the section of
                                                     this kind of CPU there
python bench/engines.py --quick                      Ti/16, few runs, two minutes; prints
python bench/engines.py --models B/16 --precisions fp32,int8 --json engines.json
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
from children import FILES, PEAK, TURN, Child
from cold import cold_starts
from contenders import CONTENDERS, REFERENCE, Array, Contender, Precision, reason_against
from engines_report import BATCHES, Engines, Measured, section
from forward_backward import Others
from report import look_around, write_section
from rows import MODELS
from timing import TOLERANCE

from vitkit.zoo.flops import forward_flops
from vitkit.zoo.lookup import configure

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
PACKAGES = ("onnxruntime", "openvino", "nncf")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a contender may run on one model and batch: turns that fill `seconds`, but `fewest` at least.

    A run that would take longer than `longest` is left out; one that takes longer than a third of that is run once.
    """

    seconds: float = 2.0
    fewest: int = 3
    longest: float = 20.0

    def turns(self, seconds_a_run: float) -> int:
        """How many turns a contender gets."""
        return max(self.fewest, min(40, int(self.seconds / max(seconds_a_run, TURN))))


QUICK = Effort(seconds=0.6, fewest=2, longest=1.5)


@click.command()
@click.option("--models", default=None, help=f"Models to measure, with commas between; all are {','.join(MODELS)}.")
@click.option("--precisions", default=",".join(PRECISIONS), show_default=True, help="Precisions to measure.")
@click.option("--quick", is_flag=True, help="Few runs, Ti/16 only unless --models says otherwise, nothing compiled.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where models are kept for another run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the report to this Markdown file.")
def main(
    models: str | None, precisions: str, quick: bool, folder: Path | None, json_file: Path | None, write: Path | None
) -> None:
    """Time engines that compute the same function, interleaved, and say how near they come to the machine's peak."""
    chosen = models.split(",") if models else list(MODELS[:1] if quick else MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise click.BadParameter(f"no {', '.join(unknown)}; there are {', '.join(MODELS)}", param_hint="--models")
    contenders = choose(precisions.split(","), with_compiled=not quick)
    others, effort = Others(), QUICK if quick else Effort()
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        with started(contenders, place) as children:
            paces: dict[str, float] = {}
            measured = [measure(model, contenders, children, place, paces=paces, effort=effort) for model in chosen]
        starts = cold_starts(chosen[:1] if quick else [chosen[0], chosen[-1]], contenders, place)
    around = look_around(command=typed(), others_share=others.share())
    installed = {package: version(package) for package in PACKAGES if find_spec(package)}
    around = replace(around, versions=around.versions | installed)
    engines = Engines(measured=measured, starts=starts, longest=effort.longest)
    text = section(engines, around)
    print(text)
    if around.is_busy:
        print("warning: other processes were at work; measure again on a quiet machine", file=sys.stderr)
    if json_file:
        rows = [each.as_dict() for each in measured]
        cold = [start.as_dict() for start in starts]
        json_file.write_text(json.dumps({"circumstances": around.as_dict(), "models": rows, "cold": cold}) + "\n")
    if write:
        write_section(text, write, markers=engines.markers)


def choose(precisions: Sequence[str], *, with_compiled: bool) -> list[Contender]:
    """The contenders in some precisions, and always the one that speeds are relative to."""
    return [
        contender
        for contender in CONTENDERS
        if (contender.precision in precisions or contender == REFERENCE)
        and (with_compiled or contender.form != "compiled")
    ]


@contextmanager
def started(contenders: Sequence[Contender], folder: Path) -> Iterator[dict[str, Child]]:
    """A process for each library, one for the peak, and one that writes files."""
    with ExitStack() as stack:
        libraries = dict.fromkeys(contender.library for contender in contenders)
        yield {name: stack.enter_context(Child(name, folder)) for name in (*libraries, PEAK, FILES)}


def measure(
    model: str,
    contenders: Sequence[Contender],
    children: Mapping[str, Child],
    folder: Path,
    *,
    paces: dict[str, float],
    effort: Effort,
) -> Measured:
    """Everything about one model: what can run, whether it computes the same, how fast it is at each batch.

    `paces` are seconds for 10^9 operations, by contender, from what was measured before.
    """
    talk(f"{model}: files")
    children[FILES].ask(do="prepare", model=model)
    measured = Measured(model=model, gigaflops=sum(forward_flops(configure(model)).values()) / 1e9)
    running = []
    for contender in contenders:
        if reason := reason_against(contender, model, folder):
            measured.left_out[contender.key] = reason
            continue
        talk(f"{model}: {contender.key}")
        made = children[contender.library].ask(do="make", contender=contender.key, model=model)
        measured.engines[contender.key] = made["engine"]
        running.append(contender)
    for batch in BATCHES:
        measured.seconds[batch] = race(running, children, batch, measured, paces=paces, effort=effort)
        best = ", ".join(f"{key} {1000 * min(times):.1f}" for key, times in measured.seconds[batch].items())
        talk(f"{model}, batch {batch}: {best} ms")
    for library in {contender.library for contender in contenders}:
        children[library].ask(do="forget")
    return measured


def race(
    contenders: Sequence[Contender],
    children: Mapping[str, Child],
    batch: int,
    measured: Measured,
    *,
    paces: dict[str, float],
    effort: Effort,
) -> dict[str, list[float]]:
    """The seconds of every run of one batch, by contender; in each round those whose turn it is, in random order."""
    gigaflops, answers = measured.gigaflops * batch, {}
    seconds: dict[str, list[float]] = {}
    runs: dict[Contender, tuple[int, float]] = {}
    for contender in contenders:
        if contender.form == "two streams" and batch == 1:
            continue
        stays = contender == REFERENCE or contender.library == "vitkit"
        if not stays and paces.get(contender.key, 0.0) * gigaflops > effort.longest:
            continue
        talk(f"{measured.model}, batch {batch}: warming {contender.key}")
        first = children[contender.library].ask(do="warm", contender=contender.key, batch=batch)
        answers[contender] = np.array(first["logits"])
        seconds[contender.key] = []
        runs[contender] = effort.turns(first["seconds"]), first["seconds"]
        if first["seconds"] > effort.longest / 3:  # once is enough
            runs[contender] = 0, first["seconds"]
            seconds[contender.key] = [first["seconds"]]
    compare(answers, measured)
    generator, rounds = random.Random(0), max(turns for turns, _ in runs.values())
    for number in range(rounds):
        if number in {0, rounds // 2}:
            measure_peaks(children[PEAK], contenders, measured)
        order = [contender for contender, (turns, _) in runs.items() if is_turn(number, turns, rounds)]
        generator.shuffle(order)
        for contender in order:
            once = runs[contender][1]
            times = 1 if once >= TURN else 2 + int(TURN / once)
            took = children[contender.library].ask(do="run", contender=contender.key, batch=batch, times=times)
            seconds[contender.key] += took["seconds"]
    paces.update({key: min(times) / gigaflops for key, times in seconds.items()})
    return seconds


def is_turn(number: int, turns: int, rounds: int) -> bool:
    """Whether a contender with fewer turns than there are rounds runs in this one: its turns are spread evenly.

    >>> [is_turn(number, 2, 6) for number in range(6)]
    [False, False, True, False, False, True]
    """
    return (number + 1) * turns // rounds > number * turns // rounds


def compare(answers: Mapping[Contender, Array], measured: Measured) -> None:
    """Keep the largest difference to timm's logits by precision; in fp32 too large a one means another function."""
    for contender, logits in answers.items():
        reference = answers[REFERENCE]
        difference = float(np.abs(logits - reference).max() / np.abs(reference).max())
        if contender.precision == "fp32" and not difference <= TOLERANCE["fp32"]:
            raise SystemExit(f"error: {contender.key}: logits differ by {difference:.2g} of the largest")
        measured.differences[contender.key] = max(difference, measured.differences.get(contender.key, 0.0))


def measure_peaks(child: Child, contenders: Sequence[Contender], measured: Measured) -> None:
    """The best speed of a product of large matrices so far, by precision."""
    for precision in dict.fromkeys(contender.precision for contender in contenders):
        found = child.ask(do="run", contender=precision, times=4)["gigaflops"]
        measured.peaks[precision] = max(found, measured.peaks.get(precision, 0.0))


def typed() -> str:
    """The command, without the folder that only this machine has."""
    words = ["python", "bench/engines.py", *sys.argv[1:]]
    if "--folder" in words:
        place = words.index("--folder")
        del words[place : place + 2]
    return " ".join(words)


def talk(text: str) -> None:
    """Progress, with the minutes since the start."""
    print(f"{(time.monotonic() - STARTED) / 60:5.1f} min  {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
