"""Processor and memory of this machine, and the thread and allocator settings of this process."""

import ctypes
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import psutil

# Instruction sets that determine the speed of a ViT, and other names that Linux and torch use for them.
X86_SETS = ("fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
ARM_SETS = ("neon", "dotprod", "i8mm", "bf16", "sve")
ALIASES = {"fma3": "fma", "avx512_f": "avx512f", "asimd": "neon", "asimddp": "dotprod", "dot": "dotprod"}
BF16_SETS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, kw_only=True)
class CpuInfo:
    """The processor. `bf16_native` is None if its instruction sets are unknown."""

    name: str
    architecture: str
    cores: int
    usable_cores: int
    instruction_sets: list[str]
    bf16_native: bool | None


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Main memory. `limit_bytes` is the limit of the container, if it has one."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def read_cpu(capabilities: Mapping[str, object] | None = None) -> CpuInfo:
    """Describe the processor. `capabilities` is the result of `torch.cpu.get_capabilities()`, if torch works."""
    name, flags = parse_cpuinfo(_read("/proc/cpuinfo"))
    capabilities = capabilities or {}
    flags |= {key for key, value in capabilities.items() if value is True}
    sets = {ALIASES.get(flag, flag) for flag in flags}
    return CpuInfo(
        name=name or str(capabilities.get("cpu_name") or platform.processor() or platform.machine()),
        architecture=platform.machine(),
        cores=psutil.cpu_count() or 1,
        usable_cores=usable_cores(),
        instruction_sets=[name for name in (*X86_SETS, *ARM_SETS) if name in sets],
        bf16_native=bool(sets & BF16_SETS) if flags else None,
    )


def read_memory() -> MemoryInfo:
    """Describe the main memory and the limit of the container."""
    memory, limit = psutil.virtual_memory(), _read("/sys/fs/cgroup/memory.max")
    return MemoryInfo(
        total_bytes=memory.total, available_bytes=memory.available, limit_bytes=int(limit) if limit.isdigit() else None
    )


def parse_cpuinfo(text: str) -> tuple[str, set[str]]:
    """Return name and flags of the first processor in Linux's /proc/cpuinfo, which psutil does not report."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or fields.get("Model") or "", set(flags.lower().split())


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those of its affinity, at most the quotas of its cgroups.

    A quota of less than a core is one core. Every place that starts threads or processes asks this function, because
    more of them than cores wait for each other. `root` is the root of the file system.
    """
    return max(1, int(min([_affinity_cores(), *_read_quotas(root)])))


def _affinity_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process in cores, those of its cgroup (version 1 or 2) and of all above it.

    A container may see its own cgroup as the root while /proc names the path outside, so paths need not exist.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        if not controllers:  # version 2
            for group in groups:
                quota, _, period = _read(root / "sys/fs/cgroup" / group / "cpu.max").partition(" ")
                if quota.isdigit() and period.isdigit():
                    yield int(quota) / int(period)
        elif "cpu" in controllers.split(","):
            for group in groups:
                directory = root / "sys/fs/cgroup/cpu" / group
                quota, period = (_read(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
                if quota.isdigit() and period.isdigit():  # -1 is no quota
                    yield int(quota) / int(period)


def start_method() -> Literal["fork", "spawn", "forkserver"]:
    """Return how to start worker processes: as the program has chosen, else by fork on Linux and spawn elsewhere.

    A fork is fast and shares memory, but on macOS it breaks Metal and libraries with threads.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return cast("Literal['fork', 'spawn', 'forkserver']", chosen or ("fork" if sys.platform == "linux" else "spawn"))


def limit_threads() -> None:
    """Limit the threads of torch to the usable cores, unless OMP_NUM_THREADS is set: its own default ignores quotas.

    Before torch is imported this sets OMP_NUM_THREADS, if there is a quota; child processes inherit it.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return
    cores, torch = usable_cores(), sys.modules.get("torch")
    if torch is None:
        if cores < _affinity_cores():
            os.environ["OMP_NUM_THREADS"] = str(cores)
    elif torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def _read(path: Path | str) -> str:
    """Return the text of a kernel file, or nothing if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def is_main_rank() -> bool:
    """Return whether this process writes and prints, if torchrun started several."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def prepare_for_training() -> None:
    """Configure threads and memory for training, unless the environment does. docs/experiments.md has measurements.

    OpenMP threads spin only a little while they wait, because loader processes need the cores too. Sleeping at once is
    a third slower on a quiet machine, OpenMP's default three times slower on a busy one.

    Under torchrun, warnings of torch's C++ code are hidden: every rank would print that DDP searches for unused
    parameters, which `parallelize` does for another reason.
    """
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if not any(name.startswith("MALLOC_") for name in os.environ):
        retain_freed_memory()


def retain_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation.

    A training step frees and allocates the same blocks again. By default large ones are returned to the kernel, which
    clears them each time: up to 10 % of a step.
    """
    set_malloc_thresholds(trim=2**31 - 1, mmap=2**30)


def release_freed_memory() -> None:
    """Make glibc return freed memory at once, for work that holds one tensor of a large model after another.

    By default the thresholds grow with each free, and a conversion would keep the memory of freed tensors.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ):
        set_malloc_thresholds(trim=2**20, mmap=2**20)


def set_malloc_thresholds(*, trim: int, mmap: int) -> None:
    """Set glibc's thresholds in bytes: free memory at the heap's end to return, and block size to map separately."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        library.mallopt(m_trim_threshold, trim)
        library.mallopt(m_mmap_threshold, mmap)
