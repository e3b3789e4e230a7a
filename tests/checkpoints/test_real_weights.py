"""Real weights and real photos: the right labels after loading, after every conversion, and at other resolutions."""

import csv
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import import_timm
from torch import Tensor

import vitkit
from vitkit.checkpoints import native
from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.foreign import FORMATS, format_called, identify, load, load_as_stored
from vitkit.checkpoints.native import Artefact
from vitkit.checkpoints.ready import ready
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import pair
from vitkit.data.decode import decode
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.model.config import ViTConfig
from vitkit.zoo.lookup import configure

DATA = Path(__file__).parents[3] / "shared" / "data"
PHOTOS = DATA / "photos"
DINOV2 = Path(os.environ.get("VITKIT_TEST_DATA", DATA)) / "dinov2-small" / "dinov2_vits14_pretrain.pth"
"""Where `shared/data/get FOLDER dinov2-small` puts it, with VITKIT_TEST_DATA for the folder."""
AUGREG, DEIT = "Ti_16-augreg-imagenet.npz", "deit_tiny_patch16_224.pth"
OWN = {AUGREG: "google", DEIT: "deit"}
"""The format of each file."""
RIGHT = {AUGREG: 40, DEIT: 40}
"""Of every 20th photo, 50, as the weights' own library feeds them. They are mostly training images."""
HELD = {AUGREG: {"google", "big_vision", "timm", "huggingface"}, DEIT: {"deit", "timm", "huggingface", "torchvision"}}
"""Formats that can say all that the model computes: google the GELU of one, torchvision that of the other."""
SUFFIXES = {"npz": ".npz", "torch": ".pth", "safetensors": ""}
CLOSE = 1
"""Another processor may round two close logits the other way."""

both = pytest.mark.parametrize("file", [AUGREG, DEIT])


def listed() -> list[dict[str, str]]:
    if not (PHOTOS / "labels.csv").is_file():
        pytest.skip(f"{PHOTOS} is not there")
    with (PHOTOS / "labels.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))[::20]


@cache
def batch(how: Preprocessing) -> Tensor:
    """Every 20th photo as a model takes it."""
    pixels = [how.pixels(decode((PHOTOS / row["file_name"]).read_bytes())) for row in listed()]
    return how.normalise(torch.from_numpy(np.stack(pixels)))


@cache
def published(file: str) -> Artefact:
    if not (DATA / "weights" / file).is_file():
        pytest.skip(f"{DATA / 'weights' / file} is not there")
    return load(DATA / "weights" / file)


@torch.inference_mode()
def logits_of(artefact: Artefact, how: Preprocessing, *, every: int = 1) -> Tensor:
    return torch.cat([ready(artefact)(some) for some in batch(how)[::every].split(10)])


@cache
def published_logits(file: str) -> Tensor:
    return logits_of(published(file), published(file).preprocessing)


def right(logits: Tensor, *, every: int = 1) -> int:
    labels = torch.tensor([int(row["class_index"]) for row in listed()[::every]])
    return int((logits.argmax(1) == labels).sum())


def same_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def there(to: str, folder: Path, artefact: Artefact) -> Artefact:
    """The model, written in a format and loaded again."""
    out = folder / f"{to}{SUFFIXES[format_called(to).writes]}"
    write_as(format_called(to), out, artefact)
    return load(out)


def resampled_by(origin: str, config: ViTConfig) -> ViTConfig:
    """The model as another library has it, which resamples positions by another kernel."""
    return configure(config, settings=[f"positions.origin={origin}"])


def at_size(artefact: Artefact, size: int) -> Artefact:
    config = configure(artefact.config, image_size=size)
    state = adapt(artefact.state, old=artefact.config, new=config).state
    feeding = replace(artefact.preprocessing, image_size=size)
    return replace(artefact, config=config, state=state, preprocessing=feeding)


# Loading


@both
def test_real_weights_know_real_photos(file: str) -> None:
    logits = published_logits(file)
    assert logits.shape == (50, 1000)
    assert abs(right(logits) - RIGHT[file]) <= CLOSE


@both
def test_a_loaded_model_prepares_photos_itself(file: str) -> None:
    expected = published_logits(file)
    model = vitkit.load(DATA / "weights" / file)
    with torch.inference_mode():
        logits = torch.cat([model(model.preprocess(PHOTOS / row["file_name"])) for row in listed()[:5]])
    # the same numbers in batches of another size, whose products are summed in another order
    torch.testing.assert_close(logits, expected[:5], atol=1e-4, rtol=1e-5)
    assert torch.equal(logits.argmax(1), expected[:5].argmax(1))


# Converting


@both
def test_formats_that_hold_the_model_are_known(file: str) -> None:
    assert {known.name for known in FORMATS if not known.refuses(published(file).config)} >= HELD[file]


@pytest.mark.parametrize(("file", "to"), [(file, to) for file, formats in HELD.items() for to in sorted(formats)])
def test_labels_are_the_same_there_and_the_bits_the_same_back(file: str, to: str, tmp_path: Path) -> None:
    original = published(file)
    converted = there(to, tmp_path, original)
    assert same_bits(converted.state, original.state)
    assert isinstance(converted.config, ViTConfig)
    assert isinstance(original.config, ViTConfig)
    assert resampled_by(original.config.positions.origin, converted.config) == original.config
    logits = logits_of(converted, original.preprocessing)
    assert torch.equal(logits, published_logits(file))  # the same numbers in the same order
    assert abs(right(logits) - RIGHT[file]) <= CLOSE
    back = there(OWN[file], tmp_path, converted)
    assert same_bits(back.state, original.state)
    assert (back.config, back.preprocessing, back.labels) == (
        original.config,
        original.preprocessing,
        original.labels,
    )


@both
@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_folder_keeps_what_the_photos_are_fed_by(file: str, to: str, tmp_path: Path) -> None:
    assert there(to, tmp_path, published(file)).preprocessing == published(file).preprocessing


@pytest.mark.parametrize(
    ("file", "origin"),
    [(AUGREG, "huggingface"), (DEIT, "deit")],  # timm always resizes with antialias, as Hugging Face does
)
def test_a_folder_of_timm_alone_is_fed_as_its_config_says(file: str, origin: str, tmp_path: Path) -> None:
    there("timm", tmp_path, published(file))
    (tmp_path / "timm" / native.PREPROCESSING).unlink()
    assert load(tmp_path / "timm").preprocessing == preprocessing(origin, image_size=224)


def test_what_is_said_beside_weights_is_followed_or_named(tmp_path: Path) -> None:
    there("huggingface", tmp_path, published(DEIT))
    said = {"image_processor_type": "BitImageProcessor", "size": 128, "crop_size": 112, "colour": "warm"}
    native.write_json(tmp_path / "huggingface" / native.PREPROCESSING, said)
    with open_tensors(tmp_path / "huggingface") as tensors:
        found = identify(tensors)
    assert found.preprocessing.resized == (256, 256)  # the same share of the model's images
    assert [note for note in found.notes if "unknown and not followed: colour" in note]
    assert [note for note in found.notes if "112×112, the model takes 224×224" in note]


@both
def test_our_own_folder_keeps_everything(file: str, tmp_path: Path) -> None:
    original = published(file)
    native.save(tmp_path, original)
    again = load(tmp_path)
    assert same_bits(again.state, original.state)
    assert replace(again, state={}) == replace(original, state={})


@pytest.mark.parametrize(
    ("file", "to", "activation", "count"),
    [(AUGREG, "torchvision", "gelu_erf", 40), (DEIT, "google", "gelu_tanh", 40)],
)
def test_another_gelu_is_refused_until_it_is_asked_for(
    file: str, to: str, activation: str, count: int, tmp_path: Path
) -> None:
    original = published(file)
    with pytest.raises(WeightsError, match="GELU"):
        there(to, tmp_path, original)
    wished = replace(original, config=configure(original.config, settings=[f"block.activation={activation}"]))
    converted = there(to, tmp_path, wished)
    assert same_bits(converted.state, original.state)
    logits = logits_of(converted, original.preprocessing)
    difference = (logits - published_logits(file)).abs().max()
    assert 1e-4 < difference < 0.5  # other answers, by what the two forms of GELU differ in
    assert abs(right(logits) - count) <= CLOSE


# Another resolution

AT_SIZE = {(AUGREG, 160): 18, (AUGREG, 288): 22, (AUGREG, 384): 21, (DEIT, 160): 21, (DEIT, 288): 22, (DEIT, 384): 20}
"""Of every 40th photo, 25; at 224 pixels they are 22 and 21."""


@pytest.mark.parametrize(("file", "size"), AT_SIZE)
def test_adapted_weights_know_the_photos_at_another_resolution(file: str, size: int) -> None:
    adapted = at_size(published(file), size)
    assert isinstance(adapted.config, ViTConfig)
    assert adapted.config.grid == (size // 16, size // 16)
    logits = logits_of(adapted, adapted.preprocessing, every=2)
    assert abs(right(logits, every=2) - AT_SIZE[file, size]) <= CLOSE


@both
def test_adapting_to_the_same_resolution_changes_nothing(file: str) -> None:
    assert same_bits(at_size(published(file), 224).state, published(file).state)


# DINOv2


def test_dinov2_is_known_by_its_file_and_gives_timms_features() -> None:
    if not DINOV2.is_file():
        pytest.skip(f"{DINOV2} is not there: shared/data/get fetches it, VITKIT_TEST_DATA names its folder")
    with open_tensors(DINOV2) as tensors:
        found = identify(tensors)
        theirs = import_timm().create_model("vit_small_patch14_dinov2", num_classes=0).eval()
        theirs.load_state_dict(dict(tensors), strict=True)
    assert (found.format.name, found.fit.missing, found.fit.extra) == ("dinov2", (), ())
    assert found.preprocessing == preprocessing("dinov2", image_size=518)
    assert (pair(found.fed_size), vitkit.load(DINOV2).config.grid) == ((224, 224), (16, 16))
    model = ready(load_as_stored(DINOV2))
    images = model.preprocess(PHOTOS / listed()[0]["file_name"])
    with torch.inference_mode():
        features, expected = model(images), theirs(images)
    # 12 layers of float32 in another order of summation, on features of up to 6
    torch.testing.assert_close(features / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=0)
