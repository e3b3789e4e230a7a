"""Test of the workflow in the weights guide, from a file of each format to a fine-tuned model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.cli.main import main
from vitkit.core.config import parse_assignments
from vitkit.data.preprocessing import Preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.zoo.registry import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
ERF = "block.activation=gelu_erf"
FEATURES = (ERF, "block.layer_scale=0.5", "num_classes=0")
PUBLISHED_WIDTH = ("width=768", "heads=12")
"""A width that has one number of heads in published models, which these files do not store."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "vitkit": (),
    "google": (),
    "timm": (ERF,),
    "mae": (ERF, *PUBLISHED_WIDTH, "pooling=mean", "tokens.class_token=true", "head.norm=after_pooling"),
    "dinov3": (*FEATURES, "positions.kind=rotary", "block.norm_eps=1e-5", "tokens.registers=4"),
    "huggingface-deit": ("tokens.distillation=true",),
    "torchvision": (ERF, *PUBLISHED_WIDTH),
}
"""Settings of a model that each format can represent."""
REPRESENTATIVE = ("vitkit", "google", "bit", "timm", "mae", "dinov3", "huggingface-deit", "torchvision")
"""One format of each family of rules; loading is tested for every format in tests/weights."""
SHORT = ["steps=1", "batch_size=8", "workers=0"]


def model_for(name: str) -> ModelConfig:
    if name == "bit":
        return configure("BiT-R50x1", image_size=32, num_classes=3, settings={"units": [1]})
    return configure(
        "Ti/16",
        image_size=32,
        patch_size=8,
        num_classes=3,
        settings=parse_assignments(SIZES) | parse_assignments(SETTINGS[name]),
    )


def checkpoint(name: str, folder: Path) -> Path:
    """Write a small model in a format."""
    config = model_for(name)
    state = create(config, generator=torch.Generator().manual_seed(0)).state_dict()
    labels = tuple(map(str, range(config.num_classes)))
    bundle = ModelBundle(
        name="small", config=config, state=state, preprocessing=Preprocessing(image_size=32), labels=labels
    )
    if name == "vitkit":
        artifact_io.write_artifact(folder / "checkpoint", bundle)
        return folder / "checkpoint"
    to = get_format(name)
    stem = "mae_finetuned_small" if name == "mae" else "checkpoint"
    out = folder / (stem + {"npz": ".npz", "torch": ".pth", "safetensors": ""}[to.file_type])
    write_format(to, out, bundle)
    return out


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_weights_of_any_family_can_be_fine_tuned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Describe it, fine-tune it at another size on gray images, and verify the result."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(12):
        path = Path("photos", ("cat", "dog")[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 20), dtype=np.uint8)).save(path)
    file = checkpoint(name, tmp_path).name
    assert main(["weights", "info", file, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["missing"], info["extra"]) == ([], [])
    assert main(["finetune", file, "photos", "--out", "run", "image_size=64", "channels=1", *SHORT]) == 0
    assert "first kernel: 3 channels → 1" in capsys.readouterr().err
    assert main(["weights", "verify", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"]
    bundle = artifact_io.read_artifact("run")
    assert (bundle.config.image_size, bundle.config.channels, bundle.labels) == (64, 1, ("cat", "dog"))
