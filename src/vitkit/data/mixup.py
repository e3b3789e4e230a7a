"""Mixup and cutmix of batches with target distributions."""

import math

import numpy as np
import torch

from vitkit.core.errors import DataError, check_fraction
from vitkit.core.shapes import Float, Int, Tensor


def one_hot(labels: Int[Tensor, " B"], *, num_classes: int, smoothing: int | float = 0.0) -> Float[Tensor, "B Y"]:
    """Return the target distribution of each label; `smoothing` is the mass spread evenly over all classes.

    >>> one_hot(torch.tensor([1]), num_classes=4, smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    check_fraction("label smoothing", smoothing)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            "a label is out of range", expected=f"0…{num_classes - 1}", got=f"{int(labels.min())}…{int(labels.max())}"
        )
    targets = torch.full((len(labels), num_classes), smoothing / num_classes, device=labels.device)
    return targets.scatter_(1, labels[:, None].long(), 1.0 - smoothing + smoothing / num_classes)


def mix_batch(
    images: Float[Tensor, "B C H W"],
    targets: Float[Tensor, "B Y"],
    *,
    mixup: int | float = 0.0,
    cutmix: int | float = 0.0,
    rng: np.random.Generator,
) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B Y"]]:
    """Mix the batch with itself in reverse order, by mixup, cutmix, or a random one of them; 0 disables.

    Both arguments are the α of Beta(α, α), from which one weight is drawn for the batch.

    >>> images, targets = torch.eye(2)[:, None, None], torch.eye(2)
    >>> mixed_images, mixed_targets = mix_batch(images, targets, mixup=0.2, rng=np.random.default_rng(0))
    >>> torch.equal(mixed_images[:, 0, 0], mixed_targets)
    True
    """
    if mixup > 0 and (cutmix <= 0 or rng.random() < 0.5):
        weight = float(rng.beta(mixup, mixup))
        # Each pair of images occurs in both orders, so taking the larger weight does not change the distribution. An
        # image's own label stays the most probable one, by which the training accuracy is measured.
        weight = max(weight, 1.0 - weight)
        return torch.lerp(images.flip(0), images, weight), torch.lerp(targets.flip(0), targets, weight)
    if cutmix > 0:
        height, width = images.shape[-2:]
        top, bottom, left, right = _draw_box(height, width, area=1.0 - float(rng.beta(cutmix, cutmix)), rng=rng)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right].flip(0)
        weight = 1.0 - (bottom - top) * (right - left) / (height * width)
        return mixed, torch.lerp(targets.flip(0), targets, weight)
    return images, targets


def _draw_box(height: int, width: int, *, area: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (top, bottom, left, right) of a box with a fraction `area` of the image around a uniform center.

    As in CutMix, the box is clipped at the border of the image; labels are weighted by the clipped area.
    """
    box_height, box_width = int(height * math.sqrt(area)), int(width * math.sqrt(area))
    top = int(rng.integers(height)) - box_height // 2
    left = int(rng.integers(width)) - box_width // 2
    return max(top, 0), min(top + box_height, height), max(left, 0), min(left + box_width, width)
