"""The Vision Transformer. Start reading here; equation numbers are the paper's.

    images → embed → tokens → encode → tokens → pool → features → head → logits

Masked models, few-shot heads and inspection are built from these four steps and use nothing private.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitkit.core.errors import InputError, explain_arguments
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.model.attention import AxialAttention
from vitkit.model.base import ImageModel, check_config
from vitkit.model.config import POSITION_KINDS, ViTConfig, check_patches_removable
from vitkit.model.encoder import NO_CAPTURE, Block, Capture, EncoderOutput, create_blocks
from vitkit.model.heads import AttentionPool, DistilledHead, PreLogits
from vitkit.model.init import initialization_rules, initialize
from vitkit.model.patches import PatchEmbedding, sample_patches, select_patches
from vitkit.model.positions import (
    AttentionPositions,
    PositionBias,
    PositionRotation,
    PositionTable,
    adapt_positions,
    is_position_table,
    position_table,
)
from vitkit.model.resnet import Backbone


class ViT(ImageModel):
    """Vision Transformer of section 3.1, its hybrid, and later variants.

    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, width=16, depth=2, heads=2, mlp_dim=32, num_classes=10))
    >>> images = torch.rand(4, 3, 32, 32)
    >>> model(images).shape
    torch.Size([4, 10])
    >>> model.encode(model.embed(images), capture=Capture(attention=[-1])).attention[1].shape
    torch.Size([4, 2, 17, 17])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config: ViTConfig = check_config(config, ViTConfig)
        width, tokens = config.width, config.tokens

        backbone = Backbone(config.backbone, channels=config.channels) if config.backbone else None
        self.patch_embed = PatchEmbedding(config, backbone=backbone)
        self.cls_token = _learned_tokens(config.class_tokens - tokens.distillation, width)
        self.dist_token = _learned_tokens(int(tokens.distillation), width)
        self.reg_token = _learned_tokens(tokens.registers, width)
        self.dropout = nn.Dropout(config.dropout.dense)

        self.blocks = create_blocks(config)
        self._create_positions()
        self._create_head()
        self.reset_parameters()

    def _create_positions(self) -> None:
        """Create one table, one table per layer, the biases of relative positions, or nothing but a rotation."""
        config, role = self.config, self.config.positions.role
        per_layer = config.positions.injection_point == "every_layer"
        copies = len(self.blocks) if per_layer else 1
        kind = POSITION_KINDS[config.positions.kind]
        created = [kind.import_function("factory")(config) for _ in range(copies)] if role in ("table", "bias") else []
        self.pos_embed: PositionTable | None = created[0] if role == "table" and not per_layer else None
        tables = created if role == "table" and per_layer else []
        container = nn.ModuleList if tables and isinstance(tables[0], nn.Module) else nn.ParameterList
        self.layer_pos_embed = cast("Sequence[PositionTable]", container(cast("Any", tables)))
        self.relative = nn.ModuleList(created if role == "bias" else [])
        # Imported here and not in `forward`, which torch.compile must be able to trace.
        self._create_rotation = kind.import_function("factory") if role == "rotation" else None

    def _create_head(self) -> None:
        """Create the last norm, the pooling and the head."""
        config, head = self.config, self.config.head
        norm = nn.LayerNorm(config.width, eps=config.block.norm_eps)
        self.norm = norm if head.norm == "before_pooling" else nn.Identity()
        self.attn_pool = AttentionPool(config) if config.pooling == "map" else None
        self.fc_norm = norm if head.norm == "after_pooling" else nn.Identity()
        self.pre_logits = PreLogits(config.width, head.pre_logits) if head.pre_logits else nn.Identity()
        self.head = self.create_head()

    def create_head(self) -> nn.Module:
        config = self.config
        if not config.num_classes:
            return nn.Identity()
        if config.tokens.distillation:
            return DistilledHead(config.width, config.num_classes)
        return nn.Linear(config.num_features, config.num_classes)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize all parameters as the released code does."""
        config = self.config
        kind = POSITION_KINDS[config.positions.kind]
        rules = initialization_rules(
            head_bias=config.head.bias,
            layer_scale=config.block.layer_scale,
            gated_mlp=config.block.activation == "swiglu",
            fixed_positions=kind.import_function("fixed_values")(config) if kind.fixed_values else None,
        )
        initialize(self, rules, generator=generator)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """Return the features that the head reads, the representation y."""
        # With class pooling the last block computes only the rows that are read: the same numbers in less time.
        rows = self.config.class_tokens if self.config.pooling == "class" else None
        return self.pool(self.encode(self.embed(images), rows=rows))

    # The four steps

    def embed(
        self, images: Float[Tensor, "B C H W"], *, visible: Int[Tensor, "B kept"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """Return z_0, the tokens of images; with `visible`, of these patches only."""
        return self.embed_patches(self.patch_embed(images), visible=visible)

    def embed_patches(
        self, patches: Float[Tensor, "B N D"], *, visible: Int[Tensor, "B kept"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """Return z_0 = [x_class; x_p E] + E_pos (equation 1) for patch embeddings x_p E."""
        learned = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [token.expand(patches.shape[0], -1, -1) for token in learned if token is not None]
        tokens = torch.cat([*prefix, patches], dim=1)
        if self.pos_embed is not None and self.config.positions.injection_point == "stem":
            tokens = tokens + self.token_positions(self.pos_embed)
        return self.dropout(self._select_visible(tokens, visible))

    def encode(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        capture: Capture = NO_CAPTURE,
        rows: int | None = None,
        depth: int | None = None,
    ) -> EncoderOutput:
        """Apply all blocks, or the first `depth` of them (equations 2 and 3), and capture intermediate results.

        With `rows` only the first rows of z_L are computed. Captured results are computed next to the fused attention,
        layer by layer, so that memory holds no more than what is captured.
        """
        capture = capture.resolve(len(self.blocks))
        output = EncoderOutput(tokens=tokens)
        rotary = self._rotary(tokens.device)
        for layer, block in enumerate(cast("Sequence[Block]", self.blocks[:depth])):
            tokens = self._add_layer_positions(layer, tokens)
            positions = self._attention_positions(layer, rotary)
            if capture.needs_projections(layer):
                projections = block.attn.project_sequence(block.norm1(tokens), positions=positions)
                output.record(capture, layer, block.attn, projections)
                del projections
            computed_rows = rows if layer == len(self.blocks) - 1 else None
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, positions=positions, rows=computed_rows, use_reentrant=False)
            else:
                tokens = block(tokens, positions=positions, rows=computed_rows)
            if layer in capture.outputs:
                output.outputs[layer] = tokens
        output.tokens = tokens
        return output

    def encode_layer_with_weights(
        self, tokens: Float[Tensor, "B L D"], *, layer: int
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """Return one layer's output and its attention weights, through which gradients flow."""
        block = cast("Block", self.blocks[layer])
        positions = self._attention_positions(layer, self._rotary(tokens.device))
        return block.forward_with_weights(self._add_layer_positions(layer, tokens), positions=positions)

    def pool(self, encoded: EncoderOutput) -> Float[Tensor, "B F"]:
        """Return the features of encoded images: y = LN(z_L^0) (equation 4), or those of mean or attention pooling.

        Unlike timm's method of this name it includes the last norm.
        """
        if not isinstance(encoded, EncoderOutput):
            raise InputError(
                "pool() takes the output of encode(), got a tensor",
                hint="forward_head(tokens, pre_logits=True) pools normalized tokens",
            )
        return self.pool_layer(encoded.tokens)

    def pool_layer(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B F"]:
        """Return the features of the tokens of any layer, as if it were the last."""
        is_class = self.config.pooling == "class"
        return self._pool_normalized(self.norm(tokens[:, : self.config.class_tokens] if is_class else tokens))

    def _pool_normalized(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B F"]:
        config = self.config
        if config.pooling == "class":
            features = tokens[:, : config.class_tokens]
        elif self.attn_pool is not None:
            features = self.attn_pool(tokens)
        else:
            features = tokens[:, config.prefix :].mean(dim=1, keepdim=True)
        if config.pooling == "class_mean":
            features = torch.cat([tokens[:, :1], features], dim=1)
        return self.pre_logits(self.fc_norm(features).flatten(1))

    # Methods of timm's models, with the same results

    def forward_features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B L D"]:
        """Return the normalized tokens of the last layer, not pooled."""
        return self.norm(self.encode(self.embed(images)).tokens)

    def forward_head(self, tokens: Float[Tensor, "B L D"], pre_logits: bool = False) -> Float[Tensor, "B Y"]:
        """Return the logits for the output of `forward_features`; with `pre_logits`, the pooled features."""
        if tokens.ndim != 3:
            got = "×".join(map(str, tokens.shape))
            raise InputError(
                f"forward_head() takes tokens B×L×{self.config.width}, got {got}", hint="model.head(features)"
            )
        features = self._pool_normalized(tokens)
        return features if pre_logits else self.head(features)

    @explain_arguments({"n": "use indices=", "return_class_token": "use return_prefix_tokens="})
    def forward_intermediates(
        self,
        images: Float[Tensor, "B C H W"],
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Return the normalized tokens of the last layer and the outputs of chosen layers as feature maps.

        Args:
            images: A batch.
            indices: Layers, of which negative ones count from the end; a number is the last layers; None is all.
            return_prefix_tokens: Return pairs of feature map and prefix tokens.
            norm: Apply the last norm to the outputs.
            stop_early: Compute no layer after the last chosen one.
            output_fmt: "NCHW" for feature maps, "NLC" for tokens.
            intermediates_only: Return the outputs alone.
        """
        total, config = len(self.blocks), self.config
        chosen = range(total) if indices is None else range(total)[-indices:] if isinstance(indices, int) else indices
        layers = Capture(outputs=tuple(chosen)).resolve(total).outputs
        depth = max(layers) + 1 if stop_early else total
        encoded = self.encode(self.embed(images), capture=Capture(outputs=layers), depth=depth)
        intermediates: list[Any] = []
        for layer in sorted(set(layers)):
            tokens = self.norm(encoded.outputs[layer]) if norm else encoded.outputs[layer]
            prefix, patches = tokens[:, : config.prefix], tokens[:, config.prefix :]
            if output_fmt == "NCHW":
                patches = rearrange(patches, "B (H W) D -> B D H W", H=config.grid[0]).contiguous()
            intermediates.append((patches, prefix) if return_prefix_tokens and config.prefix else patches)
        return intermediates if intermediates_only else (self.norm(encoded.tokens), intermediates)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that optimizers should not decay, besides biases and norms."""
        return {"pos_embed", "cls_token", "reg_token", "dist_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that assign parameters to layers, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|dist_token|reg_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    # Changes of shape, and attention

    @explain_arguments({"img_size": "use image_size="})
    def set_input_size(self, image_size: Size | None = None, patch_size: Size | None = None) -> None:
        """Change the size of images or patches in place, by the interpolation of the weights' origin.

        Repeated changes lose detail: `vitkit.adapt` makes a copy from the original.
        """
        old = self.config
        new = replace(old, image_size=image_size or old.image_size, patch_size=patch_size or old.patch_size)
        tables = {name: table.detach() for name, table in self.named_parameters() if is_position_table(name)}
        adapted = {name: adapt_positions(name, table, old=old, new=new) for name, table in tables.items()}
        device, dtype = self.device, self.dtype
        self.config = new
        self._create_positions()
        for name, parameter in self.named_parameters():
            if name in adapted:
                parameter.data = adapted[name].to(device=device, dtype=dtype, copy=True)
        self.patch_embed.resize(pair(new.image_size), pair(new.patch_size))
        for block in cast("Sequence[Block]", self.blocks):
            if isinstance(block.attn, AxialAttention):
                block.attn.grid = new.grid
        if hasattr(self, "preprocess"):
            self.preprocess = replace(self.preprocess, image_size=new.image_size)

    def attention(
        self, images: Float[Tensor, "B C H W"], layers: Sequence[int] = (-1,)
    ) -> dict[int, Float[Tensor, "B A L L"]]:
        """Return the attention weights of chosen layers, computed next to the fused kernel."""
        if isinstance(layers, int):
            raise InputError("layers is not a list", got=layers, hint=f"use layers=[{layers}]")
        return self.encode(self.embed(images), capture=Capture(attention=tuple(layers))).attention

    def pooling_weights(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        """Return the weight of each token in `pool`: one for the class token, 1/N for patches, or attention.

        With class_mean pooling, half for the class token and half for the patches.
        """
        config = self.config
        if self.attn_pool is not None:
            return self.attn_pool.attention_weights(self.norm(tokens)).mean(dim=1)
        weights = tokens.new_zeros(tokens.shape[:2])
        first, last = (0, config.class_tokens) if config.pooling == "class" else (config.prefix, tokens.shape[1])
        weights[:, first:last] = 1 / (last - first)
        if config.pooling == "class_mean":
            weights[:, 0] = 1.0
            weights /= 2
        return weights

    def token_positions(self, positions: PositionTable) -> Float[Tensor, "1 L D"]:
        """Return E_pos with a row for every token, zero for tokens that have none in the table."""
        table, missing = position_table(positions), self.config.prefix - self.config.prefix_positions
        if missing == 0:
            return table
        prefix, patches = table.split([self.config.prefix_positions, self.config.patches], dim=1)
        return torch.cat([prefix, table.new_zeros(1, missing, table.shape[2]), patches], dim=1)

    def _select_visible(
        self, tokens: Float[Tensor, "B L D"], visible: Int[Tensor, "B kept"] | None
    ) -> Float[Tensor, "B L2 D"]:
        """Remove all patches but the visible ones; without `visible`, those that patch dropout removes in training."""
        config = self.config
        if visible is None and self.training and config.dropout.patches:
            count = max(1, round(config.patches * (1 - config.dropout.patches)))
            visible = sample_patches(tokens.shape[0], patches=config.patches, count=count, device=tokens.device)
        if visible is None:
            return tokens
        check_patches_removable(config)
        prefix, patches = tokens[:, : config.prefix], tokens[:, config.prefix :]
        return torch.cat([prefix, select_patches(patches, visible)], dim=1)

    def _add_layer_positions(self, layer: int, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        shared = self.pos_embed if self.config.positions.injection_point == "shared" else None
        positions = self.layer_pos_embed[layer] if self.layer_pos_embed else shared
        return tokens if positions is None else tokens + self.token_positions(positions)

    def _attention_positions(self, layer: int, rotary: PositionRotation | None) -> AttentionPositions:
        relatives = cast("Sequence[PositionBias]", self.relative)
        return AttentionPositions(rotary, relatives[layer % len(relatives)] if relatives else None)

    def _rotary(self, device: torch.device) -> PositionRotation | None:
        return None if self._create_rotation is None else self._create_rotation(self.config, device)


def _learned_tokens(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, width)) if count else None
