"""ResNets with fractional widths: shapes, and the FLOP counter against PyTorch's."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.errors import ConfigError
from vitkit.model.config import BackboneConfig, BiTConfig, ViTConfig
from vitkit.model.resnet import Backbone
from vitkit.zoo.flops import count_forward_flops
from vitkit.zoo.registry import create


@pytest.mark.parametrize(
    "config",
    [
        BiTConfig(units=(1, 1), width_factor=0.5, root="small", image_size=16, num_classes=5),
        BiTConfig(units=(1,), width_factor=0.75, image_size=32, num_classes=5),
    ],
)
def test_narrow_bit_runs_and_is_counted(config) -> None:
    model = create(config, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert model(torch.rand(1, 3, config.image_size, config.image_size)).shape == (1, 5)
    assert sum(count_forward_flops(config).values()) == counter.get_total_flops()


def test_narrow_backbone_runs_and_is_counted() -> None:
    backbone = BackboneConfig(units=(1, 1), root_width=24, root="small")
    config = ViTConfig(image_size=16, patch_size=2, width=32, depth=1, heads=2, mlp_dim=32, backbone=backbone)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert Backbone(backbone, channels=3)(torch.rand(1, 3, 16, 16)).shape == (1, 192, 8, 8)
    assert count_forward_flops(config)["backbone"] == counter.get_total_flops()


def test_width_must_suit_the_norm() -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        BiTConfig(width_factor=0.3)
