"""A patch-embedding kernel goes in, one for patches of another size or for other channels comes out."""

import torch
from torch.nn import functional

from vitkit.core.shapes import Float, Tensor
from vitkit.data.transforms import Preprocessing


def resize_kernel(kernel: Float[Tensor, "D C P Q"], size: tuple[int, int]) -> Float[Tensor, "D C P2 Q2"]:
    """The kernel whose answer to a resized patch is nearest to the old kernel's answer to the patch itself.

    With R the matrix that resizes a patch bilinearly, that is the pseudo-inverse of R's transpose times the kernel
    (FlexiViT). For larger patches the answers are the same. Resizing the kernel like an image instead
    would change them with the patch's area.

    >>> resize_kernel(torch.ones(1, 1, 4, 4), (8, 8)).sum().round(decimals=3).item()
    16.0
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == size:
        return kernel
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)
    resized = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    inverse = torch.linalg.pinv(resized.flatten(1))  # (new pixels) × (old pixels): R's transpose, inverted
    return (kernel.double().flatten(2) @ inverse.T).reshape(*kernel.shape[:2], *size).to(kernel.dtype)


def spread_channels(kernel: Float[Tensor, "D C P Q"], channels: int) -> Float[Tensor, "D C2 P Q"]:
    """The kernel for images of other channels, which answers to an image of equal channels as before.

    Three channels or more that get company keep their weights, and the company begins at zero: the answer to the
    colours is as before too. Where some go and three or more stay, those share out what the others had: three
    channels become four and three again without loss. Otherwise the sum of all is shared out equally.

    >>> spread_channels(torch.ones(1, 3, 1, 1), 1).flatten().tolist()
    [3.0]
    >>> spread_channels(torch.ones(1, 3, 1, 1), 4).flatten().tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    known = kernel.shape[1]
    if known == channels:
        return kernel
    if min(known, channels) < 3:
        return kernel.sum(dim=1, keepdim=True).expand(-1, channels, -1, -1).div(channels).contiguous()
    if known > channels:
        return kernel[:, :channels] + kernel[:, channels:].sum(dim=1, keepdim=True) / channels
    nothing = kernel.new_zeros(kernel.shape[0], channels - known, *kernel.shape[2:])
    return torch.cat([kernel, nothing], dim=1)


def refeed(
    kernel: Float[Tensor, "D C P Q"], *, old: Preprocessing, new: Preprocessing
) -> tuple[Float[Tensor, "D C2 P Q"], Float[Tensor, "D"]]:
    """The kernel for images of other channels under the new mean and deviation, and what the bias gains.

    A grey picture is of equal channels before it is normalised, and not after, where every channel has a mean of its
    own. So the kernel is spread over pixels as they are stored, and each picture of grey gets the answer it got.

    >>> colours = Preprocessing(mean=(0.4, 0.5, 0.6), deviation=(0.2, 0.3, 0.2))
    >>> grey = Preprocessing(channels=1, mean=(0.5,), deviation=(0.2,))
    >>> kernel, gain = refeed(torch.ones(1, 3, 1, 1), old=colours, new=grey)
    >>> round(kernel.item(), 3), round(gain.item(), 3)  # 0.2 × (1 ÷ 0.2 + 1 ÷ 0.3 + 1 ÷ 0.2)
    (2.667, 0.0)
    """
    raw = kernel.double() / _numbers(old.deviation, old.channels)
    spread = spread_channels(raw, new.channels)
    # Counted from one level of grey, so that equal means give exactly nothing.
    level = old.mean[0]
    gain = (spread * (_numbers(new.mean, new.channels) - level)).sum(dim=(1, 2, 3))
    gain -= (raw * (_numbers(old.mean, old.channels) - level)).sum(dim=(1, 2, 3))
    return (spread * _numbers(new.deviation, new.channels)).to(kernel.dtype), gain


def _numbers(numbers: tuple[float, ...], channels: int) -> Float[Tensor, "C 1 1"]:
    return torch.tensor(numbers, dtype=torch.float64).expand(channels)[:, None, None]
