"""Tests of artifacts: exact round trip, damage, format version, and loading by timm and transformers."""

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from oracles import import_timm, import_transformers

from vitkit.core.config import parse_assignments
from vitkit.core.errors import VitkitError, WeightsError
from vitkit.core.files import write_json
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import BiTConfig
from vitkit.model.patches import PatchProjection
from vitkit.model.pretraining_config import MaskedConfig
from vitkit.weights import artifact as artifact_io
from vitkit.weights import pretraining
from vitkit.weights.artifact import FILES, FORMAT_VERSION, MODEL_CARD, REFERENCE
from vitkit.weights.bundle import ModelBundle, reference_logits
from vitkit.weights.pretraining import PretrainingWrapper, read_pretraining, write_pretraining
from vitkit.zoo.registry import configure, create
from vitkit.zoo.variants import ModelConfig

SIZES = ("width=16", "depth=2", "heads=2", "mlp_dim=32")


def vit(*settings: str) -> ModelConfig:
    return configure(
        "Ti/16", image_size=16, patch_size=4, channels=1, num_classes=3, settings=parse_assignments((*SIZES, *settings))
    )


CONFIGS = [
    vit(),
    vit("positions.kind=sincos_2d", "pooling=mean"),
    vit("positions.kind=rotary"),
    vit("positions.kind=relative"),
    vit("positions.kind=learned_2d", "head.pre_logits=8", "head.bias=-10"),
    vit("tokens.distillation=true"),
    vit("tokens.registers=2"),
    BiTConfig(units=(1, 1), num_classes=3, channels=1, image_size=16),
]


def make_bundle(config: ModelConfig) -> ModelBundle:
    model = create(config, generator=torch.Generator().manual_seed(1))
    for name, tensor in model.named_parameters():
        if name.startswith("head") and name.endswith("weight"):
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(2))
    return ModelBundle(
        name="Ti/16, changed",
        config=config,
        state={name: tensor.detach() for name, tensor in model.named_parameters()},
        preprocessing=Preprocessing(image_size=16, channels=1, mean=(0.1,), std=(0.3,), resize="crop"),
        labels=("cat", "dög", "<b>"),
    )


NAMES = ["plain", "sincos", "rotary", "relative", "learned_2d", "distilled", "registers", "bit"]


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_round_trip_is_exact(tmp_path, config) -> None:
    saved = make_bundle(config)
    artifact_io.write_artifact(tmp_path / "run", saved)
    loaded = artifact_io.read_artifact(tmp_path / "run")
    assert (loaded.name, loaded.config, loaded.labels) == (saved.name, saved.config, saved.labels)
    assert loaded.preprocessing == saved.preprocessing
    assert loaded.state.keys() == saved.state.keys()
    assert all(torch.equal(loaded.state[name], saved.state[name]) for name in saved.state)
    images = torch.rand(2, 1, 16, 16)
    assert not loaded.build_model().training
    with torch.no_grad():
        assert torch.equal(loaded.build_model()(images), saved.build_model()(images))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damaged_file_is_named(tmp_path, file, damage) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[:-3])
    with pytest.raises(WeightsError) as caught:
        artifact_io.read_artifact(tmp_path)
    assert str(path) in str(caught.value)


def test_directory_without_checksums_is_refused(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(WeightsError, match="no model in this directory"):
        artifact_io.read_artifact(tmp_path)


@pytest.mark.parametrize("kind", ["nowhere", "empty", "file"])
def test_error_describes_what_is_at_the_path(tmp_path, kind) -> None:
    path = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    if kind == "file":
        path.write_bytes(b"x")
    with pytest.raises(WeightsError, match={"nowhere": "no such", "empty": "empty", "file": "a file"}[kind]):
        artifact_io.read_artifact(path)


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
def test_invalid_content_is_refused_and_named(tmp_path, file, content) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    (tmp_path / file).write_text(content, encoding="utf-8")
    if file != "checksums.json":
        artifact_io.write_checksums(tmp_path, FILES)
    with pytest.raises(VitkitError) as caught:
        artifact_io.read_artifact(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_writing_over_an_artifact_replaces_it(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    artifact_io.write_artifact(tmp_path, make_bundle(vit("pooling=mean")))
    assert artifact_io.read_artifact(tmp_path).config == vit("pooling=mean")


def test_is_artifact_recognizes_incomplete_artifacts(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    assert artifact_io.is_artifact(tmp_path)
    (tmp_path / "checksums.json").unlink()
    assert artifact_io.is_artifact(tmp_path)
    for content in ("{}", "[" * 100_000, "[]"):
        (tmp_path / "config.json").write_text(content)
        assert not artifact_io.is_artifact(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")  # reading it would block forever
    assert not artifact_io.is_artifact(tmp_path)
    assert not artifact_io.is_artifact(tmp_path / "nowhere")


# Contents


def set_version(path: Path, version: int | float) -> None:
    config = json.loads((path / "config.json").read_text())
    config["vitkit"]["version"] = version
    (path / "config.json").write_text(json.dumps(config).replace("Infinity", "1e999"))
    artifact_io.write_checksums(path, FILES)


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        (FORMAT_VERSION - 1, "weights convert '.*/my model' OUT --to timm"),
        (FORMAT_VERSION + 1, "update vitkit"),
        (float("inf"), "damaged"),  # 1e999 in JSON
    ],
)
def test_another_format_version_is_refused_with_a_hint(tmp_path, version, hint) -> None:
    path = tmp_path / "my model"
    path.mkdir()
    artifact_io.write_artifact(path, make_bundle(vit()))
    set_version(path, version)
    with pytest.raises(WeightsError, match="another artifact version") as info:
        artifact_io.read_artifact(path)
    assert re.search(hint, info.value.hint)


def test_too_deep_config_is_refused_before_building(tmp_path, monkeypatch) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit("tokens.distillation=true")))
    config = json.loads((tmp_path / "config.json").read_text())
    config["vitkit"]["model"]["depth"] = 999
    write_json(tmp_path / "config.json", config)
    artifact_io.write_checksums(tmp_path, FILES)
    monkeypatch.setattr("vitkit.weights.formats.timm.rules.create", pytest.fail)
    with pytest.raises(WeightsError, match=r"has no blocks\.998\.norm1\.weight"):
        artifact_io.read_artifact(tmp_path)


def test_first_format_version_is_refused_with_a_hint(tmp_path) -> None:
    """Version 1 had its description at the top of config.json, and no reference logits."""
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    write_json(tmp_path / "config.json", {"format": "vitkit", "version": 1, "model": {"classes": 3}})
    (tmp_path / REFERENCE).unlink()
    artifact_io.write_checksums(tmp_path, [name for name in FILES if name != REFERENCE])
    with pytest.raises(WeightsError, match="another artifact version"):
        artifact_io.read_artifact(tmp_path)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_writing_is_deterministic(tmp_path) -> None:
    for name in ("one", "two"):
        artifact_io.write_artifact(tmp_path / name, make_bundle(vit("tokens.distillation=true")))
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one").keys() == {*FILES, MODEL_CARD, "checksums.json"}
    recorded = json.loads((tmp_path / "one" / "checksums.json").read_text())
    assert recorded.keys() == {*FILES, MODEL_CARD}


def test_model_card_may_be_edited(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    with (tmp_path / MODEL_CARD).open("a") as card:
        card.write("Trained on my photos.\n")
    assert artifact_io.read_artifact(tmp_path).config == vit()


def test_model_card_describes_the_model_and_escapes_labels(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    card = (tmp_path / MODEL_CARD).read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: vitkit\n")
    assert "\nlicense:" not in card
    assert "<b>" not in card
    for text in (
        "Ti/16, changed",
        "16×16 pixels",
        "| depth | 2 |",
        "`dög`",
        "vitkit.load(",
        "local-dir:",
        "AutoModelFor",
    ):
        assert text in card


def test_config_and_card_of_a_model_that_timm_lacks(tmp_path) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit("positions.kind=rotary")))
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"architecture", "pretrained_cfg"} & config.keys()
    assert config["label_names"] == ["cat", "dög", "<b>"]
    card = (tmp_path / MODEL_CARD).read_text(encoding="utf-8")
    assert "cannot load this model: tanh GELU with rotary positions." in card
    assert "local-dir:" not in card


def test_reference_logits_are_the_models(tmp_path) -> None:
    saved = make_bundle(vit())
    artifact_io.write_artifact(tmp_path, saved)
    assert artifact_io.read_reference_logits(tmp_path) == reference_logits(saved.build_model())[0].tolist()
    assert len(artifact_io.read_reference_logits(tmp_path)) == 3


def test_nan_logits_are_not_stored(tmp_path) -> None:
    saved = make_bundle(vit())
    saved.state["norm.bias"].fill_(float("nan"))
    artifact_io.write_artifact(tmp_path, saved)
    assert artifact_io.read_reference_logits(tmp_path) is None
    assert artifact_io.read_artifact(tmp_path).state["norm.bias"].isnan().all()


def test_invalid_reference_logits_are_refused(tmp_path) -> None:
    write_json(tmp_path / REFERENCE, {"logits": ["a"]})
    with pytest.raises(WeightsError, match="invalid reference logits"):
        artifact_io.read_reference_logits(tmp_path)


# timm and transformers

TIMM_MODELS = {
    "plain": vit(),
    "no classes": configure("Ti/16", image_size=16, patch_size=4, num_classes=0, settings=parse_assignments(SIZES)),
    "erf": vit("block.activation=gelu_erf"),
    "sincos, mean": vit("positions.kind=sincos_2d", "pooling=mean"),
    "map": vit("pooling=map"),
    "distilled": vit("tokens.distillation=true"),
    "registers": vit("tokens.registers=2"),
    "gated": vit("block.activation=swiglu"),
    "scaled": vit("block.layer_scale=0.1"),
    "three channels": configure(
        "Ti/16", image_size=(16, 24), patch_size=4, num_classes=3, settings=parse_assignments(SIZES)
    ),
}
# Both are correct in float32: vitkit embeds patches with one matrix product, and computes the last block only for the
# rows that are read. In float64 only its own rounding remains.
ROUNDING, ROUNDING_IN_DOUBLE = 2e-6, 1e-12


def write_random(folder: Path, config: ModelConfig) -> ModelBundle:
    bundle = make_bundle(config)
    for number, (name, tensor) in enumerate(sorted(bundle.state.items())):
        if name != "pos_embed":  # sincos tables are fixed
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    preprocessing = replace(bundle.preprocessing, image_size=config.image_size, channels=config.channels)
    changed = replace(bundle, preprocessing=preprocessing, labels=bundle.labels[: config.num_classes])
    artifact_io.write_artifact(folder, changed)
    return changed


def images_for(config: ModelConfig) -> torch.Tensor:
    return torch.rand(2, config.channels, *((16, 16) if isinstance(config.image_size, int) else config.image_size))


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_timm_loads_artifact_with_same_logits(tmp_path, name) -> None:
    timm = import_timm()
    ours = write_random(tmp_path, TIMM_MODELS[name])
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in theirs.state_dict().items())
    assert stored.keys() == theirs.state_dict().keys()
    images = images_for(ours.config)
    with torch.no_grad():
        assert torch.allclose(theirs(images), ours.build_model()(images), rtol=ROUNDING, atol=ROUNDING)
        exact = theirs.double()(images.double()) - ours.build_model().double()(images.double())
        assert exact.abs().max() <= ROUNDING_IN_DOUBLE
    if ours.labels:
        assert tuple(theirs.pretrained_cfg["label_names"]) == ours.labels
    data = timm.data.resolve_model_data_config(theirs)
    height, width = images.shape[2:]
    assert tuple(data["input_size"]) == (ours.config.channels, height, width)
    assert tuple(data["mean"]) == (0.1,) * ours.config.channels
    assert (data["crop_pct"], data["crop_mode"], data["interpolation"]) == (0.875, "center", "bilinear")


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(TIMM_MODELS.keys() - {"map"}))  # timm's attention pooling uses other kernels
def test_timm_logits_are_bitwise_equal_in_timms_order(tmp_path, name, monkeypatch) -> None:
    ours = write_random(tmp_path, TIMM_MODELS[name])
    theirs = import_timm().create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    model, images = ours.build_model(), images_for(ours.config)

    def convolve(projection, images):  # vitkit uses a faster matrix product
        output = torch.nn.functional.conv2d(images, projection.weight, projection.bias, stride=projection.patch_size)
        return output.flatten(2).transpose(1, 2)

    monkeypatch.setattr(PatchProjection, "forward", convolve)
    tokens = model.encode(model.embed(images)).tokens  # all rows of the last layer
    assert torch.equal(model.head(model.pool_layer(tokens)), theirs(images))


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_transformers_loads_artifact_with_same_logits(tmp_path, name) -> None:
    timm, transformers = import_timm(), import_transformers()
    ours = write_random(tmp_path, TIMM_MODELS[name])
    auto = transformers.AutoModelForImageClassification if ours.labels else transformers.AutoModel
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in theirs.timm_model.state_dict().items())
    theirs = theirs.eval()
    images = images_for(ours.config)
    with torch.no_grad():
        output, expected = theirs(images), ours.build_model()(images)
    logits = output.logits if ours.labels else output.pooler_output
    assert torch.allclose(logits, expected, rtol=ROUNDING, atol=ROUNDING)
    with torch.no_grad():
        bare = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(images)
    assert torch.equal(logits, bare)
    if ours.labels:
        assert tuple(theirs.config.id2label[number] for number in range(3)) == ours.labels


def test_timm_replaces_the_head(tmp_path) -> None:
    timm = import_timm()
    write_random(tmp_path, TIMM_MODELS["distilled"])
    assert timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7).num_classes == 7


@pytest.mark.parametrize("has_header", [True, False])
def test_large_sparse_weights_are_not_hashed(tmp_path, monkeypatch, has_header) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "model.safetensors").stat().st_size if has_header else 0)
        file.truncate(1 << 32)
    monkeypatch.setattr(artifact_io, "sha256", lambda path: pytest.fail(f"{path} is hashed"))
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged"):
        artifact_io.read_artifact(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "labels.json", "reference.json"])
def test_large_sparse_json_is_not_hashed(tmp_path, monkeypatch, name) -> None:
    artifact_io.write_artifact(tmp_path, make_bundle(vit()))
    with (tmp_path / name).open("r+b") as file:
        file.truncate(1 << 32)
    sha256 = artifact_io.sha256
    monkeypatch.setattr(artifact_io, "sha256", lambda path: sha256(path) if path.name != name else pytest.fail(name))
    with pytest.raises(WeightsError, match=f"{name}: is too large"):
        artifact_io.read_artifact(tmp_path)


def test_large_sparse_pretraining_weights_are_not_hashed(tmp_path, monkeypatch) -> None:
    wrapper = PretrainingWrapper(settings=MaskedConfig(), state={"head.weight": torch.zeros(2)})
    write_pretraining(tmp_path, wrapper)
    assert read_pretraining(tmp_path).state.keys() == wrapper.state.keys()
    with (tmp_path / pretraining.WEIGHTS).open("r+b") as file:
        file.truncate(1 << 32)
    monkeypatch.setattr(pretraining, "sha256", lambda path: pytest.fail(f"{path} is hashed"))
    with pytest.raises(WeightsError, match=f"{pretraining.WEIGHTS}: damaged"):
        read_pretraining(tmp_path)
