"""What doctor reports: true on this machine, stable for scripts, and unharmed by broken libraries."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vitkit.cli import doctor, hardware
from vitkit.cli.main import main
from vitkit.engine import choose

KEYS = {
    *("versions", "executable", "platform", "cpu", "memory", "environment"),
    *("torch", "torch_error", "torchvision", "extras", "advice", "native_engine"),
}


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.examine()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, report: doctor.Report) -> doctor.Report:
    """Let the command print the report of this module rather than examine the machine again."""
    monkeypatch.setattr(doctor, "examine", lambda: report)
    return report


def put_torchvision(folder: Path, monkeypatch: pytest.MonkeyPatch, *, source: str) -> None:
    """Let this process and those it starts find a torchvision with this source."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_json_is_one_object_with_the_promised_keys(prepared: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found.keys() >= KEYS
    assert found["cpu"].keys() >= {"name", "architecture", "cores", "usable_cores", "instruction_sets", "bf16_native"}
    assert found["torch"].keys() >= {"threads", "cpu_capability", "bf16_slowdown", "devices"}
    assert captured.err == ""


def test_the_report_is_true_here(report: doctor.Report) -> None:
    assert report.versions["python"] == sys.version.split()[0]
    assert report.versions["vitkit"]
    assert report.versions["torch"]
    assert 1 <= report.cpu.usable_cores <= report.cpu.cores
    assert report.torch is not None
    assert report.torch.devices[-1].device == "cpu"
    assert report.torch.bf16_slowdown > 0
    assert report.native_engine is not None
    assert report.torch_error is None


def test_measuring_leaves_the_threads_of_torch_alone(report: doctor.Report) -> None:
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    doctor.read_torch(report.cpu, report.memory)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("columns", [60, 100])
def test_text_fits_the_terminal(
    columns: int, prepared: doctor.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_broken_torchvision_is_reported_and_not_needed(
    tmp_path: Path,
    report: doctor.Report,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_torchvision(tmp_path, monkeypatch, source="raise RuntimeError('operator \\x1b[31mnms does not exist')")
    torchvision = doctor.try_import("torchvision")
    assert torchvision.state == "broken"
    assert torchvision.reason == "RuntimeError: operator \x1b[31mnms does not exist"
    doctor.print_report(replace(report, torchvision=torchvision))
    shown = capsys.readouterr().out
    assert "broken; vitkit does not need it" in shown
    assert r"\x1b[31mnms" in shown
    assert "\x1b" not in shown


def test_a_torchvision_that_ends_the_process_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_torchvision(tmp_path, monkeypatch, source="import os; os._exit(3)")
    assert doctor.try_import("torchvision").reason == "exit code 3"


def test_a_working_torchvision_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_torchvision(tmp_path, monkeypatch, source="")
    torchvision = doctor.try_import("torchvision")
    assert (torchvision.state, torchvision.reason) == ("works", None)


def test_an_absent_torchvision_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert doctor.try_import("torchvision") == doctor.Library(state="absent", version=None)


def test_a_broken_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    run = subprocess.run(
        [sys.executable, "-m", "vitkit", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["torch"] is None
    assert found["torch_error"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert "torch" in found["advice"]


def test_an_engine_that_cannot_be_asked_after_is_not_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(choose, "describe_native", fail)
    assert doctor.read_native() == "broken: RuntimeError: no such thing"


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("torch>=2.7", ("torch", None)),
        ("codespell[toml]>=2.4; extra == 'dev'", ("codespell", "dev")),
        ('huggingface_hub ; python_version < "4" and extra == "hub"', ("huggingface_hub", "hub")),
        ("prometheus-client>=0.20 ; extra == 'serve'", ("prometheus-client", "serve")),
    ],
)
def test_requirements_are_read_from_metadata(line: str, parsed: tuple[str, str | None]) -> None:
    assert doctor.parse_requirement(line) == parsed


def test_extras_tell_what_is_missing_and_how_to_get_it() -> None:
    requirements = [("numpy", None), ("numpy", "first"), ("numpy", "second"), ("no-such-package", "second")]
    assert doctor.read_extras(requirements) == {
        "first": doctor.Extra(installed=["numpy"], missing=[], install=None),
        "second": doctor.Extra(
            installed=["numpy"], missing=["no-such-package"], install="pip install 'vitkit[second]'"
        ),
    }


def test_the_install_line_survives_printing(
    report: doctor.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    extras = doctor.read_extras([("no-such-package", "serve"), ("another-missing-package", "serve")])
    doctor.print_report(replace(report, extras=extras))
    assert "pip install 'vitkit[serve]'" in [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_instruction_sets_are_read_on_every_system() -> None:
    assert hardware.parse_cpuinfo("processor\t: 0\nmodel name\t: Xeon: X\nflags\t\t: fma AVX2\n") == (
        "Xeon: X",
        {"fma", "avx2"},
    )
    assert hardware.parse_cpuinfo("Features : asimd bf16\nModel : Raspberry Pi 5") == (
        "Raspberry Pi 5",
        {"asimd", "bf16"},
    )
    assert hardware.parse_cpuinfo("") == ("", set())
    assert hardware.parse_sysctl("hw.optional.arm.FEAT_BF16: 1\nhw.optional.AdvSIMD: 1\nhw.optional.avx2_0: 0") == {
        "bf16",
        "advsimd",
    }


@pytest.mark.parametrize(
    ("slowdown", "words"), [(5.62, "bf16 is 5.6× slower than fp32"), (0.5, "bf16 is 2.0× faster"), (1.0, None)]
)
def test_advice_on_bf16_is_what_was_measured(slowdown: float, words: str | None, report: doctor.Report) -> None:
    assert report.torch is not None
    advice = doctor.advise({}, report.cpu, replace(report.torch, bf16_slowdown=slowdown)).get("bf16")
    assert advice is None if words is None else words in (advice or "")


def test_advice_names_missing_packages_and_crowded_cores(report: doctor.Report) -> None:
    assert report.torch is not None
    cpu = replace(report.cpu, usable_cores=2)
    advice = doctor.advise({"rich": None}, cpu, replace(report.torch, threads=64))
    assert "rich" in advice["packages"]
    assert "OMP_NUM_THREADS=2" in advice["threads"]
