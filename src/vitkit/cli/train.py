"""`vitkit train`: a recipe, a TOML file or a folder of images goes in, a run folder comes out."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.running import carry_out

if TYPE_CHECKING:
    from vitkit.core.errors import VitkitError
    from vitkit.train.config import RunConfig

SHAPE = ("width", "depth", "heads", "mlp_dim", "pooling", "block.activation")
"""Settings that make a recipe's model a model of its own."""


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
    from vitkit.core.config import load_toml
    from vitkit.recipes.table import RECIPES, find
    from vitkit.train.config import RunConfig

    if recipe.endswith(".toml"):
        config = load_toml(recipe, RunConfig, recipes={name: entry.make for name, entry in RECIPES.items()})
    elif recipe.lower() in RECIPES:
        config = find(recipe).make()
    elif is_place(recipe):
        return override(find("folder").make(), (f"data.path={recipe}", *assignments))
    else:
        raise neither(recipe, list(RECIPES))
    return override(config, assignments)


def override(config: "RunConfig", assignments: tuple[str, ...]) -> "RunConfig":
    """The configuration with what is assigned; who names another model means its shape, not that of the recipe's."""
    from dataclasses import replace

    from vitkit.cli.assignments import full
    from vitkit.core.config import apply_overrides

    written = full(assignments)
    assigned = {assignment.partition("=")[0] for assignment in written}
    if "model.name" in assigned:
        others = tuple(each for each in config.model.settings if each.partition("=")[0] not in SHAPE)
        config = replace(config, model=replace(config.model, patch_size=None, settings=others))
    return apply_overrides(config, written)


def is_place(text: str) -> bool:
    """Whether there is a folder, a file or a set of shards with that name."""
    from vitkit.data.sources.webdataset import is_pattern

    return Path(text).expanduser().exists() or is_pattern(Path(text))


def neither(text: str, recipes: list[str]) -> "VitkitError":
    """What to say of a word that is no recipe and no place: the nearest of what it may have been meant to be.

    >>> print(neither("digit", ["digits", "folder"]).hint)
    did you mean digits?
    """
    from vitkit.core.errors import UnknownNameError, did_you_mean

    folder, name = Path(text).parent, Path(text).name
    beside = [str(folder / entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    if name != text:
        return UnknownNameError(
            f"there is nothing at {text}", hint=did_you_mean(text, beside) or "give a folder of images, or a recipe"
        )
    near = did_you_mean(text, [*recipes, *beside])
    return UnknownNameError(
        f"{text} is neither a recipe nor a folder here", hint=near or "vitkit recipes lists the recipes"
    )
