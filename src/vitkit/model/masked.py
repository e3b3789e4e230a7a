"""A ViT goes in; a model around it that is asked for hidden patches comes out: masked prediction, or an autoencoder.

    masked       images → patches → some replaced → + positions → encode → norm → a head at the replaced places
    autoencoder  images → the visible patches alone → encode → norm → a light decoder that fills in the others

Both use only the ViT's four steps. What is trained is the whole; what is kept of it is the encoder.
"""

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import nn

from vitkit.core.errors import ConfigError, check_positive
from vitkit.core.shapes import Bool, Float, Int, Tensor, pair
from vitkit.model.config import ViTConfig, patches_may_be_left_out
from vitkit.model.encoder import Block, blocks
from vitkit.model.initialise import initialise, normal, xavier_uniform
from vitkit.model.patches import select_patches
from vitkit.model.positions import sincos_2d
from vitkit.model.vit import ViT

Target = Literal["mean_colour", "downsized", "pixels"]

LEVELS = 8
"""Colours are told apart at 3 bits a channel (appendix B.1.2)."""
DOWNSIZED = 4
"""Rows and columns of a downsized patch."""


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """Masked patch prediction (appendix B.1.2): which share of patches is corrupted and how, and what is asked of them.

    Of the `corrupted`, the share `mask` becomes the learned [mask] embedding and the share `other` the embedding of
    another patch of the same image; the rest stays as it is. `target` is the mean colour of the patch at 3 bits a
    channel, the same of each cell of the patch downsized to 4 × 4, or all of its pixels.
    """

    target: Target = "mean_colour"
    corrupted: float = 0.5
    mask: float = 0.8
    other: float = 0.1

    def __post_init__(self) -> None:
        for name in ("corrupted", "mask", "other"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"objective.masked.{name} is not a share", expected="0 ≤ share ≤ 1", got=getattr(self, name)
                )
        check_positive("objective.masked.corrupted", self.corrupted)
        if self.mask + self.other > 1.0 + 1e-9:
            raise ConfigError(
                "objective.masked.mask and objective.masked.other are shares of the same patches",
                expected="a sum of at most 1",
                got=self.mask + self.other,
            )


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """The masked autoencoder (He et al., 2021): the share of patches that is hidden, and the decoder.

    With `normalise` each hidden patch is asked for with mean 0 and variance 1. The decoder's defaults are MAE's.
    """

    hidden: float = 0.75
    width: int = 512
    depth: int = 8
    heads: int = 16
    normalise: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.hidden < 1.0:
            raise ConfigError("objective.autoencoder.hidden is not a share", expected="0 < share < 1", got=self.hidden)
        for name in ("width", "depth", "heads"):
            check_positive(f"objective.autoencoder.{name}", getattr(self, name))
        if self.width % 4 or self.width % self.heads:
            raise ConfigError(
                "objective.autoencoder.width is shared out among heads, and among the parts of its positions",
                expected=f"a multiple of 4 and of {self.heads}",
                got=self.width,
            )


class Pretraining(nn.Module):
    """A model around an encoder, whose parameters are named `encoder.…`; all others end with the pre-training."""

    encoder: ViT

    def __init__(self, encoder: ViT) -> None:
        super().__init__()
        self.encoder = encoder

    def encoded(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """z_L after the last norm, wherever that stands in the encoder, of the prefix and of the patches."""
        return self.encoder.fc_norm(self.encoder.norm(self.encoder.encode(tokens).tokens))


ENCODER = "encoder."
"""What the names of an encoder's parameters begin with inside a model of pre-training."""


def encoder_of(model: nn.Module) -> nn.Module:
    """The model that a run is about: the one inside a model of pre-training, or the model itself.

    >>> vit = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=0))
    >>> encoder_of(MaskedPatches(vit, MaskedConfig())) is encoder_of(vit) is vit
    True
    """
    return model.encoder if isinstance(model, Pretraining) else model


class MaskedPatches(Pretraining):
    """Predicts what corrupted patches were (appendix B.1.2): one linear head on their tokens.

    >>> vit = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=0))
    >>> sources, masked = torch.arange(4)[None], torch.tensor([[True, False, False, False]])
    >>> MaskedPatches(vit, MaskedConfig())(torch.rand(1, 3, 8, 8), sources, masked, torch.tensor([[0, 2]])).shape
    torch.Size([1, 2, 1, 512])
    """

    def __init__(self, encoder: ViT, config: MaskedConfig, *, generator: torch.Generator | None = None) -> None:
        patches_stand_alone(encoder.config)
        super().__init__(encoder)
        self.settings = config
        leave_pooling_alone(encoder)
        self.questions, self.answers = answers(config.target, encoder.config)
        width = encoder.config.width
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.mask_head = nn.Linear(width, self.questions * self.answers)
        with torch.no_grad():
            normal(self.mask_token, generator, deviation=0.02)
            dense(self.mask_head, generator)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        sources: Int[Tensor, "B N"],
        masked: Bool[Tensor, "B N"],
        places: Int[Tensor, "B asked"],
    ) -> Float[Tensor, "B asked questions answers"]:
        """What is said of the patches at `places`.

        Each patch has the embedding of the patch that `sources` names, or where it is `masked` the learned one.
        Positions are added afterwards: a masked token knows where it is, and nothing else.
        """
        encoder = self.encoder
        patches = select_patches(encoder.patch_embed(images), sources)
        patches = torch.where(masked[:, :, None], self.mask_token.to(patches.dtype), patches)
        tokens = self.encoded(encoder.sequence(patches))[:, encoder.config.prefix :]
        return self.mask_head(select_patches(tokens, places)).unflatten(2, (self.questions, self.answers))


def answers(target: Target, config: ViTConfig) -> tuple[int, int]:
    """How many things are asked of a patch, and between how many answers, or for how many numbers.

    >>> answers("mean_colour", ViTConfig()), answers("downsized", ViTConfig(channels=1)), answers("pixels", ViTConfig())
    ((1, 512), (16, 8), (1, 768))
    """
    height, width = pair(config.patch_size)
    if target == "pixels":
        return 1, height * width * config.channels
    if config.channels > 3:
        raise ConfigError(
            "colour classes are for images of at most three channels",
            expected="objective.masked.target=pixels",
            got=f"{target}, and {config.channels} channels",
        )
    if target == "downsized" and min(height, width) < DOWNSIZED:
        raise ConfigError(
            "the patch is too small to be downsized",
            expected=f"{DOWNSIZED}×{DOWNSIZED} pixels or more",
            got=f"{height}×{width}",
            hint="use objective.masked.target=mean_colour or pixels",
        )
    return DOWNSIZED**2 if target == "downsized" else 1, LEVELS**config.channels


class MaskedAutoencoder(Pretraining):
    """Fills in hidden patches from the visible ones, which are all that its encoder sees (MAE).

    The decoder's parameters have the names of MAE's released code, and its predictions their order: the pixels of a
    patch row by row, the channels of each together.

    >>> vit = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=0))
    >>> model = MaskedAutoencoder(vit, AutoencoderConfig(width=8, depth=1, heads=2))
    >>> model(torch.rand(1, 3, 8, 8), torch.tensor([[1]]), torch.tensor([[0, 2, 3]])).shape
    torch.Size([1, 3, 48])
    """

    def __init__(self, encoder: ViT, config: AutoencoderConfig, *, generator: torch.Generator | None = None) -> None:
        patches_stand_alone(encoder.config)
        patches_may_be_left_out(encoder.config)
        super().__init__(encoder)
        self.settings = config
        leave_pooling_alone(encoder)
        of_encoder = encoder.config
        height, width = pair(of_encoder.patch_size)
        self.decoder_embed = nn.Linear(of_encoder.width, config.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.width))
        positions = sincos_2d(of_encoder.grid, width=config.width, like="mae", prefix=of_encoder.prefix)
        self.decoder_pos_embed = nn.Parameter(positions, requires_grad=False)
        self.decoder_blocks = blocks(
            replace(of_encoder.block, axial=False, layer_scale=None),
            depth=config.depth,
            width=config.width,
            heads=config.heads,
            mlp_dim=4 * config.width,
            grid=of_encoder.grid,
            dropout=0.0,
            stochastic_depth=0.0,
        )
        self.decoder_norm = nn.LayerNorm(config.width, eps=of_encoder.block.norm_eps)
        self.decoder_pred = nn.Linear(config.width, height * width * of_encoder.channels)
        with torch.no_grad():
            normal(self.mask_token, generator, deviation=0.02)
            for layer in (self.decoder_embed, self.decoder_pred):
                dense(layer, generator)
            as_encoder = nn.Module()
            as_encoder.blocks = self.decoder_blocks  # the table of starting values knows blocks by this name
            initialise(as_encoder, gated_mlp=of_encoder.block.activation == "swiglu", generator=generator)

    def forward(
        self, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B kept"], places: Int[Tensor, "B asked"]
    ) -> Float[Tensor, "B asked P"]:
        """The pixels of the patches at `places`, from the visible patches."""
        return self.decode(self.encode_visible(images, visible), visible, places)

    def encode_visible(
        self, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B kept"]
    ) -> Float[Tensor, "B L D"]:
        """The encoder's output for the prefix and the visible patches."""
        return self.encoded(self.encoder.embed(images, visible=visible))

    def decode(
        self, tokens: Float[Tensor, "B L D"], visible: Int[Tensor, "B kept"], places: Int[Tensor, "B asked"]
    ) -> Float[Tensor, "B asked P"]:
        """The decoder's answer: the mask token stands wherever a patch was hidden, and all tokens have their place."""
        prefix, patches = self.encoder.config.prefix, self.encoder.config.patches
        tokens = self.decoder_embed(tokens)
        width = tokens.shape[2]
        everywhere = self.mask_token.to(tokens.dtype).expand(tokens.shape[0], patches, -1)
        put = everywhere.scatter(1, visible[:, :, None].expand(-1, -1, width), tokens[:, prefix:])
        tokens = torch.cat([tokens[:, :prefix], put], dim=1) + self.decoder_pos_embed
        for block in cast("list[Block]", self.decoder_blocks):
            tokens = block(tokens)
        return self.decoder_pred(self.decoder_norm(select_patches(tokens[:, prefix:], places)))


def dense(layer: nn.Linear, generator: torch.Generator | None) -> None:
    """Set a dense layer as the released code of both papers does."""
    xavier_uniform(layer.weight, generator)
    layer.bias.zero_()


def leave_pooling_alone(encoder: ViT) -> None:
    """What follows the last norm is asked for nothing, and so has nothing to learn from."""
    for unread in (encoder.attn_pool, encoder.pre_logits, encoder.head):
        if unread is not None:
            unread.requires_grad_(False)


def patches_stand_alone(config: ViTConfig) -> None:
    """A patch that is hidden must not be seen by its neighbours, and which are hidden is for the objective to say."""
    if config.backbone is not None:
        raise ConfigError(
            "a hybrid's patches have seen their neighbours, and hiding one hides nothing",
            expected="a ViT without backbone",
            hint="take a plain model such as B/16, or objective.name=supervised",
        )
    if config.dropout.patches:
        raise ConfigError(
            "patches are hidden, and cannot be left out at random as well",
            expected="dropout.patches=0",
            got=config.dropout.patches,
        )
