"""Position embeddings of one patch grid go in, those of another come out, by the kernel of the weights' origin.

Every library interpolates in its own way, and weights adapted with another library's kernel give other logits.
The paper's is `scipy.ndimage.zoom(order=1)`, which is bilinear interpolation with aligned corners.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch.nn import functional

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Tensor

Origin = Literal["google", "timm", "huggingface", "deit", "mae", "torchvision", "dinov2", "dinov2-registers"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How one origin interpolates; `offset` is added to the target grid before the scale is taken from it."""

    mode: Literal["bilinear", "bicubic"] = "bicubic"
    align_corners: bool = False
    antialias: bool = False
    offset: float = 0.0
    precision: torch.dtype = torch.float32


KERNELS: dict[Origin, Kernel] = {
    "google": Kernel(mode="bilinear", align_corners=True, precision=torch.float64),
    "timm": Kernel(antialias=True),
    "huggingface": Kernel(),
    "deit": Kernel(),
    "mae": Kernel(),
    "torchvision": Kernel(align_corners=True),
    "dinov2": Kernel(offset=0.1),
    "dinov2-registers": Kernel(antialias=True),
}


def resample_grid(
    table: Float[Tensor, "1 N D"], *, old: tuple[int, int], new: tuple[int, int], origin: Origin = "google"
) -> Float[Tensor, "1 N2 D"]:
    """Resample one embedding a patch from an old grid to a new one; the same grid is returned as it is.

    >>> resample_grid(torch.rand(1, 14 * 14, 8), old=(14, 14), new=(24, 32)).shape
    torch.Size([1, 768, 8])
    """
    if table.shape[1] != old[0] * old[1]:
        raise InputError(
            "the position embeddings do not fill their grid",
            expected=f"{old[0]}×{old[1]} = {old[0] * old[1]} rows",
            got=f"{table.shape[1]} rows",
            hint="say which leading rows belong to the class token and which grid the rest has",
        )
    if old == new:
        return table
    kernel = KERNELS[origin]
    image = rearrange(table.to(kernel.precision), "one (rows columns) D -> one D rows columns", rows=old[0])
    if kernel.offset:
        # DINOv2 passes the scale of a slightly larger grid, and interpolates by that scale instead of by size.
        scale = tuple((n + kernel.offset) / o for n, o in zip(new, old, strict=True))
        image = functional.interpolate(image, scale_factor=scale, mode=kernel.mode)
    else:
        image = functional.interpolate(
            image, size=new, mode=kernel.mode, align_corners=kernel.align_corners, antialias=kernel.antialias
        )
    return rearrange(image, "one D rows columns -> one (rows columns) D").to(table.dtype)


def resample_positions(
    table: Float[Tensor, "1 L D"],
    *,
    prefix: int,
    old: tuple[int, int],
    new: tuple[int, int],
    origin: Origin = "google",
) -> Float[Tensor, "1 L2 D"]:
    """Resample a whole table: the first `prefix` rows (class token and the like) are kept, the grid is resampled.

    >>> resample_positions(torch.rand(1, 197, 8), prefix=1, old=(14, 14), new=(24, 24)).shape
    torch.Size([1, 577, 8])
    """
    grid = resample_grid(table[:, prefix:], old=old, new=new, origin=origin)
    return torch.cat([table[:, :prefix], grid], dim=1)
