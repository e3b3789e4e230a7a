"""Activity of a process that sends no messages, as reported by the operating system."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil

BUSY_STATES = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
MIN_CPU_SECONDS = 0.1
"""CPU time that counts as activity. A thread that waits for the interpreter takes less than that in half a minute."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """State of a process, in psutil's words, and the CPU time that it has taken."""

    state: str
    cpu_seconds: float


ProcessProbe = Callable[[int], ProcessActivity | None]


def probe_process(pid: int) -> ProcessActivity | None:
    """Return the activity of a process; None if there is no such process."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessActivity(process.status(), times.user + times.system)
    except psutil.Error:
        return None


class ActivityWatch:
    """Decides from samples of a process whether it is at work: computing, ready to compute, or waiting for a disk."""

    def __init__(self, pid: int, *, probe: ProcessProbe) -> None:
        self.pid, self.probe = pid, probe
        self.cpu_seconds = 0.0
        """CPU time when the process was last seen active."""

    def is_at_work(self) -> bool:
        """Return whether the process is busy, or has been since it was last seen active."""
        activity = self.probe(self.pid)
        if activity is None:
            return False
        if activity.state not in BUSY_STATES and activity.cpu_seconds - self.cpu_seconds < MIN_CPU_SECONDS:
            return False
        self.cpu_seconds = activity.cpu_seconds
        return True
