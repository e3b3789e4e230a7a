"""The command `vitkit finetune`."""

from pathlib import Path

import click

from vitkit.cli.running import parse_rates, print_result, training_session
from vitkit.core.environment import is_main_rank


@click.command("finetune")
@click.argument("model")
@click.argument("data")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Run directory; an interrupted run is resumed."
)
@click.option("--recipe", default="finetune-folder", show_default=True, help="Fine-tuning recipe; see vitkit recipes.")
@click.option("--sweep", is_flag=True, help="Choose the learning rate on held-out images, then train on all images.")
@click.option("--rates", help="Learning rates to try, such as 0.001,0.003, instead of the recipe's.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    data: str,
    settings: tuple[str, ...],
    out: Path,
    recipe: str,
    sweep: bool,
    rates: str | None,
    as_json: bool,
) -> None:
    """Fine-tune MODEL on DATA with a new head; positions are interpolated to a new image size.

    MODEL is a run, or a file or directory that `vitkit weights info` knows. For images with other channels the first
    kernel is adapted.

    \b
    vitkit finetune runs/fractals photos/ --out runs/photos
    vitkit finetune ViT-B_16.npz photos/ --out runs/large image_size=384 --sweep
    vitkit finetune ViT-B_16.npz x-rays/ --out runs/gray channels=1
    """
    sweep_rates = sweep if rates is None else parse_rates(rates)
    with training_session() as (progress, stop):
        from vitkit.recipes.train import finetune

        result = finetune(
            model, data, out=out, recipe=recipe, sweep=sweep_rates, settings=settings, callback=progress, stop=stop
        )
    if is_main_rank():
        print_result(result, as_json=as_json)
