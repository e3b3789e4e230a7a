"""Tokens go in, tokens come out: one Transformer encoder block (equations 2 and 3), and what can be kept of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import InputError, check_positive
from vitkit.core.shapes import Float, Tensor
from vitkit.model.attention import Attention, AttentionConfig, AxialAttention, Projections
from vitkit.model.positions import RelativePositions, Rotary

Activation = Literal["gelu_tanh", "gelu_erf", "swiglu"]
Axis = Literal["row", "column"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What the blocks are made of. The defaults are the released code's; later models change them.

    `layer_scale` is the starting value of a learned scale on each residual branch, None for no such scale.
    `axial` splits each block in two, attending along rows and then along columns (D.6).
    """

    attention: AttentionConfig = AttentionConfig()
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6
    layer_scale: float | None = None
    axial: bool = False

    def __post_init__(self) -> None:
        check_positive("block.norm_eps", self.norm_eps)


class Mlp(nn.Module):
    """Two dense layers with a GELU between them (equation 3)."""

    def __init__(self, *, width: int, mlp_dim: int, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.fc1 = nn.Linear(width, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        hidden = self.fc1(tokens)
        if torch.is_grad_enabled():
            hidden = functional.gelu(hidden, approximate=self.approximate)
        else:
            # In place where no gradient needs the input: getting fresh memory takes longer than the GELU itself.
            torch.ops.aten.gelu_(hidden, approximate=self.approximate)
        return self.dropout(self.fc2(self.dropout(hidden)))


class SwiGlu(nn.Module):
    """A gated MLP: half of the first layer, through SiLU, scales the other half."""

    def __init__(self, *, width: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        gate, hidden = self.fc1(tokens).chunk(2, dim=-1)
        return self.dropout(self.fc2(self.dropout(functional.silu(gate) * hidden)))


def mlp(*, width: int, mlp_dim: int, activation: Activation, dropout: float = 0.0) -> nn.Module:
    """The MLP of a block or of a pooling head.

    >>> mlp(width=8, mlp_dim=32, activation="swiglu").fc1.out_features
    64
    """
    if activation == "swiglu":
        return SwiGlu(width=width, mlp_dim=mlp_dim, dropout=dropout)
    return Mlp(width=width, mlp_dim=mlp_dim, activation=activation, dropout=dropout)


class LayerScale(nn.Module):
    """A learned scale for each channel of a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, branch: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return branch * self.gamma


class StochasticDepth(nn.Module):
    """Leaves out a residual branch for whole images at random, and scales up those that stay."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, branch: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        if not self.training or self.share == 0.0:
            return branch
        stays = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.share
        return branch * stays.to(branch.dtype) / (1.0 - self.share)


class Block(nn.Module):
    """z' = MSA(LN(z)) + z, then z = MLP(LN(z')) + z' (equations 2 and 3)."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        attention: Attention,
        width: int,
        mlp_dim: int,
        dropout: float,
        stochastic_depth: float,
    ) -> None:
        super().__init__()

        def layer_scale() -> nn.Module:
            return nn.Identity() if config.layer_scale is None else LayerScale(width)

        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = attention
        self.ls1 = layer_scale()
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = mlp(width=width, mlp_dim=mlp_dim, activation=config.activation, dropout=dropout)
        self.ls2 = layer_scale()
        self.dropout = nn.Dropout(dropout)
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
        rows: int | None = None,
    ) -> Float[Tensor, "B Q D"]:
        """The block's output for the first `rows` tokens, or for all of them."""
        residual = tokens if rows is None else tokens[:, :rows]
        branch = self.attn(self.norm1(tokens), rotary=rotary, relative=relative, rows=rows)
        tokens = residual + self.stochastic_depth(self.ls1(self.dropout(branch)))
        del branch  # the MLP needs the memory
        return self._through_mlp(tokens)

    def shown(
        self,
        tokens: Float[Tensor, "B L D"],
        *,
        rotary: Rotary | None = None,
        relative: RelativePositions | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B A L L"]]:
        """The block's output, computed from attention weights that gradients pass through, and these weights."""
        branch, weights = self.attn.shown(self.norm1(tokens), rotary=rotary, relative=relative)
        return self._through_mlp(tokens + self.stochastic_depth(self.ls1(self.dropout(branch)))), weights

    def _through_mlp(self, tokens: Float[Tensor, "B Q D"]) -> Float[Tensor, "B Q D"]:
        """Equation 3."""
        return tokens + self.stochastic_depth(self.ls2(self.mlp(self.norm2(tokens))))


def blocks(
    config: BlockConfig,
    *,
    depth: int,
    width: int,
    heads: int,
    mlp_dim: int,
    grid: tuple[int, int],
    dropout: float,
    stochastic_depth: float,
) -> nn.ModuleList:
    """The encoder's blocks; an axial encoder has two for each of its layers, one a direction.

    >>> len(blocks(BlockConfig(axial=True), depth=3, width=8, heads=2, mlp_dim=16, grid=(2, 2),
    ...            dropout=0.0, stochastic_depth=0.0))
    6
    """
    axes: list[Axis | None] = ["row", "column"] * depth if config.axial else [None] * depth
    shares = [stochastic_depth * index / max(len(axes) - 1, 1) for index in range(len(axes))]

    def attention(axis: Axis | None) -> Attention:
        if axis is None:
            return Attention(config.attention, width=width, heads=heads, norm_eps=config.norm_eps)
        return AxialAttention(
            config.attention, width=width, heads=heads, axis=axis, grid=grid, norm_eps=config.norm_eps
        )

    return nn.ModuleList(
        Block(
            config,
            attention=attention(axis),
            width=width,
            mlp_dim=mlp_dim,
            dropout=dropout,
            stochastic_depth=share,
        )
        for axis, share in zip(axes, shares, strict=True)
    )


def as_it_is(attention: Float[Tensor, "B A L L"]) -> Float[Tensor, "B A L L"]:
    """All of a layer's attention."""
    return attention


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The layers of which to keep something while encoding, counted from 0, or from -1 at the end.

    Of attention `summary` is kept, such as the mean over heads: it is computed layer by layer, so that the attention
    of many layers, L² numbers a head, is never there at once.
    """

    attention: Sequence[int] = ()
    queries: Sequence[int] = ()
    keys: Sequence[int] = ()
    outputs: Sequence[int] = ()
    summary: Callable[[Float[Tensor, "B A L L"]], Tensor] = as_it_is

    def within(self, depth: int) -> "Keep":
        """The same with every layer counted from 0."""

        def count(layers: Sequence[int]) -> tuple[int, ...]:
            for layer in layers:
                if not -depth <= layer < depth:
                    raise InputError("no such layer to keep", expected=f"{-depth} to {depth - 1}", got=layer)
            return tuple(layer % depth for layer in layers)

        return replace(
            self,
            attention=count(self.attention),
            queries=count(self.queries),
            keys=count(self.keys),
            outputs=count(self.outputs),
        )

    def looks_inside(self, layer: int) -> bool:
        """Whether something of this layer's attention is wanted."""
        return layer in self.attention or layer in self.queries or layer in self.keys


NOTHING = Keep()


@dataclass(kw_only=True)
class Encoded:
    """What encoding gives: z_L, and by layer what was asked to be kept."""

    tokens: Float[Tensor, "B L D"]
    attention: dict[int, Tensor] = field(default_factory=dict)
    """(B A L L), or the summary of it."""
    queries: dict[int, Float[Tensor, "B A L K"]] = field(default_factory=dict)
    keys: dict[int, Float[Tensor, "B A L K"]] = field(default_factory=dict)
    outputs: dict[int, Float[Tensor, "B L D"]] = field(default_factory=dict)

    def look(self, keep: Keep, layer: int, attention: Attention, projections: Projections) -> None:
        """Store what `keep` wants of a layer's attention; copies, so that the rest of the layer can go."""
        if layer in keep.queries:
            self.queries[layer] = projections.queries.contiguous()
        if layer in keep.keys:
            self.keys[layer] = projections.keys.contiguous()
        if layer in keep.attention:
            self.attention[layer] = keep.summary(attention.weights(projections))
