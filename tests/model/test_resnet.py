"""The ResNets: padding and standardisation by their definitions, units as they start, sizes as they shrink."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import randomised
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.model.resnet import (
    BIG_TRANSFER,
    HYBRID,
    Backbone,
    BackboneConfig,
    BackboneStem,
    BiT,
    BiTConfig,
    BiTStem,
    Numbers,
    PostActivationUnit,
    PreActivationUnit,
    StandardisedConv,
    pad_same,
    same_padding,
)

ALL = [*HYBRID.values(), *BIG_TRANSFER.values()]
POST, PRE = HYBRID["google"], BIG_TRANSFER["google"]
EXACT = {"rtol": 0.0, "atol": 1e-10}  # float64 on both sides: only the order of summation differs


@given(size=st.integers(1, 300), kernel=st.integers(1, 7), stride=st.integers(1, 4))
def test_same_padding_gives_the_size_divided_by_the_stride_rounded_up(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel=kernel, stride=stride)
    assert 0 <= before <= after <= before + 1
    assert (size + before + after - kernel) // stride + 1 == math.ceil(size / stride) or before + after == 0
    # No more than needed: without the last pixel one output less, unless there is no padding at all.
    if before + after:
        assert (size + before + after - 1 - kernel) // stride + 1 == math.ceil(size / stride) - 1


def test_the_released_paddings_of_an_image_of_224_pixels() -> None:
    assert same_padding(224, kernel=7, stride=2) == (2, 3)
    assert same_padding(112, kernel=3, stride=2) == (0, 1)
    assert same_padding(56, kernel=3, stride=1) == (1, 1)


def test_padding_stands_before_rows_and_columns_by_half_and_holds_its_value() -> None:
    padded = pad_same(torch.ones(1, 1, 8, 11), kernel=7, stride=2, value=-1.0)
    assert padded.shape == (1, 1, 13, 17)
    assert (padded[0, 0, 2:10, 3:14] == 1).all()
    assert (padded == -1).sum() == 13 * 17 - 8 * 11


@pytest.mark.parametrize("numbers", ALL)
def test_each_output_channels_kernel_has_mean_zero_and_deviation_one(numbers: Numbers) -> None:
    conv = StandardisedConv(5, 4, kernel=3, stride=1, numbers=numbers).double()
    nn.init.normal_(conv.weight, mean=3.0, std=2.0)
    kernel = conv.standardised().flatten(1)
    torch.testing.assert_close(kernel.mean(dim=1), torch.zeros(4, dtype=torch.float64), **EXACT)
    # 1e-5 of the deviation, or at most 1e-8 of the variance, is missing.
    assert (kernel.std(dim=1, correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("numbers", "divisor"),
    [
        (HYBRID["google"], 1e-5 + 1e-5),
        (HYBRID["timm"], math.sqrt(1e-10 + 1e-8)),
        (BIG_TRANSFER["google"], math.sqrt(1e-10 + 1e-10)),
        (BIG_TRANSFER["timm"], math.sqrt(1e-10 + 1e-8)),
    ],
)
def test_kernels_without_spread_are_held_back_by_the_released_constants(numbers: Numbers, divisor: float) -> None:
    conv = StandardisedConv(1, 1, kernel=2, stride=1, numbers=numbers).double()
    spread = 1e-5
    conv.weight.data = torch.tensor([[[[1 + spread, 1 - spread], [1 + spread, 1 - spread]]]], dtype=torch.float64)
    assert conv.standardised().abs().max().item() == pytest.approx(spread / divisor, rel=1e-9)


@pytest.mark.parametrize(("numbers", "padding"), [(POST, (0, 1, 0, 1)), (PRE, (1, 1, 1, 1))])
def test_the_backbone_pads_unevenly_and_bit_evenly(numbers: Numbers, padding: tuple[int, int, int, int]) -> None:
    conv = StandardisedConv(2, 3, kernel=3, stride=2, numbers=numbers).double()
    images = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    expected = functional.conv2d(functional.pad(images, padding), conv.standardised(), stride=2)
    torch.testing.assert_close(conv(images), expected, **EXACT)


def test_scaling_or_shifting_a_kernel_changes_nothing() -> None:
    conv = StandardisedConv(4, 4, kernel=3, stride=1, numbers=PRE).double()
    images = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    before = conv(images)
    with torch.no_grad():
        conv.weight.mul_(7.0).add_(2.0)
    torch.testing.assert_close(conv(images), before, rtol=1e-6, atol=1e-6)  # 1e-10 beside a variance near 0.01


def test_a_fresh_post_activation_unit_is_its_shortcut() -> None:
    backbone = Backbone(BackboneConfig(units=(2,), root_width=32), channels=3)
    for name, parameter in backbone.named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith(("norm3.weight", "bias")) else 1.0)
        if "conv" in name:
            nn.init.normal_(parameter)
    second = backbone.stages[0].blocks[1]
    features = torch.randn(2, 128, 4, 4)
    assert second.downsample is None
    assert torch.equal(second(features), functional.relu(features))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_post_activation_unit_norms_after_each_convolution(stride: int) -> None:
    unit = randomised(PostActivationUnit(64, 32, stride=stride, numbers=POST)).double()
    features = torch.randn(2, 64, 6, 8, dtype=torch.float64)
    hidden = functional.relu(unit.norm1(unit.conv1(features)))
    hidden = functional.relu(unit.norm2(unit.conv2(hidden)))
    shortcut = unit.downsample.norm(unit.downsample.conv(features))
    expected = functional.relu(shortcut + unit.norm3(unit.conv3(hidden)))
    torch.testing.assert_close(unit(features), expected, **EXACT)
    assert expected.shape == (2, 128, 6 // stride, 8 // stride)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_pre_activation_unit_norms_before_each_convolution_and_its_shortcut(stride: int) -> None:
    unit = randomised(PreActivationUnit(64, 32, stride=stride, numbers=PRE)).double()
    features = torch.randn(2, 64, 6, 8, dtype=torch.float64)
    activated = functional.relu(unit.norm1(features))
    hidden = unit.conv2(functional.relu(unit.norm2(unit.conv1(activated))))
    expected = unit.downsample.conv(activated) + unit.conv3(functional.relu(unit.norm3(hidden)))
    torch.testing.assert_close(unit(features), expected, **EXACT)
    assert expected.shape == (2, 128, 6 // stride, 8 // stride)


def test_a_pre_activation_unit_of_one_shape_adds_to_what_came_before_any_norm() -> None:
    unit = randomised(PreActivationUnit(128, 32, stride=1, numbers=PRE)).double()
    nn.init.zeros_(unit.norm3.weight)
    nn.init.constant_(unit.norm3.bias, -1.0)
    features = torch.randn(2, 128, 4, 4, dtype=torch.float64)
    assert torch.equal(unit(features), features)


@pytest.mark.parametrize(("unit", "numbers"), [(PostActivationUnit, POST), (PreActivationUnit, PRE)])
def test_a_unit_has_a_shortcut_layer_only_where_shapes_change(
    unit: type[PostActivationUnit] | type[PreActivationUnit], numbers: Numbers
) -> None:
    assert unit(64, 32, stride=1, numbers=numbers).downsample is not None
    assert unit(128, 32, stride=2, numbers=numbers).downsample is not None
    assert unit(128, 32, stride=1, numbers=numbers).downsample is None


@given(height=st.integers(1, 6), width=st.integers(1, 6))
def test_the_roots_quarter_the_resolution(height: int, width: int) -> None:
    images = torch.randn(1, 3, 4 * height, 4 * width)
    assert BackboneStem(3, 32, numbers=POST)(images).shape == (1, 32, height, width)
    assert BiTStem(3, 32, numbers=PRE)(images).shape == (1, 32, height, width)


@pytest.mark.parametrize(
    ("units", "stride", "width"), [((), 4, 64), ((3,), 4, 256), ((3, 4, 9), 16, 1024), ((3, 4, 6, 3), 32, 2048)]
)
def test_a_backbone_knows_its_stride_and_width(units: tuple[int, ...], stride: int, width: int) -> None:
    config = BackboneConfig(units=units)
    assert (config.stride, config.width) == (stride, width)
    with torch.device("meta"):
        features = Backbone(config, channels=3)(torch.empty(1, 3, 64, 96))
    assert features.shape == (1, width, 64 // stride, 96 // stride)


def test_bit_takes_images_of_any_size() -> None:
    model = randomised(BiT(BiTConfig(units=(1, 1), classes=4, image_size=64)))
    for size in ((32, 32), (33, 47), (64, 96)):
        assert model(torch.randn(1, 3, *size)).isfinite().all()


def test_bits_features_are_the_mean_of_the_last_activated_map() -> None:
    model = randomised(BiT(BiTConfig(units=(1, 1), classes=4)))
    images = torch.randn(2, 3, 32, 48)
    last = functional.relu(model.norm(model.stages(model.stem(images))))
    assert last.shape == (2, 512, 4, 6)
    torch.testing.assert_close(model.features(images), last.sum(dim=(2, 3)) / 24)
    torch.testing.assert_close(model(images), model.head(model.features(images)))


def test_bit_without_classes_gives_features() -> None:
    model = randomised(BiT(BiTConfig(units=(1,), classes=0)))
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), model.features(images))


@pytest.mark.parametrize("units", [(3, 0, 2), (-1,)])
def test_a_stage_without_units_is_refused(units: tuple[int, ...]) -> None:
    for config in (BackboneConfig, BiTConfig):
        with pytest.raises(ConfigError, match="every ResNet stage needs a unit") as raised:
            config(units=units)
        assert raised.value.got == units


@pytest.mark.parametrize("root_width", [0, -32, 48])
def test_a_root_width_that_groups_do_not_divide_is_refused(root_width: int) -> None:
    with pytest.raises(ConfigError, match="root width does not divide") as raised:
        BackboneConfig(root_width=root_width)
    assert (raised.value.expected, raised.value.got) == ("a multiple of 32", root_width)


def test_a_baseline_without_stages_is_refused() -> None:
    """A hybrid's backbone may be its root alone; BiT has no such model, and no width to give it."""
    with pytest.raises(ConfigError):
        BiTConfig(units=())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"channels": 0}, "channels must be positive"), ({"classes": -1}, "classes cannot be negative")],
    ids=["no channels", "negative classes"],
)
def test_a_baseline_with_impossible_counts_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BiTConfig(**changes)


@pytest.mark.parametrize("image_size", [0, -224, (224, -1)])
def test_a_baseline_with_an_impossible_image_size_is_refused(image_size: int | tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        BiTConfig(image_size=image_size)
