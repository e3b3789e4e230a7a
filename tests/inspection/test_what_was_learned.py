"""Filters, positions, features and layers: against other ways to the same numbers, and where the answer is known."""

import numpy as np
import pytest
import torch
from model_cases import CASES, fresh, images_for, random_vit, small

from vitkit.core.errors import ConfigError, InputError
from vitkit.inspection import (
    feature_colors,
    filter_components,
    layer_predictions,
    layer_similarity,
    patch_similarity,
    position_similarity,
    token_norms,
)
from vitkit.inspection.attention import NotApplicableError
from vitkit.inspection.features import layer_maps, patch_features
from vitkit.model.config import BiTConfig
from vitkit.model.encoder import Capture

BIT = BiTConfig(units=(1, 1), num_classes=5)


def test_components_recover_planted_patterns() -> None:
    model = random_vit(small(width=64, heads=4))
    patterns = torch.linalg.qr(torch.randn(192, 3)).Q.T
    strengths = torch.linalg.qr(torch.randn(64, 3) - torch.randn(64, 3).mean(dim=0)).Q
    strengths = torch.linalg.qr(strengths - strengths.mean(dim=0)).Q * torch.tensor([5.0, 3.0, 1.0])
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_((strengths @ patterns).reshape(64, 3, 8, 8))
    components = filter_components(model, count=3)
    overlap = (components.flatten(1) @ patterns.T).abs()
    torch.testing.assert_close(overlap, torch.eye(3), rtol=0, atol=1e-5)
    assert all(float(each.flatten()[each.flatten().abs().argmax()]) > 0 for each in components)


@pytest.mark.parametrize("case", ["learned_1d-stem", "gray", "hybrid"])
def test_components_are_orthonormal(case: str) -> None:
    flat = filter_components(random_vit(CASES[case]), count=5).flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(len(flat)), rtol=0, atol=1e-5)


def test_resnet_filters_are_of_the_first_convolution() -> None:
    assert filter_components(fresh(BIT), count=9).shape == (9, 3, 7, 7)
    with pytest.raises(ConfigError, match="count of 1 or more"):
        filter_components(fresh(BIT), count=0)


@pytest.mark.parametrize(
    "case", [name for name in CASES if name.startswith(("learned", "sincos", "positions", "dist"))]
)
def test_position_similarity_is_pairwise_cosine(case: str) -> None:
    model = random_vit(CASES[case], dtype=torch.float64)
    positions = model.pos_embed if model.pos_embed is not None else model.layer_pos_embed[0]
    table = (positions() if callable(positions) else positions)[0, model.config.prefix_positions :].detach().numpy()
    found = position_similarity(model).numpy()
    rows, columns = model.config.grid
    for a in range(rows * columns):
        for b in range(rows * columns):
            cosine = table[a] @ table[b] / np.linalg.norm(table[a]) / np.linalg.norm(table[b])
            assert found[a // columns, a % columns, b // columns, b % columns] == pytest.approx(cosine, abs=1e-5)


def test_position_similarity_shows_rows_and_columns() -> None:
    """A patch is more like those of its row and column than like any other patch."""
    model = random_vit(small())
    rows, columns = model.config.grid
    basis = torch.linalg.qr(torch.randn(16, 16)).Q
    with torch.no_grad():
        table = basis[:rows, None] + basis[None, rows : rows + columns]
        model.pos_embed[0, 1:] = table.flatten(0, 1)
    similar = position_similarity(model)
    for row in range(rows):
        for column in range(columns):
            ours = similar[row, column]
            line = torch.zeros(rows, columns, dtype=torch.bool)
            line[row], line[:, column] = True, True
            assert float(ours[line].min()) > 0.49
            assert float(ours[~line].abs().max()) < 1e-6


@pytest.mark.parametrize("case", ["relative-shared", "rotary-shared", "none-stem"])
def test_models_without_position_table_are_rejected(case: str) -> None:
    with pytest.raises(NotApplicableError, match="no position embeddings to compare"):
        position_similarity(random_vit(CASES[case]))


def test_two_kinds_of_patches_have_two_colors() -> None:
    model = random_vit(small(depth=1))
    images = torch.zeros(2, 3, 32, 48)
    images[:, :, :, 24:] = 3.0
    with torch.no_grad():
        model.pos_embed.zero_()
    colors = feature_colors(model, images)
    assert colors.shape == (2, 4, 6, 3)
    left, right = colors[:, :, :3], colors[:, :, 3:]
    assert float((left - left[0, 0, 0]).abs().max()) < 1e-3
    assert float((right - right[0, 0, 0]).abs().max()) < 1e-3
    assert float((left[0, 0, 0] - right[0, 0, 0]).abs().max()) > 0.9


MEANS = [
    name
    for name, config in CASES.items()
    if config.pooling == "mean" and not config.head.pre_logits and config.head.norm == "before_pooling"
]


@pytest.mark.parametrize("case", MEANS)
def test_last_layer_features_are_pooled(case: str) -> None:
    config = CASES[case]
    model, images = random_vit(config), images_for(config)
    mean = patch_features(model, images).mean(dim=(1, 2))
    torch.testing.assert_close(mean, model.features(images), rtol=0, atol=1e-5)


def test_patch_similarity_is_cosine() -> None:
    config = CASES["registers"]
    model, images = random_vit(config), images_for(config)
    features = patch_features(model, images)
    near = patch_similarity(model, images, image=1, row=2, column=5)
    expected = torch.nn.functional.cosine_similarity(features, features[1, 2, 5], dim=-1)
    torch.testing.assert_close(near, expected, rtol=0, atol=1e-6)
    for place in ({"image": 2}, {"row": 4}, {"column": -1}):
        with pytest.raises(InputError, match=f"no such {next(iter(place))}"):
            patch_similarity(model, images, **({"image": 0, "row": 0, "column": 0} | place))


def test_token_norms_by_layer() -> None:
    config = CASES["registers"]
    model, images = random_vit(config), images_for(config)
    outputs = model.encode(model.embed(images), capture=Capture(outputs=[0, 1])).outputs
    expected = torch.stack([outputs[0].square().sum(-1).sqrt(), outputs[1].square().sum(-1).sqrt()], dim=1)
    torch.testing.assert_close(token_norms(model, images), expected.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].num_classes])
@torch.no_grad()
def test_last_layer_prediction_equals_the_model(case: str) -> None:
    model, images = random_vit(CASES[case]), images_for(CASES[case])
    lens = layer_predictions(model, images)
    assert lens.shape == (2, len(model.blocks), 5)
    torch.testing.assert_close(lens[:, -1], model(images), rtol=0, atol=1e-4)


def slow_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Linear CKA by covariances, in the features' space."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    cross = np.linalg.norm(x.T @ y) ** 2
    return float(cross / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y))


def test_layer_similarity_equals_linear_cka() -> None:
    one, two = random_vit(small(depth=3)), random_vit(small(depth=2, width=32))
    images = images_for(one.config, batch=3)
    found = layer_similarity(one, images, other=two)
    assert found.shape == (3, 2)
    for a, ours in enumerate(layer_maps(one, images)):
        for b, theirs in enumerate(layer_maps(two, images)):
            flat = [each.permute(0, 2, 3, 1).flatten(0, 2).detach().double().numpy() for each in (ours, theirs)]
            assert float(found[a, b]) == pytest.approx(slow_cka(*flat), rel=1e-5)
    torch.testing.assert_close(layer_similarity(one, images).diagonal(), torch.ones(3), rtol=0, atol=1e-6)


def test_layers_of_different_grids_are_comparable() -> None:
    images = torch.randn(2, 3, 64, 64)
    vit, resnet = random_vit(small(image_size=64)), fresh(BIT).eval()
    assert layer_similarity(vit, images, other=resnet).shape == (2, 2)
    assert feature_colors(resnet, images).shape == (2, 8, 8, 3)
    with pytest.raises(InputError, match="no such stage"):
        patch_features(resnet, images, layer=2)


def test_cka_samples_patches_evenly() -> None:
    model, images = random_vit(small()), images_for(small(), batch=100)
    torch.testing.assert_close(layer_similarity(model, images).diagonal(), torch.ones(2), rtol=0, atol=1e-6)
