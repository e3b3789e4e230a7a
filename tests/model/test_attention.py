"""Attention: weights against the fused kernel, and axial attention against masks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import images_for, random_vit, randomized, reference_attention, small, with_positions
from torch import Tensor
from torch.nn import functional

from vitkit.model.attention import Attention, AxialAttention
from vitkit.model.config import AttentionConfig, BlockConfig
from vitkit.model.positions import AttentionPositions, RelativePositions, RotaryPositions, rotary_2d

GRID = (3, 4)
WIDTH, HEADS = 16, 2
FUSED = {"rtol": 0.0, "atol": 1e-5}  # float32: the fused kernel sums in blocks, with values of size 1
BFLOAT16 = 6 * 2.0**-8  # of the largest value: six roundings to 8 bits
EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64: only the order of summation differs


def attention(**config: Any) -> Attention:
    made = randomized(Attention(AttentionConfig(**config), width=WIDTH, heads=HEADS))
    assert isinstance(made, Attention)
    return made


def relative_positions(prefix: int) -> RelativePositions:
    relative = RelativePositions(patches=GRID[0] * GRID[1], prefix=prefix, width=WIDTH, heads=HEADS)
    torch.nn.init.normal_(relative.table)
    return relative


def turning() -> RotaryPositions:
    return rotary_2d(GRID, head_width=WIDTH // HEADS, base=100.0)


def random_tokens(prefix: int = 1) -> Tensor:
    return torch.randn(3, prefix + GRID[0] * GRID[1], WIDTH)


@pytest.mark.parametrize("rows", [None, 1, 5])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("inside", ["nothing", "relative", "rotary", "both"])
@pytest.mark.parametrize("config", [{}, {"qk_norm": True}, {"qkv_bias": False}], ids=str)
def test_attention_weights_match_the_fused_kernel(
    config: dict[str, bool], inside: str, prefix: int, rows: int | None
) -> None:
    module, tokens = attention(**config), random_tokens(prefix)
    relative = relative_positions(prefix) if inside in ("relative", "both") else None
    rotary = turning() if inside in ("rotary", "both") else None
    projections = module.project(tokens, positions=AttentionPositions(rotary, relative), rows=rows)
    weights = module.attention_weights(projections)
    assert weights.shape == (3, HEADS, tokens.shape[1] if rows is None else rows, tokens.shape[1])
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-6)
    by_hand = module.proj((weights @ projections.values).transpose(1, 2).flatten(2))
    fused = module(tokens, positions=AttentionPositions(rotary, relative), rows=rows)
    torch.testing.assert_close(by_hand, fused, **FUSED)


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("relative", [False, True])
def test_bfloat16_training_on_a_cpu_matches_the_fused_kernel(
    relative: bool, prefix: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, tokens = attention(), random_tokens(prefix).requires_grad_()
    positions = AttentionPositions(None, relative_positions(prefix) if relative else None)
    expected = module(tokens, positions=positions, rows=rows)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), tokens)
    monkeypatch.delattr(functional, "scaled_dot_product_attention")
    with torch.autocast("cpu", torch.bfloat16):
        actual = module(tokens, positions=positions, rows=rows).float()
    (gradient,) = torch.autograd.grad(actual.square().sum(), tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=BFLOAT16 * expected.abs().max().item())
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=0, atol=BFLOAT16 * expected_gradient.abs().max().item()
    )


def test_bfloat16_inference_on_a_cpu_uses_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = attention().to(torch.bfloat16), random_tokens().to(torch.bfloat16)
    monkeypatch.delattr(functional, "scaled_dot_product_attention")
    with torch.no_grad(), pytest.raises(AttributeError, match="scaled_dot_product_attention"):
        module(tokens)


@given(batch=st.integers(1, 3), length=st.integers(1, 7), heads=st.integers(1, 3), share=st.integers(1, 5))
def test_attention_matches_appendix_a(batch: int, length: int, heads: int, share: int) -> None:
    module = randomized(Attention(AttentionConfig(), width=heads * share, heads=heads)).double()
    tokens = torch.randn(batch, length, heads * share, dtype=torch.float64)
    expected = reference_attention(tokens, qkv=module.qkv, proj=module.proj, heads=heads)
    torch.testing.assert_close(module(tokens), expected, **EXACT)


@given(length=st.integers(1, 7), data=st.data())
def test_first_rows_equal_those_of_the_full_output(length: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, length))
    module = attention().double()
    tokens = torch.randn(2, length, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(module(tokens, rows=rows), module(tokens)[:, :rows], **EXACT)


def test_qk_norm_precedes_rotation() -> None:
    module, tokens, rotary = attention(qk_norm=True), random_tokens(), turning()
    queries, keys, _ = module.qkv(tokens).chunk(3, dim=-1)
    projections = module.project(tokens, positions=AttentionPositions(rotary))
    for got, raw, norm in ((projections.queries, queries, module.q_norm), (projections.keys, keys, module.k_norm)):
        by_hand = norm(raw.unflatten(2, (HEADS, -1))).transpose(1, 2)
        torch.testing.assert_close(got, rotary(by_hand), rtol=0, atol=1e-6)


def test_attention_dropout_acts_in_training_only() -> None:
    module, tokens = attention(dropout=0.5), random_tokens()
    evaluated = module(tokens)
    assert torch.equal(evaluated, module(tokens))
    module.train()
    assert not torch.isclose(module(tokens), evaluated).all(dim=2).any()


def test_qkv_bias_can_be_disabled() -> None:
    assert attention(qkv_bias=False).qkv.bias is None
    assert attention().qkv.bias is not None


# Axial attention


def axial(axis: str, grid: tuple[int, int]) -> AxialAttention:
    made = randomized(AxialAttention(AttentionConfig(), width=WIDTH, heads=HEADS, axis=axis, grid=grid)).double()
    assert isinstance(made, AxialAttention)
    return made


def closed_outside_lines(axis: str, grid: tuple[int, int]) -> Tensor:
    """Return 0 where two patches share a row (or a column) and -∞ elsewhere, pair by pair."""
    places = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    line = 0 if axis == "row" else 1
    return torch.tensor([[0.0 if here[line] == there[line] else -torch.inf for there in places] for here in places])


@given(grid=st.tuples(st.integers(1, 5), st.integers(1, 5)), axis=st.sampled_from(["row", "column"]))
def test_axial_attention_equals_masked_full_attention(grid: tuple[int, int], axis: str) -> None:
    module = axial(axis, grid)
    tokens = torch.randn(2, grid[0] * grid[1], WIDTH, dtype=torch.float64)
    mask = closed_outside_lines(axis, grid).double().expand(2, HEADS, -1, -1)
    expected = reference_attention(tokens, qkv=module.qkv, proj=module.proj, heads=HEADS, bias=mask)
    torch.testing.assert_close(module(tokens), expected, **EXACT)


@given(grid=st.tuples(st.integers(1, 5), st.integers(1, 5)), axis=st.sampled_from(["row", "column"]))
def test_axial_weights_cover_the_whole_grid(grid: tuple[int, int], axis: str) -> None:
    module = axial(axis, grid)
    tokens = torch.randn(2, grid[0] * grid[1], WIDTH, dtype=torch.float64)
    projections = module.project_sequence(tokens)
    weights = module.attention_weights(projections)
    assert (weights[:, :, closed_outside_lines(axis, grid) < 0] == 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]), **EXACT)
    by_hand = module.proj((weights @ projections.values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(by_hand, module(tokens), **EXACT)


def test_axial_blocks_alternate_rows_and_columns() -> None:
    model = random_vit(small(pooling="mean", depth=2, block=BlockConfig(axial=True)))
    assert [block.attn.axis for block in model.blocks] == ["row", "column", "row", "column"]


def test_two_axial_blocks_connect_all_patches() -> None:
    config = with_positions("none", pooling="mean", depth=1, block=BlockConfig(axial=True))
    model = random_vit(config)
    tokens = model.embed(images_for(config, batch=1)).detach().requires_grad_()
    model.encode(tokens).tokens[0, 0].sum().backward()
    assert tokens.grad is not None
    assert (tokens.grad != 0).any(dim=-1).all()
