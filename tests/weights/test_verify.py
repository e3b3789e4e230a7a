"""Tests of verification against stored logits and against the libraries of origin."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracles import import_timm, import_torchvision, import_transformers

import vitkit
from vitkit.core.config import parse_assignments
from vitkit.core.errors import WeightsError
from vitkit.core.files import write_json
from vitkit.data.preprocessing import Preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights import verify
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.artifact import FILES
from vitkit.weights.bundle import ModelBundle, logits_difference, reference_image
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.rules import apply_rules
from vitkit.zoo.registry import configure, create

SIZES = ("width=64", "depth=2", "heads=1", "mlp_dim=128")


def make_bundle(*settings: str, num_classes: int = 3) -> ModelBundle:
    config = configure(
        "Ti/16", image_size=32, patch_size=8, num_classes=num_classes, settings=parse_assignments((*SIZES, *settings))
    )
    model = create(config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for number, (_, tensor) in enumerate(sorted(state.items())):
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    labels = ("cat", "dog", "owl")[:num_classes]
    return ModelBundle(
        name="tiny", config=config, state=state, preprocessing=Preprocessing(image_size=32), labels=labels
    )


# Reference image


def test_reference_image_is_deterministic() -> None:
    image = reference_image(configure("Ti/16", image_size=(16, 24), patch_size=8, channels=5))
    assert image.shape == (1, 5, 16, 24)
    # Computed by hand: stripes outside the disc, their bright half inside it (around row 8 and column 12).
    pixels = (image[0] * 127.5 + 127.5).round().to(torch.int64)
    assert [pixels[channel, 0, 3].item() for channel in range(5)] == [15, 21, 27, 33, 39]
    assert pixels[0, 2, 4].item() == (2 * 7) ^ (4 * 5)
    assert pixels[1, 8, 12].item() == 255 - ((8 * 11) ^ (12 * 7)) // 2
    assert len({plane.numpy().tobytes() for plane in image[0]}) == 5


def test_incomparable_logits_differ_infinitely() -> None:
    assert logits_difference(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert logits_difference(torch.zeros(1), torch.tensor([float("nan")])) == float("inf")
    assert logits_difference(torch.zeros(0), []) == 0.0


# Artifacts


def test_artifact_agrees_with_stored_logits(tmp_path: Path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle())
    result = vitkit.verify(tmp_path)
    assert result.max_difference < 2e-7  # the same kernels; on some CPUs the order of sums depends on alignment
    assert result.agrees
    assert "stored reference logits" in result.against


def test_changed_weights_disagree_despite_new_checksums(tmp_path: Path) -> None:
    saved = make_bundle()
    artifact_io.write_artifact(tmp_path, saved)
    stored = (tmp_path / "reference.json").read_bytes()
    saved.state["blocks.1.mlp.fc2.bias"][0] += 0.5
    artifact_io.write_artifact(tmp_path, saved)
    (tmp_path / "reference.json").write_bytes(stored)
    artifact_io.write_checksums(tmp_path, FILES)
    result = vitkit.verify(tmp_path)
    assert result.max_difference is not None
    assert result.max_difference > result.tolerance
    assert not result.agrees


def test_artifact_without_logits_is_not_compared(tmp_path: Path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle())
    write_json(tmp_path / "reference.json", {"image": "drawn, 1", "logits": None})
    artifact_io.write_checksums(tmp_path, FILES)
    result = vitkit.verify(tmp_path)
    assert (result.max_difference, result.agrees) == (None, False)
    assert result.against.startswith("nothing to compare with")


# Files of other libraries

FILES_BY_FORMAT = {
    "timm": ("timm", ("block.activation=gelu_tanh",)),
    "timm, distilled": ("timm", ("tokens.distillation=true",)),
    "timm, registers": ("timm", ("tokens.registers=2",)),
    "deit": ("deit", ("block.activation=gelu_erf",)),
    "deit, distilled": ("deit", ("block.activation=gelu_erf", "tokens.distillation=true")),
    "mae": ("mae", ("block.activation=gelu_erf", "pooling=mean", "tokens.class_token=true", "head.norm=after_pooling")),
    "huggingface": ("huggingface", ()),
    "huggingface-deit": ("huggingface-deit", ("tokens.distillation=true",)),
    "huggingface-dinov2": ("huggingface-dinov2", ("block.layer_scale=0.5",)),
    "torchvision": ("torchvision", ("block.activation=gelu_erf",)),
    "google": ("google", ()),
    "google, mean": ("google", ("pooling=mean",)),
    "big_vision": ("big_vision", ()),
}
ORACLES = {"timm": import_timm, "transformers": import_transformers, "torchvision": import_torchvision}


def write_file(folder: Path, name: str) -> Path:
    kind, settings = FILES_BY_FORMAT[name]
    to = get_format(kind)
    bundle = make_bundle(*settings, num_classes=0 if kind == "huggingface-dinov2" else 3)
    out = folder / {"safetensors": "folder", "torch": "model.pth", "npz": "model.npz"}[to.file_type]
    write_format(to, out, bundle)
    return out


@pytest.mark.parametrize("name", FILES_BY_FORMAT)
def test_file_agrees_with_its_library(tmp_path: Path, name: str) -> None:
    kind = FILES_BY_FORMAT[name][0]
    library = get_format(kind).library
    ORACLES[library]()
    result = vitkit.verify(write_file(tmp_path, name), format=kind)
    assert result.against.startswith(library), result
    assert result.max_difference is not None
    assert result.max_difference <= 1e-5  # what the weights guide promises, in float32
    assert result.agrees
    assert result.format == kind


@pytest.mark.parametrize("name", ["timm", "google", "huggingface", "torchvision"])
def test_misread_file_disagrees(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads the file correctly, vitkit does not."""
    ORACLES[get_format(FILES_BY_FORMAT[name][0]).library]()
    path = write_file(tmp_path, name)

    def misread(rules: object, tensors: object) -> dict[str, torch.Tensor]:
        state = dict(apply_rules(rules, tensors))
        return state | {"norm.bias": state["norm.bias"] + 0.01}

    monkeypatch.setattr(verify, "apply_rules", misread)
    result = vitkit.verify(path, format=FILES_BY_FORMAT[name][0])
    assert not result.agrees
    assert result.max_difference is not None
    assert result.max_difference > result.tolerance


def test_broken_library_is_reported(tmp_path, monkeypatch) -> None:
    def broken(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("timm"):
            raise RuntimeError("operator timm::nms does not exist")
        return import_module(name, package)

    import_timm()
    path = write_file(tmp_path, "timm")
    monkeypatch.setattr(verify, "_declare_torchvision_ops", lambda: None)
    monkeypatch.setattr(verify, "_import_quietly", broken)
    result = vitkit.verify(path)
    assert result.max_difference is None
    reason = "timm is installed but cannot be imported: operator timm::nms does not exist"
    assert result.against == f"nothing to compare with: {reason}"


@pytest.mark.parametrize("name", ["google", "timm", "huggingface", "torchvision"])
def test_missing_library_is_named(tmp_path, monkeypatch, name) -> None:
    path, library = write_file(tmp_path, name), get_format(FILES_BY_FORMAT[name][0]).library
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    result = vitkit.verify(path, format=FILES_BY_FORMAT[name][0])
    assert (result.max_difference, result.agrees, result.format) == (None, False, FILES_BY_FORMAT[name][0])
    reason = f"{library}, which could run it, is not installed (pip install {library})"
    assert result.against == f"nothing to compare with: {reason}"


def test_pre_logits_cannot_be_compared_with_timm(tmp_path: Path) -> None:
    import_timm()
    write_format(get_format("google"), tmp_path / "model.npz", make_bundle("head.pre_logits=64"))
    result = vitkit.verify(tmp_path / "model.npz")
    assert result.max_difference is None
    assert "timm cannot run it" in result.against


def test_adapted_model_has_reference_logits_of_its_own(tmp_path: Path) -> None:
    artifact_io.write_artifact(tmp_path / "old", make_bundle())
    gray, _ = adapt_bundle(artifact_io.read_artifact(tmp_path / "old"), AdaptRequest(channels=1))
    artifact_io.write_artifact(tmp_path / "gray", gray)
    assert vitkit.verify(tmp_path / "gray").agrees
    assert artifact_io.read_reference_logits(tmp_path / "gray") != artifact_io.read_reference_logits(tmp_path / "old")


def test_damaged_artifact_is_an_error(tmp_path: Path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged"):
        vitkit.verify(tmp_path)


def test_library_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = import_timm()
    path = write_file(tmp_path, "timm")

    def fail(*arguments: object, **settings: object) -> None:
        raise RuntimeError("Unknown model (vit_of_nobody)")

    monkeypatch.setattr(timm, "create_model", fail)
    result = vitkit.verify(path)
    assert result.max_difference is None
    assert "timm cannot run it: Unknown model (vit_of_nobody)" in result.against


def test_invalid_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match=r"model\.npz"):
        vitkit.verify(tmp_path / "model.npz")


def test_artifact_without_checksums_is_not_read_as_timm(tmp_path: Path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle())
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(WeightsError, match="no model in this directory"):
        vitkit.verify(tmp_path)
