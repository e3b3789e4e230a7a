"""A model and images go in, maps over the patch grid come out: what the answer is drawn from (the paper's Figure 6).

The maps say where the model looks. They come from the model as it runs, with fused attention: the weights are computed
beside it, layer by layer.
"""

from collections.abc import Sequence
from typing import cast

import torch

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.inspection.applies import needs_attention, needs_classes
from vitkit.model.encoder import Keep
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model


@torch.no_grad()
def rollout(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B rows columns"]:
    """Attention rollout (Abnar and Zuidema, 2020): the share of each patch in what the head reads.

    The heads of a layer are averaged, half of each row is the residual connection, and the layers are multiplied. The
    row that is followed is the class token's; where the model has none, the mean of the rows that it pools, and for a
    pooling probe the rows weighed as the probe weighs them. What falls on class tokens and registers is left out, so
    the shares of an image sum to less than one.

    >>> import vitkit
    >>> maps = rollout(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> maps.shape, bool((maps.sum(dim=(1, 2)) < 1).all())
    (torch.Size([2, 4, 4]), True)
    """
    vit = needs_attention(model)
    keep = Keep(attention=range(len(vit.blocks)), summary=lambda attention: attention.mean(dim=1))
    encoded = vit.encode(vit.embed(images), keep=keep)
    # From the last layer back only the followed row is needed: a vector through each layer, not a matrix.
    row = vit.read_by_pool(encoded.tokens)[:, None]
    for layer in reversed(range(len(vit.blocks))):
        row = (row + row @ encoded.attention.pop(layer)) / 2
    return over_grid(vit, row[:, 0])


@torch.no_grad()
def head_maps(
    model: Model, images: Float[Tensor, "B C H W"], *, layers: Sequence[int] = (-1,)
) -> Float[Tensor, "B layers A rows columns"]:
    """What each head of some layers looks at, seen from the token that the head reads.

    >>> import vitkit
    >>> head_maps(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64), layers=[0, -1]).shape
    torch.Size([2, 2, 3, 4, 4])
    """
    vit = needs_attention(model)
    tokens = vit.embed(images)
    reads = vit.read_by_pool(tokens if vit.attn_pool is None else vit.encode(tokens).tokens)

    def seen(attention: Float[Tensor, "B A L L"]) -> Float[Tensor, "B A L"]:
        return torch.einsum("bl,balk->bak", reads, attention)

    encoded = vit.encode(tokens, keep=Keep(attention=layers, summary=seen))
    chosen = [layer % len(vit.blocks) for layer in layers]
    return torch.stack([over_grid(vit, encoded.attention[layer]) for layer in chosen], dim=1)


def relevance(
    model: Model, images: Float[Tensor, "B C H W"], *, classes: Int[Tensor, "B"] | None = None
) -> Float[Tensor, "B rows columns"]:
    """Which patches speak for a class: attention weighted by its gradient (Chefer, Gur and Wolf, 2021).

    Each layer's weights are multiplied by the gradient of the class's logit, what speaks against it is dropped, the
    heads are averaged, and the layers are chained as in `rollout`, each added to what came before. Without `classes`
    the predicted ones are explained. Gradients are taken one layer at a time, so memory holds one layer's attention.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, classes=10)
    >>> _ = torch.nn.init.normal_(model.head.weight)
    >>> relevance(model, torch.rand(2, 3, 64, 64), classes=torch.tensor([3, 7])).shape
    torch.Size([2, 4, 4])
    """
    vit = needs_classes(model)
    depth = len(vit.blocks)
    with torch.no_grad():
        tokens = vit.embed(images)
        outputs = vit.encode(tokens, keep=Keep(outputs=range(depth))).outputs
    inputs = [tokens, *(outputs[layer] for layer in range(depth - 1))]

    last = outputs[depth - 1].requires_grad_()
    with torch.enable_grad():
        logits = vit.head(vit.pool(last))
        chosen = logits.argmax(dim=1) if classes is None else classes.to(logits.device)
        score = logits.gather(1, chosen[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, last)

    row = vit.read_by_pool(last).detach()[:, None]
    for layer in reversed(range(depth)):
        weights, gradient, of_weights = _layer_gradients(vit, inputs.pop(), gradient, layer=layer)
        row = row + row @ (weights * of_weights).clamp(min=0).mean(dim=1)
    return over_grid(vit, row[:, 0])


def _layer_gradients(
    vit: ViT, tokens: Float[Tensor, "B L D"], gradient: Float[Tensor, "B L D"], *, layer: int
) -> tuple[Float[Tensor, "B A L L"], Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
    """A layer's attention, and the gradients with respect to its input and to this attention."""
    with torch.enable_grad():
        tokens = tokens.detach().requires_grad_()
        output, weights = vit.encode_shown(tokens, layer=layer)
    of_tokens, of_weights = torch.autograd.grad(output, (tokens, weights), grad_outputs=gradient)
    return weights.detach(), of_tokens, of_weights


def over_grid(vit: ViT, tokens: Float[Tensor, "*shape L"]) -> Float[Tensor, "*shape rows columns"]:
    """The numbers of the patches among those of all tokens, where they lie in the image."""
    return cast("Tensor", tokens[..., vit.config.prefix :].unflatten(-1, vit.config.grid))
