"""Initialization: exactly one rule per parameter, and every rule as in the released code."""

import math
import re

import pytest
import torch
from model_cases import CASES, fresh, meta_model, reduced_zoo, small
from torch import Tensor, nn

from vitkit.core.errors import VitkitError
from vitkit.model.config import (
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.init import initialization_rules, initialize, lecun_normal, normal, xavier_uniform
from vitkit.model.positions import sincos_2d
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create
from vitkit.zoo.variants import VARIANTS, ModelConfig

ROWS = [pattern for pattern, _ in initialization_rules()]
ZOO: dict[str, ModelConfig] = {variant.name: variant.config for variant in VARIANTS}
BUILT: dict[str, ModelConfig] = CASES | reduced_zoo()


# Rules and parameters


def rows_for(name: str) -> list[str]:
    return [row for row in ROWS if re.fullmatch(row, name)]


@pytest.mark.parametrize("name", ZOO)
def test_exactly_one_rule_matches_each_zoo_parameter(name: str) -> None:
    unsettled = {
        parameter: rows_for(parameter)
        for parameter, _ in meta_model(ZOO[name]).named_parameters()
        if len(rows_for(parameter)) != 1
    }
    assert unsettled == {}


@pytest.mark.parametrize("case", CASES)
def test_exactly_one_rule_matches_each_parameter(case: str) -> None:
    model = meta_model(CASES[case])
    unsettled = {name: rows_for(name) for name, _ in model.named_parameters() if len(rows_for(name)) != 1}
    assert unsettled == {}


def test_every_rule_matches_some_parameter() -> None:
    names = {name for config in BUILT.values() for name, _ in meta_model(config).named_parameters()}
    assert [row for row in ROWS if not any(re.fullmatch(row, name) for name in names)] == []


def test_parameter_without_a_rule_is_an_error() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.empty(3))

    with pytest.raises(VitkitError, match="no unique initialization rule for gate") as raised:
        initialize(Odd(), initialization_rules())
    assert (raised.value.expected, raised.value.got) == ("one rule", 0)


@pytest.mark.parametrize("name", BUILT)
def test_reset_parameters_overwrites_everything(name: str) -> None:
    model = fresh(BUILT[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    assert [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()] == []
    assert [name for name, _ in model.named_buffers()] == []  # buffers would not be reset


@pytest.mark.parametrize("name", ["Ti/16", "R+Ti/16"])
def test_new_model_has_finite_parameters(name: str) -> None:
    assert all(parameter.isfinite().all() for parameter in create(name, num_classes=10).parameters())


# Together these use every random rule.
SEEDED = [*reduced_zoo(), "map", "pre-logits", "distilled-2d-every-layer", "registers-relative", "axial-map", "swiglu"]


@pytest.mark.parametrize("name", SEEDED)
def test_same_seed_gives_the_same_weights(name: str) -> None:
    model = fresh(BUILT[name])

    def weights(seed: int) -> dict[str, Tensor]:
        model.reset_parameters(torch.Generator().manual_seed(seed))
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    first, other, again = weights(1), weights(2), weights(1)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    drawn = [name for name, value in first.items() if value.min() < value.max() and name not in fixed]
    assert drawn
    assert [name for name in drawn if torch.equal(other[name], first[name])] == []


def test_create_takes_a_generator() -> None:
    def weight(seed: int) -> Tensor:
        return create(small(), generator=torch.Generator().manual_seed(seed)).patch_embed.proj.weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_generator_leaves_the_global_rng_unchanged() -> None:
    before = torch.get_rng_state()
    create(small(), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


# Distributions. Bounds of 5 standard deviations: a correct draw fails once in two million.


def is_normal(values: Tensor, deviation: float) -> bool:
    count = values.numel()
    beyond = (values.abs() > 2.5 * deviation).double().mean().item()  # 1.24 % of a normal that is not truncated
    return (
        abs(values.mean().item()) < 5 * deviation / math.sqrt(count)
        and abs(values.std().item() / deviation - 1) < 5 / math.sqrt(2 * count)
        and abs(beyond - 0.0124) < 5 * math.sqrt(0.0124 / count)
    )


def is_lecun(values: Tensor, inputs: int) -> bool:
    count, deviation = values.numel(), math.sqrt(1 / inputs)
    cut = 2 * deviation / 0.8796256610342398
    return (
        abs(values.mean().item()) < 5 * deviation / math.sqrt(count)
        and abs(values.std().item() / deviation - 1) < 5 / math.sqrt(2 * count)
        and 0.95 * cut < values.abs().max().item() <= cut * (1 + 1e-6)  # float32
    )


def is_uniform(values: Tensor, bound: float) -> bool:
    count = values.numel()
    return (
        abs(values.mean().item()) < 5 * bound / math.sqrt(3 * count)
        and abs(values.std().item() * math.sqrt(3) / bound - 1) < 5 / math.sqrt(2 * count)
        # None of `count` draws beyond 1 - 15 / count: once in three million.
        and (1 - 15 / count) * bound < values.abs().max().item() <= bound * (1 + 1e-6)
    )


def xavier(inputs: int, outputs: int) -> float:
    return math.sqrt(6 / (inputs + outputs))


WIDTH, MLP, CLASSES = 64, 160, 7


def model(**changes: object) -> ViT:
    fields: dict[str, object] = {
        "image_size": 64,
        "patch_size": 8,
        "width": WIDTH,
        "depth": 1,
        "heads": 4,
        "mlp_dim": MLP,
        "num_classes": CLASSES,
    }
    made = fresh(ViTConfig(**fields | changes))  # type: ignore[arg-type]
    assert isinstance(made, ViT)
    return made


def test_qkv_is_initialized_as_three_layers() -> None:
    for part in model().blocks[0].attn.qkv.weight.chunk(3):
        assert is_uniform(part, xavier(WIDTH, WIDTH))


def test_dense_layers_are_xavier_with_tiny_biases() -> None:
    block = model().blocks[0]
    assert is_uniform(block.attn.proj.weight, xavier(WIDTH, WIDTH))
    assert is_uniform(block.mlp.fc1.weight, xavier(WIDTH, MLP))
    assert is_uniform(block.mlp.fc2.weight, xavier(MLP, WIDTH))
    assert is_normal(block.mlp.fc1.bias, 1e-6)
    assert is_normal(block.mlp.fc2.bias, 1e-6)
    assert (block.attn.qkv.bias == 0).all()
    assert (block.attn.proj.bias == 0).all()


def test_patch_projection_is_lecun_normal() -> None:
    projection = model().patch_embed.proj
    assert is_lecun(projection.weight, 3 * 8 * 8)
    assert (projection.bias == 0).all()


def test_class_token_is_zero_and_others_are_noise() -> None:
    made = model(tokens=TokenConfig(distillation=True, registers=16))
    assert (made.cls_token == 0).all()
    assert is_normal(made.dist_token, 0.02)
    assert is_normal(made.reg_token, 1e-6)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("injection", ["stem", "every_layer", "shared"])
def test_learned_positions_are_normal(kind: str, injection: str) -> None:
    made = model(positions=PositionConfig(kind=kind, injection=injection))
    tables = [value for name, value in made.named_parameters() if "pos_embed" in name]
    assert len(tables) == (3 if kind == "learned_2d" else 1)
    assert all(is_normal(values, 0.02) for values in tables)


def test_relative_positions_are_normal() -> None:
    assert is_normal(model(positions=PositionConfig(kind="relative")).relative[0].table, 0.02)


@pytest.mark.parametrize("like", ["big_vision", "mae"])
@pytest.mark.parametrize("injection", ["stem", "shared"])
def test_sincos_positions_follow_their_formula_and_stay_fixed(injection: str, like: str) -> None:
    made = model(positions=PositionConfig(kind="sincos_2d", injection=injection, sincos=like))
    assert isinstance(made.pos_embed, Tensor)
    assert torch.equal(made.pos_embed, sincos_2d((8, 8), width=WIDTH, like=like, prefix=1))


def test_norms_and_layer_scales_have_their_initial_values() -> None:
    made = model(block=BlockConfig(layer_scale=0.125))
    for module in made.modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (made.blocks[0].ls1.gamma == 0.125).all()
    assert (made.blocks[0].ls2.gamma == 0.125).all()


def test_pooling_attention_is_initialized_per_layer() -> None:
    pool = model(pooling="map").attn_pool
    assert pool is not None
    assert is_uniform(pool.q.weight, xavier(WIDTH, WIDTH))
    assert is_uniform(pool.proj.weight, xavier(WIDTH, WIDTH))
    assert all(is_uniform(part, xavier(WIDTH, WIDTH)) for part in pool.kv.weight.chunk(2))
    assert is_uniform(pool.mlp.fc1.weight, xavier(WIDTH, MLP))
    assert all((layer.bias == 0).all() for layer in (pool.q, pool.kv, pool.proj))


def test_pooling_query_is_initialized_as_a_layer() -> None:
    """big_vision initializes the (1, 1, D) query by Flax's xavier_uniform, where the last two axes are in and out."""
    pool = model(pooling="map", width=1024).attn_pool
    assert pool is not None
    assert is_uniform(pool.latent, xavier(1, 1024))


def test_gated_mlp_is_initialized_as_two_layers() -> None:
    layer = model(block=BlockConfig(activation="swiglu")).blocks[0].mlp.fc1
    assert all(is_uniform(part, xavier(WIDTH, MLP)) for part in layer.weight.chunk(2))


def test_head_weights_are_zero_and_biases_configured() -> None:
    plain = model(head=HeadConfig(bias=-10.0)).head
    distilled = model(tokens=TokenConfig(distillation=True), head=HeadConfig(bias=-10.0)).head
    for classifier in (plain, distilled.label, distilled.teacher):
        assert (classifier.weight == 0).all()
        assert (classifier.bias == -10).all()
    assert (model().head.bias == 0).all()


def test_pre_logits_are_lecun_normal() -> None:
    made = model(head=HeadConfig(pre_logits=96)).pre_logits
    assert is_lecun(made.fc.weight, WIDTH)
    assert (made.fc.bias == 0).all()


def test_hybrid_units_start_as_their_shortcuts() -> None:
    backbone = model(patch_size=1, backbone=BackboneConfig(units=(2, 1), root_width=32)).patch_embed.backbone
    assert backbone is not None
    assert is_lecun(backbone.stem.conv.weight, 3 * 7 * 7)
    for stage in backbone.stages:
        for unit in stage.blocks:
            for conv in (unit.conv1, unit.conv2, unit.conv3):
                assert is_lecun(conv.weight, conv.in_channels * conv.kernel_size[0] ** 2)
            assert (unit.norm3.weight == 0).all()
            assert (unit.norm1.weight == 1).all()
            assert (unit.norm2.weight == 1).all()


def test_resnet_norms_start_as_the_identity() -> None:
    made = BiT(BiTConfig(units=(2, 1), num_classes=CLASSES))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            assert is_lecun(module.weight, module.in_channels * module.kernel_size[0] ** 2)
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (made.head.weight == 0).all()
    assert (made.head.bias == 0).all()


def test_distribution_checks_distinguish_the_rules() -> None:
    values = torch.empty(64, 64)
    xavier_uniform(values, None)
    assert is_uniform(values, xavier(64, 64))
    assert not is_uniform(values, 1.02 * xavier(64, 64))
    assert not is_lecun(values, 64)
    lecun_normal(values, None)
    assert is_lecun(values, 64)
    assert not is_normal(values, 1 / 8)
    normal(values, None, std=0.02)
    assert is_normal(values, 0.02)
    assert not is_normal(values, 0.022)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_create_sets_the_dtype(dtype: torch.dtype) -> None:
    made = create(small(), dtype=dtype)
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    assert made(torch.randn(1, 3, 32, 48, dtype=dtype)).dtype == dtype
