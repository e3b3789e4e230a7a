"""`vitkit export --to torch|onnx|openvino`: a folder that runs without vitkit, proved, whole or not there."""

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
from vitkit.checkpoints.native import Artefact
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.export import exporting
from vitkit.export import runtime as runtime_module
from vitkit.export.example import LOADS, example
from vitkit.export.images import ProofImages
from vitkit.export.placing import damaged, stored_proof
from vitkit.export.runtimes import RUNTIMES

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
    """Without the process that example.py is tried in: it takes longer than all else here."""
    monkeypatch.setattr(exporting, "tried_example", untried)
    return shell


def untried(folder: Path, artefact: Artefact, *, images: ProofImages | None) -> dict[str, object]:
    return {"images": 0, "largest_difference": 0.0}


def save(name: str, *settings: str, how: Preprocessing | None = None, classes: int = len(LABELS)) -> None:
    how = how or preprocessing("deit", image_size=32)
    settings = (*SIZES, *settings)
    model = vitkit.create("Ti/16", image_size=32, patch_size=8, classes=classes, settings=settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    vitkit.save(model, name, labels=LABELS[:classes], preprocessing=how)


def photos(folder: str, count: int = 3) -> list[str]:
    Path(folder).mkdir()
    paths = [f"{folder}/{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(path)
    return paths


def contents(folder: str) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(folder).iterdir()}


def broken(monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[..., None]) -> None:
    monkeypatch.setitem(RUNTIMES, name, replace(RUNTIMES[name], write=write))


def ran(example: str, *files: str) -> list[dict[str, Any]]:
    """What example.py prints, run as a user does; vitkit, and torch where it is not the runtime, cannot be imported."""
    hidden = ("vitkit",) if "torch" in example else ("vitkit", "torch")
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-I", "-c", code, example, "--json", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("to", ["torch", "onnx", "openvino"])
def test_the_folder_answers_as_vitkit_predict_does_without_vitkit(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    for package in RUNTIMES[to].needs:
        pytest.importorskip(package, reason=f"{package} comes with vitkit[{RUNTIMES[to].extra}]")
    files = photos("photos")
    if to == "openvino":  # which takes longest to start; its example.py is run below all the same
        monkeypatch.setattr(exporting, "tried_example", untried)
    said = shell("export", "run", f"for-{to}", "--to", to, "--images", "photos", "--json")
    assert said.code == 0, said.talk
    program = {"torch": ["model.pt2"], "onnx": ["model.onnx"], "openvino": ["model.bin", "model.xml"]}[to]
    assert said.json["files"] == sorted([*FILES, "preprocessing.json", "proof.json", *program])
    proof = said.json["proof"]
    assert (proof["images"], proof["top1_agreement"], proof["images_from"]) == (13, 1, "photos")
    assert proof["batch_sizes"] == [1, 2, 7]
    assert proof["largest_difference"] <= 1e-4
    assert proof["example"]["images"] == (0 if to == "openvino" else 3)
    assert stored_proof(Path(f"for-{to}")) == proof
    assert damaged(Path(f"for-{to}")) is None
    expected = [json.loads(line) for line in shell("predict", "run", *files, "--json").out.splitlines()]
    for found, ours in zip(ran(f"for-{to}/example.py", *files), expected, strict=True):
        assert found["file"] == ours["file"]
        assert [each["label"] for each in found["predictions"]] == [each["label"] for each in ours["predictions"]]
        shares = [[each["probability"] for each in answer["predictions"]] for answer in (found, ours)]
        assert np.allclose(*shares, rtol=0, atol=1e-5)  # float32, by other kernels


def test_labels_that_would_steer_a_terminal_are_printed_without_that(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "example", "__file__": str(tmp_path / "example.py")}
    text = example(Preprocessing(), runtime="onnx", file="model.onnx", classes=2)
    load = LOADS["onnx"].format(file="model.onnx", input="pixels", output="logits").rstrip()
    exec(compile(text.replace(load, ""), "example.py", "exec"), names)
    assert names["printable"]("a\x1b[31mb\u202ec\n") == "a?[31mb?c?"


def test_what_it_does_is_said_aside_and_the_same_command_again_does_nothing(quick: Shell) -> None:
    first = quick("export", "run", "out", "--to", "torch")
    assert first.code == 0
    for words in ("read run", "writing PyTorch's exported program", "running it with torch", "running example.py"):
        assert words in first.talk
    assert "12 digits and 12 fractals" in " ".join(first.out.split())
    assert first.out.splitlines()[-1] == 'torch.export.load("out/model.pt2").module()'
    before = contents("out")
    again = quick("export", "run", "out", "--to", "torch")
    assert (again.code, contents("out")) == (0, before)
    assert "done already: out" in again.talk
    assert "writing" not in again.talk
    assert quick("export", "run", "out", "--to", "torch", "--json").json["already"] is True


def test_another_model_there_or_a_damaged_file_is_not_done_and_force_writes_again(quick: Shell) -> None:
    assert quick("export", "run", "out", "--to", "torch").code == 0
    save("run", "block.norm_eps=1e-5")
    refused = quick("export", "run", "out", "--to", "torch")
    assert (refused.code, refused.errors) == (1, ["error: out is there already"])
    assert refused.hints == ["hint: --force writes over it"]
    Path("out/mine.txt").write_text("mine")
    assert quick("export", "run", "out", "--to", "torch", "--force").code == 0
    assert Path("out/mine.txt").read_text() == "mine"
    assert damaged(Path("out")) is None
    Path("out/labels.json").write_text("[]")
    assert quick("export", "run", "out", "--to", "torch").code == 1
    assert not list(Path().glob(".*"))


def test_a_program_that_answers_otherwise_leaves_nothing_and_says_by_how_much(
    quick: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(artefact: Any, folder: Path) -> None:
        bias = artefact.state["head.bias"].clone()
        bias[0] += 0.01
        written(replace(artefact, state=artefact.state | {"head.bias": bias}), folder)

    written = RUNTIMES["torch"].write
    broken(monkeypatch, "torch", write)
    said = quick("export", "run", "out", "--to", "torch")
    assert said.code == 1
    assert "does not give the model's logits" in said.errors[0]
    assert "got 0.01" in said.errors[0]
    assert [path.name for path in Path().iterdir()] == ["run"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_interrupted_leaves_what_was_there(
    quick: Shell, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def write(artefact: Any, folder: Path) -> None:
        (folder / "model.pt2").write_bytes(b"half")
        raise fault

    Path("out").mkdir()
    for name in ("model.pt2", "SHA256SUMS", "proof.json"):
        Path("out", name).write_text(name)
    before = contents("out")
    broken(monkeypatch, "torch", write)
    assert quick("export", "run", "out", "--to", "torch", "--force").code != 0
    assert quick("export", "run", "new", "--to", "torch").code != 0
    assert contents("out") == before
    assert sorted(path.name for path in Path().iterdir()) == ["out", "run"]


def test_an_example_that_prints_something_else_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    text = exporting.example
    monkeypatch.setattr(exporting, "example", lambda *how, **named: text(*how, **named).replace("BICUBIC", "NEAREST"))
    said = shell("export", "run", "out", "--to", "torch")
    assert said.code == 1
    assert "example.py does not give the model's answers" in said.errors[0]
    assert not Path("out").exists()


def test_a_runtime_that_is_missing_is_named_with_how_to_get_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runtime_module.find_spec
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    said = shell("export", "run", "out", "--to", "onnx")
    assert said.code == 1
    assert said.errors == ["error: ONNX needs onnxruntime, which is not installed"]
    assert said.hints == ["hint: pip install 'vitkit[export]'"]


def test_an_unknown_format_is_named_with_the_nearest(shell: Shell) -> None:
    assert shell("export", "run", "out", "--to", "onx").hints == ["hint: did you mean onnx?"]
    assert "onnx, torch, openvino, vitkit, google" in shell("export", "run", "out", "--to", "?").hints[0]


def test_a_model_without_classes_gives_features(shell: Shell) -> None:
    save("headless", classes=0, how=preprocessing("paper", image_size=32))
    said = shell("export", "headless", "for-torch", "--to", "torch", "--json")
    assert said.code == 0, said.talk
    proof = said.json["proof"]
    assert proof["top1_agreement"] is None
    assert proof["example"]["images"] == 8
    assert proof["example"]["largest_difference"] < 1e-3  # resized by numpy, without antialias
    assert "labels.json" not in Path("for-torch/example.py").read_text()


def test_images_that_are_not_there_are_an_error_before_anything_is_written(shell: Shell) -> None:
    said = shell("export", "run", "out", "--to", "torch", "--images", "nowhere")
    assert said.code == 1
    assert not Path("out").exists()
