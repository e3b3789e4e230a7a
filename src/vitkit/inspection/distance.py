"""A model and images go in, how far each head looks comes out, in pixels (the paper's Figure 7, right)."""

from collections.abc import Iterable

import torch

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.inspection.applies import needs_attention
from vitkit.model.encoder import Keep
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model


@torch.no_grad()
def attention_distance(model: Model, batches: Iterable[Float[Tensor, "_ C H W"]]) -> Float[Tensor, "layers A"]:
    """The mean distance in pixels between a patch and those it looks at, weighted by attention; by layer and head.

    It is the receptive field of attention (section 4.5): the mean over query patches and images. Attention on class
    tokens and registers has no distance, so each row counts with its share on patches alone. Images stream: of a
    batch no more is kept than these numbers.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64)
    >>> attention_distance(model, [torch.rand(2, 3, 64, 64), torch.rand(1, 3, 64, 64)]).shape
    torch.Size([12, 3])
    """
    vit = needs_attention(model)
    depth, prefix = len(vit.blocks), vit.config.prefix
    apart = torch.cat([torch.zeros(prefix, vit.config.patches), patch_distances(vit)])
    on_patches = torch.cat([torch.zeros(prefix), torch.ones(vit.config.patches)])
    # Two dot products with each row of attention: its distance, and its share on patches.
    device, dtype = vit.patch_embed.proj.weight.device, vit.patch_embed.proj.weight.dtype
    apart, on_patches = apart.to(device, dtype), on_patches.to(device, dtype)

    def distance(attention: Float[Tensor, "B A L L"]) -> Float[Tensor, "A"]:
        rows = attention[:, :, prefix:]
        far = torch.einsum("banl,ln->ban", rows, apart)
        return (far / (rows @ on_patches)).mean(dim=2).sum(dim=0, dtype=torch.float64)

    total, images = torch.zeros(depth, vit.config.heads, dtype=torch.float64), 0
    for batch in batches:
        attention = vit.encode(vit.embed(batch), keep=Keep(attention=range(depth), summary=distance)).attention
        total += torch.stack([attention[layer] for layer in range(depth)]).cpu()
        images += len(batch)
    if images == 0:
        raise InputError("no images to measure attention on", expected="at least one", got="none")
    return (total / images).float()


def patch_distances(vit: ViT) -> Float[Tensor, "N N"]:
    """Pixels between the centres of any two patches.

    >>> import vitkit
    >>> patch_distances(vitkit.create("Ti/16", image_size=(16, 48)))
    tensor([[ 0., 16., 32.],
            [16.,  0., 16.],
            [32., 16.,  0.]])
    """
    (rows, columns), (height, width) = vit.config.grid, pair(vit.config.image_size)
    down = torch.arange(rows) * (height / rows)
    across = torch.arange(columns) * (width / columns)
    centres = torch.cartesian_prod(down, across).float().reshape(-1, 2)
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
