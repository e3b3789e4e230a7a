"""Agreement between the outputs of two engines on the same images, and the images to measure it on."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.loader import make_evaluation_loader
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.engine import Engine, eager_engine
from vitkit.zoo.registry import Model

SAME_DIRECTION = 0.99
"""Cosine above which two feature vectors count as the same."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Fraction of images with the same top-1 class, and the differences of the logits.

    For a model without classes, features are compared: `same_top1` is the fraction of images whose feature vectors have
    a cosine above 0.99, and `of_logits` is False. Outputs that are not finite agree with nothing.
    """

    images: int
    same_top1: float
    largest_difference: float
    mean_difference: float
    of_logits: bool = True

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Agreement":
        """Return the agreement with these fields; None is a number that is not finite."""
        finite: dict[str, Any] = {key: math.nan if value is None else value for key, value in values.items()}
        return cls(**finite)

    def __str__(self) -> str:
        """Format for display.

        >>> print(Agreement(images=64, same_top1=1.0, largest_difference=0.0312, mean_difference=0.004))
        same top-1 class for 64 of 64 images, logits differ by at most 0.031 (0.004 on average)
        """
        count = f"{round(self.same_top1 * self.images)} of {self.images} image{'s' * (self.images != 1)}"
        same = f"same top-1 class for {count}, logits" if self.of_logits else f"same direction for {count}, features"
        return f"{same} differ by at most {self.largest_difference:.2g} ({self.mean_difference:.2g} on average)"


class EngineOutputs(NamedTuple):
    """Features and logits of all images."""

    features: Float[Tensor, "N F"]
    logits: Float[Tensor, "N Y"]


def measure_agreement(engine: Engine, reference: Engine | Model, batches: Iterable[Tensor]) -> Agreement:
    """Run both on batches of normalized images (B C H W) and compare the outputs.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 1}).eval()
    >>> measure_agreement(eager_engine(model), model, [torch.rand(3, 3, 32, 32)]).largest_difference
    0.0
    """
    batches = list(batches)
    return compare_outputs(run_batches(engine, batches), run_batches(reference, batches))


def run_batches(engine: Engine | Model, batches: Iterable[Tensor]) -> EngineOutputs:
    """Return the outputs of an engine, or of the unmodified model, for all batches."""
    if isinstance(engine, Model):
        engine = eager_engine(engine)
    outputs = [engine.forward(images) for images in batches]
    if not outputs:
        raise InputError("no images to measure agreement on", expected="one or more", got="none")
    features, logits = (torch.cat([output[index] for output in outputs]) for index in (0, 1))
    return EngineOutputs(features, logits)


def compare_outputs(outputs: EngineOutputs, reference: EngineOutputs) -> Agreement:
    """Compare the outputs of two engines for the same images."""
    has_classes = not torch.equal(reference.logits.nan_to_num(), reference.features.nan_to_num())
    if has_classes:
        same = outputs.logits.argmax(dim=1) == reference.logits.argmax(dim=1)
    else:
        same = torch.cosine_similarity(outputs.features, reference.features) > SAME_DIRECTION
    same &= outputs.logits.isfinite().all(dim=1) & reference.logits.isfinite().all(dim=1)
    differences = (outputs.logits - reference.logits).abs()
    same_top1, largest, mean = (value.item() for value in (same.float().mean(), differences.max(), differences.mean()))
    return Agreement(
        images=len(same), same_top1=same_top1, largest_difference=largest, mean_difference=mean, of_logits=has_classes
    )


def sample_images(
    source: ImageSource,
    preprocessing: Preprocessing,
    *,
    images: int = 64,
    batch_size: int = 16,
    max_tried: int = 1024,
    workers: int = 0,
) -> Iterator[Float[Tensor, "B C H W"]]:
    """Yield batches of the first readable images, preprocessed; at most `max_tried` images are read."""
    first = Subset(source, range(min(max_tried, len(source))))
    with make_evaluation_loader(
        first, preprocessing=preprocessing, batch_size=min(batch_size, images), lenient=True, workers=workers
    ) as batches:
        for batch in batches:
            readable = preprocessing.normalize(batch.pixels)[batch.labels.bool()][:images]
            if len(readable):
                yield readable
            images -= len(readable)
            if images == 0:
                return
