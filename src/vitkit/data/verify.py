"""Detection and exclusion of images that cannot be decoded, before a run splits or orders them."""

import contextlib
import csv
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitkit.core.environment import start_method
from vitkit.core.errors import DataError, summarize
from vitkit.core.files import write_csv
from vitkit.data.dataset import ImageSource, StoredImage, Subset, hash_image
from vitkit.data.decode import check_pixels, decode, describe_decoder
from vitkit.data.image_cache import (
    DIGEST_BYTES,
    NO_DIGEST,
    ImageCache,
    ImageRecord,
    open_image_cache,
    stamp_images,
)

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
ImageFunction = Callable[[ImageSource, int], Value]
"""Function of a source and an index. It must be picklable."""

MAX_WARNINGS = 20
_CHUNK_SIZE = 8
"""Images per task of a worker process. An interrupted run waits for the tasks that have started."""
_DRAFT_SIZE = (64, 64)
"""Size at which JPEGs are decoded only to verify them; the whole stream is read nevertheless."""


@dataclass(frozen=True)
class BadFile:
    """An image that cannot be used, and the reason."""

    name: str
    reason: str

    def to_dict(self) -> dict[str, object]:
        """Return the file and the reason as in JSON and CSV files."""
        return {"file": self.name, "reason": self.reason}


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifiedImages:
    """Images that cannot be decoded, and the file status and checksum of every image, from which to fingerprint them.

    All are in the order of the source. `digests` are zero for images that cannot be read.
    """

    source: ImageSource
    bad: list[BadFile]
    statuses: NDArray[np.int64]
    digests: NDArray[np.uint8]


def verify_images(
    source: ImageSource,
    *,
    channels: int = 3,
    workers: int = 0,
    progress: Callable[[int], None] = lambda images: None,
    cache: ImageCache | None = None,
) -> VerifiedImages:
    """Decode the images that are not in the cache, by default the user's, or whose files have changed.

    `progress` is called with the number of images that were completed since the last call.
    """
    cache = open_image_cache() if cache is None else cache
    decoder = f"{describe_decoder()}, {channels} channels"
    stamps = stamp_images(source)
    reasons: list[str | None] = [None] * len(source)
    digests = [NO_DIGEST] * len(source)
    for index, record in cache.find(stamps):
        if record.decoder == decoder:
            reasons[index], digests[index] = record.reason, record.digest
    missing = [index for index, reason in enumerate(reasons) if reason is None]
    if len(missing) < len(source):
        progress(len(source) - len(missing))
    verify = partial(_verify_one, channels=channels, decoder=decoder)
    results = map_images(Subset(source, missing), verify, workers=workers)
    with contextlib.closing(cache.store(stamps, zip(missing, results, strict=True))) as records:
        for index, record in records:
            reasons[index], digests[index] = record.reason, record.digest or NO_DIGEST
            progress(1)
    cache.trim()
    return VerifiedImages(
        source=source,
        bad=[BadFile(source.name(index), reason) for index, reason in enumerate(reasons) if reason],
        statuses=stamps.statuses,
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES),
    )


def _verify_one(source: ImageSource, index: int, *, channels: int, decoder: str) -> ImageRecord:
    image, reason = inspect_image(source, index, channels=channels)
    return ImageRecord(b"" if image is None else hash_image(image)[:DIGEST_BYTES], decoder, reason)


def skip_unreadable(
    source: ImageSource,
    *,
    path: str,
    channels: int = 3,
    workers: int = 0,
    progress: Callable[[int], None] = lambda images: None,
    warn: Callable[[str], None] = logger.warning,
) -> tuple[ImageSource, list[BadFile]]:
    """Return the images that can be decoded and the files that cannot, each of them named in a warning.

    `path` is the name of the dataset in messages. If no image can be decoded, DataError is raised.
    """
    if source.always_readable:
        return source, []
    bad = verify_images(source, channels=channels, workers=workers, progress=progress).bad
    if bad and len(bad) == len(source):
        hint = f"vitkit data check {shlex.quote(path)} lists all of them"
        raise DataError(f"{path}: none of the {len(bad)} images can be read; {bad[0].name}: {bad[0].reason}", hint=hint)
    warn_skipped(bad, warn)
    return exclude_files(source, bad), bad


def warn_skipped(bad: Sequence[BadFile], warn: Callable[[str], None]) -> None:
    """Name the skipped files in warnings; beyond a limit, only count them."""
    for file in bad[:MAX_WARNINGS]:
        warn(f"skipped {file.name}: {file.reason}")
    if len(bad) > MAX_WARNINGS:
        warn(f"skipped {len(bad) - MAX_WARNINGS:,} more unreadable images")


def read_image(source: ImageSource, index: int) -> StoredImage:
    """Return a stored image; every failure is a DataError with a short message."""
    try:
        return source.read(index)
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).split("\n")[0]
        raise DataError(f"cannot be read: {reason[:1].lower()}{reason[1:]}") from error


def inspect_image(source: ImageSource, index: int, *, channels: int) -> tuple[StoredImage | None, str]:
    """Return a stored image, None if it cannot be read, and why it cannot be used, empty if it can."""
    image: StoredImage | None = None
    try:
        image = read_image(source, index)
        if isinstance(image, np.ndarray):
            check_pixels(image, channels=channels)
        else:
            decode(image, channels=channels, draft_size=_DRAFT_SIZE)
    except DataError as error:
        return image, summarize(error)
    return image, ""


# Worker processes


def map_images(source: ImageSource, function: ImageFunction[Value], *, workers: int = 0) -> Iterator[Value]:
    """Yield `function(source, index)` for every image in order, computed here or by worker processes.

    The worker processes end with this process, even if it is killed.
    """
    starts = range(0, len(source), _CHUNK_SIZE)
    if workers <= 0 or len(starts) < 2:
        for index in range(len(source)):
            yield function(source, index)
        return
    # A fork shares the arrays of the source; elsewhere the source is pickled for each process.
    context = multiprocessing.get_context(start_method())
    executor = ProcessPoolExecutor(
        min(workers, len(starts)), mp_context=context, initializer=_start_worker, initargs=(source, function)
    )
    done = 0
    try:
        with _block_signals():
            chunks: Iterator[list[Any]] = executor.map(_process_chunk, starts)
        for results in chunks:
            yield from results
            done += len(results)
    except BrokenProcessPool as error:
        suspects = f"{source.name(done)} or one of the {_CHUNK_SIZE * workers} images after it"
        raise DataError(f"a process died while decoding {suspects}", hint="find it with workers=0") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Delay signals while processes start: one that does not ignore them yet would be killed."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Task of a worker process, set once per process because pickling it with each chunk would cost more than the work.
_task: tuple[ImageSource, ImageFunction[object]]


def _start_worker(source: ImageSource, function: ImageFunction[object]) -> None:
    global _task  # noqa: PLW0603
    _task = (source, function)
    # Signals reach the whole process group; the parent handles them and shuts the workers down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # libtiff prints warnings to stderr; relevant ones are returned as the reason.
    with contextlib.suppress(OSError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        os.close(devnull)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _process_chunk(start: int) -> list[object]:
    source, function = _task
    return [function(source, index) for index in range(start, min(start + _CHUNK_SIZE, len(source)))]


def write_bad_files(path: Path | str, bad: Sequence[BadFile]) -> None:
    """Write a CSV file with the columns file and reason."""
    write_csv(path, [file.to_dict() for file in bad], ["file", "reason"])


def read_bad_files(path: Path | str) -> list[BadFile]:
    """Read a file written by `write_bad_files`; raise DataError for any other content."""
    try:
        text = Path(path).read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    header, *rows = csv.reader(io.StringIO(text, newline="")) if text else [[]]
    if header != ["file", "reason"] or any(len(row) != 2 for row in rows):
        raise DataError(f"{path}: not a list of bad files", expected="a CSV file with the columns file, reason")
    return [BadFile(name, reason) for name, reason in rows]


def check_bad_fraction(bad: Sequence[BadFile], *, total: int, max_fraction: int | float) -> None:
    """Raise DataError if the bad files are more than `max_fraction` of all images."""
    if len(bad) > max_fraction * total:
        examples = "; ".join(f"{file.name}: {file.reason}" for file in bad[:3])
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DataError(
            f"{len(bad)} of {total} images cannot be used: {examples}{more}",
            expected=f"a fraction of at most {max_fraction:g}",
            got=f"{len(bad) / total:.3g}",
            hint="vitkit data check lists them all; fix or remove them, or allow a larger fraction",
        )


def exclude_files(source: ImageSource, bad: Sequence[BadFile]) -> ImageSource:
    """Return the source without the bad files; the same object if there are none."""
    names = {file.name for file in bad}
    good = [index for index in range(len(source)) if not names or source.name(index) not in names]
    return source if len(good) == len(source) else Subset(source, good)
