"""Loaders: batches depend only on seed, epoch and position, and no worker process is left behind."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from vitkit.core.errors import ConfigError, DataError
from vitkit.data import loader
from vitkit.data.config import AugmentConfig
from vitkit.data.dataset import ImageSource, StoredImage, Subset
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.loader import (
    BatchLoader,
    BatchShard,
    ImageBatch,
    SamplerState,
    SequentialBatchSampler,
    TrainingSampler,
    epoch_permutation,
    make_evaluation_loader,
    make_rng,
    make_training_loader,
)
from vitkit.data.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,))
START = SamplerState(7, 0, 0)
SMALL = Subset(open_digits().splits["train"], range(23))


def batches(
    *, source: ImageSource = SMALL, workers: int = 0, start: SamplerState = START, shard: BatchShard | None = None
) -> BatchLoader:
    return make_training_loader(
        source,
        start=start,
        shard=shard or BatchShard(batch_size=8),
        preprocessing=PREPROCESSING,
        augment=AugmentConfig(erasing=0.5),
        workers=workers,
    )


def take(stream: BatchLoader, count: int) -> list[ImageBatch]:
    with stream:
        return [next(stream) for _ in range(count)]


def same(left: list[ImageBatch], right: list[ImageBatch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels) for a, b in zip(left, right, strict=True)
    )


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6), size=st.integers(1, 200))
def test_order_is_a_pure_permutation(seed, epoch, size) -> None:
    first = epoch_permutation(seed, epoch, size=size)
    np.random.default_rng(1).random(5)
    assert sorted(first.tolist()) == list(range(size))
    assert first.tolist() == epoch_permutation(seed, epoch, size=size).tolist()


def test_order_is_the_same_on_every_machine() -> None:
    assert epoch_permutation(0, 0, size=8).tolist() == [5, 0, 6, 1, 7, 2, 4, 3]
    assert epoch_permutation(7, 3, size=8).tolist() == [7, 1, 0, 3, 4, 2, 5, 6]


def test_order_and_images_use_different_streams() -> None:
    uses = [(epoch, use) for epoch in range(4) for use in range(5)]
    first = {make_rng(0, epoch, use).integers(2**63) for epoch, use in uses}
    assert len(first) == len(uses)


class Niceness(Dataset[ImageBatch]):
    """Batches whose labels say how nice the process is that made them."""

    def __getitem__(self, keys: list[tuple[int, int]]) -> ImageBatch:
        return ImageBatch(torch.zeros(1, 1, 1, 1), torch.tensor([os.nice(0)]))


@pytest.mark.skipif(not hasattr(os, "nice"), reason="processes have no niceness here")
@pytest.mark.parametrize(("device", "nicer"), [("cpu", 10), ("meta", 0)])
def test_workers_lower_their_priority_on_cpu(device: str, nicer: int) -> None:
    with BatchLoader(Niceness(), [[(0, 0)]], workers=1, device=torch.device(device)) as batches:
        assert int(next(batches).labels) == min(19, os.nice(0) + nicer)


def test_order_differs_between_epochs_and_seeds() -> None:
    orders = {tuple(epoch_permutation(seed, epoch, size=50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def keys_at(start: SamplerState, *, count: int, size: int) -> list[tuple[int, int]]:
    """What the stream should give, from whole epochs laid end to end."""
    epochs = range(start.epoch, start.epoch + count // size + 2)
    whole = [(epoch, int(index)) for epoch in epochs for index in epoch_permutation(start.seed, epoch, size=size)]
    return whole[start.position : start.position + count]


@given(position=st.integers(0, 6), count=st.integers(1, 40), epoch=st.integers(0, 3))
def test_each_epoch_has_every_image_once(position, count, epoch) -> None:
    start = SamplerState(3, epoch, position)
    keys = next(iter(TrainingSampler(size=7, start=start, shard=BatchShard(batch_size=count))))
    assert keys == keys_at(start, count=count, size=7)


@given(
    size=st.integers(1, 30),
    world_size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    micro=st.integers(1, 4),
    seen=st.integers(0, 90),
)
def test_shards_cover_the_global_batch(size, world_size, accumulate, micro, seen) -> None:
    batch_size = world_size * accumulate * micro
    start = SamplerState(5, 0, 0).advance(seen, size=size)
    streams = [
        iter(
            TrainingSampler(
                size=size,
                start=start,
                shard=BatchShard(batch_size=batch_size, rank=rank, world_size=world_size, accumulate=accumulate),
            )
        )
        for rank in range(world_size)
    ]
    for step in range(3):
        parts = [next(stream) for stream in streams for _ in range(accumulate)]
        assert all(len(part) == micro for part in parts)
        wanted = keys_at(start.advance(step * batch_size, size=size), count=batch_size, size=size)
        assert [key for part in parts for key in part] == wanted


def test_indivisible_batch_is_rejected() -> None:
    with pytest.raises(ConfigError, match="divided equally") as caught:
        BatchShard(batch_size=10, world_size=2, accumulate=2)
    assert "multiple of 4" in str(caught.value)


def test_workers_do_not_change_batches() -> None:
    assert same(take(batches(workers=0), 7), take(batches(workers=2), 7))


def test_resumed_loader_continues_exactly() -> None:
    straight = take(batches(), 9)
    resumed = take(batches(start=SamplerState(7, 0, 0).advance(4 * 8, size=len(SMALL))), 5)
    assert same(straight[4:], resumed)


def test_shards_do_not_change_images() -> None:
    (whole,) = take(batches(), 1)
    parts = [
        part
        for rank in range(2)
        for part in take(batches(shard=BatchShard(batch_size=8, rank=rank, world_size=2, accumulate=2)), 2)
    ]
    assert torch.equal(whole.pixels, torch.cat([part.pixels for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))


def test_augmentation_differs_between_epochs() -> None:
    one = Subset(SMALL, [3])
    seen = {batch.pixels.numpy().tobytes() for batch in take(batches(source=one, shard=BatchShard(batch_size=1)), 10)}
    assert len(seen) > 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_has_every_image_once(world_size) -> None:
    seen: dict[int, ImageBatch] = {}
    for rank in range(world_size):
        with make_evaluation_loader(
            SMALL, preprocessing=PREPROCESSING, batch_size=4, rank=rank, world_size=world_size, workers=rank
        ) as stream:
            seen |= {rank + number * world_size: batch for number, batch in enumerate(stream)}
    labels = torch.cat([seen[number].labels for number in sorted(seen)])
    assert labels.tolist() == SMALL.labels.tolist()
    pixels = torch.cat([seen[number].pixels for number in sorted(seen)])
    assert torch.equal(pixels[:, 0], torch.from_numpy(np.stack([SMALL.read(index) for index in range(23)])))


def test_sequential_sampler_needs_no_memory() -> None:
    indices = SequentialBatchSampler(size=10**12 + 1, batch_size=4, rank=1, world_size=2)
    assert len(indices) == 125_000_000_000
    assert next(iter(indices)) == [(0, 4), (0, 5), (0, 6), (0, 7)]


class Many(ImageSource):
    """More images than there are."""

    layout, classes = "many", ()

    def __init__(self, count: int) -> None:
        self.labels = np.zeros(count, dtype=np.int64)

    def name(self, index: int) -> str:
        return f"{index:06}"

    def read(self, index: int) -> StoredImage:
        return np.zeros((8, 8), dtype=np.uint8)


def test_subset_of_many_images_is_an_array() -> None:
    source, count = Many(300_000), 200_000
    tracemalloc.start()
    try:
        part = Subset(source, range(50_000, 50_000 + count))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(part), part.name(1)) == (count, "050001")
    assert most < 32 * count  # 8 bytes for each index, 8 for each label; a list of numbers alone would be 40


class Broken(ImageSource):
    """Digits of which one cannot be read."""

    layout, classes = "digits", SMALL.classes

    def __init__(self, error: Exception) -> None:
        self.labels, self.error = SMALL.labels, error

    def name(self, index: int) -> str:
        return f"digits/{index}"

    def read(self, index: int) -> StoredImage:
        if index == 11:
            raise self.error
        return SMALL.read(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), DataError("the file is empty")])
def test_unreadable_image_is_named(workers, error) -> None:
    with pytest.raises(DataError, match=r"digits/11 cannot be read: .*(error|empty)"):
        take(batches(source=Broken(error), workers=workers), 4)
    with (
        make_evaluation_loader(Broken(error), preprocessing=PREPROCESSING, batch_size=5, workers=workers) as stream,
        pytest.raises(DataError, match="digits/11"),
    ):
        list(stream)


def test_close_ends_workers_and_is_idempotent() -> None:
    before = set(multiprocessing.active_children())
    stream = batches(workers=2)
    next(stream)
    assert len(set(multiprocessing.active_children()) - before) == 2
    stream.close()
    assert set(multiprocessing.active_children()) <= before
    stream.close()


def test_garbage_collection_ends_workers() -> None:
    before = set(multiprocessing.active_children())
    stream = batches(workers=1)
    next(stream)
    del stream
    assert set(multiprocessing.active_children()) <= before


def test_wait_time_is_measured() -> None:
    stream = batches()
    assert stream.wait_seconds == 0.0
    next(stream)
    assert stream.wait_seconds > 0.0


@pytest.mark.parametrize("name", ["_workers", "_shutdown_workers"])
def test_torch_without_a_private_name_fails_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Renamed(Iterator[object]):
        _workers, _shutdown_workers = (), None

        def __next__(self) -> object:
            raise StopIteration

    delattr(Renamed, name)
    monkeypatch.setattr(loader, "DataLoader", lambda *_, **__: Renamed())
    with pytest.raises(AttributeError, match=name):
        batches(workers=1)
    batches(workers=0).close()  # needs neither


LEAVING = """
    import multiprocessing
    import tempfile
    early = tempfile.TemporaryDirectory()  # its clean-up makes Python's order of leaving the awkward one
    from vitkit.data.config import AugmentConfig
    from vitkit.data.loader import BatchShard, SamplerState, make_training_loader
    from vitkit.data.layouts.arrays import open_digits
    from vitkit.data.preprocessing import Preprocessing

    if __name__ == "__main__":
        stream = make_training_loader(
            open_digits().splits["train"], start=SamplerState(0, 0, 0), shard=BatchShard(batch_size=4), workers=2,
            preprocessing=Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,)),
            augment=AugmentConfig(),
        )
        next(stream)
        print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
        raise RuntimeError("on purpose")
"""


def test_exception_ends_the_workers(tmp_path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(textwrap.dedent(LEAVING), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "on purpose" in done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    for pid in pids:
        assert not _runs(int(pid)), "a worker stayed behind"


def _runs(pid: int) -> bool:
    listed = subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=False)
    return "leaving.py" in listed.stdout
