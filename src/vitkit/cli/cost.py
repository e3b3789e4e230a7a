"""`vitkit cost`: count parameters, operations and memory; compare Table 6 of the paper."""

from typing import TYPE_CHECKING, Any

import click

import vitkit
from vitkit.cli.console import print_result, print_sections, print_table, stdout_console
from vitkit.cli.options import SizeParameter, json_option
from vitkit.core.config import parse_assignments
from vitkit.core.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from vitkit.zoo.cost import Cost, Table6


class CountParameter(click.ParamType[int]):
    """Number of images: 50000, 50_000 or 303e6."""

    name = "count"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the count."""
        try:
            count = float(str(value))
        except ValueError:
            count = -1.0
        if not 1 <= count <= 1e15 or not count.is_integer():
            self.fail(f"{value!r} is not a number of images; use 50000 or 303e6", param, ctx)
        return int(count)


@click.command("cost")
@click.argument("model", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--image-size", type=SizeParameter(), help="384, or 224x320 for height and width.")
@click.option("--num-classes", type=click.IntRange(min=0), help="Outputs of the head.  [default: 1000]")
@click.option("--images", type=CountParameter(), help="Images of the training set, such as 1281167 or 303e6.")
@click.option("--epochs", type=click.FloatRange(min=0), help="Passes over the training set.  [default: 1]")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Images per step.")
@click.option("--table6", is_flag=True, help="Compare Table 6 of the paper with our counts.")
@json_option
def command(
    model: str | None,
    settings: tuple[str, ...],
    images: int | None,
    epochs: float | None,
    table6: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Count the operations and memory that MODEL needs for inference and training.

    \b
    vitkit cost B/16
    vitkit cost L/16 --image-size 512 --batch-size 64
    vitkit cost H/14 --images 303e6 --epochs 14
    vitkit cost B/16 positions.kind=relative pooling=mean
    vitkit cost --table6
    """
    if table6 != (model is None):
        raise click.UsageError("give either a model, such as B/16, or --table6 alone")
    if model is None:
        print_result(vitkit.table6(), print_table6, as_json=as_json)
        return
    if epochs is not None and images is None:
        raise click.UsageError("--epochs needs --images, the size of the training set")
    passes = 1 if epochs is None else epochs
    result = vitkit.cost(model, images=images, epochs=passes, settings=parse_assignments(settings), **options)
    print_result(result, print_cost, as_json=as_json)


def print_cost(cost: "Cost") -> None:
    """Print the cost of a model by section."""
    from vitkit.core.sizes import format_size

    total, longest = cost.forward_flops, max(cost.parts.values())
    run = []
    if cost.images:
        run = [
            ("images", f"{format_count(cost.images)} × {cost.epochs:g} epochs"),
            ("compute", f"{cost.exaflops:.4g} exaFLOPs"),
        ]
    print_sections(
        {
            " ".join((cost.model, *cost.settings)): [
                ("input", f"{format_size(cost.image_size)} pixels, {cost.num_classes} classes"),
                ("parameters", f"{cost.parameters:,}"),
                ("forward", f"{total / 1e9:.2f} GFLOPs per image"),
                ("training", f"{cost.train_flops / 1e9:.2f} GFLOPs per image: forward plus twice that for backward"),
            ],
            "Forward GFLOPs by part": [
                (part, f"{flops / 1e9:8.2f} {flops / total:6.1%}  {'█' * round(24 * flops / longest)}")
                for part, flops in cost.parts.items()
            ],
            "Memory in float32": [
                ("weights", format_bytes(cost.weight_bytes)),
                ("activations", f"{format_bytes(cost.activation_bytes)} per image, in training"),
                ("training", f"{format_bytes(cost.training_bytes)} at batch size {cost.batch_size}, with Adam"),
            ],
            "Run": run,
        }
    )


def print_table6(table6: "Table6") -> None:
    """Print the paper's exaFLOPs next to our counts, with and without zero padding."""
    rows = []
    for row in table6.rows:
        counts = (row.counted, row.counted_without_padding)
        cells = (cell for count in counts for cell in (f"{count:.1f}", f"{count / row.paper - 1:+.1%}"))
        rows.append((row.model, str(row.epochs), f"{row.paper:.0f}", *cells))
    print_table(("model", "epochs", "paper", "counted", "", "without padding", ""), rows)
    stdout_console().print(
        "\nexaFLOPs to pre-train on JFT-300M (Table 6 of the paper). The ResNet rows match when products with zero "
        "padding are not counted. The paper's 7-epoch cost of R50+L/16 is not half of its 14-epoch cost.",
        style="dim",
    )
