"""Color maps, and images that are dimmed or colored by a map over patches."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.shapes import Float, Tensor

Rgb = NDArray[np.uint8]
"""Pixels, H × W × 3."""

# Of even lightness, so that they are readable with color blindness and in print.
SEQUENTIAL = LinearSegmentedColormap.from_list(
    "sequential", ("#0c072d", "#460f69", "#85206b", "#be3752", "#e8672a", "#faac20", "#fcf396")
)
DIVERGING = LinearSegmentedColormap.from_list(
    "diverging", ("#2c4b98", "#6896cd", "#bed6e9", "#f6f5f3", "#f0c4ac", "#d56e5c", "#961830")
)


def to_array(tensor: Float[Tensor, "..."]) -> NDArray[np.float32]:
    """Return a tensor as a float32 array in memory."""
    return tensor.detach().float().cpu().numpy()


def rescale(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale values linearly to 0..1; equal values become 0."""
    low, high = float(values.min()), float(values.max())
    return ((values - low) / (high - low) if high > low else np.zeros_like(values)).astype(np.float32)


def clip_maps(maps: Float[Tensor, "B rows columns"]) -> list[NDArray[np.float32]]:
    """Rescale each map after clipping it at its 95th percentile.

    A few patches, often on plain background, may receive far more attention than all others.
    """
    return [rescale(np.minimum(each, np.quantile(each, 0.95))) for each in to_array(maps)]


def apply_colormap(values: NDArray[np.float32], colormap: LinearSegmentedColormap = SEQUENTIAL) -> Rgb:
    """Return the color of each value of 0..1.

    >>> apply_colormap(np.array([[0.0, 1.0]], dtype=np.float32)).tolist()
    [[[12, 7, 45], [252, 243, 150]]]
    """
    colors: NDArray[np.float64] = colormap(np.clip(values, 0, 1))[..., :3]
    return (colors * 255).round().astype(np.uint8)


def upsample(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Resize a map over patches to (height, width) pixels with bicubic interpolation."""
    image = Image.fromarray(values.astype(np.float32))
    return np.clip(np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC)), 0, 1)


def dim_by(picture: Rgb, values: NDArray[np.float32]) -> Rgb:
    """Return the picture with its brightness scaled by a map, as in Figure 6 of the paper."""
    light = 0.12 + 0.88 * upsample(values, (picture.shape[0], picture.shape[1]))[..., None]
    return (picture * light).round().astype(np.uint8)


def overlay_heatmap(picture: Rgb, values: NDArray[np.float32]) -> Rgb:
    """Return the gray picture under the colors of a map; larger values are more opaque."""
    heat = upsample(values, (picture.shape[0], picture.shape[1]))
    gray = picture.astype(np.float32).mean(axis=-1, keepdims=True)
    opacity = 0.25 + 0.6 * heat[..., None]
    return (gray * (1 - opacity) + apply_colormap(heat) * opacity).round().clip(0, 255).astype(np.uint8)


def to_rgb(channels: NDArray[np.float32]) -> Rgb:
    """Return C × H × W values of 0..1 as pixels: three or more channels as color, fewer as gray."""
    rgb = channels[:3] if channels.shape[0] >= 3 else np.repeat(channels.mean(axis=0, keepdims=True), 3, axis=0)
    return (np.clip(rgb, 0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
