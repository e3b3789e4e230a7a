"""Forward and backward passes of vitkit, timm and transformers with the same weights, in interleaved runs.

make bench                                              everything, about a quarter of an hour; writes BENCHMARKS.md
python bench/forward_backward.py --quick                Ti/16 only, two minutes, prints
python bench/forward_backward.py --models S/16,B/16 --json rows.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import memory
import psutil
from peers import CANDIDATES, import_peer
from report import Result, describe_environment, section, table, write_section
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rows import MODELS, Row, all_rows
from timing import QUICK, Effort, ratio, time_row

from vitkit.core.environment import retain_freed_memory

BENCHMARKS = Path(__file__).parent.parent / "BENCHMARKS.md"
MEMORY_SECONDS = 12.0
"""Estimated start-up time of the three processes of a row, for the progress bar."""
SPEED = {"fp32": 100.0, "bf16": 25.0}
"""Estimated GFLOP per second on two cores, for the progress bar."""


@click.command()
@click.option("--models", default=None, help=f"Models, comma-separated.  [all: {','.join(MODELS)}]")
@click.option("--quick", is_flag=True, help="Few rounds, Ti/16 unless --models is given.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the report to this Markdown file.  [default for a full run: BENCHMARKS.md]",
)
@click.option(memory.OPTION, "request", hidden=True)
def main(models: str | None, quick: bool, json_file: Path | None, write: Path | None, request: str | None) -> None:
    """Compare the time and memory of forward and backward passes with timm and transformers."""
    if request:
        print(memory.handle_request(request))
        return
    chosen = models.split(",") if models else list(MODELS[:1] if quick else MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise click.BadParameter(
            f"unknown: {', '.join(unknown)}; choose from {', '.join(MODELS)}", param_hint="--models"
        )
    others = OtherProcesses()
    retain_freed_memory()
    results = measure(all_rows(chosen), effort=QUICK if quick else Effort())
    command = " ".join(["python", "bench/forward_backward.py", *sys.argv[1:]])
    environment = describe_environment(command=command, other_cpu_fraction=others.fraction())
    print(table(results))
    if environment.is_busy:
        print("warning: other processes were running; repeat the benchmark on an idle machine", file=sys.stderr)
    if json_file:
        numbers = {"environment": environment.as_dict(), "rows": [result.as_dict() for result in results]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    whole = not quick and set(chosen) == set(MODELS)
    if path := write or (BENCHMARKS if whole else None):
        write_section(section(results, environment), path)


def measure(rows: Sequence[Row], *, effort: Effort) -> list[Result]:
    """Measure all rows, with progress on stderr."""
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=3600) as progress:
        task = progress.add_task("imports", total=sum(expected_seconds(row, effort) for row in rows))
        import_peer("timm")
        import_peer("transformers").logging.set_verbosity_error()
        for row in rows:
            progress.update(task, description=str(row))
            times, difference = time_row(row, effort=effort)
            progress.advance(task, expected_seconds(row, effort) - MEMORY_SECONDS)
            peaks = memory.peaks_in_new_processes(row)
            progress.advance(task, MEMORY_SECONDS)
            results.append(Result(row=row, times=times, difference=difference, peaks=peaks))
            left = progress.tasks[task].time_remaining or 0.0
            progress.console.print(
                f"{row}: ratio {ratio(times.best()):.3f} best, {ratio(times.median()):.3f} median of {times.rounds}; "
                f"logits differ by {difference:.1e}; {left / 60:.0f} min left",
                highlight=False,
                soft_wrap=True,
            )
    return results


def expected_seconds(row: Row, effort: Effort) -> float:
    """Estimate the duration of a row."""
    seconds_per_run = row.gflops / SPEED[row.precision]
    warm_up_and_check, candidates = 2, len(CANDIDATES)
    rounds = effort.rounds(candidates * seconds_per_run) + warm_up_and_check
    return candidates * rounds * seconds_per_run + MEMORY_SECONDS


class OtherProcesses:
    """CPU use of other processes since construction."""

    def __init__(self) -> None:
        self.busy, self.total, self.ours = self.read()

    def read(self) -> tuple[float, float, float]:
        """Return the busy and total seconds of all cores, and the busy seconds of our own processes."""
        cores, process = psutil.cpu_times(), psutil.Process().cpu_times()
        total = sum(cores) - getattr(cores, "guest", 0.0) - getattr(cores, "guest_nice", 0.0)
        ours = process.user + process.system + process.children_user + process.children_system
        return total - cores.idle - getattr(cores, "iowait", 0.0), total, ours

    def fraction(self) -> float:
        """Return the fraction of the cores that other processes used since construction."""
        busy, total, ours = self.read()
        return max(0.0, (busy - self.busy - (ours - self.ours)) / (total - self.total))


if __name__ == "__main__":
    main()
