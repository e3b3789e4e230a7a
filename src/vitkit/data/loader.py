"""Deterministic data loaders.

The content of a batch is a pure function of (seed, epoch, position). It does not depend on the number of worker
processes or ranks, nor on earlier batches. A run therefore resumes exactly from three integers, even mid-epoch.

    epoch_permutation(seed, epoch) → global batch at a position → slice of this rank → pixels, augmented per image
"""

import atexit
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitkit.core.environment import start_method
from vitkit.core.errors import ConfigError, DataError, summarize
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import pair
from vitkit.data.augment import augment_image
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.preprocessing import Preprocessing, crop, get_size
from vitkit.data.stored_targets import StoredTargets

SampleKey = tuple[int, int]
"""(epoch, index): one appearance of an image."""
CPU = torch.device("cpu")
_NICENESS = 10


class ImageBatch(NamedTuple):
    """Pixels as they leave the transform, 0 to 255, and their labels."""

    pixels: Tensor
    labels: Int[Tensor, " B"]
    features: Float[Tensor, "B F"] | None = None
    """A teacher's features of each image, if the objective has stored targets."""


class LoadFailure(NamedTuple):
    """An image that could not be loaded; returned, because exceptions of workers lose their type."""

    name: str
    reason: str


class SamplerState(NamedTuple):
    """Position in the endless stream of epochs: the whole state of a loader."""

    seed: int
    epoch: int
    position: int

    def advance(self, images: int, *, size: int) -> "SamplerState":
        """Return the state after this many images, in epochs of `size` images."""
        epochs, position = divmod(self.position + images, size)
        return SamplerState(self.seed, self.epoch + epochs, position)


def epoch_permutation(seed: int, epoch: int, *, size: int) -> NDArray[np.int64]:
    """Return the order of the images in an epoch, the same on every machine."""
    return make_rng(seed, epoch, 0).permutation(size)


def make_rng(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Create the generator of one stream of an epoch: stream 0 is the order, image i has stream i + 1."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 40) + stream]))


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """This rank's slice of every global batch, in `accumulate` consecutive micro-batches."""

    batch_size: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        parts = self.world_size * self.accumulate
        if self.batch_size < 1 or self.batch_size % parts:
            expected = f"a multiple of {parts}: {self.world_size} ranks × {self.accumulate} accumulation steps"
            hint = "change schedule.batch_size or schedule.accumulate"
            raise ConfigError("the batch cannot be divided equally", expected=expected, got=self.batch_size, hint=hint)

    @property
    def micro_batch(self) -> int:
        """Number of images per forward pass."""
        return self.batch_size // (self.world_size * self.accumulate)

    def slices(self) -> Iterator[slice]:
        """Yield the micro-batches of this rank as slices of the global batch."""
        first = self.rank * self.accumulate
        for number in range(first, first + self.accumulate):
            yield slice(number * self.micro_batch, (number + 1) * self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class TrainingSampler:
    """Endless stream of this rank's micro-batches from a state on. A batch may span two epochs."""

    size: int
    start: SamplerState
    shard: BatchShard

    def __iter__(self) -> Iterator[list[SampleKey]]:
        state = self.start
        permutations: dict[int, NDArray[np.int64]] = {}
        while True:
            keys: list[SampleKey] = []
            while len(keys) < self.shard.batch_size:
                if state.epoch not in permutations:
                    permutations = {state.epoch: epoch_permutation(state.seed, state.epoch, size=self.size)}
                end = state.position + self.shard.batch_size - len(keys)
                indices = permutations[state.epoch][state.position : end].tolist()
                keys += [(state.epoch, index) for index in indices]
                state = state.advance(len(indices), size=self.size)
            for part in self.shard.slices():
                yield keys[part]


class SequentialBatchSampler:
    """Every index once, in order, as keys of epoch 0: the batches of one rank."""

    def __init__(self, *, size: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.batch_size = size, batch_size
        self.starts = range(0, size, batch_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in self.starts:
            yield [(0, index) for index in range(start, min(start + self.batch_size, self.size))]


class EvaluationDataset(TorchDataset[ImageBatch | LoadFailure]):
    """Batches preprocessed as for evaluation."""

    def __init__(self, source: ImageSource, *, preprocessing: Preprocessing) -> None:
        self.source, self.preprocessing = source, preprocessing

    def load(self, key: SampleKey) -> NDArray[np.uint8] | NDArray[np.float32]:
        """Return the pixels of one image."""
        image = decode(self.source.read(key[1]), channels=self.preprocessing.channels)
        return self.preprocessing.to_pixels(image)

    def __getitem__(self, keys: Sequence[SampleKey]) -> ImageBatch | LoadFailure:
        images = []
        for key in keys:
            try:
                images.append(self.load(key))
            except (DataError, OSError) as error:
                return LoadFailure(self.source.name(key[1]), summarize(error))
        labels = self.source.labels[[index for _, index in keys]]
        return ImageBatch(torch.from_numpy(np.stack(images)), torch.from_numpy(labels))


class LenientDataset(EvaluationDataset):
    """Batches whose labels are 1, or 0 for an unreadable image, which is black."""

    def __getitem__(self, keys: Sequence[SampleKey]) -> ImageBatch:
        preprocessing = self.preprocessing
        shape = (len(keys), preprocessing.channels, *pair(preprocessing.image_size))
        pixels = np.zeros(shape, dtype=np.uint8 if preprocessing.antialias else np.float32)
        readable = np.ones(len(keys), dtype=np.int64)
        for row, key in enumerate(keys):
            try:
                pixels[row] = self.load(key)
            except (DataError, OSError):
                readable[row] = 0
        return ImageBatch(torch.from_numpy(pixels), torch.from_numpy(readable))


class TrainingDataset(EvaluationDataset):
    """Augmented batches. The random numbers of an image belong to its key."""

    def __init__(
        self,
        source: ImageSource,
        *,
        preprocessing: Preprocessing,
        augment: AugmentConfig,
        seed: int,
        targets: StoredTargets | None = None,
    ) -> None:
        super().__init__(source, preprocessing=preprocessing)
        self.augment, self.seed, self.targets = augment, seed, targets
        self.draft_size = find_draft_size(preprocessing, augment)

    def load(self, key: SampleKey) -> NDArray[np.uint8]:
        """Return the pixels of one image in one epoch."""
        epoch, index = key
        image = decode(self.source.read(index), channels=self.preprocessing.channels, draft_size=self.draft_size)
        if self.targets:
            height, width = get_size(image)
            image = crop(image, box=self.targets.box(epoch, index, height=height, width=width))
        rng = make_rng(self.seed, epoch, index + 1)
        return augment_image(image, preprocessing=self.preprocessing, augment=self.augment, rng=rng)

    def __getitem__(self, keys: Sequence[SampleKey]) -> ImageBatch | LoadFailure:
        batch = super().__getitem__(keys)
        if self.targets is None or isinstance(batch, LoadFailure):
            return batch
        return batch._replace(features=torch.from_numpy(np.stack([self.targets.features(*key) for key in keys])))


def find_draft_size(preprocessing: Preprocessing, augment: AugmentConfig) -> tuple[int, int]:
    """Return the (height, width) at which the smallest possible crop still has the resolution of the model input.

    >>> find_draft_size(Preprocessing(image_size=224), AugmentConfig(crop_area=(0.25, 1.0), crop_aspect=(1.0, 1.0)))
    (448, 448)
    """
    narrow = min(augment.crop_aspect[0], 1 / augment.crop_aspect[1])
    smallest = math.sqrt(augment.crop_area[0] * narrow) if augment.crop == "inception" else 1.0
    height, width = pair(preprocessing.image_size)
    return math.ceil(height / smallest), math.ceil(width / smallest)


class BatchLoader(Iterator[ImageBatch]):
    """Batches prefetched by worker processes. `wait_seconds` is the time that the consumer waited for them."""

    def __init__(
        self,
        dataset: TorchDataset[ImageBatch | LoadFailure],
        sampler: Iterable[list[SampleKey]],
        *,
        workers: int,
        device: torch.device = CPU,
    ) -> None:
        self.wait_seconds = 0.0
        loader = DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=partial(_start_worker, niceness=_NICENESS if device.type == "cpu" else 0),
            prefetch_factor=4 if workers else None,
            pin_memory=device.type == "cuda",
            multiprocessing_context=start_method() if workers else None,
        )
        batches: Any = iter(loader)
        self._batches: Iterator[ImageBatch | LoadFailure] = batches
        # Workers ignore the signal by which Python would end them, so they are always shut down explicitly, for which
        # torch has no public function. The private names are looked up here: a torch without them fails at once.
        shutdown = (batches._shutdown_workers, batches._workers) if workers else (lambda: None, ())
        self._shutdown = weakref.finalize(self, _shut_down_workers, *shutdown)
        # Handlers run in reverse order: later ones would run after Python has begun to wait for the workers.
        atexit.register(self._shutdown)

    def __next__(self) -> ImageBatch:
        start = time.perf_counter()
        batch = next(self._batches)
        self.wait_seconds += time.perf_counter() - start
        if isinstance(batch, LoadFailure):
            hint = "it changed after it was verified, or was never verified (data.verify=false); fix it and retry"
            raise DataError(f"{batch.name} cannot be read: {batch.reason}", hint=hint)
        return batch

    def close(self) -> None:
        """Shut the worker processes down. Calling it again does nothing."""
        self._shutdown()
        atexit.unregister(self._shutdown)

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shut_down_workers(shut_down: Callable[[], object], workers: Sequence[BaseProcess]) -> None:
    """Shut workers down, and kill those that do not exit: Python would wait for them at its own exit."""
    shut_down()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _start_worker(_: int, *, niceness: int) -> None:
    """Ignore signals to the process group, because the parent still needs its workers to finish the step.

    On the CPU, the model computes on the same cores: workers with a lower priority run while it waits for images.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(niceness)


def make_training_loader(
    source: ImageSource,
    *,
    start: SamplerState,
    shard: BatchShard,
    preprocessing: Preprocessing,
    augment: AugmentConfig,
    workers: int = 0,
    device: torch.device = CPU,
    targets: StoredTargets | None = None,
) -> BatchLoader:
    """Create an endless loader of this rank's micro-batches from a state on."""
    dataset = TrainingDataset(source, preprocessing=preprocessing, augment=augment, seed=start.seed, targets=targets)
    sampler = TrainingSampler(size=len(source), start=start, shard=shard)
    return BatchLoader(dataset, sampler, workers=workers, device=device)


def make_evaluation_loader(
    source: ImageSource,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    device: torch.device = CPU,
    lenient: bool = False,
) -> BatchLoader:
    """Create a loader of every image once, in order: the batches of this rank.

    An unreadable image is an error; if `lenient`, it is black and labels tell which images were readable (1 or 0).
    """
    sampler = SequentialBatchSampler(size=len(source), batch_size=batch_size, rank=rank, world_size=world_size)
    dataset = (LenientDataset if lenient else EvaluationDataset)(source, preprocessing=preprocessing)
    return BatchLoader(dataset, sampler, workers=min(workers, len(sampler)), device=device)
