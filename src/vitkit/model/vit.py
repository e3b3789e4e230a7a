"""The Vision Transformer: images go in, logits come out. Read this first; numbers are the paper's equations.

    images → embed → tokens → encode → tokens → pool → features → head → logits

Masked models, few-shot heads and inspection are built from these four steps and reach no deeper.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.config import ViTConfig, patches_may_be_left_out
from vitkit.model.encoder import NOTHING, Block, Encoded, Keep, blocks
from vitkit.model.heads import AttentionPool, DistilledHead, PreLogits
from vitkit.model.initialise import initialise
from vitkit.model.patches import PatchEmbedding, random_patches, select_patches
from vitkit.model.positions import (
    AdditivePositions,
    RelativePositions,
    Rotary,
    additive_positions,
    rotary_2d,
    sincos_2d,
    table_of,
)
from vitkit.model.resnet import Backbone


class ViT(nn.Module):
    """The Vision Transformer of section 3.1, its hybrid, and their later relatives.

    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, width=16, depth=2, heads=2, mlp_dim=32, classes=10))
    >>> images = torch.rand(4, 3, 32, 32)
    >>> model(images).shape
    torch.Size([4, 10])
    >>> model.encode(model.embed(images), keep=Keep(attention=[-1])).attention[1].shape
    torch.Size([4, 2, 17, 17])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width, tokens = config.width, config.tokens

        self.patch_embed = PatchEmbedding(
            image_size=config.image_size,
            channels=config.channels,
            patch_size=config.patch_size,
            width=width,
            backbone=Backbone(config.backbone, channels=config.channels) if config.backbone else None,
        )
        self.cls_token = learned_tokens(config.class_tokens - tokens.distillation, width)
        self.dist_token = learned_tokens(int(tokens.distillation), width)
        self.reg_token = learned_tokens(tokens.registers, width)
        self.dropout = nn.Dropout(config.dropout.dense)

        self.blocks = blocks(
            config.block,
            depth=config.depth,
            width=width,
            heads=config.heads,
            mlp_dim=config.mlp_dim,
            grid=config.grid,
            dropout=config.dropout.dense,
            stochastic_depth=config.dropout.stochastic_depth,
        )
        self._create_positions()
        self._create_head()
        self.reset_parameters()

    def _create_positions(self) -> None:
        """One table at the stem or for all layers, or one a layer; or relative positions for attention."""
        config, positions = self.config, self.config.positions
        table = partial(
            additive_positions, positions, grid=config.grid, width=config.width, prefix=config.placed_prefix
        )
        relative = partial(
            RelativePositions,
            patches=config.patches,
            prefix=config.prefix,
            width=config.width,
            heads=config.heads,
        )
        layers = len(self.blocks)
        one_a_layer = positions.place == "every_layer"
        self.pos_embed = table() if positions.is_additive and not one_a_layer else None
        tables = [table() for _ in range(layers)] if positions.is_additive and one_a_layer else []
        several = nn.ModuleList if positions.kind == "learned_2d" else nn.ParameterList
        self.layer_pos_embed = cast("Sequence[AdditivePositions]", several(cast("Any", tables)))
        copies = (layers if one_a_layer else 1) if positions.kind == "relative" else 0
        self.relative = nn.ModuleList(relative() for _ in range(copies))

    def _create_head(self) -> None:
        """The last norm, the pooling and the head."""
        config, head = self.config, self.config.head
        norm = nn.LayerNorm(config.width, eps=config.block.norm_eps)
        self.norm = norm if head.norm == "before_pooling" else nn.Identity()
        self.attn_pool = None
        if config.pooling == "map":
            self.attn_pool = AttentionPool(
                width=config.width,
                heads=config.heads,
                mlp_dim=config.mlp_dim,
                activation=config.block.activation,
                norm_eps=config.block.norm_eps,
            )
        self.fc_norm = norm if head.norm == "after_pooling" else nn.Identity()
        self.pre_logits = PreLogits(config.width, head.pre_logits) if head.pre_logits else nn.Identity()
        self.head: nn.Module = nn.Identity()
        if config.classes and config.tokens.distillation:
            self.head = DistilledHead(config.width, config.classes)
        elif config.classes:
            self.head = nn.Linear(config.features, config.classes)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew, as the released code does."""
        config = self.config
        fixed = None
        if config.positions.kind == "sincos_2d":
            fixed = sincos_2d(
                config.grid, width=config.width, like=config.positions.sincos, prefix=config.placed_prefix
            )
        initialise(
            self,
            head_bias=config.head.bias,
            layer_scale=config.block.layer_scale,
            gated_mlp=config.block.activation == "swiglu",
            fixed_positions=fixed,
            generator=generator,
        )

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        """Logits of images."""
        return self.head(self.features(images))

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of images, the representation y."""
        # Where only the class token is read, the last block need not compute the others: the same numbers, sooner.
        rows = self.config.class_tokens if self.config.pooling == "class" else None
        return self.pool(self.encode(self.embed(images), rows=rows).tokens)

    def embed(
        self, images: Float[Tensor, "B C H W"], *, visible: Int[Tensor, "B kept"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """z_0, the tokens of images; with `visible`, of these patches only."""
        return self.sequence(self.patch_embed(images), visible=visible)

    def sequence(
        self, patches: Float[Tensor, "B N D"], *, visible: Int[Tensor, "B kept"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """Equation 1: z_0 = [x_class; x_p E] + E_pos, from patch embeddings x_p E."""
        learned = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in learned if token is not None]
        tokens = torch.cat([*prefix, patches], dim=1)
        if self.pos_embed is not None and self.config.positions.place == "stem":
            tokens = tokens + self.token_positions(self.pos_embed)
        return self.dropout(self._visible(tokens, visible))

    def encode(self, tokens: Float[Tensor, "B L D"], *, keep: Keep = NOTHING, rows: int | None = None) -> Encoded:
        """Equations 2 and 3, L times: z_0 to z_L, and of chosen layers what `keep` asks for.

        With `rows` only the first rows of z_L are computed. What is kept is computed beside the fused attention,
        layer by layer, so that memory holds no more than what was asked for.
        """
        keep = keep.within(len(self.blocks))
        encoded = Encoded(tokens=tokens)
        rotary = self._rotary(tokens.device)
        for layer, block in enumerate(cast("Sequence[Block]", self.blocks)):
            tokens, relative = self._placed(layer, tokens), self._relative(layer)
            if keep.looks_inside(layer):
                projections = block.attn.look(block.norm1(tokens), rotary=rotary, relative=relative)
                encoded.look(keep, layer, block.attn, projections)
                del projections
            last = layer == len(self.blocks) - 1
            tokens = block(tokens, rotary=rotary, relative=relative, rows=rows if last else None)
            if layer in keep.outputs:
                encoded.outputs[layer] = tokens
        encoded.tokens = tokens
        return encoded

    def encode_shown(
        self, tokens: Float[Tensor, "B L D"], *, layer: int
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """One layer's output from its input, by way of attention weights that gradients pass through, and these."""
        block = cast("Block", self.blocks[layer])
        rotary, relative = self._rotary(tokens.device), self._relative(layer)
        return block.shown(self._placed(layer, tokens), rotary=rotary, relative=relative)

    def pool(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B F"]:
        """Equation 4: y = LN(z_L^0), or the mean over patches, or what an attention probe sees."""
        config = self.config
        if config.pooling == "class":
            features = self.norm(tokens[:, : config.class_tokens])
        elif self.attn_pool is not None:
            features = self.attn_pool(self.norm(tokens))
        else:
            features = self.norm(tokens[:, config.prefix :]).mean(dim=1)
        return self.pre_logits(self.fc_norm(features).flatten(1))

    def read_by_pool(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        """How much of each token `pool` takes: all of the class token, the same of each patch, or what a probe does."""
        config = self.config
        if self.attn_pool is not None:
            return self.attn_pool.weights(self.norm(tokens)).mean(dim=1)
        taken = tokens.new_zeros(tokens.shape[:2])
        first, last = (0, config.class_tokens) if config.pooling == "class" else (config.prefix, tokens.shape[1])
        taken[:, first:last] = 1 / (last - first)
        return taken

    def token_positions(self, positions: AdditivePositions) -> Float[Tensor, "1 L D"]:
        """E_pos with a row for every token: zeros for those that have no place of their own."""
        table, without = table_of(positions), self.config.prefix - self.config.placed_prefix
        if without == 0:
            return table
        placed, patches = table.split([self.config.placed_prefix, self.config.patches], dim=1)
        return torch.cat([placed, table.new_zeros(1, without, table.shape[2]), patches], dim=1)

    def _visible(
        self, tokens: Float[Tensor, "B L D"], visible: Int[Tensor, "B kept"] | None
    ) -> Float[Tensor, "B L2 D"]:
        """The tokens with only the visible patches: those asked for, or what patch dropout leaves in training."""
        config = self.config
        if visible is None and self.training and config.dropout.patches:
            keep = max(1, round(config.patches * (1 - config.dropout.patches)))
            visible = random_patches(tokens.shape[0], patches=config.patches, keep=keep, device=tokens.device)
        if visible is None:
            return tokens
        patches_may_be_left_out(config)
        prefix, patches = tokens[:, : config.prefix], tokens[:, config.prefix :]
        return torch.cat([prefix, select_patches(patches, visible)], dim=1)

    def _placed(self, layer: int, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """The tokens with the positions that are added in front of this layer, if any are."""
        shared = self.pos_embed if self.config.positions.place == "shared" else None
        positions = self.layer_pos_embed[layer] if self.layer_pos_embed else shared
        return tokens if positions is None else tokens + self.token_positions(positions)

    def _relative(self, layer: int) -> RelativePositions | None:
        relatives = cast("Sequence[RelativePositions]", self.relative)
        return relatives[layer % len(relatives)] if relatives else None

    def _rotary(self, device: torch.device) -> Rotary | None:
        config = self.config
        if config.positions.kind != "rotary":
            return None
        base = config.positions.rotary_base
        return rotary_2d(config.grid, head_width=config.head_width, base=base, device=device)


def learned_tokens(count: int, width: int) -> nn.Parameter | None:
    """Tokens in front of the patches, if there are any."""
    return nn.Parameter(torch.empty(1, count, width)) if count else None
