"""The way of the weights guide, from a checkpoint on disk to a fine-tuned model, for every format there is."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.checkpoints import native
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import FORMATS, format_called
from vitkit.checkpoints.native import Artefact
from vitkit.cli.main import main
from vitkit.data.transforms import Preprocessing
from vitkit.zoo.lookup import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
ERF = "block.activation=gelu_erf"
FEATURES = (ERF, "block.layer_scale=0.5", "classes=0")
SETTINGS: dict[str, tuple[str, ...]] = {
    "vitkit": (),
    "google": (),
    "big_vision": (),
    "timm": (ERF,),
    "deit": (ERF,),
    "mae": (ERF, "pooling=mean", "tokens.class_token=true", "head.norm=after_pooling"),
    "dinov2": FEATURES,
    "dinov3": (*FEATURES, "positions.kind=rotary", "block.norm_eps=1e-5", "tokens.registers=4"),
    "huggingface": (),
    "huggingface-deit": ("tokens.distillation=true",),
    "huggingface-mae": ("classes=0",),
    "huggingface-dinov2": ("block.layer_scale=0.5", "classes=0"),
    "torchvision": (ERF,),
}
"""A model that a format can hold."""
SHORT = ["steps=1", "batch_size=8", "workers=0"]


def model_for(name: str) -> ModelConfig:
    if name == "bit":
        return configure("BiT-R50x1", image_size=32, classes=3, settings=["units=[1]"])
    return configure("Ti/16", image_size=32, patch_size=8, classes=3, settings=(*SIZES, *SETTINGS[name]))


def checkpoint(name: str, folder: Path) -> Path:
    """A small file or folder in a format."""
    config = model_for(name)
    state = create(config, generator=torch.Generator().manual_seed(0)).state_dict()
    labels = tuple(map(str, range(config.classes)))
    made = Artefact(name="small", config=config, state=state, preprocessing=Preprocessing(image_size=32), labels=labels)
    if name == "vitkit":
        native.save(folder / "checkpoint", made)
        return folder / "checkpoint"
    to = format_called(name)
    out = folder / ("checkpoint" + {"npz": ".npz", "torch": ".pth", "safetensors": ""}[to.writes])
    write_as(to, out, made)
    return out


@pytest.mark.parametrize("name", ["vitkit", *(known.name for known in FORMATS)])
def test_the_way_goes_from_every_format_to_a_fine_tuned_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """See what it is, fine-tune it at another size on grey images, verify what came out."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(12):
        place = Path("photos", ("cat", "dog")[number % 2], f"{number}.png")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 20), dtype=np.uint8)).save(place)
    file = checkpoint(name, tmp_path).name
    assert main(["weights", "info", file, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["missing"], said["extra"]) == ([], [])
    assert main(["finetune", file, "photos", "--out", "run", "image_size=64", "channels=1", *SHORT]) == 0
    assert "first kernel: 3 channels → 1" in capsys.readouterr().err
    assert main(["weights", "verify", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"]
    made = native.load("run")
    assert (made.config.image_size, made.config.channels, made.labels) == (64, 1, ("cat", "dog"))
