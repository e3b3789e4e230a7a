"""Cache of checksums and verification results of stored images, by file.

An entry is valid while size, times and inode of the file are the same. A file that was copied or touched is read again,
and only its content decides whether it has changed.
"""

import hashlib
import logging
import os
import sqlite3
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitkit.core.cache_dir import create_cache_dir, mark_used, report_uncached, trim_cache
from vitkit.core.errors import ConfigError, summarize
from vitkit.data.dataset import ImageSource

logger = logging.getLogger(__name__)

FILE_NAME = "images-2.sqlite3"
DIGEST_BYTES = 16
"""Bytes of an image's SHA-256 that are stored."""
SAVE_EVERY = 500
"""Images after which results are written to the cache; a killed process repeats at most these."""
NO_STATUS, NO_DIGEST = (-1, -1, -1, -1), bytes(DIGEST_BYTES)
_QUERY_SIZE = 500
_TABLE = """CREATE TABLE IF NOT EXISTS images
    (key BLOB PRIMARY KEY, status BLOB, digest BLOB, decoder TEXT, reason TEXT) WITHOUT ROWID"""


@dataclass(frozen=True, kw_only=True, eq=False)
class FileStamps:
    """Keys of stored images, by file and position, and the state of their files."""

    keys: Sequence[bytes]
    statuses: NDArray[np.int64]
    """Size, times of change in ns and inode, N × 4; NO_STATUS for images in memory and files that do not exist."""


class ImageRecord(NamedTuple):
    """Facts about a stored image: its checksum, empty if it cannot be read, and why `decoder` cannot decode it, if so.

    An image that was not verified has the decoder "".
    """

    digest: bytes
    decoder: str = ""
    reason: str = ""


def stamp_images(source: ImageSource) -> FileStamps:
    """Return the stamps of all images."""
    keys: list[bytes] = []
    statuses = array("q")
    current, status = "", NO_STATUS
    for index in range(len(source)):
        location = source.locate(index)
        if location is None:
            keys.append(b"")
            statuses.extend(NO_STATUS)
            continue
        path, position = location
        if path != current:  # many images may be in one archive
            current, status = path, _read_status(path)
        keys.append(hashlib.blake2b(os.fsencode(path) + b"\0%d" % position, digest_size=DIGEST_BYTES).digest())
        statuses.extend(status)
    return FileStamps(keys=keys, statuses=np.array(statuses, dtype=np.int64).reshape(-1, len(NO_STATUS)))


def _read_status(path: str) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - a million Paths are slow
    except (OSError, ValueError):  # ValueError: a name that the file system cannot have
        return NO_STATUS
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino & (2**63 - 1)


class ImageCache:
    """Records of images in an SQLite file. Without a file, or after an error, nothing is found and nothing is kept.

    A connection is opened for each call, because worker processes are forked between the calls.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def find(self, stamps: FileStamps) -> Iterator[tuple[int, ImageRecord]]:
        """Yield index and record of each image whose file has not changed."""
        if self.path is None or not self.path.exists():
            return
        statuses = _pack_statuses(stamps)
        # In the order of the table, each of its pages is read once.
        located = sorted(np.flatnonzero(stamps.statuses[:, 0] >= 0).tolist(), key=stamps.keys.__getitem__)
        with self._handle_errors(), closing(_connect(self.path)) as connection:
            for start in range(0, len(located), _QUERY_SIZE):
                batch = located[start : start + _QUERY_SIZE]
                query = f"SELECT * FROM images WHERE key IN ({','.join('?' * len(batch))})"
                rows = {row[0]: row for row in connection.execute(query, [stamps.keys[index] for index in batch])}
                for index in batch:
                    row = rows.get(stamps.keys[index])
                    if row is not None and row[1] == statuses[index]:
                        yield index, ImageRecord(*row[2:])
            mark_used(self.path)

    def store(
        self, stamps: FileStamps, results: Iterable[tuple[int, ImageRecord]]
    ) -> Generator[tuple[int, ImageRecord], None, None]:
        """Yield the records of images as they are computed; store those of files every `SAVE_EVERY` and at the end."""
        statuses = _pack_statuses(stamps)
        rows: list[tuple[bytes | str, ...]] = []
        try:
            for index, record in results:
                if record.digest and stamps.statuses[index, 0] >= 0:
                    rows.append((stamps.keys[index], statuses[index], *record))
                if len(rows) >= SAVE_EVERY:
                    self._insert(rows)
                    rows = []
                yield index, record
        finally:
            self._insert(rows)

    def _insert(self, rows: Sequence[tuple[bytes | str, ...]]) -> None:
        """Insert rows; those of the same images are replaced."""
        if self.path is None or not rows:
            return
        with self._handle_errors(), closing(_connect(self.path)) as connection:
            connection.executemany("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?)", rows)
            connection.commit()

    def trim(self) -> None:
        """Remove least recently used entries of other caches if the cache directory is above its limit."""
        if self.path is not None:
            trim_cache(keep=self.path)

    @contextmanager
    def _handle_errors(self) -> Iterator[None]:
        """Remove a damaged file; with any other error of SQLite, stop caching."""
        try:
            yield
        except sqlite3.Error as error:
            assert self.path is not None
            logger.warning("%s: %s; images will be verified again in the next run", self.path, error)
            if type(error) is sqlite3.DatabaseError:
                self.path.unlink(missing_ok=True)
            self.path = None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60)
    try:
        connection.execute("PRAGMA synchronous=OFF")  # all of it can be computed again
        connection.execute(_TABLE)
    except BaseException:
        connection.close()
        raise
    return connection


def _pack_statuses(stamps: FileStamps) -> list[bytes]:
    """Return the status of each image as bytes."""
    packed, size = stamps.statuses.tobytes(), len(NO_STATUS) * stamps.statuses.itemsize
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def open_image_cache(directory: Path | None = None) -> ImageCache:
    """Open the cache in a directory, by default that of the user; one that keeps nothing if it cannot be written."""
    try:
        if directory is None:
            directory = create_cache_dir("images")
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ConfigError) as error:
        report_uncached("verification of images is", summarize(error))
        return ImageCache(None)
    return ImageCache(directory / FILE_NAME)
