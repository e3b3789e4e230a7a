"""`vitkit doctor`: nothing goes in; what this machine has, lacks and is best at comes out."""

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

import click

from vitkit.cli.hardware import Cpu, Memory, read_cpu, read_memory
from vitkit.cli.output import format_bytes, print_json, print_sections, talk_console

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place where torch can compute, by the name that `--device` takes."""

    device: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch makes of this machine; `bf16_slowdown` is the time of a bf16 product over that of fp32."""

    threads: int
    interop_threads: int
    cpu_capability: str
    bf16_slowdown: float
    devices: list[Device]


@dataclass(frozen=True, kw_only=True)
class Library:
    """Whether a library can be imported, and why not."""

    state: Literal["absent", "works", "broken"]
    version: str | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extra:
    """The packages of one extra, and the line that installs it if some are missing."""

    installed: list[str]
    missing: list[str]
    install: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that doctor finds. The fields are the keys of its JSON: add some, rename none."""

    versions: dict[str, str | None]
    executable: str
    platform: str
    cpu: Cpu
    memory: Memory
    environment: dict[str, str | None]
    torch: Torch | None
    torch_error: str | None
    torchvision: Library
    extras: dict[str, Extra]
    advice: dict[str, str]
    native_engine: str | None = None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what this machine has, lacks and is best at.

    Versions, processor, memory, devices, the speed of bf16 beside fp32, and the extras of vitkit.
    """
    with talk_console().status("examining this machine …"):
        report = examine()
    if as_json:
        print_json(asdict(report))
    else:
        print_report(report)


def examine() -> Report:
    """Find out all of it. Takes a few seconds, most of them to import torch."""
    requirements = package_requirements()
    always = ["vitkit", "torch", *(name for name, extra in requirements if extra is None)]
    versions = {"python": platform.python_version(), **{name: package_version(name) for name in always}}
    cpu, memory = read_cpu(), read_memory()
    torch, torch_error = None, None
    try:
        torch = read_torch(cpu, memory)
    except Exception as error:  # a doctor that dies of the illness is of no use
        torch_error = f"{type(error).__name__}: {error}"
    return Report(
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
        native_engine=read_native() if torch is not None else None,
    )


def read_native() -> str:
    """Whether the native engine, which predicts fastest, is built or can be."""
    try:
        from vitkit.engine.choose import describe_native

        return describe_native()
    except Exception as error:  # an engine that is ill does not mean that torch is
        return f"broken: {type(error).__name__}: {error}"


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it.

    >>> package_version("no-such-package") is None
    True
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_requirements() -> list[tuple[str, str | None]]:
    """What vitkit needs by its metadata: pairs of package and extra, where None stands for always."""
    try:
        requirements = metadata.requires("vitkit") or []
    except metadata.PackageNotFoundError:  # run from a folder of sources
        requirements = []
    return [parse_requirement(requirement) for requirement in requirements]


def parse_requirement(requirement: str) -> tuple[str, str | None]:
    """The package and the extra of a line of metadata. Markers other than the extra are taken to hold.

    >>> parse_requirement("codespell[toml]>=2.4; extra == 'dev'")
    ('codespell', 'dev')
    """
    package = re.match(r"[\w.-]+", requirement)
    extra = re.search(r"""extra == ['"]([^'"]+)""", requirement)
    return package[0] if package else requirement, extra[1] if extra else None


def read_extras(requirements: Sequence[tuple[str, str | None]]) -> dict[str, Extra]:
    """For each extra, which packages are here and how to get the others.

    >>> read_extras([("no-such-package", "serve")])["serve"].install
    "pip install 'vitkit[serve]'"
    """
    extras = {}
    for extra in dict.fromkeys(extra for _, extra in requirements if extra is not None):
        names = [package for package, wanted_by in requirements if wanted_by == extra]
        missing = [name for name in names if package_version(name) is None]
        extras[extra] = Extra(
            installed=[name for name in names if name not in missing],
            missing=missing,
            install=f"pip install 'vitkit[{extra}]'" if missing else None,
        )
    return extras


def try_import(name: str) -> Library:
    """Import a library in a process of its own, where its warnings, exceptions and crashes stay.

    >>> try_import("no_such_library").state
    'absent'
    """
    if util.find_spec(name) is None:
        return Library(state="absent", version=None)
    # -P: as for the command vitkit, the current folder is no place to import from.
    trial = subprocess.run([sys.executable, "-P", "-c", f"import {name}"], capture_output=True, check=False)
    reason = None
    if trial.returncode != 0:
        lines = trial.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {trial.returncode}"
    return Library(state="broken" if reason else "works", version=package_version(name), reason=reason)


def read_torch(cpu: Cpu, memory: Memory) -> Torch:
    """What torch reports and measures here; the fastest kind of device comes first."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            devices.append(Device(device=f"cuda:{index}", name=card.name, memory_bytes=card.total_memory))
    if torch.backends.mps.is_available():
        devices.append(Device(device="mps", name=cpu.name, memory_bytes=memory.total_bytes))
    devices.append(Device(device="cpu", name=cpu.name, memory_bytes=memory.total_bytes))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ratio of two times on one core is the steadier, whatever else is running
    try:
        single, half = torch.ones(512, 512), torch.ones(512, 512, dtype=torch.bfloat16)
        slowdown = _shortest_seconds(lambda: half @ half) / _shortest_seconds(lambda: single @ single)
    finally:
        torch.set_num_threads(threads)
    return Torch(
        threads=threads,
        interop_threads=torch.get_num_interop_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        bf16_slowdown=round(slowdown, 2),
        devices=devices,
    )


def _shortest_seconds(action: Callable[[], object], *, budget: float = 0.3) -> float:
    """The time of the fastest of as many runs as the budget of seconds allows, after one that warms up."""
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < budget:
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def advise(versions: dict[str, str | None], cpu: Cpu, torch: Torch | None) -> dict[str, str]:
    """What to do about it: a sentence for each subject that calls for one."""
    advice = {}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        advice["packages"] = f"not installed: {', '.join(missing)}; run pip install vitkit"
    if torch is None:
        return {**advice, "torch": "torch does not work; install it again, see https://pytorch.org/get-started/locally"}
    if torch.bf16_slowdown > 1.15:
        advice["bf16"] = f"bf16 is {torch.bf16_slowdown:.1f}× slower than fp32 here: train and predict in fp32"
    elif torch.bf16_slowdown < 0.85:
        advice["bf16"] = f"bf16 is {1 / torch.bf16_slowdown:.1f}× faster than fp32 here: try it on the CPU"
    if torch.threads > cpu.usable_cores:
        load = f"{torch.threads} threads on {cpu.usable_cores} usable cores"
        advice["threads"] = f"torch runs {load}: set OMP_NUM_THREADS={cpu.usable_cores}"
    return advice


def print_report(report: Report) -> None:
    """Print the report to stdout for people."""
    print_sections(
        {
            "Machine": _describe_machine(report),
            "Torch": _describe_torch(report),
            "Versions": [(name, version or "not installed") for name, version in report.versions.items()],
            "Extras": _describe_extras(report.extras),
            "Advice": list(report.advice.items()),
        }
    )


def _describe_machine(report: Report) -> list[tuple[str, str]]:
    cpu, memory = report.cpu, report.memory
    usable = f", of which {cpu.usable_cores} usable" if cpu.usable_cores < cpu.cores else ""
    sizes = {"total": memory.total_bytes, "available": memory.available_bytes, "allowed": memory.limit_bytes}
    amounts = [f"{format_bytes(size)} {word}" for word, size in sizes.items() if size is not None]
    return [
        ("platform", report.platform),
        ("processor", cpu.name),
        ("cores", f"{cpu.cores}{usable}"),
        ("instructions", ", ".join(cpu.instruction_sets) or "not known"),
        ("memory", ", ".join(amounts) or "not known"),
    ]


def _describe_torch(report: Report) -> list[tuple[str, str]]:
    torch, torchvision = report.torch, report.torchvision
    rows = [("torchvision", f"{torchvision.version or ''} {torchvision.state}; vitkit does not need it")]
    if torchvision.reason:
        rows.append(("", torchvision.reason))
    if torch is None:
        return [("torch", f"broken: {report.torch_error}"), *rows]
    native = {True: "native", False: "emulated", None: "not known to be native"}[report.cpu.bf16_native]
    variables = [f"{name}={value}" for name, value in report.environment.items() if value is not None]
    return [
        *((device.device, _describe_device(device)) for device in torch.devices),
        ("threads", f"{torch.threads} within an operation, {torch.interop_threads} between operations"),
        ("environment", " ".join(variables) or f"no {' or '.join(report.environment)}"),
        ("CPU kernels", torch.cpu_capability),
        ("fast engine", report.native_engine or "not known"),
        ("bf16 on CPU", f"{native}: a matrix product takes {torch.bf16_slowdown:.1f}× the time of fp32"),
        *rows,
    ]


def _describe_device(device: Device) -> str:
    return device.name if device.memory_bytes is None else f"{device.name}, {format_bytes(device.memory_bytes)}"


def _describe_extras(extras: dict[str, Extra]) -> list[tuple[str, str]]:
    rows = []
    for name, extra in extras.items():
        rows.append((name, f"missing {', '.join(extra.missing)}" if extra.missing else "installed"))
        if extra.install:
            rows.append(("", extra.install))
    return rows
