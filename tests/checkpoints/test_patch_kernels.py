"""Kernels for patches of other sizes and other channels: the same answers to the same images."""

import pytest
import torch
from oracles import import_timm
from torch.nn import functional

from vitkit.checkpoints.patch_kernels import refeed, resize_kernel, spread_channels
from vitkit.data.transforms import preprocessing


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


SIZES = [((4, 4), (6, 6)), ((16, 16), (32, 32)), ((16, 16), (8, 8)), ((16, 16), (14, 14)), ((14, 14), (16, 16))]
SIZES += [((16, 16), (32, 8)), ((8, 16), (16, 16)), ((32, 32), (16, 16))]


@pytest.mark.parametrize(("old", "new"), SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_timm_resizes_as_we_do_where_it_is_asked_to_interpolate_as_flexivit_does(old, new):
    """FlexiViT resizes bilinearly without antialias; timm's own default is bicubic with it."""
    kernel = torch.randn(5, 3, *old, generator=torch.Generator().manual_seed(0))
    theirs = import_timm().layers.resample_patch_embed(kernel, list(new), interpolation="bilinear", antialias=False)
    ours = resize_kernel(kernel, new)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=2e-5)  # their pseudo-inverse is in float32, and has numbers up to 4


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


@pytest.mark.parametrize("known", [3, 4, 6])
def test_channels_that_go_leave_their_share_to_those_that_stay(known):
    kernel = torch.randn(5, known, 4, 4, generator=torch.Generator().manual_seed(3))
    fewer = spread_channels(kernel, 3)
    assert torch.allclose(fewer.sum(dim=1), kernel.sum(dim=1), atol=1e-5)  # float32 sums in another order
    # Beside each other the three are as different as before.
    assert torch.allclose(fewer[:, 0] - fewer[:, 1], kernel[:, 0] - kernel[:, 1], atol=1e-5)


def test_three_channels_become_five_and_three_again_bit_for_bit(kernel):
    assert torch.equal(spread_channels(spread_channels(kernel, 5), 3), kernel)


def test_the_same_mean_and_deviation_for_all_change_no_bias(kernel):
    paper = preprocessing("paper", image_size=4)
    grey, gain = refeed(kernel, old=paper, new=preprocessing("paper", image_size=4, channels=1))
    assert not gain.any()
    assert torch.allclose(grey, spread_channels(kernel, 1), atol=1e-6)  # summed in float64, then rounded


def test_a_level_of_grey_gets_the_same_answer_under_imagenets_means(kernel):
    colours, one = preprocessing("deit", image_size=4), preprocessing("deit", image_size=4, channels=1)
    grey, gain = refeed(kernel, old=colours, new=one)
    pixels = torch.randint(0, 256, (9, 1, 4, 4), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    old = torch.einsum("dchw,bchw->bd", kernel, colours.normalise(pixels.expand(-1, 3, -1, -1)))
    new = torch.einsum("dchw,bchw->bd", grey, one.normalise(pixels)) + gain.float()
    assert torch.allclose(new, old, atol=1e-4)  # sums of 48 numbers of up to 10 in float32
