"""Google's formats: round trips, naming schemes, unsupported models and damaged files."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
from model_cases import CASES, meta_model, random_vit, randomized, reduced_zoo
from torch import Tensor
from weights.google_files import (
    DIALECTS,
    FORMATS,
    NPZ,
    big_vision,
    drawn,
    on_one_axis,
    recognized,
    same_bits,
    shapes_of,
    tensors,
    with_prefix,
)
from witness import google_numpy as witness

from vitkit.core.errors import WeightsError
from vitkit.core.sizes import pair
from vitkit.model.config import (
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    DropoutConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.weights.formats.base import Format
from vitkit.weights.formats.bit import BIT
from vitkit.weights.formats.google import BIG_VISION, GOOGLE
from vitkit.weights.rules import KeyMatch, apply_rules, invert_rules, match_keys
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig

# Every model of every kind: written, described, read


def squared(config: ModelConfig) -> ModelConfig:
    """Return the model with a grid of 3×3 patches."""
    if isinstance(config, BiTConfig):
        return config
    stride = config.backbone.stride if config.backbone else 1
    height, width = (3 * stride * side for side in pair(config.patch_size))
    return replace(config, image_size=height if height == width else (height, width))


MODELS: dict[str, ModelConfig] = {
    name: squared(config)
    for name, config in chain(
        CASES.items(),
        reduced_zoo().items(),
        {
            "big_vision's class token": replace(CASES["learned_1d-stem"], positions=PositionConfig(covers="patches")),
            "map-pre-logits": replace(CASES["map"], head=HeadConfig(pre_logits=8)),
            "map-headless": replace(CASES["map"], num_classes=0),
            "hybrid-mean": replace(CASES["hybrid"], pooling="mean"),
            "hybrid-pre-logits": replace(CASES["hybrid"], head=HeadConfig(pre_logits=12)),
            "hybrid-gray": replace(CASES["hybrid"], channels=1),
            "eleven-layers": replace(CASES["learned_1d-stem"], depth=11),
            "dropout": replace(CASES["learned_1d-stem"], dropout=DropoutConfig(dense=0.1)),
            "bit-headless": BiTConfig(units=(1,), num_classes=0),
            "bit-eleven-units": BiTConfig(units=(11, 1), num_classes=3),
            "bit-gray": BiTConfig(units=(1, 1), channels=1, num_classes=3),
        }.items(),
    )
}
PLAIN = ["learned_1d-stem", "sincos_2d-stem", "learned_1d-mean", "sincos_2d-mean", "sincos-mae"]
VITS = [
    *PLAIN,
    "pre-logits",
    "pre-logits-mean",
    "headless",
    "gray",
    "one-layer-one-head",
    "eleven-layers",
    "dropout",
]
HYBRIDS = ["hybrid", "hybrid-of-the-root", "hybrid-mean", "hybrid-pre-logits", "hybrid-gray"]
PLACED_PATCHES = ["positions-of-patches-only", "big_vision's class token"]
POOLED = ["map", "map-pre-logits", "map-headless"]


def zoo_of(kind: str) -> list[str]:
    """Return a reduced zoo model: "vit", "hybrid" or "bit"."""

    def kind_of(config: ModelConfig) -> str:
        if isinstance(config, BiTConfig):
            return "bit"
        return "axial" if config.block.axial else "hybrid" if config.backbone else "vit"

    return [name for name, config in reduced_zoo().items() if kind_of(config) == kind]


HELD = {
    "google": {*VITS, *HYBRIDS, *zoo_of("vit"), *zoo_of("hybrid")},
    "big_vision": {*VITS, *PLACED_PATCHES, *POOLED, *zoo_of("vit")},
    "bit": {"bit-headless", "bit-eleven-units", "bit-gray", *zoo_of("bit")},
}


@cache
def state_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(16)
    return dict(randomized(create(MODELS[name], generator=torch.Generator().manual_seed(16))).state_dict())


def as_files_tell(config: ModelConfig, form: Format) -> ModelConfig:
    """Return the configuration without settings that no file stores: those of training, and the origin of positions."""
    if isinstance(config, BiTConfig):
        return replace(config, image_size=224)
    covers = config.positions.covers
    if not config.class_tokens:
        covers = "patches" if form is BIG_VISION else "all"
    return replace(
        config,
        positions=PositionConfig(covers=covers),
        tokens=TokenConfig(),
        head=replace(config.head, bias=0.0),
        dropout=DropoutConfig(),
    )


@pytest.mark.parametrize(("form", "model"), [(form, model) for form, held in HELD.items() for model in sorted(held)])
def test_model_survives_round_trip(form: str, model: str) -> None:
    config, state, table = MODELS[model], state_of(model), FORMATS[form]
    file = dict(invert_rules(table.rules(config, None), state))
    assert recognized(file) == [form]
    described = table.infer_config(shapes_of(file), NPZ)
    assert described == as_files_tell(config, table)
    rules = table.rules(described, shapes_of(file))
    assert match_keys(rules, file) == KeyMatch((), ())
    assert same_bits(dict(apply_rules(rules, file)), state)
    assert same_bits(dict(invert_rules(rules, state)), file)


@pytest.mark.parametrize("form", FORMATS)
def test_every_model_is_supported_or_rejected(form: str) -> None:
    refused = {name: FORMATS[form].unsupported_reason(config) for name, config in MODELS.items()}
    assert {name for name, reason in refused.items() if reason is None} == HELD[form]


@pytest.mark.parametrize("form", FORMATS)
def test_rules_cover_every_tensor(form: str) -> None:
    for name in HELD[form]:
        config = MODELS[name]
        ours = [tensor for rule in FORMATS[form].rules(config, None) for tensor in rule.ours]
        assert sorted(ours) == sorted(meta_model(config).state_dict()), name


NEITHER = {
    "distilled": "a distillation token",
    "registers": "registers",
    "mean-with-class-token": "a class token that pooling does not read",
    "relative-shared": "relative positions",
    "rotary-shared": "rotary positions",
    "learned_2d-stem": "learned positions of rows and columns",
    "none-stem": "no positions, because their table determines the image size",
    "learned_1d-every_layer": "positions at every layer",
    "sincos_2d-shared": "positions at every layer",
    "swiglu": "SwiGLU",
    "erf": "exact GELU",
    "layer-scale": "LayerScale",
    "axial": "axial attention",
    "no-qkv-bias": "no qkv biases",
    "qk-norm": "normalized queries and keys",
    "norm-after-mean-pooling": "a norm after pooling",
}


@pytest.mark.parametrize(
    ("form", "model", "reason"),
    [
        *((form, model, reason) for form in ("google", "big_vision") for model, reason in NEITHER.items()),
        ("google", "map", "attention pooling"),
        ("google", "positions-of-patches-only", "a class token without a position"),
        ("big_vision", "map-with-class-token", "a class token that pooling does not read"),
        ("big_vision", "hybrid", "a hybrid"),
        ("google", "bit-gray", "a ResNet"),
        ("big_vision", "bit-gray", "a ResNet"),
        ("bit", "hybrid", "a Vision Transformer"),
    ],
)
def test_unsupported_reason(form: str, model: str, reason: str) -> None:
    assert FORMATS[form].unsupported_reason(MODELS[model]) == reason


def test_inexpressible_settings_are_rejected() -> None:
    plain = MODELS["learned_1d-stem"]
    assert isinstance(plain, ViTConfig)
    for form in (GOOGLE, BIG_VISION):
        assert form.unsupported_reason(replace(plain, image_size=(32, 48))) == "a grid that is not square"
        assert (
            form.unsupported_reason(replace(plain, block=BlockConfig(norm_eps=1e-5)))
            == "a LayerNorm eps other than 1e-6"
        )
        assert form.unsupported_reason(replace(plain, depth=1001)) == "more than 1000 layers"
    long = replace(plain, backbone=BackboneConfig(units=(100,)), patch_size=1, image_size=32)
    assert GOOGLE.unsupported_reason(long) == "a backbone of more than 9 stages, or 99 units in one"
    assert BIT.unsupported_reason(BiTConfig(units=(100,))) == "more than 9 stages, or 99 units in one"


# Dialects: the same model under other names


@pytest.mark.parametrize("dialect", DIALECTS)
def test_file_keeps_its_naming_scheme(dialect: str) -> None:
    (name, translate), form = DIALECTS[dialect], FORMATS[DIALECTS[dialect][0]]
    file = tensors(translate(drawn(depth=3)))
    config = form.infer_config(shapes_of(file), NPZ)
    assert form.unsupported_reason(config) is None, name
    rules = form.rules(config, shapes_of(file))
    assert match_keys(rules, file) == KeyMatch((), ())
    assert same_bits(dict(invert_rules(rules, dict(apply_rules(rules, file)))), file)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_missing_and_extra_tensors_are_reported(dialect: str) -> None:
    form, translate = FORMATS[DIALECTS[dialect][0]], DIALECTS[dialect][1]
    shapes = shapes_of(translate(drawn(depth=3)))
    rules = form.rules(form.infer_config(shapes, NPZ), shapes)
    for name in shapes:
        left = [other for other in shapes if other != name]
        assert match_keys(rules, left, ignored=form.ignored_names) == KeyMatch((name,), ())
        assert match_keys(rules, [*shapes, f"{name}_odd"], ignored=form.ignored_names) == KeyMatch((), (f"{name}_odd",))


def test_missing_layer_is_reported() -> None:
    shapes = shapes_of({name: array for name, array in drawn(depth=3).items() if "encoderblock_1/" not in name})
    config = GOOGLE.infer_config(shapes, NPZ)
    assert isinstance(config, ViTConfig)
    assert config.depth == 3
    missing = match_keys(GOOGLE.rules(config, shapes), shapes).missing
    assert len(missing) == 16
    assert all("encoderblock_1/" in name for name in missing)


def test_training_state_and_text_tower_are_ignored() -> None:
    state = [*with_prefix(drawn(), "opt/target/"), "opt/state/step", "opt/state/param_states/cls/grad_ema"]
    shapes = shapes_of(with_prefix(drawn(), "opt/target/"))
    rules = GOOGLE.rules(GOOGLE.infer_config(shapes, NPZ), shapes)
    match = match_keys(rules, state, ignored=GOOGLE.ignored_names)
    assert match == KeyMatch((), (), ignored=("opt/state/param_states/cls/grad_ema", "opt/state/step"))

    towers = shapes_of(DIALECTS["big_vision, image tower"][1](drawn()))
    text = {"params/txt/head/kernel": (8, 8), "params/t": (1,), "params/b": (1,), "opt/0/count": (), "extra/x": ()}
    rules = BIG_VISION.rules(BIG_VISION.infer_config(towers | text, NPZ), towers | text)
    match = match_keys(rules, [*towers, *text], ignored=BIG_VISION.ignored_names)
    assert match == KeyMatch((), (), ignored=tuple(sorted(text)))


def test_bit_norms_may_have_four_axes() -> None:
    file = tensors(witness.random_bit_weights(np.random.default_rng(0), blocks=(1,), width_factor=1))
    older = {name: tensor[None, None, None] if "norm" in name else tensor for name, tensor in file.items()}
    config = BIT.infer_config(shapes_of(older), NPZ)
    rules = BIT.rules(config, shapes_of(older))
    state = dict(apply_rules(rules, older))
    assert same_bits(dict(invert_rules(rules, state)), older)
    assert same_bits(dict(invert_rules(BIT.rules(config, None), state)), file)


def test_missing_and_extra_tensors_of_bit_are_reported() -> None:
    shapes = shapes_of(witness.random_bit_weights(np.random.default_rng(0), blocks=(2, 1), width_factor=1))
    rules = BIT.rules(BIT.infer_config(shapes, NPZ), shapes)
    for name in shapes:
        assert match_keys(rules, [other for other in shapes if other != name]) == KeyMatch((name,), ())
        assert match_keys(rules, [*shapes, f"{name}_odd"]) == KeyMatch((), (f"{name}_odd",))


# Files that are not what they seem


def damaged() -> Iterator[tuple[str, dict[str, tuple[int, ...]], str]]:
    good = shapes_of(drawn())
    block = "Transformer/encoderblock_0/"
    query, mlp = f"{block}MultiHeadDotProductAttention_1/query/kernel", f"{block}MlpBlock_3/Dense_0/kernel"
    yield "a flat patch kernel", good | {"embedding/kernel": (8, 24)}, "embedding/kernel has an unexpected shape"
    yield "an empty patch", good | {"embedding/kernel": (0, 0, 3, 24)}, "embedding/kernel has an unexpected shape"
    yield "a query without heads", good | {query: (24, 24)}, "query/kernel has an unexpected shape"
    yield "heads of another width", good | {query: (24, 3, 9)}, "the heads do not fill the width"
    yield "a number for a kernel", good | {mlp: ()}, "Dense_0/kernel has an unexpected shape"
    yield "a flat head", good | {"head/kernel": (24,)}, "head/kernel has an unexpected shape"
    yield "many layers", good | {"Transformer/encoderblock_999999999/cls": ()}, "too many layers"
    yield "no queries", {name: shape for name, shape in good.items() if "query" not in name}, "the file has no"
    yield "a narrow root", good | {"conv_root/kernel": (7, 7, 3, 31)}, "invalid model in the file"
    gap = {"conv_root/kernel": (7, 7, 3, 32), "block2/unit1/conv1/kernel": (1, 1, 1, 1)}
    yield "a stage left out", good | gap, "invalid model in the file"


@pytest.mark.parametrize(("shapes", "message"), [pytest.param(*row[1:], id=row[0]) for row in damaged()])
def test_damaged_file_is_rejected(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        GOOGLE.infer_config(shapes, NPZ)


def test_too_many_stacked_layers_are_rejected() -> None:
    shapes = shapes_of(on_one_axis(big_vision(drawn())))
    scale = "Transformer/encoderblock/LayerNorm_0/scale"
    with pytest.raises(WeightsError, match="too many layers"):
        BIG_VISION.infer_config(shapes | {scale: (10**9, 24)}, NPZ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 65)}, "does not fit a BiT"),
        ({"resnet/root_block/standardized_conv2d/kernel": (7, 7)}, "has an unexpected shape"),
        ({"resnet/head/conv2d/kernel": (256, 7)}, "has an unexpected shape"),
        ({"resnet/block3/unit01/a/group_norm/gamma": (256,)}, "invalid model in the file"),
    ],
)
def test_damaged_bit_file_is_rejected(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = shapes_of(witness.random_bit_weights(np.random.default_rng(0), blocks=(1,), width_factor=1))
    with pytest.raises(WeightsError, match=message):
        BIT.infer_config(shapes | changes, NPZ)


def test_other_files_do_not_match() -> None:
    ours = random_vit(CASES["learned_1d-stem"]).state_dict()
    assert recognized(ours) == []
    assert recognized({}) == []
    assert recognized({"embedding/kernel": np.zeros((8, 8, 3, 24))}) == []
    with pytest.raises(WeightsError, match="no Vision Transformer of Google's"):
        GOOGLE.infer_config(shapes_of(ours), NPZ)


def test_rules_reject_the_other_architecture() -> None:
    with pytest.raises(WeightsError, match="Vision Transformers only"):
        GOOGLE.rules(BiTConfig(), None)
    with pytest.raises(WeightsError, match="ResNets only"):
        BIT.rules(ViTConfig(), None)
