"""Attention maps over the patch grid (Figure 6 of the paper), their deletion test, and attention distance (Figure 7).

Attention weights are computed next to the fused kernel, layer by layer.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from vitkit.core.errors import ConfigError, InputError, summarize
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import pair
from vitkit.model.config import check_patches_removable
from vitkit.model.encoder import Capture
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model


class NotApplicableError(InputError):
    """A method that does not apply to this kind of model."""


def require_vit(model: Model) -> ViT:
    """Return the model if it is a Vision Transformer or a hybrid."""
    if isinstance(model, ViT):
        return model
    raise NotApplicableError(
        "a ResNet has no attention", expected="a Vision Transformer or a hybrid", got="a BiT ResNet"
    )


def require_classes(model: Model) -> ViT:
    """Return the model if it has attention and a classification head."""
    vit = require_vit(model)
    if vit.config.num_classes == 0:
        raise NotApplicableError("the model has no classes", expected="a model with a head", got="features only")
    return vit


def require_patch_removal(model: Model) -> ViT:
    """Return the model if patches can be removed from its input."""
    vit = require_classes(model)
    try:
        check_patches_removable(vit.config)
    except ConfigError as error:
        raise NotApplicableError(summarize(error)) from error
    return vit


@torch.no_grad()
def rollout(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B rows columns"]:
    """Return the attention rollout (Abnar and Zuidema, 2020): the contribution of each patch to the pooled output.

    The heads of a layer are averaged, half of each row is the residual connection, and layers are multiplied. The row
    that is followed is that of the class token; without one, the mean of the pooled rows; with an attention pooling
    probe, the rows weighted as the probe weights them. Class tokens and registers are omitted, so the values of an
    image sum to less than one.

    >>> import vitkit
    >>> maps = rollout(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> maps.shape, bool((maps.sum(dim=(1, 2)) < 1).all())
    (torch.Size([2, 4, 4]), True)
    """
    vit = require_vit(model)
    capture = Capture(attention=range(len(vit.blocks)), summary=lambda attention: attention.mean(dim=1))
    encoded = vit.encode(vit.embed(images), capture=capture)
    # From the last layer back only the followed row is needed: a vector through each layer, not a matrix.
    row = vit.pooling_weights(encoded.tokens)[:, None]
    for layer in reversed(range(len(vit.blocks))):
        row = (row + row @ encoded.attention.pop(layer)) / 2
    return to_grid(vit, row[:, 0])


@torch.no_grad()
def head_maps(
    model: Model, images: Float[Tensor, "B C H W"], *, layers: Sequence[int] = (-1,)
) -> Float[Tensor, "B layers A rows columns"]:
    """Return the attention of each head of some layers from the token that is pooled.

    >>> import vitkit
    >>> head_maps(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64), layers=[0, -1]).shape
    torch.Size([2, 2, 3, 4, 4])
    """
    vit = require_vit(model)
    tokens = vit.embed(images)
    reads = vit.pooling_weights(tokens if vit.attn_pool is None else vit.encode(tokens).tokens)

    def pooled_row(attention: Float[Tensor, "B A L L"]) -> Float[Tensor, "B A L"]:
        return torch.einsum("bl,balk->bak", reads, attention)

    encoded = vit.encode(tokens, capture=Capture(attention=layers, summary=pooled_row))
    chosen = [layer % len(vit.blocks) for layer in layers]
    return torch.stack([to_grid(vit, encoded.attention[layer]) for layer in chosen], dim=1)


def relevance(
    model: Model, images: Float[Tensor, "B C H W"], *, classes: Int[Tensor, "B"] | None = None
) -> Float[Tensor, "B rows columns"]:
    """Return the relevance of patches for a class: attention weighted by its gradient (Chefer, Gur and Wolf, 2021).

    The weights of each layer are multiplied by the gradient of the class logit, negative values are dropped, heads are
    averaged, and layers are chained as in `rollout`, each added to the product so far. Without `classes` the predicted
    ones are explained. Gradients are computed one layer at a time, so only one layer's attention is in memory.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, num_classes=10)
    >>> _ = torch.nn.init.normal_(model.head.weight)
    >>> relevance(model, torch.rand(2, 3, 64, 64), classes=torch.tensor([3, 7])).shape
    torch.Size([2, 4, 4])
    """
    vit = require_classes(model)
    depth = len(vit.blocks)
    with torch.no_grad():
        tokens = vit.embed(images)
        outputs = vit.encode(tokens, capture=Capture(outputs=range(depth))).outputs
    inputs = [tokens, *(outputs[layer] for layer in range(depth - 1))]

    last = outputs[depth - 1].requires_grad_()
    with torch.enable_grad():
        logits = vit.head(vit.pool_layer(last))
        chosen = logits.argmax(dim=1) if classes is None else classes.to(logits.device)
        score = logits.gather(1, chosen[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, last)

    row = vit.pooling_weights(last).detach()[:, None]
    for layer in reversed(range(depth)):
        weights, gradient, of_weights = _layer_gradients(vit, inputs.pop(), gradient, layer=layer)
        row = row + row @ (weights * of_weights).clamp(min=0).mean(dim=1)
    return to_grid(vit, row[:, 0])


def _layer_gradients(
    vit: ViT, tokens: Float[Tensor, "B L D"], gradient: Float[Tensor, "B L D"], *, layer: int
) -> tuple[Float[Tensor, "B A L L"], Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
    """Return the attention of a layer, and the gradients of its input and of its attention."""
    with torch.enable_grad():
        tokens = tokens.detach().requires_grad_()
        output, weights = vit.encode_layer_with_weights(tokens, layer=layer)
    of_tokens, of_weights = torch.autograd.grad(output, (tokens, weights), grad_outputs=gradient)
    return weights.detach(), of_tokens, of_weights


def to_grid(vit: ViT, tokens: Float[Tensor, "*shape L"]) -> Float[Tensor, "*shape rows columns"]:
    """Return the values of patch tokens, arranged in the patch grid."""
    return cast("Tensor", tokens[..., vit.config.prefix :].unflatten(-1, vit.config.grid))


@torch.no_grad()
def deletion_curve(
    model: Model,
    images: Float[Tensor, "B C H W"],
    maps: Float[Tensor, "B rows columns"],
    *,
    classes: Int[Tensor, "B"] | None = None,
    steps: int = 10,
) -> Float[Tensor, "B points"]:
    """Return the probability of a class as patches are removed, those with the highest values of the map first.

    Removed patches are not passed to the encoder. The first point is the whole image, and each further one removes
    another `1 / steps` of it. A map that explains the prediction gives a curve that falls faster than that of a random
    map; its mean is the usual score, lower is better.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, num_classes=5).eval()
    >>> deletion_curve(model, torch.rand(2, 3, 64, 64), torch.rand(2, 4, 4), steps=4).shape
    torch.Size([2, 4])
    """
    vit = require_patch_removal(model)
    patches = vit.config.patches
    if not 1 <= steps <= patches:
        raise InputError("patches cannot be removed in that many steps", expected=f"1 to {patches}", got=steps)
    whole = vit(images)
    chosen = whole.argmax(dim=1) if classes is None else classes
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    points = [whole.softmax(dim=1)]
    for step in range(1, steps):
        left = order[:, round(patches * step / steps) :].sort(dim=1).values
        tokens = vit.encode(vit.embed(images, visible=left)).tokens
        points.append(vit.head(vit.pool_layer(tokens)).softmax(dim=1))
    return torch.stack([point.gather(1, chosen[:, None])[:, 0] for point in points], dim=1)


@torch.no_grad()
def attention_distance(model: Model, batches: Iterable[Float[Tensor, "_ C H W"]]) -> Float[Tensor, "layers A"]:
    """Return the mean distance in pixels between a patch and the patches it attends to, by layer and head.

    This is the receptive field of attention (section 4.5), averaged over query patches and images. Attention to class
    tokens and registers has no distance, so each row is normalized over patches. Images are streamed: only sums are
    kept.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64)
    >>> attention_distance(model, [torch.rand(2, 3, 64, 64), torch.rand(1, 3, 64, 64)]).shape
    torch.Size([12, 3])
    """
    vit = require_vit(model)
    depth, prefix = len(vit.blocks), vit.config.prefix
    distances = torch.cat([torch.zeros(prefix, vit.config.patches), patch_distances(vit)])
    on_patches = torch.cat([torch.zeros(prefix), torch.ones(vit.config.patches)])
    # Two dot products with each row of attention: its distance, and its sum over patches.
    device, dtype = vit.patch_embed.proj.weight.device, vit.patch_embed.proj.weight.dtype
    distances, on_patches = distances.to(device, dtype), on_patches.to(device, dtype)

    def distance(attention: Float[Tensor, "B A L L"]) -> Float[Tensor, "A"]:
        rows = attention[:, :, prefix:]
        far = torch.einsum("banl,ln->ban", rows, distances)
        return (far / (rows @ on_patches)).mean(dim=2).cpu().double().sum(dim=0)  # MPS has no float64

    total, images = torch.zeros(depth, vit.config.heads, dtype=torch.float64), 0
    for batch in batches:
        attention = vit.encode(vit.embed(batch), capture=Capture(attention=range(depth), summary=distance)).attention
        total += torch.stack([attention[layer] for layer in range(depth)])
        images += len(batch)
    if images == 0:
        raise InputError("no images to measure attention distance on", expected="at least one", got="none")
    return (total / images).float()


def patch_distances(vit: ViT) -> Float[Tensor, "N N"]:
    """Return the distances in pixels between the centers of all patches.

    >>> import vitkit
    >>> patch_distances(vitkit.create("Ti/16", image_size=(16, 48)))
    tensor([[ 0., 16., 32.],
            [16.,  0., 16.],
            [32., 16.,  0.]])
    """
    (rows, columns), (height, width) = vit.config.grid, pair(vit.config.image_size)
    down = torch.arange(rows) * (height / rows)
    across = torch.arange(columns) * (width / columns)
    centers = torch.cartesian_prod(down, across).float().reshape(-1, 2)
    return torch.cdist(centers, centers, compute_mode="donot_use_mm_for_euclid_dist")
