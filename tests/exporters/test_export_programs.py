"""`vitkit export --to torch|onnx|openvino`: a verified directory that runs without vitkit, or nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell
from PIL import Image

import vitkit
from vitkit.core.config import parse_assignments
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.exporters import exporter
from vitkit.exporters import runtime as runtime_module
from vitkit.exporters.atomic_output import find_damaged_file, read_verification
from vitkit.exporters.example import format_example
from vitkit.exporters.exporter import RUNTIMES
from vitkit.exporters.verification import VerificationImages, model_runner, verify_example
from vitkit.weights.bundle import ModelBundle

LABELS = ["<b>cat</b>", "dog \"'\\", "ünïcode\u202e", "../fish", "${HOME}", "bird"]
SIZES = ("width=32", "depth=1", "heads=2", "mlp_dim=48")
FILES = ["README.md", "SHA256SUMS", "example.py", "labels.json"]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    save("run")
    return Shell(capsys)


@pytest.fixture
def quick(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Skip tracing, and the process that runs example.py: `--to torch` keeps the model in memory."""
    written: list[ModelBundle] = []

    def write(bundle: ModelBundle, directory: Path) -> None:
        (directory / "model.pt2").write_bytes(b"program")
        written.append(bundle)

    runtime = replace(RUNTIMES["torch"], write=write, load=lambda directory: model_runner(written[-1]))
    monkeypatch.setitem(RUNTIMES, "torch", runtime)
    monkeypatch.setattr(exporter, "verify_example", skip_example)
    return shell


def skip_example(directory: Path, bundle: ModelBundle, *, images: VerificationImages | None) -> dict[str, object]:
    return {"images": 0, "largest_difference": 0.0}


def save(name: str, *settings: str, how: Preprocessing | None = None, num_classes: int = len(LABELS)) -> None:
    how = how or get_preprocessing("deit", image_size=32)
    model = vitkit.create(
        "Ti/16", image_size=32, patch_size=8, num_classes=num_classes, settings=parse_assignments((*SIZES, *settings))
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    vitkit.save(model, name, labels=LABELS[:num_classes], preprocessing=how)


def photos(folder: str, count: int = 3) -> list[str]:
    Path(folder).mkdir()
    paths = [f"{folder}/{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(path)
    return paths


def contents(folder: str) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(folder).iterdir()}


def replace_writer(monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[..., None]) -> None:
    monkeypatch.setitem(RUNTIMES, name, replace(RUNTIMES[name], write=write))


def run_example(example: str, *files: str) -> list[dict[str, Any]]:
    """Run example.py without vitkit and, unless it is the runtime, torch; return its output."""
    hidden = ("vitkit",) if "torch" in example else ("vitkit", "torch")
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-I", "-c", code, example, "--json", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("to", ["torch", "onnx", "openvino"])
def test_example_prints_the_predictions_of_vitkit(shell: Shell, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    for package in RUNTIMES[to].requires:
        pytest.importorskip(package, reason=f"{package} comes with vitkit[{RUNTIMES[to].extra}]")
    files = photos("photos")
    if to != "onnx":  # slower to start; their example.py is run below
        monkeypatch.setattr(exporter, "verify_example", skip_example)
    said = shell("export", "run", f"for-{to}", "--to", to, "--images", "photos", "--json")
    assert said.code == 0, said.stderr
    program = {"torch": ["model.pt2"], "onnx": ["model.onnx"], "openvino": ["model.bin", "model.xml"]}[to]
    assert said.json["files"] == sorted([*FILES, "preprocessing.json", "verification.json", *program])
    verification = said.json["verification"]
    assert (verification["images"], verification["top1_agreement"], verification["images_from"]) == (13, 1, "photos")
    assert verification["batch_sizes"] == [1, 2, 7]
    assert verification["largest_difference"] <= 1e-4
    assert verification["example"]["images"] == (3 if to == "onnx" else 0)
    assert read_verification(Path(f"for-{to}")) == verification
    assert find_damaged_file(Path(f"for-{to}")) is None
    expected = [json.loads(line) for line in shell("predict", "run", *files, "--json").out.splitlines()]
    for found, ours in zip(run_example(f"for-{to}/example.py", *files), expected, strict=True):
        assert found["file"] == ours["file"]
        assert [each["label"] for each in found["predictions"]] == [each["label"] for each in ours["predictions"]]
        probabilities = [[each["probability"] for each in answer["predictions"]] for answer in (found, ours)]
        assert np.allclose(*probabilities, rtol=0, atol=1e-5)  # other float32 kernels


def test_control_characters_in_labels_are_replaced(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "example", "__file__": str(tmp_path / "example.py")}
    text = format_example(Preprocessing(), run_code="", package="onnxruntime", num_classes=2)
    exec(compile(text, "example.py", "exec"), names)
    assert names["printable"]("a\x1b[31mb\u202ec\n") == "a?[31mb?c?"


def test_repeated_export_changes_nothing(quick: Shell) -> None:
    first = quick("export", "run", "out", "--to", "torch")
    assert first.code == 0
    for text in ("read run", "writing PyTorch's exported program", "running it with torch", "running example.py"):
        assert text in first.stderr
    assert "12 digits, 12 fractals" in " ".join(first.out.split())
    assert first.out.splitlines()[-1] == 'torch.export.load("out/model.pt2").module()'
    before = contents("out")
    again = quick("export", "run", "out", "--to", "torch")
    assert (again.code, contents("out")) == (0, before)
    assert "already complete: out" in again.stderr
    assert "writing" not in again.stderr
    assert quick("export", "run", "out", "--to", "torch", "--json").json["already_existed"] is True


def test_other_model_or_damage_needs_force(quick: Shell) -> None:
    assert quick("export", "run", "out", "--to", "torch").code == 0
    save("run", "block.norm_eps=1e-5")
    refused = quick("export", "run", "out", "--to", "torch")
    assert (refused.code, refused.errors) == (1, ["error: out already exists"])
    assert refused.hints == ["hint: --force (overwrite=True) replaces it"]
    Path("out/mine.txt").write_text("mine")
    assert quick("export", "run", "out", "--to", "torch", "--force").code == 0
    assert Path("out/mine.txt").read_text() == "mine"
    assert find_damaged_file(Path("out")) is None
    Path("out/labels.json").write_text("[]")
    assert quick("export", "run", "out", "--to", "torch").code == 1
    assert not list(Path().glob(".*"))


def test_program_with_other_outputs_is_not_kept(quick: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(bundle: Any, directory: Path) -> None:
        bias = bundle.state["head.bias"].clone()
        bias[0] += 0.01
        write_torch(replace(bundle, state=bundle.state | {"head.bias": bias}), directory)

    write_torch = RUNTIMES["torch"].write
    replace_writer(monkeypatch, "torch", write)
    said = quick("export", "run", "out", "--to", "torch")
    assert said.code == 1
    assert "does not reproduce the model's logits" in said.errors[0]
    assert "got 0.01" in said.errors[0]
    assert [path.name for path in Path().iterdir()] == ["run"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_export_keeps_existing_files(
    quick: Shell, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def write(bundle: Any, directory: Path) -> None:
        (directory / "model.pt2").write_bytes(b"half")
        raise fault

    Path("out").mkdir()
    for name in ("model.pt2", "SHA256SUMS", "verification.json"):
        Path("out", name).write_text(name)
    before = contents("out")
    replace_writer(monkeypatch, "torch", write)
    assert quick("export", "run", "out", "--to", "torch", "--force").code != 0
    assert quick("export", "run", "new", "--to", "torch").code != 0
    assert contents("out") == before
    assert sorted(path.name for path in Path().iterdir()) == ["out", "run"]


def test_example_with_other_output_is_an_error(quick: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "verify_example", verify_example)
    zeros = "def run(pixels):\n    return np.zeros((len(pixels), 6), np.float32)"
    monkeypatch.setitem(RUNTIMES, "torch", replace(RUNTIMES["torch"], example=zeros))
    said = quick("export", "run", "out", "--to", "torch")
    assert said.code == 1
    assert "example.py does not reproduce the model's output" in said.errors[0]
    assert not Path("out").exists()


def test_missing_runtime_has_an_install_hint(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runtime_module.find_spec
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    said = shell("export", "run", "out", "--to", "onnx")
    assert said.code == 1
    assert said.errors == ["error: ONNX needs onnxruntime, which is not installed"]
    assert said.hints == ["hint: pip install 'vitkit[export]'"]


def test_unknown_format_suggests_the_nearest(shell: Shell) -> None:
    assert shell("export", "run", "out", "--to", "onx").hints == ["hint: did you mean onnx?"]
    assert "onnx, torch, openvino, vitkit, google" in shell("export", "run", "out", "--to", "?").hints[0]


def test_model_without_classes_exports_features(shell: Shell) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime comes with vitkit[export]")
    save("headless", num_classes=0, how=get_preprocessing("paper", image_size=32))
    said = shell("export", "headless", "for-onnx", "--to", "onnx", "--json")
    assert said.code == 0, said.stderr
    verification = said.json["verification"]
    assert verification["top1_agreement"] is None
    assert verification["example"]["images"] == 8
    assert verification["example"]["largest_difference"] < 1e-3  # resized by numpy without antialias
    assert "labels.json" not in Path("for-onnx/example.py").read_text()


def test_missing_images_are_an_error(shell: Shell) -> None:
    said = shell("export", "run", "out", "--to", "torch", "--images", "nowhere")
    assert said.code == 1
    assert not Path("out").exists()


def test_runtime_is_added_by_a_registry_entry(quick: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = replace(RUNTIMES["torch"], name="mine", title="My runtime", load_command='mine.load("{out}")')
    monkeypatch.setitem(RUNTIMES, "mine", runtime)
    said = quick("export", "run", "out", "--to", "mine", "--json")
    assert said.code == 0, said.stderr
    assert (said.json["format"], said.json["load_command"]) == ("mine", 'mine.load("out")')
    assert read_verification(Path("out"))["format"] == "mine"
