"""Lists of names, and costs of models. Only tracing a model imports torch."""

from dataclasses import asdict

from vitkit.api.public import public
from vitkit.core.errors import UnknownNameError
from vitkit.core.formatting import MISSING, format_count
from vitkit.core.names import NameList
from vitkit.core.sizes import Size
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.recipes.registry import match_recipes
from vitkit.typing import Settings
from vitkit.zoo.cost import Cost, Table6, count_cost, count_table6, summarize
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


@public
def cost(
    model: str | ViTConfig | BiTConfig,
    *,
    image_size: Size | None = None,
    num_classes: int | None = None,
    images: int | None = None,
    epochs: int | float = 1,
    batch_size: int = 1,
    settings: Settings | None = None,
) -> Cost:
    """Count the parameters, FLOPs and memory of a model without allocating it.

    Args:
        model: Name of `list_models()`, or a configuration.
        image_size: Side of the images, or height and width.
        num_classes: Outputs of the head.
        images: Number of training images, for the cost of a run.
        epochs: Passes over the training images.
        batch_size: Images per step, for the memory of training.
        settings: Settings of the model by dotted or nested keys.

    >>> import vitkit
    >>> round(vitkit.cost("B/16", images=303_000_000, epochs=7).exaflops)
    224
    """
    return count_cost(
        model,
        image_size=image_size,
        num_classes=num_classes,
        images=images,
        epochs=epochs,
        batch_size=batch_size,
        settings=settings or {},
    )


@public
def table6() -> Table6:
    """Count the FLOPs of every run in Table 6 of the paper, next to the paper's numbers.

    >>> import vitkit
    >>> row = vitkit.table6().rows[1]
    >>> row.model, row.paper, round(row.counted)
    ('B/16', 224.0, 224)
    """
    return count_table6()
