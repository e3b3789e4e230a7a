"""verify: the drawn image tells a good copy from a changed one, by stored logits or by the library it is from."""

from pathlib import Path

import pytest
import torch
from oracles import import_timm, import_torchvision, import_transformers

from vitkit.checkpoints import native, verify
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called
from vitkit.checkpoints.native import FILES, FIRST_FILES, Artefact
from vitkit.checkpoints.reference import drawn_image, largest_difference
from vitkit.core.errors import WeightsError
from vitkit.data.transforms import Preprocessing
from vitkit.zoo.lookup import configure, create

SIZES = ("width=64", "depth=2", "heads=1", "mlp_dim=128")


def artefact(*settings: str, classes: int = 3) -> Artefact:
    config = configure("Ti/16", image_size=32, patch_size=8, classes=classes, settings=(*SIZES, *settings))
    model = create(config)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for number, (_, tensor) in enumerate(sorted(state.items())):
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    labels = ("cat", "dog", "owl")[:classes]
    return Artefact(name="tiny", config=config, state=state, preprocessing=Preprocessing(image_size=32), labels=labels)


# The image


def test_the_drawn_image_is_the_same_on_every_machine() -> None:
    image = drawn_image(configure("Ti/16", image_size=(16, 24), patch_size=8, channels=5))
    assert image.shape == (1, 5, 16, 24)
    # By hand: outside the disc the woven stripes, inside it (around row 8 and column 12) their bright half.
    pixels = (image[0] * 127.5 + 127.5).round().to(torch.int64)
    assert [pixels[channel, 0, 3].item() for channel in range(5)] == [15, 21, 27, 33, 39]
    assert pixels[0, 2, 4].item() == (2 * 7) ^ (4 * 5)
    assert pixels[1, 8, 12].item() == 255 - ((8 * 11) ^ (12 * 7)) // 2
    assert len({plane.numpy().tobytes() for plane in image[0]}) == 5


def test_answers_of_other_lengths_or_of_nan_differ_infinitely() -> None:
    assert largest_difference(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert largest_difference(torch.zeros(1), torch.tensor([float("nan")])) == float("inf")
    assert largest_difference(torch.zeros(0), []) == 0.0


# Our own


def test_an_artefact_agrees_with_its_stored_logits(tmp_path: Path) -> None:
    native.save(tmp_path, artefact())
    found = verify.verify(tmp_path)
    assert found.max_difference == 0.0  # the same machine, the same kernels
    assert found.agrees
    assert "saved with it" in found.against


def test_changed_weights_are_found_though_checksums_were_written_anew(tmp_path: Path) -> None:
    saved = artefact()
    native.save(tmp_path, saved)
    stored = (tmp_path / "reference.json").read_bytes()
    saved.state["blocks.1.mlp.fc2.bias"][0] += 0.5
    native.save(tmp_path, saved)
    (tmp_path / "reference.json").write_bytes(stored)
    native.write_checksums(tmp_path, FILES)
    found = verify.verify(tmp_path)
    assert found.max_difference is not None
    assert found.max_difference > found.tolerance
    assert not found.agrees


def test_an_artefact_without_logits_has_nothing_to_compare_with(tmp_path: Path) -> None:
    native.save(tmp_path, artefact())
    (tmp_path / "reference.json").unlink()
    native.write_checksums(tmp_path, FIRST_FILES)
    found = verify.verify(tmp_path)
    assert (found.max_difference, found.agrees) == (None, False)
    assert found.against.startswith("nothing to compare with")


# Others

FOREIGN = {
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
}
ORACLES = {"timm": import_timm, "transformers": import_transformers, "torchvision": import_torchvision}


def written(folder: Path, name: str) -> Path:
    kind, settings = FOREIGN[name]
    to = format_called(kind)
    made = artefact(*settings, classes=0 if kind == "huggingface-dinov2" else 3)
    out = folder / {"safetensors": "folder", "torch": "model.pth", "npz": "model.npz"}[to.writes]
    write_as(to, out, made)
    return out


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_agrees_with_the_library_it_is_from(tmp_path: Path, name: str) -> None:
    kind = FOREIGN[name][0]
    library = verify.LIBRARIES[kind]
    ORACLES[library]()
    found = verify.verify(written(tmp_path, name), format=kind)
    assert found.against.startswith(library), found
    assert found.max_difference is not None
    assert found.max_difference <= 1e-5  # what the weights guide promises, in float32
    assert found.agrees


def test_where_the_library_is_absent_or_broken_there_is_nothing_to_compare_with(tmp_path, monkeypatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    path = written(tmp_path, "timm")
    monkeypatch.setattr(verify.importlib, "import_module", broken)
    found = verify.verify(path)
    assert found.max_difference is None
    assert found.against == "nothing to compare with: timm is not installed, or does not work"


def test_googles_files_have_no_library_here(tmp_path: Path) -> None:
    write_as(format_called("google"), tmp_path / "model.npz", artefact())
    found = verify.verify(tmp_path / "model.npz")
    assert found.max_difference is None
    assert "Google" in found.against


def test_what_the_library_cannot_run_is_said(tmp_path: Path) -> None:
    import_timm()
    path = written(tmp_path, "timm")
    config = native.read_json(path / "config.json")
    native.write_json(path / "config.json", config | {"architecture": "vit_of_nobody"})
    found = verify.verify(path)
    assert found.max_difference is None
    assert "timm cannot run it: Unknown model (vit_of_nobody)" in found.against


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match=r"model\.npz"):
        verify.verify(tmp_path / "model.npz")


def test_an_artefact_without_checksums_is_an_error_and_not_timms(tmp_path: Path) -> None:
    native.save(tmp_path, artefact())
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(WeightsError, match="no trained model here"):
        verify.verify(tmp_path)
