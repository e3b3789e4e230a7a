"""Cache directory for compiled kernels, image features and verified images, all of which can be computed again.

`VITKIT_CACHE` moves the directory and `VITKIT_CACHE_LIMIT` changes its size limit (default 5 GB, least recently used
entries are removed first). Compiled kernels are code that will be run, so they are only kept in, and loaded from,
directories that no other user can write to.
"""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from vitkit.core.errors import ConfigError, summarize
from vitkit.core.files import remove_path
from vitkit.core.result import Result

logger = logging.getLogger(__name__)

CacheName = Literal["kernels", "inductor", "features", "images"]
CACHE_NAMES: tuple[CacheName, ...] = ("kernels", "inductor", "features", "images")
DEFAULT_LIMIT = 5 * 10**9
UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
HINT = "set VITKIT_CACHE to a directory that can be written to"


class _Entry(NamedTuple):
    path: Path
    size: int
    last_used: float


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheInfo(Result):
    """Location and size of the cache."""

    path: Path
    size_bytes: int
    limit_bytes: int
    sizes: Mapping[str, int]
    """Bytes per kind of entry."""


def cache_root() -> Path:
    """Return $VITKIT_CACHE, or `vitkit` in the user's cache directory."""
    if path := os.environ.get("VITKIT_CACHE"):
        return Path(path)
    if path := os.environ.get("XDG_CACHE_HOME"):
        return Path(path) / "vitkit"
    try:
        return Path.home() / ".cache" / "vitkit"
    except RuntimeError as error:  # a container user without a passwd entry
        raise ConfigError("there is no home directory for the cache", hint=HINT) from error


def cache_dir(name: CacheName) -> Path:
    """Return the directory of one kind of entry; it may not exist yet.

    If other users can write to the cache, as on a shared volume, this is a directory of this user's own inside it.
    """
    root = cache_root()
    return (root if is_private(root) else root / f"of-{os.geteuid()}") / name


def create_cache_dir(name: CacheName) -> Path:
    """Create and return the directory of one kind of entry. Raise PermissionError if other users can write to it."""
    path = cache_dir(name)
    for directory in (path.parent, path):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(directory):
            raise PermissionError(f"other users can write to {directory}")
    return path


@cache
def report_uncached(name: str, reason: str) -> None:
    """Log that something is not cached, the first time: a command opens a cache for each split and each model."""
    logger.info("%s not cached: %s; %s", name, reason, HINT)


def mark_used(path: Path) -> None:
    """Record that an entry was used now, so that it is removed last."""
    with suppress(OSError):  # a read-only cache
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim_cache(*, keep: Path | None = None) -> list[Path]:
    """Remove least recently used entries until the cache is below its limit, and return them."""
    entries = sorted(chain.from_iterable(map(_entries, CACHE_NAMES)), key=lambda entry: entry.last_used)
    excess = sum(entry.size for entry in entries) - cache_limit()
    removed = []
    for entry in entries:
        if excess <= 0:
            break
        if entry.path != keep:
            remove_path(entry.path)
            excess -= entry.size
            removed.append(entry.path)
    return removed


def cache_info() -> CacheInfo:
    """Return the location and size of the cache."""
    sizes: dict[str, int] = {name: sum(entry.size for entry in _entries(name)) for name in CACHE_NAMES}
    return CacheInfo(path=cache_root(), size_bytes=sum(sizes.values()), limit_bytes=cache_limit(), sizes=sizes)


def clear_cache() -> CacheInfo:
    """Remove all entries and return what the cache held. Other files in the directory are left alone."""
    info = cache_info()
    for name in CACHE_NAMES:
        remove_path(cache_dir(name))
    return info


def cache_limit() -> int:
    """Return the size limit in bytes."""
    text = os.environ.get("VITKIT_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]B)?", text)
    if match is None:
        raise ConfigError("VITKIT_CACHE_LIMIT is not a size", expected="bytes, or a size such as 500MB", got=text)
    return int(float(match[1]) * UNITS[match[2] or ""])


def is_private(path: Path) -> bool:
    """Return whether only this user and root can have written a path. A missing path is private."""
    try:
        status = path.stat()
    except OSError:
        return True
    if not hasattr(os, "geteuid"):  # Windows: the mode bits do not describe other users
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_unwritable_reason() -> str | None:
    """Return why nothing can be added to the cache, as far as can be told without trying; None if it can."""
    try:
        root = cache_root().absolute()
    except ConfigError as error:
        return f"{summarize(error)}: {error.hint}"
    try:
        existing = next(path for path in (root, *root.parents) if path.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError:  # a parent directory cannot be searched
        writable = False
    return None if writable else f"{root} cannot be written to: {HINT}"


def _entries(name: CacheName) -> Iterator[_Entry]:
    """Yield what can be removed separately: files of kernels, features and images, and inductor's tree as a whole."""
    directory = cache_dir(name)
    if not directory.is_dir():
        return
    for path in (directory,) if name == "inductor" else directory.iterdir():
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        try:
            statuses = [file.stat() for file in files]
        except OSError:  # removed by another process
            continue
        if statuses:
            last_used = max(max(each.st_atime, each.st_mtime) for each in statuses)
            yield _Entry(path, sum(each.st_size for each in statuses), last_used)
