"""Teacher of a distilled run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import pair
from vitkit.data.preprocessing import Preprocessing

_STEPS_PER_LEVEL = 4096
"""Pixels are restored to this fraction of a gray level, so that float32 gives integer pixels back exactly.

Normalizing and its inverse round twice each, by 2^-24 of at most 255: 6e-5 levels in all; half a step is 1.2e-4.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A trained model with its preprocessing and labels; `indices` selects some of its classes."""

    model: nn.Module
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)

    def select_classes(self, classes: Sequence[str]) -> "Teacher":
        """Return the same teacher for these classes only; an unknown class is an error."""
        return replace(self, indices=match_classes(self.labels, classes=classes))

    @torch.no_grad()
    def logits(self, images: Float[Tensor, "B C H W"], *, preprocessing: Preprocessing) -> Float[Tensor, "B Y"]:
        """Return the logits of images that have the student's preprocessing."""
        logits = self.model(renormalize(images, old=preprocessing, new=self.preprocessing)).float()
        return logits if self.indices is None else logits[:, torch.tensor(self.indices, device=logits.device)]


def renormalize(
    images: Float[Tensor, "B C H W"], *, old: Preprocessing, new: Preprocessing
) -> Float[Tensor, "B C H2 W2"]:
    """Convert normalized images from one model's preprocessing to another's normalization and size.

    Integer pixels are restored exactly, mixed ones to a 4096th of a gray level. Another size is resampled from them,
    bilinear with antialias and without rounding. Nothing is cropped: the student's augmentation has done that.

    >>> old, new = Preprocessing(image_size=2), Preprocessing(image_size=2, mean=(0.0,), std=(1.0,))
    >>> renormalize(torch.full((1, 3, 2, 2), -1.0), old=old, new=new)[0, 0]
    tensor([[0., 0.],
            [0., 0.]])
    """
    if (old.mean, old.std) == (new.mean, new.std) and images.shape[2:] == pair(new.image_size):
        return images
    pixels = denormalize(images, old)
    if pixels.shape[2:] != pair(new.image_size):
        size = pair(new.image_size)
        pixels = functional.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
    return new.normalize(pixels)


def denormalize(images: Float[Tensor, "B C H W"], preprocessing: Preprocessing) -> Float[Tensor, "B C H W"]:
    """Return the pixels, 0…255, of normalized images, without the rounding errors of float32.

    >>> pixels, preprocessing = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256), Preprocessing(mean=(0.485,))
    >>> torch.equal(denormalize(preprocessing.normalize(pixels), preprocessing), pixels)
    True
    """
    return preprocessing.denormalize(images).mul_(_STEPS_PER_LEVEL).round_().div_(_STEPS_PER_LEVEL)


def match_classes(labels: Sequence[str], *, classes: Sequence[str]) -> tuple[int, ...]:
    """Return the teacher's index of each class of the student, by name; an unknown class is an error.

    ImageNet has two classes called crane: a name that the teacher has twice is unambiguous only if all names are the
    same in the same order, and otherwise an error.

    >>> match_classes(("cat", "dog", "fox"), classes=("dog", "cat"))
    (1, 0)
    >>> match_classes(("0", "1"), classes=("cat", "dog"))
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: the teacher does not know the class cat and 1 more (expected 0, 1)
    hint: give its classes their names: vitkit weights adapt TEACHER NAMED --labels NAMES
    """
    if tuple(labels) == tuple(classes):
        return tuple(range(len(labels)))
    counts = Counter(labels)
    if repeated := [name for name in classes if counts[name] > 1]:
        raise ConfigError(
            f"the teacher has {counts[repeated[0]]} classes called {repeated[0]}",
            hint="give them different names, as in the data: vitkit weights adapt TEACHER NAMED --labels NAMES",
        )
    indices = {label: index for index, label in enumerate(labels)}
    if unknown := [name for name in classes if name not in indices]:
        is_numbered = bool(labels) and tuple(labels) == tuple(map(str, range(len(labels))))
        raise ConfigError(
            f"the teacher does not know the class {shorten_list(unknown, limit=1)}",
            expected=", ".join(labels[:5]) + (" …" if len(labels) > 5 else "") if labels else "a teacher with a head",
            hint="give its classes their names: vitkit weights adapt TEACHER NAMED --labels NAMES"
            if is_numbered
            else "a teacher must know all classes of the data, by the same names; fine-tune it on this data first",
        )
    return tuple(indices[name] for name in classes)
