"""Numbers go in, colours come out: scales that are as dark as the numbers are small, also for the colour-blind."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.shapes import Float, Tensor
from vitkit.inspection.canvas import Rgb

# Knots of two scales of even lightness: night to yellow for how much, blue through white to red for how alike.
AMOUNT = ((12, 7, 45), (70, 15, 105), (133, 32, 107), (190, 55, 82), (232, 103, 42), (250, 172, 32), (252, 243, 150))
LIKENESS = (
    (44, 75, 152),
    (104, 150, 205),
    (190, 214, 233),
    (246, 245, 243),
    (240, 196, 172),
    (213, 110, 92),
    (150, 24, 48),
)


def scaled(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values stretched over 0…1; where all are equal, all are 0.

    >>> scaled(np.array([2.0, 3.0, 4.0], dtype=np.float32))
    array([0. , 0.5, 1. ], dtype=float32)
    """
    low, high = float(values.min()), float(values.max())
    return ((values - low) / (high - low) if high > low else np.zeros_like(values)).astype(np.float32)


def coloured(shares: NDArray[np.float32], *, knots: tuple[tuple[int, int, int], ...] = AMOUNT) -> Rgb:
    """The colour of each share of 0…1.

    >>> coloured(np.array([[0.0, 1.0]], dtype=np.float32)).tolist()
    [[[12, 7, 45], [252, 243, 150]]]
    """
    places = np.clip(shares, 0, 1)[..., None] * (len(knots) - 1)
    table = np.array(knots, dtype=np.float32)
    channels = [np.interp(places[..., 0], np.arange(len(knots)), table[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def hexadecimal(share: float | int, *, knots: tuple[tuple[int, int, int], ...] = AMOUNT) -> str:
    """The colour of one share, as a drawing takes it.

    >>> hexadecimal(0.0)
    '#0c072d'
    """
    return "#" + "".join(f"{value:02x}" for value in coloured(np.array(share, dtype=np.float32), knots=knots).tolist())


def enlarged(shares: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """A map over patches as a smooth map over (height, width) pixels.

    >>> enlarged(np.zeros((2, 3), dtype=np.float32), (8, 12)).shape
    (8, 12)
    """
    image = Image.fromarray(shares.astype(np.float32))
    return np.clip(np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC)), 0, 1)


def lit(picture: Rgb, shares: NDArray[np.float32]) -> Rgb:
    """The picture as bright as the map says, dim where it is 0: the form of the paper's Figure 6.

    >>> lit(np.full((4, 4, 3), 200, dtype=np.uint8), np.eye(2, dtype=np.float32)).shape
    (4, 4, 3)
    """
    light = 0.12 + 0.88 * enlarged(shares, (picture.shape[0], picture.shape[1]))[..., None]
    return (picture * light).round().astype(np.uint8)


def heated(picture: Rgb, shares: NDArray[np.float32]) -> Rgb:
    """The picture in grey under the colours of the map, the stronger the more of it there is.

    >>> heated(np.full((4, 4, 3), 200, dtype=np.uint8), np.eye(2, dtype=np.float32)).shape
    (4, 4, 3)
    """
    amount = enlarged(shares, (picture.shape[0], picture.shape[1]))
    grey = picture.astype(np.float32).mean(axis=-1, keepdims=True)
    strength = 0.25 + 0.6 * amount[..., None]
    return (grey * (1 - strength) + coloured(amount) * strength).round().clip(0, 255).astype(np.uint8)


def array(tensor: Float[Tensor, "..."]) -> NDArray[np.float32]:
    """The numbers of a tensor, wherever it is."""
    return tensor.detach().float().cpu().numpy()
