"""The loader: what a batch holds depends on seed, epoch and position alone, and no process stays behind."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from vitkit.core.errors import ConfigError, DataError
from vitkit.data.augment import AugmentConfig
from vitkit.data.loader import (
    Batch,
    Batches,
    InOrder,
    Position,
    Share,
    Stream,
    evaluation_batches,
    order,
    random_numbers,
    training_batches,
)
from vitkit.data.source import Content, Source, Subset
from vitkit.data.sources.embedded import digits
from vitkit.data.transforms import Preprocessing

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), deviation=(0.5,))
START = Position(7, 0, 0)
SMALL = Subset(digits().splits["train"], range(23))


def batches(
    *, source: Source = SMALL, workers: int = 0, start: Position = START, share: Share | None = None
) -> Batches:
    return training_batches(
        source,
        start=start,
        share=share or Share(batch_size=8),
        preprocessing=PREPROCESSING,
        augment=AugmentConfig(erasing=0.5),
        workers=workers,
    )


def take(stream: Batches, count: int) -> list[Batch]:
    with stream:
        return [next(stream) for _ in range(count)]


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels) for a, b in zip(left, right, strict=True)
    )


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6), size=st.integers(1, 200))
def test_order_is_a_permutation_and_a_pure_function(seed, epoch, size) -> None:
    first = order(seed, epoch, size=size)
    np.random.default_rng(1).random(5)
    assert sorted(first.tolist()) == list(range(size))
    assert first.tolist() == order(seed, epoch, size=size).tolist()


def test_order_is_the_same_on_every_machine() -> None:
    assert order(0, 0, size=8).tolist() == [5, 0, 6, 1, 7, 2, 4, 3]
    assert order(7, 3, size=8).tolist() == [7, 1, 0, 3, 4, 2, 5, 6]


def test_the_order_of_an_epoch_and_its_images_share_no_random_numbers() -> None:
    uses = [(epoch, use) for epoch in range(4) for use in range(5)]
    first = {random_numbers(0, epoch, use).integers(2**63) for epoch, use in uses}
    assert len(first) == len(uses)


class Niceness(Dataset[Batch]):
    """Batches whose labels say how nice the process is that made them."""

    def __getitem__(self, keys: list[tuple[int, int]]) -> Batch:
        return Batch(torch.zeros(1, 1, 1, 1), torch.tensor([os.nice(0)]))


@pytest.mark.skipif(not hasattr(os, "nice"), reason="processes have no niceness here")
@pytest.mark.parametrize(("device", "nicer"), [("cpu", 10), ("meta", 0)])
def test_workers_yield_the_cores_to_a_model_that_computes_on_them(device: str, nicer: int) -> None:
    with Batches(Niceness(), [[(0, 0)]], workers=1, device=torch.device(device)) as batches:
        assert int(next(batches).labels) == min(19, os.nice(0) + nicer)


def test_orders_of_epochs_and_seeds_differ() -> None:
    orders = {tuple(order(seed, epoch, size=50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def keys_at(start: Position, *, count: int, size: int) -> list[tuple[int, int]]:
    """What the stream should give, from whole epochs laid end to end."""
    epochs = range(start.epoch, start.epoch + count // size + 2)
    whole = [(epoch, int(index)) for epoch in epochs for index in order(start.seed, epoch, size=size)]
    return whole[start.position : start.position + count]


@given(position=st.integers(0, 6), count=st.integers(1, 40), epoch=st.integers(0, 3))
def test_keys_run_through_each_epoch_once_and_then_into_the_next(position, count, epoch) -> None:
    start = Position(3, epoch, position)
    keys = next(iter(Stream(size=7, start=start, share=Share(batch_size=count))))
    assert keys == keys_at(start, count=count, size=7)


@given(
    size=st.integers(1, 30),
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    micro=st.integers(1, 4),
    seen=st.integers(0, 90),
)
def test_any_sharing_out_covers_the_global_batch_once_and_in_order(size, ranks, accumulate, micro, seen) -> None:
    batch_size = ranks * accumulate * micro
    start = Position(5, 0, 0).after(seen, size=size)
    streams = [
        iter(
            Stream(
                size=size,
                start=start,
                share=Share(batch_size=batch_size, rank=rank, ranks=ranks, accumulate=accumulate),
            )
        )
        for rank in range(ranks)
    ]
    for step in range(3):
        parts = [next(stream) for stream in streams for _ in range(accumulate)]
        assert all(len(part) == micro for part in parts)
        wanted = keys_at(start.after(step * batch_size, size=size), count=batch_size, size=size)
        assert [key for part in parts for key in part] == wanted


def test_a_batch_that_cannot_be_shared_out_equally_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared out equally") as caught:
        Share(batch_size=10, ranks=2, accumulate=2)
    assert "multiple of 4" in str(caught.value)


def test_worker_processes_change_no_bit() -> None:
    assert same(take(batches(workers=0), 7), take(batches(workers=2), 7))


def test_a_stream_from_the_middle_is_the_rest_of_the_stream() -> None:
    straight = take(batches(), 9)
    resumed = take(batches(start=Position(7, 0, 0).after(4 * 8, size=len(SMALL))), 5)
    assert same(straight[4:], resumed)


def test_sharing_out_changes_no_image() -> None:
    (whole,) = take(batches(), 1)
    parts = [
        part
        for rank in range(2)
        for part in take(batches(share=Share(batch_size=8, rank=rank, ranks=2, accumulate=2)), 2)
    ]
    assert torch.equal(whole.pixels, torch.cat([part.pixels for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))


def test_an_image_looks_different_in_every_epoch() -> None:
    one = Subset(SMALL, [3])
    seen = {batch.pixels.numpy().tobytes() for batch in take(batches(source=one, share=Share(batch_size=1)), 10)}
    assert len(seen) > 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_sees_every_image_once_and_in_order(ranks) -> None:
    seen: dict[int, Batch] = {}
    for rank in range(ranks):
        with evaluation_batches(
            SMALL, preprocessing=PREPROCESSING, batch_size=4, rank=rank, ranks=ranks, workers=rank
        ) as stream:
            seen |= {rank + number * ranks: batch for number, batch in enumerate(stream)}
    labels = torch.cat([seen[number].labels for number in sorted(seen)])
    assert labels.tolist() == SMALL.labels.tolist()
    pixels = torch.cat([seen[number].pixels for number in sorted(seen)])
    assert torch.equal(pixels[:, 0], torch.from_numpy(np.stack([SMALL.content(index) for index in range(23)])))


def test_the_order_of_any_number_of_images_takes_no_memory() -> None:
    indices = InOrder(size=10**12 + 1, batch_size=4, rank=1, ranks=2)
    assert len(indices) == 125_000_000_000
    assert next(iter(indices)) == [4, 5, 6, 7]


class Many(Source):
    """More images than there are."""

    kind, classes = "many", ()

    def __init__(self, count: int) -> None:
        self.labels = np.zeros(count, dtype=np.int64)

    def name(self, index: int) -> str:
        return f"{index:06}"

    def content(self, index: int) -> Content:
        return np.zeros((8, 8), dtype=np.uint8)


def test_a_part_of_many_images_is_held_as_numbers() -> None:
    source, count = Many(300_000), 200_000
    tracemalloc.start()
    try:
        part = Subset(source, range(50_000, 50_000 + count))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(part), part.name(1)) == (count, "050001")
    assert most < 32 * count  # 8 bytes for each index, 8 for each label; a list of numbers alone would be 40


class Broken(Source):
    """Digits of which one cannot be read."""

    kind, classes = "digits", SMALL.classes

    def __init__(self, error: Exception) -> None:
        self.labels, self.error = SMALL.labels, error

    def name(self, index: int) -> str:
        return f"digits/{index}"

    def content(self, index: int) -> Content:
        if index == 11:
            raise self.error
        return SMALL.content(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), DataError("the file is empty")])
def test_an_image_that_cannot_be_read_is_named(workers, error) -> None:
    with pytest.raises(DataError, match=r"digits/11 cannot be read: .*(error|empty)"):
        take(batches(source=Broken(error), workers=workers), 4)
    with (
        evaluation_batches(Broken(error), preprocessing=PREPROCESSING, batch_size=5, workers=workers) as stream,
        pytest.raises(DataError, match="digits/11"),
    ):
        list(stream)


def test_closing_ends_the_workers_and_a_second_time_does_nothing() -> None:
    before = set(multiprocessing.active_children())
    stream = batches(workers=2)
    next(stream)
    assert len(set(multiprocessing.active_children()) - before) == 2
    stream.close()
    assert set(multiprocessing.active_children()) <= before
    stream.close()


def test_forgetting_the_batches_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    stream = batches(workers=1)
    next(stream)
    del stream
    assert set(multiprocessing.active_children()) <= before


def test_waiting_is_measured() -> None:
    stream = batches()
    assert stream.waited == 0.0
    next(stream)
    assert stream.waited > 0.0


LEAVING = """
    import tempfile
    early = tempfile.TemporaryDirectory()  # its clean-up makes Python's order of leaving the awkward one
    from vitkit.data.augment import AugmentConfig
    from vitkit.data.loader import Position, Share, training_batches
    from vitkit.data.sources.embedded import digits
    from vitkit.data.transforms import Preprocessing

    if __name__ == "__main__":
        stream = training_batches(
            digits().splits["train"], start=Position(0, 0, 0), share=Share(batch_size=4), workers=2,
            preprocessing=Preprocessing(image_size=8, channels=1, mean=(0.5,), deviation=(0.5,)),
            augment=AugmentConfig(),
        )
        next(stream)
        print(*[worker.pid for worker in stream._batches._workers], flush=True)
        raise RuntimeError("on purpose")
"""


def test_an_exception_ends_the_program_and_its_workers(tmp_path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(textwrap.dedent(LEAVING), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "on purpose" in done.stderr
    for pid in done.stdout.split():
        assert not _runs(int(pid)), "a worker stayed behind"


def _runs(pid: int) -> bool:
    listed = subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=False)
    return "leaving.py" in listed.stdout
