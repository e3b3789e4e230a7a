"""A batch of images with target distributions goes in; mixtures of pairs of images, and of their targets, come out."""

import math

import numpy as np
import torch

from vitkit.core.errors import DataError, check_share
from vitkit.core.shapes import Float, Int, Tensor


def one_hot(labels: Int[Tensor, " B"], *, classes: int, smoothing: int | float = 0.0) -> Float[Tensor, "B Y"]:
    """The target distribution of each label; `smoothing` is the share spread evenly over all the classes.

    >>> one_hot(torch.tensor([1]), classes=4, smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    check_share("label smoothing", smoothing)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            "a label is not one of the classes",
            expected=f"0…{classes - 1}",
            got=f"{int(labels.min())}…{int(labels.max())}",
        )
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_(1, labels[:, None].long(), 1.0 - smoothing + smoothing / classes)


def mix(
    images: Float[Tensor, "B C H W"],
    targets: Float[Tensor, "B Y"],
    *,
    mixup: int | float = 0.0,
    cutmix: int | float = 0.0,
    rng: np.random.Generator,
) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B Y"]]:
    """The batch mixed with itself in reverse order: by mixup, by cutmix, or by one of them at random; 0 is without.

    Both numbers are the α of Beta(α, α), from which one share is drawn for the batch.

    >>> images, targets = torch.eye(2)[:, None, None], torch.eye(2)
    >>> mixed, shares = mix(images, targets, mixup=0.2, rng=np.random.default_rng(0))
    >>> torch.equal(mixed[:, 0, 0], shares)
    True
    """
    if mixup > 0 and (cutmix <= 0 or rng.random() < 0.5):
        share = float(rng.beta(mixup, mixup))
        # Image and partner both meet their mirrored pair, so the larger share changes no distribution; it
        # keeps an image's own label the likeliest, which the accuracy during training is measured by.
        share = max(share, 1.0 - share)
        return torch.lerp(images.flip(0), images, share), torch.lerp(targets.flip(0), targets, share)
    if cutmix > 0:
        height, width = images.shape[-2:]
        top, bottom, left, right = _cut(height, width, share=1.0 - float(rng.beta(cutmix, cutmix)), rng=rng)
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right].flip(0)
        share = 1.0 - (bottom - top) * (right - left) / (height * width)
        return mixed, torch.lerp(targets.flip(0), targets, share)
    return images, targets


def _cut(height: int, width: int, *, share: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of a box with the image's shape and `share` of its area around a uniform centre.

    Where the box reaches beyond the image it is cut off, as in CutMix; the caller weighs labels by what remains.
    """
    cut_height, cut_width = int(height * math.sqrt(share)), int(width * math.sqrt(share))
    top = int(rng.integers(height)) - cut_height // 2
    left = int(rng.integers(width)) - cut_width // 2
    return max(top, 0), min(top + cut_height, height), max(left, 0), min(left + cut_width, width)
