"""Report on this machine: hardware, versions, devices, extras and advice.

torch is imported only inside functions, so that a broken torch is reported and not raised.
"""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Literal

from vitkit.core.environment import CpuInfo, MemoryInfo, read_cpu, read_memory
from vitkit.core.result import Result

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
BF16_TOLERANCE = 0.15
"""Relative difference of speed between bf16 and fp32 from which on there is advice."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device of torch, by the name that `--device` takes.

    `slowdowns` are the times of a matrix product by precision, relative to fp32; `precision` is what training uses.
    """

    device: str
    name: str
    memory_bytes: int | None
    precision: str
    slowdowns: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TorchInfo:
    """torch's settings and devices."""

    threads: int
    interop_threads: int
    cpu_capability: str
    devices: list[DeviceInfo]


@dataclass(frozen=True, kw_only=True)
class LibraryInfo:
    """Whether a library can be imported, and why not."""

    state: Literal["absent", "works", "broken"]
    version: str | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExtraInfo:
    """The packages of an extra, and the command that installs the missing ones."""

    installed: list[str]
    missing: list[str]
    install: str | None


@dataclass(frozen=True, kw_only=True, repr=False)
class MachineReport(Result):
    """Facts about this machine, and advice by subject."""

    versions: dict[str, str | None]
    executable: str
    platform: str
    cpu: CpuInfo
    memory: MemoryInfo
    environment: dict[str, str | None]
    torch: TorchInfo | None
    torch_error: str | None
    torchvision: LibraryInfo
    extras: dict[str, ExtraInfo]
    advice: dict[str, str]
    native_engine: str | None = None

    @property
    def facts(self) -> dict[str, object]:
        """All facts by subject, as JSON values."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key not in ("advice", "warnings")}

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {**self.facts, "advice": dict(self.advice)}

    def highlights(self) -> dict[str, object]:
        """Return what determines the speed, and the subjects of advice."""
        values: dict[str, object] = {"python": self.versions.get("python"), "torch": self.versions.get("torch")}
        values |= {"processor": self.cpu.name, "cores": self.cpu.usable_cores}
        if self.torch is not None:
            values["devices"] = " ".join(device.device for device in self.torch.devices)
        return values | {"advice": " ".join(self.advice) or "none"}


def examine_machine() -> MachineReport:
    """Examine this machine. This takes a few seconds, most of them to import torch."""
    requirements = list_requirements()
    required = ["vitkit", "torch", *(name for name, extra in requirements if extra is None)]
    versions = {"python": platform.python_version(), **{name: package_version(name) for name in required}}
    cpu, memory, torch, torch_error = read_cpu(), read_memory(), None, None
    try:
        import torch as library  # noqa: PLC0415

        cpu = read_cpu(getattr(library.cpu, "get_capabilities", dict)())  # instruction sets; empty before torch 2.9
        torch = read_torch(cpu, memory)
    except Exception as error:  # a broken torch is part of the report
        torch_error = f"{type(error).__name__}: {error}"
    return MachineReport(
        versions=versions,
        executable=sys.executable,
        platform=platform.platform(),
        cpu=cpu,
        memory=memory,
        environment={name: os.environ.get(name) for name in VARIABLES},
        torch=torch,
        torch_error=torch_error,
        torchvision=try_import("torchvision"),
        extras=read_extras(requirements),
        advice=advise(versions, cpu, torch),
        native_engine=read_native_engine() if torch is not None else None,
    )


def read_native_engine() -> str:
    """Return whether the native engine is built or can be."""
    try:
        from vitkit.inference.select import describe_native_engine  # noqa: PLC0415

        return describe_native_engine()
    except Exception as error:  # torch may still work
        return f"broken: {type(error).__name__}: {error}"


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def list_requirements() -> list[tuple[str, str | None]]:
    """Return vitkit's requirements as pairs of package and extra; None means required."""
    try:
        return list(map(parse_requirement, metadata.requires("vitkit") or ()))
    except metadata.PackageNotFoundError:  # run from a source tree
        return []


def parse_requirement(requirement: str) -> tuple[str, str | None]:
    """Return package and extra of a requirement. Other markers are ignored."""
    package = re.match(r"[\w.-]+", requirement)
    extra = re.search(r"""extra == ['"]([^'"]+)""", requirement)
    return package[0] if package else requirement, extra[1] if extra else None


def read_extras(requirements: Sequence[tuple[str, str | None]]) -> dict[str, ExtraInfo]:
    """Return the installed and missing packages of each extra."""
    extras = {}
    for extra in dict.fromkeys(extra for _, extra in requirements if extra is not None):
        names = [package for package, each in requirements if each == extra]
        missing = [name for name in names if package_version(name) is None]
        installed = [name for name in names if name not in missing]
        install = f"pip install 'vitkit[{extra}]'" if missing else None
        extras[extra] = ExtraInfo(installed=installed, missing=missing, install=install)
    return extras


def try_import(name: str) -> LibraryInfo:
    """Import a library in another process, which isolates its warnings, exceptions and crashes."""
    if util.find_spec(name) is None:
        return LibraryInfo(state="absent", version=None)
    # -P: like the command vitkit, do not import from the current directory.
    result = subprocess.run([sys.executable, "-P", "-c", f"import {name}"], capture_output=True, check=False)
    reason = None
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {result.returncode}"
    return LibraryInfo(state="broken" if reason else "works", version=package_version(name), reason=reason)


def read_torch(cpu: CpuInfo, memory: MemoryInfo) -> TorchInfo:
    """Return torch's settings and devices, the fastest kind of device first, and measure their precisions."""
    import torch  # noqa: PLC0415

    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [(f"cuda:{index}", card.name, card.total_memory) for index, card in enumerate(cards)]
    devices += [("mps", cpu.name, memory.total_bytes)] if torch.backends.mps.is_available() else []
    devices += [("cpu", cpu.name, memory.total_bytes)]
    from vitkit.inference.engine import choose_training_precision  # noqa: PLC0415

    return TorchInfo(
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        devices=[
            DeviceInfo(
                device=device,
                name=name,
                memory_bytes=size,
                precision=choose_training_precision(torch.device(device)),
                slowdowns=measure_slowdowns(device),
            )
            for device, name, size in devices
        ],
    )


def measure_slowdowns(device: str) -> dict[str, float]:
    """Measure the time of a matrix product on a device in each precision for training, relative to fp32."""
    import torch  # noqa: PLC0415

    kind = device.partition(":")[0]
    synchronize = {"cuda": lambda: torch.cuda.synchronize(device), "mps": torch.mps.synchronize}.get(kind, lambda: None)
    side = 512 if kind == "cpu" else 4096
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()

    def measure(dtype: "torch.dtype", *, matmul_precision: str = "highest") -> float:
        torch.set_float32_matmul_precision(matmul_precision)
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        return _best_time(lambda: (matrix @ matrix, synchronize()))

    torch.set_num_threads(1)  # less sensitive to other load
    try:
        fp32 = measure(torch.float32)
        times = {"tf32": measure(torch.float32, matmul_precision="high")} if kind == "cuda" else {}
        times |= {"bf16": measure(torch.bfloat16)}
        times |= {} if kind == "cpu" else {"fp16": measure(torch.float16)}
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(before)
    return {name: round(seconds / fp32, 2) for name, seconds in times.items()}


def _best_time(action: Callable[[], object], *, seconds: float = 0.3) -> float:
    """Return the shortest time of the runs that fit into `seconds`, after one warm-up run."""
    times: list[float] = []
    while len(times) < 4 or sum(times) < seconds:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def advise(versions: dict[str, str | None], cpu: CpuInfo, torch: TorchInfo | None) -> dict[str, str]:
    """Return advice by subject."""
    advice = {}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        advice["packages"] = f"not installed: {', '.join(missing)}; run pip install vitkit"
    if torch is None:
        return {**advice, "torch": "torch does not work; reinstall it: https://pytorch.org/get-started/locally"}
    slowdown = torch.devices[-1].slowdowns["bf16"]  # the CPU's
    if slowdown > 1 + BF16_TOLERANCE:
        advice["bf16"] = f"bf16 is {slowdown:.1f}× slower than fp32 on this CPU: train and predict in fp32 on it"
    elif slowdown < 1 - BF16_TOLERANCE:
        advice["bf16"] = f"bf16 is {1 / slowdown:.1f}× faster than fp32 on this CPU: try it"
    if torch.threads > cpu.usable_cores:
        load = f"{torch.threads} threads on {cpu.usable_cores} usable cores"
        advice["threads"] = f"torch runs {load}: set OMP_NUM_THREADS={cpu.usable_cores}"
    return advice
