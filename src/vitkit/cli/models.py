"""`vitkit models`: a wildcard pattern goes in, the matching rows of the zoo come out."""

import dataclasses
from typing import TYPE_CHECKING

import click

from vitkit.cli.output import format_count, print_json, result_console

if TYPE_CHECKING:
    import vitkit.zoo.summary


@click.command("models")
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def command(pattern: str, as_json: bool) -> None:
    """List the models whose name or alias fits PATTERN, with their sizes and cost.

    \b
    vitkit models            every model
    vitkit models 'R50+*'    hybrids of a ResNet-50
    vitkit models '*patch16*'  by a timm or hub name
    """
    from vitkit.core.errors import UnknownNameError, did_you_mean
    from vitkit.zoo.lookup import matching, models
    from vitkit.zoo.summary import summary

    rows = [(summary(variant), variant.aliases) for variant in matching(pattern)]
    if not rows:
        hint = did_you_mean(pattern, models()) or "vitkit models lists every name; * stands for anything"
        raise UnknownNameError(f"no model fits {pattern}", hint=hint)
    if as_json:
        print_json([dataclasses.asdict(row) | {"aliases": list(aliases)} for row, aliases in rows])
        return
    print_table([row for row, _ in rows])


def print_table(rows: "list[vitkit.zoo.summary.Summary]") -> None:
    """Print the rows under their headings."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", style="cyan", no_wrap=True)
    table.add_column("kind")
    for heading in ("layers", "width", "heads", "patch", "tokens", "parameters", "GFLOPs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        sizes = (row.layers, row.width, row.heads, row.patch, row.tokens)
        numbers = ("–" if size is None else str(size) for size in sizes)
        table.add_row(row.name, row.kind, *numbers, format_count(row.parameters), f"{row.gflops:.1f}")
    console = result_console()
    console.print(table)
    console.print(
        "\n1000 classes, 224 pixels; GFLOPs of one forward pass, a multiply-add counted as two. "
        "timm and hub names stand for these too; --json lists them.",
        style="dim",
    )
