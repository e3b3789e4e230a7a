"""Images go in, a sequence of patch embeddings comes out (section 3.1, the x_p E of equation 1)."""

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Int, Size, Tensor, pair
from vitkit.model.inputs import check_images
from vitkit.model.resnet import Backbone


def patch_grid(image_size: Size, *, patch_size: Size) -> tuple[int, int]:
    """Rows and columns of patches in an image; the patch must divide the image, nothing is cropped.

    >>> patch_grid(224, patch_size=16), patch_grid((224, 320), patch_size=32)
    ((14, 14), (7, 10))
    """
    (height, width), (patch_height, patch_width) = pair(image_size), pair(patch_size)
    if min(height, width, patch_height, patch_width) < 1:
        raise ConfigError(
            "image and patch sizes must be positive",
            expected="1 pixel or more",
            got=f"an image of {height}×{width} in patches of {patch_height}×{patch_width}",
        )
    if height % patch_height or width % patch_width:
        nearest = tuple(max(1, round(a / b)) * b for a, b in ((height, patch_height), (width, patch_width)))
        raise ConfigError(
            "the patch does not divide the image",
            expected=f"multiples of {patch_height}×{patch_width}",
            got=f"{height}×{width}",
            hint=f"use an image size of {nearest[0]}×{nearest[1]}, or another patch size",
        )
    return height // patch_height, width // patch_width


def patchify(images: Float[Tensor, "B C H W"], *, patch_size: Size) -> Float[Tensor, "B N P"]:
    """Cut images into flattened patches, row by row, top to bottom.

    Within a patch the order is channel, row, column: that of a convolution kernel.

    >>> patchify(torch.zeros(2, 3, 32, 48), patch_size=16).shape
    torch.Size([2, 6, 768])
    """
    rows, columns = patch_grid((images.shape[-2], images.shape[-1]), patch_size=patch_size)
    return rearrange(images, "B C (rows p) (columns q) -> B (rows columns) (C p q)", rows=rows, columns=columns)


def unpatchify(patches: Float[Tensor, "B N P"], *, patch_size: Size, grid: tuple[int, int]) -> Float[Tensor, "B C H W"]:
    """Put patches back into images: the inverse of `patchify`.

    >>> images = torch.rand(2, 3, 32, 48)
    >>> bool((unpatchify(patchify(images, patch_size=16), patch_size=16, grid=(2, 3)) == images).all())
    True
    """
    (rows, columns), (height, width) = grid, pair(patch_size)
    return rearrange(
        patches,
        "B (rows columns) (C p q) -> B C (rows p) (columns q)",
        rows=rows,
        columns=columns,
        p=height,
        q=width,
    )


def random_patches(
    batch: int,
    *,
    patches: int,
    keep: int,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B kept"]:
    """For each image the indices of `keep` patches drawn without replacement, in reading order.

    >>> random_patches(1, patches=4, keep=4).tolist()
    [[0, 1, 2, 3]]
    """
    order = torch.rand(batch, patches, device=device, generator=generator).argsort(dim=1)
    return order[:, :keep].sort(dim=1).values


def select_patches(patches: Float[Tensor, "B N D"], indices: Int[Tensor, "B kept"]) -> Float[Tensor, "B kept D"]:
    """The chosen patches of each image.

    >>> select_patches(torch.arange(3.0).reshape(1, 3, 1), torch.tensor([[0, 2]])).flatten().tolist()
    [0.0, 2.0]
    """
    return patches.gather(1, indices[:, :, None].expand(-1, -1, patches.shape[-1]))


class PatchProjection(nn.Module):
    """E of equation 1: one linear layer over flattened patches, its weight kept in convolution layout.

    The two layouts hold the same numbers; checkpoints use the convolution's, matrix products are faster.
    """

    def __init__(self, *, channels: int, patch_size: Size, width: int) -> None:
        super().__init__()
        self.patch_size = pair(patch_size)
        self.weight = nn.Parameter(torch.empty(width, channels, *self.patch_size))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        patches = patchify(images, patch_size=self.patch_size)
        return functional.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbedding(nn.Module):
    """Images to patch embeddings: directly, or from a ResNet's feature map (the hybrid of section 3.1)."""

    def __init__(
        self, *, image_size: Size, channels: int, patch_size: Size, width: int, backbone: Backbone | None
    ) -> None:
        super().__init__()
        self.image_size = pair(image_size)
        self.channels = channels
        self.backbone = backbone
        self.proj = PatchProjection(
            channels=backbone.width if backbone else channels, patch_size=patch_size, width=width
        )

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        check_images(images, channels=self.channels, image_size=self.image_size)
        return self.proj(self.backbone(images) if self.backbone else images)
