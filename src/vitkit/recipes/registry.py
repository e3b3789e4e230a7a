"""Registry of recipes.

To add recipes, write a module with a function `recipes` that yields them, and add it to MODULES.
"""

from fnmatch import fnmatchcase

from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.recipes import distillation, paper, self_supervised, small
from vitkit.recipes.recipe import Recipe

MODULES = (small, paper, self_supervised, distillation)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for module in MODULES for recipe in module.recipes()}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name, in any case."""
    if name.lower() not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "vitkit recipes lists every name"
        raise UnknownNameError(f"no recipe is called {name}", hint=hint)
    return RECIPES[name.lower()]


def match_recipes(pattern: str) -> list[Recipe]:
    """Return the recipes whose names match a wildcard pattern, in any case."""
    return [recipe for recipe in RECIPES.values() if fnmatchcase(recipe.name, pattern.lower())]
