"""`vitkit export` of weights: companion files, and verification by their library."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.tiny_runs import Shell, photos
from oracles import import_timm, import_transformers

import vitkit
from vitkit.core.config import parse_assignments
from vitkit.data.preprocessing import Preprocessing
from vitkit.exporters.atomic_output import read_verification
from vitkit.model.config import BiTConfig
from vitkit.model.resnet import BiT
from vitkit.weights import verify

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
SQUASHED = Preprocessing(image_size=32)
forked = pytest.mark.usefixtures("forked_examples")
"""All but the test of a broken torchvision, whose example.py is a program of its own, as a user starts it."""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    save("run")
    return Shell(capsys)


def save(name: str, *settings: str, num_classes: int = 2, channels: int = 3, patch_size: int = 8) -> None:
    model = vitkit.create(
        "Ti/16",
        image_size=32,
        patch_size=patch_size,
        num_classes=num_classes,
        channels=channels,
        settings=parse_assignments((*SIZES, *settings)),
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    how = SQUASHED if channels == 3 else Preprocessing(image_size=32, channels=channels, mean=(0.5,), std=(0.5,))
    vitkit.save(model, name, labels=["cat", "dog"][:num_classes], preprocessing=how)


def verification_at(path: str) -> dict[str, Any]:
    verification = read_verification(Path(path))
    assert verification is not None
    return dict(verification)


@forked
@pytest.mark.parametrize(("to", "library"), [("timm", "timm"), ("huggingface", "transformers"), ("google", "timm")])
def test_export_has_companion_files_and_library_results(shell, tmp_path, to, library) -> None:
    {"timm": import_timm, "transformers": import_transformers}[library]()
    photos(tmp_path / "photos", each=5)
    result = shell("export", "run", "out", "--to", to, "--images", "photos", "--json").json
    assert result["dropped"] == []
    assert {"labels.json", "preprocessing.json", "example.py", "verification.json", "SHA256SUMS"} <= set(
        result["files"]
    )
    theirs, tried = (verification_at("out")[part] for part in ("library", "example"))
    assert theirs["against"].startswith(library)
    assert (theirs["images"], theirs["top1_agreement"]) == (10, 1.0)
    assert theirs["largest_difference"] <= 1e-4
    assert tried["images"] == 8
    assert tried["largest_difference"] <= 1e-4
    again = vitkit.load("out")
    assert (again.labels, again.preprocess) == (("cat", "dog"), SQUASHED)


@forked
def test_weights_with_other_library_outputs_are_rejected(shell, monkeypatch) -> None:
    import_timm()
    theirs = verify.BUILDERS["timm"]

    def other(*given: Any) -> verify.Forward:
        ask = theirs(*given)
        return lambda pixels: ask(pixels) + 0.001

    monkeypatch.setitem(verify.BUILDERS, "timm", other)
    for out in ("out", "out.npz"):
        result = shell("export", "run", out, "--to", "google")
        assert result.code == 1
        assert result.errors[0].startswith("error: timm ")
        assert "does not reproduce the model's logits" in result.errors[0]
    assert sorted(path.name for path in Path().iterdir()) == ["run"]


@forked
def test_export_that_its_library_cannot_load_has_no_example(shell) -> None:
    """timm reads Google's files of one and three channels only."""
    import_timm()
    save("four", channels=4)
    result = shell("export", "four", "out", "--to", "google")
    assert result.code == 0
    assert "not compared with its library: timm cannot run it" in " ".join(result.out.split())
    assert not Path("out", "example.py").exists()
    assert "cannot run it" in verification_at("out")["example"]["skipped"]


def test_verification_notes_a_repaired_torchvision(shell) -> None:
    import_timm()
    plain = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True, check=False).returncode == 0
    shell("export", "run", "out", "--to", "timm")
    assert ("note" in verification_at("out")["example"]) is not plain


@forked
def test_features_are_verified_without_classes(shell) -> None:
    import_timm(), import_transformers()
    save("headless", num_classes=0)
    for to in ("timm", "huggingface"):
        assert shell("export", "headless", to, "--to", to).code == 0
        actual = verification_at(to)
        assert actual["library"]["top1_agreement"] is None
        assert actual["library"]["largest_difference"] <= 1e-4
        assert actual["example"]["images"] == 8
    save("distilled", "tokens.distillation=true", "block.activation=gelu_erf", num_classes=0)
    result = shell("export", "distilled", "deit", "--to", "huggingface-deit")
    assert result.code == 0
    assert "of one token" in verification_at("deit")["library"]["skipped"]


@forked
def test_exported_directory_is_loaded_by_its_command(shell) -> None:
    save("erf", "block.activation=gelu_erf")
    for to, run in (("deit", "erf"), ("google", "run")):
        result = shell("export", run, f"for-{to}", "--to", to, "--json")
        assert result.code == 0
        again = eval(result.json["load_command"], {"vitkit": vitkit})
        assert (again.labels, again.preprocess) == (("cat", "dog"), SQUASHED)


@forked
def test_image_size_of_a_resnet_is_kept(shell) -> None:
    vitkit.save(BiT(BiTConfig(units=(1,), num_classes=2, image_size=64)), "resnet", labels=["cat", "dog"])
    result = shell("export", "resnet", "out", "--to", "bit", "--json")
    assert result.code == 0
    assert result.json["differs"] == []
    assert vitkit.load("out").config.image_size == 64


@forked
def test_single_file_is_identified_by_its_verification(shell) -> None:
    assert shell("weights", "convert", "run", "model.npz", "--to", "google").code == 0
    assert shell("export", "run", "model.npz", "--to", "google").errors == ["error: model.npz already exists"]
    assert shell("export", "run", "model.npz", "--to", "google", "--force").code == 0
    result = json.loads(Path("model.npz.verification.json").read_bytes())
    assert result["top1_agreement"] == 1
    again = shell("export", "run", "model.npz", "--to", "google", "--json")
    assert again.json["already_existed"]
    assert again.json["verification"] == result
    photos(Path("photos"), each=5)
    assert shell("export", "run", "model.npz", "--to", "google", "--images", "photos").code == 1
    Path("model.npz").write_bytes(Path("model.npz").read_bytes() + b" ")
    assert shell("export", "run", "model.npz", "--to", "google").code == 1


@forked
@pytest.mark.parametrize(("to", "out"), [("google", "model.pth"), ("torchvision", "model.npz"), ("timm", "model.npz")])
def test_suffix_of_another_format_is_rejected(shell, to, out) -> None:
    save("erf", "block.activation=gelu_erf")
    result = shell("export", "erf", out, "--to", to)
    assert result.code == 1
    assert "the output is a directory" in result.errors[0]


@forked
def test_export_into_the_current_directory(shell, monkeypatch) -> None:
    Path("new").mkdir()
    monkeypatch.chdir("new")
    assert shell("export", "../run", ".", "--to", "google").code == 0
    assert Path("model.npz").is_file()
