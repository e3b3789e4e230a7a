"""Cost arithmetic, and predicted activation memory against a real training pass."""

from dataclasses import replace

import pytest
import torch
from model_cases import CASES, fresh, images_for, reduced_zoo, small
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vitkit.model.config import DropoutConfig
from vitkit.zoo.cost import Cost, count_activation_bytes, count_cost
from vitkit.zoo.variants import ModelConfig

DROPPING = DropoutConfig(dense=0.1, stochastic_depth=0.2)
CONFIGS: dict[str, ModelConfig] = {
    **CASES,
    **reduced_zoo(),
    "dropout": small(dropout=DROPPING),
    "dropout-mean": small(pooling="mean", dropout=DROPPING),
    "dropout-of-patches": small(dropout=DropoutConfig(patches=0.5)),
}


def measure_saved_bytes(config: ModelConfig, *, batch: int) -> int:
    """Measure what autograd saves in a real forward pass, without the parameters."""
    model = fresh(config).train()
    saved: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor  # keeps it alive, so that its address is not reused
        return tensor

    images = images_for(config, batch=batch)
    with saved_tensors_hooks(record, lambda tensor: tensor):
        logits = model(images)
    assert logits.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


@pytest.mark.parametrize("name", CONFIGS)
def test_predicted_memory_equals_a_real_pass(name: str) -> None:
    assert count_activation_bytes(CONFIGS[name]) == measure_saved_bytes(CONFIGS[name], batch=1)


@pytest.mark.parametrize("name", ["learned_1d-stem", "relative-shared", "hybrid", "axial"])
def test_saved_bytes_grow_with_the_batch(name: str) -> None:
    config = CONFIGS[name]
    one, four = measure_saved_bytes(config, batch=1), measure_saved_bytes(config, batch=4)
    # Standardized kernels and position tables do not depend on the batch; `Cost` counts them once per image.
    assert one < four <= 4 * one


def test_saved_bytes_are_linear_in_depth() -> None:
    two, three, four = (count_activation_bytes(replace(small(pooling="mean"), depth=depth)) for depth in (2, 3, 4))
    assert four - three == three - two > 0


def test_cost_arithmetic() -> None:
    total = Cost(
        model="test",
        image_size=224,
        num_classes=10,
        parts={"a": 3_000_000_000, "b": 1_000_000_000},
        parameters=1_000_000,
        activation_bytes=500,
        images=1_000_000,
        epochs=0.5,
        batch_size=8,
    )
    assert total.forward_flops == 4_000_000_000
    assert total.train_flops == 12_000_000_000
    assert total.weight_bytes == 4_000_000
    assert total.exaflops == pytest.approx(0.006)
    assert replace(total, images=None).exaflops is None
    # Weights, gradients and Adam's two moments: 16 bytes per parameter.
    assert total.training_bytes == 16 * 1_000_000 + 8 * 500


def test_cost_of_base_model() -> None:
    total = count_cost("B/16", images=303_000_000, epochs=7)
    assert total.parameters == 86_567_656
    # 17.6 billion multiply-adds per image, in every publication that counts them.
    assert total.forward_flops / 1e9 == pytest.approx(2 * 17.58, rel=0.005)
    assert total.exaflops == pytest.approx(224, rel=0.01)


def test_counting_a_huge_model_allocates_nothing() -> None:
    before = torch.get_rng_state()
    assert count_cost("H/14").weight_bytes == 4 * 632_045_800
    assert torch.equal(torch.get_rng_state(), before)
