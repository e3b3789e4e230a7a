"""Tests of patch kernels for other patch sizes and channels: the response to the same image stays the same."""

import pytest
import torch
from oracles import import_timm
from torch.nn import functional

from vitkit.data.preprocessing import get_preprocessing
from vitkit.model.patches import resize_kernel
from vitkit.weights.adapt_state import renormalize_kernel, spread_channels


@pytest.fixture
def kernel() -> torch.Tensor:
    return torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(8, 8), (6, 5), (16, 4)])
def test_larger_kernel_has_same_response_to_resized_patch(kernel, size):
    patches = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    larger = functional.interpolate(patches, size=size, mode="bilinear", align_corners=False)
    old = torch.einsum("dchw,bchw->bd", kernel, patches)
    new = torch.einsum("dchw,bchw->bd", resize_kernel(kernel, size), larger)
    assert torch.allclose(new, old, atol=1e-5)  # float32 sums of 48 to 192 products of size 1


def test_smaller_kernel_is_the_least_squares_solution(kernel):
    small = resize_kernel(kernel, (2, 2))
    pixels = torch.eye(16).reshape(16, 1, 4, 4)
    resizing = functional.interpolate(pixels, size=(2, 2), mode="bilinear", align_corners=False).flatten(1)
    expected = torch.linalg.lstsq(resizing, kernel.flatten(2).permute(2, 0, 1).flatten(1)).solution
    assert torch.allclose(small.flatten(2).permute(2, 0, 1).flatten(1), expected, atol=1e-5)


SIZES = [((4, 4), (6, 6)), ((16, 16), (32, 32)), ((16, 16), (8, 8)), ((16, 16), (14, 14)), ((14, 14), (16, 16))]
SIZES += [((16, 16), (32, 8)), ((8, 16), (16, 16)), ((32, 32), (16, 16))]


@pytest.mark.parametrize(("old", "new"), SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_resizing_equals_timm_with_flexivit_interpolation(old, new):
    """FlexiViT resizes bilinearly without antialias; timm's default is bicubic with antialias."""
    kernel = torch.randn(5, 3, *old, generator=torch.Generator().manual_seed(0))
    theirs = import_timm().layers.resample_patch_embed(kernel, list(new), interpolation="bilinear", antialias=False)
    ours = resize_kernel(kernel, new)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=2e-5)  # their pseudo-inverse is in float32, and has numbers up to 4


def test_same_size_and_channels_are_identity(kernel):
    assert resize_kernel(kernel, (4, 4)) is kernel
    assert spread_channels(kernel, 3) is kernel


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_gray_images_have_same_response_in_any_channels(kernel, channels):
    gray = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    old = torch.einsum("dchw,bchw->bd", kernel, gray.expand(-1, 3, -1, -1))
    new = torch.einsum("dchw,bchw->bd", spread_channels(kernel, channels), gray.expand(-1, channels, -1, -1))
    assert torch.allclose(new, old, atol=1e-5)  # float32 sums in another order


def test_added_channels_keep_response_to_colors(kernel):
    assert torch.equal(spread_channels(kernel, 5)[:, :3], kernel)
    assert not spread_channels(kernel, 5)[:, 3:].any()


def test_one_channel_to_three_and_back_is_lossless(kernel):
    gray = spread_channels(kernel, 1)
    assert torch.allclose(spread_channels(spread_channels(gray, 3), 1), gray, atol=1e-6)


@pytest.mark.parametrize("channels", [3, 4, 6])
def test_removed_channels_are_shared_by_the_others(channels):
    kernel = torch.randn(5, channels, 4, 4, generator=torch.Generator().manual_seed(3))
    fewer = spread_channels(kernel, 3)
    assert torch.allclose(fewer.sum(dim=1), kernel.sum(dim=1), atol=1e-5)  # float32 sums in another order
    # The differences between the three stay the same.
    assert torch.allclose(fewer[:, 0] - fewer[:, 1], kernel[:, 0] - kernel[:, 1], atol=1e-5)


def test_three_channels_to_five_and_back_is_exact(kernel):
    assert torch.equal(spread_channels(spread_channels(kernel, 5), 3), kernel)


def test_equal_mean_and_std_do_not_change_the_bias(kernel):
    paper = get_preprocessing("paper", image_size=4)
    gray, bias_change = renormalize_kernel(kernel, old=paper, new=get_preprocessing("paper", image_size=4, channels=1))
    assert not bias_change.any()
    assert torch.allclose(gray, spread_channels(kernel, 1), atol=1e-6)  # summed in float64, then rounded


def test_gray_level_has_same_response_with_imagenet_mean(kernel):
    colors, one = get_preprocessing("deit", image_size=4), get_preprocessing("deit", image_size=4, channels=1)
    gray, bias_change = renormalize_kernel(kernel, old=colors, new=one)
    pixels = torch.randint(0, 256, (9, 1, 4, 4), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    old = torch.einsum("dchw,bchw->bd", kernel, colors.normalize(pixels.expand(-1, 3, -1, -1)))
    new = torch.einsum("dchw,bchw->bd", gray, one.normalize(pixels)) + bias_change.float()
    assert torch.allclose(new, old, atol=1e-4)  # sums of 48 numbers of up to 10 in float32
