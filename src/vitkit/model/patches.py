"""Patch embeddings (section 3.1, the x_p E of equation 1), the selection of patches, and the validation of images."""

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.model.config import ViTConfig, patch_grid


def patchify(images: Float[Tensor, "B C H W"], *, patch_size: Size) -> Float[Tensor, "B N P"]:
    """Cut images into flattened patches, row by row.

    Within a patch the order is channel, row, column: that of a convolution kernel.

    >>> patchify(torch.zeros(2, 3, 32, 48), patch_size=16).shape
    torch.Size([2, 6, 768])
    """
    rows, columns = patch_grid((images.shape[-2], images.shape[-1]), patch_size=patch_size)
    return rearrange(images, "B C (rows p) (columns q) -> B (rows columns) (C p q)", rows=rows, columns=columns)


def unpatchify(patches: Float[Tensor, "B N P"], *, patch_size: Size, grid: tuple[int, int]) -> Float[Tensor, "B C H W"]:
    """Assemble patches into images, the inverse of `patchify`."""
    (rows, columns), (height, width) = grid, pair(patch_size)
    layout = "B (rows columns) (C p q) -> B C (rows p) (columns q)"
    return rearrange(patches, layout, rows=rows, columns=columns, p=height, q=width)


def sample_patches(
    batch: int,
    *,
    patches: int,
    count: int,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B kept"]:
    """Draw `count` patch indices per image without replacement, in ascending order."""
    order = torch.rand(batch, patches, device=device, generator=generator).argsort(dim=1)
    return order[:, :count].sort(dim=1).values


def select_patches(patches: Float[Tensor, "B N D"], indices: Int[Tensor, "B kept"]) -> Float[Tensor, "B kept D"]:
    """Gather the patches of each image by index."""
    return patches.gather(1, indices[:, :, None].expand(-1, -1, patches.shape[-1]))


def resize_kernel(kernel: Float[Tensor, "D C P Q"], size: tuple[int, int]) -> Float[Tensor, "D C P2 Q2"]:
    """Return the kernel whose response to a resized patch is closest to the old kernel's response to the patch.

    With R the matrix that resizes a patch bilinearly, that is the pseudo-inverse of R's transpose times the kernel
    (FlexiViT). For larger patches the responses are the same. Resizing the kernel like an image instead would scale
    them with the patch's area.
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == size:
        return kernel
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)
    resized = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    inverse = torch.linalg.pinv(resized.flatten(1))  # (new pixels) × (old pixels): pseudo-inverse of R's transpose
    product = kernel.to(inverse).flatten(2) @ inverse.T  # on the CPU, because MPS has no float64
    return product.reshape(*kernel.shape[:2], *size).to(kernel)


class PatchProjection(nn.Module):
    """Projection E of equation 1: a linear layer over flattened patches.

    The weight has the shape of a convolution kernel, as in checkpoints; the matrix product is faster than a
    convolution and computes the same.
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
    """Patch embeddings of images, or of a ResNet's feature map (the hybrid of section 3.1)."""

    def __init__(self, config: ViTConfig, *, backbone: nn.Module | None) -> None:
        super().__init__()
        self.image_size, self.channels, self.backbone = pair(config.image_size), config.channels, backbone
        channels = config.backbone.width if config.backbone else config.channels
        self.proj = PatchProjection(channels=channels, patch_size=config.patch_size, width=config.width)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        check_images(images, channels=self.channels, image_size=self.image_size)
        return self.proj(self.backbone(images) if self.backbone else images)

    def resize(self, image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        """Take images of another size, or patches of another size with a resized kernel."""
        self.image_size, self.proj.patch_size = image_size, patch_size
        self.proj.weight.data = resize_kernel(self.proj.weight.data, patch_size)


def check_images(images: object, *, channels: int, image_size: tuple[int, int] | None) -> None:
    """Raise unless a batch has the model's layout, channels, size (any if None) and a floating-point type.

    >>> import torch
    >>> check_images(torch.zeros(2, 3, 32, 24), channels=3, image_size=(32, 32))
    Traceback (most recent call last):
    vitkit.core.errors.InputError: images are 32×24, the model takes 32×32
    hint: model.preprocess(image) resizes; model.set_input_size((32, 24)) changes the model
    """
    height, width = ("H", "W") if image_size is None else image_size
    expected = f"the model takes one tensor B×{channels}×{height}×{width}"
    if not isinstance(images, Tensor):
        kind, length = type(images).__name__, f" of {len(images)}" if isinstance(images, list | tuple) else ""
        hint = f"model.preprocess({'list' if length else 'image'}) resizes and stacks images of any size"
        if kind == "ndarray":
            hint = "torch.from_numpy(images) for a normalized batch; model.preprocess(image) for pixels"
        raise InputError(f"{expected}, got a {kind}{length}", hint=hint)
    if images.ndim != 4:
        hint = "images[None] makes a batch of one" if images.ndim == 3 else "flatten the first dimensions"
        raise InputError(f"{expected}, got {'×'.join(map(str, images.shape))}", hint=hint)
    if (count := images.shape[1]) != channels:
        message = f"images have {count} channel{'s' if count != 1 else ''}, the model takes {channels}"
        expand = "images.expand(-1, 3, -1, -1), or " if (count, channels) == (1, 3) else ""
        raise InputError(message, hint=f"{expand}vitkit.adapt(model, channels={count}).model")
    if not images.is_floating_point():
        message = f"images are {str(images.dtype).removeprefix('torch.')}, the model takes normalized floats"
        raise InputError(message, hint="model.preprocess.normalize(images), or model.preprocess(files)")
    size = tuple(images.shape[2:])
    if image_size is not None and size != image_size:
        hint = f"model.set_input_size({size[0] if size[0] == size[1] else size}) changes the model"
        message = f"images are {size[0]}×{size[1]}, the model takes {height}×{width}"
        raise InputError(message, hint=f"model.preprocess(image) resizes; {hint}")
