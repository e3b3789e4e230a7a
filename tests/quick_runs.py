"""Shortcuts for the many tiny runs of tests, which would otherwise wait longer than they compute."""

import functools
import os
from collections.abc import Callable
from typing import Any


def shorten_runs() -> None:
    """Let the runs of this process not wait for the disk, and measure the speed of the processor on small matrices.

    Only a power failure distinguishes files that were synced, and no test reads the measured speed of a run. Tests of
    synchronization and of the measurement replace or call these functions themselves.
    """
    from vitkit.training import finalize  # noqa: PLC0415 - after jaxtyping hooks the import

    os.fsync = check_descriptor
    finalize.time_products = functools.partial(time_small_products, finalize.time_products)


def check_descriptor(descriptor: int) -> None:
    """Raise OSError for a closed file, as `os.fsync` does."""
    os.fstat(descriptor)


def time_small_products(time_products: Callable[..., float], *arguments: Any, side: int, **options: Any) -> float:
    """Time products of at most 256 rows."""
    return time_products(*arguments, side=min(side, 256), **options)
