"""Atomic files and directories, bounded reads, locks and checksums.

A file or directory is written to a temporary name, synced and renamed, so it appears whole or not at all. Reads refuse
pipes and devices, which might never end.
"""

import csv
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path | str, content: str) -> None:
    """Write text as UTF-8 atomically; lone surrogates, which UTF-8 cannot encode, become escapes."""
    write_bytes(path, escape_surrogates(content).encode())


def write_json(path: Path | str, value: object) -> None:
    """Write strict JSON in ASCII atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_csv(path: Path | str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Write a CSV file with a header atomically. None is an empty cell; undecodable bytes of file names are kept."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode(errors="surrogateescape"))


def escape_surrogates(text: str) -> str:
    r"""Escape lone surrogates, which stand for bytes of a file name that are not UTF-8.

    >>> print(escape_surrogates("Z\udcfcrich"))
    Z\udcfcrich
    """
    return text.encode("utf-8", "backslashreplace").decode()


def text_of_name(name: str) -> str:
    r"""Return a file name as text. If the locale is not UTF-8, listings have escaped bytes instead of characters.

    >>> text_of_name("Z\udcc3\udcbcrich")
    'Zürich'
    """
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # another lone surrogate, which no file name has
        return name


def name_of_text(text: str) -> str:
    """Return the file name that functions of the operating system take: the reverse of `text_of_name`."""
    return text if text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape"))


def read_bytes(path: Path | str, *, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`; raise OSError for any other file.

    >>> read_bytes("/dev/zero", max_bytes=1000)
    Traceback (most recent call last):
    OSError: [Errno 22] not a file but a device: '/dev/zero'
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"not a file but {describe_file_type(status.st_mode)}", str(path))
        if status.st_size > max_bytes:
            message = f"too many bytes (expected at most {max_bytes:,}, got {status.st_size:,})"
            raise OSError(errno.EFBIG, message, str(path))
        return file.read(min(max_bytes, max(status.st_size, 1 << 16)))  # files of the kernel have no size


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file, with or without a byte order mark; raise OSError for one of more than 64 MiB."""
    return read_bytes(path, max_bytes=64 << 20).decode("utf-8-sig")


def describe_file_type(mode: int) -> str:
    """Name the type of a path that is not a regular file, by its mode."""
    names = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in names if test(mode)), "a device")


@contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end of the block; after an error `path` is unchanged."""
    path = Path(path)
    temporary = _temporary_path(path)
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def file_lock(path: Path | str) -> Iterator[None]:
    """Hold an exclusive lock for `path` among the processes of this machine; wait until it is free.

    The operating system releases the lock when the process ends, even if it crashes.
    """
    from filelock import FileLock  # noqa: PLC0415  `vitkit --help` does not need it

    path = Path(path)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def commit_directory(path: Path | str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary directory, sync them, and rename the directory to `path`.

    An existing directory is an error: committed directories do not change.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_path(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        fill(temporary)
        for file in temporary.iterdir():
            sync_file(file)
        sync_directory(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


def replace_directory(path: Path | str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a directory that replaces an existing one when it is complete, with all that was in it.

    After an error `path` is unchanged.
    """
    path = Path(path).resolve()
    if not path.exists():
        commit_directory(path, fill)
        return
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{part}.tmp") for part in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    commit_directory(new, fill)
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_temporary_files(directory: Path | str) -> None:
    """Remove the temporary files and directories that a killed process left in a directory."""
    for leftover in Path(directory).glob(".*.tmp"):
        remove_path(leftover)


def remove_path(path: Path) -> None:
    """Remove a file or a directory with its content, if it exists; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_empty_directories(paths: Iterable[Path]) -> None:
    """Remove the directories that are empty."""
    for path in paths:
        with suppress(OSError):  # not empty: something else uses it
            path.rmdir()


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk. Windows syncs only what is open for writing."""
    with path.open("rb+" if os.access(path, os.W_OK) else "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk, if the system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows cannot open a directory, and does not need to
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path | str) -> str:
    """Compute the SHA-256 of a file in hexadecimal."""
    path = Path(path)
    if not path.is_file():  # reading a pipe would block
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
