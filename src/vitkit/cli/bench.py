"""`vitkit bench`: measure the speed and exactness of every engine on this machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_table, stdout_console
from vitkit.cli.options import COUNTS, PRECISIONS, device_option
from vitkit.core.formatting import MISSING, format_bytes, format_plural, safe_text
from vitkit.core.sizes import format_size

if TYPE_CHECKING:
    from vitkit.inference.benchmark import BenchmarkResult, BenchmarkRow

COLUMNS = ("startup", "memory", "same top-1", "difference")


@click.command("bench")
@click.argument("model")
@click.option("--images", metavar="PATH", help="Measure agreement with fp32 on the first images there.")
@click.option("--batch-size", type=COUNTS, default="1,8,32", show_default=True, help="Batch sizes to measure.")
@click.option(
    "--precision", type=PRECISIONS, default="fp32,bf16,int8", show_default=True, help="Precisions to measure."
)
@click.option("--merge", type=click.IntRange(min=0), metavar="R", default=0, help="Also merge R tokens per layer.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.0, max=600.0),
    default=2.0,
    show_default=True,
    help="Time per engine and batch size.",
)
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool, **options: Any) -> None:
    """Measure how fast and how exactly this machine runs MODEL: a run, weights of any format, or a name such as B/16.

    All engines and precisions are timed in turns, which gives a fair comparison on a busy machine too. bf16 and int8
    are compared with the unmodified model in fp32, on your images if you pass some.

    \b
    vitkit bench runs/photos --images photos
    vitkit bench runs/photos --images photos --merge 8
    vitkit bench B/16 --batch-size 1,8 --precision fp32,int8
    """
    import vitkit

    result = vitkit.benchmark(**options)
    print_result(result, print_benchmark, as_json=as_json)


def print_benchmark(result: "BenchmarkResult") -> None:
    """Print the model, the table of engines and the recommendation."""
    threads = format_plural(result.threads, "thread")
    device = f"{result.device}, {threads}" if result.device == "cpu" else result.device
    title = f"{result.model}, {format_size(result.image_size)} pixels, {device}"
    console = stdout_console()
    console.print(safe_text(title), style="bold", soft_wrap=True)
    _print_rows(result.rows)
    for sentence in (result.note, result.recommendation):
        console.print(safe_text(sentence), soft_wrap=True)


def _print_rows(rows: "Sequence[BenchmarkRow]") -> None:
    """Print a table of images per second by batch size, and below it the names of the engines."""
    engines: dict[tuple[str, str, int], list[BenchmarkRow]] = {}
    for row in rows:
        engines.setdefault((row.precision, row.kind, row.merge), []).append(row)
    table = list(engines.values())
    sizes = [f"batch {row.batch_size}" for row in table[0]]
    print_table(("precision", "engine", *sizes, "latency", *COLUMNS), list(map(_cells, table)), left=(0, 1))
    console = stdout_console()
    for kind, name in dict.fromkeys((row.kind, row.engine) for row in rows):
        console.print(safe_text(f"{kind}: {name}"), style="dim", soft_wrap=True)


def _cells(rows: "Sequence[BenchmarkRow]") -> list[str]:
    row = rows[0]
    agreement = row.agreement
    return [
        row.precision,
        row.kind,
        *(f"{each.images_per_second:.1f}/s" for each in rows),
        f"{1000 * row.latency_p50:.1f} ms",
        f"{row.start_seconds:.2f} s",
        format_bytes(row.memory_bytes),
        MISSING if agreement is None else f"{agreement.same_top1:.1%}",
        MISSING if agreement is None else f"{agreement.largest_difference:.2g}",
    ]
