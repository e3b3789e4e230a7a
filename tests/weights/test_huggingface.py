"""Formats of transformers: its files in our models, ours in its classes, and unsupported models."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from oracle.comparison import assert_close, random_images, randomize
from oracles import import_transformers
from packaging.version import Version
from torch import Tensor, nn

from vitkit.core.errors import WeightsError
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.vit import ViT
from vitkit.weights.adapt_state import adapt_state
from vitkit.weights.formats.base import FileMetadata, Format
from vitkit.weights.formats.huggingface import HF_DEIT, HF_DINOV2, HF_VIT, HF_VIT_MAE, read_labels
from vitkit.weights.rules import apply_rules, invert_rules, match_keys
from vitkit.zoo.registry import create

FORMATS = (HF_VIT, HF_DEIT, HF_VIT_MAE, HF_DINOV2)
Read = Callable[[Any], Tensor]

SIZES = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT = SIZES | {"intermediate_size": 96, "num_labels": 5}
MAE = VIT | {"mask_ratio": 0.0, "decoder_hidden_size": 32, "decoder_num_attention_heads": 2}
MAE |= {"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 48}
DINO = SIZES | {"mlp_ratio": 3}
"""Tiny models as configurations of transformers, with more heads than the default of their width."""


def logits(output: Any) -> Tensor:
    return output.logits


def class_token(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0]


def pooled(output: Any) -> Tensor:
    return output.pooler_output


def both_tokens(output: Any) -> Tensor:
    return output.last_hidden_state[:, :2].flatten(1)


@dataclass(frozen=True)
class Case:
    """A model of transformers and the output to compare."""

    name: str
    format: Format
    model: str
    settings: dict[str, Any]
    reads: Read
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        transformers = import_transformers()
        model_class = getattr(transformers, self.model)
        model = model_class(model_class.config_class(**self.settings), **self.arguments)
        randomize(model)
        return model.eval()


CLASSIFIERS = [
    Case("ViT", HF_VIT, "ViTForImageClassification", VIT, logits),
    Case("ViT, wide", HF_VIT, "ViTForImageClassification", VIT | {"image_size": (24, 40)}, logits),
    Case("ViT, wide patches", HF_VIT, "ViTForImageClassification", VIT | {"patch_size": (4, 8)}, logits),
    Case("ViT, 1 channel", HF_VIT, "ViTForImageClassification", VIT | {"num_channels": 1}, logits),
    Case("ViT, no biases", HF_VIT, "ViTForImageClassification", VIT | {"qkv_bias": False}, logits),
    Case("ViT, tanh", HF_VIT, "ViTForImageClassification", VIT | {"hidden_act": "gelu_pytorch_tanh"}, logits),
    Case("ViT, tanh by another name", HF_VIT, "ViTForImageClassification", VIT | {"hidden_act": "gelu_new"}, logits),
    Case("ViT, large eps", HF_VIT, "ViTForImageClassification", VIT | {"layer_norm_eps": 1e-2}, logits),
    Case("DeiT", HF_DEIT, "DeiTForImageClassificationWithTeacher", VIT, logits),
    Case("DeiT, wide", HF_DEIT, "DeiTForImageClassificationWithTeacher", VIT | {"image_size": (24, 40)}, logits),
]
HEADLESS = [
    Case("ViT with pooler", HF_VIT, "ViTModel", VIT, pooled),
    Case("ViT with wide pooler", HF_VIT, "ViTModel", VIT | {"pooler_output_size": 48}, pooled),
    Case("ViT without pooler", HF_VIT, "ViTModel", VIT, class_token, arguments={"add_pooling_layer": False}),
    Case("DeiT, headless", HF_DEIT, "DeiTModel", VIT, both_tokens),
    Case("MAE encoder, wide", HF_VIT_MAE, "ViTMAEModel", MAE | {"image_size": (24, 40)}, class_token),
    Case("MAE encoder", HF_VIT_MAE, "ViTMAEModel", MAE, class_token),
    Case("DINOv2", HF_DINOV2, "Dinov2Model", DINO, pooled),
    Case("DINOv2, no biases", HF_DINOV2, "Dinov2Model", DINO | {"qkv_bias": False}, pooled),
    Case("DINOv2, gated", HF_DINOV2, "Dinov2Model", DINO | {"use_swiglu_ffn": True}, pooled),
    Case("DINOv2, registers", HF_DINOV2, "Dinov2WithRegistersModel", DINO | {"num_register_tokens": 3}, pooled),
    Case(
        "DINOv2, registers, gated",
        HF_DINOV2,
        "Dinov2WithRegistersModel",
        DINO | {"num_register_tokens": 3, "use_swiglu_ffn": True},
        pooled,
    ),
]
DINOS = ("DINOv2", "DINOv2, registers")


def parametrize_cases(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def saved(model: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config.json as `save_pretrained` writes them."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return safetensors.torch.load_file(folder / "model.safetensors"), config


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def metadata(config: dict[str, Any] | None = None) -> FileMetadata:
    return FileMetadata(file_type="safetensors", config=config or {})


def loaded(file_format: Format, tensors: dict[str, Tensor], config: dict[str, Any]) -> ViT:
    """Load our model from a file."""
    shapes = shapes_of(tensors)
    assert [row.name for row in FORMATS if row.matches(shapes, metadata(config))] == [file_format.name]
    described = file_format.infer_config(shapes, metadata(config))
    table = file_format.rules(described, shapes)
    result = match_keys(table, tensors, ignored=file_format.ignored_names)
    assert (result.missing, result.extra) == ((), ())
    model = create(described, device="meta")
    model.load_state_dict(dict(apply_rules(table, tensors)), strict=True, assign=True)
    assert isinstance(model, ViT)
    return model.eval()


def exported(file_format: Format, model: ViT, folder: Path, labels: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Write our model as files for transformers."""
    tensors = dict(invert_rules(file_format.rules(model.config, None), model.state_dict()))
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(file_format.make_config(model.config, labels)))
    return tensors


@torch.no_grad()
def assert_same_output(ours: ViT, theirs: nn.Module, reads: Read) -> None:
    images = random_images(3, ours.config.channels, *ours.patch_embed.image_size).float()
    # An MAE shuffles patches by this noise even if it drops none: in order, so that both sum in the same order.
    order = {"noise": torch.arange(ours.config.patches).expand(3, -1)} if "MAE" in type(theirs).__name__ else {}
    assert_close(ours(images), reads(theirs(images, **order)))


def ours_like(**changes: Any) -> ViTConfig:
    block = BlockConfig(activation="gelu_erf", norm_eps=1e-12)
    sizes = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=4, mlp_dim=96, num_classes=5, block=block)
    return replace(sizes, **changes)


SCALED = BlockConfig(activation="gelu_erf", layer_scale=1.0)
GATED = replace(SCALED, activation="swiglu")
OURS = [
    pytest.param(HF_VIT, ours_like(), logits, id="ViT"),
    pytest.param(HF_VIT, ours_like(block=BlockConfig()), logits, id="ViT with Google's GELU and eps"),
    pytest.param(HF_VIT, ours_like(image_size=(24, 40), channels=1), logits, id="ViT, wide, 1 channel"),
    pytest.param(HF_VIT, ours_like(patch_size=(4, 8)), logits, id="ViT, wide patches"),
    pytest.param(HF_VIT, ours_like(positions=PositionConfig(kind="sincos_2d")), logits, id="ViT, fixed positions"),
    pytest.param(HF_VIT, ours_like(num_classes=1), logits, id="ViT, 1 class"),
    pytest.param(HF_VIT, ours_like(num_classes=0), class_token, id="ViT, headless"),
    pytest.param(HF_VIT, ours_like(num_classes=0, head=HeadConfig(pre_logits=48)), pooled, id="ViT, pre-logits"),
    pytest.param(HF_DEIT, ours_like(tokens=TokenConfig(distillation=True)), logits, id="DeiT"),
    pytest.param(
        HF_DEIT, ours_like(tokens=TokenConfig(distillation=True), num_classes=0), both_tokens, id="DeiT, headless"
    ),
    pytest.param(HF_VIT_MAE, ours_like(num_classes=0, image_size=(24, 40)), class_token, id="MAE encoder, wide"),
    pytest.param(HF_VIT_MAE, ours_like(num_classes=0), class_token, id="MAE encoder"),
    pytest.param(HF_DINOV2, ours_like(num_classes=0, mlp_dim=192, block=SCALED), pooled, id="DINOv2"),
    pytest.param(HF_DINOV2, ours_like(num_classes=0, mlp_dim=128, block=GATED), pooled, id="DINOv2, gated"),
    pytest.param(
        HF_DINOV2,
        ours_like(num_classes=0, mlp_dim=192, block=SCALED, tokens=TokenConfig(registers=3)),
        pooled,
        id="DINOv2, registers",
    ),
    pytest.param(
        HF_VIT,
        ours_like(block=replace(ours_like().block, attention=AttentionConfig(qkv_bias=False))),
        logits,
        id="ViT, no biases",
    ),
]


def random_ours(config: ViTConfig) -> ViT:
    model = ViT(config)
    randomize(model)
    return model.eval()


# Their files, our models


@parametrize_cases(CLASSIFIERS + HEADLESS)
def test_loaded_file_equals_transformers(case: Case, tmp_path: Path) -> None:
    theirs = case.make()
    tensors, config = saved(theirs, tmp_path)
    assert_same_output(loaded(case.format, tensors, config), theirs, case.reads)


@parametrize_cases(CLASSIFIERS + HEADLESS)
def test_names_of_version_5_are_read(case: Case, tmp_path: Path) -> None:
    since = "5.18" if case.format is HF_DINOV2 else "5.9"
    if Version(import_transformers().__version__) < Version(since):
        pytest.skip(f"before transformers {since}, this model has the names of version 4 in memory too")
    theirs = case.make()
    tensors, config = saved(theirs, tmp_path)
    from_file, from_memory = (loaded(case.format, names, config) for names in (tensors, theirs.state_dict()))
    assert tensors.keys() != theirs.state_dict().keys(), "the two have the same names, which tests nothing"
    assert from_file.config == from_memory.config
    expected = from_file.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in from_memory.state_dict().items())


@parametrize_cases(CLASSIFIERS)
def test_classifier_without_base_prefix(case: Case, tmp_path: Path) -> None:
    tensors, config = saved(case.make(), tmp_path)
    bare = {name.partition(".")[2] if name.startswith(("vit.", "deit.")) else name: tensors[name] for name in tensors}
    assert len(bare) == len(tensors)
    expected = loaded(case.format, tensors, config)
    result = loaded(case.format, bare, config)
    assert result.config == expected.config
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in result.state_dict().items())


@pytest.mark.parametrize("row", [HF_VIT_MAE, HF_DINOV2], ids=["MAE", "DINOv2"])
def test_encoder_with_prefix(row: Format, tmp_path: Path) -> None:
    case = next(case for case in HEADLESS if case.format is row)
    prefix = {"huggingface-mae": "vit.", "huggingface-dinov2": "dinov2."}[row.name]
    theirs = case.make()
    tensors, config = saved(theirs, tmp_path)
    assert_same_output(loaded(row, {f"{prefix}{n}": tensors[n] for n in tensors}, config), theirs, case.reads)


def test_mae_decoder_is_ignored(tmp_path: Path) -> None:
    case = Case("MAE", HF_VIT_MAE, "ViTMAEForPreTraining", MAE, class_token)
    theirs = case.make()
    tensors, config = saved(theirs, tmp_path)
    assert any(name.startswith("decoder.") for name in tensors)
    assert_same_output(loaded(HF_VIT_MAE, tensors, config), theirs.vit, class_token)
    assert_same_output(loaded(HF_VIT_MAE, theirs.state_dict(), config), theirs.vit, class_token)


def test_masked_vit_decoder_is_ignored(tmp_path: Path) -> None:
    case = Case("SimMIM", HF_VIT, "ViTForMaskedImageModeling", VIT | {"encoder_stride": 8}, class_token)
    theirs = case.make()
    tensors, config = saved(theirs, tmp_path)
    assert "vit.embeddings.mask_token" in tensors
    assert_same_output(loaded(HF_VIT, tensors, config), theirs.vit, class_token)


@pytest.mark.parametrize("image_size", [16, 48, 64])
@parametrize_cases([case for case in CLASSIFIERS + HEADLESS if case.name in ("ViT", "DeiT", "MAE encoder", *DINOS)])
@torch.no_grad()
def test_interpolation_equals_transformers(case: Case, image_size: int, tmp_path: Path) -> None:
    theirs = case.make()
    source = loaded(case.format, *saved(theirs, tmp_path))
    new = replace(source.config, image_size=image_size)
    ours = create(new).eval()
    ours.load_state_dict(adapt_state(source.state_dict(), old=source.config, new=new).state, strict=True)
    images = random_images(2, 3, image_size, image_size).float()
    requests: dict[str, Any] = {} if case.name in DINOS else {"interpolate_pos_encoding": True}
    if case.format is HF_VIT_MAE:
        requests["noise"] = torch.arange(new.patches).expand(2, -1)
    assert_close(ours(images), case.reads(theirs(images, **requests)))


def test_pooler_is_ignored_with_a_classifier(tmp_path: Path) -> None:
    case = CLASSIFIERS[0]
    tensors, config = saved(case.make(), tmp_path)
    tensors |= {"vit.pooler.dense.weight": torch.zeros(64, 64), "vit.pooler.dense.bias": torch.zeros(64)}
    assert loaded(HF_VIT, tensors, config).config.head.pre_logits is None


# Our models, their classes


@pytest.mark.parametrize(("row", "config", "reads"), OURS)
def test_transformers_loads_our_file(row: Format, config: ViTConfig, reads: Read, tmp_path: Path) -> None:
    transformers, ours = import_transformers(), random_ours(config)
    exported(row, ours, tmp_path)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    mae = {"mask_ratio": 0.0} if row is HF_VIT_MAE else {}
    theirs, report = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True, **mae)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    # Its headless models have a pooler, and those with registers a mask token, that no file of ours can fill.
    pooler = architecture in ("ViTModel", "DeiTModel") and not config.head.pre_logits
    unread = {"pooler.dense.weight", "pooler.dense.bias"} if pooler else set()
    unread |= {"embeddings.mask_token"} if config.tokens.registers else set()
    assert set(report["missing_keys"]) == unread
    assert_same_output(ours, theirs.eval(), reads)


@pytest.mark.parametrize(("row", "config", "reads"), OURS)
def test_our_file_survives_round_trip(row: Format, config: ViTConfig, reads: Read, tmp_path: Path) -> None:
    assert row.unsupported_reason(config) is None
    ours = random_ours(config)
    tensors = exported(row, ours, tmp_path)
    back = loaded(row, tensors, json.loads((tmp_path / "config.json").read_text()))
    state = ours.state_dict()
    assert back.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())
    kernel = back.config.positions  # fixed positions come back as the table they were written as
    assert back.config == replace(config, positions=kernel, tokens=replace(config.tokens, class_token=None))


@parametrize_cases(CLASSIFIERS + HEADLESS)
def test_transformers_file_survives_round_trip(case: Case, tmp_path: Path) -> None:
    tensors, config = saved(case.make(), tmp_path)
    ours = loaded(case.format, tensors, config)
    for shapes in (None, shapes_of(tensors)):
        table = case.format.rules(ours.config, shapes)
        again = dict(invert_rules(table, ours.state_dict()))
        unwritten = set(match_keys([], tensors.keys() - again.keys(), ignored=case.format.ignored_names).extra)
        assert again.keys() <= tensors.keys()
        assert not unwritten
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.items())


def test_labels_are_stored_with_the_model(tmp_path: Path) -> None:
    labels = ("cat", "dög", "<b>", "tench, Tinca tinca", "0")
    exported(HF_VIT, random_ours(ours_like()), tmp_path, labels)
    config = json.loads((tmp_path / "config.json").read_text())
    assert read_labels(config) == labels
    theirs = import_transformers().AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "ViTForImageClassification"
    assert tuple(theirs.config.id2label[index] for index in range(5)) == labels
    assert theirs.config.label2id["dög"] == 1


def test_wrong_number_of_labels_is_rejected() -> None:
    with pytest.raises(WeightsError, match="labels"):
        HF_VIT.make_config(ours_like(), ["cat", "dog"])
    assert read_labels(HF_VIT.make_config(ours_like(), [])) == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3", "LABEL_4")


@pytest.mark.parametrize("labels", [["cat"], {"1": "cat"}, {"first": "cat"}, "cat"])
def test_invalid_id2label_is_rejected(labels: object) -> None:
    with pytest.raises(WeightsError, match="id2label"):
        read_labels({"id2label": labels})


# What config.json says


def plain_file(**changes: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return names and shapes of a ViT of ours in their format, with a config.json."""
    config = ours_like(**changes)
    with torch.device("meta"):
        tensors = dict(invert_rules(HF_VIT.rules(config, None), ViT(config).state_dict()))
    return shapes_of(tensors), json.loads(json.dumps(HF_VIT.make_config(config, [])))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 128),
        ("num_hidden_layers", 3),
        ("intermediate_size", 128),
        ("num_channels", 1),
        ("patch_size", 16),
        ("patch_size", [8, 16]),
        ("image_size", 64),
        ("image_size", [32, 40]),
        ("qkv_bias", False),
        ("num_register_tokens", 4),
        ("id2label", {"0": "cat", "1": "dog"}),
    ],
)
def test_contradictory_config_is_rejected(key: str, value: object) -> None:
    shapes, config = plain_file()
    with pytest.raises(WeightsError, match=f"disagree about {key}"):
        HF_VIT.infer_config(shapes, metadata({**config, key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("hidden_act", 3),
        ("layer_norm_eps", "small"),
        ("num_attention_heads", "4"),
        ("num_attention_heads", True),
        ("image_size", "large"),
        ("image_size", [32]),
        ("image_size", 0),
        ("patch_size", [8, 8, 8]),
        ("id2label", [1, 2]),
    ],
)
def test_invalid_config_is_rejected(key: str, value: object) -> None:
    shapes, config = plain_file()
    with pytest.raises(WeightsError, match=r"config\.json"):
        HF_VIT.infer_config(shapes, metadata({**config, key: value}))


def test_pooler_without_tanh_is_rejected() -> None:
    shapes, config = plain_file(num_classes=0, head=HeadConfig(pre_logits=64))
    assert HF_VIT.infer_config(shapes, metadata(config)).head.pre_logits == 64
    with pytest.raises(WeightsError, match="tanh"):
        HF_VIT.infer_config(shapes, metadata({**config, "pooler_act": "relu"}))


def test_defaults_without_config() -> None:
    shapes, _ = plain_file(width=128, heads=2)
    with pytest.raises(WeightsError, match="determine the number of heads"):
        HF_VIT.infer_config(shapes, metadata())
    result = HF_VIT.infer_config(shapes, replace(metadata(), is_declared=True))
    assert (result.heads, result.image_size, result.block.activation) == (2, 32, "gelu_erf")
    assert result.block.norm_eps == 1e-12


def test_unknown_heads_without_config_are_an_error() -> None:
    shapes, _ = plain_file(width=96)
    with pytest.raises(WeightsError, match="determine the number of heads") as raised:
        HF_VIT.infer_config(shapes, metadata())
    assert raised.value.hint is not None
    assert "config.json" in raised.value.hint


def test_non_square_grid_without_config_is_rejected() -> None:
    shapes, _ = plain_file(image_size=(24, 40))
    with pytest.raises(WeightsError, match="square"):
        HF_VIT.infer_config(shapes, metadata())


@pytest.mark.parametrize("model_type", ["vit_msn", "beit", "dinov2", ["vit"], 3])
def test_other_model_type_does_not_match(model_type: object) -> None:
    shapes, config = plain_file()
    assert not any(row.matches(shapes, metadata({**config, "model_type": model_type})) for row in FORMATS)


def test_empty_file_does_not_match() -> None:
    assert not any(row.matches({}, metadata()) for row in FORMATS)


# Missing and extra tensors


def test_missing_and_extra_tensors_have_file_names() -> None:
    shapes, config = plain_file()
    gone, odd = "vit.encoder.layer.1.attention.attention.key.bias", "vit.encoder.layer.1.attention.attention.rotary"
    shapes = {name: shape for name, shape in shapes.items() if name != gone} | {odd: (64,)}
    result = match_keys(
        HF_VIT.rules(HF_VIT.infer_config(shapes, metadata(config)), shapes), shapes, ignored=HF_VIT.ignored_names
    )
    assert (result.missing, result.extra) == ((gone,), (odd,))
    with pytest.raises(WeightsError, match="has no vit"):
        result.check()


@pytest.mark.parametrize("part", ["patch_embeddings.projection.weight", "position_embeddings"])
def test_file_without_embeddings_is_rejected(part: str) -> None:
    shapes, config = plain_file()
    with pytest.raises(WeightsError, match=f"no vit.embeddings.{part}"):
        HF_VIT.infer_config({name: shapes[name] for name in shapes if not name.endswith(part)}, metadata(config))


def test_huge_block_number_makes_no_huge_model() -> None:
    shapes, config = plain_file()
    shapes["vit.encoder.layer.99999999999.output.dense.weight"] = (64, 96)
    del config["num_hidden_layers"]
    assert HF_VIT.infer_config(shapes, metadata(config)).depth == 3


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("patch_embeddings.projection.weight", (64, 3, 8)),
        ("patch_embeddings.projection.weight", (64, 3, 0, 0)),
        ("position_embeddings", ()),
        ("position_embeddings", (1, 1, 64)),
        ("register_tokens", (64,)),
    ],
)
def test_invalid_shapes_are_rejected(part: str, shape: tuple[int, ...]) -> None:
    shapes, config = plain_file()
    for result in (config, {}):
        with pytest.raises(WeightsError):
            HF_VIT.infer_config({**shapes, f"vit.embeddings.{part}": shape}, metadata(result))


def test_inconsistent_sizes_are_rejected() -> None:
    shapes, config = plain_file()
    with pytest.raises(WeightsError, match="invalid model in the file: the heads do not divide"):
        HF_VIT.infer_config(shapes, metadata({**config, "num_attention_heads": 7}))


# Unsupported models


LEARNED_2D, RELATIVE, ROTARY = (PositionConfig(kind=kind) for kind in ("learned_2d", "relative", "rotary"))
NO_VIT = [
    (BiTConfig(), "a ResNet"),
    (ours_like(backbone=BackboneConfig(units=()), patch_size=1), "a hybrid"),
    (ours_like(pooling="mean"), "mean pooling"),
    (ours_like(pooling="map"), "attention pooling"),
    (ours_like(pooling="mean", block=BlockConfig(axial=True)), "axial attention"),
    (ours_like(positions=PositionConfig(kind="none")), "no positions"),
    (ours_like(positions=LEARNED_2D), "learned positions of rows and columns"),
    (ours_like(positions=RELATIVE), "relative positions"),
    (ours_like(positions=ROTARY), "rotary positions"),
    (ours_like(positions=PositionConfig(injection="shared")), "positions at every layer"),
    (ours_like(positions=PositionConfig(injection="every_layer")), "positions at every layer"),
    (ours_like(positions=PositionConfig(covers="patches")), "a class token without a position"),
    (ours_like(block=BlockConfig(attention=AttentionConfig(qk_norm=True))), "normalized queries and keys"),
    (ours_like(head=HeadConfig(norm="after_pooling")), "a norm after pooling"),
]
REFUSED = [
    *[(row, config, reason) for row in FORMATS for config, reason in NO_VIT],
    (HF_VIT, ours_like(tokens=TokenConfig(distillation=True)), "a distillation token"),
    (HF_VIT, ours_like(tokens=TokenConfig(registers=1)), "registers"),
    (HF_VIT, ours_like(block=SCALED), "LayerScale"),
    (HF_VIT, ours_like(block=BlockConfig(activation="swiglu")), "SwiGLU"),
    (HF_VIT, ours_like(head=HeadConfig(pre_logits=64)), "pre-logits under a classifier"),
    (HF_DEIT, ours_like(), "no distillation token"),
    (HF_DEIT, ours_like(tokens=TokenConfig(distillation=True, registers=1)), "registers"),
    (HF_DEIT, ours_like(tokens=TokenConfig(distillation=True), block=SCALED), "LayerScale"),
    (HF_VIT_MAE, ours_like(), "a classifier of the class token"),
    (HF_VIT_MAE, ours_like(num_classes=0, head=HeadConfig(pre_logits=64)), "pre-logits"),
    (HF_VIT_MAE, ours_like(num_classes=0, tokens=TokenConfig(registers=1)), "registers"),
    (HF_DINOV2, ours_like(num_classes=0), "no LayerScale"),
    (HF_DINOV2, ours_like(block=SCALED), "a classifier of the class token"),
    (HF_DINOV2, ours_like(num_classes=0, block=SCALED, head=HeadConfig(pre_logits=64)), "pre-logits"),
    (HF_DINOV2, ours_like(num_classes=0, block=SCALED), "an MLP that is not a multiple of the width"),
    (HF_DINOV2, ours_like(num_classes=0, block=GATED, mlp_dim=100), "an MLP that is not a multiple of the width"),
    (HF_DINOV2, ours_like(num_classes=0, block=SCALED, image_size=(24, 40)), "an image that is not square"),
]


@pytest.mark.parametrize(
    ("row", "config", "reason"), REFUSED, ids=[f"{row.name}: {reason}" for row, _, reason in REFUSED]
)
def test_unsupported_model_gives_the_reason(row: Format, config: Any, reason: str) -> None:
    assert row.unsupported_reason(config) == reason
    if isinstance(config, ViTConfig):
        with pytest.raises(WeightsError, match=reason):
            row.make_config(config, [])
    else:
        with pytest.raises(WeightsError, match="ResNet"):
            row.rules(config, None)
