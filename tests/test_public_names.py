"""Tests of the public functions `vitkit.load` and `vitkit.save`."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_transformers
from PIL import Image

import vitkit
from vitkit.core.errors import ConfigError, DataError, InputError
from vitkit.data.preprocessing import Preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format

SIZES = {"width": 64, "depth": 1, "heads": 1, "mlp_dim": 128}


def make_model(channels: int = 3, num_classes: int = 2) -> torch.nn.Module:
    model = vitkit.create(
        "Ti/16", image_size=32, patch_size=8, channels=channels, num_classes=num_classes, settings=SIZES
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def photo(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    model = make_model()
    vitkit.save(model, tmp_path, labels=["cat", "dog"])
    loaded = vitkit.load(tmp_path)
    assert not loaded.training
    assert (loaded.config, loaded.labels) == (model.config, ("cat", "dog"))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert loaded.preprocess.antialias is False  # the paper's preprocessing is the default


def test_default_labels_are_class_numbers(tmp_path: Path) -> None:
    vitkit.save(make_model(), str(tmp_path))
    assert vitkit.load(str(tmp_path)).labels == ("0", "1")


def test_saving_a_loaded_model_keeps_labels_and_changes(tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=32, resize="crop", interpolation="bicubic", mean=(0.4,), std=(0.2,))
    vitkit.save(make_model(), tmp_path / "one", labels=["cat", "dog"], preprocessing=preprocessing)
    model = vitkit.load(tmp_path / "one")
    with torch.no_grad():
        model.head.bias += 1
    vitkit.save(model, tmp_path / "two")
    again = vitkit.load(tmp_path / "two")
    assert (again.labels, again.preprocess, again.name) == (("cat", "dog"), model.preprocess, model.name)
    assert again.preprocess == preprocessing
    assert torch.equal(again.head.bias, model.head.bias)


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_load_accepts_other_formats(tmp_path: Path, to: str) -> None:
    vitkit.save(make_model(), tmp_path / "ours", labels=["cat", "dog"])
    bundle = artifact_io.read_artifact(tmp_path / "ours")
    write_format(get_format(to), tmp_path / "theirs.npz", bundle)
    loaded = vitkit.load(tmp_path / "theirs.npz")
    assert len(loaded.labels) == 2
    assert loaded(loaded.preprocess(photo())).shape == (1, 2)


def test_transformers_loads_what_save_writes(tmp_path: Path) -> None:
    transformers = import_transformers()
    model = make_model()
    vitkit.save(model, tmp_path, labels=["cat", "dog"])
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs(images).logits, model(images), rtol=1e-5, atol=1e-5)  # float32, other kernels
    assert theirs.config.id2label == {0: "cat", 1: "dog"}


def test_save_refuses_unsuitable_labels_and_preprocessing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 2 labels, got 1"):
        vitkit.save(make_model(), tmp_path, labels=["cat"])
    with pytest.raises(ConfigError, match="expected 3 channels, got 1"):
        vitkit.save(make_model(), tmp_path, preprocessing=Preprocessing(channels=1, mean=(0.5,), std=(0.5,)))
    assert not list(tmp_path.iterdir())


# Images


def encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "LA"])
def test_preprocess_accepts_every_form_of_an_image(tmp_path: Path, channels: int, mode: str) -> None:
    vitkit.save(make_model(channels), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    image = photo("RGB" if mode == "P" else mode).convert(mode)
    (tmp_path / "image.png").write_bytes(encode_png(image))
    forms = [tmp_path / "image.png", str(tmp_path / "image.png"), encode_png(image), image]
    if mode in ("RGB", "L"):
        forms.append(np.asarray(image))
    batches = [preprocess(form) for form in forms]
    assert batches[0].shape == (1, channels, 32, 32)
    assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_preprocess_applies_exif_orientation(tmp_path: Path) -> None:
    vitkit.save(make_model(), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    exif = Image.Exif()
    exif[0x0112] = 6
    photo().save(tmp_path / "lying.png", exif=exif)
    with Image.open(tmp_path / "lying.png") as image:
        assert torch.equal(preprocess(image), preprocess(tmp_path / "lying.png"))


def test_preprocess_names_unreadable_images(tmp_path: Path) -> None:
    vitkit.save(make_model(), tmp_path / "model")
    preprocess = vitkit.load(tmp_path / "model").preprocess
    (tmp_path / "note.txt").write_text("hello")
    for name in ("note.txt", "nowhere.png"):
        with pytest.raises(DataError, match=name):
            preprocess(tmp_path / name)
    with pytest.raises(DataError, match="8 bits"):
        preprocess(Image.new("F", (4, 4)))
    with pytest.raises((DataError, InputError)):
        preprocess(np.zeros((4, 4, 2), dtype=np.uint8))
