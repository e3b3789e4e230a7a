"""`vitkit doctor`: report on this machine."""

from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_result, print_sections, stderr_console
from vitkit.core.formatting import format_bytes

if TYPE_CHECKING:
    from vitkit.inference.machine import DeviceInfo, ExtraInfo, MachineReport


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Report what this machine has and lacks.

    Lists versions, processor, memory, devices, the speed of each precision, and vitkit's extras.
    """
    import vitkit

    with stderr_console().status("examining this machine …"):
        report = vitkit.doctor()
    print_result(report, print_report, as_json=as_json)


def print_report(report: "MachineReport") -> None:
    """Print the report as text."""
    print_sections(
        {
            "Machine": _machine_rows(report),
            "Torch": _torch_rows(report),
            "Versions": [(name, version or "not installed") for name, version in report.versions.items()],
            "Extras": _extra_rows(report.extras),
            "Advice": list(report.advice.items()),
        }
    )


def _machine_rows(report: "MachineReport") -> list[tuple[str, str]]:
    cpu, memory = report.cpu, report.memory
    usable = f", {cpu.usable_cores} usable" if cpu.usable_cores < cpu.cores else ""
    sizes = {"total": memory.total_bytes, "available": memory.available_bytes, "allowed": memory.limit_bytes}
    return [
        ("platform", report.platform),
        ("processor", cpu.name),
        ("cores", f"{cpu.cores}{usable}"),
        ("instructions", ", ".join(cpu.instruction_sets) or "unknown"),
        ("memory", ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)),
    ]


def _torch_rows(report: "MachineReport") -> list[tuple[str, str]]:
    torch, torchvision = report.torch, report.torchvision
    rows = [("torchvision", f"{torchvision.version or ''} {torchvision.state}; vitkit does not need it")]
    if torchvision.reason:
        rows.append(("", torchvision.reason))
    if torch is None:
        return [("torch", f"broken: {report.torch_error}"), *rows]
    support = {True: "native", False: "emulated", None: "support unknown"}[report.cpu.bf16_native]
    variables = [f"{name}={value}" for name, value in report.environment.items() if value is not None]
    return [
        *((device.device, _describe_device(device)) for device in torch.devices),
        *((f"training on {device.device}", _describe_precision(device)) for device in torch.devices),
        ("threads", f"{torch.threads} within an operation, {torch.interop_threads} between operations"),
        ("environment", " ".join(variables) or f"no {' or '.join(report.environment)}"),
        ("CPU kernels", torch.cpu_capability),
        ("native engine", report.native_engine or "unknown"),
        ("bf16 on the CPU", support),
        *rows,
    ]


def _describe_device(device: "DeviceInfo") -> str:
    return device.name if device.memory_bytes is None else f"{device.name}, {format_bytes(device.memory_bytes)}"


def _describe_precision(device: "DeviceInfo") -> str:
    times = ", ".join(f"{slowdown:.2f}× in {name}" for name, slowdown in device.slowdowns.items())
    return f"in {device.precision}; time of a matrix product relative to fp32: {times}"


def _extra_rows(extras: "dict[str, ExtraInfo]") -> list[tuple[str, str]]:
    rows = []
    for name, extra in extras.items():
        rows.append((name, f"missing {', '.join(extra.missing)}" if extra.missing else "installed"))
        if extra.install:
            rows.append(("", extra.install))
    return rows
