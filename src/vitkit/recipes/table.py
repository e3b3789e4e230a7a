"""A recipe's name goes in, the recipe comes out."""

from fnmatch import fnmatchcase

from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.recipes import augreg, distillation, selfsupervised, small, table3, table4
from vitkit.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for family in (small, table3, table4, augreg, selfsupervised, distillation)
    for recipe in family.recipes()
}


def find(name: str) -> Recipe:
    """The recipe of that name, in any case.

    >>> find("digits").make().data.path
    'digits'
    >>> find("imagenet-b61")
    Traceback (most recent call last):
    vitkit.core.errors.UnknownNameError: no recipe is called imagenet-b61
    """
    if name.lower() not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "vitkit recipes lists every name"
        raise UnknownNameError(f"no recipe is called {name}", hint=hint)
    return RECIPES[name.lower()]


def matching(pattern: str) -> list[Recipe]:
    """The recipes whose names fit a wildcard pattern in any case.

    >>> [recipe.name for recipe in matching("imagenet-b*")]
    ['imagenet-b16', 'imagenet-b32']
    """
    return [recipe for recipe in RECIPES.values() if fnmatchcase(recipe.name, pattern.lower())]
