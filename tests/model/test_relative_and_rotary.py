"""Relative positions against double loops, and properties of rotary positions."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import images_for, random_vit, reference_attention, with_positions
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.model.config import TokenConfig
from vitkit.model.positions import AttentionPositions, RelativePositions, rotary_2d
from vitkit.model.vit import ViT

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64 on both sides: only the order of summation differs


def relative_positions(*, patches: int, prefix: int, width: int = 6, heads: int = 2) -> RelativePositions:
    relative = RelativePositions(patches=patches, prefix=prefix, width=width, heads=heads).double()
    with torch.no_grad():
        relative.table.normal_()
    return relative


def row_by_hand(query: int, key: int, *, patches: int, prefix: int) -> int:
    """Return the row of the table: one per difference of indices, then from a prefix token, to one, between them."""
    if query >= prefix and key >= prefix:
        return (query - prefix) - (key - prefix) + patches - 1
    if query < prefix <= key:
        return 2 * patches - 1
    return 2 * patches if key < prefix <= query else 2 * patches + 1


@given(patches=st.integers(1, 9), prefix=st.integers(0, 3))
def test_offsets_index_the_relative_table(patches: int, prefix: int) -> None:
    relative = relative_positions(patches=patches, prefix=prefix)
    offsets = relative.offsets()
    length = patches + prefix
    expected = [
        [row_by_hand(query, key, patches=patches, prefix=prefix) for key in range(length)] for query in range(length)
    ]
    assert offsets.tolist() == expected


@given(patches=st.integers(2, 9), prefix=st.integers(0, 2))
def test_every_relative_row_is_used(patches: int, prefix: int) -> None:
    relative = relative_positions(patches=patches, prefix=prefix)
    assert set(relative.offsets().flatten().tolist()) == set(range(relative.table.shape[0]))


@given(
    batch=st.integers(1, 2),
    patches=st.integers(1, 6),
    prefix=st.integers(0, 2),
    heads=st.integers(1, 3),
    share=st.integers(1, 4),
)
def test_relative_bias_is_query_times_offset_embedding(
    batch: int, patches: int, prefix: int, heads: int, share: int
) -> None:
    relative = relative_positions(patches=patches, prefix=prefix, width=heads * share, heads=heads)
    length = patches + prefix
    queries = torch.randn(batch, heads, length, share, dtype=torch.float64)
    logits = relative(queries)
    assert logits.shape == (batch, heads, length, length)
    for image, head, query, key in product(range(batch), range(heads), range(length), range(length)):
        row = row_by_hand(query, key, patches=patches, prefix=prefix)
        embedding = relative.table[row, head * share : (head + 1) * share]
        expected = torch.dot(queries[image, head, query], embedding) / math.sqrt(share)
        torch.testing.assert_close(logits[image, head, query, key], expected, **EXACT)


@given(patches=st.integers(1, 6), prefix=st.integers(0, 2), data=st.data())
def test_relative_bias_of_first_queries_is_unchanged(patches: int, prefix: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, patches + prefix))
    relative = relative_positions(patches=patches, prefix=prefix)
    queries = torch.randn(2, 2, patches + prefix, 3, dtype=torch.float64)
    torch.testing.assert_close(relative(queries[:, :, :rows]), relative(queries)[:, :, :rows], **EXACT)


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("injection", ["every_layer", "shared"])
def test_relative_bias_is_added_before_the_softmax(injection: str, pooling: str) -> None:
    config = with_positions("relative", injection, depth=3, pooling=pooling)
    model = random_vit(config, dtype=torch.float64)
    tokens = model.embed(images_for(config, dtype=torch.float64))
    expected = tokens
    for layer, block in enumerate(model.blocks):
        relative = model.relative[layer if injection == "every_layer" else 0]
        normed = block.norm1(expected)
        queries = block.attn.qkv(normed)[..., : config.width].unflatten(2, (config.heads, -1)).transpose(1, 2)
        bias = relative(queries)
        expected = expected + reference_attention(
            normed, qkv=block.attn.qkv, proj=block.attn.proj, heads=config.heads, bias=bias
        )
        expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(model.encode(tokens).tokens, expected, **EXACT)


def test_relative_tables_are_shared_or_per_layer() -> None:
    assert len(ViT(with_positions("relative", "shared", depth=3)).relative) == 1
    assert len(ViT(with_positions("relative", "every_layer", depth=3)).relative) == 3


def test_relative_positions_do_not_change_the_tokens() -> None:
    config = with_positions("relative", pooling="mean")
    model = random_vit(config)
    images = images_for(config)
    assert torch.equal(model.embed(images), model.patch_embed(images))


# Rotary


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


grids = st.tuples(st.integers(1, 5), st.integers(1, 5))
head_widths = st.sampled_from([4, 8, 16])
# Unit vectors, angles up to 2π: float32 rounds each angle by 2π · 6e-8, and sums of at most 16 products by as much.
ROUNDED = 2e-6


@given(grid=grids, head_width=head_widths)
def test_rotated_products_depend_only_on_the_offset(grid: tuple[int, int], head_width: int) -> None:
    rotary = rotary_2d(grid, head_width=head_width, base=100.0)
    query, key = unit(torch.randn(2, head_width))
    places = grid[0] * grid[1]
    turned_query = rotary(query.expand(1, 1, places, -1))[0, 0]
    turned_key = rotary(key.expand(1, 1, places, -1))[0, 0]
    products = turned_query @ turned_key.T
    by_offset: dict[tuple[int, int], list[float]] = {}
    for here, there in product(range(places), repeat=2):
        offset = (here // grid[1] - there // grid[1], here % grid[1] - there % grid[1])
        by_offset.setdefault(offset, []).append(products[here, there].item())
    for values in by_offset.values():
        assert max(values) - min(values) < ROUNDED
    assert by_offset[0, 0][0] == pytest.approx(float(query @ key), abs=ROUNDED)


def test_rotated_products_distinguish_rows_and_columns() -> None:
    rotary = rotary_2d((4, 4), head_width=16, base=100.0)
    query, key = unit(torch.randn(2, 16))
    products = rotary(query.expand(1, 1, 16, -1))[0, 0] @ rotary(key.expand(1, 1, 16, -1))[0, 0].T
    here, below, beside = products[0, 0], products[0, 4], products[0, 1]
    assert (here - below).abs() > 1e-3
    assert (here - beside).abs() > 1e-3
    assert (below - beside).abs() > 1e-3


@given(grid=grids, head_width=head_widths)
def test_rotation_preserves_norms(grid: tuple[int, int], head_width: int) -> None:
    vectors = unit(torch.randn(2, 3, grid[0] * grid[1], head_width))
    turned = rotary_2d(grid, head_width=head_width, base=100.0)(vectors)
    assert (turned.norm(dim=-1) - 1).abs().max() < ROUNDED


@given(grid=grids, head_width=head_widths, prefix=st.integers(0, 3))
def test_rotation_does_not_change_prefix_tokens(grid: tuple[int, int], head_width: int, prefix: int) -> None:
    vectors = torch.randn(2, 3, prefix + grid[0] * grid[1], head_width)
    rotary = rotary_2d(grid, head_width=head_width, base=100.0)
    turned = rotary(vectors)
    assert torch.equal(turned[:, :, :prefix], vectors[:, :, :prefix])
    assert torch.equal(turned[:, :, prefix:], rotary(vectors[:, :, prefix:]))


@given(grid=grids, quarter=st.integers(1, 4), base=st.sampled_from([10.0, 100.0, 10_000.0]))
def test_rotation_angles_are_those_of_row_and_column(grid: tuple[int, int], quarter: int, base: float) -> None:
    (rows, columns), half = grid, 2 * quarter
    vectors = unit(torch.randn(1, 1, rows * columns, 4 * quarter))
    turned = rotary_2d(grid, head_width=4 * quarter, base=base)(vectors)
    for row, column, i in product(range(rows), range(columns), range(quarter)):
        centers = ((2 * row + 1) / rows - 1, (2 * column + 1) / columns - 1)
        for start, center in zip((0, quarter), centers, strict=True):
            angle = 2 * math.pi * center / base ** (i / quarter)
            place, pair = row * columns + column, (start + i, half + start + i)
            before = complex(*vectors[0, 0, place, list(pair)].tolist())
            after = complex(*turned[0, 0, place, list(pair)].tolist())
            assert abs(after - before * complex(math.cos(angle), math.sin(angle))) < ROUNDED


def test_rotation_preserves_the_dtype() -> None:
    vectors = torch.randn(1, 1, 5, 8, dtype=torch.bfloat16)
    assert rotary_2d((2, 2), head_width=8, base=100.0)(vectors).dtype == torch.bfloat16


def test_rotary_model_rotates_queries_and_keys_only() -> None:
    config = with_positions("rotary", tokens=TokenConfig(registers=1))
    model = random_vit(config)
    attention = model.blocks[0].attn
    tokens = torch.randn(2, config.prefix + config.patches, config.width)
    rotary = rotary_2d(config.grid, head_width=config.head_width, base=100.0)
    plain, turned = attention.project(tokens), attention.project(tokens, positions=AttentionPositions(rotary))
    assert torch.equal(turned.queries, rotary(plain.queries))
    assert torch.equal(turned.keys, rotary(plain.keys))
    assert torch.equal(turned.values, plain.values)


def test_rotary_needs_a_head_width_divisible_by_four() -> None:
    with pytest.raises(ConfigError, match="the width of a head does not suit rotary positions") as raised:
        with_positions("rotary", width=12, heads=2)
    assert (raised.value.expected, raised.value.got) == ("a multiple of 4", 6)
