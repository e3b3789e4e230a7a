"""A model and images go in, what patches mean to it comes out: colours, likeness to a patch, lengths of tokens."""

import torch
from torch.nn import functional

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.inspection.applies import needs_attention
from vitkit.model.encoder import Keep
from vitkit.model.resnet import BiT
from vitkit.zoo.lookup import Model


@torch.no_grad()
def patch_features(
    model: Model, images: Float[Tensor, "B C H W"], *, layer: int = -1
) -> Float[Tensor, "B rows columns D"]:
    """What a layer says of each patch; of a ResNet, what a stage says of each cell of its map.

    The last layer's go through the last norm, as on the way to the head.

    >>> import vitkit
    >>> patch_features(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 4, 4, 192])
    """
    if isinstance(model, BiT):
        maps = model.stage_maps(images)
        if not -len(maps) <= layer < len(maps):
            raise InputError("no such stage", expected=f"{-len(maps)} to {len(maps) - 1}", got=layer)
        return maps[layer].permute(0, 2, 3, 1)
    tokens = layer_outputs(model, images, layer=layer)[:, model.config.prefix :]
    return tokens.unflatten(1, model.config.grid)


def layer_outputs(model: Model, images: Float[Tensor, "B C H W"], *, layer: int) -> Float[Tensor, "B L D"]:
    """The tokens after a layer; after the last, normalised as the head gets them."""
    vit = needs_attention(model)
    encoded = vit.encode(vit.embed(images), keep=Keep(outputs=[layer]))
    tokens = encoded.outputs[layer % len(vit.blocks)]
    if layer % len(vit.blocks) != len(vit.blocks) - 1:
        return tokens
    return vit.fc_norm(tokens) if vit.config.head.norm == "after_pooling" else vit.norm(tokens)


@torch.no_grad()
def feature_colours(
    model: Model, images: Float[Tensor, "B C H W"], *, layer: int = -1
) -> Float[Tensor, "B rows columns 3"]:
    """The first three principal components of patch features as red, green and blue in 0…1.

    The components are those of all patches of all images, so that a colour means the same in each of them.

    >>> import vitkit
    >>> colours = feature_colours(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> colours.shape, float(colours.min()), float(colours.max())
    (torch.Size([2, 4, 4, 3]), 0.0, 1.0)
    """
    features = patch_features(model, images, layer=layer).float()
    flat = features.flatten(0, 2)
    centred = flat - flat.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:3]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    scores = centred @ (directions * largest.sign()).T
    # Ends at the 1st and 99th percentile: one odd token would else leave the rest grey.
    low, high = torch.quantile(scores, torch.tensor([0.01, 0.99], device=scores.device, dtype=scores.dtype), dim=0)
    colours = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return functional.pad(colours, (0, 3 - colours.shape[1])).unflatten(0, features.shape[:3])


@torch.no_grad()
def patch_similarity(
    model: Model,
    images: Float[Tensor, "B C H W"],
    *,
    image: int,
    row: int,
    column: int,
    layer: int = -1,
) -> Float[Tensor, "B rows columns"]:
    """Cosine similarity of every patch of every image to one patch of one of them: the patches nearest in meaning.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64)
    >>> near = patch_similarity(model, torch.rand(2, 3, 64, 64), image=1, row=0, column=3)
    >>> near.shape, round(float(near[1, 0, 3]), 4)
    (torch.Size([2, 4, 4]), 1.0)
    """
    features = functional.normalize(patch_features(model, images, layer=layer).float(), dim=-1)
    for what, place, size in zip(("image", "row", "column"), (image, row, column), features.shape, strict=False):
        if not 0 <= place < size:
            raise InputError(f"no such {what}", expected=f"0 to {size - 1}", got=place)
    return features @ features[image, row, column]


@torch.no_grad()
def token_norms(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B layers L"]:
    """The length of every token after each layer; a few very long ones among patches are register artefacts.

    ("Vision Transformers Need Registers": models drop notes into patches that show nothing.)

    >>> import vitkit
    >>> token_norms(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 12, 17])
    """
    vit = needs_attention(model)
    outputs = vit.encode(vit.embed(images), keep=Keep(outputs=range(len(vit.blocks)))).outputs
    return torch.stack([outputs[layer].float().norm(dim=-1) for layer in range(len(vit.blocks))], dim=1)
