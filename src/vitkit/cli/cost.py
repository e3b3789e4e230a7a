"""`vitkit cost`: a model and a run go in, their operations and memory come out; or the paper's Table 6 beside ours."""

import re
from collections.abc import Sequence
from typing import Any

import click

from vitkit.cli.output import format_bytes, format_count, print_json, print_sections, result_console

Size = int | tuple[int, int]


class SizeParameter(click.ParamType):  # type: ignore[type-arg]
    """An image size: 384 for a square, 224x320 for height and width."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Size:
        """Read the size."""
        sides = re.fullmatch(r"(\d+)(?:x(\d+))?", str(value))
        if not sides:
            self.fail(f"{value!r} is not a size; write 384, or 224x320 for height and width", param, ctx)
        return int(sides[1]) if sides[2] is None else (int(sides[1]), int(sides[2]))


class CountParameter(click.ParamType):  # type: ignore[type-arg]
    """A number of images: 50000, 50_000 or 303e6."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the count."""
        try:
            count = float(str(value))
        except ValueError:
            count = -1.0
        if not 1 <= count <= 1e15 or not count.is_integer():
            self.fail(f"{value!r} is not a number of images; write 50000 or 303e6", param, ctx)
        return int(count)


@click.command("cost")
@click.argument("model", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--image-size", type=SizeParameter(), help="384, or 224x320 for height and width.")
@click.option("--classes", type=click.IntRange(min=0), help="Outputs of the head; 1000 if not given.")
@click.option("--images", type=CountParameter(), help="Images of the training set, such as 1281167 or 303e6.")
@click.option("--epochs", type=click.FloatRange(min=0), help="Passes over them; 1 if not given.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Images on the device at once.")
@click.option("--table6", is_flag=True, help="Compare the paper's Table 6 with our counts.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    model: str | None,
    settings: tuple[str, ...],
    image_size: Size | None,
    classes: int | None,
    images: int | None,
    epochs: float | None,
    batch: int,
    table6: bool,
    as_json: bool,
) -> None:
    """What MODEL costs to run and to train: operations by part, exaFLOPs of a run, memory.

    \b
    vitkit cost B/16
    vitkit cost L/16 --image-size 512 --batch 64
    vitkit cost H/14 --images 303e6 --epochs 14
    vitkit cost B/16 positions.kind=relative pooling=mean
    vitkit cost --table6
    """
    if table6 and model is None:
        print_table6(as_json=as_json)
        return
    if table6 or model is None:
        raise click.UsageError("name a model, such as B/16, or ask for --table6 alone")
    if epochs is not None and images is None:
        raise click.UsageError("--epochs passes over --images: say how many there are")
    figures = figures_of(
        model,
        settings,
        image_size=image_size,
        classes=classes,
        images=images,
        epochs=1.0 if epochs is None else epochs,
        batch=batch,
    )
    if as_json:
        print_json(figures)
    else:
        print_figures(figures)


def figures_of(
    model: str,
    settings: Sequence[str],
    *,
    image_size: Size | None,
    classes: int | None,
    images: int | None,
    epochs: float,
    batch: int,
) -> dict[str, Any]:
    """The figures of a model and a run, under the names that scripts rely on."""
    from vitkit.zoo.cost import cost
    from vitkit.zoo.lookup import configure

    config = configure(model, image_size=image_size, classes=classes, settings=settings)
    ledger = cost(config)
    return {
        "model": model,
        "settings": list(settings),
        "image_size": config.image_size,
        "classes": config.classes,
        "parameters": ledger.parameters,
        "forward_gflops": ledger.forward_flops / 1e9,
        "train_gflops": ledger.train_flops / 1e9,
        "parts_gflops": {part: flops / 1e9 for part, flops in ledger.parts.items()},
        "images": images,
        "epochs": epochs if images else None,
        "exaflops": ledger.exaflops(images=images, epochs=epochs) if images else None,
        "weight_bytes": ledger.weight_bytes,
        "activation_bytes_per_image": ledger.activation_bytes,
        "batch": batch,
        "training_bytes": ledger.training_bytes(batch),
    }


def print_figures(figures: dict[str, Any]) -> None:
    """Print the figures for a reader."""
    size, total = figures["image_size"], figures["forward_gflops"]
    pixels = f"{size}×{size}" if isinstance(size, int) else f"{size[0]}×{size[1]}"
    longest = max(figures["parts_gflops"].values())
    bars = {part: "█" * round(24 * gflops / longest) for part, gflops in figures["parts_gflops"].items()}
    run = []
    if figures["images"]:
        run = [
            ("images", f"{format_count(figures['images'])} × {figures['epochs']:g} epochs"),
            ("compute", f"{figures['exaflops']:.4g} exaFLOPs"),
        ]
    print_sections(
        {
            " ".join((figures["model"], *figures["settings"])): [
                ("input", f"{pixels} pixels, {figures['classes']} classes"),
                ("parameters", f"{figures['parameters']:,}"),
                ("forward", f"{total:.2f} GFLOPs an image"),
                ("training", f"{figures['train_gflops']:.2f} GFLOPs an image: forward, and twice that backward"),
            ],
            "Forward GFLOPs by part": [
                (part, f"{gflops:8.2f} {gflops / total:6.1%}  {bars[part]}")
                for part, gflops in figures["parts_gflops"].items()
            ],
            "Memory in float32": [
                ("weights", format_bytes(figures["weight_bytes"])),
                ("activations", f"{format_bytes(figures['activation_bytes_per_image'])} an image, in training"),
                ("training", f"{format_bytes(figures['training_bytes'])} at batch {figures['batch']}, with Adam"),
            ],
            "Run": run,
        }
    )


def print_table6(*, as_json: bool) -> None:
    """Print the paper's exaFLOPs beside our counts, with and without products with zero padding."""
    from rich.table import Table

    from vitkit.zoo.table6 import TABLE_6

    if as_json:
        columns = ("model", "epochs", "paper", "counted", "counted_without_padding")
        print_json([{column: getattr(row, column) for column in columns} for row in TABLE_6])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", style="cyan")
    for heading in ("epochs", "paper", "counted", "", "without padding", ""):
        table.add_column(heading, justify="right")
    for row in TABLE_6:
        counts = (row.counted, row.counted_without_padding)
        cells = (cell for count in counts for cell in (f"{count:.1f}", f"{count / row.paper - 1:+.1%}"))
        table.add_row(row.model, str(row.epochs), f"{row.paper:.0f}", *cells)
    console = result_console()
    console.print(table)
    console.print(
        "\nexaFLOPs to pre-train on JFT-300M, the paper's Table 6. Its ResNets are matched when products with a "
        "convolution's zero padding are left out. R50+L/16's 7 epochs are not half of its own 14.",
        style="dim",
    )
