"""ResNets: padding, weight standardization, units and sizes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import randomized
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.model.config import BackboneConfig, BiTConfig, RootKind
from vitkit.model.resnet import (
    BIT_CONVENTIONS,
    HYBRID_CONVENTIONS,
    Backbone,
    BackboneStem,
    BiT,
    BiTStem,
    NumericConventions,
    PostActivationUnit,
    PreActivationUnit,
    StandardizedConv,
    pad_same,
    same_padding,
)

ALL = [*HYBRID_CONVENTIONS.values(), *BIT_CONVENTIONS.values()]
POST, PRE = HYBRID_CONVENTIONS["google"], BIT_CONVENTIONS["google"]
EXACT = {"rtol": 0.0, "atol": 1e-10}  # float64 on both sides: only the order of summation differs


@given(size=st.integers(1, 300), kernel=st.integers(1, 7), stride=st.integers(1, 4))
def test_same_padding_divides_the_size_by_the_stride(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel=kernel, stride=stride)
    assert 0 <= before <= after <= before + 1
    assert (size + before + after - kernel) // stride + 1 == math.ceil(size / stride) or before + after == 0
    # No more than necessary: without the last pixel there is one output less, unless there is no padding.
    if before + after:
        assert (size + before + after - 1 - kernel) // stride + 1 == math.ceil(size / stride) - 1


def test_same_padding_of_224_pixels() -> None:
    assert same_padding(224, kernel=7, stride=2) == (2, 3)
    assert same_padding(112, kernel=3, stride=2) == (0, 1)
    assert same_padding(56, kernel=3, stride=1) == (1, 1)


def test_pad_same_splits_the_padding_and_fills_the_value() -> None:
    padded = pad_same(torch.ones(1, 1, 8, 11), kernel=7, stride=2, value=-1.0)
    assert padded.shape == (1, 1, 13, 17)
    assert (padded[0, 0, 2:10, 3:14] == 1).all()
    assert (padded == -1).sum() == 13 * 17 - 8 * 11


@pytest.mark.parametrize("conventions", ALL)
def test_standardized_kernels_have_mean_zero_and_std_one(conventions: NumericConventions) -> None:
    conv = StandardizedConv(5, 4, kernel=3, stride=1, conventions=conventions).double()
    nn.init.normal_(conv.weight, mean=3.0, std=2.0)
    kernel = conv.standardized_weight().flatten(1)
    torch.testing.assert_close(kernel.mean(dim=1), torch.zeros(4, dtype=torch.float64), **EXACT)
    # The epsilon is 1e-5 of the standard deviation, or at most 1e-8 of the variance.
    assert (kernel.std(dim=1, correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("conventions", "divisor"),
    [
        (HYBRID_CONVENTIONS["google"], 1e-5 + 1e-5),
        (HYBRID_CONVENTIONS["timm"], math.sqrt(1e-10 + 1e-8)),
        (BIT_CONVENTIONS["google"], math.sqrt(1e-10 + 1e-10)),
        (BIT_CONVENTIONS["timm"], math.sqrt(1e-10 + 1e-8)),
    ],
)
def test_constant_kernels_are_divided_by_the_epsilon(conventions: NumericConventions, divisor: float) -> None:
    conv = StandardizedConv(1, 1, kernel=2, stride=1, conventions=conventions).double()
    spread = 1e-5
    conv.weight.data = torch.tensor([[[[1 + spread, 1 - spread], [1 + spread, 1 - spread]]]], dtype=torch.float64)
    assert conv.standardized_weight().abs().max().item() == pytest.approx(spread / divisor, rel=1e-9)


@pytest.mark.parametrize(("conventions", "padding"), [(POST, (0, 1, 0, 1)), (PRE, (1, 1, 1, 1))])
def test_backbone_pads_same_and_bit_symmetrically(
    conventions: NumericConventions, padding: tuple[int, int, int, int]
) -> None:
    conv = StandardizedConv(2, 3, kernel=3, stride=2, conventions=conventions).double()
    images = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    expected = functional.conv2d(functional.pad(images, padding), conv.standardized_weight(), stride=2)
    torch.testing.assert_close(conv(images), expected, **EXACT)


def test_standardization_ignores_scale_and_shift() -> None:
    conv = StandardizedConv(4, 4, kernel=3, stride=1, conventions=PRE).double()
    images = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    before = conv(images)
    with torch.no_grad():
        conv.weight.mul_(7.0).add_(2.0)
    torch.testing.assert_close(conv(images), before, rtol=1e-6, atol=1e-6)  # 1e-10 beside a variance near 0.01


def test_new_post_activation_unit_is_its_shortcut() -> None:
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
def test_post_activation_unit_normalizes_after_convolutions(stride: int) -> None:
    unit = randomized(PostActivationUnit(64, 32, stride=stride, conventions=POST)).double()
    features = torch.randn(2, 64, 6, 8, dtype=torch.float64)
    hidden = functional.relu(unit.norm1(unit.conv1(features)))
    hidden = functional.relu(unit.norm2(unit.conv2(hidden)))
    shortcut = unit.downsample.norm(unit.downsample.conv(features))
    expected = functional.relu(shortcut + unit.norm3(unit.conv3(hidden)))
    torch.testing.assert_close(unit(features), expected, **EXACT)
    assert expected.shape == (2, 128, 6 // stride, 8 // stride)


@pytest.mark.parametrize("stride", [1, 2])
def test_pre_activation_unit_normalizes_before_convolutions(stride: int) -> None:
    unit = randomized(PreActivationUnit(64, 32, stride=stride, conventions=PRE)).double()
    features = torch.randn(2, 64, 6, 8, dtype=torch.float64)
    activated = functional.relu(unit.norm1(features))
    hidden = unit.conv2(functional.relu(unit.norm2(unit.conv1(activated))))
    expected = unit.downsample.conv(activated) + unit.conv3(functional.relu(unit.norm3(hidden)))
    torch.testing.assert_close(unit(features), expected, **EXACT)
    assert expected.shape == (2, 128, 6 // stride, 8 // stride)


def test_pre_activation_shortcut_skips_the_norm() -> None:
    unit = randomized(PreActivationUnit(128, 32, stride=1, conventions=PRE)).double()
    nn.init.zeros_(unit.norm3.weight)
    nn.init.constant_(unit.norm3.bias, -1.0)
    features = torch.randn(2, 128, 4, 4, dtype=torch.float64)
    assert torch.equal(unit(features), features)


@pytest.mark.parametrize(("unit", "conventions"), [(PostActivationUnit, POST), (PreActivationUnit, PRE)])
def test_unit_has_a_downsample_only_if_the_shape_changes(
    unit: type[PostActivationUnit] | type[PreActivationUnit], conventions: NumericConventions
) -> None:
    assert unit(64, 32, stride=1, conventions=conventions).downsample is not None
    assert unit(128, 32, stride=2, conventions=conventions).downsample is not None
    assert unit(128, 32, stride=1, conventions=conventions).downsample is None


@given(height=st.integers(1, 6), width=st.integers(1, 6))
def test_stems_have_a_stride_of_four(height: int, width: int) -> None:
    images = torch.randn(1, 3, 4 * height, 4 * width)
    assert BackboneStem(3, 32, root="standard", conventions=POST)(images).shape == (1, 32, height, width)
    assert BiTStem(3, 32, root="standard", conventions=PRE)(images).shape == (1, 32, height, width)


@pytest.mark.parametrize(("root", "stride"), [("small", 1), ("stack", 4)])
def test_roots_for_small_images_have_their_stride(root: RootKind, stride: int) -> None:
    images = torch.randn(2, 3, 16, 24)
    backbone = BackboneConfig(units=(1, 1), root=root)
    assert backbone.stride == 2 * stride
    assert Backbone(backbone, channels=3)(images).shape == (2, 512, 8 // stride, 12 // stride)
    assert BiT(BiTConfig(units=(1, 1), root=root, num_classes=5))(images).shape == (2, 5)


def test_residual_units_need_a_stacked_root() -> None:
    with pytest.raises(ConfigError, match="only a stacked root has residual units"):
        BackboneConfig(root="small", root_units=(1, 0))
    with pytest.raises(ConfigError, match="a multiple of 64"):
        BackboneConfig(root="stack", root_width=96)


@pytest.mark.parametrize(
    ("units", "stride", "width"), [((), 4, 64), ((3,), 4, 256), ((3, 4, 9), 16, 1024), ((3, 4, 6, 3), 32, 2048)]
)
def test_backbone_has_its_configured_stride_and_width(units: tuple[int, ...], stride: int, width: int) -> None:
    config = BackboneConfig(units=units)
    assert (config.stride, config.width) == (stride, width)
    with torch.device("meta"):
        features = Backbone(config, channels=3)(torch.empty(1, 3, 64, 96))
    assert features.shape == (1, width, 64 // stride, 96 // stride)


def test_bit_takes_images_of_any_size() -> None:
    model = randomized(BiT(BiTConfig(units=(1, 1), num_classes=4, image_size=64)))
    for size in ((32, 32), (33, 47), (64, 96)):
        assert model(torch.randn(1, 3, *size)).isfinite().all()


def test_bit_features_average_the_last_activated_map() -> None:
    model = randomized(BiT(BiTConfig(units=(1, 1), num_classes=4)))
    images = torch.randn(2, 3, 32, 48)
    last = functional.relu(model.norm(model.stages(model.stem(images))))
    assert last.shape == (2, 512, 4, 6)
    torch.testing.assert_close(model.features(images), last.sum(dim=(2, 3)) / 24)
    torch.testing.assert_close(model(images), model.head(model.features(images)))


def test_bit_without_classes_returns_features() -> None:
    model = randomized(BiT(BiTConfig(units=(1,), num_classes=0)))
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), model.features(images))


@pytest.mark.parametrize("units", [(3, 0, 2), (-1,)])
def test_stage_without_units_is_rejected(units: tuple[int, ...]) -> None:
    for config in (BackboneConfig, BiTConfig):
        with pytest.raises(ConfigError, match="every ResNet stage needs a unit") as raised:
            config(units=units)
        assert raised.value.got == units


@pytest.mark.parametrize("root_width", [0, -32, 44])
def test_root_width_must_be_divisible_by_the_groups(root_width: int) -> None:
    with pytest.raises(ConfigError, match="root width is not divisible") as raised:
        BackboneConfig(root_width=root_width)
    assert (raised.value.expected, raised.value.got) == ("a multiple of 8", root_width)


def test_bit_without_stages_is_rejected() -> None:
    """A hybrid's backbone may be its root alone; BiT needs a stage."""
    with pytest.raises(ConfigError):
        BiTConfig(units=())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"channels": 0}, "channels must be positive"), ({"num_classes": -1}, "num_classes cannot be negative")],
    ids=["no channels", "negative classes"],
)
def test_bit_with_invalid_counts_is_rejected(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BiTConfig(**changes)


@pytest.mark.parametrize("image_size", [0, -224, (224, -1)])
def test_bit_with_an_invalid_image_size_is_rejected(image_size: int | tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        BiTConfig(image_size=image_size)
