"""Monitor for machine noise: the moments at which other programs and machines left the cores alone.

On a shared host, other machines take cores away for tenths of a second. A guarantee at a fraction of the capacity can
be measured only while that capacity is available.
"""

import bisect
import threading
import time
from types import TracebackType
from typing import Self

import psutil

STEP = 0.5
MAX_STOLEN = 0.02
MIN_IDLE = 0.05
BEFORE, AFTER = 2.0, 1.0
"""Seconds around a moment that must be quiet too, because a backlog takes time to clear."""


class NoiseMonitor:
    """Context manager that samples the cores. Quiet: hardly any time is stolen, and some is idle."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.quiet: list[bool] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop.set()
        self.thread.join()

    def sample(self) -> None:
        before = psutil.cpu_times()
        while not self.stop.wait(STEP):
            now = psutil.cpu_times()
            spent = max(sum(now) - sum(before), 1e-9)
            stolen = (getattr(now, "steal", 0.0) - getattr(before, "steal", 0.0)) / spent
            idle = (now.idle - before.idle) / spent
            self.times.append(time.perf_counter())
            self.quiet.append(stolen <= MAX_STOLEN and idle >= MIN_IDLE)
            before = now

    def was_quiet(self, moment: float) -> bool:
        """Return whether the machine was quiet around a moment of `time.perf_counter`.

        >>> monitor = NoiseMonitor()
        >>> monitor.times, monitor.quiet = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [False, True, True, True, True, True]
        >>> monitor.was_quiet(3.5), monitor.was_quiet(2.5), monitor.was_quiet(90.0)
        (True, False, False)
        """
        first = bisect.bisect_left(self.times, moment - BEFORE)
        last = bisect.bisect_left(self.times, moment + AFTER)
        around = self.quiet[first : last + 1]
        return bool(around) and all(around)
