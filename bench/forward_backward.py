"""Forward and backward passes of vitkit beside timm and transformers, on the same weights, in interleaved runs.

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
from peers import CONTENDERS, peer
from report import Result, look_around, section, table, write_section
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rows import MODELS, Row, rows_of
from timing import QUICK, Effort, race, ratio

from vitkit.cli.machine import keep_freed_memory

BENCHMARKS = Path(__file__).parent.parent / "BENCHMARKS.md"
MEMORY_SECONDS = 12.0
"""What the three fresh processes of a row take before they compute, roughly: for the progress bar."""
SPEED = {"fp32": 100.0, "bf16": 25.0}
"""GFLOP a second to expect of two cores, roughly: for the progress bar."""


@click.command()
@click.option("--models", default=None, help=f"Models to measure, with commas between; all are {','.join(MODELS)}.")
@click.option("--quick", is_flag=True, help="Few rounds, Ti/16 only unless --models says otherwise.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write all numbers to this file.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the report to this Markdown file. A run of all rows without --quick writes BENCHMARKS.md by itself.",
)
@click.option(memory.OPTION, "question", hidden=True)
def main(models: str | None, quick: bool, json_file: Path | None, write: Path | None, question: str | None) -> None:
    """Time forward and backward passes beside timm and transformers, and measure their memory."""
    if question:
        print(memory.answer(question))
        return
    chosen = models.split(",") if models else list(MODELS[:1] if quick else MODELS)
    if unknown := [name for name in chosen if name not in MODELS]:
        raise click.BadParameter(f"no {', '.join(unknown)}; there are {', '.join(MODELS)}", param_hint="--models")
    others = Others()
    keep_freed_memory()
    results = measure(rows_of(chosen), effort=QUICK if quick else Effort())
    command = " ".join(["python", "bench/forward_backward.py", *sys.argv[1:]])
    around = look_around(command=command, others_share=others.share())
    print(table(results))
    if around.is_busy:
        print("warning: other processes were at work; measure again on a quiet machine", file=sys.stderr)
    if json_file:
        numbers = {"circumstances": around.as_dict(), "rows": [result.as_dict() for result in results]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    whole = not quick and set(chosen) == set(MODELS)
    if path := write or (BENCHMARKS if whole else None):
        write_section(section(results, around), path)


def measure(rows: Sequence[Row], *, effort: Effort) -> list[Result]:
    """All rows, with progress on stderr."""
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=3600) as progress:
        task = progress.add_task("imports", total=sum(expected_seconds(row, effort) for row in rows))
        peer("timm")
        peer("transformers").logging.set_verbosity_error()
        for row in rows:
            progress.update(task, description=str(row))
            times, difference = race(row, effort=effort)
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
    """About how long a row takes."""
    one_run = row.gflops / SPEED[row.precision]
    warm_up_and_check, contenders = 2, len(CONTENDERS)
    rounds = effort.rounds(contenders * one_run) + warm_up_and_check
    return contenders * rounds * one_run + MEMORY_SECONDS


class Others:
    """What other processes do to the cores from here on."""

    def __init__(self) -> None:
        self.busy, self.total, self.ours = self.look()

    def look(self) -> tuple[float, float, float]:
        """Seconds of all cores in use, of all cores, and of our own processes."""
        cores, process = psutil.cpu_times(), psutil.Process().cpu_times()
        total = sum(cores) - getattr(cores, "guest", 0.0) - getattr(cores, "guest_nice", 0.0)
        ours = process.user + process.system + process.children_user + process.children_system
        return total - cores.idle - getattr(cores, "iowait", 0.0), total, ours

    def share(self) -> float:
        """The share of the cores that others used since this was made."""
        busy, total, ours = self.look()
        return max(0.0, (busy - self.busy - (ours - self.ours)) / (total - self.total))


if __name__ == "__main__":
    main()
