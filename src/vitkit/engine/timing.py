"""Engines and sizes of batches go in, how fast each is beside the others comes out, from runs that take turns.

Taking turns, because a machine is faster in one minute than in the next: engines that are timed one after the other are
compared by the weather.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from vitkit.core.shapes import Tensor
from vitkit.engine.compiled import CompiledEngine
from vitkit.engine.engine import CPU, Engine

MOST_RUNS = 500


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one engine reaches with one size of batch; the latency is that of a batch, in seconds."""

    batch: int
    latency_p50: float
    runs: int

    @property
    def images_per_second(self) -> float:
        """By the median run.

        >>> Speed(batch=8, latency_p50=0.5, runs=4).images_per_second
        16.0
        """
        return self.batch / self.latency_p50


def by_turns(
    actions: Sequence[Callable[[], object]], *, seconds: float, progress: Callable[[float], None] = lambda share: None
) -> list[list[float]]:
    """The times of each action, run by turns until each has had its seconds; at least two runs, after one to warm up.

    An action whose first run takes longer than all its seconds, and than one, is not run again.

    >>> [len(times) for times in by_turns([lambda: None, lambda: None], seconds=0.0)]
    [2, 2]
    """
    warm = [clocked(action) for action in actions]
    times = [[first] if first > max(seconds, 1.0) else [] for first in warm]
    waiting = [index for index, each in enumerate(times) if not each]
    while waiting:
        for index in waiting:
            times[index].append(clocked(actions[index]))
            progress(min(times[index][-1] / max(seconds, 1e-9), 1.0))
        waiting = [
            index
            for index in waiting
            if len(times[index]) < 2 or (sum(times[index]) < seconds and len(times[index]) < MOST_RUNS)
        ]
    return times


def clocked(action: Callable[[], object]) -> float:
    """The seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def speeds(
    engines: Sequence[Engine],
    images: Tensor,
    *,
    seconds: float = 2.0,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Speed]:
    """How fast engines answer for one batch (B C H W), in their order."""
    for engine in engines:
        if isinstance(engine, CompiledEngine):
            engine.answer(images)  # compiles for this size of batch, which is no part of its speed
    actions = [lambda engine=engine: engine.answer(images) for engine in engines]
    found = by_turns(actions, seconds=seconds, progress=progress)
    return [Speed(batch=len(images), latency_p50=median(times), runs=len(times)) for times in found]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What an engine takes to be there: seconds to its first answer, and memory, None where it cannot be told."""

    seconds: float
    memory_bytes: int | None


def started(make: Callable[[], Engine], image: Tensor, *, device: torch.device = CPU) -> tuple[Engine, Start]:
    """Make an engine, ask it about one image, and say what that took on its device."""
    before, start = held_bytes(device), time.perf_counter()
    engine = make()
    engine.answer(image)
    seconds = time.perf_counter() - start
    after = held_bytes(device)
    memory = None if before is None or after is None else max(0, after - before)
    return engine, Start(seconds=seconds, memory_bytes=memory)


def held_bytes(device: torch.device) -> int | None:
    """The memory that this process holds now: on a GPU its tensors, else what is resident; None where nobody says."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return torch.mps.current_allocated_memory() if device.type == "mps" else resident_bytes()


def resident_bytes() -> int | None:
    """The main memory of this process, freed blocks given back first; None where the system does not say."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def random_images(model_channels: int, sides: tuple[int, int], *, batch: int) -> Tensor:
    """Images to time by: what is on them makes no difference.

    >>> random_images(3, (32, 48), batch=2).shape
    torch.Size([2, 3, 32, 48])
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, model_channels, *sides, generator=generator)
