"""Every parameter of every model receives a gradient."""

import pytest
import torch
from model_cases import CASES, fresh, images_for, random_vit, randomized, reduced_zoo, with_positions
from torch import Tensor, nn

from vitkit.model.config import TokenConfig
from vitkit.zoo.variants import ModelConfig

MODELS: dict[str, ModelConfig] = CASES | reduced_zoo()


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor | None]:
    logits = model(images)
    (logits * torch.randn_like(logits)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_receives_a_gradient(name: str) -> None:
    config = MODELS[name]
    # Parameters that start at zero would block the gradients of others.
    model = randomized(fresh(config)).train()
    found = gradients(model, images_for(config))
    assert [parameter for parameter, gradient in found.items() if gradient is None] == []
    lost = [parameter for parameter, gradient in found.items() if gradient is not None and not gradient.any()]
    assert lost == []
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("injection", ["stem", "every_layer", "shared"])
def test_every_position_of_every_table_receives_a_gradient(kind: str, injection: str) -> None:
    model = random_vit(with_positions(kind, injection, tokens=TokenConfig(distillation=True)))
    found = gradients(model, images_for(model.config))
    tables = {name: gradient for name, gradient in found.items() if "pos_embed" in name}
    assert tables
    for gradient in tables.values():
        assert gradient is not None
        assert (gradient != 0).any(dim=-1).all()


def test_fixed_positions_receive_no_gradient() -> None:
    model = random_vit(with_positions("sincos_2d"))
    assert isinstance(model.pos_embed, Tensor)
    gradients(model, images_for(model.config))
    assert model.pos_embed.grad is None


@pytest.mark.parametrize("case", ["learned_1d-stem", "distilled-registers", "map", "pre-logits", "hybrid"])
def test_zero_head_gets_the_only_gradient_at_first(case: str) -> None:
    """A zero head passes no gradient on, so the first step changes the head alone, as in the released code."""
    config = CASES[case]
    found = gradients(fresh(config), images_for(config))
    moved = {name for name, gradient in found.items() if gradient is not None and gradient.any()}
    assert moved == {name for name in found if name.startswith("head.")}
