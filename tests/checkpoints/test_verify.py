"""verify: the drawn image tells a good copy from a changed one, by stored logits or by the library it is from."""

from pathlib import Path

import pytest
import torch
from oracles import import_timm, import_torchvision, import_transformers

from vitkit.checkpoints import native, verify
from vitkit.checkpoints.adapt import with_channels
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called
from vitkit.checkpoints.mapping import read
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
    assert found.max_difference < 2e-7  # the same kernels; on some CPUs what they sum first depends on where it lies
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
    "google": ("google", ()),
    "google, mean": ("google", ("pooling=mean",)),
    "big_vision": ("big_vision", ()),
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
    assert found.format == kind


@pytest.mark.parametrize("name", ["timm", "google", "huggingface", "torchvision"])
def test_a_file_read_wrong_does_not_agree(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads the file as it is; what we make of it is changed here behind its back."""
    ORACLES[verify.LIBRARIES[FOREIGN[name][0]]]()
    path = written(tmp_path, name)

    def misread(rules: object, tensors: object) -> dict[str, torch.Tensor]:
        state = dict(read(rules, tensors))
        return state | {"norm.bias": state["norm.bias"] + 0.01}

    monkeypatch.setattr(verify, "read", misread)
    found = verify.verify(path, format=FOREIGN[name][0])
    assert not found.agrees
    assert found.max_difference is not None
    assert found.max_difference > found.tolerance


def test_where_the_library_is_broken_there_is_nothing_to_compare_with_and_the_reason_is_said(
    tmp_path, monkeypatch
) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator timm::nms does not exist")

    import_timm()
    path = written(tmp_path, "timm")
    monkeypatch.setattr(verify, "_mend_torchvision", lambda: None)
    monkeypatch.setattr(verify.importlib, "import_module", broken)
    found = verify.verify(path)
    assert found.max_difference is None
    reason = "timm is installed, and cannot be imported: operator timm::nms does not exist"
    assert found.against == f"nothing to compare with: {reason}"


@pytest.mark.parametrize("name", ["google", "timm", "huggingface", "torchvision"])
def test_where_the_library_is_absent_it_is_named(tmp_path, monkeypatch, name) -> None:
    path, library = written(tmp_path, name), verify.LIBRARIES[FOREIGN[name][0]]
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    found = verify.verify(path, format=FOREIGN[name][0])
    assert (found.max_difference, found.agrees, found.format) == (None, False, FOREIGN[name][0])
    reason = f"{library}, which could run it, is not installed (pip install {library})"
    assert found.against == f"nothing to compare with: {reason}"


def test_a_hidden_layer_before_the_logits_is_nothing_timm_has(tmp_path: Path) -> None:
    import_timm()
    write_as(format_called("google"), tmp_path / "model.npz", artefact("head.pre_logits=64"))
    found = verify.verify(tmp_path / "model.npz")
    assert found.max_difference is None
    assert "timm cannot run it" in found.against


def test_an_adapted_model_agrees_with_logits_of_its_own(tmp_path: Path) -> None:
    native.save(tmp_path / "old", artefact())
    grey, _ = with_channels(native.load(tmp_path / "old"), 1)
    native.save(tmp_path / "grey", grey)
    assert verify.verify(tmp_path / "grey").agrees
    assert native.stored_reference(tmp_path / "grey") != native.stored_reference(tmp_path / "old")


def test_a_damaged_artefact_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    native.save(tmp_path, artefact())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged"):
        verify.verify(tmp_path)


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
