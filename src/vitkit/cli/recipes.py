"""`vitkit recipes`: a recipe's name goes in, its whole configuration comes out; without a name, the list of them."""

from typing import TYPE_CHECKING

import click

from vitkit.cli.output import print_json, result_console

if TYPE_CHECKING:
    from vitkit.recipes.recipe import Recipe


@click.command("recipes")
@click.argument("name", default="*")
@click.option("--json", "as_json", is_flag=True, help="Print heads, or one recipe with its configuration, as JSON.")
def command(name: str, as_json: bool) -> None:
    """List the recipes, or show the one called NAME as a TOML file that `vitkit train` takes.

    \b
    vitkit recipes                       every recipe
    vitkit recipes 'augreg-b16-*'        those whose names fit a pattern
    vitkit recipes digits > my.toml      a copy to change; then vitkit train my.toml --out RUN
    """
    from vitkit.core.config import to_mapping
    from vitkit.core.errors import UnknownNameError
    from vitkit.recipes.table import find, matching

    if "*" not in name and "?" not in name:
        recipe = find(name)
        if as_json:
            print_json(described(recipe) | {"config": to_mapping(recipe.make())})
        else:
            click.echo(recipe.toml(), nl=False)
        return
    found = matching(name)
    if not found:
        raise UnknownNameError(f"no recipe fits {name}", hint="vitkit recipes lists every name; * stands for anything")
    if as_json:
        print_json([described(recipe) for recipe in found])
        return
    print_table(found, whole=name != "*")


def described(recipe: "Recipe") -> dict[str, object]:
    """The recipe's head as plain data."""
    keys = ("name", "group", "kind", "summary", "command", "time", "expected")
    return {key: getattr(recipe, key) for key in keys} | {"rates": list(recipe.rates)}


def print_table(found: "list[Recipe]", *, whole: bool) -> None:
    """Print the recipes under the names of their groups; AugReg's many are one line, unless `whole` asks for all."""
    from rich.table import Table

    from vitkit.recipes import augreg
    from vitkit.recipes.recipe import slug

    console = result_console()
    for number, group in enumerate(dict.fromkeys(recipe.group for recipe in found)):
        console.print(f"\n{group}" if number else group, style="bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True, min_width=22)
        table.add_column(ratio=1)
        table.add_column(ratio=1, style="dim")
        if group == augreg.GROUP and not whole:
            models = ", ".join(slug(model) for model in augreg.EXAFLOPS)
            table.add_row("  augreg-MODEL-LEVEL", f"on ImageNet, or with -21k on ImageNet-21k. MODEL: {models}")
            table.add_row("", f"LEVEL: {', '.join(augreg.LEVELS)}", "vitkit recipes 'augreg-*' lists them")
        else:
            for recipe in (each for each in found if each.group == group):
                table.add_row(f"  {recipe.name}", recipe.summary, recipe.time)
        console.print(table)
    console.print("\nvitkit recipes NAME shows the command, the expected result and every setting.", style="dim")
