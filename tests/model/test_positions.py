"""Additive positions: every kind at every injection, against tables and forward passes written by hand."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import (
    ALLOWED,
    EMBEDDING_INJECTIONS,
    INVALID_INJECTIONS,
    VALID_INJECTIONS,
    images_for,
    random_vit,
    reference_attention,
    small,
    with_positions,
)
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import PositionConfig, TokenConfig
from vitkit.model.patches import patchify, unpatchify
from vitkit.model.positions import LearnedPositions2d, sincos_2d
from vitkit.model.vit import ViT

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs


# Kinds and injections


@pytest.mark.parametrize("pooling", ["class", "mean", "map"])
@pytest.mark.parametrize(("kind", "injection"), VALID_INJECTIONS)
def test_every_kind_runs_at_every_injection(kind: str, injection: str, pooling: str) -> None:
    config = with_positions(kind, injection, pooling=pooling)
    logits = random_vit(config)(images_for(config))
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()


@pytest.mark.parametrize(("kind", "injection"), INVALID_INJECTIONS)
def test_unsupported_injection_is_rejected(kind: str, injection: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} positions cannot be injected there") as raised:
        PositionConfig(kind=kind, injection=injection)
    assert raised.value.got == injection
    named = str(raised.value.expected).removeprefix("injection = ").split(" or ")
    assert set(named) == ALLOWED[kind]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("none", "stem"),
        ("learned_1d", "stem"),
        ("learned_2d", "stem"),
        ("sincos_2d", "stem"),
        ("relative", "every_layer"),
        ("rotary", "shared"),
    ],
)
def test_default_injection_of_each_kind(kind: str, place: str) -> None:
    assert PositionConfig(kind=kind).injection_point == place


@pytest.mark.parametrize(("kind", "width", "heads", "multiple"), [("learned_2d", 15, 3, 2), ("sincos_2d", 18, 2, 4)])
def test_width_that_does_not_suit_a_table_is_rejected(kind: str, width: int, heads: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"the width does not suit {kind} positions") as raised:
        with_positions(kind, width=width, heads=heads)
    assert (raised.value.expected, raised.value.got) == (f"a multiple of {multiple}", width)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d"])
def test_every_layer_injection_has_one_table_per_layer(kind: str) -> None:
    def tables(injection: str) -> int:
        names = [
            name for name, _ in ViT(with_positions(kind, injection, depth=3)).named_parameters() if "pos_embed" in name
        ]
        return len(names) // (3 if kind == "learned_2d" else 1)  # x, y and the class token's row

    assert (tables("stem"), tables("shared"), tables("every_layer")) == (1, 1, 3)


def test_sincos_tables_are_not_learned() -> None:
    model = ViT(with_positions("sincos_2d"))
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["pos_embed"]


# Tables


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), half=st.integers(1, 4), prefix=st.integers(0, 2))
def test_learned_2d_concatenates_column_and_row(rows: int, columns: int, half: int, prefix: int) -> None:
    positions = LearnedPositions2d(grid=(rows, columns), width=2 * half, prefix=prefix)
    with torch.no_grad():
        for parameter in positions.parameters():
            parameter.normal_()
    table = positions()
    assert table.shape == (1, prefix + rows * columns, 2 * half)
    if prefix:
        assert positions.prefix is not None
        assert torch.equal(table[0, :prefix], positions.prefix[0])
    for row, column in product(range(rows), range(columns)):
        embedding = table[0, prefix + row * columns + column]
        assert torch.equal(embedding[:half], positions.x[0, column])
        assert torch.equal(embedding[half:], positions.y[0, row])


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    quarter=st.integers(1, 6),
    prefix=st.integers(0, 2),
    like=st.sampled_from(["big_vision", "mae"]),
)
def test_sincos_tables_follow_their_formula(rows: int, columns: int, quarter: int, prefix: int, like: str) -> None:
    table = sincos_2d((rows, columns), width=4 * quarter, like=like, prefix=prefix)
    # big_vision: ω = i / (D/4 - 1), which is 0 / 0 for a single frequency, taken as 0. MAE: ω = i / (D/4).
    steps = quarter if like == "mae" else max(quarter - 1, 1)
    assert table.shape == (1, prefix + rows * columns, 4 * quarter)
    assert (table[0, :prefix] == 0).all()
    for y, x, i in product(range(rows), range(columns), range(quarter)):
        frequency = 1 / 10_000 ** (i / steps)
        expected = [math.sin(x * frequency), math.cos(x * frequency), math.sin(y * frequency), math.cos(y * frequency)]
        got = table[0, prefix + y * columns + x, i::quarter].tolist()
        assert got == pytest.approx(expected, abs=1e-7)  # the table is rounded to float32


def test_big_vision_and_mae_space_their_frequencies_differently() -> None:
    assert not torch.allclose(sincos_2d((3, 3), width=16), sincos_2d((3, 3), width=16, like="mae"))


def test_big_vision_sincos_reaches_the_lowest_frequency() -> None:
    across = sincos_2d((1, 2), width=16)[0, 1]
    assert across[3].item() == pytest.approx(math.sin(1e-4), rel=1e-6)


# Injections, against a forward pass written by hand


def table_by_hand(model: ViT, layer: int | None) -> Tensor:
    """Return E_pos by the paper's definition."""
    config = model.config
    rows, columns = config.grid
    if config.positions.kind == "sincos_2d":
        zeros = torch.zeros(1, config.class_tokens, config.width)
        return torch.cat([zeros, sincos_2d(config.grid, width=config.width)], dim=1).double()
    positions = model.pos_embed if layer is None else model.layer_pos_embed[layer]
    if config.positions.kind == "learned_1d":
        assert isinstance(positions, Tensor)
        return positions
    assert isinstance(positions, LearnedPositions2d)
    pairs = [torch.cat([positions.x[:, c], positions.y[:, r]], dim=1) for r in range(rows) for c in range(columns)]
    patches = torch.stack(pairs, dim=1)
    return patches if positions.prefix is None else torch.cat([positions.prefix, patches], dim=1)


def tokens_by_hand(model: ViT, images: Tensor) -> Tensor:
    """Return z_L by equations 1 to 3, with positions injected in the paper's three ways."""
    place = model.config.positions.injection_point
    patches = model.patch_embed(images)
    tokens = torch.cat([model.cls_token.expand(len(images), -1, -1), patches], dim=1)
    if place == "stem":
        tokens = tokens + table_by_hand(model, None)
    for layer, block in enumerate(model.blocks):
        if place == "shared":
            tokens = tokens + table_by_hand(model, None)
        if place == "every_layer":
            tokens = tokens + table_by_hand(model, layer)
        attention = block.attn
        tokens = tokens + reference_attention(
            block.norm1(tokens), qkv=attention.qkv, proj=attention.proj, heads=attention.heads
        )
        tokens = tokens + block.mlp(block.norm2(tokens))
    return tokens


@pytest.mark.parametrize(("kind", "injection"), EMBEDDING_INJECTIONS)
def test_positions_are_added_where_the_equations_say(kind: str, injection: str) -> None:
    config = with_positions(kind, injection, depth=3)
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)
    torch.testing.assert_close(model.encode(model.embed(images)).tokens, tokens_by_hand(model, images), **EXACT)


def test_positions_are_added_to_the_class_token_too() -> None:
    model = random_vit(small())
    images = images_for(model.config)
    assert isinstance(model.pos_embed, Tensor)
    first = model.embed(images)[:, 0]
    torch.testing.assert_close(first, (model.cls_token + model.pos_embed[:, :1])[:, 0].expand(2, -1))


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d"])
def test_patch_only_positions_leave_the_class_token_unchanged(kind: str) -> None:
    config = small(positions=PositionConfig(kind=kind, covers="patches"))
    model = random_vit(config)
    images = images_for(config)
    tokens = model.embed(images)
    assert torch.equal(tokens[:, :1], model.cls_token.expand(2, -1, -1))
    assert not torch.isclose(tokens[:, 1:], model.patch_embed(images)).all(dim=2).any()


def test_registers_have_no_positions() -> None:
    config = small(tokens=TokenConfig(registers=2, distillation=True))
    model = random_vit(config)
    tokens = model.embed(images_for(config))
    assert torch.equal(tokens[:, 2:4], model.reg_token.expand(2, -1, -1))
    assert not torch.isclose(tokens[:, 1:2], model.dist_token.expand(2, -1, -1)).any()


# Effects of positions


def shuffled(images: Tensor, order: Tensor, *, grid: tuple[int, int]) -> Tensor:
    patches = patchify(images, patch_size=8)[:, order]
    return unpatchify(patches, patch_size=8, grid=grid)


@pytest.mark.parametrize("pooling", ["class", "mean", "map"])
def test_without_positions_patch_order_does_not_matter(pooling: str) -> None:
    config = with_positions("none", pooling=pooling)
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)
    order = torch.randperm(config.patches)
    moved = shuffled(images, order, grid=config.grid)
    torch.testing.assert_close(model.features(moved), model.features(images), **EXACT)


@pytest.mark.parametrize("pooling", ["class", "mean", "map"])
@pytest.mark.parametrize(("kind", "injection"), [case for case in VALID_INJECTIONS if case[0] != "none"])
def test_with_positions_patch_order_matters(kind: str, injection: str, pooling: str) -> None:
    config = with_positions(kind, injection, pooling=pooling)
    model = random_vit(config, dtype=torch.float64)
    images = images_for(config, dtype=torch.float64)
    moved = shuffled(images, torch.randperm(config.patches), grid=config.grid)
    # Rounding would make a difference of 1e-14; the features are of size 1.
    assert (model.features(moved) - model.features(images)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "sincos_2d"])
def test_moved_patch_changes_by_the_position_difference(kind: str) -> None:
    config = with_positions(kind, pooling="mean")
    model = random_vit(config, dtype=torch.float64)
    blank = model.embed(torch.zeros(1, 3, *config.image_size, dtype=torch.float64))
    table = model.token_positions(model.pos_embed)
    torch.testing.assert_close(blank - blank[:, :1], table - table[:, :1], **EXACT)
