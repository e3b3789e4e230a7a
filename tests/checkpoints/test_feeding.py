"""A file of weights says little of how it is fed; its name and its origin say the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitkit
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.foreign import format_called, identify, load_as_stored
from vitkit.checkpoints.native import Artefact
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.train.config import ModelChoice, RunConfig
from vitkit.train.run import starting_point
from vitkit.train.watch import Watcher
from vitkit.zoo.lookup import create

SMALL = ViTConfig(
    image_size=224,
    patch_size=16,
    width=64,
    depth=1,
    heads=1,
    mlp_dim=64,
    classes=3,
    block=BlockConfig(activation="gelu_erf"),
)
DINOV2 = replace(
    SMALL, image_size=518, patch_size=14, classes=0, block=BlockConfig(activation="gelu_erf", layer_scale=1.0)
)


def written(config: ViTConfig, to: str, place: Path) -> Path:
    artefact = Artefact(
        name="small",
        config=config,
        state=create(config).state_dict(),
        preprocessing=Preprocessing(image_size=config.image_size),
        labels=tuple("abc"[: config.classes]),
    )
    write_as(format_called(to), place, artefact)
    return place


@pytest.mark.parametrize(
    ("name", "size", "resized", "resampling"),
    [
        ("vit_b_16-c867db91.pth", 224, 256, "bilinear"),
        ("vit_l_16-852ce7e3.pth", 224, 242, "bilinear"),
        ("vit_b_16_lc_swag-4e70ced5.pth", 224, 224, "bicubic"),
        ("vit_b_16_swag-9ac1b537.pth", 384, 384, "bicubic"),
        ("mine.pth", 224, 256, "bilinear"),
        ("mine.pth", 384, 384, "bicubic"),
        ("vit_l_16-852ce7e3.pth", 384, 384, "bicubic"),  # of that name, and another model
    ],
)
def test_a_published_name_says_how_the_file_is_fed(tmp_path, name, size, resized, resampling) -> None:
    file = written(replace(SMALL, image_size=size), "torchvision", tmp_path / name)
    with open_tensors(file) as tensors:
        found = identify(tensors)
    assert (found.preprocessing.resized, found.preprocessing.filter) == ((resized, resized), resampling)
    known = any(note.startswith("fed as the published file") for note in found.notes)
    assert known == (name != "mine.pth" and (size == 384) == ("_swag" in name and "lc" not in name))
    assert vitkit.load(file).preprocess.preprocessing == found.preprocessing


def test_a_file_of_big_vision_is_fed_as_big_vision_does(tmp_path) -> None:
    plain = replace(
        SMALL, pooling="mean", tokens=TokenConfig(class_token=False), block=BlockConfig(), head=HeadConfig()
    )
    file = written(plain, "big_vision", tmp_path / "mine.npz")
    with open_tensors(file) as tensors:
        found = identify(tensors)
    assert found.format.name == "big_vision"
    assert found.preprocessing == preprocessing("big_vision", image_size=224)


def test_a_dinov2_is_loaded_for_the_224_pixels_that_its_code_feeds(tmp_path) -> None:
    file = written(DINOV2, "dinov2", tmp_path / "mine.pth")
    model = vitkit.load(file)
    assert (model.config.grid, model.preprocess.preprocessing.resized) == ((16, 16), (256, 256))
    assert load_as_stored(file).config.grid == (37, 37)
    with open_tensors(file) as tensors:
        assert any("positions are for 518×518; its own code feeds 224×224" in note for note in identify(tensors).notes)


def test_a_dinov2_of_fewer_positions_is_fed_what_they_are_for(tmp_path) -> None:
    file = written(replace(DINOV2, image_size=112), "dinov2", tmp_path / "mine.pth")
    assert vitkit.load(file).config.grid == (8, 8)


@pytest.mark.parametrize(("asked", "side"), [(None, 224), (518, 518), (448, 518)])
def test_a_run_starts_from_the_learned_positions_where_it_names_a_size(tmp_path, asked, side) -> None:
    file = written(DINOV2, "dinov2", tmp_path / "mine.pth")
    config = RunConfig(model=ModelChoice(weights=str(file), image_size=asked))
    start = starting_point(config, watcher=Watcher())
    assert start.config.image_size == side
