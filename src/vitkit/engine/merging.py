"""A Vision Transformer and a number go in, one that merges so many tokens in every layer comes out (ToMe).

Token merging is by Bolya et al., "Token Merging: Your ViT But Faster" (2023), section 3. Between attention and MLP the
tokens are dealt into two sets by turns. Each of the first set finds the one of the second whose keys are most like its
own, and the r likest pairs become one token each: their mean, weighted by how many patches they stand for. Attention
then counts a token as often as it has patches (proportional attention), and so does pooling. No training is needed. The
class token, the distillation token and registers are never merged.
"""

from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.config import patches_may_be_left_out
from vitkit.model.encoder import Block
from vitkit.model.heads import AttentionPool
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model


def check_merging(model: Model, merge: int) -> None:
    """Refuse to merge tokens of a model that needs every patch in its place."""
    if merge < 0:
        raise ConfigError("tokens to merge in a layer cannot be negative", expected="merge ≥ 0", got=merge)
    if merge == 0:
        return
    if not isinstance(model, ViT):
        raise ConfigError("only a Vision Transformer has tokens to merge", got="a ResNet", hint="leave merge at 0")
    try:
        patches_may_be_left_out(model.config)
    except ConfigError as error:
        positions, axial = model.config.positions, model.config.block.axial
        raise ConfigError(
            "tokens can be merged only where all positions are added at the stem: later ones have no place any more",
            expected="positions at the stem and no axial blocks",
            got=f"{positions.kind} positions, injection = {positions.place}, axial = {axial}",
            hint="leave merge at 0 for this model",
        ) from error


class Merging(nn.Module):
    """A ViT, as written or with its parts exchanged, that merges up to `merge` pairs of tokens in each layer.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, classes=10, settings=["depth=3"]).eval()
    >>> Merging(model, merge=4).lengths()
    [17, 13, 9]
    """

    def __init__(self, model: ViT, *, merge: int) -> None:
        super().__init__()
        check_merging(model, merge)
        self.model, self.merge = model, merge

    @property
    def head(self) -> nn.Module:
        """From features to logits, as before."""
        return self.model.head

    def lengths(self) -> list[int]:
        """The tokens that the attention of each layer sees."""
        config = self.model.config
        patches = [config.patches]
        for _ in self.model.blocks[1:]:
            patches.append(patches[-1] - pairs(patches[-1], merge=self.merge))
        return [config.prefix + count for count in patches]

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of images."""
        tokens, sizes = self.model.embed(images), None
        config, last = self.model.config, len(self.model.blocks) - 1
        for layer, block in enumerate(self.model.blocks):
            rows = config.class_tokens if config.pooling == "class" and layer == last else None
            tokens, sizes = self.through(cast("Block", block), tokens, sizes, rows=rows)
        return self.pool(tokens, sizes)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B Y"]:
        """Logits of images."""
        return self.head(self.features(images))

    def through(
        self, block: Block, tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None, *, rows: int | None
    ) -> tuple[Float[Tensor, "B L2 D"], Float[Tensor, "B L2"] | None]:
        """One block, with merging between its two halves; with `rows` only these, which are never merged."""
        attention, prefix = block.attn, self.model.config.prefix
        queries, keys, values, _ = attention.project(block.norm1(tokens), rows=rows)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=weight_of(sizes, keys))
        residual = tokens if rows is None else tokens[:, :rows]
        tokens = residual + block.ls1(attention.proj(mixed.transpose(1, 2).flatten(2)))
        if rows is not None:
            sizes = None if sizes is None else sizes[:, :rows]
        elif count := pairs(tokens.shape[1] - prefix, merge=self.merge):
            match = matched(keys.mean(dim=1), merge=count, prefix=prefix)
            tokens, sizes = merged(tokens, sizes, match, prefix=prefix)
        return tokens + block.ls2(block.mlp(block.norm2(tokens))), sizes

    def pool(self, tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None) -> Float[Tensor, "B F"]:
        """Equation 4, where every token counts as often as it has patches."""
        model, config = self.model, self.model.config
        if sizes is None or config.pooling == "class":
            return model.pool(tokens)
        tokens = model.norm(tokens)
        if model.attn_pool is not None:
            features = probed(model.attn_pool, tokens, sizes)
        else:
            patches, counts = tokens[:, config.prefix :], sizes[:, config.prefix :, None].to(tokens.dtype)
            features = (patches * counts).sum(dim=1) / config.patches
        return cast("Tensor", model.pre_logits(model.fc_norm(features).flatten(1)))


class Match(NamedTuple):
    """Who is merged into whom: indices of the first set, in order of likeness, and of their partners in the second."""

    kept: Int[Tensor, "B kept"]
    gone: Int[Tensor, "B gone"]
    into: Int[Tensor, "B gone"]


def pairs(patches: int, *, merge: int) -> int:
    """How many pairs can be merged: at most half of the patches go in one layer.

    >>> pairs(196, merge=8), pairs(5, merge=8)
    (8, 2)
    """
    return min(merge, patches // 2)


def matched(keys: Float[Tensor, "B L K"], *, merge: int, prefix: int) -> Match:
    """Bipartite soft matching: tokens are dealt out by turns, tokens of the prefix neither go nor take anyone in.

    >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.9, 0.0]]])
    >>> matched(keys, merge=1, prefix=0).gone.tolist(), matched(keys, merge=1, prefix=0).into.tolist()
    ([[0]], [[1]])
    """
    keys = functional.normalize(keys.float(), dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    likeness = first @ second.transpose(1, 2)
    likeness[:, : (prefix + 1) // 2] = -torch.inf
    likeness[:, :, : prefix // 2] = -torch.inf
    best, partner = likeness.max(dim=2)
    order = best.argsort(dim=1, descending=True, stable=True)
    gone, kept = order[:, :merge], order[:, merge:].sort(dim=1).values
    return Match(kept=kept, gone=gone, into=partner.gather(1, gone))


def merged(
    tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"] | None, match: Match, *, prefix: int
) -> tuple[Float[Tensor, "B L2 D"], Float[Tensor, "B L2"]]:
    """The tokens with pairs replaced by their weighted means, and how many patches each now stands for."""
    if sizes is None:
        sizes = torch.ones(tokens.shape[:2], device=tokens.device)
    weights = sizes[:, :, None]
    sums, counts = (together(part, match, prefix=prefix) for part in (tokens * weights, weights))
    return (sums / counts).to(tokens.dtype), counts[:, :, 0]


def together(numbers: Float[Tensor, "B L D"], match: Match, *, prefix: int) -> Float[Tensor, "B L2 D"]:
    """The sums of merged tokens: what is left of the first set, then the second, with the prefix in front again."""
    first, second = numbers[:, ::2], numbers[:, 1::2]

    def wide(indices: Int[Tensor, "B some"]) -> Int[Tensor, "B some D"]:
        return indices[:, :, None].expand(-1, -1, numbers.shape[2])

    kept = first.gather(1, wide(match.kept))
    second = second.scatter_add(1, wide(match.into), first.gather(1, wide(match.gone)))
    if prefix < 2:  # it is first of the first set, which is where it belongs
        return torch.cat([kept, second], dim=1)
    dealt = [(kept, second)[place % 2][:, place // 2, None] for place in range(prefix)]
    return torch.cat([*dealt, kept[:, (prefix + 1) // 2 :], second[:, prefix // 2 :]], dim=1)


def weight_of(sizes: Float[Tensor, "B L"] | None, like: Tensor) -> Float[Tensor, "B 1 1 L"] | None:
    """What is added to the logits of attention so that a token counts as often as it has patches: log size."""
    if sizes is None:
        return None
    # The logarithm before sizes lose digits: bf16 counts no further than 256.
    exact = sizes.to(torch.promote_types(sizes.dtype, like.dtype)).log()
    return exact.to(like.dtype)[:, None, None]


def probed(pool: AttentionPool, tokens: Float[Tensor, "B L D"], sizes: Float[Tensor, "B L"]) -> Float[Tensor, "B D"]:
    """What the probe of an attention pool sees of merged tokens."""
    keys, values = pool.offered(tokens)
    query = pool.query(tokens.shape[0])
    seen = functional.scaled_dot_product_attention(query, keys, values, attn_mask=weight_of(sizes, keys))
    pooled = pool.proj(seen.transpose(1, 2).flatten(2))
    return cast("Tensor", (pooled + pool.mlp(pool.norm(pooled)))[:, 0])
