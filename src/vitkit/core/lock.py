"""Lock of a directory, which the operating system releases even if its holder crashes."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vitkit.core.errors import TrainingError
from vitkit.core.files import write_text

LOCK_FILE, HOLDER_FILE = ".lock", ".lock.json"
PROBE_SECONDS = 1.0
"""Seconds to wait for the lock: `is_locked` of another process holds it for microseconds."""


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Hold the lock of a directory; if another process holds it, raise an error that names that process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path, lock_directory(Path(path)):
    ...     sorted(os.listdir(path))
    ['.lock', '.lock.json']
    """
    lock = FileLock(path / LOCK_FILE)
    try:
        lock.acquire(timeout=PROBE_SECONDS)
    except Timeout:
        raise TrainingError(
            f"{path} is in use by {_read_holder(path)}", hint="wait for it or stop it, or choose another out"
        ) from None
    try:
        write_text(path / HOLDER_FILE, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        for name in (HOLDER_FILE, LOCK_FILE):  # while the lock is held, so that no other holder's files are removed
            (path / name).unlink(missing_ok=True)
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a directory, which may be read-only and another user's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     before = is_locked(Path(name))
    ...     with lock_directory(Path(name)):
    ...         before, is_locked(Path(name))
    (False, True)
    """
    try:
        import fcntl  # noqa: PLC0415
    except ImportError:  # Windows, where a file in use cannot be opened
        return (path / HOLDER_FILE).exists()
    try:
        descriptor = os.open(f"{path}/{LOCK_FILE}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return False


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads((path / HOLDER_FILE).read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
