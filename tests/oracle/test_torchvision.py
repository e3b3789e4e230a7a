"""Our ViT against torchvision's."""

from dataclasses import replace

import pytest
import torch
from oracle.comparison import assert_same_outcome, outcome, random_images, randomise
from oracle.foreign_names import load, torchvision
from oracles import import_torchvision

from vitkit.model.config import ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import create, find

SMALL = ViTConfig(
    image_size=32,
    patch_size=8,
    width=64,
    depth=3,
    heads=4,
    mlp_dim=128,
    classes=10,
    block=BlockConfig(activation="gelu_erf"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("pre_logits", [None, 48], ids=["linear head", "pre-logits"])
def test_vit_has_the_logits_and_gradients_of_torchvision(pre_logits: int | None, dtype: torch.dtype) -> None:
    vision_transformer = import_torchvision().models.vision_transformer
    ours = ViT(replace(SMALL, head=HeadConfig(pre_logits=pre_logits)))
    randomise(ours)
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
    assert_same_outcome(outcome(ours, images), outcome(theirs, images), rename=torchvision)


@pytest.mark.parametrize("alias", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_alias_of_torchvisions_has_as_many_parameters_there(alias: str) -> None:
    models = import_torchvision().models
    ours = create(find(alias).config, device="meta")
    with torch.device("meta"):
        theirs = models.get_model(alias)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
