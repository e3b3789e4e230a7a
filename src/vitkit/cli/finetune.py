"""`vitkit finetune`: a trained model and images go in, a model of these images comes out, by the paper's protocol."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.running import carry_out

if TYPE_CHECKING:
    from vitkit.train.config import RunConfig


@click.command("finetune")
@click.argument("weights")
@click.argument("data")
@click.argument("assignments", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder, new or to go on with.")
@click.option(
    "--recipe", default="finetune-folder", show_default=True, help="A fine-tuning recipe; see vitkit recipes."
)
@click.option("--sweep", is_flag=True, help="Choose the learning rate on held-out images, then run on everything.")
@click.option("--rates", help="Learning rates to try, such as 0.001,0.003; the recipe's own where not given.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    weights: str,
    data: str,
    assignments: tuple[str, ...],
    out: Path,
    recipe: str,
    sweep: bool,
    rates: str | None,
    as_json: bool,
) -> None:
    """Fine-tune the model in WEIGHTS on DATA: a new zero head, positions interpolated to a new image size.

    WEIGHTS are a run, or a file or folder that `vitkit weights info` knows. Images of other channels are no obstacle:
    the first kernel is adapted to them, and grey pictures keep their answers.

    \b
    vitkit finetune runs/fractals photos/ --out runs/photos
    vitkit finetune ViT-B_16.npz photos/ --out runs/large image_size=384 --sweep
    vitkit finetune ViT-B_16.npz x-rays/ --out runs/grey channels=1
    """
    if sweep or rates is not None:
        from vitkit.cli.sweeping import carry_out_sweep

        carry_out_sweep(
            lambda: resolve(weights, data, recipe, assignments), recipe=recipe, rates=rates, out=out, as_json=as_json
        )
        return
    carry_out(lambda: resolve(weights, data, recipe, assignments), out=out, as_json=as_json)


def resolve(weights: str, data: str, recipe: str, assignments: tuple[str, ...]) -> "RunConfig":
    """The configuration that the words on the command line stand for."""
    from vitkit.cli.assignments import full
    from vitkit.core.config import apply_overrides
    from vitkit.core.errors import ConfigError
    from vitkit.recipes.table import find

    found = find(recipe)
    if found.kind != "finetune":
        raise ConfigError(
            f"{recipe} trains from scratch",
            hint="vitkit recipes says which recipes fine-tune; the usual is finetune-folder",
        )
    given = [f"model.weights={weights}", f"data.path={data}", "model.name=none", "model.new_head=true"]
    # One after the other: who assigns model.name should hear that the weights say it, not that it is assigned twice.
    return apply_overrides(apply_overrides(found.make(), given), full(assignments))
