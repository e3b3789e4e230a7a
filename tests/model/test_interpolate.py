"""Interpolation of position embeddings: properties of every kernel."""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vitkit.core.errors import InputError
from vitkit.model.config import InterpolationOrigin
from vitkit.model.positions import KERNELS, resample_grid

ORIGINS = get_args(InterpolationOrigin)
origins = st.sampled_from(ORIGINS)
grids = st.tuples(st.integers(1, 9), st.integers(1, 9))
ROUNDED = 2e-6  # float32 weights of at most 16 cells, each rounded at 6e-8, on values of size 1


def embeddings(grid: tuple[int, int], *, width: int = 3) -> Tensor:
    return torch.rand(1, grid[0] * grid[1], width)


def test_every_origin_has_a_kernel() -> None:
    assert set(KERNELS) == set(ORIGINS)


@given(grid=grids, origin=origins)
def test_resampling_to_the_same_grid_is_the_identity(grid: tuple[int, int], origin: InterpolationOrigin) -> None:
    table = embeddings(grid)
    assert torch.equal(resample_grid(table, old=grid, new=grid, origin=origin), table)


@given(old=grids, new=grids, origin=origins)
def test_any_grid_resizes_to_any_other(old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin) -> None:
    resampled = resample_grid(embeddings(old), old=old, new=new, origin=origin)
    assert resampled.shape == (1, new[0] * new[1], 3)
    assert resampled.isfinite().all()


@given(old=grids, new=grids, origin=origins, value=st.floats(-1, 1, width=32))
def test_constant_tables_stay_constant(
    old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin, value: float
) -> None:
    table = torch.full((1, old[0] * old[1], 3), value)
    resampled = resample_grid(table, old=old, new=new, origin=origin)
    assert (resampled - value).abs().max() < ROUNDED


@given(old=grids, new=grids, origin=origins)
def test_channels_are_resampled_independently(
    old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin
) -> None:
    # At least two channels: with one, torch's antialiasing fails on grids of a single column.
    table = embeddings(old, width=4)
    together = resample_grid(table, old=old, new=new, origin=origin)
    halves = [resample_grid(half.contiguous(), old=old, new=new, origin=origin) for half in table.chunk(2, dim=2)]
    torch.testing.assert_close(together, torch.cat(halves, dim=2), rtol=0, atol=ROUNDED)


@given(old=grids, new=grids, origin=origins)
def test_resampling_commutes_with_transposition(
    old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin
) -> None:
    def transposed(table: Tensor, grid: tuple[int, int]) -> Tensor:
        return table.unflatten(1, grid).transpose(1, 2).flatten(1, 2)

    table = embeddings(old)
    after = transposed(resample_grid(table, old=old, new=new, origin=origin), new)
    before = resample_grid(transposed(table, old), old=old[::-1], new=new[::-1], origin=origin)
    torch.testing.assert_close(before, after, rtol=0, atol=ROUNDED)


@given(
    old=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    new=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    origin=st.sampled_from([name for name in ORIGINS if KERNELS[name].align_corners]),
)
def test_aligned_corners_are_unchanged(old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin) -> None:
    table = embeddings(old)
    resampled = resample_grid(table, old=old, new=new, origin=origin)
    corners = ((0, 0), (0, -1), (-1, 0), (-1, -1))
    for row, column in corners:
        expected = table.unflatten(1, old)[0, row, column]
        got = resampled.unflatten(1, new)[0, row, column]
        # The last source coordinate is computed as steps × scale, and may miss the corner by a rounding of 9 × 6e-8.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@given(old=grids, new=grids)
def test_google_kernel_is_bilinear_with_aligned_corners(old: tuple[int, int], new: tuple[int, int]) -> None:
    table = embeddings(old)
    resampled = resample_grid(table, old=old, new=new).unflatten(1, new)[0]
    grid = table.unflatten(1, old)[0]
    for row in range(new[0]):
        for column in range(new[1]):
            y = row * (old[0] - 1) / max(new[0] - 1, 1)
            x = column * (old[1] - 1) / max(new[1] - 1, 1)
            top, left = min(int(y), max(old[0] - 2, 0)), min(int(x), max(old[1] - 2, 0))
            bottom, right = min(top + 1, old[0] - 1), min(left + 1, old[1] - 1)
            upper = grid[top, left] * (1 - (x - left)) + grid[top, right] * (x - left)
            lower = grid[bottom, left] * (1 - (x - left)) + grid[bottom, right] * (x - left)
            expected = upper * (1 - (y - top)) + lower * (y - top)
            torch.testing.assert_close(resampled[row, column], expected, rtol=0, atol=1e-5)


LIBRARIES: dict[str, dict[str, Any]] = {
    # Arguments that each origin passes to interpolate, copied from its code.
    "google": {"size": (4, 9), "mode": "bilinear", "align_corners": True},  # as scipy.ndimage.zoom(order=1)
    "timm": {"size": (4, 9), "mode": "bicubic", "antialias": True},
    "huggingface": {"size": (4, 9), "mode": "bicubic", "align_corners": False},
    "deit": {"size": (4, 9), "mode": "bicubic", "align_corners": False},
    "mae": {"size": (4, 9), "mode": "bicubic", "align_corners": False},
    "torchvision": {"size": (4, 9), "mode": "bicubic", "align_corners": True},
    "dinov2": {"scale_factor": (4.1 / 7, 9.1 / 5), "mode": "bicubic"},
    "dinov2-registers": {"size": (4, 9), "mode": "bicubic", "antialias": True},
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_each_origin_matches_its_library(origin: InterpolationOrigin) -> None:
    table = embeddings((7, 5))
    image = table.unflatten(1, (7, 5)).permute(0, 3, 1, 2)
    expected = functional.interpolate(image, **LIBRARIES[origin]).permute(0, 2, 3, 1).flatten(1, 2)
    got = resample_grid(table, old=(7, 5), new=(4, 9), origin=origin)
    torch.testing.assert_close(got, expected, rtol=0, atol=ROUNDED)


def test_different_kernels_give_different_tables() -> None:
    table = embeddings((7, 5))
    # deit, huggingface and mae share one kernel, timm and dinov2-registers another: 8 names, 5 kernels.
    ways = {tuple(resample_grid(table, old=(7, 5), new=(4, 9), origin=name).flatten().tolist()) for name in ORIGINS}
    assert len(ways) == 5


@pytest.mark.parametrize("origin", ORIGINS)
def test_resampling_preserves_the_dtype(origin: InterpolationOrigin) -> None:
    table = embeddings((3, 4)).bfloat16()
    assert resample_grid(table, old=(3, 4), new=(5, 6), origin=origin).dtype == torch.bfloat16


def test_gradients_flow_through_resampling() -> None:
    table = embeddings((3, 4)).requires_grad_()
    resample_grid(table, old=(3, 4), new=(6, 8)).sum().backward()
    assert table.grad is not None
    assert (table.grad != 0).all()


@pytest.mark.parametrize("rows", [195, 197])
def test_table_that_does_not_fill_its_grid_is_rejected(rows: int) -> None:
    with pytest.raises(InputError, match="the position embeddings do not fill their grid") as raised:
        resample_grid(torch.rand(1, rows, 4), old=(14, 14), new=(24, 24))
    assert raised.value.expected == "14×14 = 196 rows"
    assert raised.value.got == f"{rows} rows"
    assert raised.value.hint is not None
    assert "class token" in raised.value.hint


def test_forgotten_prefix_is_rejected_for_equal_grids_too() -> None:
    with pytest.raises(InputError, match="expected 14×14 = 196 rows, got 197 rows"):
        resample_grid(torch.rand(1, 197, 4), old=(14, 14), new=(14, 14))
