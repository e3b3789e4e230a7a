"""A variant goes in, its sizes in one row come out: what `vitkit models` shows."""

from dataclasses import dataclass

from vitkit.core.shapes import Size, pair
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.flops import forward_flops
from vitkit.zoo.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One row. A ResNet has no heads, patches or tokens; `patch` is in pixels of the image, in hybrids too."""

    name: str
    kind: str
    layers: int
    width: int
    heads: int | None
    patch: int | None
    image_size: Size
    tokens: int | None
    parameters: int
    gflops: float


def summary(variant: Variant) -> Summary:
    """The sizes of a variant.

    >>> from vitkit.zoo.lookup import find
    >>> row = summary(find("R50+B/16"))
    >>> row.patch, row.tokens, round(row.gflops, 1)
    (16, 197, 43.1)
    """
    config = variant.config
    heads = patch = tokens = None
    if isinstance(config, BiTConfig):
        # A unit has three convolutions; the root and the head are the other two layers of the name.
        layers = 3 * sum(config.units) + 2
    else:
        layers, heads, tokens = config.depth, config.heads, config.prefix + config.patches
        patch = pair(config.image_size)[0] // config.grid[0]
    return Summary(
        name=variant.name,
        kind=variant.kind,
        layers=layers,
        width=config.width,
        heads=heads,
        patch=patch,
        image_size=config.image_size,
        tokens=tokens,
        parameters=variant.parameters,
        gflops=sum(forward_flops(config).values()) / 1e9,
    )
