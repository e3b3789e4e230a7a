"""Learned features: filters, position embeddings, patch features, layers and reconstructions."""

import torch
from torch.nn import functional

from vitkit.core.errors import ConfigError, InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.preprocessing import Preprocessing
from vitkit.inspection.attention import NotApplicableError, require_classes, require_vit
from vitkit.model.encoder import Capture
from vitkit.model.positions import position_table
from vitkit.model.pretraining import MaskedAutoencoder, MaskedPatches
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.objectives.base import EVALUATION_USE, PerImageRNG, Reconstruction
from vitkit.objectives.mae import MAEObjective
from vitkit.objectives.masked_patches import MaskedPatchObjective
from vitkit.zoo.registry import Model

SAMPLES = 2048
"""Patches that CKA is computed on: a Gram matrix takes 16 MB per layer."""


@torch.no_grad()
def filter_components(model: Model, *, count: int = 28) -> Float[Tensor, "count C H W"]:
    """Return the first principal components of the input filters as images of unit norm, strongest first.

    The filters are those of the patch embedding; of a hybrid or a ResNet, those of the first convolution. The sign of
    a component is arbitrary; its largest value is made positive. There may be fewer components than `count`.

    >>> import vitkit
    >>> filter_components(vitkit.create("Ti/16", image_size=64), count=7).shape
    torch.Size([7, 3, 16, 16])
    """
    if count < 1:
        raise ConfigError("count is too small", expected="a count of 1 or more", got=count)
    if isinstance(model, BiT):
        filters = model.stem.conv.weight.float()
    else:
        embed = model.patch_embed
        root = embed.backbone.get_parameter("stem.conv.weight") if embed.backbone else embed.proj.weight
        filters = root.float()
    components = _principal_components(filters.flatten(1) - filters.flatten(1).mean(dim=0), count)
    return components.unflatten(1, filters.shape[1:])


def _principal_components(centered: Float[Tensor, "N F"], count: int) -> Float[Tensor, "count F"]:
    """Return the strongest components; the largest value of each is positive."""
    _, _, components = torch.linalg.svd(centered, full_matrices=False)
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return (components * largest.sign())[:count]


@torch.no_grad()
def position_similarity(model: Model, *, layer: int = 0) -> Float[Tensor, "rows columns rows2 columns2"]:
    """Return the cosine similarity of the position embeddings of each patch (first two axes) and all patches.

    `layer` matters only if every layer has its own table.

    >>> import vitkit
    >>> vit = vitkit.create("Ti/16", image_size=64)
    >>> similar = position_similarity(vit)
    >>> similar.shape, round(float(similar[1, 2, 1, 2]), 4)
    (torch.Size([4, 4, 4, 4]), 1.0)
    """
    vit = require_vit(model)
    positions = vit.config.positions
    if not positions.is_additive:
        raise NotApplicableError(
            "no position embeddings to compare",
            expected="learned or sine-cosine positions that are added to tokens",
            got=f"{positions.kind} positions",
        )
    table = position_table(vit.pos_embed if vit.pos_embed is not None else vit.layer_pos_embed[layer])
    unit = functional.normalize(table[0, vit.config.prefix_positions :].float(), dim=-1)
    return (unit @ unit.T).unflatten(0, vit.config.grid).unflatten(2, vit.config.grid)


@torch.no_grad()
def patch_features(
    model: Model, images: Float[Tensor, "B C H W"], *, layer: int = -1
) -> Float[Tensor, "B rows columns D"]:
    """Return the features of each patch after a layer; of a ResNet, those of each cell after a stage.

    Those of the last layer include the final norm.

    >>> import vitkit
    >>> patch_features(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 4, 4, 192])
    """
    if isinstance(model, BiT):
        maps = model.stage_maps(images)
        if not -len(maps) <= layer < len(maps):
            raise InputError("no such stage", expected=f"{-len(maps)} to {len(maps) - 1}", got=layer)
        return maps[layer].permute(0, 2, 3, 1)
    index = layer % len(model.blocks)
    tokens = model.encode(model.embed(images), capture=Capture(outputs=[layer])).outputs[index]
    if index == len(model.blocks) - 1:
        tokens = model.fc_norm(tokens) if model.config.head.norm == "after_pooling" else model.norm(tokens)
    return tokens[:, model.config.prefix :].unflatten(1, model.config.grid)


@torch.no_grad()
def feature_colors(
    model: Model, images: Float[Tensor, "B C H W"], *, layer: int = -1
) -> Float[Tensor, "B rows columns 3"]:
    """Return the first three principal components of patch features as red, green and blue in 0..1.

    They are computed over all patches of all images, so that colors are comparable across images.

    >>> import vitkit
    >>> colors = feature_colors(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> colors.shape, float(colors.min()), float(colors.max())
    (torch.Size([2, 4, 4, 3]), 0.0, 1.0)
    """
    features = patch_features(model, images, layer=layer).float()
    flat = features.flatten(0, 2)
    centered = flat - flat.mean(dim=0)
    scores = centered @ _principal_components(centered, 3).T
    # Clipped at the 1st and 99th percentile: otherwise one outlier would make the rest gray.
    low, high = torch.quantile(scores, torch.tensor([0.01, 0.99], device=scores.device, dtype=scores.dtype), dim=0)
    colors = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return functional.pad(colors, (0, 3 - colors.shape[1])).unflatten(0, features.shape[:3])


@torch.no_grad()
def patch_similarity(
    model: Model, images: Float[Tensor, "B C H W"], *, image: int, row: int, column: int, layer: int = -1
) -> Float[Tensor, "B rows columns"]:
    """Return the cosine similarity of every patch of every image to one patch.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64)
    >>> near = patch_similarity(model, torch.rand(2, 3, 64, 64), image=1, row=0, column=3)
    >>> near.shape, round(float(near[1, 0, 3]), 4)
    (torch.Size([2, 4, 4]), 1.0)
    """
    features = functional.normalize(patch_features(model, images, layer=layer).float(), dim=-1)
    for axis, index, size in zip(("image", "row", "column"), (image, row, column), features.shape, strict=False):
        if not 0 <= index < size:
            raise InputError(f"no such {axis}", expected=f"0 to {size - 1}", got=index)
    return features @ features[image, row, column]


@torch.no_grad()
def token_norms(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B layers L"]:
    """Return the norm of every token after each layer.

    A few patches with very large norms are the artifacts of "Vision Transformers Need Registers".

    >>> import vitkit
    >>> token_norms(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64)).shape
    torch.Size([2, 12, 17])
    """
    vit = require_vit(model)
    return torch.stack([tokens.float().norm(dim=-1) for tokens in _layer_tokens(vit, images)], dim=1)


def _layer_tokens(vit: ViT, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B L D"]]:
    layers = range(len(vit.blocks))
    outputs = vit.encode(vit.embed(images), capture=Capture(outputs=layers)).outputs
    return [outputs[layer] for layer in layers]


@torch.no_grad()
def layer_predictions(model: Model, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B layers Y"]:
    """Return the logits as if the encoder ended after each layer (logit lens), with the final norm and the head.

    >>> import vitkit
    >>> model, images = vitkit.create("Ti/16", image_size=64, num_classes=5).eval(), torch.rand(2, 3, 64, 64)
    >>> lens = layer_predictions(model, images)
    >>> lens.shape, bool(torch.allclose(lens[:, -1], model(images), atol=1e-5))
    (torch.Size([2, 12, 5]), True)
    """
    vit = require_classes(model)
    return torch.stack([vit.head(vit.pool_layer(tokens)) for tokens in _layer_tokens(vit, images)], dim=1)


@torch.no_grad()
def layer_similarity(
    model: Model,
    images: Float[Tensor, "B C H W"],
    *,
    other: Model | None = None,
    other_images: Float[Tensor, "B C2 H2 W2"] | None = None,
) -> Float[Tensor, "layers layers2"]:
    """Return the linear CKA (Kornblith et al., 2019) of the layers of a model, or of two models.

    It is computed on patches, sampled evenly over all images if there are more than 2048. The other model receives
    `other_images`, the same images with its own preprocessing, or `images`. If grids differ, features are averaged
    over the cells of the coarsest.

    >>> import vitkit
    >>> similar = layer_similarity(vitkit.create("Ti/16", image_size=64), torch.rand(2, 3, 64, 64))
    >>> similar.shape, round(float(similar[3, 3]), 4)
    (torch.Size([12, 12]), 1.0)
    """
    ours = layer_maps(model, images)
    theirs = ours if other is None else layer_maps(other, images if other_images is None else other_images)
    rows, columns = (min(each.shape[axis] for each in (*ours, *theirs)) for axis in (2, 3))
    grid = (rows, columns)
    mine = [_gram(each, grid) for each in ours]
    against = mine if other is None else [_gram(each, grid) for each in theirs]
    return torch.stack([torch.stack([(a * b).sum() for b in against]) for a in mine]).float()


def layer_maps(model: Model, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B D rows columns"]]:
    """Return the patch features of each layer, or of each stage of a ResNet, as maps."""
    if isinstance(model, BiT):
        return list(model.stage_maps(images))
    prefix, grid = model.config.prefix, model.config.grid
    return [tokens[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2) for tokens in _layer_tokens(model, images)]


def _gram(features: Float[Tensor, "B D rows columns"], grid: tuple[int, int]) -> Float[Tensor, "samples samples"]:
    """Return the centered Gram matrix of samples with unit norm; CKA is the inner product of two of these."""
    cells = functional.adaptive_avg_pool2d(features.float(), grid).permute(0, 2, 3, 1).flatten(0, 2)
    chosen = torch.linspace(0, len(cells) - 1, min(len(cells), SAMPLES), device=cells.device).round().long()
    samples = cells[chosen].cpu().double()  # MPS has no float64
    samples = samples - samples.mean(dim=0)
    products = samples @ samples.T
    return products / products.norm().clamp(min=1e-30)


@torch.no_grad()
def reconstruction(
    model: MaskedPatches | MaskedAutoencoder,
    images: Float[Tensor, "B C H W"],
    *,
    preprocessing: Preprocessing,
    seed: int = 0,
) -> Reconstruction:
    """Return images, masked pixels and the model's reconstruction, as pixels of 0..255.

    Patches are masked as in training; `seed` chooses them. `preprocessing` is that of the images.

    >>> from vitkit.model.config import ViTConfig
    >>> from vitkit.model.pretraining_config import MaskedConfig
    >>> from vitkit.model.vit import ViT
    >>> vit = ViT(ViTConfig(image_size=32, patch_size=8, width=16, depth=1, heads=2, mlp_dim=32, num_classes=0))
    >>> preprocessing, model = Preprocessing(image_size=32), MaskedPatches(vit, MaskedConfig())
    >>> result = reconstruction(model, torch.rand(2, 3, 32, 32), preprocessing=preprocessing)
    >>> result.predicted.shape, float(result.hidden.float().mean())
    (torch.Size([2, 3, 32, 32]), 0.5)
    """
    rng, pixels = PerImageRNG(seed=seed, use=EVALUATION_USE), preprocessing.denormalize(images)
    if isinstance(model, MaskedAutoencoder):
        mae = MAEObjective(model.config, model.encoder.config, preprocessing=preprocessing)
        return mae.reconstruct(model, images, pixels, mae.make_targets(images, pixels, rng=rng))
    objective = MaskedPatchObjective(model.config, model.encoder.config)
    return objective.reconstruct(model, images, pixels, objective.make_targets(images, pixels, rng=rng))
