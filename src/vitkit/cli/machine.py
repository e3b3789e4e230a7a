"""The process that is going to work goes in; its threads and its memory are made ready for what it will do.

docs/experiments.md has the figures.
"""

import ctypes
import os
import sys


def prepare_for_training() -> None:
    """Do all of this."""
    share_the_cores()
    if not any(name.startswith("MALLOC_") for name in os.environ):
        keep_freed_memory()


def share_the_cores() -> None:
    """Let torch's threads spin for a moment only while they wait: the cores are shared with those that prepare images.

    Sleeping at once is a third slower on a quiet machine, spinning as long as OpenMP does by default three times slower
    on a busy one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def keep_freed_memory() -> None:
    """Tell the C library, where it is glibc, to keep what is freed for the next allocation.

    A step frees and takes the same blocks again. By default the large ones go back to the kernel, which clears them
    each time: up to a tenth of a step.
    """
    set_malloc(trim_above=2**31 - 1, map_above=2**30)


def give_back_freed_memory() -> None:
    """Tell it to give back what is freed at once: work that holds one tensor of a large model after the other.

    By default it gives back less the more is freed, and a conversion ends up with pieces of tensors long gone.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        set_malloc(trim_above=2**20, map_above=2**20)


def set_malloc(*, trim_above: int, map_above: int) -> None:
    """From how many bytes on malloc gives back its end, and takes a block of its own from the kernel."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
        library.mallopt(trim_threshold, trim_above)
        library.mallopt(mmap_threshold, map_above)
