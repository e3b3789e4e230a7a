"""Small pictures, features and labels go in; near-duplicates and images whose label their neighbours doubt come out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitkit.core.shapes import Bool, Float, Int, Tensor
from vitkit.data.source import UNLABELLED
from vitkit.evaluate.fewshot import NEIGHBOURS, TEMPERATURE
from vitkit.evaluate.least_squares import left_out, sharpened, solve
from vitkit.evaluate.neighbours import Hidden, Nearest, nearest
from vitkit.evaluate.thumbnails import descriptors, likeness, mirrored

ALIKE, OUTSTANDING = 0.85, 0.2
"""Likeness of pixels from which on two pictures are one, if they also stand out: at most this share of the distance
to the likest of many images drawn at random. Trousers are all alike, and are not copies of each other."""
SAME = 0.995
"""Likeness of pixels from which on two pictures are one even if they do not stand out: saved or scaled again, a photo
is so alike to itself, and may be there ten times. Of Fashion-MNIST's and MNIST's own images, hardly any two are."""
MODEL_ALIKE, MODEL_OUTSTANDING = 0.85, 0.5
"""The same for the cosine of features. Where a model finds two images alike, pixels need not agree as much."""
ALIKE_TO_BOTH, OUTSTANDING_TO_BOTH = 0.65, 0.6
FOLDS, DRAWN = 4, 1000
"""Draws, and images in each, that say what is usual. The last but one counts: the two likest may hold copies."""
WORTH_A_LOOK = 0.7
"""Cosine of descriptors from which on pixels are compared."""
PARTNERS = 10
"""Near-duplicates of one image that are looked for: of a thousand copies, each leads to some others."""
SPARE = 10
"""Neighbours beyond those that vote, for near-duplicates among them do not."""
DOUBTFUL = 0.5
"""Score from which on a label is called doubtful."""
SHOWN_NEIGHBOURS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Looks:
    """What is known of the images of a split: small pictures, their descriptors, and features if there is a model."""

    thumbnails: NDArray[np.uint8]
    descriptors: NDArray[np.float32]
    features: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, thumbnails: NDArray[np.uint8], features: NDArray[np.float32] | None = None) -> "Looks":
        """With descriptors of the small pictures."""
        return cls(thumbnails=thumbnails, descriptors=descriptors(thumbnails), features=features)

    def __len__(self) -> int:
        return len(self.thumbnails)


@dataclass(frozen=True, kw_only=True)
class Place:
    """An image: its split and its number there."""

    split: str
    index: int


@dataclass(frozen=True, kw_only=True)
class Match:
    """Two images that show the same. `pixels` is the likeness of their edges, `similarity` the cosine of features."""

    one: Place
    other: Place
    pixels: float
    similarity: float | None
    mirrored: bool


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """An image whose neighbours are of another class. Shares are of their votes.

    `probability` is that of the given label by a linear head that did not see the image, where it was asked for.
    """

    place: Place
    given: int
    suggested: int
    given_share: float
    suggested_share: float
    neighbours: tuple[int, ...]
    """The nearest, in the split that votes."""
    probability: float | None = None

    @property
    def score(self) -> float:
        """How far another class leads: −1…1."""
        return self.suggested_share - self.given_share


# Near-duplicates


def searches(splits: Mapping[str, Looks], *, within: bool) -> list[tuple[str, str]]:
    """Which split is searched for images of which: any two, or each in itself too.

    >>> looks = Looks.of(np.zeros((1, 32, 32), dtype=np.uint8))
    >>> searches({"train": looks, "test": looks}, within=True)
    [('train', 'test'), ('train', 'train'), ('test', 'test')]
    """
    return [*combinations(splits, 2), *((name, name) for name in splits if within)]


def near_duplicates(
    splits: Mapping[str, Looks],
    *,
    within: bool = False,
    in_mirror: bool = False,
    progress: Callable[[int], None] = lambda images: None,
) -> list[Match]:
    """Pairs of images that show the same, across splits, and within them where asked; the most alike first.

    `progress` is told how many images were searched for, over all searches.
    """
    found: list[Match] = []
    for name, other in searches(splits, within=within):
        # The larger split is mapped through block by block, for each block of the smaller.
        first, second = sorted((name, other), key=lambda split: len(splits[split]))
        matches = _search(splits[first], splits[second], same=first == second, in_mirror=in_mirror, progress=progress)
        for index, partner, pixels, similarity, turned in matches:
            ends = {first: Place(split=first, index=index), second: Place(split=second, index=partner)}
            one, two = (
                (ends[name], ends[other])
                if name != other
                else (Place(split=name, index=index), Place(split=name, index=partner))
            )
            found.append(Match(one=one, other=two, pixels=pixels, similarity=similarity, mirrored=turned))
    return sorted(found, key=lambda match: -match.pixels)


def _search(
    left: Looks, right: Looks, *, same: bool, in_mirror: bool, progress: Callable[[int], None]
) -> list[tuple[int, int, float, float | None, bool]]:
    """Candidates by descriptors and by features; those whose pixels agree."""
    matches: dict[tuple[int, int], tuple[int, int, float, float | None, bool]] = {}
    hidden: Hidden = "self and before" if same else "nothing"
    for turned in (False, True) if in_mirror else (False,):
        described = mirrored(left.descriptors) if turned else left.descriptors
        blocks = [nearest(described, right.descriptors, count=PARTNERS, hidden=hidden)]
        least = [WORTH_A_LOOK]
        if left.features is not None and right.features is not None:
            blocks.append(nearest(left.features, right.features, count=PARTNERS, hidden=hidden))
            least.append(MODEL_ALIKE)
        for parts in zip(*blocks, strict=True):
            rows, columns = _candidates(parts, least)
            for match in _verified(left, right, rows, columns, turned=turned):
                matches.setdefault(match[:2], match)
            progress(len(parts[0].indices))
    return list(matches.values())


def _candidates(parts: tuple[Nearest, ...], least: list[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pairs = [
        torch.stack([row + part.start, part.indices[row, place]], dim=1)
        for part, bound in zip(parts, least, strict=True)
        for row, place in [(part.cosines >= bound).nonzero(as_tuple=True)]
    ]
    unique: NDArray[np.int64] = torch.cat(pairs).unique(dim=0).numpy()
    return unique[:, 0], unique[:, 1]


def _verified(
    left: Looks, right: Looks, rows: NDArray[np.int64], columns: NDArray[np.int64], *, turned: bool
) -> list[tuple[int, int, float, float | None, bool]]:
    if not len(rows):
        return []
    alike = likeness(_pictures(left, rows, turned=turned), right.thumbnails[columns])
    similar = cosines_of(left.features, rows, right.features, columns)
    near = alike >= (ALIKE if similar is None else ALIKE_TO_BOTH)
    rows, columns, alike, similar = rows[near], columns[near], alike[near], None if similar is None else similar[near]
    some, which = np.unique(rows, return_inverse=True)
    usual, usually_similar = _usual(left, right, some, turned=turned)
    same = _is_same(alike, usual[which])
    if similar is not None and usually_similar is not None:
        agreed = (similar >= MODEL_ALIKE) & (_apart(similar, usually_similar[which]) <= MODEL_OUTSTANDING)
        same |= agreed & (alike >= ALIKE_TO_BOTH) & (_apart(alike, usual[which]) <= OUTSTANDING_TO_BOTH)
    return [
        (
            int(rows[at]),
            int(columns[at]),
            min(float(alike[at]), 1.0),
            None if similar is None else min(float(similar[at]), 1.0),
            turned,
        )
        for at in np.flatnonzero(same)
    ]


def _apart(alike: NDArray[np.float32], usual: NDArray[np.float32]) -> NDArray[np.float32]:
    """The distance of two as a share of the usual one."""
    return ((1 - alike) / np.maximum(1 - usual, 1e-6)).astype(np.float32)


def _is_same(alike: NDArray[np.float32], usual: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether two pictures are one, by their pixels."""
    same: NDArray[np.bool_] = (alike >= SAME) | ((alike >= ALIKE) & (_apart(alike, usual) <= OUTSTANDING))
    return same


def _pictures(looks: Looks, rows: NDArray[np.int64], *, turned: bool) -> NDArray[np.uint8]:
    return looks.thumbnails[rows][:, :, ::-1] if turned else looks.thumbnails[rows]


def _usual(
    left: Looks, right: Looks, rows: NDArray[np.int64], *, turned: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """How alike the likest of many images drawn at random is to each row, by pixels and by features."""
    size = min(DRAWN, len(right) // FOLDS)
    by_features = left.features is not None and right.features is not None
    if size == 0 or not len(rows):
        nothing = np.zeros(len(rows), dtype=np.float32)
        return nothing, nothing if by_features else None
    pixels, features = [], []
    described, pictures = left.descriptors[rows], _pictures(left, rows, turned=turned)
    described = mirrored(described) if turned else described
    for drawn in np.random.default_rng(0).permutation(len(right))[: FOLDS * size].reshape(FOLDS, size):
        likest = np.concatenate(
            [block.indices[:, 0].numpy() for block in nearest(described, right.descriptors[drawn], count=1)]
        )
        pixels.append(likeness(pictures, right.thumbnails[drawn[likest]]))
        if left.features is not None and right.features is not None:
            blocks = nearest(left.features[rows], right.features[drawn], count=1)
            features.append(np.concatenate([block.cosines[:, 0].numpy() for block in blocks]))
    return np.sort(pixels, axis=0)[1], np.sort(features, axis=0)[1] if by_features else None


def cosines_of(
    left: NDArray[np.float32] | None,
    rows: NDArray[np.int64],
    right: NDArray[np.float32] | None,
    columns: NDArray[np.int64],
) -> NDArray[np.float32] | None:
    """The cosine of each pair of features; None where there are none."""
    if left is None or right is None:
        return None
    one, other = left[rows].astype(np.float32), right[columns].astype(np.float32)
    length = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: NDArray[np.float32] = (one * other).sum(axis=1) / np.maximum(length, 1e-12)
    return found


# Labels that neighbours doubt


def doubtful_labels(
    splits: Mapping[str, Looks],
    labels: Mapping[str, NDArray[np.int64]],
    *,
    classes: int,
    voting: str,
    neighbours: int = NEIGHBOURS,
    least: float = DOUBTFUL,
    progress: Callable[[int], None] = lambda images: None,
) -> list[Doubt]:
    """Images whose nearest in the split `voting`, weighted by angle, are of another class; the worst first.

    An image does not vote on itself, nor do its near-duplicates: copies share a mistake.
    """
    known = np.flatnonzero(labels[voting] != UNLABELLED)
    base = splits[voting]
    assert base.features is not None
    voters = base.features if len(known) == len(base) else base.features[known]
    found: list[Doubt] = []
    for name, looks in splits.items():
        assert looks.features is not None
        for block in nearest(looks.features, voters, count=min(neighbours + SPARE + 1, len(known))):
            rows = np.arange(block.start, block.start + len(block.indices))
            columns = known[block.indices.numpy()]
            barred = _copies(looks, rows, base, columns)
            if name == voting:
                barred |= torch.from_numpy(columns == rows[:, None])
            chosen, weights = _voters(block.cosines, barred, neighbours)
            partners = torch.from_numpy(columns).gather(1, chosen)
            shares = _shares(torch.from_numpy(labels[voting])[partners], weights, classes=classes)
            found += _doubts(name, rows, labels[name][rows], shares, partners, weights, least=least)
            progress(len(rows))
    return sorted(found, key=lambda doubt: -doubt.score)


def _copies(looks: Looks, rows: NDArray[np.int64], base: Looks, columns: NDArray[np.int64]) -> Bool[Tensor, "R k"]:
    """Which neighbours are near-duplicates of their image: they too must stand out, or no trousers would vote."""
    hint = np.einsum("rf,rkf->rk", looks.descriptors[rows], base.descriptors[columns])
    row, place = np.nonzero(hint >= WORTH_A_LOOK)
    alike = likeness(looks.thumbnails[rows[row]], base.thumbnails[columns[row, place]])
    near = alike >= ALIKE
    row, place, alike = row[near], place[near], alike[near]
    some, which = np.unique(rows[row], return_inverse=True)
    usual, _ = _usual(replace(looks, features=None), base, some, turned=False)
    copies = np.zeros(columns.shape, dtype=np.bool_)
    copies[row, place] = _is_same(alike, usual[which])
    return torch.from_numpy(copies)


def _voters(
    cosines: Float[Tensor, "R k"], barred: Bool[Tensor, "R k"], neighbours: int
) -> tuple[Int[Tensor, "R v"], Float[Tensor, "R v"]]:
    """The nearest that may vote, and the weights of their votes; 0 for all where nobody may."""
    count = min(neighbours, cosines.shape[1])
    values, chosen = cosines.masked_fill(barred, -torch.inf).topk(count, dim=1)
    return chosen, (values / TEMPERATURE).softmax(dim=1).nan_to_num(0.0)


def _shares(voted: Int[Tensor, "R v"], weights: Float[Tensor, "R v"], *, classes: int) -> Float[Tensor, "R Y"]:
    return torch.zeros(len(voted), classes).scatter_add_(1, voted, weights)


def _doubts(
    split: str,
    rows: NDArray[np.int64],
    given: NDArray[np.int64],
    shares: Float[Tensor, "R Y"],
    partners: Int[Tensor, "R v"],
    weights: Float[Tensor, "R v"],
    *,
    least: float,
) -> list[Doubt]:
    """The rows whose label another class beats by at least so much."""
    labelled = torch.from_numpy(given != UNLABELLED)
    own = torch.from_numpy(given).clamp(min=0)[:, None]
    of_given = shares.gather(1, own)[:, 0]
    best, suggested = shares.scatter(1, own, -1.0).max(dim=1)
    return [
        Doubt(
            place=Place(split=split, index=int(rows[at])),
            given=int(given[at]),
            suggested=int(suggested[at]),
            given_share=float(of_given[at]),
            suggested_share=float(best[at]),
            neighbours=tuple(partners[at][weights[at] > 0][:SHOWN_NEIGHBOURS].tolist()),
        )
        for at in torch.nonzero(labelled & (best > 0) & (best - of_given >= least))[:, 0].tolist()
    ]


def label_probabilities(
    splits: Mapping[str, Looks], labels: Mapping[str, NDArray[np.int64]], *, classes: int, voting: str
) -> dict[str, NDArray[np.float32]]:
    """The probability of each image's label by a linear head that did not see the image; NaN where it has none.

    The head is the paper's few-shot head on all images of the split `voting`, whose own are left out in closed form.
    """
    base = splits[voting].features
    assert base is not None
    known = labels[voting] != UNLABELLED
    features, wanted = torch.tensor(base[known]), torch.from_numpy(labels[voting][known])
    solved = solve(features, wanted, classes=classes)
    unseen = left_out(solved, features, wanted)
    head = sharpened(solved.head(), unseen, wanted)
    factor = float(head.weight.norm() / solved.head().weight.norm().clamp(min=1e-12))
    found = {}
    for name, looks in splits.items():
        assert looks.features is not None
        rows = labels[name] != UNLABELLED
        logits = unseen * factor if name == voting else head(torch.tensor(looks.features[rows]))
        chances = functional.softmax(logits, dim=1)
        told = np.full(len(looks), np.nan, dtype=np.float32)
        told[rows] = chances.gather(1, torch.from_numpy(labels[name][rows])[:, None])[:, 0].float().numpy()
        found[name] = told
    return found
