"""The command `vitkit finetune`."""

from typing import Any

import click

from vitkit.cli.options import RATES
from vitkit.cli.running import out_option, print_run
from vitkit.core.config import parse_assignments


@click.command("finetune")
@click.argument("model")
@click.argument("data")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@out_option
@click.option("--recipe", default="finetune-folder", show_default=True, help="Fine-tuning recipe; see vitkit recipes.")
@click.option("--sweep", is_flag=True, help="Choose the learning rate on held-out images, then train on all images.")
@click.option("--rates", type=RATES, help="Learning rates to try, such as 0.001,0.003, instead of the recipe's.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(settings: tuple[str, ...], sweep: bool, rates: list[float] | None, as_json: bool, **options: Any) -> None:
    """Fine-tune MODEL on DATA with a new head; positions are interpolated to a new image size.

    MODEL is a run, a published name such as B/16, or a file or directory that `vitkit weights info` knows. For images
    with other channels the first kernel is adapted.

    \b
    vitkit finetune runs/fractals photos/ --out runs/photos
    vitkit finetune ViT-B_16.npz photos/ --out runs/large image_size=384 --sweep
    vitkit finetune ViT-B_16.npz x-rays/ --out runs/gray channels=1

    \b
    Common settings: image_size=384  epochs=20  lr=3e-3  trainable=head  (all: vitkit recipes finetune-folder)
    """
    import vitkit

    run = vitkit.finetune(sweep=rates or sweep, settings=parse_assignments(settings), **options)
    print_run(run, as_json=as_json)
