"""Images go in, small grey pictures of them come out, and how alike two of them are, pixel by pixel.

Light, contrast, size and compression change the coarse parts of a picture; what two copies share is where their edges
are. So pictures are compared after whitening: every frequency has as much to say as the others, up to where small
copies and JPEG lose it.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.shapes import Float, Tensor
from vitkit.data.decode import decode
from vitkit.data.source import Source
from vitkit.data.verify import examine, read_image

SIDE = 32
COARSE = 8
"""Frequencies, each way, of a descriptor."""
FINE = 12.0
"""The frequency from which on whitened pictures fade out."""
SHIFT = 2
"""Pixels, of 32, by which one picture may lie beside the other."""
PROMISING = 0.4
"""Likeness without a shift below which no shift is tried."""
CHUNK = 2048

Pixels = NDArray[np.uint8]


def thumbnails(
    source: Source, *, workers: int = 0, progress: Callable[[int], None] = lambda images: None
) -> NDArray[np.uint8]:
    """Every image squashed to 32 × 32 in grey, in the source's order; `progress` is told of each image."""
    small = np.empty((len(source), SIDE, SIDE), dtype=np.uint8)
    for index, found in enumerate(examine(source, _thumbnail, workers=workers)):
        small[index] = found
        progress(1)
    return small


def _thumbnail(source: Source, index: int) -> Pixels:
    content = read_image(source, index)
    if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[2] not in (1, 3):
        content = content.mean(axis=2).astype(np.uint8)
    picture = decode(content, channels=1, fit=(SIDE, SIDE))
    grey = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def cosines(side: int = SIDE) -> Float[Tensor, "K S"]:
    """The rows of the discrete cosine transform: orthogonal, each of length 1.

    >>> torch.allclose(cosines(4) @ cosines(4).T, torch.eye(4), atol=1e-6)
    True
    """
    frequency, place = torch.arange(side)[:, None], torch.arange(side)[None]
    rows = (2 / side) ** 0.5 * torch.cos(torch.pi * (2 * place + 1) * frequency / (2 * side))
    rows[0] /= 2**0.5
    return rows


def descriptors(small: Pixels) -> NDArray[np.float32]:
    """The 63 lowest frequencies of each picture but the mean, whitened, as a row of length 1; 0 for an even picture.

    >>> descriptors(np.zeros((2, SIDE, SIDE), dtype=np.uint8)).shape
    (2, 63)
    """
    rows = np.empty((len(small), COARSE**2 - 1), dtype=np.float32)
    low = cosines()[:COARSE]
    weight = radius(COARSE)
    for start in range(0, len(small), CHUNK):
        pictures = torch.from_numpy(small[start : start + CHUNK].astype(np.float32))
        waves = ((low @ pictures @ low.T) * weight).flatten(1)[:, 1:]
        length = waves.norm(dim=1, keepdim=True)
        # Less than one grey level of detail in all is rounding, not a picture.
        rows[start : start + CHUNK] = torch.where(length > SIDE, waves / length.clamp(min=1e-9), 0.0).numpy()
    return rows


def mirrored(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The descriptors of the same pictures seen in a mirror: odd waves across change their sign."""
    sign = np.where(np.arange(COARSE) % 2, -1.0, 1.0).astype(np.float32)
    return rows * np.tile(sign, COARSE)[1:]


def radius(side: int) -> Float[Tensor, "side side"]:
    """How high the frequency of each wave is; amplitudes in photos fall with it, so it whitens them."""
    return torch.hypot(torch.arange(float(side))[:, None], torch.arange(float(side))[None])


def whitened(small: Pixels) -> Float[Tensor, "N S S"]:
    """The pictures with their edges left."""
    waves = cosines()
    high = radius(SIDE)
    weight = high * torch.exp(-((high / FINE) ** 2))
    pictures = torch.from_numpy(small.astype(np.float32))
    return waves.T @ ((waves @ pictures @ waves.T) * weight) @ waves


def likeness(left: Pixels, right: Pixels) -> NDArray[np.float32]:
    """How alike each picture is to its partner: the correlation of their edges where they fit best, −1…1.

    It is that of the whole or that of the middle, whichever is less: pictures in like frames are not alike.

    >>> noise = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE), dtype=np.uint8)
    >>> likeness(noise, noise // 2 + 60).round(2).tolist(), bool(likeness(noise, noise[:, ::-1])[0] < 0.5)
    ([1.0], True)
    """
    found = np.empty(len(left), dtype=np.float32)
    for start in range(0, len(left), CHUNK):
        one, other = whitened(left[start : start + CHUNK]), whitened(right[start : start + CHUNK])
        best = _at_shift(one, other, 0, 0)
        near = best > PROMISING
        for down in range(-SHIFT, SHIFT + 1):
            for across in range(-SHIFT, SHIFT + 1):
                if near.any() and (down or across):
                    best[near] = torch.maximum(best[near], _at_shift(one[near], other[near], down, across))
        found[start : start + CHUNK] = best.numpy()
    return found


def _at_shift(
    left: Float[Tensor, "N S S"], right: Float[Tensor, "N S S"], down: int, across: int
) -> Float[Tensor, "N"]:
    """The likeness where the right pictures lie so many pixels further down and across."""
    height, width = SIDE - abs(down), SIDE - abs(across)
    top, start = max(down, 0), max(across, 0)
    beside, before = max(-down, 0), max(-across, 0)
    one = left[:, top : top + height, start : start + width]
    other = right[:, beside : beside + height, before : before + width]
    edge = SIDE // 5
    middle = slice(edge, -edge)
    return torch.minimum(_correlation(one, other), _correlation(one[:, middle, middle], other[:, middle, middle]))


def _correlation(left: Float[Tensor, "N h w"], right: Float[Tensor, "N h w"]) -> Float[Tensor, "N"]:
    one, other = (each - each.mean(dim=(1, 2), keepdim=True) for each in (left, right))
    length = (one.square().sum(dim=(1, 2)) * other.square().sum(dim=(1, 2))).sqrt()
    return (one * other).sum(dim=(1, 2)) / length.clamp(min=1e-6)
