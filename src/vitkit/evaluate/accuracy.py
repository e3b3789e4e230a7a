"""A model and labelled images go in; how often it is right comes out, or its logits for a closer judgement."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Int, Tensor, pair
from vitkit.core.stopping import Stopped
from vitkit.data.loader import CPU, Batch, Batches, evaluation_batches
from vitkit.data.source import Source
from vitkit.data.transforms import Preprocessing


@dataclass
class Tally:
    """Sums over images: the loss, and how many are right at the first guess and among the first five."""

    loss: float = 0.0
    first: int = 0
    five: int = 0
    count: int = 0


class Answers(NamedTuple):
    """What a model says of every image, beside what is right."""

    logits: Float[Tensor, "N Y"]
    labels: Int[Tensor, " N"]


@torch.no_grad()
def tally(
    model: nn.Module,
    batches: Batches,
    *,
    preprocessing: Preprocessing,
    device: torch.device,
    rounds: int,
    autocast: torch.dtype | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Tally:
    """Run the batches through the model, `rounds` times in all: ranks that share a model must call it together."""
    sums = Tally()
    for batch, counts in in_step(batches, rounds=rounds, preprocessing=preprocessing, stop=stop):
        logits = logits_of(model, batch, preprocessing=preprocessing, device=device, autocast=autocast)
        if counts:
            labels = batch.labels.to(device)
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            sums.loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            sums.first += int(best[:, 0].sum())
            sums.five += int(best.sum())
            sums.count += len(labels)
    return sums


def in_step(
    batches: Iterator[Batch], *, rounds: int, preprocessing: Preprocessing, stop: Callable[[], bool]
) -> Iterator[tuple[Batch, bool]]:
    """Each batch and whether it counts, `rounds` times: a rank that has fewer gets its last again, or a blank one.

    >>> one = Batch(torch.zeros(1, 3, 8, 8), torch.tensor([7]))
    >>> found = in_step(iter([one]), rounds=2, preprocessing=Preprocessing(), stop=lambda: False)
    >>> [(int(batch.labels), counts) for batch, counts in found]
    [(7, True), (7, False)]
    """
    blank = torch.zeros(1, preprocessing.channels, *pair(preprocessing.image_size), dtype=torch.uint8)
    last = Batch(blank, torch.zeros(1, dtype=torch.int64))
    for _ in range(rounds):
        if stop():
            raise Stopped
        batch = next(batches, None)
        last = batch or last
        yield last, batch is not None


def logits_of(
    model: nn.Module,
    batch: Batch,
    *,
    preprocessing: Preprocessing,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Float[Tensor, "B Y"]:
    """The model's logits for a batch of pixels, in float32."""
    images = preprocessing.normalise(batch.pixels.to(device))
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return model(images).float()


@torch.no_grad()
def answers(
    model: nn.Module,
    source: Source,
    *,
    preprocessing: Preprocessing,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda images: None,
) -> Answers:
    """The model's logits for every image of a source, in its order."""
    if len(source) == 0 or (source.labels < 0).any():
        raise DataError("there is nothing to judge by: the images have no labels", hint="name a labelled data set")
    model.eval()
    logits = []
    with evaluation_batches(
        source, preprocessing=preprocessing, batch_size=batch_size, workers=workers, device=device
    ) as batches:
        for batch in batches:
            logits.append(logits_of(model, batch, preprocessing=preprocessing, device=device).cpu())
            progress(len(batch.labels))
    return Answers(torch.cat(logits), torch.from_numpy(source.labels))
