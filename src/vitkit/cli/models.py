"""`vitkit models`: list models or pretrained weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

import vitkit
from vitkit.cli.console import print_json, print_table, stdout_console
from vitkit.core.formatting import MISSING, format_count


@click.command("models")
@click.argument("pattern", default="*")
@click.option("--pretrained", is_flag=True, help="List pretrained weights instead of models.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def command(pattern: str, pretrained: bool, as_json: bool) -> None:
    """List models with a name or alias that matches PATTERN, with their sizes and cost.

    \b
    vitkit models                           all models
    vitkit models 'R50+*'                   hybrids with a ResNet-50
    vitkit models '*patch16*'               by timm or hub name
    vitkit models --pretrained 'google/*'   weights by source, model or format
    """
    records = vitkit.list_models(pattern, pretrained=pretrained).make_records()
    if as_json:
        print_json(list(records))
    elif pretrained:
        print_weights(records)
    else:
        print_models(records)


def print_models(models: Sequence[Mapping[str, Any]]) -> None:
    """Print models as a table."""
    rows = []
    for model in models:
        sizes = (model[key] for key in ("layers", "width", "heads", "patch", "tokens"))
        cells = (MISSING if size is None else str(size) for size in sizes)
        cost = (format_count(model["parameters"]), f"{model['gflops']:.1f}")
        rows.append((model["name"], model["kind"], *cells, *cost))
    heads = ("model", "kind", "layers", "width", "heads", "patch", "tokens", "parameters", "GFLOPs")
    print_table(heads, rows, left=(0, 1))
    stdout_console().print(
        "\nFor 1000 classes and 224 pixels. GFLOPs of one forward pass; a multiply-add counts as two. "
        "timm and hub names are aliases (--json lists them).",
        style="dim",
    )


def print_weights(weights: Sequence[Mapping[str, Any]]) -> None:
    """Print pretrained weights as a table, the source last so that it can be copied."""
    rows = []
    for entry in weights:
        top1 = MISSING if entry["top1"] is None else f"{entry['top1']:.2%}"
        sizes = (str(entry["image_size"]), str(entry["num_classes"] or MISSING), top1)
        rows.append((entry["model"], *sizes, entry["format"] or MISSING, entry["origin"], entry["source"]))
    heads = ("model", "pixels", "classes", "top-1", "format", "preprocessing", "source")
    print_table(heads, rows, left=(0, 4, 5, 6))
    stdout_console().print(
        "\nTop-1 on ImageNet as published. Sources that begin with hub: can be loaded by name.", style="dim"
    )
