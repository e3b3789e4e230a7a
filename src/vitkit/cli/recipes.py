"""The command `vitkit recipes`."""

from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_json, stdout_console

if TYPE_CHECKING:
    from vitkit.recipes.recipe import Recipe


@click.command("recipes")
@click.argument("name", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print the list, or one recipe with its settings, as JSON.")
def command(name: str, as_json: bool) -> None:
    """List the recipes, or print the one called NAME as a TOML file for `vitkit train`.

    \b
    vitkit recipes                       every recipe
    vitkit recipes 'augreg-b16-*'        those whose names match a pattern
    vitkit recipes digits > my.toml      a copy to change; then vitkit train my.toml --out RUN
    """
    import vitkit
    from vitkit.core.config import to_mapping
    from vitkit.recipes.registry import find_recipe, match_recipes

    if "*" not in name and "?" not in name:
        recipe = find_recipe(name)
        if as_json:
            print_json(recipe.to_dict() | {"config": to_mapping(recipe.make())})
        else:
            click.echo(recipe.toml(), nl=False)
        return
    recipes = vitkit.list_recipes(name)
    if as_json:
        print_json(list(recipes.make_records()))
    else:
        print_table(match_recipes(name), expand=name != "*")


def print_table(recipes: "list[Recipe]", *, expand: bool) -> None:
    """Print the recipes by group; the many of AugReg are one line unless `expand` is set."""
    from rich.table import Table

    from vitkit.data.config import AUGREG_LEVELS
    from vitkit.recipes import paper
    from vitkit.recipes.recipe import slug

    console = stdout_console()
    for number, group in enumerate(dict.fromkeys(recipe.group for recipe in recipes)):
        console.print(f"\n{group}" if number else group, style="bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True, min_width=22)
        table.add_column(ratio=1)
        table.add_column(ratio=1, style="dim")
        if group == paper.AUGREG and not expand:
            models = ", ".join(slug(model) for model in paper.AUGREG_MODELS)
            table.add_row("  augreg-MODEL-LEVEL", f"on ImageNet, or with -21k on ImageNet-21k. MODEL: {models}")
            table.add_row("", f"LEVEL: {', '.join(AUGREG_LEVELS)}", "vitkit recipes 'augreg-*' lists them")
        else:
            for recipe in (each for each in recipes if each.group == group):
                table.add_row(f"  {recipe.name}", recipe.summary, recipe.time)
        console.print(table)
    console.print("\nvitkit recipes NAME prints the command, the expected result and all settings.", style="dim")
