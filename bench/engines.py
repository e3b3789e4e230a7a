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
from candidates import CANDIDATES, REFERENCE, Array, Candidate, Precision, unavailable_reason
from children import FILES, PEAK, TURN, Child
from cold import cold_starts
from engines_report import BATCHES, Engines, ModelMeasurements, section
from forward_backward import OtherProcesses
from report import describe_environment, write_section
from rows import MODELS
from timing import TOLERANCE

from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import configure

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
PACKAGES = ("onnxruntime", "openvino", "nncf")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Duration of a candidate's runs on one model and batch: turns that fill `seconds`, at least `min_rounds`.

    A run that would take longer than `max_run_seconds` is skipped; one that takes longer than a third of it runs once.
    """

    seconds: float = 2.0
    min_rounds: int = 3
    max_run_seconds: float = 20.0

    def turns(self, seconds_per_run: float) -> int:
        """Return the number of turns of a candidate."""
        return max(self.min_rounds, min(40, int(self.seconds / max(seconds_per_run, TURN))))


QUICK = Effort(seconds=0.6, min_rounds=2, max_run_seconds=1.5)


@click.command()
@click.option("--models", default=None, help=f"Models, comma-separated.  [all: {','.join(MODELS)}]")
@click.option("--precisions", default=",".join(PRECISIONS), show_default=True, help="Precisions to measure.")
@click.option("--quick", is_flag=True, help="Few runs, Ti/16 unless --models is given, no compiled models.")
@click.option("--folder", type=click.Path(path_type=Path), help="Directory that keeps the models for another run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the report to this Markdown file.")
def main(
    models: str | None, precisions: str, quick: bool, folder: Path | None, json_file: Path | None, write: Path | None
) -> None:
    """Time engines that compute the same function, interleaved, and compare them with the machine's peak."""
    chosen = models.split(",") if models else list(MODELS[:1] if quick else MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise click.BadParameter(
            f"unknown: {', '.join(unknown)}; choose from {', '.join(MODELS)}", param_hint="--models"
        )
    candidates = select_candidates(precisions.split(","), with_compiled=not quick)
    others, effort = OtherProcesses(), QUICK if quick else Effort()
    with tempfile.TemporaryDirectory() as temporary:
        path = folder or Path(temporary)
        with start_children(candidates, path) as children:
            seconds_per_gflop: dict[str, float] = {}
            measurements = [
                measure(model, candidates, children, path, seconds_per_gflop=seconds_per_gflop, effort=effort)
                for model in chosen
            ]
        starts = cold_starts(chosen[:1] if quick else [chosen[0], chosen[-1]], candidates, path)
    environment = describe_environment(command=command_line(), other_cpu_fraction=others.fraction())
    installed = {package: version(package) for package in PACKAGES if find_spec(package)}
    environment = replace(environment, versions=environment.versions | installed)
    engines = Engines(measurements=measurements, starts=starts, max_run_seconds=effort.max_run_seconds)
    text = section(engines, environment)
    print(text)
    if environment.is_busy:
        print("warning: other processes were running; repeat the benchmark on an idle machine", file=sys.stderr)
    if json_file:
        rows = [each.as_dict() for each in measurements]
        cold = [start.as_dict() for start in starts]
        json_file.write_text(json.dumps({"environment": environment.as_dict(), "models": rows, "cold": cold}) + "\n")
    if write:
        write_section(text, write, markers=engines.markers)


def select_candidates(precisions: Sequence[str], *, with_compiled: bool) -> list[Candidate]:
    """Return the candidates in some precisions, always including the reference."""
    return [
        candidate
        for candidate in CANDIDATES
        if (candidate.precision in precisions or candidate == REFERENCE)
        and (with_compiled or candidate.form != "compiled")
    ]


@contextmanager
def start_children(candidates: Sequence[Candidate], folder: Path) -> Iterator[dict[str, Child]]:
    """Start one process per library, one for the peak, and one that writes files."""
    with ExitStack() as stack:
        libraries = dict.fromkeys(candidate.library for candidate in candidates)
        yield {name: stack.enter_context(Child(name, folder)) for name in (*libraries, PEAK, FILES)}


def measure(
    model: str,
    candidates: Sequence[Candidate],
    children: Mapping[str, Child],
    folder: Path,
    *,
    seconds_per_gflop: dict[str, float],
    effort: Effort,
) -> ModelMeasurements:
    """Measure one model: available candidates, their differences, and their speed at each batch size.

    `seconds_per_gflop` holds the speeds measured so far, by candidate.
    """
    log(f"{model}: files")
    children[FILES].call(method="prepare", model=model)
    measurements = ModelMeasurements(model=model, gigaflops=sum(count_forward_flops(configure(model)).values()) / 1e9)
    running = []
    for candidate in candidates:
        if reason := unavailable_reason(candidate, model, folder):
            measurements.unavailable[candidate.key] = reason
            continue
        log(f"{model}: {candidate.key}")
        created = children[candidate.library].call(method="create", candidate=candidate.key, model=model)
        measurements.engines[candidate.key] = created["engine"]
        running.append(candidate)
    for batch in BATCHES:
        measurements.seconds[batch] = time_interleaved(
            running, children, batch, measurements, seconds_per_gflop=seconds_per_gflop, effort=effort
        )
        best = ", ".join(f"{key} {1000 * min(times):.1f}" for key, times in measurements.seconds[batch].items())
        log(f"{model}, batch {batch}: {best} ms")
    for library in {candidate.library for candidate in candidates}:
        children[library].call(method="release")
    return measured


def time_interleaved(
    candidates: Sequence[Candidate],
    children: Mapping[str, Child],
    batch: int,
    measurements: ModelMeasurements,
    *,
    seconds_per_gflop: dict[str, float],
    effort: Effort,
) -> dict[str, list[float]]:
    """Return the seconds of every run of one batch by candidate; each round runs a random order."""
    gigaflops, output = measurements.gigaflops * batch, {}
    seconds: dict[str, list[float]] = {}
    runs: dict[Candidate, tuple[int, float]] = {}
    for candidate in candidates:
        if candidate.form == "two streams" and batch == 1:
            continue
        is_required = candidate == REFERENCE or candidate.library == "vitkit"
        if not is_required and seconds_per_gflop.get(candidate.key, 0.0) * gigaflops > effort.max_run_seconds:
            continue
        log(f"{measurements.model}, batch {batch}: warm-up of {candidate.key}")
        first = children[candidate.library].call(method="warm_up", candidate=candidate.key, batch=batch)
        output[candidate] = np.array(first["logits"])
        seconds[candidate.key] = []
        runs[candidate] = effort.turns(first["seconds"]), first["seconds"]
        if first["seconds"] > effort.max_run_seconds / 3:  # too long to repeat
            runs[candidate] = 0, first["seconds"]
            seconds[candidate.key] = [first["seconds"]]
    compare(output, measurements)
    generator, rounds = random.Random(0), max(turns for turns, _ in runs.values())
    for number in range(rounds):
        if number in {0, rounds // 2}:
            measure_peaks(children[PEAK], candidates, measurements)
        order = [candidate for candidate, (turns, _) in runs.items() if is_turn(number, turns, rounds)]
        generator.shuffle(order)
        for candidate in order:
            once = runs[candidate][1]
            times = 1 if once >= TURN else 2 + int(TURN / once)
            result = children[candidate.library].call(method="run", candidate=candidate.key, batch=batch, times=times)
            seconds[candidate.key] += result["seconds"]
    seconds_per_gflop.update({key: min(times) / gigaflops for key, times in seconds.items()})
    return seconds


def is_turn(number: int, turns: int, rounds: int) -> bool:
    """Return whether a candidate with fewer turns than rounds runs in this round; turns are spread evenly.

    >>> [is_turn(number, 2, 6) for number in range(6)]
    [False, False, True, False, False, True]
    """
    return (number + 1) * turns // rounds > number * turns // rounds


def compare(output: Mapping[Candidate, Array], measurements: ModelMeasurements) -> None:
    """Record the largest difference to timm's logits by precision; exit if the fp32 models differ."""
    for candidate, logits in output.items():
        reference = output[REFERENCE]
        difference = float(np.abs(logits - reference).max() / np.abs(reference).max())
        if candidate.precision == "fp32" and not difference <= TOLERANCE["fp32"]:
            raise SystemExit(f"error: {candidate.key}: logits differ by {difference:.2g} of the largest")
        measurements.differences[candidate.key] = max(difference, measurements.differences.get(candidate.key, 0.0))


def measure_peaks(child: Child, candidates: Sequence[Candidate], measurements: ModelMeasurements) -> None:
    """Update the best speed of a large matrix product by precision."""
    for precision in dict.fromkeys(candidate.precision for candidate in candidates):
        results = child.call(method="run", candidate=precision, times=4)["gigaflops"]
        measurements.peaks[precision] = max(results, measurements.peaks.get(precision, 0.0))


def command_line() -> str:
    """Return the command without local paths."""
    words = ["python", "bench/engines.py", *sys.argv[1:]]
    if "--folder" in words:
        position = words.index("--folder")
        del words[position : position + 2]
    return " ".join(words)


def log(text: str) -> None:
    """Print progress with the minutes since the start."""
    print(f"{(time.monotonic() - STARTED) / 60:5.1f} min  {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()

if __name__ == "__main__":
    main()
