"""Files between torchvision and us, both ways: what it saves, and what its class loads, no tensor more or less."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.both_ways import SMALL, answer, assert_same_logits, drawn, loads_as_theirs, of_ours, written
from oracles import import_torchvision

from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig

PLAIN = replace(SMALL, positions=PositionConfig(origin="torchvision"))
KINDS = {
    "linear head": PLAIN,
    "pre-logits": replace(PLAIN, head=HeadConfig(pre_logits=48)),
    "larger patches": replace(PLAIN, patch_size=16),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> Any:
    config = KINDS[kind]
    return import_torchvision().models.VisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.classes,
        representation_size=config.head.pre_logits,
    )


@kinds
@pytest.mark.parametrize("legacy", [False, True], ids=["", "first names"])
def test_what_torchvision_saves_answers_here_as_there(kind: str, legacy: bool, tmp_path: Path) -> None:
    theirs = drawn(made(kind))
    tensors = theirs.state_dict()
    if legacy:  # which its class still loads
        first = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}
        for new, old in first.items():
            tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    torch.save(tensors, tmp_path / "weights.pth")
    found = loads_as_theirs(tmp_path / "weights.pth", answer(theirs, KINDS[kind]), format_name="torchvision")
    assert found == KINDS[kind]


@kinds
def test_torchvisions_class_loads_the_file_that_we_write(kind: str, tmp_path: Path) -> None:
    ours, theirs = of_ours(KINDS[kind]), made(kind)
    file = written(ours, "torchvision", tmp_path / "weights.pth")
    theirs.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same_logits(answer(ours.model(), ours.config), answer(theirs.eval(), ours.config))
