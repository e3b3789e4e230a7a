"""Signals between long work and its caller: requests to stop, and progress reports.

SIGTERM and Ctrl-C set a flag that long work checks between steps, so that it can save and exit. A second Ctrl-C raises
KeyboardInterrupt at once. A forked process that inherits the handler sets its own copy.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 75
"""Exit code of a run that was interrupted, saved, and can be resumed: EX_TEMPFAIL."""


class StopRequested(Exception):  # noqa: N818  not an error
    """Raised inside long work when a stop was requested."""


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM when everything is saved; the same call resumes.

    It is a KeyboardInterrupt, so a script does not continue as if the work were done. `path` is what was saved, and
    `run` the run if it was a training.
    """

    def __init__(self, message: str, *, path: Path, run: Any = None) -> None:
        super().__init__(message)
        self.path, self.run = path, run


@dataclass
class StopFlag:
    """Whether this process was asked to stop, and by which signal."""

    signal: str | None = None

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.signal is not None

    def raise_if_requested(self) -> None:
        """Raise `StopRequested` if a stop was requested."""
        if self.requested:
            raise StopRequested


@contextmanager
def catch_stop_signals() -> Iterator[StopFlag]:
    """Turn SIGTERM and SIGINT into a flag while the context is active; in the main thread only, as Python requires.

    >>> import os
    >>> with catch_stop_signals() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop.signal
    'SIGTERM'
    """
    stop = StopFlag()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number).name

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


ProgressFunction = Callable[[str, int, int], None]
"""Called with the name of a task, the units that are done, and the total."""


def ignore_progress(task: str, done: int, total: int) -> None:
    """Do nothing."""


def start_task(progress: ProgressFunction, task: str, total: int) -> Callable[[int], None]:
    """Return a function that reports further units of a task as done.

    >>> advance = start_task(lambda task, done, total: print(f"{task} {done}/{total}"), "evaluating", 4)
    evaluating 0/4
    >>> advance(3)
    evaluating 3/4
    """
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        done += units
        progress(task, done, total)

    progress(task, 0, total)
    return advance
