"""Our logits against the independent NumPy forward, on random weights in Google's names and layouts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle.google_names import BIT, HYBRID, VIT, our_state_dict
from torch import nn
from witness import google_numpy

from vitkit.model.config import BackboneConfig, BiTConfig, HeadConfig, ViTConfig
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT

TOLERANCE = 1e-4  # ours runs in float32, the witness in float64; logits are of order 1

SMALL = ViTConfig(image_size=32, patch_size=8, width=24, depth=3, heads=3, mlp_dim=40, num_classes=7)


def agree(model: nn.Module, table: Mapping[str, str], weights: Any, logits: Any, image_size: tuple[int, int]) -> None:
    model.load_state_dict(our_state_dict(weights, table), strict=True)
    images = np.random.default_rng(1).normal(size=(2, *image_size, 3)).astype(np.float32)
    with torch.no_grad():
        actual = model.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    expected = logits(weights, images)
    assert expected.std() > 0.1
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "drawn"),
    [
        pytest.param(SMALL, {}, id="class token"),
        pytest.param(replace(SMALL, head=HeadConfig(pre_logits=20)), {"pre_logits": 20}, id="pre-logits"),
        pytest.param(replace(SMALL, pooling="mean"), {"class_token": False}, id="mean-pooled"),
        pytest.param(replace(SMALL, image_size=(24, 40)), {"image_size": (24, 40)}, id="wide images"),
        pytest.param(replace(SMALL, image_size=(40, 24)), {"image_size": (40, 24)}, id="tall images"),
        pytest.param(replace(SMALL, patch_size=16), {"patch": 16}, id="large patches"),
    ],
)
def test_witness_vit_logits_equal_vitkit(config: ViTConfig, drawn: dict[str, Any]) -> None:
    drawn = {"image_size": (32, 32), "patch": 8, "depth": 3} | drawn
    weights = google_numpy.random_vit_weights(np.random.default_rng(0), **drawn)
    agree(ViT(config), VIT, weights, google_numpy.vit_logits, drawn["image_size"])


@pytest.mark.parametrize(
    ("units", "root_width", "patch", "image_size", "class_token", "flat_norms"),
    [
        pytest.param((2,), 64, 1, (16, 24), True, True, id="one stage, class token, norms of C"),
        pytest.param((2, 1), 32, 1, (32, 48), False, False, id="two stages, mean-pooled, norms of 1x1x1xC"),
        pytest.param((1, 1, 2), 32, 2, (64, 32), True, False, id="three stages, 2x2 patches, norms of 1x1x1xC"),
        pytest.param((1, 1, 1, 1), 32, 1, (32, 64), False, True, id="four stages, mean-pooled, norms of C"),
        pytest.param((), 64, 4, (32, 48), True, False, id="root alone, 4x4 patches, norms of 1x1x1xC"),
    ],
)
def test_witness_hybrid_logits_equal_vitkit(
    units: tuple[int, ...],
    root_width: int,
    patch: int,
    image_size: tuple[int, int],
    class_token: bool,
    flat_norms: bool,
) -> None:
    weights = google_numpy.random_hybrid_weights(
        np.random.default_rng(0),
        image_size=image_size,
        blocks=units,
        root_width=root_width,
        flat_norms=flat_norms,
        patch=patch,
        depth=3,
        class_token=class_token,
    )
    config = replace(
        SMALL,
        image_size=image_size,
        patch_size=patch,
        backbone=BackboneConfig(units=units, root_width=root_width),
        pooling="class" if class_token else "mean",
    )
    agree(ViT(config), HYBRID, weights, google_numpy.vit_logits, image_size)


@pytest.mark.parametrize(
    ("units", "image_size"), [((1, 1, 1, 1), (33, 50)), ((2, 1, 2), (32, 48))], ids=["four stages, odd", "three, even"]
)
def test_witness_bit_logits_equal_vitkit(units: tuple[int, ...], image_size: tuple[int, int]) -> None:
    weights = google_numpy.random_bit_weights(np.random.default_rng(0), blocks=units, width_factor=1)
    agree(BiT(BiTConfig(units=units, num_classes=7)), BIT, weights, google_numpy.bit_logits, image_size)
