"""A loaded model and images go in, what the parts of a report look at comes out, a few images at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from vitkit.checkpoints.ready import Loaded
from vitkit.core.errors import InputError, did_you_mean
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.data.given import Given
from vitkit.inspection.attention import relevance, rollout
from vitkit.inspection.canvas import Rgb
from vitkit.model.masked import MaskedAutoencoder, MaskedPatches
from vitkit.model.vit import ViT

SHOWN = 8
"""Images that are drawn; numbers that are means are of all images."""
PAIRS = 2**22
"""Pairs of tokens, over all images of a batch, that attention is looked at for at once."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is looked at: a model, images with their names, and perhaps a class and another model to compare with."""

    model: Loaded
    images: Sequence[Given]
    names: Sequence[str]
    chosen: int | None = None
    """The class to explain beside the predicted one."""
    other: Loaded | None = None
    pretraining: MaskedPatches | MaskedAutoencoder | None = None
    """What the model learned in without labels, where it is at hand."""
    layer: int = -1
    """Whose heads and features are drawn."""

    def __post_init__(self) -> None:
        if not self.images:
            raise InputError("no images to look at", expected="at least one", got="none")

    @property
    def batch(self) -> int:
        """How many images fit in memory at once, by their tokens."""
        if not isinstance(self.model, ViT):
            return SHOWN
        tokens = self.model.config.prefix + self.model.config.patches
        return max(1, min(SHOWN, PAIRS // tokens**2))

    def batches(self) -> Iterator[Float[Tensor, "B C H W"]]:
        """All images as the model takes them, read when they are asked for."""
        for first in range(0, len(self.images), self.batch):
            yield torch.cat([self.model.preprocess(image) for image in self.images[first : first + self.batch]])

    @cached_property
    def shown(self) -> Float[Tensor, "B C H W"]:
        """The images that are drawn."""
        return self.shown_to(self.model)

    def shown_to(self, model: Loaded) -> Float[Tensor, "B C H W"]:
        """The images that are drawn, as a model takes them."""
        return torch.cat([model.preprocess(image) for image in self.images[:SHOWN]])

    @property
    def titles(self) -> list[str]:
        """The names of the images that are drawn."""
        return list(self.names[:SHOWN])

    @cached_property
    def pictures(self) -> list[Rgb]:
        """The same as one sees them: what the model was given, not what the file holds."""
        return to_look_at(self.model.preprocess.preprocessing.pixels_of(self.shown))

    @cached_property
    @torch.no_grad()
    def probabilities(self) -> Float[Tensor, "B Y"]:
        """What the model answers to the images that are drawn."""
        return self.each(lambda images: self.model(images).softmax(dim=1))

    @property
    def predicted(self) -> Int[Tensor, "B"]:
        """The likeliest class of each image that is drawn."""
        return self.probabilities.argmax(dim=1)

    @cached_property
    def rollout(self) -> Float[Tensor, "B rows columns"]:
        """The rollout of each image that is drawn, which more than one part needs."""
        return self.each(lambda images: rollout(self.model, images))

    @cached_property
    def relevance(self) -> Float[Tensor, "B rows columns"]:
        """What speaks for the predicted class in each image that is drawn, which more than one part needs."""
        return self.relevance_for(self.predicted)

    def relevance_for(self, classes: Int[Tensor, "B"]) -> Float[Tensor, "B rows columns"]:
        """What speaks for a class in each image that is drawn."""
        some = zip(self.shown.split(self.batch), classes.split(self.batch), strict=True)
        return torch.cat([relevance(self.model, images, classes=of) for images, of in some])

    def answer(self, image: int, label: int | None = None) -> str:
        """A class, the predicted one where none is named, with its probability."""
        number = int(self.predicted[image]) if label is None else label
        return f"{self.model.labels[number]} {float(self.probabilities[image, number]):.0%}"

    def each(self, part: Callable[[Float[Tensor, "B C H W"]], Tensor]) -> Tensor:
        """A part of inspection over the images that are drawn, as many at a time as memory allows."""
        return torch.cat([part(images) for images in self.shown.split(self.batch)])


def to_look_at(pixels: Float[Tensor, "B C H W"]) -> list[Rgb]:
    """Pixels, 0…255, of any channels as pictures: of more than three the first, of fewer their mean as grey.

    >>> to_look_at(torch.full((1, 1, 1, 1), 300.0))[0].tolist()
    [[[255, 255, 255]]]
    """
    seen = pixels[:, :3] if pixels.shape[1] >= 3 else pixels.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    return list(seen.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy().astype(np.uint8))


def class_named(model: Loaded, name: str) -> int:
    """The number of a class by its label, or by the number itself.

    >>> import vitkit, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vitkit.save(vitkit.create("Ti/16", image_size=32, classes=2), folder, labels=["cat", "dog"])
    ...     class_named(vitkit.load(folder), "dog")
    1
    """
    if name in model.labels:
        return model.labels.index(name)
    if name.isdecimal() and int(name) < len(model.labels):
        return int(name)
    raise InputError(
        f"no class {name!r}", expected="one of the model's labels, or its number", hint=did_you_mean(name, model.labels)
    )
