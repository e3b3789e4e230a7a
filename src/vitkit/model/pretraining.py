"""Models that wrap an encoder for self-supervised pre-training or distillation. Afterwards only the encoder is kept.

masked patches  images → patch embeddings → corrupt → embed_patches → encode → norm → linear head
autoencoder     images → visible patches → encode → norm → decoder over all patches → pixels
distillation    images → encoder → logits of two heads (DeiT), or logits and projected features
"""

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Bool, Float, Int, Tensor
from vitkit.core.sizes import pair
from vitkit.model.config import DropoutConfig, ViTConfig, check_patches_removable
from vitkit.model.encoder import Block, create_blocks
from vitkit.model.heads import DistilledHead
from vitkit.model.init import initialization_rules, initialize, normal, xavier_uniform
from vitkit.model.patches import select_patches
from vitkit.model.positions import sincos_2d
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT

ENCODER_PREFIX = "encoder."
"""Prefix of the encoder's parameter names in a `PretrainingModel`."""


class PretrainingModel(nn.Module):
    """Base of models that wrap an encoder; all other parameters are discarded after pre-training."""

    encoder: ViT

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = cast("ViT", encoder)  # a BiT only in FeatureStudent, which uses what both have

    def encode_normalized(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return z_L after the last norm, which some encoders have before and some after pooling."""
        return self.encoder.fc_norm(self.encoder.norm(self.encoder.encode(tokens).tokens))


def get_encoder(model: nn.Module) -> nn.Module:
    """Return the encoder of a `PretrainingModel`, or the model itself."""
    return model.encoder if isinstance(model, PretrainingModel) else model


class MaskedPatches(PretrainingModel):
    """Masked patch prediction (appendix B.1.2): a linear head on the tokens of corrupted patches.

    >>> vit = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, num_classes=0))
    >>> sources, masked = torch.arange(4)[None], torch.tensor([[True, False, False, False]])
    >>> MaskedPatches(vit, MaskedConfig())(torch.rand(1, 3, 8, 8), sources, masked, torch.tensor([[0, 2]])).shape
    torch.Size([1, 2, 1, 512])
    """

    def __init__(self, encoder: ViT, config: MaskedConfig, *, generator: torch.Generator | None = None) -> None:
        _check_maskable(encoder.config)
        super().__init__(encoder)
        self.config = config
        _freeze_unused_layers(encoder)
        self.output_shape = config.output_shape(encoder.config)
        width = encoder.config.width
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.mask_head = nn.Linear(width, self.output_shape[0] * self.output_shape[1])
        with torch.no_grad():
            normal(self.mask_token, generator, std=0.02)
            _initialize_dense(self.mask_head, generator)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        sources: Int[Tensor, "B N"],
        masked: Bool[Tensor, "B N"],
        indices: Int[Tensor, "B predicted"],
    ) -> Float[Tensor, "B predicted questions outputs"]:
        """Return the predictions for the patches at `indices`.

        Each patch gets the embedding of the patch that `sources` names, or the learned one where it is `masked`.
        Positions are added afterwards, so a masked token keeps its position.
        """
        encoder = self.encoder
        patches = select_patches(encoder.patch_embed(images), sources)
        patches = torch.where(masked[:, :, None], self.mask_token.to(patches.dtype), patches)
        tokens = self.encode_normalized(encoder.embed_patches(patches))[:, encoder.config.prefix :]
        return self.mask_head(select_patches(tokens, indices)).unflatten(2, self.output_shape)


class MaskedAutoencoder(PretrainingModel):
    """Masked autoencoder (MAE): the encoder sees the visible patches only, a decoder predicts the others.

    The decoder's parameters have the names of MAE's released code. Predictions have its order too: pixels of a patch
    row by row, with the channels of a pixel adjacent.

    >>> vit = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, num_classes=0))
    >>> model = MaskedAutoencoder(vit, MAEConfig(width=8, depth=1, heads=2))
    >>> model(torch.rand(1, 3, 8, 8), torch.tensor([[1]]), torch.tensor([[0, 2, 3]])).shape
    torch.Size([1, 3, 48])
    """

    def __init__(self, encoder: ViT, config: MAEConfig, *, generator: torch.Generator | None = None) -> None:
        vit = encoder.config
        _check_maskable(vit)
        check_patches_removable(vit)
        super().__init__(encoder)
        self.config = config
        _freeze_unused_layers(encoder)
        height, width = pair(vit.patch_size)
        self.decoder_embed = nn.Linear(vit.width, config.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.width))
        positions = sincos_2d(vit.grid, width=config.width, like="mae", prefix=vit.prefix)
        self.decoder_pos_embed = nn.Parameter(positions, requires_grad=False)
        decoder = replace(vit, block=replace(vit.block, layer_scale=None), dropout=DropoutConfig())
        decoder = replace(decoder, width=config.width, depth=config.depth, heads=config.heads, mlp_dim=4 * config.width)
        self.decoder_blocks = create_blocks(decoder)
        self.decoder_norm = nn.LayerNorm(config.width, eps=vit.block.norm_eps)
        self.decoder_pred = nn.Linear(config.width, height * width * vit.channels)
        with torch.no_grad():
            normal(self.mask_token, generator, std=0.02)
            for layer in (self.decoder_embed, self.decoder_pred):
                _initialize_dense(layer, generator)
            renamed = nn.Module()
            renamed.blocks = self.decoder_blocks  # the name that the initialization rules expect
            rules = initialization_rules(gated_mlp=vit.block.activation == "swiglu")
            initialize(renamed, rules, generator=generator)

    def forward(
        self, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B kept"], indices: Int[Tensor, "B predicted"]
    ) -> Float[Tensor, "B predicted P"]:
        """Return the predicted pixels of the patches at `indices`, given the visible patches."""
        return self.decode(self.encode_visible(images, visible), visible, indices)

    def encode_visible(
        self, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B kept"]
    ) -> Float[Tensor, "B L D"]:
        """Return the encoder's output for the prefix tokens and the visible patches."""
        return self.encode_normalized(self.encoder.embed(images, visible=visible))

    def decode(
        self, tokens: Float[Tensor, "B L D"], visible: Int[Tensor, "B kept"], indices: Int[Tensor, "B predicted"]
    ) -> Float[Tensor, "B predicted P"]:
        """Return the predicted pixels at `indices`; the mask token takes the place of every patch not visible."""
        prefix, patches = self.encoder.config.prefix, self.encoder.config.patches
        tokens = self.decoder_embed(tokens)
        width = tokens.shape[2]
        masked = self.mask_token.to(tokens.dtype).expand(tokens.shape[0], patches, -1)
        filled = masked.scatter(1, visible[:, :, None].expand(-1, -1, width), tokens[:, prefix:])
        tokens = torch.cat([tokens[:, :prefix], filled], dim=1) + self.decoder_pos_embed
        for block in cast("list[Block]", self.decoder_blocks):
            tokens = block(tokens)
        return self.decoder_pred(self.decoder_norm(select_patches(tokens[:, prefix:], indices)))


class DistilledViT(PretrainingModel):
    """ViT that returns the logits of both heads in training and their mean in evaluation.

    Both come from one forward call, as DistributedDataParallel requires.

    >>> from vitkit.model.pretraining_config import make_student_config
    >>> config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, num_classes=5)
    >>> model = DistilledViT(ViT(make_student_config(config, token=True)))
    >>> [logits.shape for logits in model(torch.rand(2, 3, 8, 8))]
    [torch.Size([2, 5]), torch.Size([2, 5])]
    >>> model.eval()(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """

    def forward(
        self, images: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B Y"] | tuple[Float[Tensor, "B Y"], Float[Tensor, "B Y"]]:
        head = self.encoder.head
        if self.training and isinstance(head, DistilledHead):
            return head.forward_both(self.encoder.features(images))
        return self.encoder(images)


class FeatureStudent(PretrainingModel):
    """Model that also projects its features to those of a teacher: a tuple in training, logits in evaluation.

    >>> from vitkit.model.config import BiTConfig
    >>> model = FeatureStudent(BiT(BiTConfig(units=(1,), num_classes=5)), features=7)
    >>> [output.shape for output in model(torch.rand(2, 3, 32, 32))]
    [torch.Size([2, 5]), torch.Size([2, 7])]
    """

    def __init__(self, encoder: ViT | BiT, *, features: int, generator: torch.Generator | None = None) -> None:
        super().__init__(encoder)
        self.projection = nn.Linear(encoder.num_features, features)
        if not self.projection.weight.is_meta:
            _initialize_dense(self.projection, generator)

    def forward(
        self, images: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B Y"] | tuple[Float[Tensor, "B Y"], Float[Tensor, "B F"]]:
        features = self.encoder.features(images)
        logits = self.encoder.head(features)
        return (logits, self.projection(features)) if self.training else logits


@torch.no_grad()
def _initialize_dense(layer: nn.Linear, generator: torch.Generator | None) -> None:
    xavier_uniform(layer.weight, generator)
    layer.bias.zero_()


def _freeze_unused_layers(encoder: ViT) -> None:
    """Freeze the layers after the last norm, which get no gradient in pre-training."""
    for layer in (encoder.attn_pool, encoder.pre_logits, encoder.head):
        if layer is not None:
            layer.requires_grad_(False)


def _check_maskable(config: ViTConfig) -> None:
    if config.backbone is not None:
        raise ConfigError(
            "masking needs patches that are independent of each other, and those of a hybrid overlap",
            expected="a ViT without backbone",
            hint="take a plain model such as B/16, or objective.name=supervised",
        )
    if config.dropout.patches:
        message = "patch dropout cannot be combined with masking"
        raise ConfigError(message, expected="dropout.patches=0", got=config.dropout.patches)
