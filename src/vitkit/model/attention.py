"""Multi-head self-attention (equation 2, appendix A) and its axial variant (appendix D.6)."""

from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.model.config import AttentionConfig
from vitkit.model.positions import NO_POSITIONS, AttentionPositions


class Projections(NamedTuple):
    """Queries, keys and values of every head, and the bias on the attention logits if there is one."""

    queries: Float[Tensor, "B A Q K"]
    keys: Float[Tensor, "B A L K"]
    values: Float[Tensor, "B A L K"]
    bias: Float[Tensor, "B A Q L"] | None


def scaled_dot_product_attention(
    queries: Float[Tensor, "B A Q K"],
    keys: Float[Tensor, "B A L K"],
    values: Float[Tensor, "B A L V"],
    *,
    bias: Float[Tensor, "B A Q L"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B A Q V"]:
    """Compute attention with PyTorch's fused kernel, except for training in bfloat16 on a CPU.

    There its backward pass takes two to ten times as long as that of matrix products: see bench/attention.py.

    >>> scaled_dot_product_attention(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 6)).shape
    torch.Size([1, 2, 3, 6])
    """
    if queries.dtype != torch.bfloat16 or queries.device.type != "cpu" or not queries.requires_grad:
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout)
    logits = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(2, 3)
    weights = torch.softmax(logits if bias is None else logits + bias, dim=-1)
    return functional.dropout(weights, dropout) @ values


class Attention(nn.Module):
    r"""Multi-head self-attention.

    .. math:: \mathrm{MSA}(x) = [A_1 v_1; \dots; A_k v_k]\, U, \qquad A_i = \mathrm{softmax}(q_i k_i^\top / \sqrt{d_k})

    `forward` uses `scaled_dot_product_attention`, which does not return the attention weights. `attention_weights`
    computes them next to it, one head at a time, so that only one head's logits are held in addition to the result.

    Args:
        config: Biases, normalization of queries and keys, dropout.
        width: Token dimension D.
        heads: Number of heads; must divide `width`.
        norm_eps: Epsilon of the normalization of queries and keys.
    """

    def __init__(self, config: AttentionConfig, *, width: int, heads: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.heads = heads
        self.weight_dropout = config.dropout
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.q_norm = nn.LayerNorm(width // heads, eps=norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=norm_eps) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def split_heads(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B A L K"]:
        """Split the width into heads. The result is a view: einops or a copy per layer costs time at Ti size."""
        return tokens.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def project(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS, rows: int | None = None
    ) -> Projections:
        """Compute queries (of the first `rows` tokens), keys and values, with positions applied."""
        queries, keys, values = (self.split_heads(part) for part in self.qkv(tokens).chunk(3, dim=2))
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        if positions.rotary:
            queries, keys = positions.rotary(queries), positions.rotary(keys)
        if rows is not None:
            queries = queries[:, :, :rows]
        return Projections(queries, keys, values, positions.relative(queries) if positions.relative else None)

    def forward(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS, rows: int | None = None
    ) -> Float[Tensor, "B Q D"]:
        """Return the output for the first `rows` tokens (all if None), which attend to all tokens."""
        queries, keys, values, bias = self.project(tokens, positions=positions, rows=rows)
        dropout = self.weight_dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(queries, keys, values, bias=bias, dropout=dropout)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def forward_with_weights(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """Return the output and the attention weights it was computed from; gradients flow through the weights."""
        projections = self.project_sequence(tokens, positions=positions)
        weights = self.attention_weights(projections)
        return self.proj((weights @ projections.values).transpose(1, 2).flatten(2)), weights

    def attention_weights(self, projections: Projections) -> Float[Tensor, "B A Q L"]:
        """Return softmax(q kᵀ / √d_k) for every head."""
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

    def project_sequence(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS
    ) -> Projections:
        """Return queries, keys and values over the whole sequence, as `attention_weights` takes them."""
        return self.project(tokens, positions=positions)


class AxialAttention(Attention):
    """Attention within each row, or within each column, of the patch grid (appendix D.6)."""

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
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS, rows: int | None = None
    ) -> Float[Tensor, "B Q D"]:
        """Return the output for the first `rows` tokens, each of which attends to its row or column."""
        flat, lines = "B (row column) D", {"row": "(B row) column D", "column": "(B column) row D"}[self.axis]
        sizes = {"row": self.grid[0], "column": self.grid[1]}
        mixed = super().forward(rearrange(tokens, f"{flat} -> {lines}", **sizes))
        return rearrange(mixed, f"{lines} -> {flat}", **sizes)[:, :rows]

    def project_sequence(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS
    ) -> Projections:
        """Return the projections over the whole sequence, with a bias that masks tokens of other rows or columns."""
        index = torch.arange(tokens.shape[1], device=tokens.device)
        line = index // self.grid[1] if self.axis == "row" else index % self.grid[1]
        mask = torch.where(line[:, None] == line, 0.0, -torch.inf).to(tokens.dtype)
        return self.project(tokens)._replace(bias=mask.expand(tokens.shape[0], self.heads, -1, -1))
