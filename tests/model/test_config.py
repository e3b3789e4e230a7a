"""Configurations are importable without torch, and position kinds are an open registry."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.model.config import POSITION_KINDS, PositionConfig, PositionKind, ViTConfig
from vitkit.model.vit import ViT

SMALL = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "num_classes": 3}


def test_configurations_import_no_torch() -> None:
    code = "import sys, vitkit.model.config; vitkit.model.config.ViTConfig(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class CenteredPositions(nn.Module):
    """A learned vector times the distance of a patch from the middle of the sequence."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1, 1, config.width))
        self.rows = config.prefix_positions + config.patches

    def forward(self) -> torch.Tensor:
        return torch.linspace(-1, 1, self.rows)[None, :, None] * self.scale


@pytest.mark.parametrize("injection", ["stem", "every_layer", "shared"])
def test_position_kind_is_added_by_one_registry_entry(monkeypatch: pytest.MonkeyPatch, injection: str) -> None:
    entry = PositionKind(
        role="table", factory=f"{__name__}:CenteredPositions", injections=("stem", "every_layer", "shared")
    )
    monkeypatch.setitem(POSITION_KINDS, "centered", entry)
    model = ViT(ViTConfig(**SMALL, positions=PositionConfig(kind="centered", injection=injection)))
    nn.init.normal_(model.head.weight)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    scales = [value for name, value in model.named_parameters() if name.endswith("scale")]
    assert len(scales) == (2 if injection == "every_layer" else 1)
    assert all(scale.grad.abs().max() > 0 for scale in scales)


def test_unknown_position_kind_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"positions\.kind is not valid \(expected one of: none, learned_1d"
    ) as raised:
        PositionConfig(kind="rotery")
    assert raised.value.hint == "did you mean rotary?"
