"""A model and images go in, how the answer comes about from layer to layer comes out."""

import torch
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.inspection.applies import needs_classes
from vitkit.model.encoder import Keep
from vitkit.model.resnet import BiT
from vitkit.zoo.lookup import Model

SAMPLES = 2048
"""Patches that a comparison of layers is made on: the memory of one number for each pair of them is 16 MB a layer."""


@torch.no_grad()
def layer_predictions(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B layers Y"]:
    """Logits as if the encoder ended after each layer (the "logit lens"): the last norm and the head on its tokens.

    >>> import vitkit
    >>> model, images = vitkit.create("Ti/16", image_size=64, classes=5).eval(), torch.rand(2, 3, 64, 64)
    >>> lens = layer_predictions(model, images)
    >>> lens.shape, bool(torch.allclose(lens[:, -1], model(images), atol=1e-5))
    (torch.Size([2, 12, 5]), True)
    """
    vit = needs_classes(model)
    outputs = vit.encode(vit.embed(images), keep=Keep(outputs=range(len(vit.blocks)))).outputs
    return torch.stack([vit.head(vit.pool(outputs[layer])) for layer in range(len(vit.blocks))], dim=1)


@torch.no_grad()
def layer_similarity(
    model: Model,
    images: Float[Tensor, "B C H W"],
    *,
    other: Model | None = None,
    other_images: Float[Tensor, "B C2 H2 W2"] | None = None,
) -> Float[Tensor, "layers layers2"]:
    """Linear CKA (Kornblith and others, 2019) between the layers of a model, or of two: 1 where they say the same.

    It is measured on patches, spread evenly over all images where there are more than 2048. The other model sees
    `other_images`, the same ones prepared in its way, or these; where grids differ, all are averaged over the cells of
    the coarsest.

    >>> import vitkit
    >>> similar = layer_similarity(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> similar.shape, round(float(similar[3, 3]), 4)
    (torch.Size([12, 12]), 1.0)
    """
    ours = layer_maps(model, images)
    theirs = ours if other is None else layer_maps(other, images if other_images is None else other_images)
    rows = min(each.shape[2] for each in (*ours, *theirs))
    grid = (rows, min(each.shape[3] for each in (*ours, *theirs)))
    mine = [_gram(each, grid) for each in ours]
    against = mine if other is None else [_gram(each, grid) for each in theirs]
    return torch.stack([torch.stack([(a * b).sum() for b in against]) for a in mine]).float()


def layer_maps(model: Model, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B D rows columns"]]:
    """What each layer, or each stage of a ResNet, says of each patch, as a map."""
    if isinstance(model, BiT):
        return list(model.stage_maps(images))
    config = model.config
    outputs = model.encode(model.embed(images), keep=Keep(outputs=range(len(model.blocks)))).outputs
    return [
        outputs[layer][:, config.prefix :].unflatten(1, config.grid).permute(0, 3, 1, 2)
        for layer in range(len(model.blocks))
    ]


def _gram(features: Float[Tensor, "B D rows columns"], grid: tuple[int, int]) -> Float[Tensor, "samples samples"]:
    """Inner products of all pairs of samples, centred and of length one: CKA is the inner product of two of these."""
    cells = functional.adaptive_avg_pool2d(features.float(), grid).permute(0, 2, 3, 1).flatten(0, 2)
    chosen = torch.linspace(0, len(cells) - 1, min(len(cells), SAMPLES), device=cells.device).round().long()
    samples = cells[chosen].double()
    samples = samples - samples.mean(dim=0)
    products = samples @ samples.T
    return products / products.norm().clamp(min=1e-30)
