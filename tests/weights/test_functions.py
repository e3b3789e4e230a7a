"""Tests of describe_weights, convert, diff_weights, adapt and verify as Python functions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitkit
from vitkit.cli.main import main
from vitkit.core.errors import ConfigError, WeightsError

SETTINGS = {"width": 64, "depth": 1, "heads": 1, "mlp_dim": 64}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    created = vitkit.create("Ti/16", image_size=32, patch_size=8, num_classes=2, settings=SETTINGS)
    vitkit.save(created, "model", labels=["cat", "dog"])
    return Path("model")


CALLS = {
    "info": (lambda: vitkit.describe_weights("model"), ("info", "model")),
    "convert": (
        lambda: vitkit.convert("model", "out.npz", to="google", overwrite=True),
        ("convert", "model", "out.npz", "--to", "google", "--force"),
    ),
    "diff": (lambda: vitkit.diff_weights("model", "model"), ("diff", "model", "model")),
    "adapt": (
        lambda: vitkit.adapt("model", "out", image_size=16, overwrite=True),
        ("adapt", "model", "out", "--image-size", "16", "--force"),
    ),
    "verify": (lambda: vitkit.verify("model"), ("verify", "model")),
}


@pytest.mark.parametrize(("function", "arguments"), CALLS.values(), ids=CALLS)
def test_to_dict_equals_the_json_of_the_command(model, function, arguments, capsys) -> None:
    result = function().to_dict()
    assert main(["weights", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result))


@pytest.fixture
def pretrained(model: Path) -> tuple[str, ...]:
    """A directory called mae with a decoder, of which only the names of the tensors count."""
    encoder = vitkit.create("Ti/16", image_size=32, patch_size=8, num_classes=0, settings=SETTINGS)
    vitkit.save(encoder, "encoder")
    vitkit.convert("encoder", "mae", to="huggingface-mae")
    decoder = {f"decoder.decoder_embed.{name}": torch.ones(2, 64) for name in ("bias", "weight")}
    save_file(load_file("mae/model.safetensors") | decoder, "mae/model.safetensors", {"format": "pt"})
    return tuple(decoder)


def test_adapt_names_the_tensors_that_it_drops(pretrained, capsys) -> None:
    assert vitkit.adapt("mae", channels=1).dropped == pretrained
    assert main(["weights", "adapt", "mae", "out", "--channels", "1"]) == 0
    assert f"dropped: {', '.join(pretrained)}\n" in capsys.readouterr().out


def test_export_names_the_tensors_that_it_drops(pretrained, capsys) -> None:
    assert main(["export", "mae", "out", "--to", "timm"]) == 0
    assert f"dropped   {', '.join(pretrained)}\n" in capsys.readouterr().out
    assert vitkit.export("mae", "out", to="timm").dropped == pretrained


def test_adapt_without_out_writes_nothing(model) -> None:
    result = vitkit.adapt(model, channels=1, labels=["dog", "owl"])
    assert result.path is None
    assert [path.name for path in Path().iterdir()] == ["model"]
    assert result.model.labels == ("dog", "owl")
    with torch.no_grad():
        assert result.model(torch.rand(1, 1, 32, 32)).shape == (1, 2)


def test_adapt_refuses_labels_together_with_num_classes(model) -> None:
    with pytest.raises(ConfigError, match="labels already set"):
        vitkit.adapt(model, num_classes=3, labels=["a", "b", "c"])


def test_convert_refuses_to_overwrite(model) -> None:
    Path("out.npz").touch()
    with pytest.raises(WeightsError, match="already exists"):
        vitkit.convert(model, "out.npz", to="google")


def test_unsupported_format_leaves_an_existing_artifact_intact(model) -> None:
    vitkit.adapt(model, "bare", num_classes=0)
    with pytest.raises(WeightsError, match="cannot represent"):
        vitkit.convert("bare", "model", to="huggingface-deit", overwrite=True)
    assert vitkit.verify(model).agrees
