"""An engine, the model as written and images go in; how far their answers agree comes out, in a sentence too."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.engine.engine import Engine
from vitkit.engine.written import written
from vitkit.zoo.lookup import Model


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two engines agree: the share of images with the same likeliest class, and how far numbers lie apart.

    The numbers are logits, or features where the model has no classes; then there is no likeliest class, and the share
    is of images whose features point the same way, with a cosine above 0.99. An answer that is no number is the same as
    no other, and leaves no difference to tell.
    """

    images: int
    same_top1: float
    largest_difference: float
    mean_difference: float
    of_logits: bool = True

    def to_json(self) -> dict[str, object]:
        """As commands print it; JSON has no word for what is no number, so there is none.

        >>> Agreement(images=1, same_top1=0.0, largest_difference=math.nan, mean_difference=math.nan).to_json()
        {'images': 1, 'same_top1': 0.0, 'largest_difference': None, 'mean_difference': None, 'of_logits': True}
        """
        return {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}

    def __str__(self) -> str:
        """For people.

        >>> print(Agreement(images=64, same_top1=1.0, largest_difference=0.0312, mean_difference=0.004))
        same top-1 class for 64 of 64 images, logits at most 0.031 apart (0.004 on average)
        """
        same = f"{round(self.same_top1 * self.images)} of {self.images} image{'s' * (self.images != 1)}"
        what = f"same top-1 class for {same}, logits" if self.of_logits else f"same direction for {same}, features"
        return f"{what} at most {self.largest_difference:.2g} apart ({self.mean_difference:.2g} on average)"


class Answers(NamedTuple):
    """What an engine says of some images."""

    features: Float[Tensor, "N F"]
    logits: Float[Tensor, "N Y"]


def agreement(engine: Engine, reference: Engine | Model, batches: Iterable[Tensor]) -> Agreement:
    """Ask both about the same images, normalised (B C H W) in batches of any sizes.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, classes=10, settings=["depth=1"]).eval()
    >>> agreement(written(model), model, [torch.rand(3, 3, 32, 32)]).largest_difference
    0.0
    """
    known = list(batches)
    return compared(asked(engine, known), asked(reference, known))


def asked(engine: Engine | Model, batches: Iterable[Tensor]) -> Answers:
    """What an engine, or a model as written, says of all images."""
    if isinstance(engine, Model):
        engine = written(engine)
    answers = [engine.answer(images) for images in batches]
    if not answers:
        raise InputError("no images to measure agreement on", expected="one or more", got="none")
    features, logits = (torch.cat([answer[side] for answer in answers]) for side in (0, 1))
    return Answers(features, logits)


def compared(found: Answers, expected: Answers) -> Agreement:
    """How far two engines' answers for the same images agree."""
    has_classes = not torch.equal(expected.logits.nan_to_num(), expected.features.nan_to_num())
    if has_classes:
        same = found.logits.argmax(dim=1) == expected.logits.argmax(dim=1)
    else:
        same = torch.cosine_similarity(found.features, expected.features) > 0.99
    same &= found.logits.isfinite().all(dim=1) & expected.logits.isfinite().all(dim=1)
    apart = (found.logits - expected.logits).abs()
    return Agreement(
        images=len(apart),
        same_top1=same.float().mean().item(),
        largest_difference=apart.max().item(),
        mean_difference=apart.mean().item(),
        of_logits=has_classes,
    )
