"""What models start from: every parameter by exactly one rule, each rule drawn as in the released code."""

import math
import re

import pytest
import torch
from model_cases import CASES, fresh, shrunk_zoo, small, without_numbers
from torch import Tensor, nn

from vitkit.core.errors import VitkitError
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.initialise import initialise, lecun_normal, normal, table, xavier_uniform
from vitkit.model.positions import PositionConfig, sincos_2d
from vitkit.model.resnet import BackboneConfig, BiT, BiTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import VARIANTS, ModelConfig

ROWS = [pattern for pattern, _ in table(head_bias=0.0, layer_scale=None, gated_mlp=False, fixed_positions=None)]
ZOO: dict[str, ModelConfig] = {variant.name: variant.config for variant in VARIANTS}
BUILT: dict[str, ModelConfig] = CASES | shrunk_zoo()


# One rule for each


def rows_for(name: str) -> list[str]:
    return [row for row in ROWS if re.fullmatch(row, name)]


@pytest.mark.parametrize("name", ZOO)
def test_one_row_of_the_table_settles_each_parameter_of_a_zoo_model(name: str) -> None:
    unsettled = {
        parameter: rows_for(parameter)
        for parameter, _ in without_numbers(ZOO[name]).named_parameters()
        if len(rows_for(parameter)) != 1
    }
    assert unsettled == {}


@pytest.mark.parametrize("case", CASES)
def test_one_row_of_the_table_settles_each_parameter_of_any_model(case: str) -> None:
    model = without_numbers(CASES[case])
    unsettled = {name: rows_for(name) for name, _ in model.named_parameters() if len(rows_for(name)) != 1}
    assert unsettled == {}


def test_every_row_of_the_table_settles_something() -> None:
    names = {name for config in BUILT.values() for name, _ in without_numbers(config).named_parameters()}
    assert [row for row in ROWS if not any(re.fullmatch(row, name) for name in names)] == []


def test_a_parameter_that_no_row_names_is_an_error() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.empty(3))

    with pytest.raises(VitkitError, match="the initialisation table does not settle gate") as raised:
        initialise(Odd())
    assert (raised.value.expected, raised.value.got) == ("one row", 0)


@pytest.mark.parametrize("name", BUILT)
def test_drawing_anew_leaves_nothing_as_it_was(name: str) -> None:
    model = fresh(BUILT[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    assert [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()] == []
    assert [name for name, _ in model.named_buffers()] == []  # none to be forgotten


@pytest.mark.parametrize("name", ["Ti/16", "R+Ti/16"])
def test_a_created_model_is_finite_everywhere(name: str) -> None:
    assert all(parameter.isfinite().all() for parameter in create(name, classes=10).parameters())


# Between them these draw by every rule that draws.
SEEDED = [*shrunk_zoo(), "map", "pre-logits", "distilled-2d-every-layer", "registers-relative", "axial-map", "swiglu"]


@pytest.mark.parametrize("name", SEEDED)
def test_the_same_seed_draws_the_same_weights(name: str) -> None:
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


def test_a_seed_can_be_given_when_creating() -> None:
    def weight(seed: int) -> Tensor:
        return create(small(), generator=torch.Generator().manual_seed(seed)).patch_embed.proj.weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_a_generator_leaves_the_global_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    create(small(), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


# How each is drawn. Bounds of 5 deviations: a right draw fails once in two million.


def is_normal(values: Tensor, deviation: float) -> bool:
    count = values.numel()
    beyond = (values.abs() > 2.5 * deviation).double().mean().item()  # 1.24 % of a normal that is not cut
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
        "classes": CLASSES,
    }
    made = fresh(ViTConfig(**fields | changes))  # type: ignore[arg-type]
    assert isinstance(made, ViT)
    return made


def test_queries_keys_and_values_are_each_drawn_as_a_layer_of_their_own() -> None:
    for part in model().blocks[0].attn.qkv.weight.chunk(3):
        assert is_uniform(part, xavier(WIDTH, WIDTH))


def test_dense_layers_are_drawn_by_xavier_and_their_biases_nearly_zero() -> None:
    block = model().blocks[0]
    assert is_uniform(block.attn.proj.weight, xavier(WIDTH, WIDTH))
    assert is_uniform(block.mlp.fc1.weight, xavier(WIDTH, MLP))
    assert is_uniform(block.mlp.fc2.weight, xavier(MLP, WIDTH))
    assert is_normal(block.mlp.fc1.bias, 1e-6)
    assert is_normal(block.mlp.fc2.bias, 1e-6)
    assert (block.attn.qkv.bias == 0).all()
    assert (block.attn.proj.bias == 0).all()


def test_the_patch_projection_is_drawn_by_lecun() -> None:
    projection = model().patch_embed.proj
    assert is_lecun(projection.weight, 3 * 8 * 8)
    assert (projection.bias == 0).all()


def test_tokens_start_from_zero_or_from_noise() -> None:
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
def test_sine_cosine_positions_start_and_stay_at_their_formula(injection: str, like: str) -> None:
    made = model(positions=PositionConfig(kind="sincos_2d", injection=injection, sincos=like))
    assert isinstance(made.pos_embed, Tensor)
    assert torch.equal(made.pos_embed, sincos_2d((8, 8), width=WIDTH, like=like, prefix=1))


def test_norms_start_as_the_identity_and_layer_scales_at_their_value() -> None:
    made = model(block=BlockConfig(layer_scale=0.125))
    for module in made.modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (made.blocks[0].ls1.gamma == 0.125).all()
    assert (made.blocks[0].ls2.gamma == 0.125).all()


def test_the_pooling_probes_attention_is_drawn_layer_by_layer() -> None:
    pool = model(pooling="map").attn_pool
    assert pool is not None
    assert is_uniform(pool.q.weight, xavier(WIDTH, WIDTH))
    assert is_uniform(pool.proj.weight, xavier(WIDTH, WIDTH))
    assert all(is_uniform(part, xavier(WIDTH, WIDTH)) for part in pool.kv.weight.chunk(2))
    assert is_uniform(pool.mlp.fc1.weight, xavier(WIDTH, MLP))
    assert all((layer.bias == 0).all() for layer in (pool.q, pool.kv, pool.proj))


def test_the_pooling_probe_is_drawn_as_a_layer_from_one_input_to_the_width() -> None:
    """big_vision draws the (1, 1, D) probe by Flax's xavier_uniform, for which the last two axes are in and out."""
    pool = model(pooling="map", width=1024).attn_pool
    assert pool is not None
    assert is_uniform(pool.latent, xavier(1, 1024))


def test_a_gated_mlp_draws_gate_and_values_as_two_layers() -> None:
    layer = model(block=BlockConfig(activation="swiglu")).blocks[0].mlp.fc1
    assert all(is_uniform(part, xavier(WIDTH, MLP)) for part in layer.weight.chunk(2))


def test_heads_start_from_nothing_but_their_bias() -> None:
    plain = model(head=HeadConfig(bias=-10.0)).head
    distilled = model(tokens=TokenConfig(distillation=True), head=HeadConfig(bias=-10.0)).head
    for classifier in (plain, distilled.label, distilled.teacher):
        assert (classifier.weight == 0).all()
        assert (classifier.bias == -10).all()
    assert (model().head.bias == 0).all()


def test_pre_logits_are_drawn_by_lecun() -> None:
    made = model(head=HeadConfig(pre_logits=96)).pre_logits
    assert is_lecun(made.fc.weight, WIDTH)
    assert (made.fc.bias == 0).all()


def test_a_hybrids_convolutions_are_drawn_by_lecun_and_its_units_start_as_their_shortcuts() -> None:
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


def test_a_resnets_convolutions_are_drawn_by_lecun_and_its_norms_start_as_the_identity() -> None:
    made = BiT(BiTConfig(units=(2, 1), classes=CLASSES))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            assert is_lecun(module.weight, module.in_channels * module.kernel_size[0] ** 2)
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert (made.head.weight == 0).all()
    assert (made.head.bias == 0).all()


def test_the_checks_above_can_tell_the_rules_apart() -> None:
    values = torch.empty(64, 64)
    xavier_uniform(values, None)
    assert is_uniform(values, xavier(64, 64))
    assert not is_uniform(values, 1.02 * xavier(64, 64))
    assert not is_lecun(values, 64)
    lecun_normal(values, None)
    assert is_lecun(values, 64)
    assert not is_normal(values, 1 / 8)
    normal(values, None, deviation=0.02)
    assert is_normal(values, 0.02)
    assert not is_normal(values, 0.022)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_is_created_in_the_number_format_asked_for(dtype: torch.dtype) -> None:
    made = create(small(), dtype=dtype)
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    assert made(torch.randn(1, 3, 32, 48, dtype=dtype)).dtype == dtype
