"""`vitkit.load` and `vitkit.save`: a model from anywhere is ready to run, and goes back as it is."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_transformers
from PIL import Image

import vitkit
from vitkit.checkpoints import native
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called
from vitkit.core.errors import ConfigError, DataError, InputError
from vitkit.data.transforms import Preprocessing

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")


def created(channels: int = 3, classes: int = 2) -> torch.nn.Module:
    model = vitkit.create("Ti/16", image_size=32, patch_size=8, channels=channels, classes=classes, settings=SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def photo(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_the_names_are_there_and_importing_vitkit_imports_no_torch() -> None:
    assert set(dir(vitkit)) == set(vitkit.__all__) >= {"create", "load", "models", "save"}
    said = subprocess.run(
        [sys.executable, "-c", "import sys, vitkit; dir(vitkit); print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "False"


def test_a_created_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    model = created()
    vitkit.save(model, tmp_path, labels=["cat", "dog"])
    loaded = vitkit.load(tmp_path)
    assert not loaded.training
    assert (loaded.config, loaded.labels) == (model.config, ("cat", "dog"))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert loaded.preprocess.preprocessing.antialias is False  # the paper's, where none was given


def test_without_labels_classes_are_numbered(tmp_path: Path) -> None:
    vitkit.save(created(), str(tmp_path))
    assert vitkit.load(str(tmp_path)).labels == ("0", "1")


def test_a_loaded_model_keeps_what_it_knows_and_what_was_changed_in_it(tmp_path: Path) -> None:
    how = Preprocessing(image_size=32, resize="crop", filter="bicubic", mean=(0.4,), deviation=(0.2,))
    vitkit.save(created(), tmp_path / "one", labels=["cat", "dog"], preprocessing=how)
    model = vitkit.load(tmp_path / "one")
    with torch.no_grad():
        model.head.bias += 1
    vitkit.save(model, tmp_path / "two")
    again = vitkit.load(tmp_path / "two")
    assert (again.labels, again.preprocess, again.name) == (("cat", "dog"), model.preprocess, model.name)
    assert again.preprocess.preprocessing == how
    assert torch.equal(again.head.bias, model.head.bias)


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_weights_of_other_origins_are_loaded_ready(tmp_path: Path, to: str) -> None:
    vitkit.save(created(), tmp_path / "ours", labels=["cat", "dog"])
    artefact = native.load(tmp_path / "ours")
    write_as(format_called(to), tmp_path / "theirs.npz", artefact)
    loaded = vitkit.load(tmp_path / "theirs.npz")
    assert len(loaded.labels) == 2
    assert loaded(loaded.preprocess(photo())).shape == (1, 2)


def test_transformers_loads_what_save_writes(tmp_path: Path) -> None:
    transformers = import_transformers()
    model = created()
    vitkit.save(model, tmp_path, labels=["cat", "dog"])
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(images).logits, model(images), rtol=1e-5, atol=1e-5)  # float32, other kernels
    assert theirs.config.id2label == {0: "cat", 1: "dog"}


def test_labels_and_preprocessing_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 2 labels, got 1"):
        vitkit.save(created(), tmp_path, labels=["cat"])
    with pytest.raises(ConfigError, match="expected 3 channels, got 1"):
        vitkit.save(created(), tmp_path, preprocessing=Preprocessing(channels=1, mean=(0.5,), deviation=(0.5,)))
    assert not list(tmp_path.iterdir())


# Images


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA"])
def test_an_image_gives_the_same_in_every_form(tmp_path: Path, channels: int, mode: str) -> None:
    vitkit.save(created(channels), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    image = photo("RGB" if mode == "P" else mode).convert(mode)
    (tmp_path / "image.png").write_bytes(encoded(image))
    forms = [tmp_path / "image.png", str(tmp_path / "image.png"), encoded(image), image]
    if mode in ("RGB", "L"):
        forms.append(np.asarray(image))
    batches = [preprocess(form) for form in forms]
    assert batches[0].shape == (1, channels, 32, 32)
    assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_a_photo_that_lies_on_its_side_is_turned_in_every_form(tmp_path: Path) -> None:
    vitkit.save(created(), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    exif = Image.Exif()
    exif[0x0112] = 6
    photo().save(tmp_path / "lying.png", exif=exif)
    with Image.open(tmp_path / "lying.png") as image:
        assert torch.equal(preprocess(image), preprocess(tmp_path / "lying.png"))


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    vitkit.save(created(), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    (tmp_path / "note.txt").write_text("hello")
    for name in ("note.txt", "nowhere.png"):
        with pytest.raises(DataError, match=name):
            preprocess(tmp_path / name)
    with pytest.raises(DataError, match="8 bits"):
        preprocess(Image.new("F", (4, 4)))
    with pytest.raises((DataError, InputError)):
        preprocess(np.zeros((4, 4, 2), dtype=np.uint8))
