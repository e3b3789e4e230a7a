"""Shortcuts for the many tiny runs of tests, which would otherwise wait longer than they compute."""

import functools
import os
from collections.abc import Callable
from typing import Any


def shorten_runs() -> None:
    """Let the runs of this process not wait for the disk, and measure the speed of the processor on small matrices.

    Only a power failure distinguishes files that were synced. Tests of synchronization replace `os.fsync` themselves.
    """
    os.fsync = check_descriptor
    shorten_measurement()


def shorten_measurement() -> None:
    """Measure the speed of the processor on small matrices: no test reads that of a run.

    Tests of the measurement call its function themselves.
    """
    from vitkit.training import finalize  # noqa: PLC0415 - after jaxtyping hooks the import

    finalize.time_products = functools.partial(time_small_products, finalize.time_products)


def check_descriptor(descriptor: int) -> None:
    """Raise OSError for a closed file, as `os.fsync` does."""
    os.fstat(descriptor)


def time_small_products(time_products: Callable[..., float], *arguments: Any, side: int, **options: Any) -> float:
    """Time products of at most 256 rows."""
    return time_products(*arguments, side=min(side, 256), **options)
