"""Nothing goes in, the processor and the memory of this machine come out, as its operating system tells of them."""

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The instruction sets that decide how fast a ViT runs; and Linux's and macOS's other names for them.
X86_SETS = ("fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
ARM_SETS = ("neon", "dotprod", "i8mm", "bf16", "sve")
OTHER_NAMES = {"avx2_0": "avx2", "asimd": "neon", "advsimd": "neon", "asimddp": "dotprod"}
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor. `bf16_native` is None where its instruction sets are not known."""

    name: str
    architecture: str
    cores: int
    usable_cores: int
    instruction_sets: list[str]
    bf16_native: bool | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Main memory; None where the system does not say. The limit is that of the container, if it has one."""

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None


def read_cpu() -> Cpu:
    """The processor as the operating system describes it."""
    name, flags = "", set[str]()
    if sys.platform == "linux":
        name, flags = parse_cpuinfo(_read("/proc/cpuinfo"))
    elif sys.platform == "darwin":
        name, flags = _sysctl("-n", "machdep.cpu.brand_string"), parse_sysctl(_sysctl("hw.optional"))
    found = {OTHER_NAMES.get(flag, flag) for flag in flags}
    cores = os.cpu_count() or 1
    return Cpu(
        name=name or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=cores,
        usable_cores=_usable_cores(cores),
        instruction_sets=[known for known in (*X86_SETS, *ARM_SETS) if known in found],
        bf16_native=bool(found & NATIVE_BF16) if flags else None,
    )


def parse_cpuinfo(text: str) -> tuple[str, set[str]]:
    """Name and flags of the first processor in Linux's /proc/cpuinfo, on x86 or ARM.

    >>> parse_cpuinfo("model name : Xeon")
    ('Xeon', set())
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or fields.get("Model") or "", set(flags.lower().split())


def parse_sysctl(text: str) -> set[str]:
    """The flags that are on in macOS's `sysctl hw.optional`.

    >>> parse_sysctl("hw.optional.arm.FEAT_BF16: 1")
    {'bf16'}
    """
    switches = (line.rpartition(": ") for line in text.splitlines())
    names = (key.rpartition(".")[2] for key, _, value in switches if value == "1")
    return {name.removeprefix("FEAT_").lower() for name in names}


def _sysctl(*arguments: str) -> str:
    run = subprocess.run(["/usr/sbin/sysctl", *arguments], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _read(path: str) -> str:
    """The text of a file of the kernel, or nothing where it does not have one."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _usable_cores(cores: int) -> int:
    """The cores this process may use: by its affinity, and by the quota of its container."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def read_memory() -> Memory:
    """Memory as the kernel and the container count it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limit = _read("/sys/fs/cgroup/memory.max")
    return Memory(
        total_bytes=total,
        available_bytes=int(available[1]) * 1024 if available else None,
        limit_bytes=int(limit) if limit.isdigit() else None,
    )
