"""SIGTERM or Ctrl-C goes in, a flag that work looks at between steps comes out, so that it can save and leave.

A second Ctrl-C does not wait: it is a KeyboardInterrupt. A forked worker that inherits the handler sets its own copy.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SAVED_AND_STOPPED = 75
"""The exit code of a run that was asked to stop, saved, and can go on: EX_TEMPFAIL, "try again"."""


class Stopped(Exception):  # noqa: N818  not an error: someone asked
    """Raised inside long work that was asked to stop."""


@dataclass
class Stop:
    """Whether someone asked this process to stop, and how."""

    signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raise Stopped where someone asked."""
        if self:
            raise Stopped


@contextmanager
def listening() -> Iterator[Stop]:
    """Turn SIGTERM and SIGINT into a flag, for as long as the context lasts.

    >>> import os
    >>> with listening() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop.signal
    'SIGTERM'
    """
    stop = Stop()

    def ask(number: int, _: FrameType | None) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
