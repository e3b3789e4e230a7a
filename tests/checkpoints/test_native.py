"""The artefact: what is saved comes back bit for bit, and damage is named."""

import pytest
import torch

from vitkit.checkpoints import native
from vitkit.checkpoints.native import FILES, Artefact
from vitkit.core.errors import VitkitError, WeightsError
from vitkit.data.transforms import Preprocessing
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=16", "depth=2", "heads=2", "mlp_dim=32")


def vit(*settings: str) -> ModelConfig:
    return configure("Ti/16", image_size=16, patch_size=4, channels=1, classes=3, settings=(*SIZES, *settings))


CONFIGS = [
    vit(),
    vit("positions.kind=sincos_2d", "pooling=mean"),
    vit("positions.kind=rotary"),
    vit("positions.kind=relative"),
    vit("positions.kind=learned_2d", "head.pre_logits=8", "head.bias=-10"),
    BiTConfig(units=(1, 1), classes=3, channels=1, image_size=16),
]


def artefact(config: ModelConfig) -> Artefact:
    model = create(config, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(model.head.weight)
    return Artefact(
        name="Ti/16, changed",
        config=config,
        state={name: tensor.detach() for name, tensor in model.named_parameters()},
        preprocessing=Preprocessing(image_size=16, channels=1, mean=(0.1,), deviation=(0.3,), resize="crop"),
        labels=("cat", "dög", "<b>"),
    )


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "sincos", "rotary", "relative", "learned_2d", "bit"])
def test_what_is_saved_comes_back(tmp_path, config) -> None:
    saved = artefact(config)
    native.save(tmp_path / "run", saved)
    loaded = native.load(tmp_path / "run")
    assert (loaded.name, loaded.config, loaded.labels) == (saved.name, saved.config, saved.labels)
    assert loaded.preprocessing == saved.preprocessing
    assert loaded.state.keys() == saved.state.keys()
    assert all(torch.equal(loaded.state[name], saved.state[name]) for name in saved.state)
    images = torch.rand(2, 1, 16, 16)
    assert not loaded.model().training
    with torch.no_grad():
        assert torch.equal(loaded.model()(images), saved.model()(images))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damage_is_named(tmp_path, file, damage) -> None:
    native.save(tmp_path, artefact(vit()))
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[:-3])
    with pytest.raises(WeightsError) as caught:
        native.load(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_without_checksums_is_no_model(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(WeightsError, match="no trained model here"):
        native.load(tmp_path)


@pytest.mark.parametrize("kind", ["nowhere", "empty", "file"])
def test_what_is_no_model_is_described(tmp_path, kind) -> None:
    place = tmp_path / kind
    if kind == "empty":
        place.mkdir()
    if kind == "file":
        place.write_bytes(b"x")
    with pytest.raises(WeightsError, match={"nowhere": "no such", "empty": "empty", "file": "a file"}[kind]):
        native.load(place)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"kind": "vit"}'),
        ("config.json", '{"kind": "other", "name": "a", "model": {}}'),
        ("config.json", '{"kind": "vit", "name": "a", "model": {"widht": 3}}'),
        ("config.json", '{"kind": "vit", "name": "a", "model": 3}'),
        ("config.json", "[" * 100_000),
        ("labels.json", "3"),
        ("preprocessor_config.json", "3"),
        ("checksums.json", "[]"),
        ("model.safetensors", "not weights"),
    ],
)
def test_files_that_are_whole_but_not_ours_are_refused_with_their_name(tmp_path, file, content) -> None:
    native.save(tmp_path, artefact(vit()))
    (tmp_path / file).write_text(content, encoding="utf-8")
    if file != "checksums.json":
        native.write_checksums(tmp_path, FILES)
    with pytest.raises(VitkitError) as caught:
        native.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_saving_over_a_model_replaces_it(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    native.save(tmp_path, artefact(vit("pooling=mean")))
    assert native.load(tmp_path).config == vit("pooling=mean")
