"""The ledger's arithmetic, and the memory it foretells against what a real training pass keeps."""

from dataclasses import replace

import pytest
import torch
from model_cases import CASES, fresh, images_for, shrunk_zoo, small
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vitkit.model.config import DropoutConfig
from vitkit.zoo.cost import Cost, activation_bytes, cost
from vitkit.zoo.lookup import configure
from vitkit.zoo.variants import ModelConfig

DROPPING = DropoutConfig(dense=0.1, stochastic_depth=0.2)
KEPT: dict[str, ModelConfig] = {
    **CASES,
    **shrunk_zoo(),
    "dropout": small(dropout=DROPPING),
    "dropout-mean": small(pooling="mean", dropout=DROPPING),
    "dropout-of-patches": small(dropout=DropoutConfig(patches=0.5)),
}


def kept_by_autograd(config: ModelConfig, *, batch: int) -> int:
    """Bytes that a real forward pass in training holds for its backward pass, beside the parameters."""
    model = fresh(config).train()
    kept: dict[int, Tensor] = {}

    def remember(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # and hold it, so that its address is not given away
        return tensor

    images = images_for(config, batch=batch)
    with saved_tensors_hooks(remember, lambda tensor: tensor):
        logits = model(images)
    assert logits.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


@pytest.mark.parametrize("name", KEPT)
def test_the_foretold_memory_is_what_a_real_pass_keeps(name: str) -> None:
    assert activation_bytes(KEPT[name]) == kept_by_autograd(KEPT[name], batch=1)


@pytest.mark.parametrize("name", ["learned_1d-stem", "relative-shared", "hybrid", "axial"])
def test_what_a_batch_keeps_grows_with_its_images(name: str) -> None:
    config = KEPT[name]
    one, four = kept_by_autograd(config, batch=1), kept_by_autograd(config, batch=4)
    # What does not depend on the batch (standardised kernels, tables of positions) is counted once for each image.
    assert one < four <= 4 * one


def test_a_deeper_model_keeps_as_much_more_as_it_has_layers_more() -> None:
    two, three, four = (activation_bytes(replace(small(pooling="mean"), depth=depth)) for depth in (2, 3, 4))
    assert four - three == three - two > 0


def test_the_ledgers_arithmetic() -> None:
    ledger = Cost(parts={"a": 3_000_000_000, "b": 1_000_000_000}, parameters=1_000_000, activation_bytes=500)
    assert ledger.forward_flops == 4_000_000_000
    assert ledger.train_flops == 12_000_000_000
    assert ledger.weight_bytes == 4_000_000
    assert ledger.exaflops(images=1_000_000, epochs=2) == pytest.approx(0.024)
    assert ledger.exaflops(images=1_000_000, epochs=0.5) == pytest.approx(0.006)
    # Weights, gradients and Adam's two numbers: 16 bytes a parameter.
    assert ledger.training_bytes(8) == 16 * 1_000_000 + 8 * 500


def test_the_cost_of_a_base_model() -> None:
    ledger = cost(configure("B/16"))
    assert ledger.parameters == 86_567_656
    # 17.6 billion multiply-adds an image, in every publication that counts them.
    assert ledger.forward_flops / 1e9 == pytest.approx(2 * 17.58, rel=0.005)
    assert ledger.exaflops(images=303_000_000, epochs=7) == pytest.approx(224, rel=0.01)


def test_counting_a_huge_model_needs_no_memory_for_it() -> None:
    before = torch.get_rng_state()
    ledger = cost(configure("H/14"))
    assert ledger.weight_bytes == 4 * 632_045_800
    assert torch.equal(torch.get_rng_state(), before)
