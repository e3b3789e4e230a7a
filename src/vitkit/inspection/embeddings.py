"""A model goes in, what its first layer has learnt comes out: filters and positions (the paper's Figure 7)."""

import torch
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Tensor
from vitkit.inspection.applies import DoesNotApplyError, needs_attention
from vitkit.model.positions import table_of
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model


@torch.no_grad()
def filter_components(model: Model, *, count: int = 28) -> Float[Tensor, "count C H W"]:
    """The first principal components of the filters that read pixels, as images of unit length, the strongest first.

    These are the patch embedding's filters; of a hybrid or a ResNet, those of its first convolution. The sign of a
    component means nothing; here its largest number is positive. Fewer come out where there are not as many.

    >>> import vitkit
    >>> filter_components(vitkit.create("Ti/16", image_size=64), count=7).shape
    torch.Size([7, 3, 16, 16])
    """
    if count < 1:
        raise ConfigError("no component to compute", expected="a count of 1 or more", got=count)
    filters = first_filters(model).float()
    _, _, components = torch.linalg.svd(filters.flatten(1) - filters.flatten(1).mean(dim=0), full_matrices=False)
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return (components * largest.sign())[:count].unflatten(1, filters.shape[1:])


def first_filters(model: Model) -> Float[Tensor, "D C H W"]:
    """The weights of the layer that reads pixels."""
    if isinstance(model, BiT):
        return model.stem.conv.weight.detach()
    backbone = model.patch_embed.backbone
    return (model.patch_embed.proj if backbone is None else backbone.stem.conv).weight.detach()


@torch.no_grad()
def position_similarity(model: Model, *, layer: int = 0) -> Float[Tensor, "rows columns rows2 columns2"]:
    """Cosine similarity between the position embedding of each patch (first pair of axes) and those of all patches.

    `layer` counts where every layer has a table of its own; all others have one.

    >>> import vitkit
    >>> vit = vitkit.create("Ti/16", image_size=64)
    >>> similar = position_similarity(vit)
    >>> similar.shape, round(float(similar[1, 2, 1, 2]), 4)
    (torch.Size([4, 4, 4, 4]), 1.0)
    """
    vit = needs_attention(model)
    table = _table(vit, layer)[0, vit.config.placed_prefix :].float()
    unit = functional.normalize(table, dim=-1)
    return (unit @ unit.T).unflatten(0, vit.config.grid).unflatten(2, vit.config.grid)


def _table(vit: ViT, layer: int) -> Float[Tensor, "1 L D"]:
    positions = vit.config.positions
    if not positions.is_additive:
        raise DoesNotApplyError(
            "no position embeddings to compare",
            expected="learned or sine-cosine positions that are added to tokens",
            got=f"{positions.kind} positions",
        )
    return table_of(vit.pos_embed if vit.pos_embed is not None else vit.layer_pos_embed[layer])
