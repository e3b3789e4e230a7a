"""Lists of names, which need no torch."""

from dataclasses import asdict

from vitkit.api.public import public
from vitkit.core.errors import UnknownNameError
from vitkit.core.formatting import MISSING, format_count
from vitkit.core.names import NameList
from vitkit.recipes.registry import match_recipes
from vitkit.zoo.cost import summarize
from vitkit.zoo.pretrained import find_pretrained, find_pretrained_names
from vitkit.zoo.registry import find_variants


@public
def list_models(pattern: str = "*", *, pretrained: bool = False) -> NameList:
    """List model names, or names with published weights.

    Args:
        pattern: Wildcard pattern, in any case. Aliases match too.
        pretrained: List the names that `load` and `create(pretrained=True)` know, with their weights.

    >>> import vitkit
    >>> vitkit.list_models("H/*")
    ['H/14']
    >>> vitkit.list_models("vit_tiny_patch16_224", pretrained=True)
    ['vit_tiny_patch16_224']
    """
    if pretrained:
        names = [
            (name, row.model, str(row.image_size), MISSING if row.top1 is None else f"{row.top1:.2%}", row.source)
            for name, row in find_pretrained_names(pattern).items()
        ]
        heads = ("name", "model", "pixels", "top-1", "source")
        return NameList(names, heads=heads, make_records=lambda: [row.to_dict() for row in find_pretrained(pattern)])
    summaries = [summarize(variant) for variant in find_variants(pattern)]
    rows = [(each.name, each.kind, format_count(each.parameters), f"{each.gflops:.1f}") for each in summaries]
    columns = ("model", "kind", "parameters", "GFLOPs")
    return NameList(rows, heads=columns, make_records=lambda: list(map(asdict, summaries)))


@public
def list_recipes(pattern: str = "*") -> NameList:
    """List the recipes whose names match a wildcard pattern, in any case.

    >>> import vitkit
    >>> vitkit.list_recipes("deit-b16*")
    ['deit-b16-distilled']
    """
    recipes = match_recipes(pattern)
    if not recipes:
        raise UnknownNameError(
            f"no recipe matches {pattern}", hint="vitkit recipes lists every name; * stands for anything"
        )
    rows = [(each.name, each.summary, each.time) for each in recipes]
    return NameList(
        rows, heads=("recipe", "summary", "time"), make_records=lambda: [each.to_dict() for each in recipes]
    )
