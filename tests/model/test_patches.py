"""Patches: order, round trips, sampling and selection."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.model.config import patch_grid
from vitkit.model.init import lecun_normal
from vitkit.model.patches import PatchProjection, patchify, sample_patches, select_patches, unpatchify

sides = st.integers(1, 5)
pairs = st.tuples(sides, sides)


@given(batch=st.integers(1, 3), channels=st.integers(1, 4), grid=pairs, patch_size=pairs)
def test_unpatchify_inverts_patchify(
    batch: int, channels: int, grid: tuple[int, int], patch_size: tuple[int, int]
) -> None:
    images = torch.randn(batch, channels, grid[0] * patch_size[0], grid[1] * patch_size[1])
    patches = patchify(images, patch_size=patch_size)
    assert patches.shape == (batch, grid[0] * grid[1], channels * patch_size[0] * patch_size[1])
    assert torch.equal(unpatchify(patches, patch_size=patch_size, grid=grid), images)


@given(batch=st.integers(1, 3), channels=st.integers(1, 4), grid=pairs, patch_size=pairs)
def test_patchify_inverts_unpatchify(
    batch: int, channels: int, grid: tuple[int, int], patch_size: tuple[int, int]
) -> None:
    patches = torch.randn(batch, grid[0] * grid[1], channels * patch_size[0] * patch_size[1])
    assert torch.equal(patchify(unpatchify(patches, patch_size=patch_size, grid=grid), patch_size=patch_size), patches)


@given(channels=st.integers(1, 3), grid=pairs, patch_size=pairs)
def test_patch_order_is_row_major_and_channel_first(
    channels: int, grid: tuple[int, int], patch_size: tuple[int, int]
) -> None:
    (rows, columns), (height, width) = grid, patch_size
    images = torch.randn(1, channels, rows * height, columns * width)
    patches = patchify(images, patch_size=patch_size)
    for row in range(rows):
        for column in range(columns):
            cut = images[0, :, row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert torch.equal(patches[0, row * columns + column], cut.flatten())


def test_integer_patch_size_is_square() -> None:
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(patchify(images, patch_size=4), patchify(images, patch_size=(4, 4)))


@given(channels=st.integers(1, 4), width=st.integers(1, 6), grid=pairs, patch_size=pairs)
def test_patch_projection_equals_a_strided_convolution(
    channels: int, width: int, grid: tuple[int, int], patch_size: tuple[int, int]
) -> None:
    projection = PatchProjection(channels=channels, patch_size=patch_size, width=width).double()
    with torch.no_grad():
        lecun_normal(projection.weight, None)
        projection.bias.normal_()
    images = torch.randn(2, channels, grid[0] * patch_size[0], grid[1] * patch_size[1], dtype=torch.float64)
    convolved = functional.conv2d(images, projection.weight, projection.bias, stride=patch_size)
    # In float64 only the order of at most 100 summands of size one differs.
    torch.testing.assert_close(projection(images), convolved.flatten(2).mT, rtol=0, atol=1e-12)


@given(data=st.data(), batch=st.integers(1, 4), patches=st.integers(1, 30))
def test_sampled_patches_are_distinct_sorted_and_in_range(data: st.DataObject, batch: int, patches: int) -> None:
    keep = data.draw(st.integers(1, patches))
    indices = sample_patches(batch, patches=patches, count=keep)
    assert indices.shape == (batch, keep)
    assert indices.min() >= 0
    assert indices.max() < patches
    assert (indices.diff(dim=1) > 0).all()


def test_sampled_patches_follow_the_generator() -> None:
    def draw(seed: int) -> torch.Tensor:
        return sample_patches(4, patches=30, count=10, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_patches_are_sampled_uniformly() -> None:
    indices = sample_patches(4000, patches=8, count=2)
    # Each patch is sampled 1000 times on average with standard deviation 27; 5 of them are 140.
    assert (torch.bincount(indices.flatten(), minlength=8) - 1000).abs().max() < 140


def test_patches_are_sampled_per_image() -> None:
    indices = sample_patches(2, patches=100, count=50)
    assert not torch.equal(indices[0], indices[1])


@given(data=st.data(), batch=st.integers(1, 3), patches=st.integers(1, 12))
def test_select_patches_gathers_per_image(data: st.DataObject, batch: int, patches: int) -> None:
    kept = data.draw(st.integers(1, patches))
    index = st.integers(0, patches - 1)
    rows = data.draw(st.lists(st.lists(index, min_size=kept, max_size=kept), min_size=batch, max_size=batch))
    tokens = torch.randn(batch, patches, 3)
    chosen = select_patches(tokens, torch.tensor(rows))
    for image, indices in enumerate(rows):
        for place, number in enumerate(indices):
            assert torch.equal(chosen[image, place], tokens[image, number])


@given(grid=pairs, patch_size=pairs)
def test_grid_is_rows_and_columns(grid: tuple[int, int], patch_size: tuple[int, int]) -> None:
    image_size = (grid[0] * patch_size[0], grid[1] * patch_size[1])
    assert patch_grid(image_size, patch_size=patch_size) == grid


@given(grid=pairs, patch_size=st.tuples(st.integers(2, 9), st.integers(2, 9)), data=st.data())
def test_indivisible_image_size_is_rejected_with_the_nearest(
    grid: tuple[int, int], patch_size: tuple[int, int], data: st.DataObject
) -> None:
    axis = data.draw(st.sampled_from([0, 1]))
    image_size = [grid[0] * patch_size[0], grid[1] * patch_size[1]]
    image_size[axis] += data.draw(st.integers(1, patch_size[axis] - 1))
    with pytest.raises(ConfigError, match="the patch does not divide the image") as raised:
        patch_grid((image_size[0], image_size[1]), patch_size=patch_size)
    assert raised.value.expected == f"multiples of {patch_size[0]}×{patch_size[1]}"
    assert raised.value.got == f"{image_size[0]}×{image_size[1]}"
    assert raised.value.hint is not None
    advice = raised.value.hint.removeprefix("use an image size of ").partition(",")[0]
    height, width = (int(side) for side in advice.split("×"))
    assert patch_grid((height, width), patch_size=patch_size)
    assert abs(height - image_size[0]) < patch_size[0]
    assert abs(width - image_size[1]) < patch_size[1]


@pytest.mark.parametrize(
    ("image_size", "patch_size"), [(0, 16), (-224, 16), (224, 0), ((224, -16), 16), (32, (16, -16))]
)
def test_sizes_below_one_pixel_are_rejected(
    image_size: int | tuple[int, int], patch_size: int | tuple[int, int]
) -> None:
    with pytest.raises(ConfigError, match="sizes must be positive") as raised:
        patch_grid(image_size, patch_size=patch_size)
    assert raised.value.expected == "1 pixel or more"


def test_patchify_rejects_indivisible_images() -> None:
    with pytest.raises(ConfigError, match=r"expected multiples of 16×16, got 32×40"):
        patchify(torch.zeros(1, 3, 32, 40), patch_size=16)
