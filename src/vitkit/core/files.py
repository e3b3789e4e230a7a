"""Bytes or a folder of files go in, and appear under their name whole or not at all: written aside, synced, renamed.

What is read comes from anywhere, so a pipe is not waited for, and what has no end is not read to it.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file that is never seen half-written; what stood there before stays until the new one is whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(Path(folder, "labels.json"), b"[]")
    ...     Path(folder, "labels.json").read_bytes()
    b'[]'
    """
    with written_aside(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path | str, content: str) -> None:
    """Write a text in UTF-8 that is never seen half-written; what UTF-8 cannot hold is in it as an escape."""
    write_bytes(path, as_text(content).encode())


def as_text(name: str) -> str:
    r"""A name as a text that any file can hold: where a byte of it was no UTF-8, an escape stands instead.

    >>> print(as_text("Z\udcfcrich"))
    Z\udcfcrich
    """
    return name.encode("utf-8", "backslashreplace").decode()


def read_bytes(path: Path | str, *, most: int) -> bytes:
    """The content of a regular file; an OSError that says so where it is none, or is longer than this.

    >>> read_bytes("/dev/zero", most=1000)
    Traceback (most recent call last):
    OSError: [Errno 22] not a file but a device: '/dev/zero'
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"not a file but {kind_of_file(status.st_mode)}", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"too many bytes (expected at most {most:,}, got {status.st_size:,})", str(path))
        return file.read(most)


def kind_of_file(mode: int) -> str:
    """What a path that is no file is, by its mode.

    >>> kind_of_file(Path("/dev/zero").stat().st_mode)
    'a device'
    """
    names = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in names if test(mode)), "a device")


@contextmanager
def written_aside(path: Path | str) -> Iterator[Path]:
    """A path to write a file to; it gets its own name at the end of the block, if there was no error, or never was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with written_aside(Path(folder, "large")) as aside, aside.open("wb") as file:
    ...         count = file.write(b"piece by piece")
    ...     [path.name for path in Path(folder).iterdir()]
    ['large']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def one_at_a_time(path: Path | str) -> Iterator[None]:
    """Let no two processes of a machine be in the block at once for the same path; the later one waits.

    The lock ends with its process, however that ends. Where the system has no such locks, nothing is waited for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, one_at_a_time(Path(folder, "features")):
    ...     [path.name for path in Path(folder).iterdir()]
    ['.features.lock']
    """
    path = Path(path)
    try:
        import fcntl  # noqa: PLC0415  not on every system
    except ImportError:  # pragma: no cover
        yield
        return
    with path.with_name(f".{path.name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def commit_folder(path: Path | str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a folder aside, and give the folder its name once all of them are on the disk.

    A folder of that name that is already there is an error: committed folders do not change.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     commit_folder(Path(parent, "step-5"), lambda folder: write_bytes(folder / "a", b"1"))
    ...     [file.name for file in Path(parent, "step-5").iterdir()]
    ['a']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        fill(temporary)
        for file in temporary.iterdir():
            sync_file(file)
        sync_folder(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(folder: Path | str) -> None:
    """Remove what a killed process was writing aside in this folder."""
    for leftover in Path(folder).glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of names is on the disk, where the system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder, and keeps its names in order by itself
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path | str) -> str:
    """The SHA-256 of a file's content, in hexadecimal.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(Path(folder, "empty"), b"")
    ...     sha256(Path(folder, "empty"))[:12]
    'e3b0c44298fc'
    """
    path = Path(path)
    if not path.is_file():  # a pipe would wait for ever
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
