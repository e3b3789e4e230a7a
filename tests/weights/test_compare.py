"""Tests of comparison: equal models have no difference, and every difference is named and measured."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from vitkit.data.preprocessing import get_preprocessing
from vitkit.weights.bundle import ModelBundle, ValuePair
from vitkit.weights.describe import diff_bundles, max_abs_difference
from vitkit.zoo.registry import configure, create

SETTINGS = {"width": 32, "heads": 2, "depth": 1, "mlp_dim": 32}


@pytest.fixture
def model() -> ModelBundle:
    config = configure("Ti/16", image_size=32, num_classes=2, settings=SETTINGS)
    return ModelBundle(
        name="small",
        config=config,
        state=create(config).state_dict(),
        preprocessing=get_preprocessing("paper", image_size=32),
        labels=("cat", "dog"),
    )


def with_tensor(bundle: ModelBundle, changes: Mapping[str, Any]) -> ModelBundle:
    return replace(bundle, state=bundle.state | dict(changes))


def test_model_equals_itself(model):
    diff = diff_bundles(model, with_tensor(model, {name: tensor.clone() for name, tensor in model.state.items()}))
    assert diff.is_same
    assert diff.same_weights
    assert diff.max_difference == 0.0
    assert [tensor.name for tensor in diff.tensors] == list(model.state)


def test_largest_difference_is_named(model):
    changed = model.state["norm.bias"].clone()
    changed[3] += 0.25
    diff = diff_bundles(model, with_tensor(model, {"norm.bias": changed}))
    assert diff.max_difference == 0.25
    assert [tensor.name for tensor in diff.tensors if not tensor.is_same] == ["norm.bias"]
    assert not diff.is_same


def test_difference_of_one_ulp_is_found(model):
    nudged = torch.nextafter(model.state["head.bias"], torch.tensor(1.0))
    diff = diff_bundles(model, with_tensor(model, {"head.bias": nudged}))
    assert diff.max_difference is not None
    assert diff.max_difference > 0
    assert not diff.same_weights


def test_tensors_of_other_shapes_are_not_the_same(model):
    diff = diff_bundles(model, with_tensor(model, {"head.bias": torch.zeros(5)}))
    (differing,) = [tensor for tensor in diff.tensors if not tensor.is_same]
    assert (differing.shape, differing.other_shape, differing.max_difference) == ((2,), (5,), None)
    assert diff.max_difference == 0.0  # of the comparable tensors
    assert not diff.same_weights


def test_tensors_of_only_one_model_are_listed(model):
    less = {name: tensor for name, tensor in model.state.items() if name != "cls_token"}
    diff = diff_bundles(model, replace(model, state=less | {"odd": torch.zeros(1)}))
    assert (diff.only_a, diff.only_b) == (("cls_token",), ("odd",))
    assert not diff.same_weights


def test_config_preprocessing_and_labels_are_compared(model):
    other = replace(
        model,
        config=configure(model.config, settings={"block.activation": "gelu_erf"}),
        preprocessing=get_preprocessing("deit", image_size=32),
        labels=("dog", "cat"),
    )
    diff = diff_bundles(model, other)
    assert diff.same_weights
    assert not diff.is_same
    assert diff.config == {"block.activation": ValuePair("gelu_tanh", "gelu_erf")}
    assert {"resize", "mean"} <= diff.preprocessing.keys()
    assert diff.labels_differ


def test_other_dtypes_are_compared_by_value(model):
    half = model.state["norm.weight"].to(torch.bfloat16)
    assert (
        diff_bundles(model, with_tensor(model, {"norm.weight": half})).max_difference == 0.0
    )  # ones are exact in both


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
def test_non_finite_values_differ_unless_equal(a, b, difference):
    assert max_abs_difference(torch.tensor(a), torch.tensor(b)) == difference


def test_non_finite_difference_is_not_hidden(model):
    broken = model.state["norm.bias"].clone()
    broken[0] = math.nan
    assert diff_bundles(model, with_tensor(model, {"norm.bias": broken})).max_difference is None


def test_vit_and_resnet_can_be_compared(model):
    config = configure("BiT-R50x1", num_classes=2)
    resnet = replace(model, config=config, state={"head.weight": torch.zeros(2, 8)})
    diff = diff_bundles(model, resnet)
    assert diff.config["depth"] == ValuePair(1, None)
    assert diff.only_b == ()
    assert "cls_token" in diff.only_a
