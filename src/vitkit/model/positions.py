"""Implementations of the position embeddings in `POSITION_KINDS`, and their interpolation to another patch grid.

Tables E_pos have one row per token and are added to the tokens. Relative positions add a bias to the attention
logits, rotary positions rotate queries and keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import InputError, WeightsError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.config import POSITION_KINDS, BiTConfig, InterpolationOrigin, ViTConfig

PositionTable = Tensor | nn.Module
"""A table E_pos (1, L, D), or a module that returns one."""
PositionBias = Callable[[Tensor], Tensor]
"""Function from queries (B, A, Q, K) to a bias on the logits (B, A, Q, L)."""
PositionRotation = Callable[[Tensor], Tensor]
"""Function that rotates queries or keys (B, A, L, K)."""


class AttentionPositions(NamedTuple):
    """Positions that act inside attention: a rotation of queries and keys, and a bias on the logits."""

    rotary: PositionRotation | None = None
    relative: PositionBias | None = None


NO_POSITIONS = AttentionPositions()


class LearnedPositions2d(nn.Module):
    """Two learned tables of half the width, X for columns and Y for rows, concatenated per patch (appendix D.4)."""

    def __init__(self, *, grid: tuple[int, int], width: int, prefix: int) -> None:
        super().__init__()
        rows, columns = grid
        self.x = nn.Parameter(torch.empty(1, columns, width // 2))
        self.y = nn.Parameter(torch.empty(1, rows, width // 2))
        self.prefix = nn.Parameter(torch.empty(1, prefix, width)) if prefix else None

    def forward(self) -> Float[Tensor, "1 L D"]:
        rows, columns = self.y.shape[1], self.x.shape[1]
        x = self.x[:, None].expand(-1, rows, -1, -1)
        y = self.y[:, :, None].expand(-1, -1, columns, -1)
        patches = torch.cat([x, y], dim=-1).flatten(1, 2)
        return patches if self.prefix is None else torch.cat([self.prefix, patches], dim=1)


def position_table(positions: PositionTable) -> Float[Tensor, "1 L D"]:
    """Return the table E_pos of a parameter or module."""
    return positions if isinstance(positions, Tensor) else positions()


def learned_1d(config: ViTConfig) -> nn.Parameter:
    """Create an uninitialized table with one row per token."""
    return nn.Parameter(torch.empty(1, config.prefix_positions + config.patches, config.width))


def learned_2d(config: ViTConfig) -> LearnedPositions2d:
    """Create uninitialized tables for rows and columns."""
    return LearnedPositions2d(grid=config.grid, width=config.width, prefix=config.prefix_positions)


def fixed_table(config: ViTConfig) -> nn.Parameter:
    """Create a table that is stored with the weights and not trained."""
    return nn.Parameter(learned_1d(config), requires_grad=False)


def sincos_values(config: ViTConfig) -> Float[Tensor, "1 L D"]:
    """Return the values of the `sincos_2d` table of a model."""
    return sincos_2d(config.grid, width=config.width, like=config.positions.sincos, prefix=config.prefix_positions)


def sincos_2d(
    grid: tuple[int, int], *, width: int, like: Literal["big_vision", "mae"] = "big_vision", prefix: int = 0
) -> Float[Tensor, "1 L D"]:
    """Compute fixed positions [sin x, cos x, sin y, cos y]; prefix rows are zero.

    big_vision and MAE space their frequencies differently.

    >>> sincos_2d((2, 2), width=4)[0, 0].tolist()  # the top left corner
    [0.0, 1.0, 0.0, 1.0]
    """
    quarter = width // 4
    steps = max(quarter - 1, 1) if like == "big_vision" else quarter
    frequencies = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / steps)
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64, device="cpu") for n in grid), indexing="ij")
    angles_x, angles_y = (axis.reshape(-1, 1) * frequencies for axis in (x, y))
    table = torch.cat([angles_x.sin(), angles_x.cos(), angles_y.sin(), angles_y.cos()], dim=1)
    return torch.cat([table.new_zeros(prefix, width), table])[None].float()


class RelativePositions(nn.Module):
    r"""Relative position bias (appendix D.4).

    .. math:: \mathrm{bias}_{ij} = q_i \cdot r_{i-j} / \sqrt{d_k}

    The paper's relative attention is one-dimensional: the offset is the difference of two indices in the sequence of
    patches. Prefix tokens have no index and share three embeddings: from them, to them, and between them.
    """

    def __init__(self, *, patches: int, prefix: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches, self.prefix, self.heads = patches, prefix, heads
        self.table = nn.Parameter(torch.empty(2 * patches - 1 + (3 if prefix else 0), width))

    def offsets(self) -> Int[Tensor, "L L"]:
        """Return the row of the table for each query and key."""
        index = torch.arange(self.patches, device=self.table.device)
        rows = index[:, None] - index[None, :] + self.patches - 1
        if not self.prefix:
            return rows
        last, margin = 2 * self.patches - 1, self.prefix
        offsets = functional.pad(rows, (margin, 0), value=last + 1)  # to prefix tokens
        offsets = functional.pad(offsets, (0, 0, margin, 0), value=last)  # from prefix tokens
        offsets[:margin, :margin] = last + 2
        return offsets

    def forward(self, queries: Float[Tensor, "B A Q K"]) -> Float[Tensor, "B A Q L"]:
        """Return the bias on the logits of the first Q queries."""
        keys = self.table.unflatten(1, (self.heads, -1)) / math.sqrt(queries.shape[-1])
        by_row = torch.einsum("BAQK,RAK->BAQR", queries, keys)
        offsets = self.offsets()[: queries.shape[2]]
        return by_row.gather(3, offsets.expand(*queries.shape[:2], -1, -1))


def relative_1d(config: ViTConfig) -> RelativePositions:
    """Create the relative position bias of a model."""
    return RelativePositions(patches=config.patches, prefix=config.prefix, width=config.width, heads=config.heads)


@dataclass(frozen=True, kw_only=True)
class RotaryPositions:
    """Rotations of queries and keys by the position of their patch; prefix tokens are not rotated."""

    cosine: Float[Tensor, "N K"]
    sine: Float[Tensor, "N K"]

    def __call__(self, vectors: Float[Tensor, "B A L K"]) -> Float[Tensor, "B A L K"]:
        count = vectors.shape[2] - self.cosine.shape[0]
        prefix, patches = vectors[:, :, :count], vectors[:, :, count:]
        first, second = patches.chunk(2, dim=-1)
        rotated = patches * self.cosine + torch.cat([-second, first], dim=-1) * self.sine
        return torch.cat([prefix, rotated.to(vectors.dtype)], dim=2)


def axial_rotary(config: ViTConfig, device: torch.device | None = None) -> RotaryPositions:
    """Compute the rotations of a model."""
    base = config.positions.rotary_base
    return rotary_2d(config.grid, head_width=config.head_width, base=base, device=device)


def rotary_2d(
    grid: tuple[int, int], *, head_width: int, base: float, device: torch.device | None = None
) -> RotaryPositions:
    """Compute axial rotary positions as in DINOv3: patch centers in [-1, 1], half of each head for rows and columns.

    >>> rotary_2d((14, 14), head_width=64, base=100.0).cosine.shape
    torch.Size([196, 64])
    """
    quarter = head_width // 4
    periods = base ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    centers = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n * 2 - 1 for n in grid)
    coordinates = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).reshape(-1, 2, 1)
    angles = (2 * math.pi * coordinates / periods).flatten(1).tile(2)
    return RotaryPositions(cosine=angles.cos(), sine=angles.sin())


# Interpolation


@dataclass(frozen=True, kw_only=True)
class InterpolationKernel:
    """Interpolation of one library; `offset` is added to the target size before the scale is computed.

    Every library interpolates differently, and weights resized with another library's kernel give other logits. The
    paper's code uses `scipy.ndimage.zoom(order=1)`, which is bilinear interpolation with aligned corners.
    """

    mode: Literal["bilinear", "bicubic"] = "bicubic"
    align_corners: bool = False
    antialias: bool = False
    offset: float = 0.0
    precision: torch.dtype = torch.float32


KERNELS: dict[InterpolationOrigin, InterpolationKernel] = {
    "google": InterpolationKernel(mode="bilinear", align_corners=True, precision=torch.float64),
    "timm": InterpolationKernel(antialias=True),
    "huggingface": InterpolationKernel(),
    "deit": InterpolationKernel(),
    "mae": InterpolationKernel(),
    "torchvision": InterpolationKernel(align_corners=True),
    "dinov2": InterpolationKernel(offset=0.1),
    "dinov2-registers": InterpolationKernel(antialias=True),
}


def resample_grid(
    table: Float[Tensor, "1 N D"], *, old: tuple[int, int], new: tuple[int, int], origin: InterpolationOrigin = "google"
) -> Float[Tensor, "1 N2 D"]:
    """Interpolate the embeddings of an old grid to a new one; an equal grid returns the same tensor.

    >>> resample_grid(torch.rand(1, 14 * 14, 8), old=(14, 14), new=(24, 32)).shape
    torch.Size([1, 768, 8])
    """
    if table.shape[1] != old[0] * old[1]:
        raise InputError(
            "the position embeddings do not fill their grid",
            expected=f"{old[0]}×{old[1]} = {old[0] * old[1]} rows",
            got=f"{table.shape[1]} rows",
            hint="pass the number of prefix rows (class token) and the grid of the others",
        )
    if old == new:
        return table
    kernel = KERNELS[origin]
    device = "cpu" if table.device.type == "mps" else table.device  # MPS has no float64
    image = rearrange(table.to(device, kernel.precision), "one (rows columns) D -> one D rows columns", rows=old[0])
    interpolate = partial(functional.interpolate, image, mode=kernel.mode)
    if kernel.offset:
        # DINOv2 interpolates by scale instead of by size, and computes the scale from a slightly larger grid.
        image = interpolate(scale_factor=tuple((n + kernel.offset) / o for n, o in zip(new, old, strict=True)))
    else:
        image = interpolate(size=new, align_corners=kernel.align_corners, antialias=kernel.antialias)
    return rearrange(image, "one D rows columns -> one (rows columns) D").to(table)


def is_position_table(name: str) -> bool:
    """Return whether a parameter holds position embeddings or biases.

    >>> is_position_table("layer_pos_embed.3"), is_position_table("patch_embed.proj.bias")
    (True, False)
    """
    return "pos_embed" in name or name.startswith("relative.")


def tokens_with_positions(config: ViTConfig | BiTConfig) -> list[str]:
    """Return the tokens that have a row of their own in position tables, in the order of the rows."""
    if not isinstance(config, ViTConfig) or not config.prefix_positions:
        return []
    tokens = {"cls_token": config.class_tokens > config.tokens.distillation, "dist_token": config.tokens.distillation}
    return [name for name, exists in tokens.items() if exists]


def adapt_positions(name: str, table: Tensor, *, old: ViTConfig, new: ViTConfig) -> Tensor:
    """Return a position table for another grid, with a row for each token that has one in the new model."""
    if name.startswith("relative."):
        return _adapt_relative(name, table, old, new)
    before, after = tokens_with_positions(old), tokens_with_positions(new)
    if (before, old.grid, old.positions.kind) == (after, new.grid, new.positions.kind):
        return table
    kind = POSITION_KINDS[new.positions.kind]
    if kind.fixed_values:  # computed for the new grid, and the same in all layers
        values: Tensor = kind.import_function("fixed_values")(new)
        return values.to(table)
    origin = old.positions.origin
    if name.endswith((".x", ".y")):
        side = 1 if name.endswith(".x") else 0
        return resample_grid(table, old=(1, old.grid[side]), new=(1, new.grid[side]), origin=origin)
    rows = dict(zip(before, table.split(1, dim=1), strict=False))
    prefix = [rows.get(token, table.new_zeros(1, 1, table.shape[2])) for token in after]
    if name.endswith(".prefix"):
        return torch.cat(prefix, dim=1)
    grid = resample_grid(table[:, len(before) :], old=old.grid, new=new.grid, origin=origin)
    return torch.cat([*prefix, grid], dim=1)


def _adapt_relative(name: str, table: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
    """Add or remove the three rows of a relative position table that are for tokens without a position."""
    if old.grid != new.grid:
        raise WeightsError(
            f"relative positions cannot be resampled: {name} counts along rows of {old.grid[1]} patches",
            expected="a grid of {}×{}".format(*old.grid),
            got="{}×{}".format(*new.grid),
            hint="an offset of 14 is one row down only where rows have 14 patches; keep image and patch size",
        )
    if not new.prefix:
        return table[: 2 * new.patches - 1] if old.prefix else table
    return table if old.prefix else torch.cat([table, table.new_zeros(3, table.shape[1])])
