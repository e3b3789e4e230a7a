"""A source and a position in its endless stream of epochs go in, batches of pixels and labels come out.

What a batch holds is a pure function of (seed, epoch, position) and of nothing else: not of the number of worker
processes, of ranks, or of earlier batches. So a run resumes from three integers, in the middle of an epoch, exactly.

    order(seed, epoch) → the global batch at a position → this rank's slice → pixels, each by its own random numbers
"""

import atexit
import math
import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from vitkit.core.errors import ConfigError, DataError
from vitkit.core.shapes import Int, Tensor, pair
from vitkit.data.augment import AugmentConfig, train_pixels
from vitkit.data.decode import DEFAULT_GATE, Gate, decode
from vitkit.data.source import Source
from vitkit.data.transforms import Preprocessing

Key = tuple[int, int]
"""(epoch, index): one appearance of an image."""
CPU = torch.device("cpu")
_NICENESS = 10


class Position(NamedTuple):
    """Where in its stream a run stands: the whole state of a loader."""

    seed: int
    epoch: int
    position: int

    def after(self, images: int, *, size: int) -> "Position":
        """The position this many images later, in epochs of `size` images.

        >>> Position(0, 0, 90).after(20, size=100)
        Position(seed=0, epoch=1, position=10)
        """
        epochs, position = divmod(self.position + images, size)
        return Position(self.seed, self.epoch + epochs, position)


class Batch(NamedTuple):
    """Images as they leave the transform, 0 to 255, and their labels."""

    pixels: Tensor
    labels: Int[Tensor, " B"]


class Failure(NamedTuple):
    """Why an image could not be had; returned, because an exception would lose its form between processes."""

    name: str
    reason: str


def order(seed: int, epoch: int, *, size: int) -> NDArray[np.int64]:
    """The order of the images in an epoch: a permutation, the same on every machine.

    >>> order(0, 0, size=5).tolist() == order(0, 0, size=5).tolist() != order(0, 1, size=5).tolist()
    True
    """
    return random_numbers(seed, epoch, 0).permutation(size)


def random_numbers(seed: int, epoch: int, use: int) -> np.random.Generator:
    """The random numbers of one use in one epoch: 0 is the order, and image i has i + 1, so that no two share any."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 40) + use]))


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of every global batch: an equal slice of it, in micro-batches one after the other."""

    batch_size: int
    rank: int = 0
    ranks: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        parts = self.ranks * self.accumulate
        if self.batch_size < 1 or self.batch_size % parts:
            raise ConfigError(
                "the batch cannot be shared out equally",
                expected=f"a multiple of {parts}: {self.ranks} ranks × {self.accumulate} accumulation steps",
                got=self.batch_size,
                hint="change schedule.batch_size or schedule.accumulate",
            )

    @property
    def micro_batch(self) -> int:
        """Images in one pass through the model."""
        return self.batch_size // (self.ranks * self.accumulate)

    def slices(self) -> Iterator[slice]:
        """This rank's micro-batches inside the global batch."""
        first = self.rank * self.accumulate
        for number in range(first, first + self.accumulate):
            yield slice(number * self.micro_batch, (number + 1) * self.micro_batch)


class Stream(Sampler[list[Key]]):
    """The keys of this rank's micro-batches, from a position on and without end.

    A batch may begin in one epoch and end in another.

    >>> keys = next(iter(Stream(size=5, start=Position(0, 0, 3), share=Share(batch_size=4))))
    >>> [epoch for epoch, _ in keys]
    [0, 0, 1, 1]
    """

    def __init__(self, *, size: int, start: Position, share: Share) -> None:
        self.size, self.start, self.share = size, start, share

    def __iter__(self) -> Iterator[list[Key]]:
        here = self.start
        permuted: dict[int, NDArray[np.int64]] = {}
        while True:
            keys: list[Key] = []
            while len(keys) < self.share.batch_size:
                if here.epoch not in permuted:
                    permuted = {here.epoch: order(here.seed, here.epoch, size=self.size)}
                wanted = self.share.batch_size - len(keys)
                taken = permuted[here.epoch][here.position : here.position + wanted].tolist()
                keys += [(here.epoch, index) for index in taken]
                here = here.after(len(taken), size=self.size)
            for part in self.share.slices():
                yield keys[part]


class InOrder(Sampler[list[int]]):
    """The indices of every image once, in order: the batches of one rank, each made when it is asked for.

    >>> list(InOrder(size=5, batch_size=2)), list(InOrder(size=5, batch_size=2, rank=1, ranks=2))
    ([[0, 1], [2, 3], [4]], [[2, 3]])
    """

    def __init__(self, *, size: int, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.size, self.batch_size = size, batch_size
        self.starts = range(0, size, batch_size)[rank::ranks]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            yield list(range(start, min(start + self.batch_size, self.size)))


class TrainingImages(Dataset[Batch | Failure]):
    """Images by key, augmented by random numbers that belong to the key."""

    def __init__(
        self, source: Source, *, preprocessing: Preprocessing, augment: AugmentConfig, gate: Gate, seed: int
    ) -> None:
        self.source, self.gate, self.seed = source, gate, seed
        self.preprocessing, self.augment = preprocessing, augment
        self.fit = smallest_useful(preprocessing, augment)

    def image(self, key: Key) -> NDArray[np.uint8]:
        """The pixels of one image in one epoch."""
        epoch, index = key
        rng = random_numbers(self.seed, epoch, index + 1)
        content = self.source.content(index)
        picture = decode(content, channels=self.preprocessing.channels, gate=self.gate, fit=self.fit)
        return train_pixels(picture, preprocessing=self.preprocessing, augment=self.augment, rng=rng)

    def __getitem__(self, keys: Sequence[Key]) -> Batch | Failure:
        images = []
        for key in keys:
            try:
                images.append(self.image(key))
            except (DataError, OSError) as error:
                return Failure(self.source.name(key[1]), str(error))
        labels = self.source.labels[[index for _, index in keys]]
        return Batch(torch.from_numpy(np.stack(images)), torch.from_numpy(labels))


def smallest_useful(preprocessing: Preprocessing, augment: AugmentConfig) -> tuple[int, int]:
    """The size from which on decoding an image larger adds nothing: its smallest crop is as large as what comes out.

    >>> smallest_useful(Preprocessing(image_size=224), AugmentConfig(crop_area=(0.25, 1.0), crop_aspect=(1.0, 1.0)))
    (448, 448)
    """
    smallest = 1.0
    if augment.crop == "inception":
        narrow = min(augment.crop_aspect[0], 1 / augment.crop_aspect[1])
        smallest = math.sqrt(augment.crop_area[0] * narrow)
    height, width = pair(preprocessing.image_size)
    return math.ceil(height / smallest), math.ceil(width / smallest)


class EvaluationImages(Dataset[Batch | Failure]):
    """Images by index, as the weights want them."""

    def __init__(self, source: Source, *, preprocessing: Preprocessing, gate: Gate) -> None:
        self.source, self.preprocessing, self.gate = source, preprocessing, gate

    def __getitem__(self, indices: Sequence[int]) -> Batch | Failure:
        images = []
        for index in indices:
            try:
                picture = decode(self.source.content(index), channels=self.preprocessing.channels, gate=self.gate)
            except (DataError, OSError) as error:
                return Failure(self.source.name(index), str(error))
            images.append(self.preprocessing.pixels(picture))
        return Batch(torch.from_numpy(np.stack(images)), torch.from_numpy(self.source.labels[list(indices)]))


class ReadableImages(EvaluationImages):
    """Images by index, as the weights want them; one that cannot be read is black, and its label is 0 instead of 1."""

    def __getitem__(self, indices: Sequence[int]) -> Batch | Failure:
        how = self.preprocessing
        shape, kind = (how.channels, *pair(how.image_size)), np.uint8 if how.antialias else np.float32
        pixels, readable = np.zeros((len(indices), *shape), dtype=kind), np.ones(len(indices), dtype=np.int64)
        for place, index in enumerate(indices):
            try:
                picture = decode(self.source.content(index), channels=how.channels, gate=self.gate)
                pixels[place] = how.pixels(picture)
            except (DataError, OSError):
                readable[place] = 0
        return Batch(torch.from_numpy(pixels), torch.from_numpy(readable))


class Batches(Iterator[Batch]):
    """Batches made ahead by worker processes, with a clock on how long the model had to wait for them."""

    def __init__(
        self,
        images: Dataset[Batch | Failure],
        keys: Iterable[list[Key]] | Iterable[list[int]],
        *,
        workers: int,
        device: torch.device = CPU,
    ) -> None:
        self.waited = 0.0
        loader = DataLoader(
            images,
            sampler=keys,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_yield_the_cores if device.type == "cpu" else _leave_signals_to_the_parent,
            prefetch_factor=4 if workers else None,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork" if workers and hasattr(os, "fork") else None,
        )
        self._batches: Iterator[Batch | Failure] = iter(loader)
        # Workers ignore the signal by which Python would end them, so they must be told to leave, whatever happens.
        self._leave = weakref.finalize(self, _let_go, self._batches)
        # Registered last it runs first: later, Python waits for the workers, and torch no longer tells them anything.
        atexit.register(self._leave)

    def __next__(self) -> Batch:
        start = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - start
        if isinstance(batch, Failure):
            raise DataError(
                f"{batch.name} cannot be read: {batch.reason}",
                hint="it changed after it was checked, or was never checked (data.verify=false); mend it and run again",
            )
        return batch

    def close(self) -> None:
        """Let the worker processes go; a second time does nothing."""
        self._leave()
        atexit.unregister(self._leave)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(batches: object) -> None:
    """Tell the worker processes to leave, and end one that does not: Python would wait for it at its own end."""
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is None:  # there are none
        return
    shut_down()
    for worker in getattr(batches, "_workers", ()):
        if worker.is_alive():
            worker.kill()
            worker.join()


def training_batches(
    source: Source,
    *,
    start: Position,
    share: Share,
    preprocessing: Preprocessing,
    augment: AugmentConfig,
    gate: Gate = DEFAULT_GATE,
    workers: int = 0,
    device: torch.device = CPU,
) -> Batches:
    """Micro-batches of this rank from a position on, without end, for a model on the device."""
    images = TrainingImages(source, preprocessing=preprocessing, augment=augment, gate=gate, seed=start.seed)
    keys = Stream(size=len(source), start=start, share=share)
    return Batches(images, keys, workers=workers, device=device)


def evaluation_batches(
    source: Source,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    rank: int = 0,
    ranks: int = 1,
    gate: Gate = DEFAULT_GATE,
    workers: int = 0,
    device: torch.device = CPU,
) -> Batches:
    """Every image once, in order: the batches of this rank."""
    indices = InOrder(size=len(source), batch_size=batch_size, rank=rank, ranks=ranks)
    images = EvaluationImages(source, preprocessing=preprocessing, gate=gate)
    return Batches(images, indices, workers=min(workers, len(indices)), device=device)


def readable_batches(
    source: Source,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    gate: Gate = DEFAULT_GATE,
    workers: int = 0,
    device: torch.device = CPU,
) -> Batches:
    """Every image once, in order; where there is a label, 0 says that the image could not be read and is black."""
    indices = InOrder(size=len(source), batch_size=batch_size)
    images = ReadableImages(source, preprocessing=preprocessing, gate=gate)
    return Batches(images, indices, workers=min(workers, len(indices)), device=device)


def _leave_signals_to_the_parent(_: int) -> None:
    """A stop signal reaches the whole process group; the parent still needs its workers to finish the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _yield_the_cores(worker: int) -> None:
    """Where the model computes on the same cores, decode when it leaves one free; it does while it waits for images."""
    _leave_signals_to_the_parent(worker)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
