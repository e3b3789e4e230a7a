"""A patch grid goes in, what tells tokens their place comes out: every kind of Table 8, sine-cosine and rotary.

Additive kinds are tables E_pos of one row a token, added at the stem, at every layer (own tables) or at every
layer (one shared table). Relative and rotary positions act inside attention instead.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from vitkit.core.errors import ConfigError, check_positive
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.resample import Origin

Kind = Literal["none", "learned_1d", "learned_2d", "sincos_2d", "relative", "rotary"]
Injection = Literal["stem", "every_layer", "shared"]

PLACES: dict[Kind, tuple[Injection, ...]] = {
    "none": ("stem",),
    "learned_1d": ("stem", "every_layer", "shared"),
    "learned_2d": ("stem", "every_layer", "shared"),
    "sincos_2d": ("stem", "shared"),
    "relative": ("every_layer", "shared"),
    "rotary": ("shared",),
}
"""Where each kind can be injected, its usual place first. A fixed table has no second version to give a layer."""


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """Which positions, where they enter, and whose conventions they follow.

    `injection` None means the kind's usual place. `covers` says whether the class and distillation tokens have
    rows of their own. `origin` names the kernel that resamples the table to another resolution.
    """

    kind: Kind = "learned_1d"
    injection: Injection | None = None
    covers: Literal["all", "patches"] = "all"
    origin: Origin = "google"
    sincos: Literal["big_vision", "mae"] = "big_vision"
    rotary_base: float = 100.0

    def __post_init__(self) -> None:
        check_positive("positions.rotary_base", self.rotary_base)
        if self.injection is not None and self.injection not in PLACES[self.kind]:
            raise ConfigError(
                f"{self.kind} positions cannot be injected there",
                expected=f"injection = {' or '.join(PLACES[self.kind])}",
                got=self.injection,
            )

    @property
    def place(self) -> Injection:
        """Where the positions enter."""
        return self.injection or PLACES[self.kind][0]

    @property
    def is_additive(self) -> bool:
        """Whether positions are a table added to tokens."""
        return self.kind in ("learned_1d", "learned_2d", "sincos_2d")


class LearnedPositions2d(nn.Module):
    """Two tables of half the width, X for columns and Y for rows; a patch's embedding is the pair (D.4)."""

    def __init__(self, *, grid: tuple[int, int], width: int, prefix: int) -> None:
        super().__init__()
        rows, columns = grid
        self.x = nn.Parameter(torch.empty(1, columns, width // 2))
        self.y = nn.Parameter(torch.empty(1, rows, width // 2))
        self.prefix = nn.Parameter(torch.empty(1, prefix, width)) if prefix else None

    def forward(self) -> Float[Tensor, "1 L D"]:
        rows, columns = self.y.shape[1], self.x.shape[1]
        across = self.x[:, None].expand(-1, rows, -1, -1)
        down = self.y[:, :, None].expand(-1, -1, columns, -1)
        patches = torch.cat([across, down], dim=-1).flatten(1, 2)
        return patches if self.prefix is None else torch.cat([self.prefix, patches], dim=1)


AdditivePositions = Tensor | LearnedPositions2d


def additive_positions(config: PositionConfig, *, grid: tuple[int, int], width: int, prefix: int) -> AdditivePositions:
    """The parameters of one position table over `prefix` tokens and a grid of patches, values still to be set.

    >>> additive_positions(PositionConfig(), grid=(14, 14), width=768, prefix=1).shape
    torch.Size([1, 197, 768])
    """
    if config.kind == "learned_2d":
        return LearnedPositions2d(grid=grid, width=width, prefix=prefix)
    table = torch.empty(1, prefix + grid[0] * grid[1], width)
    return nn.Parameter(table, requires_grad=config.kind == "learned_1d")


def table_of(positions: AdditivePositions) -> Float[Tensor, "1 L D"]:
    """The table E_pos, whatever it is made from.

    >>> table_of(LearnedPositions2d(grid=(2, 3), width=8, prefix=1)).shape
    torch.Size([1, 7, 8])
    """
    return positions() if isinstance(positions, LearnedPositions2d) else positions


def sincos_2d(
    grid: tuple[int, int], *, width: int, like: Literal["big_vision", "mae"] = "big_vision", prefix: int = 0
) -> Float[Tensor, "1 L D"]:
    """Fixed positions in the order [sin x, cos x, sin y, cos y]; prefix rows are zero.

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
    """An extra attention term: the query against an embedding of its offset to the key (D.4).

    The paper's relative attention is one-dimensional: the offset is the difference of two places in the sequence
    of patches. Tokens with no place on the grid get three embeddings: from them, to them, and among them.
    """

    def __init__(self, *, patches: int, prefix: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = patches
        self.prefix = prefix
        self.heads = heads
        self.table = nn.Parameter(torch.empty(2 * patches - 1 + (3 if prefix else 0), width))

    def offsets(self) -> Int[Tensor, "L L"]:
        """For each query and key, the row of the table."""
        place = torch.arange(self.patches, device=self.table.device)
        rows = place[:, None] - place[None, :] + self.patches - 1
        if not self.prefix:
            return rows
        length, last = self.prefix + self.patches, 2 * self.patches - 1
        offsets = torch.empty(length, length, dtype=torch.long, device=self.table.device)
        offsets[self.prefix :, self.prefix :] = rows
        offsets[: self.prefix, self.prefix :] = last
        offsets[self.prefix :, : self.prefix] = last + 1
        offsets[: self.prefix, : self.prefix] = last + 2
        return offsets

    def forward(self, queries: Float[Tensor, "B A Q K"]) -> Float[Tensor, "B A Q L"]:
        """Logits to add before the softmax, scaled like the content's, for the first Q queries."""
        keys = self.table.unflatten(1, (self.heads, -1)) / math.sqrt(queries.shape[-1])
        by_row = torch.einsum("BAQK,RAK->BAQR", queries, keys)
        offsets = self.offsets()[: queries.shape[2]]
        return by_row.gather(3, offsets.expand(*queries.shape[:2], -1, -1))


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotations of queries and keys by the patch's place; prefix tokens stay as they are."""

    cosine: Float[Tensor, "N K"]
    sine: Float[Tensor, "N K"]

    def __call__(self, vectors: Float[Tensor, "B A L K"]) -> Float[Tensor, "B A L K"]:
        prefix = vectors.shape[2] - self.cosine.shape[0]
        still, patches = vectors[:, :, :prefix], vectors[:, :, prefix:]
        first, second = patches.chunk(2, dim=-1)
        turned = patches * self.cosine + torch.cat([-second, first], dim=-1) * self.sine
        return torch.cat([still, turned.to(vectors.dtype)], dim=2)


def rotary_2d(grid: tuple[int, int], *, head_width: int, base: float, device: torch.device | None = None) -> Rotary:
    """Axial rotary positions as in DINOv3: patch centres on [-1, 1], half of each head for rows, half for columns.

    >>> rotary_2d((14, 14), head_width=64, base=100.0).cosine.shape
    torch.Size([196, 64])
    """
    quarter = head_width // 4
    periods = base ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    centres = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n * 2 - 1 for n in grid)
    places = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).reshape(-1, 2, 1)
    angles = (2 * math.pi * places / periods).flatten(1).tile(2)
    return Rotary(cosine=angles.cos(), sine=angles.sin())
