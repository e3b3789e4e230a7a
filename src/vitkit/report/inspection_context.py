"""Model and images of an inspection, the results that several sections share, and the content of a section."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vitkit.core.errors import InputError, did_you_mean
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.signals import ProgressFunction, ignore_progress, start_task
from vitkit.data.decode import ImageLike
from vitkit.inspection.attention import relevance, rollout
from vitkit.model.pretraining import MaskedAutoencoder, MaskedPatches
from vitkit.model.vit import ViT
from vitkit.report.colors import Rgb, to_array, to_rgb
from vitkit.report.figures import Drawing
from vitkit.zoo.registry import Model

MAX_DRAWN = 8
"""Images that are drawn; means are over all images."""
MAX_TOKEN_PAIRS = 2**22
"""Pairs of tokens, over all images of a batch, whose attention weights are held at a time."""


@dataclass(frozen=True, kw_only=True)
class InspectionContext:
    """A model, images with names, and options of an inspection."""

    model: Model
    images: Sequence[ImageLike]
    names: Sequence[str]
    target: int | None = None
    """Class to explain in addition to the predicted one."""
    other: Model | None = None
    """Model to compare layers with."""
    pretraining: MaskedPatches | MaskedAutoencoder | None = None
    """Wrapper of the self-supervised pre-training, if it was stored with the model."""
    layer: int = -1
    """Layer whose heads and features are drawn."""
    progress: ProgressFunction = ignore_progress
    """Progress callback for the sections, and for the images of a section that reads all of them."""

    def __post_init__(self) -> None:
        if not self.images:
            raise InputError("no images to inspect", expected="at least one", got="none")

    @property
    def batch_size(self) -> int:
        """Return the number of images whose attention weights fit in memory."""
        if not isinstance(self.model, ViT):
            return MAX_DRAWN
        tokens = self.model.config.prefix + self.model.config.patches
        return max(1, min(MAX_DRAWN, MAX_TOKEN_PAIRS // tokens**2))

    def batches(self, task: str) -> Iterator[Float[Tensor, "B C H W"]]:
        """Yield all images, preprocessed, and report them as the progress of a task."""
        advance = start_task(self.progress, task, len(self.images))
        for first in range(0, len(self.images), self.batch_size):
            images = self.images[first : first + self.batch_size]
            yield torch.cat([self.model.preprocess(image) for image in images]).to(self.model.device)
            advance(len(images))

    @cached_property
    def drawn(self) -> Float[Tensor, "B C H W"]:
        """Return the images that are drawn, preprocessed."""
        return self.preprocess_for(self.model)

    def preprocess_for(self, model: Model) -> Float[Tensor, "B C H W"]:
        """Return the images that are drawn, preprocessed for a model."""
        return torch.cat([model.preprocess(image) for image in self.images[:MAX_DRAWN]]).to(model.device)

    @property
    def drawn_names(self) -> list[str]:
        """Return the names of the images that are drawn."""
        return list(self.names[:MAX_DRAWN])

    @cached_property
    def pictures(self) -> list[Rgb]:
        """Return the pixels that the model receives."""
        return to_pictures(self.model.preprocess.denormalize(self.drawn.cpu()))

    @cached_property
    @torch.no_grad()
    def probabilities(self) -> Float[Tensor, "B Y"]:
        """Return the predicted probabilities of the images that are drawn."""
        return self.map_drawn(lambda images: self.model(images).softmax(dim=1))

    @property
    def predicted_classes(self) -> Int[Tensor, "B"]:
        """Return the predicted class of each image that is drawn."""
        return self.probabilities.argmax(dim=1)

    @cached_property
    def rollout(self) -> Float[Tensor, "B rows columns"]:
        """Return the attention rollout of each image that is drawn."""
        return self.map_drawn(lambda images: rollout(self.model, images))

    @cached_property
    def relevance(self) -> Float[Tensor, "B rows columns"]:
        """Return the relevance of patches for the predicted class."""
        return self.relevance_for(self.predicted_classes)

    def relevance_for(self, classes: Int[Tensor, "B"]) -> Float[Tensor, "B rows columns"]:
        """Return the relevance of patches for a class of each image that is drawn."""
        return self.map_drawn(lambda images, targets: relevance(self.model, images, classes=targets), classes)

    def describe_prediction(self, image: int, label: int) -> str:
        """Return a class and its probability."""
        return f"{self.model.labels[label]} {float(self.probabilities[image, label]):.0%}"

    def top_predictions(self, image: int, count: int = 5) -> list[dict[str, object]]:
        """Return the likeliest classes of an image; none if the model has no head."""
        if self.model.config.num_classes == 0:
            return []
        best = self.probabilities[image].topk(min(count, self.probabilities.shape[1]))
        return [
            {"label": self.model.labels[int(label)], "probability": round(float(probability), 6)}
            for probability, label in zip(best.values, best.indices, strict=True)
        ]

    def map_drawn(self, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """Apply a function to the images that are drawn, and to other tensors with a row for each, in batches."""
        batches = (tensor.split(self.batch_size) for tensor in (self.drawn, *others))
        return torch.cat([function(*batch) for batch in zip(*batches, strict=True)])


def to_pictures(pixels: Float[Tensor, "B C H W"]) -> list[Rgb]:
    """Return pixels of 0..255 as RGB: the first three channels, or the mean of fewer as gray."""
    return [to_rgb(each / 255) for each in to_array(pixels)]


def find_class(model: Model, name: str | int) -> int:
    """Return the index of a class from its label or index."""
    if name in model.labels:
        return model.labels.index(str(name))
    if str(name).isdecimal() and int(name) < len(model.labels):
        return int(name)
    raise InputError(
        f"no class {name!r}", expected="a label of the model, or its index", hint=did_you_mean(str(name), model.labels)
    )


@dataclass(frozen=True)
class InspectionSection:
    """Figures and numbers of one method; `missing` is the reason if it does not apply to the model."""

    text: str = ""
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    title: str = ""
    missing: str | None = None
    patch_similarity: tuple[Float[Tensor, "rows columns rows2 columns2"], ...] = ()
    """Of each drawn image; the page highlights patches similar to the one under the pointer."""


def round_values(tensor: Tensor, digits: int = 6) -> Any:
    """Return a tensor as nested lists of rounded numbers."""
    return (tensor.double() * 10**digits).round().div(10**digits).tolist()
