"""Formats of timm, DeiT, MAE, DINOv2 and DINOv3: round trips, naming schemes, unsupported models, and logits against
timm, which has all five models and reads the names of all five."""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from model_cases import CASES
from oracle.comparison import assert_close, random_images, randomize
from oracles import import_timm
from torch import Tensor, nn

from vitkit.core.errors import WeightsError
from vitkit.core.sizes import pair
from vitkit.data.decode import decode
from vitkit.data.preprocessing import ORIGINS
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
from vitkit.weights.formats.base import FileMetadata, Format
from vitkit.weights.formats.timm import DEIT, DINOV2, DINOV3, MAE, TIMM
from vitkit.weights.formats.timm.config import find_nearest_architecture, make_model_args, make_timm_config
from vitkit.weights.rules import KeyMatch, apply_rules, invert_rules, match_keys
from vitkit.zoo.registry import Model, create, find_variant
from vitkit.zoo.variants import ModelConfig

FORMATS = (TIMM, DEIT, MAE, DINOV2, DINOV3)
DATA = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS, PHOTOS = DATA / "weights" / "deit_tiny_patch16_224.pth", DATA / "photos"

ERF = BlockConfig(activation="gelu_erf")
SWIGLU = BlockConfig(activation="swiglu", layer_scale=1e-5)
SMALL = ViTConfig(
    image_size=32,
    patch_size=8,
    width=64,
    depth=2,
    heads=1,
    mlp_dim=96,
    num_classes=10,
    positions=PositionConfig(origin="timm"),
    block=ERF,
)
STATED = {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 1}}
"""config.json of a model like SMALL."""
PATCHES = PositionConfig(origin="timm", covers="patches")
WITH_CLASS = TokenConfig(class_token=True)
AFTER = HeadConfig(norm="after_pooling")
HYBRID = replace(
    SMALL, patch_size=1, image_size=(32, 48), backbone=BackboneConfig(units=(2, 1), root_width=32, origin="timm")
)

HELD_BY_TIMM: dict[str, ModelConfig] = {
    "class token": SMALL,
    "four heads": replace(SMALL, heads=4),
    "tanh GELU": replace(SMALL, block=replace(ERF, activation="gelu_tanh")),
    "wide image, tall patches": replace(SMALL, image_size=(32, 48), patch_size=(16, 8)),
    "gray": replace(SMALL, channels=1),
    "odd MLP": replace(SMALL, width=44, heads=4, mlp_dim=31),
    "no classes": replace(SMALL, num_classes=0),
    "mean": replace(SMALL, pooling="mean"),
    "mean, norm after": replace(SMALL, pooling="mean", head=AFTER),
    "mean, norm after, class token": replace(SMALL, pooling="mean", head=AFTER, tokens=WITH_CLASS),
    "mean, class token": replace(SMALL, pooling="mean", tokens=WITH_CLASS),
    "class token, norm after": replace(SMALL, head=AFTER),
    "attention pooling": replace(SMALL, pooling="map", heads=2),
    "attention pooling, class token": replace(SMALL, pooling="map", tokens=WITH_CLASS),
    "attention pooling, norm after": replace(SMALL, pooling="map", head=AFTER),
    "LayerScale": replace(SMALL, block=replace(ERF, layer_scale=1e-5)),
    "normalized queries": replace(SMALL, block=replace(ERF, attention=AttentionConfig(qk_norm=True))),
    "no bias": replace(SMALL, block=replace(ERF, attention=AttentionConfig(qkv_bias=False))),
    "no positions": replace(SMALL, positions=PositionConfig(kind="none", origin="timm")),
    "positions of patches": replace(SMALL, positions=PATCHES),
    "registers": replace(SMALL, tokens=TokenConfig(registers=4), positions=PATCHES),
    "registers, placed class token": replace(SMALL, tokens=TokenConfig(registers=4)),
    "registers, mean": replace(SMALL, tokens=TokenConfig(registers=4), pooling="mean"),
    "SwiGLU": replace(SMALL, block=SWIGLU),
    "SwiGLU without LayerScale": replace(SMALL, block=replace(SWIGLU, layer_scale=None)),
    "distilled": replace(SMALL, tokens=TokenConfig(distillation=True)),
    "hybrid": HYBRID,
    "hybrid of four stages": replace(
        HYBRID, image_size=64, backbone=BackboneConfig(units=(1,) * 4, root_width=32, origin="timm")
    ),
    "hybrid, 2x2 patches": replace(HYBRID, patch_size=2),
    "hybrid of the root": replace(SMALL, patch_size=4, backbone=BackboneConfig(units=(), root_width=64, origin="timm")),
    "BiT": BiTConfig(units=(2, 1), num_classes=10, image_size=64, origin="timm"),
    "BiT without classes": BiTConfig(units=(1, 1), num_classes=0, image_size=64, origin="timm"),
}
DINO = replace(SMALL, num_classes=0, positions=PositionConfig(origin="dinov2"), block=replace(ERF, layer_scale=1e-5))
ROTARY = PositionConfig(kind="rotary", origin="dinov2")
DINO3 = replace(DINO, positions=ROTARY, block=replace(DINO.block, norm_eps=1e-5), image_size=224, patch_size=32)
HELD: dict[str, dict[str, ViTConfig]] = {
    "deit": {
        "class token": replace(SMALL, positions=PositionConfig(origin="deit")),
        "two heads": replace(SMALL, positions=PositionConfig(origin="deit"), width=128, heads=2),
        "distilled": replace(
            SMALL, positions=PositionConfig(origin="deit"), tokens=TokenConfig(distillation=True), channels=1
        ),
        "the third": replace(
            SMALL, positions=replace(PATCHES, origin="deit"), block=replace(ERF, layer_scale=1e-5), image_size=48
        ),
    },
    "mae": {
        "pre-trained": replace(SMALL, positions=PositionConfig(origin="mae"), num_classes=0),
        "fine-tuned": replace(
            SMALL, positions=PositionConfig(origin="mae"), pooling="mean", head=AFTER, tokens=WITH_CLASS
        ),
    },
    "dinov2": {
        "small": DINO,
        "registers": replace(
            DINO, tokens=TokenConfig(registers=4), positions=PositionConfig(origin="dinov2-registers")
        ),
        "giant": replace(DINO, block=SWIGLU, width=128, heads=2),
    },
    "dinov3": {
        "small": replace(DINO3, tokens=TokenConfig(registers=4)),
        "plus": replace(DINO3, block=replace(SWIGLU, norm_eps=1e-5), tokens=TokenConfig(registers=4)),
        "without registers, four heads": replace(DINO3, heads=4),
        "no bias": replace(DINO3, block=replace(DINO3.block, attention=AttentionConfig(qkv_bias=False))),
    },
}
EVERY = [(TIMM, name) for name in HELD_BY_TIMM] + [(f, name) for f in FORMATS for name in HELD.get(f.name, {})]
formats_and_models = pytest.mark.parametrize(
    ("written", "name"), EVERY, ids=[f"{written.name}: {name}" for written, name in EVERY]
)


def held(written: Format, name: str) -> ModelConfig:
    return HELD_BY_TIMM[name] if written is TIMM else HELD[written.name][name]


def metadata(written: Format, config: ModelConfig) -> FileMetadata:
    """Return the metadata of a file: timm's config.json, none for the others."""
    if written is TIMM:
        return FileMetadata(file_type="safetensors", config=beside(config))
    return FileMetadata(file_type="torch", container=None if "dino" in written.name else "model", is_declared=True)


def beside(config: ModelConfig) -> dict[str, Any]:
    """Return timm's config.json, without the architecture if timm has none."""
    try:
        return make_timm_config(config)
    except WeightsError:
        return {
            "model_args": make_model_args(config) if isinstance(config, ViTConfig) else {},
            "pretrained_cfg": {"input_size": [config.channels, *pair(config.image_size)]},
        }


def shapes_of(file: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in file.items()}


def same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether names, shapes and bits are equal."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def random_model(config: ModelConfig) -> Model:
    model = create(config)
    randomize(model)
    return model.eval()


def file_of(model: Model, written: Format) -> dict[str, Tensor]:
    return dict(invert_rules(written.rules(model.config, None), model.state_dict()))


def loaded(written: Format, file: Mapping[str, Tensor], beside_it: FileMetadata) -> Model:
    """Load the model in a file."""
    shapes = shapes_of(file)
    config = written.infer_config(shapes, beside_it)
    rules = written.rules(config, shapes)
    match_keys(rules, file, ignored=written.ignored_names).check()
    model = create(config, device="meta")
    model.load_state_dict(dict(apply_rules(rules, file)), strict=True, assign=True)
    return model.eval()


def images_for(config: ModelConfig) -> Tensor:
    return random_images(2, config.channels, *pair(config.image_size)).float()


@torch.no_grad()
def assert_same_logits(ours: Model, theirs: nn.Module) -> None:
    images = images_for(ours.config)
    assert_close(ours(images), theirs.eval()(images))


# timm's own models


def timm_model(config: ModelConfig) -> nn.Module:
    """Build timm's model for a configuration from its classes, independent of `make_timm_config`."""
    import_timm()
    from timm.layers import GroupNormAct, HybridEmbed, LayerNorm, StdConv2d, StdConv2dSame, SwiGLUPacked  # noqa: PLC0415
    from timm.models.deit import VisionTransformerDistilled  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    if isinstance(config, BiTConfig):
        return ResNetV2(
            config.units,
            num_classes=config.num_classes,
            in_chans=config.channels,
            stem_type="fixed",
            conv_layer=partial(StdConv2d, eps=1e-8),  # as its own BiT has it
            norm_layer=partial(GroupNormAct, num_groups=32),
        )
    block, gated = config.block, config.block.activation == "swiglu"
    arguments: dict[str, Any] = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": (config.mlp_dim * (1 + gated) + 0.1) / config.width,  # timm rounds down
        "global_pool": {"class": "token", "mean": "avg", "map": "map"}[config.pooling],
        "class_token": config.class_tokens > 0,
        "fc_norm": config.head.norm == "after_pooling",
        "qkv_bias": block.attention.qkv_bias,
        "qk_norm": block.attention.qk_norm,
        "init_values": block.layer_scale,
        "reg_tokens": config.tokens.registers,
        "no_embed_class": config.positions.covers == "patches",
        "pos_embed": "none" if config.positions.kind == "none" else "learn",
        "pool_include_prefix": config.pooling == "map",
        "norm_layer": partial(LayerNorm, eps=block.norm_eps),
        "act_layer": partial(nn.GELU, approximate="tanh" if block.activation == "gelu_tanh" else "none"),
    }
    if gated:
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    if config.backbone:
        units, root = config.backbone.units, config.backbone.root_width
        layers: dict[str, Any] = {
            "conv_layer": partial(StdConv2dSame, eps=1e-8),
            "norm_layer": partial(GroupNormAct, num_groups=32),
            "stem_type": "same",
            "preact": False,
        }
        if units:
            channels = tuple(4 * root * 2**stage for stage in range(len(units)))
            sizes = {"in_chans": config.channels, "channels": channels, "stem_chs": root}
            backbone = ResNetV2(units, num_classes=0, global_pool="", **sizes, **layers)
        else:
            backbone = create_resnetv2_stem(config.channels, root, **layers)
        arguments["embed_layer"] = partial(HybridEmbed, backbone)
    return (VisionTransformerDistilled if config.tokens.distillation else VisionTransformer)(**arguments)


COMPUTED = [name for name in HELD_BY_TIMM if name != "BiT without classes"]


@pytest.mark.parametrize("name", COMPUTED)
def test_loaded_file_equals_timm(name: str) -> None:
    config = HELD_BY_TIMM[name]
    theirs = timm_model(config)
    randomize(theirs)
    ours = loaded(TIMM, theirs.state_dict(), metadata(TIMM, config))
    assert ours.config == config
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("name", COMPUTED)
def test_timm_loads_our_file(name: str) -> None:
    config = HELD_BY_TIMM[name]
    ours, theirs = random_model(config), timm_model(config)
    theirs.load_state_dict(file_of(ours, TIMM), strict=True)
    assert_same_logits(ours, theirs)


NAMED = [
    name
    for name, config in HELD_BY_TIMM.items()
    if isinstance(config, ViTConfig) and (config.backbone is None or not config.backbone.units)
]


@pytest.mark.parametrize("name", NAMED)
def test_timm_creates_the_model_from_our_config(name: str, tmp_path: Path) -> None:
    timm = import_timm()
    config = HELD_BY_TIMM[name]
    ours = random_model(config)
    (tmp_path / "config.json").write_text(json.dumps(make_timm_config(config)), encoding="utf-8")
    safetensors.torch.save_file(file_of(ours, TIMM), tmp_path / "model.safetensors")
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert_same_logits(ours, theirs)


NAMED_RESNETS = ("R+Ti/16", "R26+S/32", "R50+B/16", "R50+L/32", "BiT-R50x1", "BiT-R101x1", "BiT-R152x2")


@pytest.mark.parametrize("name", NAMED_RESNETS)
def test_timm_hybrids_and_resnets_equal_the_zoo(name: str) -> None:
    timm = import_timm()
    config = replace(find_variant(name).config, image_size=256)
    if isinstance(config, ViTConfig):
        backbone = replace(config.backbone, origin="timm")
        config = replace(config, depth=1, block=ERF, positions=PositionConfig(origin="timm"), backbone=backbone)
    else:
        config = replace(config, origin="timm")
    result = make_timm_config(config)
    with torch.device("meta"):
        theirs = timm.create_model(result["architecture"], **result["model_args"])
    file = dict(invert_rules(TIMM.rules(config, None), create(config, device="meta").state_dict()))
    assert shapes_of(file) == shapes_of(theirs.state_dict())
    assert TIMM.infer_config(shapes_of(file), FileMetadata(file_type="safetensors", config=result)) == config
    named = {"architecture": result["architecture"], "pretrained_cfg": result["pretrained_cfg"]}
    assert TIMM.infer_config(shapes_of(file), FileMetadata(file_type="safetensors", config=named)) == config


def test_rotary_config_has_no_argument_of_timm_1_0_30() -> None:
    assert "qk_norm" not in make_model_args(DINO3)
    assert "qk_norm" in make_model_args(SMALL)


def test_unnamed_resnet_has_no_config() -> None:
    for name in ("BiT-R200x3", "BiT-R50x2"):
        with pytest.raises(WeightsError, match="no architecture with this ResNet"):
            make_timm_config(find_variant(name).config)


# Every format


@formats_and_models
def test_file_survives_round_trip(written: Format, name: str) -> None:
    config = held(written, name)
    unnamed = written is TIMM and find_nearest_architecture(config) is None
    assert written.unsupported_reason(config) == ("a ResNet without a name in timm" if unnamed else None)
    model = random_model(config)
    file, beside_it = file_of(model, written), metadata(written, config)
    assert [existing.name for existing in FORMATS if existing.matches(shapes_of(file), beside_it)] == [written.name]
    again = loaded(written, file, beside_it)
    assert same_bits(again.state_dict(), model.state_dict())
    assert same_bits(dict(invert_rules(written.rules(config, shapes_of(file)), again.state_dict())), file)
    with torch.no_grad():
        assert torch.equal(again(images_for(config)), model(images_for(config)))


@pytest.mark.parametrize(
    ("written", "name"),
    [(TIMM, "class token"), (DEIT, "class token"), (MAE, "pre-trained"), (DINOV2, "small")],
    ids=lambda value: getattr(value, "name", value),
)
def test_fixed_table_becomes_a_learned_one(written: Format, name: str) -> None:
    config = held(written, name)
    assert isinstance(config, ViTConfig)
    model = create(replace(config, positions=PositionConfig(kind="sincos_2d", sincos="mae")))
    assert written.unsupported_reason(model.config) is None
    again = loaded(written, file_of(model, written), metadata(written, config))
    assert again.config == config
    assert same_bits(again.state_dict(), model.state_dict())


@formats_and_models
def test_missing_and_extra_names_are_listed(written: Format, name: str) -> None:
    config = held(written, name)
    rules = written.rules(config, None)
    names = [theirs for rule in rules for theirs in rule.theirs]
    assert len(set(names)) == len(names)
    assert match_keys(rules, names, ignored=written.ignored_names) == KeyMatch((), ())
    result = match_keys(rules, [*names[1:], "blocks.7.odd"], ignored=written.ignored_names)
    assert result == KeyMatch((names[0],), ("blocks.7.odd",))


REFUSED_BY_TIMM = {
    "learned_1d-every_layer": "positions at every layer",
    "learned_1d-shared": "positions at every layer",
    "learned_2d-stem": "learned positions of rows and columns",
    "relative-shared": "relative positions",
    "rotary-shared": "tanh GELU with rotary positions",
    "sincos_2d-shared": "positions at every layer",
    "map-swiglu": "SwiGLU with attention pooling",
    "distilled-registers": "a distillation token with registers",
    "distilled-after-pooling": "a distillation token, pooled before the norm",
    "axial": "axial attention",
    "pre-logits": "pre-logits",
    "erf": "a norm eps other than 1e-06",
}


@pytest.mark.parametrize("name", CASES)
def test_timm_supports_a_model_or_gives_a_reason(name: str) -> None:
    config = CASES[name]
    reason = TIMM.unsupported_reason(config)
    if name in REFUSED_BY_TIMM:
        assert reason == REFUSED_BY_TIMM[name]
    if reason:
        return
    model = random_model(config)
    again = loaded(TIMM, file_of(model, TIMM), metadata(TIMM, config))
    assert same_bits(again.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(images_for(config)), model(images_for(config)))


OTHERS = {
    "hybrid": replace(SMALL, patch_size=1, backbone=BackboneConfig(units=(1,), root_width=32)),
    "ResNet": BiTConfig(),
    "mean": replace(SMALL, pooling="mean"),
    "attention pooling": replace(SMALL, pooling="map", tokens=WITH_CLASS),
    "class token, norm after": replace(SMALL, head=AFTER),
    "distilled": replace(SMALL, tokens=TokenConfig(distillation=True)),
    "normalized queries": HELD_BY_TIMM["normalized queries"],
    "tanh GELU": HELD_BY_TIMM["tanh GELU"],
    "four heads": HELD_BY_TIMM["four heads"],
    "wide": replace(SMALL, image_size=(32, 48)),
    "registers": replace(SMALL, tokens=TokenConfig(registers=4)),
    "SwiGLU": replace(SMALL, block=replace(SWIGLU, layer_scale=None)),
    "LayerScale": HELD_BY_TIMM["LayerScale"],
    "positions of patches": HELD_BY_TIMM["positions of patches"],
    "no bias": HELD_BY_TIMM["no bias"],
    "no positions": HELD_BY_TIMM["no positions"],
    "rotary": replace(SMALL, positions=PositionConfig(kind="rotary"), block=replace(ERF, norm_eps=1e-5)),
    "rotary of base 10": replace(DINO3, positions=replace(ROTARY, rotary_base=10.0)),
    "classes": SMALL,
    "axial": CASES["axial"],
    "eps": CASES["erf"],
    "learned positions of DINOv2": replace(DINO, block=DINO3.block),
    "pre-logits": replace(SMALL, head=HeadConfig(pre_logits=8)),
}
REFUSALS = {
    "hybrid": ("a hybrid", "a hybrid", "a hybrid", "a norm eps other than 1e-05"),
    "ResNet": ("a ResNet", "a ResNet", "a ResNet", "a ResNet"),
    "mean": ("no class token", "no class token", "no class token", "a norm eps other than 1e-05"),
    "attention pooling": (
        "attention pooling",
        "attention pooling",
        "attention pooling",
        "a norm eps other than 1e-05",
    ),
    "class token, norm after": (
        "class pooling before the norm",
        "class pooling before the norm",
        "class pooling before the norm",
        "a norm eps other than 1e-05",
    ),
    "distilled": (None, "a distillation token", "a distillation token", "a norm eps other than 1e-05"),
    "normalized queries": (
        "normalized queries and keys",
        "normalized queries and keys",
        "normalized queries and keys",
        "a norm eps other than 1e-05",
    ),
    "tanh GELU": ("tanh GELU", "tanh GELU", "a classifier", "a norm eps other than 1e-05"),
    "four heads": (
        "a number of heads that does not follow from the width",
        "a number of heads that does not follow from the width",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "wide": (
        "a grid that is not square",
        "a grid that is not square",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "registers": ("registers", "registers", "a classifier", "a norm eps other than 1e-05"),
    "SwiGLU": ("SwiGLU", "SwiGLU", "a classifier", "a norm eps other than 1e-05"),
    "LayerScale": (
        "LayerScale with a position of the class token",
        "LayerScale",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "positions of patches": (
        "a class token without a position",
        "a class token without a position",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "no bias": (
        "no qkv biases",
        "no qkv biases",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "no positions": ("no positions", "no positions", "a classifier", "a norm eps other than 1e-05"),
    "rotary": (*("a norm eps other than 1e-06",) * 3, "a classifier"),
    "rotary of base 10": (*("a norm eps other than 1e-06",) * 3, "a rotary base other than 100"),
    "classes": (
        None,
        "a classifier of the class token, because such files are DeiT's",
        "a classifier",
        "a norm eps other than 1e-05",
    ),
    "axial": ("axial attention",) * 4,
    "eps": (*("a norm eps other than 1e-06",) * 3, "a classifier"),
    "learned positions of DINOv2": (*("a norm eps other than 1e-06",) * 3, "learned_1d positions"),
    "pre-logits": ("pre-logits",) * 4,
}


@pytest.mark.parametrize("name", OTHERS)
def test_reasons_of_the_other_formats(name: str) -> None:
    result = tuple(written.unsupported_reason(OTHERS[name]) for written in (DEIT, MAE, DINOV2, DINOV3))
    assert result == REFUSALS[name]


@pytest.mark.parametrize("written", [DEIT, MAE, DINOV2, DINOV3], ids=lambda written: written.name)
def test_only_timm_has_rules_for_resnets(written: Format) -> None:
    with pytest.raises(WeightsError, match="Vision Transformers only"):
        written.rules(BiTConfig(), None)


# Facebook's files, against the models of timm that read them


def filtered(file: Mapping[str, Tensor], model: nn.Module, *, module: str = "vision_transformer") -> dict[str, Tensor]:
    """Convert a published file with timm's own converter."""
    timm = import_timm()
    convert = getattr(timm.models, module).checkpoint_filter_fn
    return convert({name: tensor.clone() for name, tensor in file.items()}, model)


@pytest.mark.parametrize(
    ("written", "name"),
    [(written, name) for written in (DEIT, MAE, DINOV2) for name in HELD[written.name] if name != "registers"],
    ids=lambda value: getattr(value, "name", value),
)
def test_timm_reads_our_facebook_files(written: Format, name: str) -> None:
    config = HELD[written.name][name]
    ours, theirs = random_model(config), timm_model(config)
    file = file_of(ours, written)
    theirs.load_state_dict(
        filtered(file, theirs)
        if name != "the third"
        else {re.sub(r"gamma_(\d)", r"ls\1.gamma", key): tensor for key, tensor in file.items()},
        strict=True,
    )
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize(
    ("written", "name"),
    [(DEIT, "class token"), (DEIT, "two heads"), (DEIT, "distilled"), (MAE, "pre-trained"), (MAE, "fine-tuned")],
    ids=lambda value: getattr(value, "name", value),
)
def test_facebook_file_logits_equal_timm(written: Format, name: str) -> None:
    """For these models their names equal timm's, so timm's state dict is a file of theirs."""
    config = HELD[written.name][name]
    theirs = timm_model(config)
    randomize(theirs)
    ours = loaded(written, theirs.state_dict(), metadata(written, config))
    assert ours.config == config
    assert_same_logits(ours, theirs)


def test_timm_reads_our_dinov2_with_registers() -> None:
    """timm adds the position of the class token to the token and has no row for it."""
    config = HELD["dinov2"]["registers"]
    ours, theirs = random_model(config), timm_model(replace(config, positions=PATCHES))
    file = file_of(ours, DINOV2)
    assert file["pos_embed"].shape == (1, 17, 64)
    assert file["register_tokens"].shape == (1, 4, 64)
    theirs.load_state_dict(filtered(file, theirs), strict=True)
    assert_same_logits(ours, theirs)


def eva(config: ViTConfig, **changes: Any) -> nn.Module:
    """Build timm's DINOv3 of this size."""
    import_timm()
    from timm.layers import LayerNorm  # noqa: PLC0415
    from timm.models.eva import Eva  # noqa: PLC0415

    arguments: dict[str, Any] = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": (config.mlp_dim + 0.1) / config.width,
        "qkv_bias": config.block.attention.qkv_bias,
        "swiglu_mlp": config.block.activation == "swiglu",
        "swiglu_align_to": 8 if config.block.activation == "swiglu" else 0,
        "init_values": config.block.layer_scale,
        "num_reg_tokens": config.tokens.registers,
        "global_pool": "token",
        "rope_type": "dinov3",
        "rope_temperature": 100,
        "rope_rotate_half": True,
        "use_rot_pos_emb": True,
        "use_abs_pos_emb": False,
        "use_fc_norm": False,
        "norm_layer": partial(LayerNorm, eps=1e-5),
    }
    return Eva(**arguments | changes)


def without_key_biases(model: Model) -> Model:
    """Zero the bias of keys, which DINOv3 does not have."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv.bias"):
                parameter.chunk(3)[1].zero_()
    return model


@pytest.mark.parametrize("name", [name for name in HELD["dinov3"] if "registers" not in name])
def test_timm_reads_our_dinov3(name: str) -> None:
    config = HELD["dinov3"][name]
    if not config.tokens.registers:  # which timm knows DINOv3 by
        config = replace(config, tokens=TokenConfig(registers=1))
    ours, theirs = without_key_biases(random_model(config)), eva(config)
    file = file_of(ours, DINOV3)
    assert {"storage_tokens", "mask_token", "rope_embed.periods"} <= file.keys()
    theirs.load_state_dict(filtered(file, theirs, module="eva"), strict=True)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("name", HELD["dinov3"])
def test_timm_dinov3_keeps_its_naming_scheme(name: str, pooling: Any) -> None:
    config = replace(HELD["dinov3"][name], num_classes=5, image_size=(64, 96), patch_size=16, pooling=pooling)
    theirs = eva(config, global_pool={"class": "token", "mean": "avg"}[pooling])
    randomize(theirs)
    file = theirs.state_dict()
    args = {"num_heads": config.heads, "img_size": [64, 96]}
    plus = "plus_" if config.block.activation == "swiglu" else ""
    described = {"architecture": f"vit_small_{plus}patch16_dinov3", "model_args": args}
    if pooling == "class":  # timm's own models average
        described["global_pool"] = "token"
    beside_it = FileMetadata(file_type="safetensors", config=described)
    assert [existing.name for existing in FORMATS if existing.matches(shapes_of(file), beside_it)] == ["timm"]
    ours = loaded(TIMM, file, beside_it)
    assert_same_logits(ours, theirs)
    assert same_bits(dict(invert_rules(TIMM.rules(ours.config, shapes_of(file)), ours.state_dict())), file)


# Dialects


def test_common_prefix_is_removed() -> None:
    model = random_model(SMALL)
    file = {f"module.{name}": tensor for name, tensor in file_of(model, TIMM).items()}
    beside_it = FileMetadata(file_type="torch", container="state_dict", config=STATED)
    assert TIMM.matches(shapes_of(file), beside_it)
    assert same_bits(loaded(TIMM, file, beside_it).state_dict(), model.state_dict())
    rules = TIMM.rules(SMALL, shapes_of(file))
    assert same_bits(dict(invert_rules(rules, model.state_dict())), file)
    without = file.keys() - {"module.norm.weight"}
    assert match_keys(rules, without | {"linear_head.weight"}) == KeyMatch(
        ("module.norm.weight",), ("linear_head.weight",)
    )


def test_chunked_blocks_are_numbered_continuously() -> None:
    model = random_model(DINO)
    file = {
        re.sub(r"^blocks\.(\d+)", lambda layer: f"backbone.blocks.{int(layer[1]) % 2}.{layer[1]}", name): tensor
        for name, tensor in file_of(model, DINOV2).items()
    }
    file = {name if name.startswith("backbone.") else f"backbone.{name}": tensor for name, tensor in file.items()}
    beside_it = FileMetadata(file_type="torch", container="teacher", is_declared=True)
    assert DINOV2.matches(shapes_of(file), beside_it)
    assert same_bits(loaded(DINOV2, file, beside_it).state_dict(), model.state_dict())
    assert same_bits(
        dict(invert_rules(DINOV2.rules(DINO, shapes_of(file)), model.state_dict())),
        file | {"backbone.mask_token": torch.zeros(1, 64)},
    )


def test_register_positions_are_added_to_registers() -> None:
    """Registers may have positions in timm's models; ours add them to the registers."""
    config = replace(SMALL, tokens=TokenConfig(registers=3))
    theirs = timm_model(config)
    randomize(theirs)
    file = theirs.state_dict()
    assert file["pos_embed"].shape[1] == 1 + 3 + 16
    args = STATED["model_args"] | {"no_embed_class": False}
    ours = loaded(TIMM, file, FileMetadata(file_type="safetensors", config=STATED | {"model_args": args}))
    assert_same_logits(ours, theirs)
    again = timm_model(config)
    again.load_state_dict(dict(invert_rules(TIMM.rules(config, shapes_of(file)), ours.state_dict())), strict=True)
    assert_same_logits(ours, again)


def test_two_layer_swiglu_is_joined() -> None:
    import_timm()
    from timm.layers import LayerNorm, SwiGLU  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    theirs = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=1,
        mlp_ratio=1.5,
        num_classes=10,
        mlp_layer=SwiGLU,
        act_layer=nn.SiLU,
        norm_layer=partial(LayerNorm, eps=1e-6),
    )
    randomize(theirs)
    file = theirs.state_dict()
    assert "blocks.0.mlp.fc1_g.weight" in file
    beside_it = FileMetadata(file_type="safetensors", config=STATED | {"architecture": "vit_giant_patch14_dinov2"})
    ours = loaded(TIMM, file, beside_it)
    assert_same_logits(ours, theirs)
    assert same_bits(dict(invert_rules(TIMM.rules(ours.config, shapes_of(file)), ours.state_dict())), file)


def test_autoencoder_decoder_is_ignored() -> None:
    config = HELD["mae"]["pre-trained"]
    model = random_model(config)
    decoder = ("mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight", "decoder_pos_embed")
    file = file_of(model, MAE) | {name: torch.ones(1, 1, 8) for name in decoder}
    for container in ("model", None):
        assert MAE.matches(shapes_of(file), FileMetadata(file_type="torch", container=container))
    again = loaded(MAE, file, FileMetadata(file_type="torch", container="model", is_declared=True))
    assert again.config == config
    assert same_bits(again.state_dict(), model.state_dict())


def test_dinov3_key_bias_is_masked() -> None:
    config = HELD["dinov3"]["small"]
    model = random_model(config)
    file = {name: tensor.clone() for name, tensor in file_of(without_key_biases(model), DINOV3).items()}
    mask = file["blocks.1.attn.qkv.bias_mask"]
    assert mask.tolist() == [1.0] * 64 + [0.0] * 64 + [1.0] * 64
    file["blocks.1.attn.qkv.bias"][64:128] = 7.0  # what training leaves there is of no effect
    file |= {"local_cls_norm.weight": torch.ones(64), "local_cls_norm.bias": torch.ones(64)}
    again = loaded(DINOV3, file, FileMetadata(file_type="torch"))
    assert same_bits(again.state_dict(), model.state_dict())


def test_key_bias_is_rejected_without_storage() -> None:
    config = HELD["dinov3"]["small"]
    shapes = shapes_of(eva(config).state_dict())
    with pytest.raises(WeightsError, match="cannot store a bias of keys"):
        dict(invert_rules(DINOV3.rules(config, shapes), random_model(config).state_dict()))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_other_rotary_periods_are_rejected(precision: torch.dtype) -> None:
    file = file_of(random_model(DINO3), DINOV3)
    periods = file["rope_embed.periods"]
    assert_close(periods, 100.0 ** (torch.arange(16) / 16))
    loaded(DINOV3, file | {"rope_embed.periods": periods.to(precision)}, FileMetadata(file_type="torch"))
    other = torch.linspace(1, 100, 16).to(precision)
    with pytest.raises(WeightsError, match="the rotary periods are not those of the model"):
        loaded(DINOV3, file | {"rope_embed.periods": other}, FileMetadata(file_type="torch"))


def test_pre_logits_of_old_timm_file_are_reported() -> None:
    model = random_model(replace(SMALL, head=HeadConfig(pre_logits=12)))
    again = loaded(TIMM, model.state_dict(), FileMetadata(file_type="torch", config=STATED))
    assert again.config == model.config


# What a file does not say, and what it says wrongly


@pytest.mark.parametrize(
    ("architecture", "width", "said"),
    [
        ("vit_base_patch16_224", 768, {"heads": 12, "activation": "gelu_erf"}),
        ("vit_huge_patch14_224", 1280, {"heads": 16}),
        ("vit_so400m_patch14_siglip_224", 1152, {"heads": 16, "activation": "gelu_erf"}),
        ("vit_so400m_patch16_siglip_256", 1152, {"heads": 16, "activation": "gelu_tanh"}),
        ("vit_large_patch16_siglip_512", 1024, {"heads": 16, "activation": "gelu_tanh"}),
        ("vit_giantopt_patch16_siglip_256", 1536, {"heads": 16, "activation": "gelu_tanh"}),
        ("vit_giant_patch14_dinov2", 1536, {"heads": 24, "activation": "swiglu"}),
        ("vit_base_patch16_gap_224", 768, {"heads": 16}),
        ("vit_gigantic_patch14_224", 1664, {"heads": 16}),
        ("vit_giant_patch14_224", 1408, {"heads": 16}),
        ("vit_medium_patch16_gap_256", 512, {"heads": 8}),
        ("deit3_small_patch16_224", 384, {"heads": 6}),
        ("deit_tiny_distilled_patch16_224", 192, {"heads": 3}),
        ("vit_small_patch14_reg4_dinov2", 384, {"heads": 6}),
    ],
)
def test_architecture_names_set_defaults(architecture: str, width: int, said: dict[str, Any]) -> None:
    """Return a file of the hub: names, shapes and a config.json without arguments."""
    timm = import_timm()
    with torch.device("meta"):
        theirs = timm.create_model(architecture, depth=1)
    described = {
        "architecture": architecture,
        "global_pool": theirs.global_pool,
        "pretrained_cfg": {"input_size": list(theirs.pretrained_cfg["input_size"])},
    }
    shapes = shapes_of(theirs.state_dict())
    config = TIMM.infer_config(shapes, FileMetadata(file_type="safetensors", config=described))
    assert isinstance(config, ViTConfig)
    assert config.width == width
    assert config.heads == said["heads"] == theirs.blocks[0].attn.num_heads
    assert config.block.activation == said.get("activation", "gelu_erf")
    assert pair(config.image_size) == theirs.patch_embed.img_size
    assert config.prefix_positions == (0 if theirs.no_embed_class else theirs.num_prefix_tokens)
    assert shapes_of(create(config, device="meta").state_dict()).keys() >= {"pos_embed", "patch_embed.proj.weight"}
    assert match_keys(TIMM.rules(config, shapes), shapes) == KeyMatch((), ())


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("vit_base_patch16_clip_224", "a norm before its blocks"),
        ("eva02_tiny_patch14_224", "eva02_tiny_patch14_224"),
        ("beit_base_patch16_224", "relative position biases"),
        ("vit_base_patch16_rope_reg1_gap_256", "vit_base_patch16_rope_reg1_gap_256"),
        ("vit_base_patch16_rope_224", "vit_base_patch16_rope_224"),
        ("vit_base_patch16_rope_mixed_224", "learned rotary positions"),
        ("vit_pe_core_tiny_patch16_384", "a norm before its blocks"),
        ("vit_relpos_base_patch16_224", "relative position biases"),
        ("vit_small_patch16_18x2_224", "blocks in parallel"),
    ],
)
def test_models_with_similar_names_are_rejected(architecture: str, reason: str) -> None:
    timm = import_timm()
    with torch.device("meta"):
        theirs = timm.create_model(architecture, depth=1)
    shapes = shapes_of(theirs.state_dict())
    for config in ({"architecture": architecture}, {}):
        beside_it = FileMetadata(file_type="safetensors", config=config)
        for existing in FORMATS:
            if existing.matches(shapes, beside_it):
                with pytest.raises(WeightsError, match=reason if config else None):
                    match_keys(existing.rules(existing.infer_config(shapes, beside_it), shapes), shapes).check()


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "heads in words": ({"model_args": {"num_heads": "four"}}, "num_heads has the wrong type"),
    "heads that are true": ({"model_args": {"num_heads": True}}, "num_heads has the wrong type"),
    "heads that do not divide": ({"model_args": {"num_heads": 7}}, "the heads do not divide the width"),
    "arguments in a list": ({"model_args": [1]}, "model_args is not an object"),
    "an image of three sides": ({"model_args": {"img_size": [1, 2, 3]}}, "invalid image size"),
    "an image of nothing": ({"pretrained_cfg": {"input_size": [3, 0, 32]}}, "invalid image size"),
    "another pooling": ({"global_pool": "avgmax"}, "unsupported pooling"),
    "another activation": ({"model_args": {"act_layer": "relu"}}, "unsupported activation"),
    "prefix pooled": ({"model_args": {"global_pool": "avg", "pool_include_prefix": True}}, "unsupported pooling"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_impossible_config_is_rejected(name: str) -> None:
    config, message = BROKEN[name]
    if isinstance(args := config.get("model_args", {}), dict):
        config = STATED | config | {"model_args": STATED["model_args"] | args}
    with pytest.raises(WeightsError, match=message):
        TIMM.infer_config(
            shapes_of(create(SMALL, device="meta").state_dict()), FileMetadata(file_type="safetensors", config=config)
        )


SHAPES = {
    "no patches": ({"patch_embed.proj.weight": None}, "the file has no patch_embed.proj.weight"),
    "patches in a matrix": ({"patch_embed.proj.weight": (64, 192)}, "an unexpected shape"),
    "a table for no square": ({"pos_embed": (1, 19, 64)}, "does not have a square grid"),
    "a table of nothing": ({"pos_embed": (1, 0, 64)}, "an unexpected shape"),
    "a block too far": ({"blocks.99999.norm1.weight": (64,)}, "block 2 is missing"),
    "both norms": ({"fc_norm.weight": (64,), "fc_norm.bias": (64,)}, "before or after pooling"),
    "no MLP": ({"blocks.0.mlp.fc2.weight": None}, "the file has no blocks.0.mlp.fc2.weight"),
    "an odd width": ({"patch_embed.proj.weight": (65, 3, 8, 8)}, "determine the number of heads"),
    "a classifier of one axis": ({"head.weight": (64,)}, "an unexpected shape"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_impossible_shapes_are_rejected(name: str) -> None:
    changes, message = SHAPES[name]
    heads = {} if name == "an odd width" else {"num_heads": 1}
    args = {"act_layer": "gelu", "global_pool": "token", **heads}
    beside_it = FileMetadata(file_type="torch", config={"model_args": args}, is_declared=True)
    shapes = shapes_of(create(SMALL, device="meta").state_dict()) | changes
    for existing in (TIMM, DEIT, MAE, DINOV2):
        with pytest.raises(WeightsError, match=message):
            existing.infer_config({key: shape for key, shape in shapes.items() if shape is not None}, beside_it)


def test_other_files_match_no_format() -> None:
    others = ({}, {"a": (1,)}, {"vit.embeddings.cls_token": (1, 1, 8)}, {"encoder.pos_embedding": (1, 2, 3)})
    for shapes in others:
        assert not any(existing.matches(shapes, FileMetadata(file_type="torch")) for existing in FORMATS)


# The real weights


@pytest.fixture(scope="module")
def deit_tiny() -> dict[str, Tensor]:
    if not WEIGHTS.is_file():
        pytest.skip(f"{WEIGHTS} is not there")
    return dict(torch.load(WEIGHTS, map_location="cpu", weights_only=True)["model"])


FACEBOOK = FileMetadata(file_type="torch", container="model", file_name="deit_tiny_patch16_224-a1311bcf.pth")


def test_deit_file_is_ti_16(deit_tiny: dict[str, Tensor]) -> None:
    shapes = shapes_of(deit_tiny)
    assert [existing.name for existing in FORMATS if existing.matches(shapes, FACEBOOK)] == ["deit"]
    expected = replace(find_variant("Ti/16").config, block=ERF, positions=PositionConfig(origin="deit"))
    assert DEIT.infer_config(shapes, FACEBOOK) == expected


def test_deit_file_survives_round_trip(deit_tiny: dict[str, Tensor]) -> None:
    shapes = shapes_of(deit_tiny)
    config = DEIT.infer_config(shapes, FACEBOOK)
    assert DEIT.unsupported_reason(config) is None
    rules = DEIT.rules(config, shapes)
    assert match_keys(rules, deit_tiny) == KeyMatch((), ())
    state = dict(apply_rules(rules, deit_tiny))
    assert same_bits(dict(invert_rules(rules, state)), deit_tiny)
    assert same_bits(dict(invert_rules(DEIT.rules(config, None), state)), deit_tiny)


RIGHT = 40
"""Correct of 50 photos, measured; mostly training images, so more than the 72 % of the validation set."""


def test_deit_weights_classify_photos(deit_tiny: dict[str, Tensor]) -> None:
    if not (PHOTOS / "labels.csv").is_file():
        pytest.skip(f"{PHOTOS} is not there")
    with (PHOTOS / "labels.csv").open(newline="") as lines:
        photos = list(csv.DictReader(lines))[::20]
    model = loaded(DEIT, deit_tiny, FACEBOOK)
    prepare, right = ORIGINS["deit"], 0
    with torch.inference_mode():
        for photo in photos:
            pixels = torch.from_numpy(prepare.to_pixels(decode((PHOTOS / photo["file_name"]).read_bytes())))
            right += int(model(prepare.normalize(pixels[None])).argmax()) == int(photo["class_index"])
    assert len(photos) == 50
    assert right == RIGHT
