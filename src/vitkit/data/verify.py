"""A source goes in, the list of its images that cannot be decoded comes out, each with its reason.

A run verifies its files once, before anything is split or ordered, and leaves the bad ones out: it then equals the run
on the set without them.
"""

import contextlib
import csv
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.files import write_bytes
from vitkit.data.decode import DEFAULT_GATE, Gate, check_pixels, decode
from vitkit.data.source import Content, Source, Subset

Result = TypeVar("Result")

Examine = Callable[[Source, int], Result]
"""What is asked of an image: the source and the index go in. It must be a function that a process can be sent."""

_CHUNK = 8
"""Images that a process is given at a time: what it has begun is waited for when the user interrupts."""

_SMALL = (64, 64)
"""The size a JPEG is decoded for when nobody will look at it; its whole stream is read nevertheless."""


@dataclass(frozen=True)
class BadFile:
    """An image that cannot be had, and why."""

    name: str
    reason: str


def verify(
    source: Source,
    *,
    channels: int = 3,
    gate: Gate = DEFAULT_GATE,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[BadFile]:
    """Decode every image once; those that fail, in the source's order, however many processes share the work.

    `progress` is told how many images are done.
    """
    bad = []
    reasons = examine(source, partial(_reason, channels=channels, gate=gate), workers=workers)
    for index, reason in enumerate(reasons):
        if reason is not None:
            bad.append(BadFile(source.name(index), reason))
        if progress is not None:
            progress(index + 1)
    return bad


def read_image(source: Source, index: int) -> Content:
    """The image's content; a DataError in a few words where it cannot be read."""
    try:
        return source.content(index)
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).split("\n")[0]
        raise DataError(f"cannot be read: {reason[:1].lower()}{reason[1:]}") from error


def check_content(content: Content, *, channels: int = 3, gate: Gate = DEFAULT_GATE) -> None:
    """Refuse, with a DataError, what cannot be decoded; pixels have nothing to decode and are only measured."""
    if isinstance(content, np.ndarray):
        check_pixels(content, channels=channels, gate=gate)
    else:
        decode(content, channels=channels, gate=gate, fit=_SMALL)


def _reason(source: Source, index: int, *, channels: int, gate: Gate) -> str | None:
    """Why the image is bad, or None."""
    try:
        check_content(read_image(source, index), channels=channels, gate=gate)
    except DataError as error:
        return str(error)
    return None


# Many images, many processes


def examine(source: Source, examine_one: Examine[Result], *, workers: int = 0) -> Iterator[Result]:
    """What `examine_one` says of each image, in the source's order; here, or in as many processes as there are workers.

    The processes end with this one, however it ends.
    """
    starts = range(0, len(source), _CHUNK)
    if workers <= 0 or len(starts) < 2:
        for index in range(len(source)):
            yield examine_one(source, index)
        return
    # A fork shares the source's arrays instead of copying them; elsewhere the source is sent to each process.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    executor = ProcessPoolExecutor(
        min(workers, len(starts)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(source, examine_one),
    )
    done = 0
    try:
        with _signals_held():
            chunks: Iterator[list[Any]] = executor.map(_examine_chunk, starts)
        for results in chunks:
            yield from results
            done += len(results)
    except BrokenProcessPool as error:
        place = f"{source.name(done)} or one of the {_CHUNK * workers} images after it"
        raise DataError(f"a process died while it decoded {place}", hint="look for it with workers=0") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals wait: one that comes while processes start would end those that do not ignore it yet."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# What a worker process works on. It is set once, in that process alone, because sending it with each chunk would cost
# more than the work.
_task: "tuple[Source, Examine[object]] | None" = None


def _start_worker(source: Source, examine_one: Examine[object]) -> None:
    global _task  # noqa: PLW0603
    _task = (source, examine_one)
    # A signal to the process group is for the parent to obey: it ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # libtiff remarks on odd files straight into stderr; what matters of them comes back as a reason.
    with contextlib.suppress(OSError):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        os.close(silence)


def _end_with_parent() -> None:
    """End when the parent does, even if it was killed and could not say so."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _examine_chunk(start: int) -> list[object]:
    assert _task is not None
    source, examine_one = _task
    return [examine_one(source, index) for index in range(start, min(start + _CHUNK, len(source)))]


# Bad files, kept and left out


def write_bad_files(path: Path | str, bad: Sequence[BadFile]) -> None:
    """Write a CSV of the columns file and reason; a name with a comma, a quote or a new line is quoted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bad_files(Path(folder, "bad_files.csv"), [BadFile("cat/1,5.jpg", "the file is empty")])
    ...     read_bad_files(Path(folder, "bad_files.csv"))
    [BadFile(name='cat/1,5.jpg', reason='the file is empty')]
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file", "reason"])
    writer.writerows([file.name, file.reason] for file in bad)
    # A file's name need not be Unicode; Python carries such bytes as surrogates, and they go out as they came in.
    write_bytes(path, text.getvalue().encode(errors="surrogateescape"))


def read_bad_files(path: Path | str) -> list[BadFile]:
    """The bad files that `write_bad_files` wrote; a DataError where the file is not one of its."""
    try:
        text = Path(path).read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    header, *rows = csv.reader(io.StringIO(text, newline="")) if text else [[]]
    if header != ["file", "reason"] or any(len(row) != 2 for row in rows):
        raise DataError(f"{path}: not a list of bad files", expected="a CSV of the columns file, reason")
    return [BadFile(name, reason) for name, reason in rows]


def too_many(bad: Sequence[BadFile], *, total: int, max_share: int | float) -> None:
    """Refuse to go on where more than this share of all images is bad.

    >>> too_many([BadFile("1.jpg", "the file is empty")], total=4, max_share=0.1)
    Traceback (most recent call last):
    vitkit.core.errors.DataError: 1 of 4 images cannot be used: 1.jpg: the file is empty \
(expected a share of at most 0.1, got 0.25)
    """
    if len(bad) <= max_share * total:
        return
    named = "; ".join(f"{file.name}: {file.reason}" for file in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    raise DataError(
        f"{len(bad)} of {total} images cannot be used: {named}{more}",
        expected=f"a share of at most {max_share:g}",
        got=f"{len(bad) / total:.3g}",
        hint="vitkit data check lists them all; mend or remove them, or allow a larger share",
    )


def without(source: Source, bad: Sequence[BadFile]) -> Source:
    """The source without the bad files, its order kept; the source itself where there are none."""
    names = {file.name for file in bad}
    good = [index for index in range(len(source)) if source.name(index) not in names] if names else range(len(source))
    return source if len(good) == len(source) else Subset(source, good)
