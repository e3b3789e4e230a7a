"""A subject goes in, the parts of a report that follow attention come out."""

from typing import Any

import torch

from vitkit.inspection.applies import needs_attention, needs_removable_patches
from vitkit.inspection.attention import head_maps
from vitkit.inspection.colours import heated, lit
from vitkit.inspection.deletion import deletion_curve
from vitkit.inspection.distance import attention_distance
from vitkit.inspection.part import Part, rounded
from vitkit.inspection.pictures import distance_chart, lines, side_by_side, stretched
from vitkit.inspection.subject import Subject

MOST_HEADS = 12
DELETION_STEPS = 10


def rolled_out(subject: Subject) -> Part:
    """Figure 6, and beside it what speaks for a class."""
    vit = needs_attention(subject.model)
    followed = {
        "class": "The row that is followed is the class token's.",
        "mean": "This model has no class token to read; the mean of the rows of all patches is followed.",
        "map": "This model is read by an attention probe; rows are followed as the probe weighs them.",
    }[vit.config.pooling]
    maps = subject.rollout
    columns: dict[str, tuple[list[Any], list[str]]] = {
        "What the model sees": (list(subject.pictures), subject.titles),
        "Attention rollout": (
            [lit(picture, each) for picture, each in zip(subject.pictures, stretched(maps), strict=True)],
            [""] * len(maps),
        ),
    }
    numbers: dict[str, Any] = {"rollout": rounded(maps)}
    if vit.config.classes:
        explained = {"predicted": ("For the answer", subject.predicted, subject.relevance)}
        if subject.chosen is not None:
            classes = torch.full((len(maps),), subject.chosen)
            explained["chosen"] = ("For the chosen class", classes, subject.relevance_for(classes))
        for what, (head, classes, spoken) in explained.items():
            numbers[f"relevance_{what}"] = rounded(spoken)
            columns[head] = (
                [heated(picture, each) for picture, each in zip(subject.pictures, stretched(spoken), strict=True)],
                [subject.answer(image, label) for image, label in enumerate(classes.tolist())],
            )
    drawing = side_by_side(
        list(zip(*(pictures for pictures, _ in columns.values()), strict=True)),
        heads=list(columns),
        names=list(zip(*(said for _, said in columns.values()), strict=True)),
        title="Attention from the output to the image",
    )
    text = (
        "Bright is where the answer is drawn from: attention is averaged over heads, half of each row is the residual "
        f"connection, and layers are multiplied (Figure 6 of the paper). {followed} Colours show which patches raise "
        "the score of a class: attention weighted by that score's gradient."
    )
    return Part(name="rollout", title="Attention rollout", text=text, drawings={"rollout": drawing}, numbers=numbers)


def heads_one_by_one(subject: Subject) -> Part:
    """The heads of a layer."""
    vit = needs_attention(subject.model)
    layer = subject.layer % len(vit.blocks)
    maps = subject.each(lambda images: head_maps(vit, images, layers=[subject.layer]))[:, 0]
    drawn = min(vit.config.heads, MOST_HEADS)
    rows = [
        [picture, *(heated(picture, each) for each in stretched(heads[:drawn]))]
        for picture, heads in zip(subject.pictures, maps, strict=True)
    ]
    names = [[name, *([""] * drawn)] for name in subject.titles]
    drawing = side_by_side(
        rows,
        heads=["", *(f"Head {head}" for head in range(1, drawn + 1))],
        names=names,
        title=f"The heads of layer {layer + 1}",
    )
    left_out = vit.config.heads - drawn
    more = f" {left_out} more heads are in the numbers." if left_out else ""
    text = f"What each head of layer {layer + 1} looks at, seen from the token that the answer is read from.{more}"
    numbers = {"layer": layer, "maps": rounded(maps)}
    return Part(name="heads", title="Heads one by one", text=text, drawings={"heads": drawing}, numbers=numbers)


def trust(subject: Subject) -> Part:
    """What becomes of the answer when patches go."""
    vit = needs_removable_patches(subject.model)
    steps = min(DELETION_STEPS, vit.config.patches)
    generator = torch.Generator().manual_seed(0)
    guesses = {
        "rollout": subject.rollout,
        "relevance": subject.relevance,
        "at random": torch.rand(len(subject.shown), *vit.config.grid, generator=generator),
    }
    series = {
        name: torch.cat(
            [
                deletion_curve(vit, images, some, steps=steps)
                for images, some in zip(subject.shown.split(subject.batch), maps.split(subject.batch), strict=True)
            ]
        )
        .mean(dim=0)
        .tolist()
        for name, maps in guesses.items()
    }
    drawing = lines(
        series,
        along=[f"{step / steps:.0%}" for step in range(steps)],
        below="Patches left out",
        named="Probability of the answer",
        title="What becomes of the answer without the patches a map points at",
        percent=True,
    )
    text = (
        "How far to trust the maps: the patches that a map rates highest are left out first. The faster the "
        "probability falls, compared with patches left out at random, the more the map says about the answer. "
        f"The mean over {len(subject.shown)} images; a few images say little."
    )
    numbers = {name.replace(" ", "_"): [round(each, 6) for each in values] for name, values in series.items()}
    return Part(
        name="trust", title="How far to trust the maps", text=text, drawings={"trust": drawing}, numbers=numbers
    )


def distance(subject: Subject) -> Part:
    """Figure 7, right."""
    far = attention_distance(subject.model, subject.batches())
    text = (
        f"How far each head looks, the mean over {len(subject.images):,} images: the receptive field of attention. In "
        "trained models some heads of the first layers look over the whole image already, and all of the last do. "
        "The paper uses 128 images."
    )
    return Part(
        name="distance",
        title="Attention distance",
        text=text,
        drawings={"distance": distance_chart(far)},
        numbers={"pixels": rounded(far, 3), "images": len(subject.images)},
    )
