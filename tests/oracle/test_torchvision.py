"""Our ViT against torchvision's."""

from dataclasses import replace

import pytest
import torch
from oracle.comparison import assert_same_gradients, compute_gradients, random_images, randomize
from oracle.foreign_names import load, torchvision
from oracles import import_torchvision

from vitkit.model.config import BlockConfig, HeadConfig, ViTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create, find_variant

SMALL = ViTConfig(
    image_size=32,
    patch_size=8,
    width=64,
    depth=3,
    heads=4,
    mlp_dim=128,
    num_classes=10,
    block=BlockConfig(activation="gelu_erf"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("pre_logits", [None, 48], ids=["linear head", "pre-logits"])
def test_vit_logits_and_gradients_equal_torchvision(pre_logits: int | None, dtype: torch.dtype) -> None:
    vision_transformer = import_torchvision().models.vision_transformer
    ours = ViT(replace(SMALL, head=HeadConfig(pre_logits=pre_logits)))
    randomize(ours)
    theirs = vision_transformer.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        num_classes=10,
        representation_size=pre_logits,
    )
    load(theirs.to(dtype), torchvision(ours.to(dtype).state_dict()))
    images = random_images(3, 3, 32, 32)
    assert_same_gradients(compute_gradients(ours, images), compute_gradients(theirs, images), rename=torchvision)


@pytest.mark.parametrize("alias", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvision_alias_has_the_same_parameter_count(alias: str) -> None:
    models = import_torchvision().models
    ours = create(find_variant(alias).config, device="meta")
    with torch.device("meta"):
        theirs = models.get_model(alias)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
