"""Images of random fractals with class labels, generated on demand.

Each class is an iterated function system: a few affine maps that shrink the plane. Each image of the class shows the
system's attractor with slightly perturbed maps, as in FractalDB (Kataoka et al., "Pre-training without natural
images"; Nakashima et al., "Can Vision Transformers learn without natural images?"). Maps are sampled by their singular
values and drawn in color on a background, after Anderson and Farrell, "Improving fractal pre-training".

The attractor is drawn deterministically. Sequences of maps ("words") divide it into pieces of about equal mass. Every
pair of words gives a point, in one broadcast multiplication.
"""

import hashlib
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vitkit.data.config import FractalConfig
from vitkit.data.dataset import Dataset, ImageSource

CACHED_CLASSES = 8192
"""Classes kept in memory, at about 15 kB each for images of 224 px."""

_MIN_MAPS, _MAX_MAPS = 2, 8
_MAX_SINGULAR_VALUE = 0.95
_MAX_MASS = 0.6
"""A map with nearly all the mass makes a spiral to a point, and words of any length."""
_TRIAL_SIZE = 64
_FILL_RANGE = (0.14, 0.62)
"""Fraction of filled pixels: FractalDB rejects systems below; systems above are blobs."""
_MIN_SPREAD = 0.18
"""Standard deviation of the filled pixels along an axis, in sides; a full square has 0.29."""
_CLASS, _INSTANCE = 0, 1


def make_fractals(config: FractalConfig) -> Dataset:
    """Create a dataset with the splits train and val: the same classes, different instances.

    >>> data = make_fractals(FractalConfig(num_classes=10, per_class=40, size=32))
    >>> [(split, len(source)) for split, source in data.splits.items()]
    [('train', 400), ('val', 20)]
    >>> data.splits["train"].read(123).shape
    (32, 32, 3)
    """
    train = FractalSource(config, first=0, count=config.per_class)
    val = FractalSource(config, first=config.per_class, count=config.per_class_val)
    return Dataset(path="fractals", splits={"train": train, "val": val})


class FractalSource(ImageSource):
    """`count` instances of every class, starting at number `first`, generated when they are read.

    An image depends only on seed, size and color of the config, its class and its number.
    """

    always_readable = True

    def __init__(self, config: FractalConfig, *, first: int, count: int) -> None:
        digits = max(4, len(str(config.num_classes - 1)))
        self.config, self.first, self.count, self.layout = config, first, count, "fractals"
        self.classes = tuple(f"{label:0{digits}}" for label in range(config.num_classes))
        self.labels = np.repeat(np.arange(config.num_classes, dtype=np.int64), count)
        self._systems: dict[int, _System] = {}

    def name(self, index: int) -> str:
        """Return class and number, such as 0042/000017. Numbers differ between splits."""
        label, instance = self._parse_index(index)
        return f"{self.classes[label]}/{instance:06}"

    def read(self, index: int) -> NDArray[np.uint8]:
        """Generate the image: size × size, or size × size × 3 in color."""
        label, instance = self._parse_index(index)
        if label not in self._systems:
            if len(self._systems) >= CACHED_CLASSES:
                self._systems.clear()
            self._systems[label] = _sample_system(self.config.seed, label, size=self.config.size)
        system = self._systems[label]
        rng = np.random.default_rng((_INSTANCE, self.config.seed, label, instance))
        maps = _perturb(system.maps, rng)
        # Random flips along both axes and a small rotation
        view = np.eye(3)
        view[:2, :2] = _rotation(np.asarray(rng.uniform(-0.25, 0.25))) * rng.choice((-1.0, 1.0), size=2)
        pixels = _draw(maps, system.words, size=self.config.size, view=view)
        render = _render_color if self.config.color else _render_gray
        return render(pixels, system.words, rng, size=self.config.size)

    def checksum(self, index: int) -> bytes:
        """Return a checksum of what the image is generated from; it is not drawn."""
        settings = (self.config.seed, self.config.size, self.config.color, *self._parse_index(index))
        return hashlib.sha256(f"fractal {settings}".encode()).digest()

    def _parse_index(self, index: int) -> tuple[int, int]:
        """Return class and instance number of an index, which may be negative."""
        position = range(len(self))[index]
        return position // self.count, self.first + position % self.count


# Systems: sets of maps, stored as 3 × 3 matrices that act on (x, y, 1)


@dataclass(frozen=True)
class _Words:
    """Sequences of maps that divide an attractor into pieces of about equal mass: the leaves of a tree.

    Each of `levels` has the parents of its nodes in the level above, and the map that a node applies before its parent.
    """

    levels: tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]
    leaves: NDArray[np.intp]
    """Indices of the leaves among all nodes."""
    masses: NDArray[np.float64]
    """Mass of each leaf, as a fraction of the attractor."""
    addresses: NDArray[np.float64]
    """Position of each leaf when all are laid side by side in 0…1; close leaves have close addresses."""


@dataclass(frozen=True)
class _System:
    """Iterated function system: N maps, and the words by which its images are drawn."""

    maps: NDArray[np.float64]
    words: _Words


def _sample_system(seed: int, label: int, *, size: int) -> _System:
    """Sample systems until one makes a usable image.

    It is chosen at one fixed size, so that the class has the same formula at every size.
    """
    rng = np.random.default_rng((_CLASS, seed, label, 0))
    while True:
        maps = _sample_maps(rng)
        masses = _get_masses(maps)
        if masses.max() > _MAX_MASS:
            continue
        # The image must be neither empty nor a blob, and spread in both directions.
        trial = _make_words(masses, _TRIAL_SIZE)
        filled = np.flatnonzero(np.bincount(_draw(maps, trial, size=_TRIAL_SIZE)))
        fill = len(filled) / _TRIAL_SIZE**2
        spread = min(float(np.std(axis)) for axis in np.divmod(filled, _TRIAL_SIZE)) / _TRIAL_SIZE
        if _FILL_RANGE[0] <= fill <= _FILL_RANGE[1] and spread >= _MIN_SPREAD:
            return _System(maps, _make_words(masses, size))


def _sample_maps(rng: Generator) -> NDArray[np.float64]:
    """Sample maps by their singular values, with a weighted sum in the range of Anderson and Farrell."""
    count = int(rng.integers(_MIN_MAPS, _MAX_MAPS + 1))
    while True:
        larger = rng.random(count)
        smaller = larger * rng.random(count)
        total = rng.uniform(5 + count, 6 + count) / 2
        factor = total / (larger + 2 * smaller).sum()
        if factor * larger.max() < _MAX_SINGULAR_VALUE:
            break
    signs = rng.choice((-1.0, 1.0), size=(count, 1, 2))
    scales = factor * np.stack((larger, smaller), axis=-1)[:, None, :]
    rotations = _rotation(rng.uniform(0, 2 * np.pi, size=(2, count)))
    maps = np.zeros((count, 3, 3), dtype=np.float32)  # rounded, so that all CPUs agree on the formula
    maps[:, :2, :2] = (rotations[0] * scales) @ rotations[1] * signs
    maps[:, :2, 2] = rng.uniform(-1, 1, size=(count, 2))
    maps[:, 2, 2] = 1
    return maps.astype(np.float64)


def _rotation(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rotation matrices, … × 2 × 2."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack((cos, -sin, sin, cos), axis=-1).reshape(*angle.shape, 2, 2)


def _get_masses(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fraction of the attractor's mass of each map: its area, or a little more for a flat map."""
    areas = np.abs(maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0])
    areas = np.maximum(areas, 0.02 * areas.max())
    return areas / areas.sum()


def _make_words(map_masses: NDArray[np.float64], size: int) -> _Words:
    """Make words of about equal mass for an image of this size by splitting the heaviest (Tunstall's code)."""
    count = 32 + size * 5 // 4  # at least; the number of points is its square
    masses = map_masses.tolist()
    starts = (np.cumsum(map_masses) - map_masses).tolist()
    levels: list[tuple[list[int], list[int]]] = [([0], [0])]
    heap = [(-1.0, 0.0, 0, 0)]  # mass (rounded: abc and acb have the same), address, level, position
    while len(heap) < count:
        mass, address, level, position = heapq.heappop(heap)
        if level + 1 == len(levels):
            levels.append(([], []))
        parents, digits = levels[level + 1]
        for digit, (map_mass, start) in enumerate(zip(masses, starts, strict=True)):
            heapq.heappush(heap, (round(mass * map_mass, 12), address - mass * start, level + 1, len(parents)))
            parents.append(position)
            digits.append(digit)
    heap.sort(key=lambda word: word[1])
    first = np.cumsum([0] + [len(parents) for parents, _ in levels]).tolist()
    return _Words(
        levels=tuple((np.array(parents), np.array(digits)) for parents, digits in levels[1:]),
        leaves=np.array([first[level] + position for _, _, level, position in heap]),
        masses=np.array([-mass for mass, *_ in heap]),
        addresses=np.array([address for _, address, *_ in heap]),
    )


def _perturb(maps: NDArray[np.float64], rng: Generator) -> NDArray[np.float64]:
    """Scale one of the six parameters in all maps, as in FractalDB, and all parameters of one map."""
    maps = maps.copy()
    row, column = divmod(int(rng.integers(6)), 3)
    maps[:, row, column] *= rng.uniform(0.8, 1.2)
    maps[rng.integers(len(maps)), :2] *= rng.uniform(0.85, 1.1)
    squares = np.square(maps[:, :2, :2]).sum(axis=(1, 2))
    areas = maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]
    largest = np.sqrt((squares + np.sqrt(np.maximum(squares**2 - 4 * areas**2, 0))) / 2)  # largest singular value
    maps[:, :2, :2] *= np.minimum(1, _MAX_SINGULAR_VALUE / largest)[:, None, None]
    return maps


def _draw(
    maps: NDArray[np.float64], words: _Words, *, size: int, view: NDArray[np.float64] | None = None
) -> NDArray[np.intp]:
    """Return the flat pixel index of each point of the attractor, seen through `view` and fitted into a square.

    Points belong to pairs of words; their mass is the product of the words' masses. Matrix products differ in the last
    bit between CPUs: rounded to half the bits they do not.
    """
    levels = [np.eye(3)[None]]
    for parents, digits in words.levels:
        levels.append(levels[-1][parents] @ maps[digits])
    pieces: NDArray[np.floating] = np.concatenate(levels)[words.leaves]  # each word as one map
    # The center of mass of the attractor is the fixed point of the mean map.
    mean = np.tensordot(_get_masses(maps), maps, axes=1)
    center = np.append(np.linalg.solve(np.eye(2) - mean[:2, :2], mean[:2, 2]), 1.0)
    points = (pieces @ center).astype(np.float32)
    if view is not None:
        pieces = view @ pieces
    pieces = pieces.astype(np.float32)
    x, y = (
        np.multiply.outer(pieces[:, axis, 0], points[:, 0])
        + (np.multiply.outer(pieces[:, axis, 1], points[:, 1]) + pieces[:, axis, 2:])
        for axis in (0, 1)
    )
    return _to_pixels(x.ravel(), y.ravel(), size=size)


def _to_pixels(x: NDArray[np.float32], y: NDArray[np.float32], *, size: int) -> NDArray[np.intp]:
    """Return flat pixel indices of points, scaled equally on both axes to fit. The inputs are overwritten."""
    left, top = x.min(), y.min()
    width, height = x.max() - left, y.max() - top
    scale = 0.998 * size / max(width, height)  # rounding must not carry a point over the edge
    x -= left - (size / scale - width) / 2
    y -= top - (size / scale - height) / 2
    x *= scale
    y *= scale
    pixels = y.astype(np.intp)
    pixels *= size
    pixels += x.astype(np.int32)
    return pixels


def _sum_per_pixel(pixels: NDArray[np.intp], masses: NDArray[np.float64], *, size: int) -> NDArray[np.float64]:
    """Return the total mass in each pixel."""
    return np.bincount(pixels, masses.ravel(), minlength=size * size).astype(np.float64, copy=False)


def _to_brightness(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Map mass to 0…1 logarithmically: thin parts stay visible and dense parts do not saturate."""
    return np.minimum(np.log1p(mass * (3 / mass.mean())) / np.log1p(12), 1)


def _render_gray(pixels: NDArray[np.intp], words: _Words, _: Generator, *, size: int) -> NDArray[np.uint8]:
    """Render density as brightness on black."""
    mass = _sum_per_pixel(pixels, np.multiply.outer(words.masses, words.masses), size=size)
    filled = np.flatnonzero(mass)
    image = np.zeros((size, size), dtype=np.uint8)
    image.reshape(-1)[filled] = 40 + 215 * _to_brightness(mass[filled])
    return image


def _render_color(pixels: NDArray[np.intp], words: _Words, rng: Generator, *, size: int) -> NDArray[np.uint8]:
    """Render addresses as hues on a smooth background, light on dark or reverse. Colors do not depend on the class."""
    is_dark = bool(rng.random() < 0.5)
    palette, image = _palette(rng, is_dark=is_dark), _background(rng, is_dark=not is_dark, size=size)
    mass = _sum_per_pixel(pixels, np.multiply.outer(words.masses, words.masses), size=size)
    address = _sum_per_pixel(pixels, np.multiply.outer(words.masses * words.addresses, words.masses), size=size)
    filled = np.flatnonzero(mass)
    mass, address = mass[filled], address[filled] / mass[filled]
    colors = palette[(address * len(palette)).astype(np.intp)]
    flat = image.reshape(-1, 3)
    behind = flat[filled].astype(np.float32)
    opacity = (0.2 + 0.8 * _to_brightness(mass)).astype(np.float32)
    flat[filled] = behind + (colors - behind) * opacity[:, None]
    return image


def _palette(rng: Generator, *, is_dark: bool) -> NDArray[np.float32]:
    """Return 64 colors along a part of the circle of hues."""
    hues = rng.uniform() + rng.uniform(-0.7, 0.7) * np.linspace(0, 1, 64)
    waves = np.cos(2 * np.pi * (hues[:, None] + np.arange(3) / 3))
    center, amplitude = (70.0, 70.0) if is_dark else (180.0, 75.0)
    return (center + rng.uniform(0.3, 1.0) * amplitude * waves).astype(np.float32)


def _background(rng: Generator, *, is_dark: bool, size: int) -> NDArray[np.uint8]:
    """Return a smooth gradient between nine random colors, size × size × 3."""
    low = 0 if is_dark else 150
    grid = rng.integers(low, low + 105, size=(3, 3, 3), dtype=np.uint8)
    return np.array(Image.fromarray(grid).resize((size, size), Image.Resampling.BICUBIC))
