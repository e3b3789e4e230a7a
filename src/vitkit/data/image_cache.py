"""Cache of checksums and verification results of stored images, by file.

An entry is valid while size, times and inode of the file are the same. A file that was copied or touched is read again,
and only its content decides whether it has changed.
"""

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from vitkit.core.cache_dir import create_cache_dir, mark_used, trim_cache
from vitkit.core.errors import ConfigError, summarize
from vitkit.data.dataset import ImageSource

logger = logging.getLogger(__name__)

FILE_NAME = "images-1.sqlite3"
DIGEST_BYTES = 16
"""Bytes of an image's SHA-256 that are stored."""
NO_STATUS = (-1, -1, -1, -1)
_QUERY_SIZE = 500
_TABLE = """CREATE TABLE IF NOT EXISTS images
    (key BLOB PRIMARY KEY, status TEXT, digest BLOB, decoder TEXT, reason TEXT) WITHOUT ROWID"""


class FileStamp(NamedTuple):
    """File and position of a stored image, and the file's size, times of change in ns, and inode."""

    key: bytes
    status: tuple[int, int, int, int]


class ImageRecord(NamedTuple):
    """Facts about a stored image: its checksum, and why `decoder` cannot decode it ("" if it can).

    An image that was not verified has the decoder "".
    """

    digest: bytes
    decoder: str = ""
    reason: str = ""


def stamp_images(source: ImageSource) -> list[FileStamp | None]:
    """Return the stamp of each image; None for images in memory and for files that do not exist."""
    stamps: list[FileStamp | None] = []
    current, status = "", NO_STATUS
    for index in range(len(source)):
        location = source.locate(index)
        if location is None:
            stamps.append(None)
            continue
        path, position = location
        if path != current:  # many images may be in one archive
            current, status = path, _read_status(path)
        key = hashlib.blake2b(os.fsencode(path) + b"\0%d" % position, digest_size=DIGEST_BYTES).digest()
        stamps.append(None if status == NO_STATUS else FileStamp(key, status))
    return stamps


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

    def find(self, stamps: Sequence[FileStamp | None]) -> dict[int, ImageRecord]:
        """Return the records of images whose files have not changed, by index."""
        if self.path is None or not self.path.exists():
            return {}
        located = [(index, stamp) for index, stamp in enumerate(stamps) if stamp is not None]
        records: dict[int, ImageRecord] = {}
        with self._handle_errors(), closing(_connect(self.path)) as connection:
            for start in range(0, len(located), _QUERY_SIZE):
                batch = located[start : start + _QUERY_SIZE]
                query = f"SELECT * FROM images WHERE key IN ({','.join('?' * len(batch))})"
                rows = {key: values for key, *values in connection.execute(query, [stamp.key for _, stamp in batch])}
                for index, stamp in batch:
                    status, *record = rows.get(stamp.key, ("",))
                    if status == _format_status(stamp):
                        records[index] = ImageRecord(*record)
            mark_used(self.path)
        return records

    def add(self, entries: Iterable[tuple[FileStamp, ImageRecord]]) -> None:
        """Store records; those of the same images are replaced."""
        rows = [(stamp.key, _format_status(stamp), *record) for stamp, record in entries]
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


def _format_status(stamp: FileStamp) -> str:
    return " ".join(map(str, stamp.status))


def open_image_cache(directory: Path | None = None) -> ImageCache:
    """Open the cache in a directory, by default that of the user; one that keeps nothing if it cannot be written."""
    try:
        if directory is None:
            directory = create_cache_dir("images")
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ConfigError) as error:
        logger.info("verification of images is not cached: %s", summarize(error))
        return ImageCache(None)
    return ImageCache(directory / FILE_NAME)
