"""FLOPs formulas against torch's counter on the meta device."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.sizes import pair
from vitkit.model.config import (
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.vit import ViT
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import create, find_variant
from vitkit.zoo.variants import ModelConfig

SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=3, heads=4, mlp_dim=96, num_classes=10)
FULL_SIZE = ("B/16", "H/14", "R+Ti/16", "R26+S/32", "R50+B/16", "Axial-B/16", "BiT-R50x1", "BiT-R50x2")
"""Every kind of model at full size; tests/zoo/test_operations.py has all variants with fewer layers."""
MEAN = replace(SMALL, pooling="mean")
HYBRID = replace(SMALL, image_size=64, patch_size=1, backbone=BackboneConfig(units=(2, 1), root_width=32))


def count_by_torch(config: ModelConfig) -> int:
    """Count matrix products and convolutions of one image, with every token in every layer."""
    model = create(config, device="meta").eval()
    images = torch.empty(1, config.channels, *pair(config.image_size), device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if isinstance(model, ViT):
            model.head(model.pool(model.encode(model.embed(images))))
        else:
            model(images)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FULL_SIZE)
def test_zoo_model_flops_equal_torch(name: str) -> None:
    config = find_variant(name).config
    assert sum(count_forward_flops(config).values()) == count_by_torch(config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(replace(SMALL, image_size=(24, 40), patch_size=(8, 4)), id="oblong images and patches"),
        pytest.param(replace(SMALL, channels=5), id="5 channels"),
        pytest.param(replace(SMALL, num_classes=0), id="no head"),
        pytest.param(replace(SMALL, head=HeadConfig(pre_logits=48)), id="pre-logits"),
        pytest.param(replace(SMALL, head=HeadConfig(pre_logits=48), num_classes=0), id="pre-logits without a head"),
        pytest.param(MEAN, id="mean pooling"),
        pytest.param(replace(SMALL, pooling="map"), id="attention pooling"),
        pytest.param(
            replace(SMALL, pooling="map", head=HeadConfig(pre_logits=48), tokens=TokenConfig(class_token=True)),
            id="attention pooling of a class token too, pre-logits",
        ),
        pytest.param(replace(SMALL, block=BlockConfig(activation="swiglu")), id="SwiGLU"),
        pytest.param(
            replace(SMALL, block=BlockConfig(activation="swiglu"), pooling="map"), id="SwiGLU, attention pooling"
        ),
        pytest.param(replace(SMALL, block=BlockConfig(layer_scale=1.0)), id="LayerScale"),
        pytest.param(replace(SMALL, tokens=TokenConfig(registers=4)), id="registers"),
        pytest.param(replace(SMALL, tokens=TokenConfig(distillation=True)), id="distillation"),
        pytest.param(
            replace(SMALL, tokens=TokenConfig(distillation=True, registers=4)), id="distillation and registers"
        ),
        *(
            pytest.param(replace(SMALL, positions=PositionConfig(kind=kind)), id=f"{kind} positions")
            for kind in ("none", "learned_2d", "sincos_2d", "relative", "rotary")
        ),
        pytest.param(
            replace(MEAN, positions=PositionConfig(kind="relative", injection="shared"), image_size=(24, 40)),
            id="relative positions, shared, no class token, oblong",
        ),
        pytest.param(replace(MEAN, block=BlockConfig(axial=True)), id="axial"),
        pytest.param(replace(MEAN, block=BlockConfig(axial=True), image_size=(24, 40)), id="axial, oblong"),
        pytest.param(replace(MEAN, block=BlockConfig(axial=True, activation="swiglu")), id="axial, SwiGLU"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(replace(HYBRID, image_size=(64, 48), patch_size=2), id="hybrid, oblong, 2x2 patches"),
        pytest.param(replace(HYBRID, patch_size=4, backbone=BackboneConfig(units=())), id="hybrid, root alone"),
        pytest.param(BiTConfig(units=(1, 2), image_size=(64, 96), num_classes=10), id="BiT, oblong"),
        pytest.param(BiTConfig(units=(1, 2, 1), image_size=(65, 50), channels=1), id="BiT, odd sizes, 1 channel"),
        pytest.param(BiTConfig(units=(1, 1), width_factor=2, num_classes=0), id="BiT, no head"),
    ],
)
def test_flops_of_every_kind_equal_torch(config: ModelConfig) -> None:
    assert sum(count_forward_flops(config).values()) == count_by_torch(config)
