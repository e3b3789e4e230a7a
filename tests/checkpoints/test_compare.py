"""Comparing models: equal ones do not differ, and every difference is found, named and measured."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from vitkit.checkpoints.compare import Pair, compare, largest_difference
from vitkit.checkpoints.native import Artefact
from vitkit.data.transforms import preprocessing
from vitkit.zoo.lookup import configure, create

SETTINGS = ["width=32", "heads=2", "depth=1", "mlp_dim=32"]


@pytest.fixture
def model() -> Artefact:
    config = configure("Ti/16", image_size=32, classes=2, settings=SETTINGS)
    return Artefact(
        name="small",
        config=config,
        state=create(config).state_dict(),
        preprocessing=preprocessing("paper", image_size=32),
        labels=("cat", "dog"),
    )


def with_tensor(artefact: Artefact, changes: Mapping[str, Any]) -> Artefact:
    return replace(artefact, state=artefact.state | dict(changes))


def test_a_model_does_not_differ_from_itself(model):
    found = compare(model, with_tensor(model, {name: tensor.clone() for name, tensor in model.state.items()}))
    assert found.is_same
    assert found.same_weights
    assert found.max_difference == 0.0
    assert [each.name for each in found.tensors] == list(model.state)


def test_the_largest_difference_is_found_and_named(model):
    changed = model.state["norm.bias"].clone()
    changed[3] += 0.25
    found = compare(model, with_tensor(model, {"norm.bias": changed}))
    assert found.max_difference == 0.25
    assert [each.name for each in found.tensors if not each.is_same] == ["norm.bias"]
    assert not found.is_same


def test_the_smallest_difference_that_a_number_can_have_is_seen(model):
    nudged = torch.nextafter(model.state["head.bias"], torch.tensor(1.0))
    found = compare(model, with_tensor(model, {"head.bias": nudged}))
    assert found.max_difference is not None
    assert found.max_difference > 0
    assert not found.same_weights


def test_tensors_of_other_shapes_have_no_difference_and_are_not_the_same(model):
    found = compare(model, with_tensor(model, {"head.bias": torch.zeros(5)}))
    (differing,) = [each for each in found.tensors if not each.is_same]
    assert (differing.shape, differing.other_shape, differing.max_difference) == ((2,), (5,), None)
    assert found.max_difference == 0.0  # of those that can be compared
    assert not found.same_weights


def test_tensors_that_only_one_has_are_named(model):
    less = {name: tensor for name, tensor in model.state.items() if name != "cls_token"}
    found = compare(model, replace(model, state=less | {"odd": torch.zeros(1)}))
    assert (found.only_a, found.only_b) == (("cls_token",), ("odd",))
    assert not found.same_weights


def test_configuration_preprocessing_and_labels_are_compared_too(model):
    other = replace(
        model,
        config=configure(model.config, settings=["block.activation=gelu_erf"]),
        preprocessing=preprocessing("deit", image_size=32),
        labels=("dog", "cat"),
    )
    found = compare(model, other)
    assert found.same_weights
    assert not found.is_same
    assert found.config == {"block.activation": Pair("gelu_tanh", "gelu_erf")}
    assert {"resize", "mean"} <= found.preprocessing.keys()
    assert found.labels_differ


def test_numbers_of_other_types_are_compared_by_value(model):
    half = model.state["norm.weight"].to(torch.bfloat16)
    assert compare(model, with_tensor(model, {"norm.weight": half})).max_difference == 0.0  # ones are exact in both


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([math.nan, 1.0], [math.nan, 1.5], 0.5),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.nan], [1.0], None),
        ([math.inf], [-math.inf], None),
        ([], [], 0.0),
    ],
)
def test_what_is_not_finite_differs_unless_it_is_the_same(a, b, difference):
    assert largest_difference(torch.tensor(a), torch.tensor(b)) == difference


def test_a_difference_that_is_not_finite_is_not_hidden_by_the_others(model):
    broken = model.state["norm.bias"].clone()
    broken[0] = math.nan
    assert compare(model, with_tensor(model, {"norm.bias": broken})).max_difference is None


def test_models_of_other_kinds_can_be_compared(model):
    config = configure("BiT-R50x1", classes=2)
    resnet = replace(model, config=config, state={"head.weight": torch.zeros(2, 8)})
    found = compare(model, resnet)
    assert found.config["depth"] == Pair(1, None)
    assert found.only_b == ()
    assert "cls_token" in found.only_a
