"""Google's files both ways: every model to the bit, every dialect, what cannot be held, and what is damaged."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
from checkpoints.google_files import (
    DIALECTS,
    FORMATS,
    NPZ,
    big_vision,
    drawn,
    on_one_axis,
    recognised,
    same_bits,
    shapes_of,
    tensors,
    with_prefix,
)
from model_cases import CASES, random_vit, randomised, shrunk_zoo, without_numbers
from torch import Tensor
from witness import google_numpy as witness

from vitkit.checkpoints.formats.bit import BIT
from vitkit.checkpoints.formats.format import Format
from vitkit.checkpoints.formats.google import BIG_VISION, GOOGLE
from vitkit.checkpoints.mapping import Fit, fit, read, write
from vitkit.core.errors import WeightsError
from vitkit.core.shapes import pair
from vitkit.model.config import DropoutConfig, TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig

# Every model of every kind: written, described, read


def squared(config: ModelConfig) -> ModelConfig:
    """The model on a grid of 3×3 patches."""
    if isinstance(config, BiTConfig):
        return config
    stride = config.backbone.stride if config.backbone else 1
    height, width = (3 * stride * side for side in pair(config.patch_size))
    return replace(config, image_size=height if height == width else (height, width))


MODELS: dict[str, ModelConfig] = {
    name: squared(config)
    for name, config in chain(
        CASES.items(),
        shrunk_zoo().items(),
        {
            "big_vision's class token": replace(CASES["learned_1d-stem"], positions=PositionConfig(covers="patches")),
            "map-pre-logits": replace(CASES["map"], head=HeadConfig(pre_logits=8)),
            "map-headless": replace(CASES["map"], classes=0),
            "hybrid-mean": replace(CASES["hybrid"], pooling="mean"),
            "hybrid-pre-logits": replace(CASES["hybrid"], head=HeadConfig(pre_logits=12)),
            "hybrid-grey": replace(CASES["hybrid"], channels=1),
            "eleven-layers": replace(CASES["learned_1d-stem"], depth=11),
            "dropout": replace(CASES["learned_1d-stem"], dropout=DropoutConfig(dense=0.1)),
            "bit-headless": BiTConfig(units=(1,), classes=0),
            "bit-eleven-units": BiTConfig(units=(11, 1), classes=3),
            "bit-grey": BiTConfig(units=(1, 1), channels=1, classes=3),
        }.items(),
    )
}
PLAIN = ["learned_1d-stem", "sincos_2d-stem", "learned_1d-mean", "sincos_2d-mean", "sincos-mae"]
VITS = [
    *PLAIN,
    "pre-logits",
    "pre-logits-mean",
    "headless",
    "grey",
    "one-layer-one-head",
    "eleven-layers",
    "dropout",
]
HYBRIDS = ["hybrid", "hybrid-of-the-root", "hybrid-mean", "hybrid-pre-logits", "hybrid-grey"]
PLACED_PATCHES = ["positions-of-patches-only", "big_vision's class token"]
POOLED = ["map", "map-pre-logits", "map-headless"]


def zoo_of(kind: str) -> list[str]:
    """Cut-down zoo models: "vit", "hybrid" or "bit"."""

    def kind_of(config: ModelConfig) -> str:
        if isinstance(config, BiTConfig):
            return "bit"
        return "axial" if config.block.axial else "hybrid" if config.backbone else "vit"

    return [name for name, config in shrunk_zoo().items() if kind_of(config) == kind]


HELD = {
    "google": {*VITS, *HYBRIDS, *zoo_of("vit"), *zoo_of("hybrid")},
    "big_vision": {*VITS, *PLACED_PATCHES, *POOLED, *zoo_of("vit")},
    "bit": {"bit-headless", "bit-eleven-units", "bit-grey", *zoo_of("bit")},
}


@cache
def state_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(16)
    return dict(randomised(create(MODELS[name], generator=torch.Generator().manual_seed(16))).state_dict())


def as_files_tell(config: ModelConfig, form: Format) -> ModelConfig:
    """The configuration without what no file says: training's settings, and how a table of positions came about."""
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
def test_a_model_comes_back_from_its_file_to_the_bit(form: str, model: str) -> None:
    config, state, table = MODELS[model], state_of(model), FORMATS[form]
    file = dict(write(table.rules(config, None), state))
    assert recognised(file) == [form]
    described = table.describe(shapes_of(file), NPZ)
    assert described == as_files_tell(config, table)
    rules = table.rules(described, shapes_of(file))
    assert fit(rules, file) == Fit((), ())
    assert same_bits(dict(read(rules, file)), state)
    assert same_bits(dict(write(rules, state)), file)


@pytest.mark.parametrize("form", FORMATS)
def test_every_model_is_held_or_refused_with_a_reason(form: str) -> None:
    refused = {name: FORMATS[form].refuses(config) for name, config in MODELS.items()}
    assert {name for name, reason in refused.items() if reason is None} == HELD[form]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_refused_has_a_rule_for_each_of_its_tensors(form: str) -> None:
    for name in HELD[form]:
        config = MODELS[name]
        ours = [tensor for rule in FORMATS[form].rules(config, None) for tensor in rule.ours]
        assert sorted(ours) == sorted(without_numbers(config).state_dict()), name


NEITHER = {
    "distilled": "a distillation token",
    "registers": "registers",
    "mean-with-class-token": "a class token that pooling does not read",
    "relative-shared": "relative, rotary or two-dimensional learned positions",
    "rotary-shared": "relative, rotary or two-dimensional learned positions",
    "learned_2d-stem": "relative, rotary or two-dimensional learned positions",
    "none-stem": "no positions, because their table tells the image size",
    "learned_1d-every_layer": "positions that enter at every layer",
    "sincos_2d-shared": "positions that enter at every layer",
    "swiglu": "a gated MLP",
    "erf": "GELU in its erf form",
    "layer-scale": "LayerScale",
    "axial": "axial attention",
    "no-qkv-bias": "attention without qkv biases",
    "qk-norm": "norms on queries and keys",
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
        ("google", "bit-grey", "a ResNet"),
        ("big_vision", "bit-grey", "a ResNet"),
        ("bit", "hybrid", "a Vision Transformer"),
    ],
)
def test_a_refusal_names_what_the_format_cannot_hold(form: str, model: str, reason: str) -> None:
    assert FORMATS[form].refuses(MODELS[model]) == reason


def test_what_a_file_could_not_tell_is_refused() -> None:
    plain = MODELS["learned_1d-stem"]
    assert isinstance(plain, ViTConfig)
    for form in (GOOGLE, BIG_VISION):
        assert form.refuses(replace(plain, image_size=(32, 48))) == "a patch grid that is not square"
        assert form.refuses(replace(plain, block=BlockConfig(norm_eps=1e-5))) == "a LayerNorm eps other than 1e-6"
        assert form.refuses(replace(plain, depth=1001)) == "more than 1000 layers"
    long = replace(plain, backbone=BackboneConfig(units=(100,)), patch_size=1, image_size=32)
    assert GOOGLE.refuses(long) == "a backbone of more than 9 stages, or 99 units in one"
    assert BIT.refuses(BiTConfig(units=(100,))) == "more than 9 stages, or 99 units in one"


# Dialects: the same model under other names


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_file_is_written_back_in_its_own_dialect(dialect: str) -> None:
    (name, translate), form = DIALECTS[dialect], FORMATS[DIALECTS[dialect][0]]
    file = tensors(translate(drawn(depth=3)))
    config = form.describe(shapes_of(file), NPZ)
    assert form.refuses(config) is None, name
    rules = form.rules(config, shapes_of(file))
    assert fit(rules, file) == Fit((), ())
    assert same_bits(dict(write(rules, dict(read(rules, file)))), file)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_missing_or_extra_tensor_is_reported(dialect: str) -> None:
    form, translate = FORMATS[DIALECTS[dialect][0]], DIALECTS[dialect][1]
    shapes = shapes_of(translate(drawn(depth=3)))
    rules = form.rules(form.describe(shapes, NPZ), shapes)
    for name in shapes:
        left = [other for other in shapes if other != name]
        assert fit(rules, left, ignored=form.ignored) == Fit((name,), ())
        assert fit(rules, [*shapes, f"{name}_odd"], ignored=form.ignored) == Fit((), (f"{name}_odd",))


def test_a_layer_that_is_not_there_is_missing_and_not_skipped() -> None:
    shapes = shapes_of({name: array for name, array in drawn(depth=3).items() if "encoderblock_1/" not in name})
    config = GOOGLE.describe(shapes, NPZ)
    assert isinstance(config, ViTConfig)
    assert config.depth == 3
    missing = fit(GOOGLE.rules(config, shapes), shapes).missing
    assert len(missing) == 16
    assert all("encoderblock_1/" in name for name in missing)


def test_what_belongs_to_the_training_or_the_text_is_no_part_of_the_model() -> None:
    state = [*with_prefix(drawn(), "opt/target/"), "opt/state/step", "opt/state/param_states/cls/grad_ema"]
    shapes = shapes_of(with_prefix(drawn(), "opt/target/"))
    rules = GOOGLE.rules(GOOGLE.describe(shapes, NPZ), shapes)
    assert fit(rules, state, ignored=GOOGLE.ignored) == Fit((), ())

    towers = shapes_of(DIALECTS["big_vision, image tower"][1](drawn()))
    text = {"params/txt/head/kernel": (8, 8), "params/t": (1,), "params/b": (1,), "opt/0/count": (), "extra/x": ()}
    rules = BIG_VISION.rules(BIG_VISION.describe(towers | text, NPZ), towers | text)
    assert fit(rules, [*towers, *text], ignored=BIG_VISION.ignored) == Fit((), ())


def test_the_norms_of_a_bit_may_have_four_axes() -> None:
    file = tensors(witness.random_bit_weights(np.random.default_rng(0), blocks=(1,), width_factor=1))
    older = {name: tensor[None, None, None] if "norm" in name else tensor for name, tensor in file.items()}
    config = BIT.describe(shapes_of(older), NPZ)
    rules = BIT.rules(config, shapes_of(older))
    state = dict(read(rules, older))
    assert same_bits(dict(write(rules, state)), older)
    assert same_bits(dict(write(BIT.rules(config, None), state)), file)


def test_a_missing_or_extra_tensor_of_a_bit_is_reported() -> None:
    shapes = shapes_of(witness.random_bit_weights(np.random.default_rng(0), blocks=(2, 1), width_factor=1))
    rules = BIT.rules(BIT.describe(shapes, NPZ), shapes)
    for name in shapes:
        assert fit(rules, [other for other in shapes if other != name]) == Fit((name,), ())
        assert fit(rules, [*shapes, f"{name}_odd"]) == Fit((), (f"{name}_odd",))


# Files that are not what they seem


def damaged() -> Iterator[tuple[str, dict[str, tuple[int, ...]], str]]:
    good = shapes_of(drawn())
    block = "Transformer/encoderblock_0/"
    query, mlp = f"{block}MultiHeadDotProductAttention_1/query/kernel", f"{block}MlpBlock_3/Dense_0/kernel"
    yield "a flat patch kernel", good | {"embedding/kernel": (8, 24)}, "embedding/kernel has no such shape"
    yield "an empty patch", good | {"embedding/kernel": (0, 0, 3, 24)}, "embedding/kernel has no such shape"
    yield "a query without heads", good | {query: (24, 24)}, "query/kernel has no such shape"
    yield "heads of another width", good | {query: (24, 3, 9)}, "the heads do not make up the width"
    yield "a number for a kernel", good | {mlp: ()}, "Dense_0/kernel has no such shape"
    yield "a flat head", good | {"head/kernel": (24,)}, "head/kernel has no such shape"
    yield "many layers", good | {"Transformer/encoderblock_999999999/cls": ()}, "too many layers"
    yield "no queries", {name: shape for name, shape in good.items() if "query" not in name}, "the file has no"
    yield "a narrow root", good | {"conv_root/kernel": (7, 7, 3, 31)}, "no model that can be"
    gap = {"conv_root/kernel": (7, 7, 3, 32), "block2/unit1/conv1/kernel": (1, 1, 1, 1)}
    yield "a stage left out", good | gap, "no model that can be"


@pytest.mark.parametrize(("shapes", "message"), [pytest.param(*row[1:], id=row[0]) for row in damaged()])
def test_a_damaged_file_is_refused_with_the_reason(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        GOOGLE.describe(shapes, NPZ)


def test_a_stack_of_too_many_layers_is_refused() -> None:
    shapes = shapes_of(on_one_axis(big_vision(drawn())))
    scale = "Transformer/encoderblock/LayerNorm_0/scale"
    with pytest.raises(WeightsError, match="too many layers"):
        BIG_VISION.describe(shapes | {scale: (10**9, 24)}, NPZ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 65)}, "is of no BiT"),
        ({"resnet/root_block/standardized_conv2d/kernel": (7, 7)}, "has no such shape"),
        ({"resnet/head/conv2d/kernel": (256, 7)}, "has no such shape"),
        ({"resnet/block3/unit01/a/group_norm/gamma": (256,)}, "no model that can be"),
    ],
)
def test_a_damaged_bit_is_refused_with_the_reason(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = shapes_of(witness.random_bit_weights(np.random.default_rng(0), blocks=(1,), width_factor=1))
    with pytest.raises(WeightsError, match=message):
        BIT.describe(shapes | changes, NPZ)


def test_other_files_are_not_recognised() -> None:
    ours = random_vit(CASES["learned_1d-stem"]).state_dict()
    assert recognised(ours) == []
    assert recognised({}) == []
    assert recognised({"embedding/kernel": np.zeros((8, 8, 3, 24))}) == []
    with pytest.raises(WeightsError, match="none of Google's"):
        GOOGLE.describe(shapes_of(ours), NPZ)


def test_a_format_has_no_rules_for_the_other_kind_of_model() -> None:
    with pytest.raises(WeightsError, match="Vision Transformers only"):
        GOOGLE.rules(BiTConfig(), None)
    with pytest.raises(WeightsError, match="ResNets only"):
        BIT.rules(ViTConfig(), None)
