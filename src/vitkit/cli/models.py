"""`vitkit models`: a wildcard pattern goes in, the matching rows of the zoo come out."""

import dataclasses
from typing import TYPE_CHECKING

import click

from vitkit.cli.output import format_count, print_json, result_console

if TYPE_CHECKING:
    import vitkit.zoo.published
    import vitkit.zoo.summary


@click.command("models")
@click.argument("pattern", default="*")
@click.option("--published", "as_published", is_flag=True, help="List published weights instead, with their scores.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def command(pattern: str, as_published: bool, as_json: bool) -> None:
    """List the models whose name or alias fits PATTERN, with their sizes and cost.

    \b
    vitkit models            every model
    vitkit models 'R50+*'    hybrids of a ResNet-50
    vitkit models '*patch16*'  by a timm or hub name
    vitkit models --published 'google/*'  weights, by source, model or format
    """
    if as_published:
        list_published(pattern, as_json=as_json)
    else:
        list_models(pattern, as_json=as_json)


def list_models(pattern: str, *, as_json: bool) -> None:
    """Print the models that fit the pattern."""
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


def list_published(pattern: str, *, as_json: bool) -> None:
    """Print the published weights that fit the pattern."""
    from vitkit.core.errors import UnknownNameError, did_you_mean
    from vitkit.zoo.published import PUBLISHED, published

    rows = published(pattern)
    if not rows:
        sources = [row.source.removeprefix("hub:") for row in PUBLISHED]
        hint = did_you_mean(pattern, sources) or "vitkit models --published lists all; * stands for anything"
        raise UnknownNameError(f"no published weights fit {pattern}", hint=hint)
    if as_json:
        print_json([weights_row(row) for row in rows])
        return
    print_published(rows)


def weights_row(row: "vitkit.zoo.published.Published") -> dict[str, object]:
    """What scripts may rely on of one row of published weights."""
    from vitkit.core.config import to_mapping
    from vitkit.zoo.lookup import name_of

    return {
        "source": row.source,
        "model": name_of(row.config),
        "format": row.format,
        "image_size": row.image_size,
        "classes": row.classes,
        "origin": row.origin,
        "preprocessing": to_mapping(row.preprocessing),
        "top1": row.top1,
    }


def print_published(rows: "tuple[vitkit.zoo.published.Published, ...]") -> None:
    """Print published weights under their headings, the source last and whole: it is there to be copied."""
    from rich.text import Text

    from vitkit.zoo.lookup import name_of

    table = [("model", "pixels", "classes", "top-1", "format", "preprocessing", "source")]
    for row in rows:
        score = "–" if row.top1 is None else f"{row.top1:.2%}"
        sizes = (str(row.image_size), str(row.classes or "–"), score)
        table.append((name_of(row.config), *sizes, row.format or "–", row.origin, row.source))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    console = result_console()
    for number, (*cells, source) in enumerate(table):
        columns = [
            f"{cell:>{width}}" if index in (1, 2, 3) else f"{cell:{width}}"
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        line = Text("  ".join([*columns, source]), style="" if number else "bold")
        if number:
            line.stylize("cyan", 0, widths[0])
        console.print(line, soft_wrap=True)
    console.print(
        "\nTop-1 on ImageNet as published. A source that begins with hub: can be loaded by that name.", style="dim"
    )
