"""Logits of a model for every image of a source, and metrics summed over ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.signals import StopRequested
from vitkit.core.sizes import pair
from vitkit.data.dataset import ImageSource
from vitkit.data.loader import CPU, BatchLoader, ImageBatch, make_evaluation_loader
from vitkit.data.preprocessing import Preprocessing

ImageClassifier = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B Y"]]
"""A module, or another function from normalized images to logits."""


class LabeledLogits(NamedTuple):
    """Logits of images and their true classes."""

    logits: Float[Tensor, "N Y"]
    targets: Int[Tensor, " N"]


def iterate_logits(
    model: ImageClassifier,
    source: ImageSource,
    *,
    preprocessing: Preprocessing,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda images: None,
) -> Iterator[LabeledLogits]:
    """Yield the logits of the images of a source on the CPU, batch by batch in its order."""
    if len(source) == 0 or (source.labels < 0).any():
        raise DataError("the images have no labels to evaluate with", hint="choose a labeled dataset")
    if isinstance(model, nn.Module):
        model.eval()
    with make_evaluation_loader(
        source, preprocessing=preprocessing, batch_size=batch_size, workers=workers, device=device
    ) as batches:
        for batch in batches:
            with torch.no_grad():  # not around the yield: gradients of the caller are its own
                logits = forward_batch(model, batch, preprocessing=preprocessing, device=device).cpu()
            yield LabeledLogits(logits, batch.labels)
            progress(len(batch.labels))


def compute_logits(
    model: ImageClassifier,
    source: ImageSource,
    *,
    preprocessing: Preprocessing,
    batch_size: int = 64,
) -> LabeledLogits:
    """Return the logits of every image of a source, in its order."""
    batches = iterate_logits(model, source, preprocessing=preprocessing, batch_size=batch_size)
    return LabeledLogits(*map(torch.cat, zip(*batches, strict=True)))


def forward_batch(
    model: ImageClassifier,
    batch: ImageBatch,
    *,
    preprocessing: Preprocessing,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Float[Tensor, "B Y"]:
    """Return the logits of a batch of pixels in float32."""
    images = preprocessing.normalize(batch.pixels.to(device))
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return model(images).float()


@dataclass
class MetricSums:
    """Sums of the loss and of correct predictions over images, ready to be added up across ranks."""

    loss: float = 0.0
    top1: int = 0
    top5: int = 0
    count: int = 0


@torch.no_grad()
def sum_metrics(
    model: nn.Module,
    batches: BatchLoader,
    *,
    preprocessing: Preprocessing,
    device: torch.device,
    rounds: int,
    autocast: torch.dtype | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> MetricSums:
    """Sum the metrics of this rank's batches; ranks that share a sharded model must call it with equal `rounds`."""
    sums = MetricSums()
    for batch, is_real in pad_to_equal_batches(batches, rounds=rounds, preprocessing=preprocessing, stop=stop):
        logits = forward_batch(model, batch, preprocessing=preprocessing, device=device, autocast=autocast)
        if is_real:
            targets = batch.labels.to(device)
            is_correct = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
            sums.loss += functional.cross_entropy(logits, targets, reduction="sum").item()
            sums.top1 += int(is_correct[:, 0].sum())
            sums.top5 += int(is_correct.sum())
            sums.count += len(targets)
    return sums


def pad_to_equal_batches(
    batches: Iterator[ImageBatch], *, rounds: int, preprocessing: Preprocessing, stop: Callable[[], bool]
) -> Iterator[tuple[ImageBatch, bool]]:
    """Yield `rounds` batches and whether each is real: a rank with fewer repeats its last one, or a blank image."""
    blank = torch.zeros(1, preprocessing.channels, *pair(preprocessing.image_size), dtype=torch.uint8)
    last = ImageBatch(blank, torch.zeros(1, dtype=torch.int64))
    for _ in range(rounds):
        if stop():
            raise StopRequested
        batch = next(batches, None)
        last = batch or last
        yield last, batch is not None
