"""Nothing goes in; at which moments the machine did what it was asked to, and nothing for others, comes out.

On a shared host other machines take cores away for tenths of a second, or make ours slower than the load on them. What
is promised for a share of the capacity can be seen only while there is that capacity.
"""

import bisect
import threading
import time
from types import TracebackType
from typing import Self

import psutil

STEP = 0.5
MOST_STOLEN = 0.02
LEAST_IDLE = 0.05
BEFORE, AFTER = 2.0, 1.0
"""Seconds around a moment that must be calm too: what has piled up must first be worked off."""


class Weather:
    """Watches the cores while it is open. Calm: hardly any of their time is taken, and some is left over."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.calm: list[bool] = []
        self.over = threading.Event()
        self.watching = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> Self:
        self.watching.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self.watching.join()

    def watch(self) -> None:
        before = psutil.cpu_times()
        while not self.over.wait(STEP):
            now = psutil.cpu_times()
            spent = max(sum(now) - sum(before), 1e-9)
            stolen = (getattr(now, "steal", 0.0) - getattr(before, "steal", 0.0)) / spent
            idle = (now.idle - before.idle) / spent
            self.times.append(time.perf_counter())
            self.calm.append(stolen <= MOST_STOLEN and idle >= LEAST_IDLE)
            before = now

    def was_calm(self, moment: float) -> bool:
        """Whether it was, around a moment of `time.perf_counter`.

        >>> weather = Weather()
        >>> weather.times, weather.calm = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [False, True, True, True, True, True]
        >>> weather.was_calm(3.5), weather.was_calm(2.5), weather.was_calm(90.0)
        (True, False, False)
        """
        first = bisect.bisect_left(self.times, moment - BEFORE)
        last = bisect.bisect_left(self.times, moment + AFTER)
        around = self.calm[first : last + 1]
        return bool(around) and all(around)
