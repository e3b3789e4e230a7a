"""Tokens go in, tokens that have looked at each other come out (MSA of equation 2; appendix A)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import check_share
from vitkit.core.shapes import Float, Tensor
from vitkit.model.positions import RelativePositions, Rotary


class Projections(NamedTuple):
    """What each head asks, offers and carries, with any bias on the logits."""

    queries: Float[Tensor, "B A Q K"]
    keys: Float[Tensor, "B A L K"]
    values: Float[Tensor, "B A L K"]
    bias: Float[Tensor, "B A Q L"] | None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Variations on the paper's attention; `dropout` is the share of attention weights left out in training."""

    qkv_bias: bool = True
    qk_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_share("attention.dropout", self.dropout)


class Attention(nn.Module):
    """Multi-head self-attention on the fused kernel.

    `weights` computes what the fused kernel does not show, beside it and only when asked.
    """

    def __init__(self, config: AttentionConfig, *, width: int, heads: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.heads = heads
        self.weight_dropout = config.dropout
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.q_norm = nn.LayerNorm(width // heads, eps=norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=norm_eps) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def heads_first(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B A L K"]:
        """The width split among the heads, as a view: copying, or einops in every layer, would show at Ti size."""
        return tokens.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def project(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
        rows: int | None = None,
    ) -> Projections:
        """Queries (of the first `rows` tokens), keys and values of each head, with their positions in them."""
        queries, keys, values = (self.heads_first(part) for part in self.qkv(tokens).chunk(3, dim=2))
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        if rotary:
            queries, keys = rotary(queries), rotary(keys)
        if rows is not None:
            queries = queries[:, :, :rows]
        return Projections(queries, keys, values, relative(queries) if relative else None)

    def forward(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
        rows: int | None = None,
    ) -> Float[Tensor, "B Q D"]:
        """New values of the first `rows` tokens (of all, if None), drawn from all tokens."""
        queries, keys, values, bias = self.project(tokens, rotary=rotary, relative=relative, rows=rows)
        dropout = self.weight_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def shown(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """The same values computed from weights that are there to be seen, and those, for gradients to pass through."""
        projections = self.look(tokens, rotary=rotary, relative=relative)
        weights = self.weights(projections)
        return self.proj((weights @ projections.values).transpose(1, 2).flatten(2)), weights

    def weights(self, projections: Projections) -> Float[Tensor, "B A Q L"]:
        """How much each token looks at each other one: softmax(q kᵀ / √K), one head at a time to bound memory."""
        queries, keys, _, bias = projections
        weights = queries.new_empty(*queries.shape[:3], keys.shape[2])
        for head in range(self.heads):
            scaled = queries[:, head] * queries.shape[-1] ** -0.5
            logits = scaled @ keys[:, head].transpose(1, 2)
            if bias is not None:
                logits += bias[:, head]
            if torch.is_grad_enabled():
                weights[:, head] = torch.softmax(logits, dim=-1)
            else:
                torch.softmax(logits, dim=-1, out=weights[:, head])
        return weights

    def look(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
    ) -> Projections:
        """Queries, keys and values over the whole sequence, for `weights` and for whoever wants to look inside."""
        return self.project(tokens, rotary=rotary, relative=relative)


class AxialAttention(Attention):
    """Attention within each row, or within each column, of the patch grid (D.6)."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        width: int,
        heads: int,
        axis: Literal["row", "column"],
        grid: tuple[int, int],
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(config, width=width, heads=heads, norm_eps=norm_eps)
        self.axis = axis
        self.grid = grid

    def forward(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
        rows: int | None = None,
    ) -> Float[Tensor, "B Q D"]:
        """New values of the first `rows` tokens, each drawn from the tokens of its line."""
        flat, lines = "B (row column) D", {"row": "(B row) column D", "column": "(B column) row D"}[self.axis]
        sizes = {"row": self.grid[0], "column": self.grid[1]}
        mixed = super().forward(rearrange(tokens, f"{flat} -> {lines}", **sizes))
        return rearrange(mixed, f"{lines} -> {flat}", **sizes)[:, :rows]

    def look(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
    ) -> Projections:
        """As in full attention, with a bias that closes everything outside the token's line."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        line = place // self.grid[1] if self.axis == "row" else place % self.grid[1]
        closed = torch.where(line[:, None] == line, 0.0, -torch.inf).to(tokens.dtype)
        return self.project(tokens)._replace(bias=closed.expand(tokens.shape[0], self.heads, -1, -1))
