"""The server's clock, which stands still while the front-end process is suspended."""

import time
from collections import deque
from collections.abc import Callable

MAX_INTERVAL = 0.5
"""Seconds that count between two readings. The supervisor reads the clock four times a second."""


class RunningClock:
    """Seconds for which this process has been running since some moment.

    A process that is stopped, perhaps with its whole machine, does not read its clock. So what exceeds `MAX_INTERVAL`
    between two readings was a suspension, which counts for no deadline: neither clients nor the worker caused it.

    Args:
        read: Returns seconds in real time.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self.read, self.last_read = read, read()
        self.suspended_seconds = 0.0
        self.suspensions: deque[tuple[float, float]] = deque(maxlen=1000)
        """Start and end in real time."""

    def __call__(self) -> float:
        """Return the present time of this clock."""
        now, resumed_by = self.read(), self.last_read + MAX_INTERVAL
        if now > resumed_by:
            self.suspensions.append((resumed_by, now))
            self.suspended_seconds += now - resumed_by
        self.last_read = now
        return now - self.suspended_seconds

    def running_part(self, seconds: float) -> float:
        """Return for how much of the last seconds this process was running; another one measured them in real time."""
        self()
        start = self.last_read - seconds
        return seconds - sum(max(0.0, end - max(start, begin)) for begin, end in self.suspensions)
