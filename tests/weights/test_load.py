"""Tests of loading: preprocessing, labels and image size of weight files of any format."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitkit
from vitkit.core.errors import UnknownNameError, WeightsError
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.model.config import BlockConfig, HeadConfig, TokenConfig, ViTConfig
from vitkit.training.build import load_pretrained
from vitkit.training.callbacks import Callback
from vitkit.training.config import ModelChoice, RunConfig
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.load import identify, labels_from_config, load_bundle, load_stored_bundle
from vitkit.zoo.registry import create

SMALL = ViTConfig(
    image_size=224,
    patch_size=16,
    width=768,
    depth=1,
    heads=12,
    mlp_dim=64,
    num_classes=3,
    block=BlockConfig(activation="gelu_erf"),
)
DINOV2 = replace(
    SMALL,
    image_size=518,
    patch_size=14,
    width=384,
    heads=6,
    num_classes=0,
    block=BlockConfig(activation="gelu_erf", layer_scale=1.0),
)


def write_file(path: Path, config: ViTConfig, *, to: str, preprocessing: Preprocessing | None = None) -> Path:
    bundle = ModelBundle(
        name="small",
        config=config,
        state=create(config).state_dict(),
        preprocessing=preprocessing or Preprocessing(image_size=config.image_size),
        labels=("cat", "dog", "owl")[: config.num_classes],
    )
    write_format(get_format(to), path, bundle)
    return path


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_directory_keeps_preprocessing_and_labels(tmp_path, to) -> None:
    preprocessing = get_preprocessing("deit", image_size=224)
    bundle = load_bundle(write_file(tmp_path / "out", SMALL, to=to, preprocessing=preprocessing))
    assert (bundle.preprocessing, bundle.labels) == (preprocessing, ("cat", "dog", "owl"))


def test_bare_file_gets_preprocessing_of_its_origin(tmp_path) -> None:
    bundle = load_bundle(write_file(tmp_path / "deit_base.pth", SMALL, to="deit"))
    assert (bundle.preprocessing, bundle.labels) == (get_preprocessing("deit", image_size=224), ("0", "1", "2"))


def test_unnumbered_labels_are_refused() -> None:
    with pytest.raises(WeightsError, match="id2label"):
        labels_from_config({"id2label": {"cat": 0, "dog": 1}}, num_classes=2)


def test_unknown_format_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        get_format("gogle")
    assert "google" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "size", "resize_size", "interpolation"),
    [
        ("vit_b_16-c867db91.pth", 224, 256, "bilinear"),
        ("vit_l_16-852ce7e3.pth", 224, 242, "bilinear"),
        ("vit_b_16_lc_swag-4e70ced5.pth", 224, 224, "bicubic"),
        ("vit_b_16_swag-9ac1b537.pth", 384, 384, "bicubic"),
        ("mine.pth", 224, 256, "bilinear"),
        ("mine.pth", 384, 384, "bicubic"),
        ("vit_l_16-852ce7e3.pth", 384, 384, "bicubic"),  # the name of another model
    ],
)
def test_published_file_name_sets_preprocessing(tmp_path, name, size, resize_size, interpolation) -> None:
    path = write_file(tmp_path / name, replace(SMALL, image_size=size), to="torchvision")
    with open_tensors(path) as tensors:
        weights = identify(tensors)
    assert weights.preprocessing.resize_size == (resize_size, resize_size)
    assert weights.preprocessing.interpolation == interpolation
    is_published = any(note.startswith("preprocessing of the published file") for note in weights.notes)
    assert is_published == (name != "mine.pth" and (size == 384) == ("_swag" in name and "lc" not in name))
    assert vitkit.load(path).preprocess == weights.preprocessing


def test_big_vision_file_gets_big_vision_preprocessing(tmp_path) -> None:
    config = replace(
        SMALL, pooling="mean", tokens=TokenConfig(class_token=False), block=BlockConfig(), head=HeadConfig()
    )
    with open_tensors(write_file(tmp_path / "mine.npz", config, to="big_vision")) as tensors:
        weights = identify(tensors)
    assert weights.format.name == "big_vision"
    assert weights.preprocessing == get_preprocessing("big_vision", image_size=224)


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("dinov2") / "mine.pth", DINOV2, to="dinov2")


def test_dinov2_is_loaded_at_224_pixels(dinov2) -> None:
    model = vitkit.load(dinov2)
    assert (model.config.grid, model.preprocess.resize_size) == ((16, 16), (256, 256))
    assert load_stored_bundle(dinov2).config.grid == (37, 37)
    with open_tensors(dinov2) as tensors:
        assert any("stored for 518×518; loading resamples them to 224×224" in note for note in identify(tensors).notes)


def test_small_dinov2_keeps_its_image_size(tmp_path) -> None:
    path = write_file(tmp_path / "mine.pth", replace(DINOV2, image_size=112), to="dinov2")
    assert vitkit.load(path).config.grid == (8, 8)


@pytest.mark.parametrize(("image_size", "side"), [(None, 224), (518, 518), (448, 518)])
def test_run_with_image_size_starts_from_stored_positions(dinov2, image_size, side) -> None:
    config = RunConfig(model=ModelChoice(init=str(dinov2), image_size=image_size))
    start = load_pretrained(config, callback=Callback())
    assert start.config.image_size == side
