"""Non-blocking stderr.

A process that writes to a full pipe waits until it is read. A server must not wait: neither its event loop for a log
line, nor the worker for a library's message about an image.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

STDERR = 2
READ_SIZE = 1 << 16
FLUSH_SECONDS = 1.0
"""Seconds that the end of the process waits for the last lines to be read."""


class StderrHandler(logging.Handler):
    """Logging handler that drops a record if stderr has no room for it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        with contextlib.suppress(OSError):
            os.write(STDERR, f"{self.format(record)}\n".encode(errors="replace"))


@contextlib.contextmanager
def nonblocking_stderr() -> Iterator[None]:
    """Replace stderr, for this process and its children, by a pipe that a thread copies to the real one."""
    real = os.dup(STDERR)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.dup2(writer, STDERR)
    os.close(writer)
    thread = threading.Thread(target=_copy, args=(reader, real), name="stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(real, STDERR)  # closes the last writer of the pipe, which ends the thread
        thread.join(FLUSH_SECONDS)


def _copy(reader: int, real: int) -> None:
    while data := os.read(reader, READ_SIZE):
        with contextlib.suppress(OSError):  # the real stderr may be closed
            while data:
                data = data[os.write(real, data) :]
    os.close(reader)
    os.close(real)


def open_standard_files() -> None:
    """Open /dev/null for stdin, stdout and stderr if they are closed: otherwise a socket would get their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(number)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for the whole process
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
