"""Report on this machine, and the cache of compiled kernels and image features."""

from vitkit.api.public import public
from vitkit.core import cache_dir
from vitkit.core.cache_dir import CacheInfo
from vitkit.inference.machine import MachineReport, examine_machine


@public
def doctor() -> MachineReport:
    """Report what this machine has and lacks.

    `facts` has versions, processor, memory, devices, the speed of bf16 relative to fp32 and vitkit's extras, `advice`
    what to change, by subject. This takes a few seconds; a broken torch is reported, not raised.

    >>> import vitkit
    >>> report = vitkit.doctor()
    >>> report.cpu.cores >= 1, "torch" in report.facts
    (True, True)
    """
    return examine_machine()


@public
def cache_info() -> CacheInfo:
    """Return the location and size of the cache of compiled kernels and image features.

    `VITKIT_CACHE` moves the cache and `VITKIT_CACHE_LIMIT` changes its size limit.

    >>> import vitkit
    >>> info = vitkit.cache_info()
    >>> info.size_bytes == sum(info.sizes.values())
    True
    """
    return cache_dir.cache_info()


@public
def clear_cache() -> CacheInfo:
    """Remove everything from the cache, and return what it held. Other files in its directory are left alone.

    >>> import os, tempfile, vitkit
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, VITKIT_CACHE=directory):
    ...     vitkit.clear_cache().size_bytes
    0
    """
    return cache_dir.clear_cache()
