"""A class and an instance number go in, a picture of a random fractal comes out: labelled images without a camera.

Each class is an iterated function system: a few affine maps that shrink the plane. Each image of the class draws the
system's attractor with the maps a little changed, as FractalDB does (Kataoka et al., "Pre-training without natural
images"; Nakashima et al., "Can Vision Transformers learn without natural images?"). Maps are sampled by their singular
values and drawn in colour on a background, after Anderson and Farrell, "Improving fractal pre-training".

The attractor is drawn without chance. Sequences of maps ("words") split it into pieces of about equal mass; each word
after each word gives the square of that many points, in one broadcast multiplication.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.errors import ConfigError
from vitkit.data.source import DataSet, Source

MOST_IMAGES = 200_000_000
"""Labels take 8 bytes an image."""
CACHED_CLASSES = 8192
"""A prepared class for 224 px takes about 15 kB."""

_FEWEST_MAPS, _MOST_MAPS = 2, 8
_LARGEST_SHRINK = 0.95
_LARGEST_SHARE = 0.6
"""One map with nearly all the mass makes a spiral to a point, and words of any length."""
_TRIAL_SIZE = 64
_FILLED = (0.14, 0.62)
"""FractalDB leaves out systems that fill too little; those that fill too much are blobs."""
_LEAST_SPREAD = 0.18
"""The standard deviation of the filled pixels along an axis, in sides; a full square has 0.29."""
_CLASS, _INSTANCE = 0, 1


@dataclass(frozen=True, kw_only=True)
class FractalConfig:
    """How many fractals, and how they look. `size` is the side in pixels; `per_class` counts training images.

    The validation split has a twentieth of that, at least one image a class.

    >>> FractalConfig(classes=1)
    Traceback (most recent call last):
    vitkit.core.errors.ConfigError: fractals.classes is out of range (expected 2 to 10000000, got 1)
    """

    classes: int = 1000
    per_class: int = 1000
    size: int = 64
    colour: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "classes": (2, 10_000_000),
            "per_class": (1, MOST_IMAGES),
            "size": (8, 2048),
            "seed": (0, 2**32 - 1),  # one word of the seed sequence
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                message = f"fractals.{name} is out of range"
                raise ConfigError(message, expected=f"{least} to {most}", got=getattr(self, name))
        if self.classes * self.per_class > MOST_IMAGES:
            raise ConfigError(
                "too many fractals: their labels would not fit into memory",
                expected=f"classes × per_class ≤ {MOST_IMAGES:,}",
                got=f"{self.classes:,} × {self.per_class:,}",
                hint="lower fractals.per_class; augmentation makes more of each image",
            )

    @property
    def per_class_val(self) -> int:
        """Validation images of each class."""
        return max(1, self.per_class // 20)


def fractal_data(config: FractalConfig) -> DataSet:
    """Fractals as a data set with the splits train and val, of the same classes and of other instances.

    >>> data = fractal_data(FractalConfig(classes=10, per_class=40, size=32))
    >>> [(split, len(source)) for split, source in data.splits.items()]
    [('train', 400), ('val', 20)]
    >>> data.splits["train"].content(123).shape
    (32, 32, 3)
    """
    train = FractalSource(config, first=0, count=config.per_class)
    val = FractalSource(config, first=config.per_class, count=config.per_class_val)
    return DataSet(place="fractals", splits={"train": train, "val": val})


class FractalSource(Source):
    """`count` instances of every class, from number `first` on, class by class; drawn when asked for.

    An image depends on the config's seed, size and colour, its class and its number, and on nothing drawn before.
    """

    is_sound = True

    def __init__(self, config: FractalConfig, *, first: int, count: int) -> None:
        digits = max(4, len(str(config.classes - 1)))
        self.config = config
        self.first = first
        self.count = count
        self.kind = "fractals"
        self.classes = tuple(f"{label:0{digits}}" for label in range(config.classes))
        self.labels = np.repeat(np.arange(config.classes, dtype=np.int64), count)
        self._prepared: dict[int, _System] = {}

    def name(self, index: int) -> str:
        """Class and number: 0042/000017. Numbers of other splits are other numbers."""
        label, instance = self._place(index)
        return f"{self.classes[label]}/{instance:06}"

    def content(self, index: int) -> NDArray[np.uint8]:
        """The picture, drawn now: size × size, × 3 where there is colour."""
        label, instance = self._place(index)
        system = self._system(label)
        rng = np.random.default_rng((_INSTANCE, self.config.seed, label, instance))
        maps = _perturbed(system.maps, rng)
        size, words = self.config.size, system.words
        pixels = _draw(maps, words, size=size, view=_random_view(rng))
        return _coloured(pixels, words, rng, size=size) if self.config.colour else _grey(pixels, words, size=size)

    def _place(self, index: int) -> tuple[int, int]:
        """The class and the instance number of an index, which may count from the end."""
        position = range(len(self))[index]
        return position // self.count, self.first + position % self.count

    def _system(self, label: int) -> "_System":
        """The system of a class, kept for the next image of the class."""
        if label not in self._prepared:
            if len(self._prepared) >= CACHED_CLASSES:
                self._prepared.clear()
            self._prepared[label] = _sample_system(self.config.seed, label, size=self.config.size)
        return self._prepared[label]


# Systems: a class is a set of maps, kept as 3 × 3 matrices that act on (x, y, 1)


@dataclass(frozen=True)
class _Words:
    """Sequences of maps that split an attractor into pieces of about equal mass: the leaves of a tree.

    Each of `levels` has its nodes' parents in the level above, and the map that a node does before its parent's maps.
    """

    levels: tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]
    leaves: NDArray[np.intp]
    """Where the leaves are among all nodes."""
    masses: NDArray[np.float64]
    """The share of the attractor in each leaf."""
    addresses: NDArray[np.float64]
    """Where each leaf begins when all are laid side by side in 0…1: near leaves have near addresses."""


@dataclass(frozen=True)
class _System:
    """An iterated function system: N maps, and the words by which its pictures are drawn."""

    maps: NDArray[np.float64]
    words: _Words


def _sample_system(seed: int, label: int, *, size: int) -> _System:
    """The system of a class: the first of a sequence of random ones that makes a picture worth looking at.

    It is chosen at one fixed size, so that the class is the same formula at every size.
    """
    rng = np.random.default_rng((_CLASS, seed, label, 0))
    while True:
        maps = _sample_maps(rng)
        shares = _shares(maps)
        if shares.max() > _LARGEST_SHARE:
            continue
        trial = _split(shares, _words_for(_TRIAL_SIZE))
        if _worth_drawing(_draw(maps, trial, size=_TRIAL_SIZE), size=_TRIAL_SIZE):
            return _System(maps, _split(shares, _words_for(size)))


def _sample_maps(rng: Generator) -> NDArray[np.float64]:
    """Maps by their singular values, whose weighted sum keeps to the band that Anderson and Farrell found good."""
    count = int(rng.integers(_FEWEST_MAPS, _MOST_MAPS + 1))
    while True:
        larger = rng.random(count)
        smaller = larger * rng.random(count)
        total = rng.uniform(5 + count, 6 + count) / 2
        factor = total / (larger + 2 * smaller).sum()
        if factor * larger.max() < _LARGEST_SHRINK:
            break
    signs = rng.choice((-1.0, 1.0), size=(count, 1, 2))
    scales = factor * np.stack((larger, smaller), axis=-1)[:, None, :]
    turns = _rotation(rng.uniform(0, 2 * np.pi, size=(2, count)))
    maps = np.zeros((count, 3, 3), dtype=np.float32)  # rounded, so that processors agree on the formula
    maps[:, :2, :2] = (turns[0] * scales) @ turns[1] * signs
    maps[:, :2, 2] = rng.uniform(-1, 1, size=(count, 2))
    maps[:, 2, 2] = 1
    return maps.astype(np.float64)


def _rotation(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Matrices … × 2 × 2 that turn by each angle."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack((cos, -sin, sin, cos), axis=-1).reshape(*angle.shape, 2, 2)


def _shares(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of the attractor's mass that each map makes: by area, and not quite nothing for a flat one."""
    areas = np.abs(maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0])
    areas = np.maximum(areas, 0.02 * areas.max())
    return areas / areas.sum()


def _words_for(size: int) -> int:
    """How many words give enough points for a picture: their square, and small pictures need more for a pixel."""
    return 32 + size * 5 // 4


def _split(shares: NDArray[np.float64], count: int) -> _Words:
    """At least `count` words of about equal mass: the heaviest is split until there are enough (Tunstall's code)."""
    masses = shares.tolist()
    starts = (np.cumsum(shares) - shares).tolist()
    levels: list[tuple[list[int], list[int]]] = [([0], [0])]
    heap = [(-1.0, 0.0, 0, 0)]  # mass (rounded, for abc and acb weigh the same), address, level, position in it
    while len(heap) < count:
        mass, address, level, position = heapq.heappop(heap)
        if level + 1 == len(levels):
            levels.append(([], []))
        parents, digits = levels[level + 1]
        for digit, (share, start) in enumerate(zip(masses, starts, strict=True)):
            heapq.heappush(heap, (round(mass * share, 12), address - mass * start, level + 1, len(parents)))
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


def _worth_drawing(pixels: NDArray[np.intp], *, size: int) -> bool:
    """Whether a picture is neither empty nor a blob, and spreads in both directions by more than a few far specks."""
    filled = np.flatnonzero(np.bincount(pixels))
    share = len(filled) / size**2
    spread = min(float(np.std(axis)) for axis in np.divmod(filled, size)) / size
    return _FILLED[0] <= share <= _FILLED[1] and spread >= _LEAST_SPREAD


# Instances: the maps of one image


def _perturbed(maps: NDArray[np.float64], rng: Generator) -> NDArray[np.float64]:
    """The maps with one of their six parameters scaled in all of them, as in FractalDB, and one map scaled whole."""
    maps = maps.copy()
    row, column = divmod(int(rng.integers(6)), 3)
    maps[:, row, column] *= rng.uniform(0.8, 1.2)
    maps[rng.integers(len(maps)), :2] *= rng.uniform(0.85, 1.1)
    squares = np.square(maps[:, :2, :2]).sum(axis=(1, 2))
    areas = maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]
    largest = np.sqrt((squares + np.sqrt(np.maximum(squares**2 - 4 * areas**2, 0))) / 2)  # the singular value
    maps[:, :2, :2] *= np.minimum(1, _LARGEST_SHRINK / largest)[:, None, None]
    return maps


def _random_view(rng: Generator) -> NDArray[np.float64]:
    """A flip along each axis or not, and a small turn."""
    view = np.eye(3)
    view[:2, :2] = _rotation(np.asarray(rng.uniform(-0.25, 0.25))) * rng.choice((-1.0, 1.0), size=2)
    return view


# Pictures


def _draw(
    maps: NDArray[np.float64], words: _Words, *, size: int, view: NDArray[np.float64] | None = None
) -> NDArray[np.intp]:
    """The attractor of the maps, seen through `view` and fitted into a square: the flat pixel of each of its points.

    The points are those of each word after each word; their mass is the product of the words' masses. Products of
    matrices differ in the last bit between processors: rounded to half the bits, they and the picture do not.
    """
    pieces = _pieces(maps, words)
    points = (pieces @ _centre(maps)).astype(np.float32)
    if view is not None:
        pieces = view @ pieces
    pieces = pieces.astype(np.float32)
    right, down = (
        np.multiply.outer(pieces[:, axis, 0], points[:, 0])
        + (np.multiply.outer(pieces[:, axis, 1], points[:, 1]) + pieces[:, axis, 2:])
        for axis in (0, 1)
    )
    return _pixels(right.ravel(), down.ravel(), size=size)


def _pieces(maps: NDArray[np.float64], words: _Words) -> NDArray[np.floating]:
    """Each word as one map."""
    level = np.eye(3)[None]
    levels = [level]
    for parents, digits in words.levels:
        level = level[parents] @ maps[digits]
        levels.append(level)
    return np.concatenate(levels)[words.leaves]


def _centre(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The attractor's centre of mass, (x, y, 1): the mean map's fixed point."""
    mean = np.tensordot(_shares(maps), maps, axes=1)
    return np.append(np.linalg.solve(np.eye(2) - mean[:2, :2], mean[:2, 2]), 1.0)


def _pixels(right: NDArray[np.float32], down: NDArray[np.float32], *, size: int) -> NDArray[np.intp]:
    """The flat pixels of points in a picture that just holds them all, one scale for both axes. Changes its inputs."""
    left, top = right.min(), down.min()
    width, height = right.max() - left, down.max() - top
    scale = 0.998 * size / max(width, height)  # rounding must not carry a point over the edge
    right -= left - (size / scale - width) / 2
    down -= top - (size / scale - height) / 2
    right *= scale
    down *= scale
    pixels = down.astype(np.intp)
    pixels *= size
    pixels += right.astype(np.int32)
    return pixels


def _gather(pixels: NDArray[np.intp], masses: NDArray[np.float64], *, size: int) -> NDArray[np.float64]:
    """The sum of what falls into each pixel."""
    return np.bincount(pixels, masses.ravel(), minlength=size * size).astype(np.float64, copy=False)


def _levels(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mass as brightness, 0…1, by its logarithm: thin parts stay visible and dense ones do not saturate."""
    return np.minimum(np.log1p(mass * (3 / mass.mean())) / np.log1p(12), 1)


def _grey(pixels: NDArray[np.intp], words: _Words, *, size: int) -> NDArray[np.uint8]:
    """Brighter where the attractor is denser, on black."""
    mass = _gather(pixels, np.multiply.outer(words.masses, words.masses), size=size)
    filled = np.flatnonzero(mass)
    picture = np.zeros((size, size), dtype=np.uint8)
    picture.reshape(-1)[filled] = 40 + 215 * _levels(mass[filled])
    return picture


def _coloured(pixels: NDArray[np.intp], words: _Words, rng: Generator, *, size: int) -> NDArray[np.uint8]:
    """Hues by address on a smooth background, light on dark or dark on light; colours say nothing of the class."""
    is_dark = bool(rng.random() < 0.5)
    palette, picture = _palette(rng, is_dark=is_dark), _background(rng, is_dark=not is_dark, size=size)
    mass = _gather(pixels, np.multiply.outer(words.masses, words.masses), size=size)
    address = _gather(pixels, np.multiply.outer(words.masses * words.addresses, words.masses), size=size)
    filled = np.flatnonzero(mass)
    mass, address = mass[filled], address[filled] / mass[filled]
    colours = palette[(address * len(palette)).astype(np.intp)]
    flat = picture.reshape(-1, 3)
    behind = flat[filled].astype(np.float32)
    opacity = (0.2 + 0.8 * _levels(mass)).astype(np.float32)
    flat[filled] = behind + (colours - behind) * opacity[:, None]
    return picture


def _palette(rng: Generator, *, is_dark: bool) -> NDArray[np.float32]:
    """Colours, 64 × 3, through a part of the circle of hues."""
    hues = rng.uniform() + rng.uniform(-0.7, 0.7) * np.linspace(0, 1, 64)
    waves = np.cos(2 * np.pi * (hues[:, None] + np.arange(3) / 3))
    middle, reach = (70.0, 70.0) if is_dark else (180.0, 75.0)
    return (middle + rng.uniform(0.3, 1.0) * reach * waves).astype(np.float32)


def _background(rng: Generator, *, is_dark: bool, size: int) -> NDArray[np.uint8]:
    """Nine random colours that run into each other, size × size × 3."""
    low = 0 if is_dark else 150
    spots = rng.integers(low, low + 105, size=(3, 3, 3), dtype=np.uint8)
    return np.array(Image.fromarray(spots).resize((size, size), Image.Resampling.BICUBIC))
