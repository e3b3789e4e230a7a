"""`vitkit bench`: measure the speed and exactness of every engine on this machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_table, stdout_console
from vitkit.cli.options import device_option
from vitkit.core.formatting import format_bytes, safe_text

if TYPE_CHECKING:
    from vitkit.inference.benchmark import BenchmarkResult, BenchmarkRow

COLUMNS = ("startup", "memory", "same top-1", "difference")


class CommaSeparated(click.ParamType[list[str]]):
    """Comma-separated positive integers, or values of a list of choices."""

    name = "list"

    def __init__(self, choices: Sequence[str] | None = None) -> None:
        self.choices = choices

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Split the value, drop duplicates, and fail on invalid items."""
        items = list(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        for item in items:
            if self.choices is None and not (item.isdecimal() and int(item) > 0):
                self.fail(f"{item!r} is not a positive integer", param, ctx)
            if self.choices is not None and item not in self.choices:
                self.fail(f"{item!r} is not one of {', '.join(self.choices)}", param, ctx)
        return items or self.fail("the list is empty", param, ctx)


@click.command("bench")
@click.argument("model")
@click.option("--images", metavar="PATH", help="Measure agreement with fp32 on the first images there.")
@click.option(
    "--batch-size", type=CommaSeparated(), default="1,8,32", show_default=True, help="Batch sizes to measure."
)
@click.option(
    "--precision",
    type=CommaSeparated(("fp32", "bf16", "int8")),
    default="fp32,bf16,int8",
    show_default=True,
    help="Precisions to measure.",
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
def command(batch_size: list[str], as_json: bool, **options: Any) -> None:
    """Measure how fast and how exactly this machine runs MODEL: a run, weights of any format, or a name such as B/16.

    All engines and precisions are timed in turns, which gives a fair comparison on a busy machine too. bf16 and int8
    are compared with the unmodified model in fp32, on your images if you pass some.

    \b
    vitkit bench runs/photos --images photos
    vitkit bench runs/photos --images photos --merge 8
    vitkit bench B/16 --batch-size 1,8 --precision fp32,int8
    """
    import vitkit

    result = vitkit.benchmark(batch_size=[int(size) for size in batch_size], **options)
    print_result(result, _print_benchmark, as_json=as_json)


def _print_benchmark(result: "BenchmarkResult") -> None:
    threads = f"{result.threads} thread{'s' * (result.threads != 1)}"
    device = f"{result.device}, {threads}" if result.device == "cpu" else result.device
    height, width = result.image_size
    console = stdout_console()
    console.print(safe_text(f"{result.model}, {height}×{width} pixels, {device}"), style="bold", soft_wrap=True)
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
        "–" if agreement is None else f"{agreement.same_top1:.1%}",
        "–" if agreement is None else f"{agreement.largest_difference:.2g}",
    ]
