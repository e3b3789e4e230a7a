"""Files exchanged with torchvision's VisionTransformer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.round_trip import (
    SMALL,
    assert_loads_as_theirs,
    assert_same_logits,
    compute_logits,
    make_bundle,
    randomize_model,
    write_with_format,
)
from oracles import import_torchvision

from vitkit.model.config import HeadConfig, PositionConfig

PLAIN = replace(SMALL, positions=PositionConfig(origin="torchvision"))
KINDS = {
    "linear head": PLAIN,
    "pre-logits": replace(PLAIN, head=HeadConfig(pre_logits=48)),
    "larger patches": replace(PLAIN, patch_size=16),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def build_torchvision(kind: str) -> Any:
    config = KINDS[kind]
    return import_torchvision().models.VisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
        representation_size=config.head.pre_logits,
    )


@kinds
@pytest.mark.parametrize("legacy", [False, True], ids=["", "first names"])
def test_loaded_torchvision_model_equals_torchvision(kind: str, legacy: bool, tmp_path: Path) -> None:
    theirs = randomize_model(build_torchvision(kind))
    tensors = theirs.state_dict()
    if legacy:  # which its class still loads
        first = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}
        for new, old in first.items():
            tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "weights.pth")
    found = assert_loads_as_theirs(
        tmp_path / "weights.pth", compute_logits(theirs, KINDS[kind]), format_name="torchvision"
    )
    assert found == KINDS[kind]


@kinds
def test_torchvision_class_loads_our_file(kind: str, tmp_path: Path) -> None:
    ours, theirs = make_bundle(KINDS[kind]), build_torchvision(kind)
    file = write_with_format(ours, "torchvision", tmp_path / "weights.pth")
    theirs.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same_logits(compute_logits(ours.build_model(), ours.config), compute_logits(theirs.eval(), ours.config))
