"""Transformer encoder blocks (equations 2 and 3), and the capture of intermediate results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.model.attention import Attention, AxialAttention, Projections
from vitkit.model.config import Activation, ViTConfig
from vitkit.model.positions import NO_POSITIONS, AttentionPositions

Axis = Literal["row", "column"]


class Mlp(nn.Module):
    """Two dense layers with a GELU between them (equation 3)."""

    def __init__(self, *, width: int, mlp_dim: int, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.fc1, self.fc2 = nn.Linear(width, mlp_dim), nn.Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        hidden = self.fc1(tokens)
        if torch.is_grad_enabled():
            hidden = functional.gelu(hidden, approximate=self.approximate)
        else:
            # In place where no gradient needs the input: allocating memory takes longer than the GELU itself.
            torch.ops.aten.gelu_(hidden, approximate=self.approximate)
        return self.dropout(self.fc2(self.dropout(hidden)))


class SwiGlu(nn.Module):
    """Gated MLP: fc2(silu(g) * h), where g and h are the halves of fc1(x)."""

    def __init__(self, *, width: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * mlp_dim), nn.Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        gate, hidden = self.fc1(tokens).chunk(2, dim=-1)
        return self.dropout(self.fc2(self.dropout(functional.silu(gate) * hidden)))


def create_mlp(*, width: int, mlp_dim: int, activation: Activation, dropout: float = 0.0) -> nn.Module:
    """Create the MLP of a block or of a pooling head."""
    if activation == "swiglu":
        return SwiGlu(width=width, mlp_dim=mlp_dim, dropout=dropout)
    return Mlp(width=width, mlp_dim=mlp_dim, activation=activation, dropout=dropout)


class LayerScale(nn.Module):
    """Learned scale per channel of a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, branch: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return branch * self.gamma


class StochasticDepth(nn.Module):
    """Dropout of a residual branch for whole images in training, which scales the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        if not self.training or self.rate == 0.0:
            return branch
        mask = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * mask.to(branch.dtype) / (1.0 - self.rate)


class Block(nn.Module):
    r"""Pre-norm Transformer block (equations 2 and 3).

    .. math:: z' = \mathrm{MSA}(\mathrm{LN}(z)) + z, \qquad z'' = \mathrm{MLP}(\mathrm{LN}(z')) + z'
    """

    def __init__(self, config: ViTConfig, *, axis: Axis | None, stochastic_depth: float) -> None:
        super().__init__()
        block, width, eps, dropout = config.block, config.width, config.block.norm_eps, config.dropout.dense
        attention = Attention if axis is None else partial(AxialAttention, axis=axis, grid=config.grid)
        scale = nn.Identity if block.layer_scale is None else partial(LayerScale, width)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn: Attention = attention(block.attention, width=width, heads=config.heads, norm_eps=eps)
        self.ls1: nn.Module = scale()
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = create_mlp(width=width, mlp_dim=config.mlp_dim, activation=block.activation, dropout=dropout)
        self.ls2: nn.Module = scale()
        self.dropout = nn.Dropout(dropout)
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS, rows: int | None = None
    ) -> Float[Tensor, "B Q D"]:
        """Return the block's output for the first `rows` tokens, or for all of them."""
        residual = tokens if rows is None else tokens[:, :rows]
        branch = self.attn(self.norm1(tokens), positions=positions, rows=rows)
        tokens = residual + self.stochastic_depth(self.ls1(self.dropout(branch)))
        del branch  # free the memory before the MLP
        return self._add_mlp(tokens)

    def forward_with_weights(
        self, tokens: Float[Tensor, "B L D"], *, positions: AttentionPositions = NO_POSITIONS
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """Return the block's output and its attention weights, through which gradients flow."""
        branch, weights = self.attn.forward_with_weights(self.norm1(tokens), positions=positions)
        return self._add_mlp(tokens + self.stochastic_depth(self.ls1(self.dropout(branch)))), weights

    def _add_mlp(self, tokens: Float[Tensor, "B Q D"]) -> Float[Tensor, "B Q D"]:
        return tokens + self.stochastic_depth(self.ls2(self.mlp(self.norm2(tokens))))


def create_blocks(config: ViTConfig) -> nn.ModuleList:
    """Create the blocks of an encoder; an axial encoder has two per layer, one for each direction."""
    axes: list[Axis | None] = ["row", "column"] * config.depth if config.block.axial else [None] * config.depth
    rate, last = config.dropout.stochastic_depth, max(len(axes) - 1, 1)
    return nn.ModuleList(
        Block(config, axis=axis, stochastic_depth=rate * index / last) for index, axis in enumerate(axes)
    )


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Intermediate results to keep while encoding, by layer; negative indices count from the end.

    `summary` reduces the attention weights of a layer before they are stored, for example to their mean over heads.
    It is applied layer by layer, so the L² weights per head of many layers are never held at once.
    """

    attention: Sequence[int] = ()
    queries: Sequence[int] = ()
    keys: Sequence[int] = ()
    outputs: Sequence[int] = ()
    summary: Callable[[Float[Tensor, "B A L L"]], Tensor] = lambda attention: attention

    def resolve(self, depth: int) -> "Capture":
        """Return the same capture with non-negative layer indices."""
        layers = {name: getattr(self, name) for name in ("attention", "queries", "keys", "outputs")}
        for layer in chain.from_iterable(layers.values()):
            if not -depth <= layer < depth:
                raise InputError("no such layer to capture", expected=f"{-depth} to {depth - 1}", got=layer)
        resolved: dict[str, Any] = {name: tuple(layer % depth for layer in layers[name]) for name in layers}
        return replace(self, **resolved)

    def needs_projections(self, layer: int) -> bool:
        """Return whether the queries, keys or attention weights of a layer are captured."""
        return layer in self.attention or layer in self.queries or layer in self.keys


NO_CAPTURE = Capture()


@dataclass(kw_only=True)
class EncoderOutput:
    """Tokens z_L after the last block, and the captured results by layer."""

    tokens: Float[Tensor, "B L D"]
    attention: dict[int, Tensor] = field(default_factory=dict)
    """(B A L L), or its summary."""
    queries: dict[int, Float[Tensor, "B A L K"]] = field(default_factory=dict)
    keys: dict[int, Float[Tensor, "B A L K"]] = field(default_factory=dict)
    outputs: dict[int, Float[Tensor, "B L D"]] = field(default_factory=dict)

    def record(self, capture: Capture, layer: int, attention: Attention, projections: Projections) -> None:
        """Store what is captured of a layer's attention, as copies that do not keep the projections alive."""
        if layer in capture.queries:
            self.queries[layer] = projections.queries.contiguous()
        if layer in capture.keys:
            self.keys[layer] = projections.keys.contiguous()
        if layer in capture.attention:
            self.attention[layer] = capture.summary(attention.attention_weights(projections))
