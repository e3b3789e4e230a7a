"""Kernels for patches of other sizes and other channels: the same answers to the same images."""

import pytest
import torch
from oracles import import_timm
from torch.nn import functional

from vitkit.checkpoints.patch_kernels import resize_kernel, spread_channels


@pytest.fixture
def kernel() -> torch.Tensor:
    return torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(8, 8), (6, 5), (16, 4)])
def test_a_larger_patch_that_is_a_resized_one_gets_the_same_answer(kernel, size):
    patches = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    larger = functional.interpolate(patches, size=size, mode="bilinear", align_corners=False)
    old = torch.einsum("dchw,bchw->bd", kernel, patches)
    new = torch.einsum("dchw,bchw->bd", resize_kernel(kernel, size), larger)
    assert torch.allclose(new, old, atol=1e-5)  # float32 sums of 48 to 192 products of size 1


def test_a_smaller_kernel_is_the_best_there_is(kernel):
    small = resize_kernel(kernel, (2, 2))
    pixels = torch.eye(16).reshape(16, 1, 4, 4)
    resizing = functional.interpolate(pixels, size=(2, 2), mode="bilinear", align_corners=False).flatten(1)
    wanted = torch.linalg.lstsq(resizing, kernel.flatten(2).permute(2, 0, 1).flatten(1)).solution
    assert torch.allclose(small.flatten(2).permute(2, 0, 1).flatten(1), wanted, atol=1e-5)


def test_timm_resizes_as_we_do_where_it_is_asked_to_interpolate_as_we_do(kernel):
    theirs = import_timm().layers.resample_patch_embed(kernel, [6, 6], interpolation="bilinear", antialias=False)
    assert torch.allclose(resize_kernel(kernel, (6, 6)), theirs, atol=1e-5)  # their pseudo-inverse is in float32


def test_the_same_size_and_channels_are_the_identity(kernel):
    assert resize_kernel(kernel, (4, 4)) is kernel
    assert spread_channels(kernel, 3) is kernel


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_a_grey_image_gets_the_same_answer_in_any_channels(kernel, channels):
    grey = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    old = torch.einsum("dchw,bchw->bd", kernel, grey.expand(-1, 3, -1, -1))
    new = torch.einsum("dchw,bchw->bd", spread_channels(kernel, channels), grey.expand(-1, channels, -1, -1))
    assert torch.allclose(new, old, atol=1e-5)  # float32 sums in another order


def test_colours_keep_their_answer_where_channels_are_added(kernel):
    assert torch.equal(spread_channels(kernel, 5)[:, :3], kernel)
    assert not spread_channels(kernel, 5)[:, 3:].any()


def test_one_channel_becomes_three_and_back_without_loss(kernel):
    grey = spread_channels(kernel, 1)
    assert torch.allclose(spread_channels(spread_channels(grey, 3), 1), grey, atol=1e-6)
