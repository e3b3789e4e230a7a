"""ResNets with GroupNorm and weight standardization: the backbone of hybrids, and BiT, the paper's baseline.

They differ as their released weights do. The backbone is a ResNet v1 (norm after convolution) with TensorFlow's SAME
padding and weights divided by std + 1e-5; BiT is a ResNet v2 (norm before convolution) with symmetric padding and
weights divided by sqrt(var + 1e-10). timm divides both by sqrt(var + 1e-8), and its weights need that.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.core.sizes import Size
from vitkit.model.base import ImageModel, check_config
from vitkit.model.config import EXPANSION, STACK_GROUP, BackboneConfig, BiTConfig, ResNetOrigin, RootKind, norm_groups
from vitkit.model.init import initialization_rules, initialize
from vitkit.model.patches import check_images


@dataclass(frozen=True, kw_only=True)
class NumericConventions:
    """Padding and epsilons of one library: `std_eps` is added to the deviation, `variance_eps` under the root."""

    pads_same: bool
    norm_eps: float
    std_eps: float = 0.0
    variance_eps: float = 0.0


HYBRID_CONVENTIONS: dict[ResNetOrigin, NumericConventions] = {
    "google": NumericConventions(pads_same=True, norm_eps=1e-6, std_eps=1e-5),
    "timm": NumericConventions(pads_same=True, norm_eps=1e-5, variance_eps=1e-8),
}
BIT_CONVENTIONS: dict[ResNetOrigin, NumericConventions] = {
    "google": NumericConventions(pads_same=False, norm_eps=1e-5, variance_eps=1e-10),
    "timm": NumericConventions(pads_same=False, norm_eps=1e-5, variance_eps=1e-8),
}


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """Return TensorFlow's SAME padding of one axis as (before, after), the odd pixel after.

    >>> same_padding(224, kernel=7, stride=2), same_padding(112, kernel=3, stride=2)
    ((2, 3), (0, 1))
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(
    images: Float[Tensor, "B C H W"], *, kernel: int, stride: int, value: float = 0.0
) -> Float[Tensor, "B C H2 W2"]:
    """Pad height and width by `same_padding`.

    >>> pad_same(torch.zeros(1, 1, 224, 224), kernel=7, stride=2).shape
    torch.Size([1, 1, 229, 229])
    """
    top, bottom = same_padding(images.shape[-2], kernel=kernel, stride=stride)
    left, right = same_padding(images.shape[-1], kernel=kernel, stride=stride)
    return functional.pad(images, (left, right, top, bottom), value=value)


class StandardizedConv(nn.Conv2d):
    """Convolution with weight standardization over height, width and input channels."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, conventions: NumericConventions) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, bias=False)
        self.conventions = conventions

    def standardized_weight(self) -> Float[Tensor, "outputs inputs k k"]:
        """Return the standardized kernel."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        if self.conventions.std_eps:
            return (self.weight - mean) / (variance.sqrt() + self.conventions.std_eps)
        return (self.weight - mean) * torch.rsqrt(variance + self.conventions.variance_eps)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:  # noqa: A002
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if self.conventions.pads_same:
            padded = pad_same(input, kernel=kernel, stride=stride)
            return functional.conv2d(padded, self.standardized_weight(), stride=stride)
        return functional.conv2d(input, self.standardized_weight(), stride=stride, padding=kernel // 2)


def _group_norm(width: int, *, conventions: NumericConventions) -> nn.GroupNorm:
    return nn.GroupNorm(norm_groups(width), width, eps=conventions.norm_eps)


class PostActivationUnit(nn.Module):
    """Bottleneck with the norm after each convolution, the unit of the hybrid's backbone."""

    def __init__(self, inputs: int, inner: int, *, stride: int, conventions: NumericConventions) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        conv = partial(StandardizedConv, conventions=conventions)
        norm = partial(_group_norm, conventions=conventions)
        self.conv1, self.norm1 = conv(inputs, inner, kernel=1, stride=1), norm(inner)
        self.conv2, self.norm2 = conv(inner, inner, kernel=3, stride=stride), norm(inner)
        self.conv3, self.norm3 = conv(inner, outputs, kernel=1, stride=1), norm(outputs)
        self.downsample: nn.Sequential | None = None
        if inputs != outputs or stride != 1:
            shortcut = conv(inputs, outputs, kernel=1, stride=stride)
            self.downsample = nn.Sequential(OrderedDict(conv=shortcut, norm=norm(outputs)))

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        residual = self.downsample(features) if self.downsample else features
        hidden = functional.relu(self.norm1(self.conv1(features)))
        hidden = functional.relu(self.norm2(self.conv2(hidden)))
        return functional.relu(residual + self.norm3(self.conv3(hidden)))


class PreActivationUnit(nn.Module):
    """Bottleneck with the norm before each convolution, the unit of BiT."""

    def __init__(self, inputs: int, inner: int, *, stride: int, conventions: NumericConventions) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        conv = partial(StandardizedConv, conventions=conventions)
        norm = partial(_group_norm, conventions=conventions)
        self.norm1, self.conv1 = norm(inputs), conv(inputs, inner, kernel=1, stride=1)
        self.norm2, self.conv2 = norm(inner), conv(inner, inner, kernel=3, stride=stride)
        self.norm3, self.conv3 = norm(inner), conv(inner, outputs, kernel=1, stride=1)
        self.downsample: nn.Sequential | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(OrderedDict(conv=conv(inputs, outputs, kernel=1, stride=stride)))

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        activated = functional.relu(self.norm1(features))
        residual = self.downsample(activated) if self.downsample else features
        hidden = self.conv1(activated)
        hidden = self.conv2(functional.relu(self.norm2(hidden)))
        return residual + self.conv3(functional.relu(self.norm3(hidden)))


Unit = type[PostActivationUnit] | type[PreActivationUnit]


def create_stages(
    unit: Unit, *, units: tuple[int, ...], root_width: int, conventions: NumericConventions
) -> nn.Sequential:
    """Create the stages of a ResNet. Each doubles the width and, after the first, halves the resolution.

    >>> conventions = BIT_CONVENTIONS["google"]
    >>> stages = create_stages(PreActivationUnit, units=(1, 2), root_width=64, conventions=conventions)
    >>> [len(stage.blocks) for stage in stages]
    [1, 2]
    """
    stages, inputs = [], root_width
    for index, count in enumerate(units):
        inner, create = root_width * 2**index, partial(unit, conventions=conventions)
        first = create(inputs, inner, stride=1 if index == 0 else 2)
        inputs = inner * EXPANSION
        rest = (create(inputs, inner, stride=1) for _ in range(count - 1))
        stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(first, *rest))))
    return nn.Sequential(*stages)


class ConvNorm(nn.Module):
    """3×3 convolution, GroupNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(outputs // STACK_GROUP, outputs)

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return functional.relu(self.norm(self.conv(features)))


class BasicUnit(nn.Module):
    """Residual unit of two 3×3 convolutions, in stacked roots."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        self.conv1, self.norm1 = conv(), nn.GroupNorm(width // STACK_GROUP, width)
        self.conv2, self.norm2 = conv(), nn.GroupNorm(width // STACK_GROUP, width)

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        hidden = functional.relu(self.norm1(self.conv1(features)))
        return functional.relu(features + self.norm2(self.conv2(hidden)))


class StackedStem(ConvNorm):
    """Root for small training budgets: 3×3 convolutions of width / 4, width / 2 and width channels.

    The last two have stride 2, and each is followed by residual units.

    >>> StackedStem(3, 128, units=(0, 1))(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 128, 8, 8])
    """

    def __init__(self, channels: int, width: int, *, units: tuple[int, int]) -> None:
        super().__init__(channels, width // 4, stride=1)
        first, second = units
        self.blocks = nn.Sequential(
            ConvNorm(width // 4, width // 2, stride=2),
            *(BasicUnit(width // 2) for _ in range(first)),
            ConvNorm(width // 2, width, stride=2),
            *(BasicUnit(width) for _ in range(second)),
        )

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return self.blocks(super().forward(images))


class BackboneStem(nn.Module):
    """Root of the backbone: convolution, norm, ReLU and, in a standard root, max pooling."""

    def __init__(self, channels: int, width: int, *, root: RootKind, conventions: NumericConventions) -> None:
        super().__init__()
        self.pools = root == "standard"
        self.conv = _root_conv(channels, width, root=root, conventions=conventions)
        self.norm = _group_norm(width, conventions=conventions)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        features = functional.relu(self.norm(self.conv(images)))
        if not self.pools:
            return features
        return functional.max_pool2d(pad_same(features, kernel=3, stride=2, value=-torch.inf), 3, stride=2)


def _root_conv(channels: int, width: int, *, root: RootKind, conventions: NumericConventions) -> StandardizedConv:
    kernel, stride = (7, 2) if root == "standard" else (3, 1)
    return StandardizedConv(channels, width, kernel=kernel, stride=stride, conventions=conventions)


class Backbone(nn.Module):
    """ResNet v1 that computes the feature map of a hybrid.

    >>> Backbone(BackboneConfig(units=(1, 1), root_width=32), channels=3)(torch.rand(1, 3, 64, 64)).shape
    torch.Size([1, 256, 8, 8])
    """

    def __init__(self, config: BackboneConfig, *, channels: int) -> None:
        super().__init__()
        conventions = HYBRID_CONVENTIONS[config.origin]
        self.width = config.width
        self.stem = _create_stem(BackboneStem, config, channels=channels, conventions=conventions)
        self.stages = create_stages(
            PostActivationUnit, units=config.units, root_width=config.root_width, conventions=conventions
        )

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return self.stages(self.stem(images))


class BiTStem(nn.Module):
    """Root of BiT: convolution and, in a standard root, max pooling padded with zeros."""

    def __init__(self, channels: int, width: int, *, root: RootKind, conventions: NumericConventions) -> None:
        super().__init__()
        self.pools = root == "standard"
        self.conv = _root_conv(channels, width, root=root, conventions=conventions)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        features = self.conv(images)
        return functional.max_pool2d(functional.pad(features, (1, 1, 1, 1)), 3, stride=2) if self.pools else features


def _create_stem(
    stem: type[BackboneStem | BiTStem],
    config: BackboneConfig | BiTConfig,
    *,
    channels: int,
    conventions: NumericConventions,
) -> StackedStem | BackboneStem | BiTStem:
    if config.root == "stack":
        return StackedStem(channels, config.root_width, units=config.root_units)
    return stem(channels, config.root_width, root=config.root, conventions=conventions)


class BiT(ImageModel):
    """Big Transfer ResNet v2, the paper's baseline (section 4.1). It takes images of any size.

    >>> BiT(BiTConfig(units=(1, 1), num_classes=10))(torch.rand(2, 3, 64, 48)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config: BiTConfig = check_config(config, BiTConfig)
        conventions = BIT_CONVENTIONS[config.origin]
        self.stem = _create_stem(BiTStem, config, channels=config.channels, conventions=conventions)
        self.stages = create_stages(
            PreActivationUnit, units=config.units, root_width=config.root_width, conventions=conventions
        )
        self.norm = _group_norm(config.width, conventions=conventions)
        self.head = self.create_head()
        self.reset_parameters()

    def create_head(self) -> nn.Module:
        return nn.Linear(self.config.width, self.num_classes) if self.num_classes else nn.Identity()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize all parameters."""
        initialize(self, initialization_rules(), generator=generator)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the features that the head reads: the last feature map, averaged over the image."""
        return self.forward_features(images).mean(dim=(2, 3))

    def forward_features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F H2 W2"]:
        """Return the last feature map after norm and ReLU, as in timm."""
        check_images(images, channels=self.config.channels, image_size=None)
        features = self.stem(images)
        for stage in self.stages:
            if self.grad_checkpointing and torch.is_grad_enabled():
                features = checkpoint(stage, features, use_reentrant=False)
            else:
                features = stage(features)
        return functional.relu(self.norm(features))

    def forward_head(self, feature_map: Float[Tensor, "B F H2 W2"], pre_logits: bool = False) -> Float[Tensor, "B Y"]:
        """Return the logits for the output of `forward_features`; with `pre_logits`, the pooled features."""
        if feature_map.ndim != 4:
            got = "×".join(map(str, feature_map.shape))
            raise InputError(f"forward_head() takes a feature map B×F×H×W, got {got}", hint="model.head(features)")
        features = feature_map.mean(dim=(2, 3))
        return features if pre_logits else self.head(features)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that optimizers should not decay, besides biases and norms."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that assign parameters to layers, for layer-wise learning rates."""
        units = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else units}

    def set_input_size(self, image_size: Size) -> None:
        """Change the size to which images are resized before they are classified; the network takes any size."""
        self.config = replace(self.config, image_size=image_size)
        if hasattr(self, "preprocess"):
            self.preprocess = replace(self.preprocess, image_size=image_size)

    def stage_maps(self, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B C2 H2 W2"]]:
        """Return the feature map of each stage; the last one after norm and ReLU, as the head reads it."""
        check_images(images, channels=self.config.channels, image_size=None)
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [*maps[1:-1], functional.relu(self.norm(maps[-1]))]
