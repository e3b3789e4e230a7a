"""`vitkit doctor`: facts about this machine, stable JSON keys, and broken libraries."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitkit.api import system
from vitkit.cli import doctor
from vitkit.cli.main import main
from vitkit.core import environment
from vitkit.inference import machine, select
from vitkit.inference.machine import ExtraInfo, LibraryInfo, MachineReport

KEYS = {
    *("versions", "executable", "platform", "cpu", "memory", "environment"),
    *("torch", "torch_error", "torchvision", "extras", "advice", "native_engine"),
}


@pytest.fixture(scope="module")
def report() -> MachineReport:
    return machine.examine_machine()


@pytest.fixture
def command_report(monkeypatch: pytest.MonkeyPatch, report: MachineReport) -> MachineReport:
    """Let the command print the report of this module instead of examining the machine again."""
    monkeypatch.setattr(system, "examine_machine", lambda: report)
    return report


def install_torchvision(directory: Path, monkeypatch: pytest.MonkeyPatch, *, source: str) -> None:
    """Make this process and its children import a torchvision with this source."""
    package = directory / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_json_has_the_documented_keys(command_report: MachineReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result.keys() >= KEYS
    assert result["cpu"].keys() >= {"name", "architecture", "cores", "usable_cores", "instruction_sets", "bf16_native"}
    assert result["torch"].keys() >= {"threads", "cpu_capability", "devices"}
    assert result["torch"]["devices"][-1].keys() == {"device", "name", "memory_bytes", "precision", "slowdowns"}
    assert captured.err == ""


def test_report_is_true_on_this_machine(report: MachineReport) -> None:
    assert report.versions["python"] == sys.version.split()[0]
    assert report.versions["vitkit"]
    assert report.versions["torch"]
    assert 1 <= report.cpu.usable_cores <= report.cpu.cores
    assert report.torch is not None
    assert report.torch.devices[-1].device == "cpu"
    assert report.torch.devices[-1].precision == "fp32"
    assert report.torch.devices[-1].slowdowns["bf16"] > 0
    assert report.native_engine is not None
    assert report.torch_error is None


def test_measuring_restores_the_threads_of_torch(report: MachineReport) -> None:
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    machine.read_torch(report.cpu, report.memory)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("columns", [60, 100])
def test_text_fits_the_terminal(
    columns: int, command_report: MachineReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"Machine", "Torch", "Versions", "Extras"} <= set(lines)
    assert max(map(len, lines)) <= columns


def test_help_of_doctor_does_not_import_torch() -> None:
    program = (
        "import sys; from vitkit.cli.main import main; main(['doctor', '--help']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_broken_torchvision_is_reported(
    tmp_path: Path,
    report: MachineReport,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_torchvision(tmp_path, monkeypatch, source="raise RuntimeError('operator \\x1b[31mnms does not exist')")
    torchvision = machine.try_import("torchvision")
    assert torchvision.state == "broken"
    assert torchvision.reason == "RuntimeError: operator \x1b[31mnms does not exist"
    doctor.print_report(replace(report, torchvision=torchvision))
    output = capsys.readouterr().out
    assert "broken; vitkit does not need it" in output
    assert r"\x1b[31mnms" in output
    assert "\x1b" not in output


def test_crashing_torchvision_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torchvision(tmp_path, monkeypatch, source="import os; os._exit(3)")
    assert machine.try_import("torchvision").reason == "exit code 3"


def test_working_torchvision_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torchvision(tmp_path, monkeypatch, source="")
    torchvision = machine.try_import("torchvision")
    assert (torchvision.state, torchvision.reason) == ("works", None)


def test_absent_torchvision_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert machine.try_import("torchvision") == LibraryInfo(state="absent", version=None)


def test_broken_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    run = subprocess.run(
        [sys.executable, "-m", "vitkit", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(run.stdout)
    assert result["torch"] is None
    assert result["torch_error"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert "torch" in result["advice"]


def test_broken_engine_is_not_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("no such file")

    monkeypatch.setattr(select, "describe_native_engine", fail)
    assert machine.read_native_engine() == "broken: RuntimeError: no such file"


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("torch>=2.7", ("torch", None)),
        ("codespell[toml]>=2.4; extra == 'dev'", ("codespell", "dev")),
        ('huggingface_hub ; python_version < "4" and extra == "hub"', ("huggingface_hub", "hub")),
        ("prometheus-client>=0.20 ; extra == 'serve'", ("prometheus-client", "serve")),
    ],
)
def test_requirements_are_parsed(line: str, parsed: tuple[str, str | None]) -> None:
    assert machine.parse_requirement(line) == parsed


def test_extras_list_missing_packages_and_the_command() -> None:
    requirements = [("numpy", None), ("numpy", "first"), ("numpy", "second"), ("no-such-package", "second")]
    assert machine.read_extras(requirements) == {
        "first": ExtraInfo(installed=["numpy"], missing=[], install=None),
        "second": ExtraInfo(installed=["numpy"], missing=["no-such-package"], install="pip install 'vitkit[second]'"),
    }


def test_install_command_is_printed_in_one_line(
    report: MachineReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    extras = machine.read_extras([("no-such-package", "serve"), ("another-missing-package", "serve")])
    doctor.print_report(replace(report, extras=extras))
    assert "pip install 'vitkit[serve]'" in [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_cpuinfo_of_x86_and_arm_is_parsed() -> None:
    assert environment.parse_cpuinfo("processor\t: 0\nmodel name\t: Xeon: X\nflags\t\t: fma AVX2\n") == (
        "Xeon: X",
        {"fma", "avx2"},
    )
    assert environment.parse_cpuinfo("Features : asimd bf16\nModel : Raspberry Pi 5") == (
        "Raspberry Pi 5",
        {"asimd", "bf16"},
    )
    assert environment.parse_cpuinfo("") == ("", set())


def test_instruction_sets_of_torch_are_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_read", lambda path: "")
    cpu = environment.read_cpu({"cpu_name": "Apple M4", "bf16": True, "sve": False, "num_sockets": 1})
    assert (cpu.name, cpu.instruction_sets, cpu.bf16_native) == ("Apple M4", ["bf16"], True)
    assert environment.read_cpu().bf16_native is None


@pytest.mark.parametrize(
    ("slowdown", "text"), [(5.62, "bf16 is 5.6× slower than fp32"), (0.5, "bf16 is 2.0× faster"), (1.0, None)]
)
def test_bf16_advice_follows_the_measurement(slowdown: float, text: str | None, report: MachineReport) -> None:
    assert report.torch is not None
    cpu = replace(report.torch.devices[-1], slowdowns={"bf16": slowdown})
    advice = machine.advise({}, report.cpu, replace(report.torch, devices=[cpu])).get("bf16")
    assert advice is None if text is None else text in (advice or "")


def test_advice_on_missing_packages_and_threads(report: MachineReport) -> None:
    assert report.torch is not None
    cpu = replace(report.cpu, usable_cores=2)
    advice = machine.advise({"rich": None}, cpu, replace(report.torch, threads=64))
    assert "rich" in advice["packages"]
    assert "OMP_NUM_THREADS=2" in advice["threads"]


def test_every_device_is_measured(report: MachineReport, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415

    cards = [SimpleNamespace(name="A100", total_memory=80 * 10**9), SimpleNamespace(name="T4", total_memory=16 * 10**9)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 0 else (7, 5))
    measured: list[str] = []
    monkeypatch.setattr(machine, "measure_slowdowns", lambda device: measured.append(device) or {"bf16": 0.1})
    devices = machine.read_torch(report.cpu, report.memory).devices
    assert measured == [device.device for device in devices] == ["cuda:0", "cuda:1", "cpu"]
    assert [device.precision for device in devices] == ["bf16", "fp16", "fp32"]
    text = dict(doctor._torch_rows(replace(report, torch=replace(report.torch, devices=devices))))
    assert text["training on cuda:1"] == "in fp16; time of a matrix product relative to fp32: 0.10× in bf16"
