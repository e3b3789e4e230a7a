"""Configurations of all models, in the paper's terms. This module imports no torch; positions are imported when built.

Every dataclass checks itself when it is created, so a configuration that exists can be built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from vitkit.core.errors import ConfigError, check_fraction, check_not_negative, check_positive, did_you_mean
from vitkit.core.sizes import Size, pair

Activation = Literal["gelu_tanh", "gelu_erf", "swiglu"]
InterpolationOrigin = Literal[
    "google", "timm", "huggingface", "deit", "mae", "torchvision", "dinov2", "dinov2-registers"
]
Injection = Literal["stem", "every_layer", "shared"]
Pooling = Literal["class", "mean", "map", "class_mean"]
"""What the head reads: the class token, the mean of the patches, attention pooling, or the first two (DINOv2)."""
PositionRole = Literal["table", "bias", "rotation"]
ResNetOrigin = Literal["google", "timm"]
RootKind = Literal["standard", "small", "stack"]

EXPANSION = 4
"""Output width of a bottleneck unit, as a multiple of its inner width."""
GROUPS, NARROW_GROUP = 32, 8
"""Groups of GroupNorm in every ResNet of the paper, and channels per group where 32 groups do not divide the width."""
ROOT_STRIDES: dict[RootKind, int] = {"standard": 4, "small": 1, "stack": 4}
"""Image pixels per cell of the feature map after the root, along each axis."""
STACK_GROUP = 16
"""Channels per group of GroupNorm in a stacked root, whose first layer is too narrow for 32 groups."""
LIMITS = {"width": 10**6, "depth": 10_000, "mlp_dim": 10**7, "num_classes": 10**8, "image_size": 100_000}
"""Largest accepted sizes. A file that asks for more is damaged or hostile, and would exhaust the memory."""


# Position embeddings


@dataclass(frozen=True, kw_only=True)
class PositionKind:
    """Registry entry of a kind of position embedding.

    Args:
        role: `table` is added to the tokens, `bias` is added to the attention logits, `rotation` is applied to queries
            and keys; None means no positions.
        factory: `package.module:function`, imported when a model is built. It is called with the `ViTConfig` (and,
            for a rotation, the device) and returns a parameter or module.
        injections: Where the positions may enter, the default first.
        fixed_values: `package.module:function` from a `ViTConfig` to the values of a table that is not learned.
        width_multiple: Number that must divide the model's width.
        head_width_multiple: Number that must divide the width of a head.
    """

    role: PositionRole | None
    factory: str | None = None
    injections: tuple[Injection, ...]
    fixed_values: str | None = None
    width_multiple: int = 1
    head_width_multiple: int = 1

    def import_function(self, field: Literal["factory", "fixed_values"]) -> Callable[..., Any]:
        """Import the function that a field names."""
        function: Callable[..., Any] = resolve_name(getattr(self, field))
        return function


_MODULE = "vitkit.model.positions"
_ANYWHERE: tuple[Injection, ...] = ("stem", "every_layer", "shared")
POSITION_KINDS: dict[str, PositionKind] = {
    "none": PositionKind(role=None, injections=("stem",)),
    "learned_1d": PositionKind(role="table", factory=f"{_MODULE}:learned_1d", injections=_ANYWHERE),
    "learned_2d": PositionKind(role="table", factory=f"{_MODULE}:learned_2d", injections=_ANYWHERE, width_multiple=2),
    "sincos_2d": PositionKind(
        role="table",
        factory=f"{_MODULE}:fixed_table",
        fixed_values=f"{_MODULE}:sincos_values",
        injections=("stem", "shared"),
        width_multiple=4,
    ),
    "relative": PositionKind(role="bias", factory=f"{_MODULE}:relative_1d", injections=("every_layer", "shared")),
    "rotary": PositionKind(
        role="rotation", factory=f"{_MODULE}:axial_rotary", injections=("shared",), head_width_multiple=4
    ),
}
"""All kinds of position embedding. To add one, write its factory and one entry here."""


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Position embeddings.

    Args:
        kind: A name in `POSITION_KINDS`.
        injection: Where positions enter: once at the stem, at every layer with parameters of its own, or at every
            layer with shared parameters. None selects the default of the kind.
        covers: Whether the class and distillation tokens have rows in the table.
        origin: Library whose interpolation resizes the table to another grid.
        sincos: Library whose frequencies the sine-cosine table has.
        rotary_base: Base of the rotary periods.
    """

    kind: str = "learned_1d"
    injection: Injection | None = None
    covers: Literal["all", "patches"] = "all"
    origin: InterpolationOrigin = "google"
    sincos: Literal["big_vision", "mae"] = "big_vision"
    rotary_base: float = 100.0

    def __post_init__(self) -> None:
        check_positive("positions.rotary_base", self.rotary_base)
        if self.kind not in POSITION_KINDS:
            expected, hint = f"one of: {', '.join(POSITION_KINDS)}", did_you_mean(self.kind, POSITION_KINDS)
            raise ConfigError("positions.kind is not valid", expected=expected, got=self.kind, hint=hint)
        injections = POSITION_KINDS[self.kind].injections
        if self.injection is not None and self.injection not in injections:
            message, expected = f"{self.kind} positions cannot be injected there", " or ".join(injections)
            raise ConfigError(message, expected=f"injection = {expected}", got=self.injection)

    @property
    def injection_point(self) -> Injection:
        """The injection, with the default of the kind filled in."""
        return self.injection or POSITION_KINDS[self.kind].injections[0]

    @property
    def role(self) -> PositionRole | None:
        """The way in which positions act; see `PositionKind`."""
        return POSITION_KINDS[self.kind].role

    @property
    def is_additive(self) -> bool:
        """Whether positions are a table that is added to the tokens."""
        return self.role == "table"


# Transformer blocks, tokens and heads


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Variations of the paper's attention. `dropout` is the rate for attention weights in training."""

    qkv_bias: bool = True
    qk_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("attention.dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Encoder blocks. The defaults are those of the released code.

    Args:
        layer_scale: Initial value of a learned scale on each residual branch; None for no scale.
        axial: Split each block in two that attend along rows and along columns (appendix D.6).
    """

    attention: AttentionConfig = AttentionConfig()
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    layer_scale: float | None = None
    axial: bool = False

    def __post_init__(self) -> None:
        check_positive("block.norm_eps", self.norm_eps)


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """Learned tokens in front of the patches. `class_token` None means: if the pooling reads it."""

    class_token: bool | None = None
    distillation: bool = False
    registers: int = 0


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Dropout rates in training.

    Args:
        dense: After every dense layer but the qkv projection, and after the position embeddings (appendix B.1).
        stochastic_depth: Residual branches per image; grows linearly to this rate in the last block.
        patches: Patches removed from the sequence.
    """

    dense: float = 0.0
    stochastic_depth: float = 0.0
    patches: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            check_fraction(f"dropout.{name}", rate)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Layers between the encoder and the logits.

    Args:
        pre_logits: Hidden width of the pre-training head; None for the linear head of fine-tuning.
        bias: Initial bias of the classifier; -10 for the sigmoid loss of ImageNet-21k and JFT.
        norm: Position of the last LayerNorm: before pooling (the paper) or after it (MAE).
    """

    pre_logits: int | None = None
    bias: float = 0.0
    norm: Literal["before_pooling", "after_pooling"] = "before_pooling"

    def __post_init__(self) -> None:
        check_positive("head.pre_logits", self.pre_logits)


# ResNets


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """ResNet of a hybrid.

    Args:
        units: Bottleneck units per stage; may be empty.
        root_width: Channels after the root.
        root: "standard" is a 7×7 convolution with stride 2, then max pooling; "small", for small images, a 3×3
            convolution with stride 1; "stack", for small budgets, three 3×3 convolutions of which two have stride 2.
        root_units: Residual units of a stacked root after each of its two strided convolutions.
        origin: Library whose arithmetic it follows.
    """

    units: tuple[int, ...] = (3, 4, 9)
    root_width: int = 64
    root: RootKind = "standard"
    root_units: tuple[int, int] = (0, 0)
    origin: ResNetOrigin = "google"

    def __post_init__(self) -> None:
        _check_resnet(self)

    @property
    def stride(self) -> int:
        """Image pixels per cell of the feature map: that of the root, doubled by each stage after the first."""
        return ROOT_STRIDES[self.root] * 2 ** max(len(self.units) - 1, 0)

    @property
    def width(self) -> int:
        """Channels of the feature map."""
        return self.root_width * 2 ** (len(self.units) - 1) * EXPANSION if self.units else self.root_width


@dataclass(frozen=True, kw_only=True)
class BiTConfig:
    """Big Transfer ResNet v2; `root`, `root_units` and `origin` as above.

    `width_factor` multiplies ResNet's widths; a fraction gives the narrow networks of small budgets.
    """

    units: tuple[int, ...] = (3, 4, 6, 3)
    width_factor: int | float = 1
    channels: int = 3
    image_size: Size = 224
    num_classes: int = 1000
    root: RootKind = "standard"
    root_units: tuple[int, int] = (0, 0)
    origin: ResNetOrigin = "google"

    def __post_init__(self) -> None:
        if not self.units:
            raise ConfigError("a ResNet needs at least one stage", expected="units of one or more stages", got=())
        _check_resnet(self)
        check_positive("channels", self.channels)
        check_positive("image_size", min(pair(self.image_size)))
        check_not_negative("num_classes", self.num_classes)

    @property
    def root_width(self) -> int:
        """Channels after the root."""
        return round(64 * self.width_factor)

    @property
    def width(self) -> int:
        """Channels of the last feature map."""
        return self.root_width * 2 ** (len(self.units) - 1) * EXPANSION

    @property
    def num_features(self) -> int:
        """F, the number of features that the head reads."""
        return self.width


def norm_groups(width: int) -> int:
    """Return the groups of GroupNorm for a number of channels: the paper's 32, or groups of 8 in narrow ResNets.

    >>> norm_groups(64), norm_groups(48)
    (32, 6)
    """
    return GROUPS if width % GROUPS == 0 else width // NARROW_GROUP


def _check_resnet(config: BackboneConfig | BiTConfig) -> None:
    if any(count < 1 for count in config.units):
        raise ConfigError("every ResNet stage needs a unit", expected="units ≥ 1", got=config.units)
    multiple = 4 * STACK_GROUP if config.root == "stack" else NARROW_GROUP
    if config.root_width < 1 or config.root_width % multiple:
        message = "the ResNet's root width is not divisible by the groups of its norm"
        raise ConfigError(message, expected=f"a multiple of {multiple}", got=config.root_width)
    if min(config.root_units) < 0 or (any(config.root_units) and config.root != "stack"):
        raise ConfigError(
            "only a stacked root has residual units",
            expected="root=stack and root_units ≥ 0, or root_units=[0, 0]",
            got=f"root={config.root}, root_units={list(config.root_units)}",
        )


# Vision Transformer


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Vision Transformer; the defaults are ViT-B/16.

    With a `backbone` the model is a hybrid, and `patch_size` is in cells of the backbone's feature map.
    """

    image_size: Size = 224
    patch_size: Size = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    num_classes: int = 1000
    pooling: Pooling = "class"
    backbone: BackboneConfig | None = None
    positions: PositionConfig = PositionConfig()
    tokens: TokenConfig = TokenConfig()
    block: BlockConfig = BlockConfig()
    dropout: DropoutConfig = DropoutConfig()
    head: HeadConfig = HeadConfig()

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_tokens(self)
        if self.dropout.patches:
            check_patches_removable(self)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        stride = self.backbone.stride if self.backbone else 1
        height, width = pair(self.patch_size)
        return patch_grid(self.image_size, patch_size=(stride * height, stride * width))

    @property
    def patches(self) -> int:
        """N, the number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def class_tokens(self) -> int:
        """Number of tokens that represent the image: class token and distillation token."""
        setting = self.tokens.class_token
        class_token = "class" in self.pooling if setting is None else setting
        return int(class_token) + int(self.tokens.distillation)

    @property
    def prefix(self) -> int:
        """Number of tokens in front of the patches."""
        return self.class_tokens + self.tokens.registers

    @property
    def prefix_positions(self) -> int:
        """Number of prefix tokens that have a row in the position table."""
        return self.class_tokens if self.positions.covers == "all" else 0

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.width // self.heads

    @property
    def num_features(self) -> int:
        """F, the number of features that the head reads."""
        if self.tokens.distillation or self.pooling == "class_mean":
            return 2 * self.width
        return self.head.pre_logits or self.width


def patch_grid(image_size: Size, *, patch_size: Size) -> tuple[int, int]:
    """Return the rows and columns of patches in an image, which the patch must divide.

    >>> patch_grid(224, patch_size=16), patch_grid((224, 320), patch_size=32)
    ((14, 14), (7, 10))
    """
    (height, width), (patch_height, patch_width) = pair(image_size), pair(patch_size)
    if min(height, width, patch_height, patch_width) < 1:
        got = f"an image of {height}×{width} in patches of {patch_height}×{patch_width}"
        raise ConfigError("image and patch sizes must be positive", expected="1 pixel or more", got=got)
    if height % patch_height or width % patch_width:
        nearest = tuple(max(1, round(a / b)) * b for a, b in ((height, patch_height), (width, patch_width)))
        raise ConfigError(
            "the patch does not divide the image",
            expected=f"multiples of {patch_height}×{patch_width}",
            got=f"{height}×{width}",
            hint=f"use an image size of {nearest[0]}×{nearest[1]}, or another patch size",
        )
    return height // patch_height, width // patch_width


def _check_sizes(config: ViTConfig) -> None:
    for name in ("channels", "width", "depth", "heads", "mlp_dim"):
        check_positive(name, getattr(config, name))
    check_not_negative("num_classes", config.num_classes)
    check_not_negative("tokens.registers", config.tokens.registers)
    sizes = {name: getattr(config, name) for name in LIMITS} | {"image_size": max(pair(config.image_size))}
    for name, size in sizes.items():
        if size > LIMITS[name]:
            raise ConfigError(f"{name} is larger than any model's", expected=f"at most {LIMITS[name]:,}", got=size)
    config.grid  # noqa: B018  the property raises
    if config.width % config.heads:
        expected, heads = f"heads that divide {config.width}", max(1, config.width // 64)
        hint = f"the paper's heads are 64 wide: try heads={heads}"
        raise ConfigError("the heads do not divide the width", expected=expected, got=config.heads, hint=hint)
    kind = POSITION_KINDS[config.positions.kind]
    for name, width, multiple in (
        ("the width of a head", config.head_width, kind.head_width_multiple),
        ("the width", config.width, kind.width_multiple),
    ):
        if width % multiple:
            message = f"{name} does not suit {config.positions.kind} positions"
            raise ConfigError(message, expected=f"a multiple of {multiple}", got=width)


def _check_tokens(config: ViTConfig) -> None:
    if config.tokens.class_token is False and "class" in config.pooling:
        expected, hint = "tokens.class_token = true", "use pooling=mean or pooling=map for a model without one"
        raise ConfigError("class pooling reads the class token", expected=expected, got="false", hint=hint)
    if config.pooling == "class_mean" and config.head.pre_logits:
        raise ConfigError("class_mean pooling needs a linear head", expected="no head.pre_logits")
    if config.tokens.distillation and (config.pooling != "class" or config.head.pre_logits):
        raise ConfigError(
            "a distillation token needs a class token and a linear head",
            expected="pooling = class and no head.pre_logits",
            got=f"pooling = {config.pooling}, head.pre_logits = {config.head.pre_logits}",
        )
    if config.block.axial and (config.prefix or config.positions.role in ("bias", "rotation")):
        raise ConfigError(
            "axial attention takes patches only",
            expected="pooling = mean or map, no class token or registers, and positions that are added",
            got=f"pooling = {config.pooling}, {config.prefix} prefix tokens, {config.positions.kind} positions",
        )


def check_patches_removable(config: ViTConfig) -> None:
    """Raise unless patches can be removed from the sequence without changing the positions of the others."""
    injection, axial = config.positions.injection_point, config.block.axial
    if axial or injection != "stem":
        raise ConfigError(
            "patches can be removed only if all positions are added at the stem",
            expected="positions.injection = stem and no axial blocks",
            got=f"{config.positions.kind} positions, injection = {injection}, axial = {axial}",
        )
