"""What a Vision Transformer can be: its configuration in the paper's words, and what cannot go together."""

from dataclasses import dataclass
from typing import Literal

from vitkit.core.errors import ConfigError, check_not_negative, check_positive, check_share
from vitkit.core.shapes import Size, pair
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.patches import patch_grid
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """Learned tokens in front of the patches. `class_token` None means: only where the pooling reads it."""

    class_token: bool | None = None
    distillation: bool = False
    registers: int = 0


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Shares left out at random in training.

    `dense` follows each dense layer but the qkv projections, and the position embeddings (appendix B.1).
    `stochastic_depth` skips a residual branch of an image, growing linearly to this share in the last block.
    `patches` leaves patches out of the sequence.
    """

    dense: float = 0.0
    stochastic_depth: float = 0.0
    patches: float = 0.0

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            check_share(f"dropout.{name}", share)


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """A Vision Transformer in the paper's words; the defaults are ViT-B/16.

    With a `backbone` the model is a hybrid, and `patch_size` counts cells of the backbone's feature map.
    """

    image_size: Size = 224
    patch_size: Size = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    classes: int = 1000
    pooling: Literal["class", "mean", "map"] = "class"
    backbone: BackboneConfig | None = None
    positions: PositionConfig = PositionConfig()
    tokens: TokenConfig = TokenConfig()
    block: BlockConfig = BlockConfig()
    dropout: DropoutConfig = DropoutConfig()
    head: HeadConfig = HeadConfig()

    def __post_init__(self) -> None:
        for rule in RULES:
            rule(self)

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
        """Tokens that stand for the whole image: the class token and the distillation token."""
        asked = self.tokens.class_token
        class_token = self.pooling == "class" if asked is None else asked
        return int(class_token) + int(self.tokens.distillation)

    @property
    def prefix(self) -> int:
        """All tokens in front of the patches."""
        return self.class_tokens + self.tokens.registers

    @property
    def placed_prefix(self) -> int:
        """Those of them that have a row in the position table."""
        return self.class_tokens if self.positions.covers == "all" else 0

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.width // self.heads

    @property
    def features(self) -> int:
        """F, the width of what the head reads."""
        if self.tokens.distillation:
            return 2 * self.width
        return self.head.pre_logits or self.width


def sizes_are_positive(config: ViTConfig) -> None:
    """Every size counts something."""
    for name in ("channels", "width", "depth", "heads", "mlp_dim"):
        check_positive(name, getattr(config, name))
    for name, count in (("classes", config.classes), ("tokens.registers", config.tokens.registers)):
        check_not_negative(name, count)


def sizes_are_possible(config: ViTConfig) -> None:
    """No model has such sizes, and to try one would take the machine's memory before it failed."""
    height, width = pair(config.image_size)
    sizes = {name: getattr(config, name) for name in ("width", "depth", "mlp_dim", "classes")}
    for name, size in {**sizes, "image_size": max(height, width)}.items():
        if size > MOST[name]:
            raise ConfigError(f"{name} is larger than any model's", expected=f"at most {MOST[name]:,}", got=size)


def patches_fill_the_image(config: ViTConfig) -> None:
    """The patch, times the backbone's stride, divides the image."""
    config.grid  # noqa: B018  the property raises


def heads_divide_the_width(config: ViTConfig) -> None:
    """Each head has an equal share of the width, in four parts if it is rotated."""
    if config.width % config.heads:
        raise ConfigError(
            "the heads do not divide the width",
            expected=f"heads that divide {config.width}",
            got=config.heads,
            hint=f"the paper's heads are 64 wide: try heads={max(1, config.width // 64)}",
        )
    if config.positions.kind == "rotary" and config.head_width % 4:
        raise ConfigError("rotary positions turn quarters of a head", expected="a multiple of 4", got=config.head_width)


def positions_divide_the_width(config: ViTConfig) -> None:
    """Positions in two dimensions share the width out between them."""
    multiple = {"learned_2d": 2, "sincos_2d": 4}.get(config.positions.kind, 1)
    if config.width % multiple:
        raise ConfigError(
            f"the width does not suit {config.positions.kind} positions",
            expected=f"a multiple of {multiple}",
            got=config.width,
        )


def pooling_finds_its_tokens(config: ViTConfig) -> None:
    """Class pooling needs the class token, and so does a distillation token."""
    if config.tokens.class_token is False and config.pooling == "class":
        raise ConfigError(
            "class pooling reads the class token",
            expected="tokens.class_token = true",
            got="false",
            hint="use pooling=mean or pooling=map for a model without one",
        )
    if config.tokens.distillation and (config.pooling != "class" or config.head.pre_logits):
        raise ConfigError(
            "the distillation token stands beside the class token, under a plain linear head",
            expected="pooling = class and no head.pre_logits",
            got=f"pooling = {config.pooling}, head.pre_logits = {config.head.pre_logits}",
        )


def axial_blocks_see_a_grid(config: ViTConfig) -> None:
    """Rows and columns hold patches only, and positions come by the table."""
    kind = config.positions.kind
    if config.block.axial and (config.prefix or kind in ("relative", "rotary")):
        raise ConfigError(
            "axial attention runs over the patch grid alone",
            expected="pooling = mean or map, no class token or registers, and positions that are added",
            got=f"pooling = {config.pooling}, {config.prefix} in front of the patches, {kind} positions",
        )


def patch_dropout_is_possible(config: ViTConfig) -> None:
    """Patch dropout needs a model that can do without patches."""
    if config.dropout.patches:
        patches_may_be_left_out(config)


def patches_may_be_left_out(config: ViTConfig) -> None:
    """A patch that is left out must not be missed by positions or attention further on."""
    place, axial = config.positions.place, config.block.axial
    if axial or place != "stem":
        raise ConfigError(
            "patches can be left out only where all positions are added at the stem",
            expected="positions.injection = stem and no axial blocks",
            got=f"{config.positions.kind} positions, injection = {place}, axial = {axial}",
        )


MOST = {"width": 10**6, "depth": 10_000, "mlp_dim": 10**7, "classes": 10**8, "image_size": 100_000}
"""Far beyond any Vision Transformer there is; a file with more in it has a slip in it, or harm."""
RULES = (
    sizes_are_positive,
    sizes_are_possible,
    patches_fill_the_image,
    heads_divide_the_width,
    positions_divide_the_width,
    pooling_finds_its_tokens,
    axial_blocks_see_a_grid,
    patch_dropout_is_possible,
)
"""What must hold between the fields of a `ViTConfig`."""
