"""What this process and its children write to stderr goes in; it comes out there, or is dropped where nobody takes it.

Whoever writes to a full pipe waits until somebody reads it. A server must not: neither its event loop, for a line of
its log, nor the worker, for what a library says of a strange image.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

STDERR = 2
AT_ONCE = 1 << 16
LAST_WORDS = 1.0
"""Seconds that the end waits for the last lines to be taken."""


@contextlib.contextmanager
def unblocked() -> Iterator[None]:
    """Meanwhile, stderr is a pipe of our own that never makes its writers wait; a thread copies it to the real one."""
    real = os.dup(STDERR)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.dup2(writing, STDERR)
    os.close(writing)
    copying = threading.Thread(target=copy, args=(reading, real), name="talk", daemon=True)
    copying.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(real, STDERR)  # with this the pipe has no writer left, and the thread comes to its end
        copying.join(LAST_WORDS)


def copy(reading: int, real: int) -> None:
    """Copy until there is no writer; where the real one is gone, what comes is taken and forgotten."""
    while piece := os.read(reading, AT_ONCE):
        with contextlib.suppress(OSError):
            while piece:
                piece = piece[os.write(real, piece) :]
    os.close(reading)
    os.close(real)


def say(line: str) -> None:
    """Write a line to stderr, if there is room for it."""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{line}\n".encode(errors="replace"))


def fill_standard_files() -> None:
    """Open /dev/null for those of stdin, stdout and stderr that were closed: a socket must not come to be one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(number)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  as long as we run
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
