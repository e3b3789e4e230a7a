"""Near-duplicates: pairs of images that show the same, found by pixels and by the features of a model.

Light, contrast, size and compression change the low frequencies of an image; what copies share is the position of their
edges. Gray thumbnails are therefore compared after whitening, which gives all frequencies equal weight up to where
small copies and JPEG lose them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.verify import map_images, read_image
from vitkit.evaluation.features import Excluded, nearest_neighbors

MIN_PIXELS, MAX_RELATIVE = 0.85, 0.2
"""Similarity of pixels of near-duplicates, and their distance relative to that of the most similar one of many random
images. All photos of trousers are similar, but not copies of each other."""
MIN_PIXELS_COPY = 0.995
"""Similarity of pixels from which on the relative distance does not matter: that of a photo saved or resized again,
which may occur ten times. Hardly any two images of Fashion-MNIST and MNIST are as similar."""
MIN_FEATURES, MAX_RELATIVE_FEATURES = 0.85, 0.5
"""The same for the cosine of features. If features agree, pixels need to agree less:"""
MIN_PIXELS_WITH_FEATURES, MAX_RELATIVE_WITH_FEATURES = 0.65, 0.6
REFERENCE_DRAWS, REFERENCE_SIZE = 4, 1000
"""Random draws, and images per draw, for the reference similarity: the second lowest, as draws may contain copies."""
MIN_DESCRIPTORS = 0.7
"""Cosine of descriptors from which on pixels are compared."""
MAX_PARTNERS = 10
"""Near-duplicates that are searched per image. Of a thousand copies, each leads to some others."""
SIDE = 32
COARSE = 8
"""Number of frequencies per axis of a descriptor."""
CUTOFF = 12.0
"""Frequency from which on whitened thumbnails fade out."""
MAX_SHIFT = 2
"""Largest shift between two thumbnails, in pixels of 32."""
MIN_UNSHIFTED = 0.4
"""Similarity without a shift below which no shift is tried."""
CHUNK_SIZE = 2048

Thumbnails = NDArray[np.uint8]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


def make_thumbnails(
    source: ImageSource, *, workers: int = 0, progress: Callable[[int], None] = lambda images: None
) -> Thumbnails:
    """Return every image squashed to 32 × 32 gray pixels, in the order of the source."""
    thumbnails = np.empty((len(source), SIDE, SIDE), dtype=np.uint8)
    for index, thumbnail in enumerate(map_images(source, _make_thumbnail, workers=workers)):
        thumbnails[index] = thumbnail
        progress(1)
    return thumbnails


def _make_thumbnail(source: ImageSource, index: int) -> Thumbnails:
    stored = read_image(source, index)
    if isinstance(stored, np.ndarray) and stored.ndim == 3 and stored.shape[2] not in (1, 3):
        stored = stored.mean(axis=2).astype(np.uint8)
    image = decode(stored, channels=1, draft_size=(SIDE, SIDE))
    gray = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def dct_matrix(side: int = SIDE) -> Float[Tensor, "K S"]:
    """Return the orthonormal matrix of the discrete cosine transform."""
    frequency, position = torch.arange(side)[:, None], torch.arange(side)[None]
    rows = (2 / side) ** 0.5 * torch.cos(torch.pi * (2 * position + 1) * frequency / (2 * side))
    rows[0] /= 2**0.5
    return rows


def compute_descriptors(thumbnails: Thumbnails) -> Floats:
    """Return the 63 lowest whitened frequencies except the mean, as unit vectors; 0 for a uniform image."""
    descriptors = np.empty((len(thumbnails), COARSE**2 - 1), dtype=np.float32)
    low = dct_matrix()[:COARSE]
    weight = frequency_grid(COARSE)
    for start in range(0, len(thumbnails), CHUNK_SIZE):
        chunk = torch.from_numpy(thumbnails[start : start + CHUNK_SIZE].astype(np.float32))
        spectrum = ((low @ chunk @ low.T) * weight).flatten(1)[:, 1:]
        norm = spectrum.norm(dim=1, keepdim=True)
        # Less than one gray level of detail in total is rounding.
        descriptors[start : start + CHUNK_SIZE] = torch.where(norm > SIDE, spectrum / norm.clamp(min=1e-9), 0.0).numpy()
    return descriptors


def flip_descriptors(descriptors: Floats) -> Floats:
    """Return the descriptors of the horizontally flipped images: odd horizontal frequencies change their sign."""
    sign = np.where(np.arange(COARSE) % 2, -1.0, 1.0).astype(np.float32)
    return descriptors * np.tile(sign, COARSE)[1:]


def frequency_grid(side: int) -> Float[Tensor, "side side"]:
    """Return the frequency of each coefficient. Amplitudes in photos fall with it, so it whitens them."""
    return torch.hypot(torch.arange(float(side))[:, None], torch.arange(float(side))[None])


def whiten(thumbnails: Thumbnails) -> Float[Tensor, "N S S"]:
    """Return the thumbnails with equal weight of all frequencies, which leaves the edges."""
    dct = dct_matrix()
    frequency = frequency_grid(SIDE)
    weight = frequency * torch.exp(-((frequency / CUTOFF) ** 2))
    pixels = torch.from_numpy(thumbnails.astype(np.float32))
    return dct.T @ ((dct @ pixels @ dct.T) * weight) @ dct


def compare_thumbnails(left: Thumbnails, right: Thumbnails) -> Floats:
    """Return the similarity of each pair: the correlation of their edges at the best shift, −1…1.

    It is the smaller one of the whole and of the center, so that equal frames do not make images similar.
    """
    similarity = np.empty(len(left), dtype=np.float32)
    shifts = [shift for shift in product(range(-MAX_SHIFT, MAX_SHIFT + 1), repeat=2) if any(shift)]
    for start in range(0, len(left), CHUNK_SIZE):
        one, other = whiten(left[start : start + CHUNK_SIZE]), whiten(right[start : start + CHUNK_SIZE])
        best = _correlate_shifted(one, other, 0, 0)
        close = best > MIN_UNSHIFTED
        for down, across in shifts if close.any() else ():
            best[close] = torch.maximum(best[close], _correlate_shifted(one[close], other[close], down, across))
        similarity[start : start + CHUNK_SIZE] = best.numpy()
    return similarity


def _correlate_shifted(
    left: Float[Tensor, "N S S"], right: Float[Tensor, "N S S"], down: int, across: int
) -> Float[Tensor, "N"]:
    """Return the similarity if the right images are shifted by so many pixels."""
    rows, columns = SIDE - abs(down), SIDE - abs(across)
    one = left[:, max(down, 0) :, max(across, 0) :][:, :rows, :columns]
    other = right[:, max(-down, 0) :, max(-across, 0) :][:, :rows, :columns]
    center = slice(SIDE // 5, -(SIDE // 5))
    return torch.minimum(_correlate(one, other), _correlate(one[:, center, center], other[:, center, center]))


def _correlate(left: Float[Tensor, "N h w"], right: Float[Tensor, "N h w"]) -> Float[Tensor, "N"]:
    one, other = (images - images.mean(dim=(1, 2), keepdim=True) for images in (left, right))
    norm = (one.square().sum(dim=(1, 2)) * other.square().sum(dim=(1, 2))).sqrt()
    return (one * other).sum(dim=(1, 2)) / norm.clamp(min=1e-6)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageDescriptors:
    """Thumbnails of the images of a split, their descriptors, and their features if there is a model."""

    thumbnails: Thumbnails
    descriptors: Floats
    features: Floats | None = None

    @classmethod
    def from_thumbnails(cls, thumbnails: Thumbnails, features: Floats | None = None) -> "ImageDescriptors":
        """Compute the descriptors of thumbnails."""
        return cls(thumbnails=thumbnails, descriptors=compute_descriptors(thumbnails), features=features)

    def flip(self) -> "ImageDescriptors":
        """Return the descriptors of the horizontally flipped images, with the features of the images themselves."""
        flipped = self.thumbnails[:, :, ::-1]
        return replace(self, thumbnails=flipped, descriptors=flip_descriptors(self.descriptors))

    def __len__(self) -> int:
        return len(self.thumbnails)


@dataclass(frozen=True, kw_only=True)
class ImageRef:
    """An image of a dataset: split and index."""

    split: str
    index: int


@dataclass(frozen=True, kw_only=True)
class NearDuplicate:
    """Two images that show the same. `pixels` is the similarity of their edges, `features` the cosine of features."""

    one: ImageRef
    other: ImageRef
    pixels: float
    features: float | None
    flipped: bool


PairMatch = tuple[int, int, float, float | None]
"""Row, column, pixels and features of a near-duplicate."""


def list_searches(splits: Mapping[str, ImageDescriptors], *, within_splits: bool) -> list[tuple[str, str]]:
    """Return the pairs of splits that are compared: any two, and also each with itself if `within_splits`."""
    return [*combinations(splits, 2), *((name, name) for name in splits if within_splits)]


def find_near_duplicates(
    splits: Mapping[str, ImageDescriptors],
    *,
    within_splits: bool = False,
    match_flips: bool = False,
    progress: Callable[[int], None] = lambda images: None,
) -> list[NearDuplicate]:
    """Return pairs of images that show the same, most similar first.

    Pairs are across splits, and also within them if `within_splits`. `progress` is called with the number of images
    that were searched for.
    """
    pairs: list[NearDuplicate] = []
    for name, other_name in list_searches(splits, within_splits=within_splits):
        # The larger split is scanned block by block, for each block of the smaller one.
        small, large = sorted((name, other_name), key=lambda split: len(splits[split]))
        exclude: Excluded = "self and before" if small == large else "nothing"
        matches: dict[tuple[int, int], NearDuplicate] = {}
        for flipped in (False, True) if match_flips else (False,):
            left = splits[small].flip() if flipped else splits[small]
            for row, column, pixels, features in _search(left, splits[large], exclude=exclude, progress=progress):
                refs = [ImageRef(split=small, index=row), ImageRef(split=large, index=column)]
                one, other = refs if small == name else reversed(refs)
                pair = NearDuplicate(one=one, other=other, pixels=pixels, features=features, flipped=flipped)
                matches.setdefault((row, column), pair)
        pairs += matches.values()
    return sorted(pairs, key=lambda pair: -pair.pixels)


def _search(
    left: ImageDescriptors, right: ImageDescriptors, *, exclude: Excluded, progress: Callable[[int], None]
) -> Iterator[PairMatch]:
    """Find candidates by descriptors and features, and yield those that are near-duplicates."""
    search = partial(nearest_neighbors, count=MAX_PARTNERS, exclude=exclude)
    searches = [search(left.descriptors, right.descriptors)]
    if left.features is not None and right.features is not None:
        searches.append(search(left.features, right.features))
    for blocks in zip(*searches, strict=True):
        pairs = []
        for block, min_cosine in zip(blocks, (MIN_DESCRIPTORS, MIN_FEATURES), strict=False):
            row, neighbor = (block.cosines >= min_cosine).nonzero(as_tuple=True)
            pairs.append(torch.stack([row + block.start, block.indices[row, neighbor]], dim=1))
        candidates: Indices = torch.cat(pairs).unique(dim=0).numpy()
        if len(candidates):
            yield from _filter_candidates(left, right, candidates[:, 0], candidates[:, 1])
        progress(len(blocks[0].indices))


def _filter_candidates(
    left: ImageDescriptors, right: ImageDescriptors, rows: Indices, columns: Indices
) -> Iterator[PairMatch]:
    pixels = compare_thumbnails(left.thumbnails[rows], right.thumbnails[columns])
    features = _cosine_pairs(left, rows, right, columns)
    close = pixels >= (MIN_PIXELS if features is None else MIN_PIXELS_WITH_FEATURES)
    rows, columns, pixels = rows[close], columns[close], pixels[close]
    features = None if features is None else features[close]
    images, image_of_row = np.unique(rows, return_inverse=True)
    reference, feature_reference = reference_similarity(left, right, images)
    same = is_near_duplicate(pixels, reference[image_of_row])
    if features is not None and feature_reference is not None:
        agrees = features >= MIN_FEATURES
        agrees &= _relative_distance(features, feature_reference[image_of_row]) <= MAX_RELATIVE_FEATURES
        agrees &= pixels >= MIN_PIXELS_WITH_FEATURES
        agrees &= _relative_distance(pixels, reference[image_of_row]) <= MAX_RELATIVE_WITH_FEATURES
        same |= agrees
    for match in np.flatnonzero(same):
        cosine = None if features is None else min(float(features[match]), 1.0)
        yield int(rows[match]), int(columns[match]), min(float(pixels[match]), 1.0), cosine


def _relative_distance(similarity: Floats, reference: Floats) -> Floats:
    return ((1 - similarity) / np.maximum(1 - reference, 1e-6)).astype(np.float32)


def is_near_duplicate(pixels: Floats, reference: Floats) -> NDArray[np.bool_]:
    """Decide by the similarity of pixels alone, given the reference similarity of each image."""
    outstanding = (pixels >= MIN_PIXELS) & (_relative_distance(pixels, reference) <= MAX_RELATIVE)
    return np.logical_or(pixels >= MIN_PIXELS_COPY, outstanding)


def reference_similarity(
    left: ImageDescriptors, right: ImageDescriptors, rows: Indices
) -> tuple[Floats, Floats | None]:
    """Return the similarity of each row to the most similar one of many random images, by pixels and by features."""
    size = min(REFERENCE_SIZE, len(right) // REFERENCE_DRAWS)
    with_features = left.features is not None and right.features is not None
    if size == 0 or not len(rows):
        zeros = np.zeros(len(rows), dtype=np.float32)
        return zeros, zeros if with_features else None
    pixels, features = [], []
    draws = np.random.default_rng(0).permutation(len(right))[: REFERENCE_DRAWS * size].reshape(REFERENCE_DRAWS, size)
    for draw in draws:
        blocks = nearest_neighbors(left.descriptors[rows], right.descriptors[draw], count=1)
        nearest = np.concatenate([block.indices[:, 0].numpy() for block in blocks])
        pixels.append(compare_thumbnails(left.thumbnails[rows], right.thumbnails[draw[nearest]]))
        if left.features is not None and right.features is not None:
            blocks = nearest_neighbors(left.features[rows], right.features[draw], count=1)
            features.append(np.concatenate([block.cosines[:, 0].numpy() for block in blocks]))
    return np.sort(pixels, axis=0)[1], np.sort(features, axis=0)[1] if with_features else None


def _cosine_pairs(left: ImageDescriptors, rows: Indices, right: ImageDescriptors, columns: Indices) -> Floats | None:
    """Return the cosine of the features of each pair; None without features."""
    if left.features is None or right.features is None:
        return None
    one, other = left.features[rows].astype(np.float32), right.features[columns].astype(np.float32)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines: Floats = (one * other).sum(axis=1) / np.maximum(norms, 1e-12)
    return cosines
