"""Muon: equal to torch's on matrices, AdamW's on the rest, orthogonal updates of kernels, exact state."""

import copy

import pytest
import torch
from torch import nn

import vitkit
from vitkit.training.config import OptimizerConfig
from vitkit.training.optim import Muon, build_optimizer, orthogonalize


def gradients(parameters: list[nn.Parameter], *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_matrices_are_updated_as_by_torch() -> None:
    ours = weights((24, 8), (8, 24), (16, 16))
    theirs = copy.deepcopy(ours)
    groups = [{"params": ours, "algorithm": "muon"}]
    optimizer = Muon(groups, lr=0.02, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        for parameters, each in ((ours, optimizer), (theirs, reference)):
            gradients(parameters, seed=step)
            each.step()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


def test_other_parameters_are_updated_as_by_adamw() -> None:
    ours = weights((24,), (1, 5, 8))
    theirs = copy.deepcopy(ours)
    optimizer = Muon([{"params": ours, "algorithm": "adamw"}], lr=2e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=2e-3, weight_decay=0.1, fused=True)
    for step in range(4):
        for parameters, each in ((ours, optimizer), (theirs, reference)):
            gradients(parameters, seed=step)
            each.step()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("shape", [(32, 16, 3, 3), (64, 3, 2, 2), (16, 64)])
def test_updates_of_kernels_are_orthogonal(shape: tuple[int, ...]) -> None:
    update = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(1)), dtype=torch.float32)
    assert update.shape == shape
    singular = torch.linalg.svdvals(update.flatten(1))
    assert singular.min() > 0.5
    assert singular.max() < 1.5  # the quintic iteration ends between 0.7 and 1.2, up to its first steps' slack


def test_convolutions_equal_their_flattened_matrices() -> None:
    (kernel,) = weights((32, 16, 3, 3))
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    for step in range(3):
        gradients([kernel], seed=step)
        matrix.grad = kernel.grad.flatten(1)  # type: ignore[union-attr]
        if step == 0:
            optimizers = [Muon([{"params": [each], "algorithm": "muon"}], lr=0.02) for each in (kernel, matrix)]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_restored_state_continues_exactly() -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
        return [
            {"params": parameters[:1], "algorithm": "muon"},
            {"params": parameters[1:], "algorithm": "adamw", "weight_decay": 0.0},
        ]

    parameters = weights((24, 8), (24,))
    optimizer = Muon(groups(parameters), lr=0.02, weight_decay=0.1)
    for step in range(2):
        gradients(parameters, seed=step)
        optimizer.step()
    resumed = copy.deepcopy(parameters)
    other = Muon(groups(resumed), lr=0.02, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for every, each in ((parameters, optimizer), (resumed, other)):
        gradients(every, seed=2)
        each.step()
    for left, right in zip(parameters, resumed, strict=True):
        assert torch.equal(left, right)


def test_muon_updates_kernels_and_adamw_the_rest() -> None:
    model = vitkit.create("Ti/16", num_classes=3, image_size=32, settings={"depth": 1})
    parameters = dict(model.named_parameters())
    config = OptimizerConfig(name="muon", weight_decay=0.1)
    optimizer = build_optimizer(parameters, config, depth=1)
    algorithms = {id(each): group["algorithm"] for group in optimizer.param_groups for each in group["params"]}
    names = {name for name, each in parameters.items() if algorithms[id(each)] == "muon"}
    kernels = ("patch_embed.proj", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert names == {name for name in parameters if name.endswith(".weight") and any(part in name for part in kernels)}
    scales = {group["algorithm"]: group["scale"] for group in optimizer.param_groups}
    assert scales == {"muon": 1.0, "adamw": 0.1}
