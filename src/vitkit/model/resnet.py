"""ResNets with GroupNorm and weight standardisation: the hybrid's backbone, and BiT, the paper's baseline.

The two differ where their released weights do. The backbone normalises after each convolution (v1), pads like
TensorFlow's SAME and divides weights by (std + 1e-5); BiT normalises before (v2), pads evenly and divides by
sqrt(var + 1e-10). timm divides both by sqrt(var + 1e-8), and weights that were trained or tuned there want that.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError, check_not_negative, check_positive
from vitkit.core.shapes import Float, Size, Tensor, pair
from vitkit.model.initialise import initialise
from vitkit.model.inputs import check_images

GROUPS = 32
"""GroupNorm's groups, in every ResNet of the paper."""
EXPANSION = 4
"""A bottleneck unit's output is this many times wider than its inner convolutions."""
Origin = Literal["google", "timm"]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What one origin computes with: its padding, and what it adds to a deviation, or to a variance under the root."""

    pads_same: bool
    norm_eps: float
    deviation_eps: float = 0.0
    variance_eps: float = 0.0


HYBRID: dict[Origin, Numbers] = {
    "google": Numbers(pads_same=True, norm_eps=1e-6, deviation_eps=1e-5),
    "timm": Numbers(pads_same=True, norm_eps=1e-5, variance_eps=1e-8),
}
BIG_TRANSFER: dict[Origin, Numbers] = {
    "google": Numbers(pads_same=False, norm_eps=1e-5, variance_eps=1e-10),
    "timm": Numbers(pads_same=False, norm_eps=1e-5, variance_eps=1e-8),
}


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's SAME padding of one axis as (before, after), the odd pixel after.

    >>> same_padding(224, kernel=7, stride=2), same_padding(112, kernel=3, stride=2)
    ((2, 3), (0, 1))
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(
    images: Float[Tensor, "B C H W"], *, kernel: int, stride: int, value: float = 0.0
) -> Float[Tensor, "B C H2 W2"]:
    """Pad both axes for a SAME window.

    >>> pad_same(torch.zeros(1, 1, 224, 224), kernel=7, stride=2).shape
    torch.Size([1, 1, 229, 229])
    """
    top, bottom = same_padding(images.shape[-2], kernel=kernel, stride=stride)
    left, right = same_padding(images.shape[-1], kernel=kernel, stride=stride)
    return functional.pad(images, (left, right, top, bottom), value=value)


class StandardisedConv(nn.Conv2d):
    """A convolution whose kernel is standardised over height, width and input channels before use."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, numbers: Numbers) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, bias=False)
        self.numbers = numbers

    def standardised(self) -> Float[Tensor, "outputs inputs k k"]:
        """The kernel as it is applied."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        if self.numbers.deviation_eps:
            return (self.weight - mean) / (variance.sqrt() + self.numbers.deviation_eps)
        return (self.weight - mean) * torch.rsqrt(variance + self.numbers.variance_eps)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:  # noqa: A002
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if self.numbers.pads_same:
            padded = pad_same(input, kernel=kernel, stride=stride)
            return functional.conv2d(padded, self.standardised(), stride=stride)
        return functional.conv2d(input, self.standardised(), stride=stride, padding=kernel // 2)


class Downsample(nn.Module):
    """The shortcut of a unit whose shape changes: a 1×1 convolution, normalised in the hybrid's backbone."""

    def __init__(self, conv: StandardisedConv, norm: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return self.norm(self.conv(features))


class PostActivationUnit(nn.Module):
    """A bottleneck with normalisation after each convolution: the unit of the hybrid's backbone."""

    def __init__(self, inputs: int, inner: int, *, stride: int, numbers: Numbers) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        conv = partial(StandardisedConv, numbers=numbers)
        norm = partial(nn.GroupNorm, GROUPS, eps=numbers.norm_eps)
        self.conv1, self.norm1 = conv(inputs, inner, kernel=1, stride=1), norm(inner)
        self.conv2, self.norm2 = conv(inner, inner, kernel=3, stride=stride), norm(inner)
        self.conv3, self.norm3 = conv(inner, outputs, kernel=1, stride=1), norm(outputs)
        self.downsample: Downsample | None = None
        if inputs != outputs or stride != 1:
            self.downsample = Downsample(conv(inputs, outputs, kernel=1, stride=stride), norm(outputs))

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        residual = self.downsample(features) if self.downsample else features
        hidden = functional.relu(self.norm1(self.conv1(features)))
        hidden = functional.relu(self.norm2(self.conv2(hidden)))
        return functional.relu(residual + self.norm3(self.conv3(hidden)))


class PreActivationUnit(nn.Module):
    """A bottleneck with normalisation before each convolution: the unit of BiT."""

    def __init__(self, inputs: int, inner: int, *, stride: int, numbers: Numbers) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        conv = partial(StandardisedConv, numbers=numbers)
        norm = partial(nn.GroupNorm, GROUPS, eps=numbers.norm_eps)
        self.norm1, self.conv1 = norm(inputs), conv(inputs, inner, kernel=1, stride=1)
        self.norm2, self.conv2 = norm(inner), conv(inner, inner, kernel=3, stride=stride)
        self.norm3, self.conv3 = norm(inner), conv(inner, outputs, kernel=1, stride=1)
        self.downsample: Downsample | None = None
        if inputs != outputs or stride != 1:
            self.downsample = Downsample(conv(inputs, outputs, kernel=1, stride=stride), nn.Identity())

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        activated = functional.relu(self.norm1(features))
        residual = self.downsample(activated) if self.downsample else features
        hidden = self.conv1(activated)
        hidden = self.conv2(functional.relu(self.norm2(hidden)))
        return residual + self.conv3(functional.relu(self.norm3(hidden)))


Unit = type[PostActivationUnit] | type[PreActivationUnit]


class Stage(nn.Module):
    """Units of one resolution; the first changes width and, in all stages but the first, halves the map."""

    def __init__(self, unit: Unit, *, units: int, inputs: int, inner: int, stride: int, numbers: Numbers) -> None:
        super().__init__()
        first = unit(inputs, inner, stride=stride, numbers=numbers)
        rest = (unit(inner * EXPANSION, inner, stride=1, numbers=numbers) for _ in range(units - 1))
        self.blocks = nn.Sequential(first, *rest)

    def forward(self, features: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return self.blocks(features)


def stages(unit: Unit, *, units: tuple[int, ...], root_width: int, numbers: Numbers) -> nn.Sequential:
    """The stages of a ResNet: each doubles the width and, after the first, halves the resolution.

    >>> len(stages(PreActivationUnit, units=(1, 2), root_width=64, numbers=BIG_TRANSFER["google"])[1].blocks)
    2
    """
    made, inputs = [], root_width
    for index, count in enumerate(units):
        inner = root_width * 2**index
        stride = 1 if index == 0 else 2
        made.append(Stage(unit, units=count, inputs=inputs, inner=inner, stride=stride, numbers=numbers))
        inputs = inner * EXPANSION
    return nn.Sequential(*made)


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The ResNet under a hybrid: units in each stage, the width of its root, and whose numbers it computes with."""

    units: tuple[int, ...] = (3, 4, 9)
    root_width: int = 64
    origin: Origin = "google"

    def __post_init__(self) -> None:
        check_resnet(self.units, self.root_width)

    @property
    def stride(self) -> int:
        """Image pixels to one cell of the feature map: 4 for the root, doubled by each later stage."""
        return 4 * 2 ** max(len(self.units) - 1, 0)

    @property
    def width(self) -> int:
        """Channels of the feature map."""
        return self.root_width * 2 ** (len(self.units) - 1) * EXPANSION if self.units else self.root_width


class BackboneStem(nn.Module):
    """The backbone's root: 7×7 convolution, norm, relu and max pooling, a quarter of the resolution."""

    def __init__(self, channels: int, width: int, *, numbers: Numbers) -> None:
        super().__init__()
        self.conv = StandardisedConv(channels, width, kernel=7, stride=2, numbers=numbers)
        self.norm = nn.GroupNorm(GROUPS, width, eps=numbers.norm_eps)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        features = functional.relu(self.norm(self.conv(images)))
        return functional.max_pool2d(pad_same(features, kernel=3, stride=2, value=-torch.inf), 3, stride=2)


class Backbone(nn.Module):
    """Images to a feature map, by a post-activation ResNet whose length the hybrid chooses.

    >>> Backbone(BackboneConfig(units=(1, 1), root_width=32), channels=3)(torch.rand(1, 3, 64, 64)).shape
    torch.Size([1, 256, 8, 8])
    """

    def __init__(self, config: BackboneConfig, *, channels: int) -> None:
        super().__init__()
        numbers = HYBRID[config.origin]
        self.width = config.width
        self.stem = BackboneStem(channels, config.root_width, numbers=numbers)
        self.stages = stages(PostActivationUnit, units=config.units, root_width=config.root_width, numbers=numbers)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return self.stages(self.stem(images))


@dataclass(frozen=True, kw_only=True)
class BiTConfig:
    """A Big Transfer ResNet v2: units in each stage, width in multiples of ResNet's, classes of the head.

    `origin` says whose numbers it computes with.
    """

    units: tuple[int, ...] = (3, 4, 6, 3)
    width_factor: int = 1
    channels: int = 3
    image_size: Size = 224
    classes: int = 1000
    origin: Origin = "google"

    def __post_init__(self) -> None:
        if not self.units:
            raise ConfigError("a ResNet needs a stage", expected="units of one stage or more", got=self.units)
        check_resnet(self.units, self.root_width)
        check_positive("channels", self.channels)
        check_positive("image_size", min(pair(self.image_size)))
        check_not_negative("classes", self.classes)

    @property
    def root_width(self) -> int:
        """Channels after the root convolution."""
        return 64 * self.width_factor

    @property
    def width(self) -> int:
        """Channels of the last feature map, the width of the head's features."""
        return self.root_width * 2 ** (len(self.units) - 1) * EXPANSION


class BiTStem(nn.Module):
    """BiT's root: a bare 7×7 convolution and max pooling over a border of zeros."""

    def __init__(self, channels: int, width: int, *, numbers: Numbers) -> None:
        super().__init__()
        self.conv = StandardisedConv(channels, width, kernel=7, stride=2, numbers=numbers)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C2 H2 W2"]:
        return functional.max_pool2d(functional.pad(self.conv(images), (1, 1, 1, 1)), 3, stride=2)


class BiT(nn.Module):
    """The paper's ResNet baseline (section 4.1), images of any size to logits.

    >>> BiT(BiTConfig(units=(1, 1), classes=10))(torch.rand(2, 3, 64, 48)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        numbers = BIG_TRANSFER[config.origin]
        self.stem = BiTStem(config.channels, config.root_width, numbers=numbers)
        self.stages = stages(PreActivationUnit, units=config.units, root_width=config.root_width, numbers=numbers)
        self.norm = nn.GroupNorm(GROUPS, config.width, eps=numbers.norm_eps)
        self.head = nn.Linear(config.width, config.classes) if config.classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew."""
        initialise(self, generator=generator)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads: the last feature map, activated and averaged over the image."""
        check_images(images, channels=self.config.channels, image_size=None)
        return functional.relu(self.norm(self.stages(self.stem(images)))).mean(dim=(2, 3))

    def stage_maps(self, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B C2 H2 W2"]]:
        """The feature map of each stage; the last one is normalised and activated, as the head's features are."""
        check_images(images, channels=self.config.channels, image_size=None)
        maps = [self.stem(images)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return [*maps[1:-1], functional.relu(self.norm(maps[-1]))]

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        return self.head(self.features(images))


def check_resnet(units: tuple[int, ...], root_width: int) -> None:
    """Refuse a ResNet with an empty stage or a width that GroupNorm's 32 groups do not divide."""
    if any(count < 1 for count in units):
        raise ConfigError("every ResNet stage needs a unit", expected="units ≥ 1", got=units)
    if root_width < 1 or root_width % GROUPS:
        raise ConfigError(
            "the ResNet's root width does not divide into its norm's groups",
            expected=f"a multiple of {GROUPS}",
            got=root_width,
        )
