"""Parameter groups, schedule, optimizers, EMA and LoRA, compared with formulas computed by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from vitkit.core.config import parse_assignments
from vitkit.core.errors import ConfigError
from vitkit.objectives.config import get_builder
from vitkit.training.config import ObjectiveConfig, OptimizerConfig, ScheduleConfig
from vitkit.training.optim import (
    EMA,
    add_lora,
    build_optimizer,
    clip_gradients,
    freeze_parameters,
    gradient_norm,
    is_kernel,
    layer_index,
    learning_rate,
    merge_lora,
    parameter_groups,
    set_learning_rate,
    trainable_parameters,
)
from vitkit.zoo.registry import Model, create


def tiny(*settings: str, num_classes: int = 5) -> Model:
    sizes = ("width=16", "depth=2", "heads=2", "mlp_dim=32")
    model = create(
        "Ti/16",
        image_size=8,
        patch_size=4,
        channels=1,
        num_classes=num_classes,
        settings=parse_assignments((*sizes, *settings)),
    )
    torch.nn.init.normal_(model.head.weight)
    return model


def released_schedule(step: int, *, base: float, total: int, warmup: int, decay: str, end: float) -> float:
    """The released code's three cases, each written as its own line through known points."""
    if warmup and step < warmup:
        return base * step / warmup
    share = 1.0 if step >= total else (step - warmup) / (total - warmup)
    if decay == "linear":
        return base + (end - base) * share
    if decay == "cosine":
        return end + (base - end) * math.cos(math.pi * share / 2) ** 2
    return base


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 30])
@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_learning_rate_follows_the_released_schedule(decay, warmup, end) -> None:
    config = ScheduleConfig(lr=0.03, warmup_steps=warmup, decay=decay, end_lr=end)
    for step in range(121):
        wanted = released_schedule(step, base=0.03, total=100, warmup=warmup, decay=decay, end=end)
        assert learning_rate(config, step=step, total_steps=100) == pytest.approx(wanted, rel=1e-12, abs=1e-18), step


def test_schedule_of_warm_up_only() -> None:
    config = ScheduleConfig(lr=0.1, warmup_steps=50)
    rates = [learning_rate(config, step=step, total_steps=20) for step in range(20)]
    assert rates == [pytest.approx(0.1 * step / 50) for step in range(20)]


def test_weight_decay_of_a_vit() -> None:
    model = create("Ti/16", device="meta")
    decayed = {name for name, parameter in model.named_parameters() if is_kernel(name, parameter)}
    per_block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert decayed == {
        "patch_embed.proj.weight",
        "head.weight",
        *(f"blocks.{block}.{layer}.weight" for block in range(12) for layer in per_block),
    }


@pytest.mark.parametrize(
    ("settings", "spared"),
    [
        (("positions.kind=learned_2d",), ("pos_embed.x", "pos_embed.y", "pos_embed.prefix")),
        (("positions.injection=every_layer",), ("layer_pos_embed.0", "layer_pos_embed.1")),
        (("positions.kind=relative",), ("relative.0.table",)),
        (("pooling=map",), ("attn_pool.latent",)),
        (("tokens.registers=2", "tokens.distillation=true"), ("cls_token", "dist_token", "reg_token")),
    ],
)
def test_positions_and_tokens_have_no_weight_decay(settings, spared) -> None:
    config = ("width=16", "depth=2", "heads=2", "mlp_dim=32", *settings)
    named = dict(create("Ti/16", settings=parse_assignments(config), device="meta").named_parameters())
    assert not any(is_kernel(name, named[name]) for name in spared)


def test_weight_decay_of_a_resnet() -> None:
    model = create("R50x1", device="meta")
    decayed = {name for name, parameter in model.named_parameters() if is_kernel(name, parameter)}
    kernels = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    assert decayed == kernels


def test_layer_decay_scales_the_rate_per_layer() -> None:
    model = create("Ti/16", device="meta")
    named = dict(model.named_parameters())
    made = parameter_groups(named, OptimizerConfig(layer_decay=0.5, weight_decay=0.1), depth=12)
    scale = {id(member): group["scale"] for group in made for member in group["params"]}
    assert scale[id(named["head.weight"])] == scale[id(named["norm.bias"])] == 1.0
    for block in range(12):
        assert scale[id(named[f"blocks.{block}.attn.qkv.weight"])] == 0.5 ** (12 - block)
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed"):
        assert scale[id(named[name])] == 0.5**13
    members = [id(member) for group in made for member in group["params"]]
    assert sorted(members) == sorted(map(id, named.values()))


@pytest.mark.parametrize("name", ["masked", "mae"])
def test_wrapped_encoder_has_the_same_groups(name) -> None:
    settings = ("width=16", "depth=2", "heads=2", "mlp_dim=32")
    alone = create("Ti/16", num_classes=0, settings=parse_assignments(settings))
    model = get_builder(ObjectiveConfig(name=name)).wrap(alone)
    named = dict(model.named_parameters())
    inside = {key: each for key, each in named.items() if key.startswith("encoder.")}
    config = OptimizerConfig(layer_decay=0.5, weight_decay=0.1)
    for one, other in zip(
        parameter_groups(dict(alone.named_parameters()), config, depth=2),
        parameter_groups(inside, config, depth=2),
        strict=True,
    ):
        assert (one["scale"], one["weight_decay"]) == (other["scale"], other["weight_decay"])
        assert list(map(id, one["params"])) == list(map(id, other["params"]))
    rest = {key: each for key, each in named.items() if key not in inside and each.requires_grad}
    assert "mask_token" in rest
    assert not is_kernel("mask_token", named["mask_token"])
    for key, each in rest.items():
        assert is_kernel(key, each) == (key.endswith(".weight") and "norm" not in key), key
        assert layer_index(key, depth=2) == 3, key


def test_layers_of_a_resnet_count_its_stages() -> None:
    assert [
        layer_index(name, depth=4) for name in ("stem.conv.weight", "stages.2.blocks.0.norm1.bias", "norm.bias")
    ] == [
        0,
        3,
        5,
    ]


def one_parameter(value: float, gradient: float) -> dict[str, nn.Parameter]:
    named = {"head.weight": nn.Parameter(torch.full((1, 1), value))}
    named["head.weight"].grad = torch.full((1, 1), gradient)
    return named


def test_a_step_of_adam_is_the_formula_with_decoupled_decay() -> None:
    named = one_parameter(2.0, 0.3)
    config = OptimizerConfig(beta1=0.9, beta2=0.95, weight_decay=0.1)
    stepper = build_optimizer(named, config, depth=2)
    set_learning_rate(stepper, 0.01)
    weight, first, second = 2.0, 0.0, 0.0
    for step in (1, 2, 3):
        stepper.step()
        first, second = 0.9 * first + 0.1 * 0.3, 0.95 * second + 0.05 * 0.3**2
        direction = (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.95**step)) + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * direction
        assert named["head.weight"].item() == pytest.approx(weight, rel=1e-6)


def test_a_step_of_sgd_is_the_formula_with_momentum() -> None:
    named = one_parameter(2.0, 0.3)
    stepper = build_optimizer(named, OptimizerConfig(name="sgd", momentum=0.9), depth=2)
    weight, speed = 2.0, 0.0
    for rate in (0.1, 0.05, 0.01):
        set_learning_rate(stepper, rate)
        stepper.step()
        speed = 0.9 * speed + 0.3
        weight -= rate * speed
        assert named["head.weight"].item() == pytest.approx(weight, rel=1e-6)


def test_sgd_rejects_weight_decay() -> None:
    with pytest.raises(ConfigError, match="weight decay"):
        build_optimizer(one_parameter(1.0, 1.0), OptimizerConfig(name="sgd", weight_decay=0.1), depth=2)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clip_scales_all_gradients_to_the_global_norm(limit) -> None:
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(7))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad.clone() for parameter in parameters]
    total = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in before))
    norm = gradient_norm(parameters)
    assert norm.item() == pytest.approx(total, rel=1e-6)
    clip_gradients(parameters, limit=limit, norm=norm)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * min(1.0, limit / total))


def test_ema_equals_its_formula() -> None:
    named = {"a": nn.Parameter(torch.tensor([1.0, 5.0]))}
    average = EMA.of(named, 0.99)
    wanted = torch.tensor([1.0, 5.0], dtype=torch.float64)
    for updates in range(50):
        with torch.no_grad():
            named["a"].add_(torch.randn(2))
        average.update(named, updates=updates)
        decay = min(0.99, (1 + updates) / (10 + updates))
        wanted = decay * wanted + (1 - decay) * named["a"].detach().double()
    torch.testing.assert_close(average.values["a"].double(), wanted, rtol=1e-5, atol=1e-6)


def test_swapping_the_ema_twice_is_bit_exact() -> None:
    model = tiny()
    named = trainable_parameters(model)
    average = EMA.of(named, 0.9)
    with torch.no_grad():
        for parameter in named.values():
            parameter.add_(torch.randn_like(parameter))
    parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    averages = {name: value.clone() for name, value in average.values.items()}
    average.swap(named)
    assert all(torch.equal(named[name], averages[name]) for name in named)
    average.swap(named)
    assert all(torch.equal(named[name], parameters[name]) for name in named)
    assert all(torch.equal(average.values[name], averages[name]) for name in named)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_lora_is_zero_at_the_start() -> None:
    model = tiny().eval()
    images = torch.rand(3, 1, 8, 8)
    before = model(images)
    add_lora(model, rank=2, generator=generator())
    assert torch.equal(model(images), before)


def test_lora_changes_queries_and_values_and_merges() -> None:
    model = tiny().eval()
    keys = set(model.state_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freeze_parameters(model, OptimizerConfig(trainable="lora", lora_rank=2), generator=generator())
    learning = trainable_parameters(model)
    assert {name.rpartition(".")[2] for name in learning if not name.startswith("head.")} == {"up", "down"}

    images = torch.rand(3, 1, 8, 8)
    stepper = torch.optim.SGD(learning.values(), lr=1.0)
    for _ in range(3):
        stepper.zero_grad()
        model(images).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), 1.0)
        stepper.step()
    logits = model(images)
    merge_lora(model)

    assert set(model.state_dict()) == keys
    torch.testing.assert_close(model(images), logits)
    for name, tensor in model.state_dict().items():
        if name.endswith("qkv.weight"):
            moved = (tensor != before[name]).any(dim=1)
            assert moved[:16].any()
            assert moved[32:].any()
            assert not moved[16:32].any(), "keys must not learn"
        elif not name.startswith("head."):
            assert torch.equal(tensor, before[name]), name


def test_lora_needs_attention() -> None:
    resnet = create("R50x1", num_classes=2, device="meta")
    with pytest.raises(ConfigError, match="attention"):
        add_lora(resnet, rank=2, generator=generator())


def test_trainable_head_includes_its_hidden_layer() -> None:
    model = tiny("head.pre_logits=8")
    freeze_parameters(model, OptimizerConfig(trainable="head"), generator=generator())
    assert set(trainable_parameters(model)) == {
        "head.weight",
        "head.bias",
        "pre_logits.fc.weight",
        "pre_logits.fc.bias",
    }


def test_fixed_positions_are_not_trained() -> None:
    model = tiny("positions.kind=sincos_2d")
    freeze_parameters(model, OptimizerConfig(), generator=generator())
    assert set(dict(model.named_parameters())) - set(trainable_parameters(model)) == {"pos_embed"}


def test_group_learning_rates_scale_the_schedule() -> None:
    model = tiny()
    stepper = build_optimizer(trainable_parameters(model), replace(OptimizerConfig(), layer_decay=0.5), depth=2)
    set_learning_rate(stepper, 0.8)
    assert sorted({group["lr"] for group in stepper.param_groups}) == [0.1, 0.2, 0.4, 0.8]
