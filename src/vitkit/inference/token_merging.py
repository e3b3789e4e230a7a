"""Token merging (Bolya et al., "Token Merging: Your ViT But Faster", 2023, section 3).

Between attention and MLP, tokens alternate between two sets. Each token of the first set is matched with the token of
the second whose keys are most similar, and the r most similar pairs are replaced by their mean, weighted by the number
of patches they represent. Attention and pooling weight each token by that number (proportional attention). No training
is needed. Class, distillation and register tokens are never merged.
"""

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.config import check_patches_removable
from vitkit.model.encoder import Block
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model


def check_merging(model: Model, merge: int) -> None:
    """Raise ConfigError if the tokens of a model cannot be merged."""
    if merge < 0:
        raise ConfigError("the number of merged tokens cannot be negative", expected="merge ≥ 0", got=merge)
    if merge == 0:
        return
    if not isinstance(model, ViT):
        raise ConfigError("only Vision Transformers have tokens to merge", got="a ResNet", hint="leave merge at 0")
    try:
        check_patches_removable(model.config)
    except ConfigError as error:
        positions, axial = model.config.positions, model.config.block.axial
        got = f"{positions.kind} positions, injection = {positions.injection_point}, axial = {axial}"
        expected, hint = "positions at the stem and no axial blocks", "leave merge at 0 for this model"
        message = "tokens can be merged only if positions are added at the stem alone"
        raise ConfigError(message, expected=expected, got=got, hint=hint) from error


class TokenMergingViT(nn.Module):
    """A ViT, eager or packed, that merges up to `merge` pairs of tokens in each layer.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, num_classes=10, settings={"depth": 3}).eval()
    >>> TokenMergingViT(model, merge=4).tokens_per_layer()
    [17, 13, 9]
    """

    def __init__(self, model: ViT, *, merge: int) -> None:
        super().__init__()
        check_merging(model, merge)
        self.model, self.merge = model, merge

    @property
    def head(self) -> nn.Module:
        """The model's head."""
        return self.model.head

    def tokens_per_layer(self) -> list[int]:
        """Return the number of tokens in the attention of each layer."""
        config = self.model.config
        patches = [config.patches]
        for _ in self.model.blocks[1:]:
            patches.append(patches[-1] - pair_count(patches[-1], merge=self.merge))
        return [config.prefix + count for count in patches]

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        tokens, sizes = self.model.embed(images), None
        config, last = self.model.config, len(self.model.blocks) - 1
        for layer, block in enumerate(self.model.blocks):
            rows = config.class_tokens if config.pooling == "class" and layer == last else None
            tokens, sizes = self.block_forward(cast("Block", block), tokens, sizes, rows=rows)
        return self.pool(tokens, sizes)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        return self.head(self.features(images))

    def block_forward(
        self, block: Block, tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None, *, rows: int | None
    ) -> tuple[Float[Tensor, "B L2 D"], Float[Tensor, "B L2"] | None]:
        """Run one block with merging between attention and MLP; with `rows`, only for these first tokens, unmerged."""
        attention, prefix = block.attn, self.model.config.prefix
        queries, keys, values, _ = attention.project(block.norm1(tokens), rows=rows)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=log_size_bias(sizes, keys))
        residual = tokens if rows is None else tokens[:, :rows]
        tokens = residual + block.ls1(attention.proj(mixed.transpose(1, 2).flatten(2)))
        if rows is not None:
            sizes = None if sizes is None else sizes[:, :rows]
        elif count := pair_count(tokens.shape[1] - prefix, merge=self.merge):
            match = match_tokens(keys.mean(dim=1), merge=count, prefix=prefix)
            tokens, sizes = merge_tokens(tokens, sizes, match, prefix=prefix)
        return tokens + block.ls2(block.mlp(block.norm2(tokens))), sizes

    def pool(self, tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None) -> Float[Tensor, "B F"]:
        """Pool the tokens (equation 4), each weighted by its number of patches."""
        model, config = self.model, self.model.config
        if sizes is None or config.pooling == "class":
            return model.pool_layer(tokens)
        tokens = model.norm(tokens)
        if model.attn_pool is not None:
            features = model.attn_pool(tokens, bias=log_size_bias(sizes, tokens))
        else:
            patches, counts = tokens[:, config.prefix :], sizes[:, config.prefix :, None].to(tokens.dtype)
            features = (patches * counts).sum(dim=1, keepdim=True) / config.patches
        if config.pooling == "class_mean":
            features = torch.cat([tokens[:, :1], features], dim=1)
        return cast("Tensor", model.pre_logits(model.fc_norm(features).flatten(1)))


class Match(NamedTuple):
    """Indices of the first set's kept and merged tokens, and for each merged one its target in the second set."""

    unmerged: Int[Tensor, "B unmerged"]
    merged: Int[Tensor, "B merged"]
    targets: Int[Tensor, "B merged"]


def pair_count(patches: int, *, merge: int) -> int:
    """Return the number of pairs to merge: at most half of the patches per layer."""
    return min(merge, patches // 2)


def match_tokens(keys: Float[Tensor, "B L K"], *, merge: int, prefix: int) -> Match:
    """Match tokens by bipartite soft matching. Tokens of the prefix are neither merged nor targets."""
    keys = functional.normalize(keys.float(), dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    similarity = first @ second.transpose(1, 2)
    similarity[:, : (prefix + 1) // 2] = -torch.inf
    similarity[:, :, : prefix // 2] = -torch.inf
    best, target = similarity.max(dim=2)
    order = best.argsort(dim=1, descending=True, stable=True)
    merged, unmerged = order[:, :merge], order[:, merge:].sort(dim=1).values
    return Match(unmerged=unmerged, merged=merged, targets=target.gather(1, merged))


def merge_tokens(
    tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None, match: Match, *, prefix: int
) -> tuple[Float[Tensor, "B L2 D"], Float[Tensor, "B L2"]]:
    """Replace matched pairs by their weighted means; return the tokens and the number of patches of each."""
    if sizes is None:
        sizes = torch.ones(tokens.shape[:2], device=tokens.device)
    weights = sizes[:, :, None]
    sums, counts = (sum_pairs(values, match, prefix=prefix) for values in (tokens * weights, weights))
    return (sums / counts).to(tokens.dtype), counts[:, :, 0]


def sum_pairs(values: Float[Tensor, "B L D"], match: Match, *, prefix: int) -> Float[Tensor, "B L2 D"]:
    """Add merged tokens to their targets; return the prefix, the rest of the first set, then the second set."""
    first, second = values[:, ::2], values[:, 1::2]

    def expand(indices: Int[Tensor, "B some"]) -> Int[Tensor, "B some D"]:
        return indices[:, :, None].expand(-1, -1, values.shape[2])

    unmerged = first.gather(1, expand(match.unmerged))
    second = second.scatter_add(1, expand(match.targets), first.gather(1, expand(match.merged)))
    if prefix < 2:  # already the first token of the first set
        return torch.cat([unmerged, second], dim=1)
    front = [(unmerged, second)[index % 2][:, index // 2, None] for index in range(prefix)]
    return torch.cat([*front, unmerged[:, (prefix + 1) // 2 :], second[:, prefix // 2 :]], dim=1)


def log_size_bias(sizes: Float[Tensor, "B L"] | None, like: Tensor) -> Float[Tensor, "B 1 1 L"] | None:
    """Return the attention bias, log(size), that weights each token by its number of patches."""
    if sizes is None:
        return None
    # Take the logarithm before rounding: bf16 cannot represent integers above 256.
    bias = sizes.to(torch.promote_types(sizes.dtype, like.dtype)).log()
    return bias.to(like.dtype)[:, None, None]
