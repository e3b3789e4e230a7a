"""How far heads look: against loops, and where the distance is known."""

from itertools import product
from math import hypot

import numpy as np
import pytest
import torch
from model_cases import CASES, images_for, random_vit, small

from vitkit.core.errors import InputError
from vitkit.core.sizes import pair
from vitkit.inspection import attention_distance
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import Capture
from vitkit.model.vit import ViT


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_distance_equals_its_definition(case: str) -> None:
    config = CASES[case]
    model, images = random_vit(config, dtype=torch.float64), images_for(config, dtype=torch.float64)
    depth, prefix = len(model.blocks), config.prefix
    attention = model.encode(model.embed(images), capture=Capture(attention=range(depth))).attention
    (rows, columns), (height, width) = config.grid, pair(config.image_size)
    places = [(row * height / rows, column * width / columns) for row, column in product(range(rows), range(columns))]
    apart = np.array([[hypot(a - c, b - d) for c, d in places] for a, b in places])
    found = attention_distance(model, [images])
    for layer, head in product(range(depth), range(config.heads)):
        distances = []
        for image, query in product(range(len(images)), range(len(places))):
            weights = attention[layer][image, head, prefix + query, prefix:].numpy()
            distances.append(np.average(apart[query], weights=weights))
        assert float(found[layer, head]) == pytest.approx(np.mean(distances), rel=1e-5)


def with_keys(config: ViTConfig, *, sharp: float) -> ViT:
    """A model whose tokens are told apart by position alone; `sharp` 0 looks everywhere, large looks at itself."""
    model = random_vit(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pos_embed[0] = torch.nn.functional.normalize(torch.randn(model.pos_embed.shape[1:]), dim=-1) * 4
        for block in model.blocks:
            block.norm1.weight.fill_(1)
            block.attn.qkv.weight[: 2 * config.width] = torch.eye(config.width).repeat(2, 1) * sharp
    return model


def test_self_attention_to_own_patch_has_distance_zero() -> None:
    config = small(heads=1, width=64)
    distance = attention_distance(with_keys(config, sharp=100.0), [images_for(config)])
    assert float(distance.max()) == 0.0


@pytest.mark.parametrize("tokens", [TokenConfig(), TokenConfig(registers=3)])
def test_uniform_attention_has_mean_grid_distance(tokens: TokenConfig) -> None:
    config = small(heads=1, tokens=tokens)
    places = [(8 * row, 8 * column) for row, column in product(range(4), range(6))]
    mean = sum(hypot(a - c, b - d) for (a, b), (c, d) in product(places, places)) / len(places) ** 2
    distance = attention_distance(with_keys(config, sharp=0.0), [images_for(config)])
    torch.testing.assert_close(distance, torch.full_like(distance, mean), rtol=1e-5, atol=0)


def test_distance_does_not_depend_on_batches() -> None:
    config = CASES["learned_1d-stem"]
    model, images = random_vit(config), images_for(config, batch=5)
    together, apart = attention_distance(model, [images]), attention_distance(model, images.split(2))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=0)
    with pytest.raises(InputError, match="no images"):
        attention_distance(model, [])
