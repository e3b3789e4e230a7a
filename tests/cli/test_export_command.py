"""`vitkit export`: a run is written for another library, which loads it with its labels; or why it cannot be."""

from pathlib import Path

import pytest
import torch
from cli.tiny_runs import Shell
from oracles import import_timm, import_transformers

import vitkit


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name, settings in {"run": (), "averaging": ("pooling=mean",)}.items():
        sizes = ("width=64", "depth=1", "heads=2", "mlp_dim=128")
        model = vitkit.create("Ti/16", image_size=32, patch_size=8, classes=2, settings=(*sizes, *settings))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        vitkit.save(model, name, labels=["cat", "dog"])
    return Shell(capsys)


def ours(images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return vitkit.load("run")(images)


def test_transformers_loads_the_folder_with_its_labels(shell) -> None:
    transformers = import_transformers()
    said = shell("export", "run", "out", "--to", "huggingface")
    assert said.code == 0
    assert said.out == 'transformers.ViTForImageClassification.from_pretrained("out")\n'
    theirs = transformers.ViTForImageClassification.from_pretrained("out").eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(images).logits, ours(images), rtol=1e-5, atol=1e-5)  # float32, other kernels
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    assert vitkit.load("out").labels == ("cat", "dog")


def test_timm_loads_the_folder(shell) -> None:
    timm = import_timm()
    said = shell("export", "run", "out", "--to", "timm")
    assert said.code == 0
    assert "local-dir:out" in said.out
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(images), ours(images), rtol=1e-5, atol=1e-5)  # float32, other kernels


def test_json_says_what_was_written(shell) -> None:
    said = shell("export", "run", "model.npz", "--to", "google", "--json")
    assert said.code == 0
    assert said.json["format"] == "google"
    assert said.json["files"] == ["model.npz"]
    assert said.json["classes"] == 2


def test_a_format_that_cannot_hold_the_model_says_why_and_writes_nothing(shell) -> None:
    said = shell("export", "averaging", "out", "--to", "huggingface")
    assert said.code == 1
    assert len(said.errors) == 1
    assert "Hugging Face ViT cannot hold this model: mean pooling" in said.errors[0]
    assert len(said.hints) == 1
    assert not Path("out").exists()


def test_what_is_there_is_not_overwritten(shell) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine")
    for out in ("out", "run", "out/mine.txt"):
        said = shell("export", "run", out)
        assert said.code == 1
        assert "there is something already" in said.errors[0]
    assert [path.name for path in Path("out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run", "out", "--to", "hugingface"), "no format of weights is called hugingface"),
        (("nowhere", "out"), "nowhere"),
    ],
)
def test_mistakes_are_named(shell, arguments, error) -> None:
    said = shell("export", *arguments)
    assert said.code == 1
    assert error in said.errors[0]
    assert not Path("out").exists()
