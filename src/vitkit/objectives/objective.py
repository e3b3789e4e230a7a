"""What every objective looks like to the loop: a model, images and targets go in, a loss and sums to show come out.

A labelled objective is given target distributions. One that does without labels sets its own task first: what is hidden
of each image, and what there is to say of it, drawn from random numbers that belong to the image's place alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import nn

from vitkit.core.shapes import Bool, Float, Tensor

Targets_contra = TypeVar("Targets_contra", contravariant=True)
Task = TypeVar("Task")


class Outcome(NamedTuple):
    """The loss, and sums over the batch's images of what else is worth showing.

    "correct" images become the share that logs call top1; any other sum becomes a share under its own name.
    """

    loss: Float[Tensor, ""]
    sums: dict[str, Tensor]


@runtime_checkable
class Objective(Protocol[Targets_contra]):
    """What a run descends. This alone tells supervised, masked and distilled runs apart."""

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Targets_contra) -> Outcome:
        """The mean loss of the images of one batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Random numbers of images that follow each other, the first of them at place `first`.

    Those of an image are a function of seed, use and place: however a batch is shared out among ranks, micro-batches
    and evaluations, an image has the same. `use` keeps steps apart, and training from evaluation.

    >>> together = Chance(seed=0, use=1).uniform(3, numbers=5)
    >>> torch.equal(together[2:], Chance(seed=0, use=1, first=2).uniform(1, numbers=5))
    True
    """

    seed: int
    use: int
    first: int = 0

    def uniform(self, images: int, *, numbers: int) -> Float[Tensor, "B numbers"]:
        """So many numbers from 0 to 1 for each image, on the CPU: they are sorted, and not every device has float64."""
        # Philox counts in blocks of four numbers: an image's begin where its place says, and nothing is skipped over.
        blocks = -(-numbers // 4)
        # A list of one number below 2^63 and one above becomes float64, in which a thousand steps are the same.
        key = np.array([self.seed, self.use], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=self.first * blocks))
        return torch.from_numpy(random.random((images, 4 * blocks))[:, :numbers])


# The loader's keys stay below 2^63; these do not meet them.
EVALUATING = 3 << 62
"""The use of validation images: the same at every evaluation."""


def training(step: int) -> int:
    """The use of a training step.

    >>> training(0) != training(1) != EVALUATING
    True
    """
    return (1 << 63) + step


GREY = 128.0
"""What stands where a patch was hidden."""


class Reconstruction(NamedTuple):
    """What a model made of images of which it saw a part, as pixels, 0…255."""

    images: Float[Tensor, "B C H W"]
    hidden: Bool[Tensor, "B H W"]
    """The pixels that were hidden or changed, and that the model was asked for."""
    predicted: Float[Tensor, "B C H W"]
    """The images with the model's answer where they were hidden."""

    @property
    def seen(self) -> Float[Tensor, "B C H W"]:
        """The images with what was hidden of them in grey.

        >>> black, hidden = torch.zeros(1, 1, 1, 2), torch.tensor([[[True, False]]])
        >>> Reconstruction(black, hidden, black).seen.flatten().tolist()
        [128.0, 0.0]
        """
        return self.images.masked_fill(self.hidden[:, None], GREY)


@runtime_checkable
class Unlabelled(Protocol[Task]):
    """An objective that needs no labels: it sets its own task, and can show how it was solved."""

    def set_task(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, chance: Chance) -> Task:
        """What is hidden of images, and what there is to say; `pixels` are the same images, 0…255."""
        ...

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: Task) -> Outcome:
        """The mean loss of the images of one batch."""
        ...

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: Task
    ) -> Reconstruction:
        """The images as the model completes them."""
        ...
