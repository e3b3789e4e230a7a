"""Sections of the inspection report: attention, learned features, layers and reconstructions."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitkit.inspection import attention, features
from vitkit.inspection.attention import NotApplicableError, require_patch_removal, require_vit
from vitkit.model.vit import ViT
from vitkit.report import figures
from vitkit.report.colors import Rgb, clip_maps, dim_by, overlay_heatmap, rescale, to_array
from vitkit.report.figures import ImageGrid
from vitkit.report.inspection_context import InspectionContext, InspectionSection, round_values, to_pictures

MAX_PATCHES = 1024
"""Patches of an image whose pairwise similarity is stored in the page."""
MAX_HEADS = 12
DELETION_STEPS = 10
FOLLOWED_ROWS = {
    "class": "The row that is followed is that of the class token.",
    "mean": "This model has no class token; the mean of the rows of all patches is followed.",
    "class_mean": "The rows of the class token and, on average, of all patches are followed, half each.",
    "map": "This model is pooled by an attention probe; rows are weighted as the probe weights them.",
}


def rollout_section(context: InspectionContext) -> InspectionSection:
    """Draw attention rollout (Figure 6) and the relevance of patches for a class."""
    vit = require_vit(context.model)
    pictures, maps = context.pictures, context.rollout
    dimmed = [dim_by(picture, each) for picture, each in zip(pictures, clip_maps(maps), strict=True)]
    columns: dict[str, tuple[list[Rgb], list[str]]] = {
        "Model input": (list(pictures), context.drawn_names),
        "Attention rollout": (dimmed, [""] * len(maps)),
    }
    numbers: dict[str, Any] = {"rollout": round_values(maps)}
    if vit.config.num_classes:
        explained = {"predicted": ("For the prediction", context.predicted_classes, context.relevance)}
        if context.target is not None:
            classes = torch.full((len(maps),), context.target)
            explained["target"] = ("For the chosen class", classes, context.relevance_for(classes))
        for key, (head, classes, relevance) in explained.items():
            numbers[f"relevance_{key}"] = round_values(relevance)
            columns[head] = (
                _overlay_maps(context, clip_maps(relevance)),
                [context.describe_prediction(image, label) for image, label in enumerate(classes.tolist())],
            )
    drawing = ImageGrid(
        rows=list(zip(*(images for images, _ in columns.values()), strict=True)),
        captions=list(zip(*(captions for _, captions in columns.values()), strict=True)),
        column_heads=list(columns),
        title="Attention from the output to the image",
    )
    text = (
        "Bright patches contribute most to the output: attention is averaged over heads, half of each row is the "
        "residual connection, and layers are multiplied (Figure 6 of the paper). "
        f"{FOLLOWED_ROWS[vit.config.pooling]} Colors show which patches raise the score of a class: attention "
        "weighted by the gradient of that score."
    )
    return InspectionSection(text, {"rollout": drawing}, numbers)


def heads_section(context: InspectionContext) -> InspectionSection:
    """Draw the attention maps of the heads of a layer."""
    vit = require_vit(context.model)
    layer = context.layer % len(vit.blocks)
    maps = context.map_drawn(lambda images: attention.head_maps(vit, images, layers=[context.layer]))[:, 0]
    count = min(vit.config.heads, MAX_HEADS)
    drawing = ImageGrid(
        rows=[
            [picture, *(overlay_heatmap(picture, each) for each in clip_maps(heads[:count]))]
            for picture, heads in zip(context.pictures, maps, strict=True)
        ],
        column_heads=["", *(f"Head {head}" for head in range(1, count + 1))],
        captions=[[name, *([""] * count)] for name in context.drawn_names],
        title=f"The heads of layer {layer + 1}",
    )
    omitted = vit.config.heads - count
    more = f" {omitted} more heads are in the numbers." if omitted else ""
    text = f"Attention of each head of layer {layer + 1} from the token that the output is computed from.{more}"
    numbers = {"layer": layer, "maps": round_values(maps)}
    return InspectionSection(text, {"heads": drawing}, numbers)


def deletion_section(context: InspectionContext) -> InspectionSection:
    """Validate the maps: draw the probability of the prediction as patches are removed."""
    vit = require_patch_removal(context.model)
    steps = min(DELETION_STEPS, vit.config.patches)
    generator = torch.Generator().manual_seed(0)
    rankings = {
        "rollout": context.rollout,
        "relevance": context.relevance,
        "random": torch.rand(len(context.drawn), *vit.config.grid, generator=generator),
    }
    series = {
        name: context.map_drawn(partial(attention.deletion_curve, vit, steps=steps), maps).mean(dim=0).tolist()
        for name, maps in rankings.items()
    }
    drawing = figures.series_chart(
        series,
        ticks=[f"{step / steps:.0%}" for step in range(steps)],
        x_title="Patches removed",
        y_title="Probability of the prediction",
        title="Probability of the prediction as patches are removed",
        percent=True,
    )
    text = (
        "Deletion test of the maps: the patches that a map rates highest are removed first. The faster the probability "
        "falls, compared with patches removed at random, the better the map explains the prediction. "
        f"Mean over {len(context.drawn)} images; a few images are not significant."
    )
    numbers = {name: [round(each, 6) for each in values] for name, values in series.items()}
    return InspectionSection(text, {"deletion": drawing}, numbers)


def distance_section(context: InspectionContext) -> InspectionSection:
    """Draw the mean attention distance of each head (Figure 7, right)."""
    distances = attention.attention_distance(context.model, context.batches("attention distance"))
    text = (
        f"Mean attention distance of each head over {len(context.images):,} images: the receptive field of attention. "
        "In trained models some heads of the first layers already attend to the whole image, and all heads of the last "
        "layers do. The paper uses 128 images."
    )
    return InspectionSection(
        text,
        {"distance": figures.distance_chart(distances)},
        {"pixels": round_values(distances, 3), "images": len(context.images)},
    )


def _overlay_maps(context: InspectionContext, maps: Iterable[NDArray[np.float32]]) -> list[Rgb]:
    return [overlay_heatmap(picture, each) for picture, each in zip(context.pictures, maps, strict=True)]


def _grid_below_input(context: InspectionContext, pictures: Sequence[Rgb], *, head: str, title: str) -> ImageGrid:
    """Return a grid of two rows: the model's input, and what was computed from each image."""
    captions = [[""] * len(pictures), context.drawn_names]
    return ImageGrid(rows=[context.pictures, pictures], row_heads=("Model input", head), captions=captions, title=title)


def filters_section(context: InspectionContext) -> InspectionSection:
    """Draw the principal components of the input filters (Figure 7, left)."""
    components = features.filter_components(context.model)
    is_plain = isinstance(context.model, ViT) and context.model.patch_embed.backbone is None
    layer = "the patch embedding" if is_plain else "the first convolution"
    text = (
        f"Principal components of the filters of {layer}, strongest first. In a trained model they resemble a basis of "
        "edges and spots; noise means that little was learned."
    )
    return InspectionSection(
        text, {"filters": figures.filter_chart(components)}, {"components": list(components.shape)}
    )


def positions_section(context: InspectionContext) -> InspectionSection:
    """Draw the similarity of position embeddings (Figure 7, center)."""
    similarity = features.position_similarity(context.model)
    text = (
        "Cosine similarity of the position embedding of each patch to those of all patches. Close patches and patches "
        "of the same row or column are similar: the model has learned that images have two dimensions."
    )
    return InspectionSection(
        text, {"positions": figures.position_chart(similarity)}, {"similarity": round_values(similarity)}
    )


def colors_section(context: InspectionContext) -> InspectionSection:
    """Draw the principal components of patch features as colors."""
    colors = to_array(features.feature_colors(context.model, context.drawn, layer=context.layer))
    pictures = [(each * 255).round().astype("uint8") for each in colors]
    drawing = _grid_below_input(context, pictures, head="Features as colors", title="Patch features as colors")
    text = (
        "The three strongest principal components of the features of all patches of these images, as red, green and "
        "blue. Patches of the same color have similar features, within an image and across images."
    )
    return InspectionSection(text, {"colors": drawing})


def reconstruction_section(context: InspectionContext) -> InspectionSection:
    """Draw masked patches and their reconstruction by a self-supervised model."""
    if context.pretraining is None:
        raise NotApplicableError(
            "the model was not stored with a pre-training head",
            expected="a self-supervised run",
            got="a model without pre-training head",
        )
    preprocessing = context.model.preprocess
    result = features.reconstruction(context.pretraining, context.drawn, preprocessing=preprocessing)
    stages = map(to_pictures, (result.images, result.visible, result.predicted))
    drawing = ImageGrid(
        rows=[list(row) for row in zip(*stages, strict=True)],
        column_heads=("Image", "Model input", "Reconstruction"),
        captions=[[name, "", ""] for name in context.drawn_names],
        title="Masked patches and their reconstruction",
    )
    error = (result.predicted - result.images).abs().mean(dim=1)[result.hidden].mean()
    text = (
        "Patches are masked or changed as in training, and the model predicts them from the others. The quality of the "
        "prediction shows how much it has learned about images; fine detail cannot be recovered."
    )
    return InspectionSection(
        text,
        {"reconstruction": drawing},
        {"masked_fraction": float(result.hidden.float().mean()), "mean_difference": float(error)},
    )


def patch_similarity_section(context: InspectionContext) -> InspectionSection:
    """Show which patches have features similar to a chosen one."""
    vectors = functional.normalize(
        features.patch_features(context.model, context.drawn, layer=context.layer).float(), dim=-1
    )
    rows, columns = vectors.shape[1:3]
    if rows * columns > MAX_PATCHES:
        raise NotApplicableError(
            "too many patches to store all pairs in a page", expected=f"at most {MAX_PATCHES}", got=rows * columns
        )
    flat = vectors.flatten(1, 2)
    similarity = (flat @ flat.transpose(1, 2)).unflatten(1, (rows, columns)).unflatten(3, (rows, columns))
    center = to_array(similarity[:, rows // 2, columns // 2].clamp(min=0))
    overlays, head = _overlay_maps(context, center), "Similarity to the center patch"
    drawing = _grid_below_input(context, overlays, head=head, title="Similarity of patches")
    text = "Move the pointer or the arrow keys over a patch to highlight patches with similar features."
    return InspectionSection(text, {"patch-similarity": drawing}, patch_similarity=tuple(similarity))


def logit_lens_section(context: InspectionContext) -> InspectionSection:
    """Draw the prediction that the head makes from each layer."""
    model = context.model
    probabilities = context.map_drawn(lambda images: features.layer_predictions(model, images)).softmax(dim=-1)
    drawings, numbers = {}, []
    for image, by_layer in enumerate(probabilities):
        final = by_layer[-1].topk(min(5, by_layer.shape[-1])).indices.tolist()
        name = "logit-lens" if len(probabilities) == 1 else f"logit-lens-{image + 1}"
        drawings[name] = figures.series_chart(
            {model.labels[label]: by_layer[:, label].tolist() for label in final},
            y_title="Probability",
            title=f"Prediction by layer: {context.drawn_names[image]}",
            percent=True,
        )
        best = by_layer.max(dim=-1)
        numbers.append(
            [
                {"label": model.labels[int(label)], "probability": round(float(probability), 6)}
                for label, probability in zip(best.indices, best.values, strict=True)
            ]
        )
    text = "Predictions of the head from the tokens of each layer, as if the encoder ended there (logit lens)."
    return InspectionSection(text, drawings, {"layers": numbers})


def similarity_section(context: InspectionContext) -> InspectionSection:
    """Draw the CKA of layers within a model or between two."""
    other_images = None if context.other is None else context.preprocess_for(context.other)
    similarity = features.layer_similarity(context.model, context.drawn, other=context.other, other_images=other_images)
    names = ("layer", "layer") if context.other is None else (context.model.name, context.other.name)
    text = (
        "Linear CKA: 1 if two layers represent patches in the same way, 0 if they have nothing in common. Bright "
        "blocks are sequences of layers that change little."
    )
    return InspectionSection(
        text, {"similarity": figures.similarity_chart(similarity, names=names)}, {"cka": round_values(similarity)}
    )


def norms_section(context: InspectionContext) -> InspectionSection:
    """Draw the norms of tokens by layer and over the image."""
    vit = require_vit(context.model)
    norms = context.map_drawn(lambda images: features.token_norms(vit, images))
    patches = norms[:, :, vit.config.prefix :]
    by_layer = patches.transpose(0, 1).flatten(1)
    series = {
        "largest patch": by_layer.max(dim=1).values.tolist(),
        "median patch": by_layer.median(dim=1).values.tolist(),
        "smallest patch": by_layer.min(dim=1).values.tolist(),
    }
    if vit.config.class_tokens:
        series["class token"] = norms[:, :, 0].mean(dim=0).tolist()
    last = patches[:, -1].unflatten(1, vit.config.grid)
    overlays = _overlay_maps(context, map(rescale, to_array(last)))
    maps = _grid_below_input(context, overlays, head="Norm after the last layer", title="Token norms over the image")
    lines = figures.series_chart(series, y_title="Norm", title="Token norms by layer")
    ratio = float(last.max() / last.median())
    text = (
        "A few patches with a much larger norm than the others, often on plain background, are artifacts of large "
        f"models, which store global information there; registers avoid them. Here the largest is {ratio:.1f} times "
        "the median."
    )
    numbers = {name.replace(" ", "_"): [round(each, 4) for each in values] for name, values in series.items()}
    return InspectionSection(text, {"norms": lines, "norms-maps": maps}, numbers)


SECTIONS: dict[str, tuple[str, Callable[[InspectionContext], InspectionSection]]] = {
    "rollout": ("Attention rollout", rollout_section),
    "heads": ("Attention heads", heads_section),
    "deletion": ("Deletion test", deletion_section),
    "logit-lens": ("Prediction by layer", logit_lens_section),
    "colors": ("Features as colors", colors_section),
    "patch-similarity": ("Patch similarity", patch_similarity_section),
    "reconstruction": ("Reconstruction", reconstruction_section),
    "distance": ("Attention distance", distance_section),
    "filters": ("Filters", filters_section),
    "positions": ("Position embeddings", positions_section),
    "similarity": ("Similarity of layers", similarity_section),
    "norms": ("Token norms", norms_section),
}
"""Title and function of each section, in the order of the report."""
