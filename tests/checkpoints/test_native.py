"""The artefact: what is saved comes back bit for bit, damage is named, and timm and transformers load it too."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from oracles import import_timm, import_transformers

from vitkit.checkpoints import native
from vitkit.checkpoints.native import CARD, FILES, FIRST_FILES, REFERENCE, Artefact
from vitkit.core.config import to_mapping
from vitkit.core.errors import VitkitError, WeightsError
from vitkit.data.transforms import Preprocessing
from vitkit.model.patches import PatchProjection
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
    vit("tokens.distillation=true"),
    vit("tokens.registers=2"),
    BiTConfig(units=(1, 1), classes=3, channels=1, image_size=16),
]


def artefact(config: ModelConfig) -> Artefact:
    model = create(config, generator=torch.Generator().manual_seed(1))
    for name, tensor in model.named_parameters():
        if name.startswith("head") and name.endswith("weight"):
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(2))
    return Artefact(
        name="Ti/16, changed",
        config=config,
        state={name: tensor.detach() for name, tensor in model.named_parameters()},
        preprocessing=Preprocessing(image_size=16, channels=1, mean=(0.1,), deviation=(0.3,), resize="crop"),
        labels=("cat", "dög", "<b>"),
    )


NAMES = ["plain", "sincos", "rotary", "relative", "learned_2d", "distilled", "registers", "bit"]


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
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


def test_the_remains_of_an_artefact_are_known_for_ours(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    assert native.is_ours(tmp_path)
    (tmp_path / "checksums.json").unlink()
    assert native.is_ours(tmp_path)
    for content in ("{}", "[" * 100_000, "[]"):
        (tmp_path / "config.json").write_text(content)
        assert not native.is_ours(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # to read from it would wait for ever
    assert not native.is_ours(tmp_path)
    assert not native.is_ours(tmp_path / "nowhere")


# What is in the folder


def test_an_artefact_of_version_1_is_loaded(tmp_path) -> None:
    saved = artefact(vit("tokens.distillation=true"))  # whose names are ours there, and not timm's
    safetensors.torch.save_file(saved.state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    about = {"format": "vitkit", "version": 1, "name": saved.name, "kind": "vit", "model": to_mapping(saved.config)}
    native.write_json(tmp_path / "config.json", about)
    native.write_json(tmp_path / "preprocessor_config.json", saved.preprocessing.to_hub())
    native.write_json(tmp_path / "labels.json", list(saved.labels))
    native.write_checksums(tmp_path, FIRST_FILES)
    loaded = native.load(tmp_path)
    assert (loaded.name, loaded.config, loaded.labels) == (saved.name, saved.config, saved.labels)
    assert loaded.preprocessing == saved.preprocessing
    assert all(torch.equal(loaded.state[name], saved.state[name]) for name in saved.state)
    assert native.stored_reference(tmp_path) is None


def test_an_artefact_of_a_later_version_is_refused(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    config = json.loads((tmp_path / "config.json").read_text())
    config["vitkit"]["version"] = 3
    native.write_json(tmp_path / "config.json", config)
    native.write_checksums(tmp_path, FILES)
    with pytest.raises(WeightsError, match="later vitkit"):
        native.load(tmp_path)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_saving_twice_gives_the_same_bytes(tmp_path) -> None:
    for name in ("one", "two"):
        native.save(tmp_path / name, artefact(vit("tokens.distillation=true")))
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one").keys() == {*FILES, CARD, "checksums.json"}
    recorded = json.loads((tmp_path / "one" / "checksums.json").read_text())
    assert recorded.keys() == {*FILES, CARD}


def test_the_card_may_be_written_on(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    with (tmp_path / CARD).open("a") as card:
        card.write("Trained on my photos.\n")
    assert native.load(tmp_path).config == vit()


def test_the_card_says_what_the_model_is_and_takes_no_markup_from_labels(tmp_path) -> None:
    native.save(tmp_path, artefact(vit()))
    card = (tmp_path / CARD).read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: vitkit\n")
    assert "\nlicense:" not in card
    assert "<b>" not in card
    for said in (
        "Ti/16, changed",
        "16×16 pixels",
        "| depth | 2 |",
        "`dög`",
        "vitkit.load(",
        "local-dir:",
        "AutoModelFor",
    ):
        assert said in card


def test_where_timm_has_no_such_model_config_and_card_say_so(tmp_path) -> None:
    native.save(tmp_path, artefact(vit("positions.kind=rotary")))
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"architecture", "pretrained_cfg"} & config.keys()
    assert config["label_names"] == ["cat", "dög", "<b>"]
    card = (tmp_path / CARD).read_text(encoding="utf-8")
    assert "have no such model: rotary positions." in card
    assert "local-dir:" not in card


def test_the_reference_is_what_the_model_answers(tmp_path) -> None:
    saved = artefact(vit())
    native.save(tmp_path, saved)
    assert native.stored_reference(tmp_path) == native.reference(saved)["logits"]
    assert len(native.stored_reference(tmp_path)) == 3


def test_a_model_that_answers_no_numbers_is_saved_without_reference(tmp_path) -> None:
    saved = artefact(vit())
    saved.state["norm.bias"].fill_(float("nan"))
    native.save(tmp_path, saved)
    assert native.stored_reference(tmp_path) is None
    assert native.load(tmp_path).state["norm.bias"].isnan().all()


def test_a_reference_that_is_no_list_of_numbers_is_refused(tmp_path) -> None:
    native.write_json(tmp_path / REFERENCE, {"logits": ["a"]})
    with pytest.raises(WeightsError, match="not the answers"):
        native.stored_reference(tmp_path)


# timm and transformers

HELD = {
    "plain": vit(),
    "no classes": configure("Ti/16", image_size=16, patch_size=4, classes=0, settings=SIZES),
    "erf": vit("block.activation=gelu_erf"),
    "sincos, mean": vit("positions.kind=sincos_2d", "pooling=mean"),
    "map": vit("pooling=map"),
    "distilled": vit("tokens.distillation=true"),
    "registers": vit("tokens.registers=2"),
    "gated": vit("block.activation=swiglu"),
    "scaled": vit("block.layer_scale=0.1"),
    "three channels": configure("Ti/16", image_size=(16, 24), patch_size=4, classes=3, settings=SIZES),
}
# Both are float32 and right: ours embeds patches by one matrix product, and computes the last block for the rows that
# are read alone. In float64 the same weights leave no more than its own rounding.
ROUNDING, ROUNDING_IN_DOUBLE = 2e-6, 1e-12


def saved_in(folder: Path, config: ModelConfig) -> Artefact:
    made = artefact(config)
    for number, (name, tensor) in enumerate(sorted(made.state.items())):
        if name != "pos_embed":  # sin-cos tables are not ours to change
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    how = Preprocessing(
        image_size=config.image_size, channels=config.channels, resize="crop", mean=(0.1,), deviation=(0.3,)
    )
    labels = made.labels[: config.classes]
    whole = Artefact(name="Ti/16, changed", config=config, state=made.state, preprocessing=how, labels=labels)
    native.save(folder, whole)
    return whole


def images_for(config: ModelConfig) -> torch.Tensor:
    return torch.rand(2, config.channels, *((16, 16) if isinstance(config.image_size, int) else config.image_size))


@pytest.mark.parametrize("name", HELD)
def test_timm_loads_the_folder_and_gives_our_logits(tmp_path, name) -> None:
    timm = import_timm()
    ours = saved_in(tmp_path, HELD[name])
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in theirs.state_dict().items())
    assert stored.keys() == theirs.state_dict().keys()
    images = images_for(ours.config)
    with torch.no_grad():
        assert torch.allclose(theirs(images), ours.model()(images), rtol=ROUNDING, atol=ROUNDING)
        exact = theirs.double()(images.double()) - ours.model().double()(images.double())
        assert exact.abs().max() <= ROUNDING_IN_DOUBLE
    if ours.labels:
        assert tuple(theirs.pretrained_cfg["label_names"]) == ours.labels
    data = timm.data.resolve_model_data_config(theirs)
    height, width = images.shape[2:]
    assert tuple(data["input_size"]) == (ours.config.channels, height, width)
    assert tuple(data["mean"]) == (0.1,) * ours.config.channels
    assert (data["crop_pct"], data["crop_mode"], data["interpolation"]) == (0.875, "center", "bilinear")


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(HELD.keys() - {"map"}))  # whose probe uses no kernel of theirs
def test_timms_logits_are_ours_bit_for_bit_once_summed_in_timms_order(tmp_path, name, monkeypatch) -> None:
    ours = saved_in(tmp_path, HELD[name])
    theirs = import_timm().create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    model, images = ours.model(), images_for(ours.config)

    def convolved(projection, images):  # where ours is a matrix product, which is sooner done
        made = torch.nn.functional.conv2d(images, projection.weight, projection.bias, stride=projection.patch_size)
        return made.flatten(2).transpose(1, 2)

    monkeypatch.setattr(PatchProjection, "forward", convolved)
    tokens = model.encode(model.embed(images)).tokens  # all rows of the last layer, also those that nobody reads
    assert torch.equal(model.head(model.pool(tokens)), theirs(images))


@pytest.mark.parametrize("name", HELD)
def test_transformers_loads_the_folder_and_gives_our_logits(tmp_path, name) -> None:
    timm, transformers = import_timm(), import_transformers()
    ours = saved_in(tmp_path, HELD[name])
    auto = transformers.AutoModelForImageClassification if ours.labels else transformers.AutoModel
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in theirs.timm_model.state_dict().items())
    theirs = theirs.eval()
    images = images_for(ours.config)
    with torch.no_grad():
        output, expected = theirs(images), ours.model()(images)
    logits = output.logits if ours.labels else output.pooler_output
    assert torch.allclose(logits, expected, rtol=ROUNDING, atol=ROUNDING)
    with torch.no_grad():
        bare = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(images)
    assert torch.equal(logits, bare)
    if ours.labels:
        assert tuple(theirs.config.id2label[number] for number in range(3)) == ours.labels


def test_timm_finetunes_the_folder_to_other_classes(tmp_path) -> None:
    timm = import_timm()
    saved_in(tmp_path, HELD["distilled"])
    assert timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7).num_classes == 7
