"""`vitkit train`: a recipe, a TOML file or a folder of images goes in, a run folder comes out."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.running import carry_out

if TYPE_CHECKING:
    from vitkit.train.config import RunConfig


@click.command("train")
@click.argument("recipe")
@click.argument("assignments", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder, new or to go on with.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(recipe: str, assignments: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Train a model by RECIPE: a recipe's name, a .toml file, or simply a folder of images.

    Run the same command again to go on after an interruption. Put torchrun in front to use several devices.

    \b
    vitkit train photos/ --out runs/photos
    vitkit train digits --out runs/digits epochs=20
    vitkit train my.toml --out runs/mine data=photos/ optimizer.weight_decay=0.1
    torchrun --nproc-per-node 8 -m vitkit train imagenet-b16 --out runs/b16 data=imagenet/
    """
    carry_out(lambda: resolve(recipe, assignments), out=out, as_json=as_json)


def resolve(recipe: str, assignments: tuple[str, ...]) -> "RunConfig":
    """The configuration that the words on the command line stand for."""
    from vitkit.cli.assignments import full
    from vitkit.core.config import apply_overrides, load_toml
    from vitkit.recipes.table import RECIPES, find
    from vitkit.train.config import RunConfig

    if recipe.endswith(".toml"):
        config = load_toml(recipe, RunConfig, recipes={name: entry.make for name, entry in RECIPES.items()})
    elif recipe not in RECIPES and Path(recipe).is_dir():
        return apply_overrides(find("folder").make(), full([f"data.path={recipe}", *assignments]))
    else:
        config = find(recipe).make()
    return apply_overrides(config, full(assignments))
