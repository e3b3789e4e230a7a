"""A subject goes in, the parts of a report that show what was learnt, and how the answer comes about, come out."""

import torch

from vitkit.inspection.applies import DoesNotApplyError, needs_attention
from vitkit.inspection.colours import array, heated, scaled
from vitkit.inspection.embeddings import filter_components, position_similarity
from vitkit.inspection.features import feature_colours, patch_features, token_norms
from vitkit.inspection.layers import layer_predictions, layer_similarity
from vitkit.inspection.part import Part, rounded
from vitkit.inspection.pictures import (
    filter_tiles,
    grid_of_grids,
    likeness_table,
    lines,
    numbered,
    one_above_the_other,
    side_by_side,
)
from vitkit.inspection.reconstruction import reconstruction
from vitkit.inspection.subject import Subject, to_look_at
from vitkit.model.vit import ViT

MOST_PATCHES = 1024
"""Of an image whose patches can be pointed at on the page: the likeness of each pair of them is written into it."""


def filters(subject: Subject) -> Part:
    """Figure 7, left."""
    components = filter_components(subject.model)
    plain = isinstance(subject.model, ViT) and subject.model.patch_embed.backbone is None
    whose = "the patch embedding" if plain else "the first convolution"
    text = (
        f"The principal components of the filters of {whose}, the strongest first: what the model can tell apart in "
        "one look. In a trained model they resemble a basis of stripes and spots; noise means little was learnt."
    )
    return Part(
        name="filters",
        title="Filters",
        text=text,
        drawings={"filters": filter_tiles(components)},
        numbers={"components": list(components.shape)},
    )


def positions(subject: Subject) -> Part:
    """Figure 7, centre."""
    similar = position_similarity(subject.model)
    text = (
        "For each patch, how alike its position embedding is to those of all patches. Neighbours are alike, and so are "
        "patches of the same row or column: the model has found out that an image has two dimensions."
    )
    return Part(
        name="positions",
        title="Position embeddings",
        text=text,
        drawings={"positions": grid_of_grids(similar)},
        numbers={"similarity": rounded(similar)},
    )


def colours(subject: Subject) -> Part:
    """Features as colours."""
    found = feature_colours(subject.model, subject.shown, layer=subject.layer)
    painted = [(each * 255).round().astype("uint8") for each in array(found)]
    drawing = one_above_the_other(
        subject.pictures,
        painted,
        heads=("What the model sees", "Features as colours"),
        names=subject.titles,
        title="Features of patches as colours",
    )
    text = (
        "The three strongest directions among the features of all patches of all these images, as red, green and blue. "
        "Patches of the same colour mean the same to the model, in one image and in another."
    )
    return Part(name="colours", title="Features as colours", text=text, drawings={"colours": drawing})


def hidden(subject: Subject) -> Part:
    """What a masked model makes of patches that it does not see."""
    if subject.pretraining is None:
        raise DoesNotApplyError(
            "what it filled in patches with is not beside the model",
            expected="a run that learned without labels",
            got="a model alone",
        )
    how = subject.model.preprocess.preprocessing
    found = reconstruction(subject.pretraining, subject.shown, preprocessing=how)
    rows = [list(three) for three in zip(*map(to_look_at, (found.images, found.seen, found.predicted)), strict=True)]
    drawing = side_by_side(
        rows,
        heads=("The image", "What it sees", "How it completes it"),
        names=[[name, "", ""] for name in subject.titles],
        title="Hidden patches, and what the model makes of them",
    )
    error = (found.predicted - found.images).abs().mean(dim=1)[found.hidden].mean()
    text = (
        "Patches are hidden, or changed, as in training, and the model says what they were from the others. "
        "How well it does so says how much it knows of what images look like; fine detail is lost to anyone."
    )
    return Part(
        name="hidden",
        title="Hidden patches",
        text=text,
        drawings={"hidden": drawing},
        numbers={"hidden_share": float(found.hidden.float().mean()), "mean_difference": float(error)},
    )


def nearest(subject: Subject) -> Part:
    """Which patches are like each other."""
    features = torch.nn.functional.normalize(
        patch_features(subject.model, subject.shown, layer=subject.layer).float(), dim=-1
    )
    rows, columns = features.shape[1:3]
    if rows * columns > MOST_PATCHES:
        raise DoesNotApplyError(
            "too many patches to compare them all on a page", expected=f"at most {MOST_PATCHES}", got=rows * columns
        )
    flat = features.flatten(1, 2)
    likeness = (flat @ flat.transpose(1, 2)).unflatten(1, (rows, columns)).unflatten(3, (rows, columns))
    # Where no pointer is: the likeness to the patch in the middle.
    middle = likeness[:, rows // 2, columns // 2].clamp(min=0)
    pictures = [heated(picture, each) for picture, each in zip(subject.pictures, array(middle), strict=True)]
    drawing = one_above_the_other(
        subject.pictures,
        pictures,
        heads=("What the model sees", "Like the patch in the middle"),
        names=subject.titles,
        title="Patches that mean the same",
    )
    text = "Point at a patch, or move there with the arrow keys, and those that mean the same to the model light up."
    return Part(
        name="nearest",
        title="Patches that mean the same",
        text=text,
        drawings={"nearest": drawing},
        likeness=tuple(likeness),
    )


def layer_by_layer(subject: Subject) -> Part:
    """The answer of each layer."""
    model = subject.model
    lens = subject.each(lambda images: layer_predictions(model, images)).softmax(dim=-1)
    drawings, told = {}, []
    for image, probabilities in enumerate(lens):
        final = probabilities[-1].topk(min(5, probabilities.shape[-1])).indices.tolist()
        series = {model.labels[label]: probabilities[:, label].tolist() for label in final}
        name = "lens" if len(lens) == 1 else f"lens-{image + 1}"
        drawings[name] = lines(
            series,
            along=numbered(len(probabilities)),
            below="Depth (layer)",
            named="Probability",
            title=f"What each layer would answer: {subject.titles[image]}",
            percent=True,
        )
        best = probabilities.max(dim=-1)
        told.append(
            [
                {"label": model.labels[int(label)], "probability": round(float(probability), 6)}
                for label, probability in zip(best.indices, best.values, strict=True)
            ]
        )
    text = "The head on the tokens of each layer, as if the encoder ended there: where the answer is made up."
    return Part(
        name="lens", title="What each layer would answer", text=text, drawings=drawings, numbers={"layers": told}
    )


def likeness_of_layers(subject: Subject) -> Part:
    """CKA, within a model or between two."""
    seen = None if subject.other is None else subject.shown_to(subject.other)
    similar = layer_similarity(subject.model, subject.shown, other=subject.other, other_images=seen)
    sides = ("layer", "layer") if subject.other is None else (subject.model.name, subject.other.name)
    text = (
        "Linear CKA: 1 where two layers tell patches apart in the same way, 0 where they have nothing in common. "
        "Blocks of bright colour are stretches of layers that change little."
    )
    return Part(
        name="similarity",
        title="Similarity of layers",
        text=text,
        drawings={"similarity": likeness_table(similar, sides=sides)},
        numbers={"cka": rounded(similar)},
    )


def norms(subject: Subject) -> Part:
    """Lengths of tokens."""
    vit = needs_attention(subject.model)
    lengths = subject.each(lambda images: token_norms(vit, images))
    patches = lengths[:, :, vit.config.prefix :]
    by_layer = patches.transpose(0, 1).flatten(1)
    series = {
        "longest patch": by_layer.max(dim=1).values.tolist(),
        "middle patch": by_layer.median(dim=1).values.tolist(),
        "shortest patch": by_layer.min(dim=1).values.tolist(),
    }
    if vit.config.class_tokens:
        series["class token"] = lengths[:, :, 0].mean(dim=0).tolist()
    chart = lines(
        series,
        along=numbered(len(by_layer)),
        below="Depth (layer)",
        named="Length of tokens",
        title="Length of tokens by layer",
    )
    last = patches[:, -1].unflatten(1, vit.config.grid)
    maps = one_above_the_other(
        subject.pictures,
        [heated(picture, scaled(each)) for picture, each in zip(subject.pictures, array(last), strict=True)],
        heads=("What the model sees", "Length after the last layer"),
        names=subject.titles,
        title="Length of tokens over the image",
    )
    ratio = float(last.max() / last.median())
    text = (
        "A few patches much longer than the rest, often on plain ground, are notes that a large model keeps where "
        f"nothing is to be seen; registers avoid that. Here the longest is {ratio:.1f} times the middle one."
    )
    return Part(
        name="norms",
        title="Length of tokens",
        text=text,
        drawings={"norms": chart, "norms-maps": maps},
        numbers={name.replace(" ", "_"): [round(each, 4) for each in values] for name, values in series.items()},
    )
