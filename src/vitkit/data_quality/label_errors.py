"""Label errors: images whose nearest neighbors in feature space have another label."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitkit.core.shapes import Bool, Tensor
from vitkit.data.dataset import UNLABELED
from vitkit.data_quality.near_duplicates import (
    MIN_DESCRIPTORS,
    MIN_PIXELS,
    ImageDescriptors,
    ImageRef,
    compare_thumbnails,
    is_near_duplicate,
    reference_similarity,
)
from vitkit.evaluation.features import nearest_neighbors
from vitkit.evaluation.fewshot import NEIGHBORS, TEMPERATURE, solve_ridge, temperature_scaled

MIN_SCORE = 0.5
"""Score from which on a label is reported."""
EXTRA_NEIGHBORS = 10
"""Neighbors that are searched in addition, because near-duplicates are excluded."""
REPORTED_NEIGHBORS = 3


@dataclass(frozen=True, kw_only=True)
class LabelIssue:
    """An image whose neighbors vote for another class. Fractions are of their votes.

    `probability` is that of the given label, by a linear head that was not trained on the image.
    """

    image: ImageRef
    neighbors: tuple[int, ...]
    """Indices of the nearest neighbors in the split that votes."""
    given_label: int
    given_fraction: float
    suggested_label: int
    suggested_fraction: float
    probability: float | None = None

    @property
    def score(self) -> float:
        """Lead of the suggested class over the given one, −1…1."""
        return self.suggested_fraction - self.given_fraction


def find_label_issues(
    splits: Mapping[str, ImageDescriptors],
    labels: Mapping[str, NDArray[np.int64]],
    *,
    num_classes: int,
    voting_split: str,
    neighbors: int = NEIGHBORS,
    min_score: float = MIN_SCORE,
    probability: bool = False,
    progress: Callable[[int], None] = lambda images: None,
) -> list[LabelIssue]:
    """Return images whose nearest neighbors in `voting_split`, weighted by cosine, have another label; worst first.

    An image and its near-duplicates do not vote on it: copies share a wrong label. `probability` adds that of the given
    label.
    """
    labeled = np.flatnonzero(labels[voting_split] != UNLABELED)
    voters = splits[voting_split]
    assert voters.features is not None
    features = voters.features if len(labeled) == len(voters) else voters.features[labeled]
    issues: list[LabelIssue] = []
    for name, images in splits.items():
        assert images.features is not None
        count = min(neighbors + EXTRA_NEIGHBORS + 1, len(labeled))
        for block in nearest_neighbors(images.features, features, count=count):
            rows = np.arange(block.start, block.start + len(block.indices))
            columns = labeled[block.indices.numpy()]
            excluded = _find_copies(images, rows, voters, columns)
            if name == voting_split:
                excluded |= torch.from_numpy(columns == rows[:, None])
            cosines = block.cosines.masked_fill(excluded, -torch.inf)
            nearest, selected = cosines.topk(min(neighbors, cosines.shape[1]), dim=1)
            weights = (nearest / TEMPERATURE).softmax(dim=1).nan_to_num(0.0)  # 0 if all are excluded
            partners = torch.from_numpy(columns).gather(1, selected)
            votes = torch.from_numpy(labels[voting_split])[partners]
            fractions = torch.zeros(len(votes), num_classes).scatter_add_(1, votes, weights)
            given_labels = labels[name][rows]
            own = torch.from_numpy(given_labels).clamp(min=0)[:, None]
            given_fraction = fractions.gather(1, own)[:, 0]
            best, suggested = fractions.scatter(1, own, -1.0).max(dim=1)
            is_issue = torch.from_numpy(given_labels != UNLABELED) & (best > 0) & (best - given_fraction >= min_score)
            issues += [
                LabelIssue(
                    image=ImageRef(split=name, index=int(rows[row])),
                    given_label=int(given_labels[row]),
                    suggested_label=int(suggested[row]),
                    given_fraction=float(given_fraction[row]),
                    suggested_fraction=float(best[row]),
                    neighbors=tuple(partners[row][weights[row] > 0][:REPORTED_NEIGHBORS].tolist()),
                )
                for row in torch.nonzero(is_issue)[:, 0].tolist()
            ]
            progress(len(rows))
    if probability:
        probabilities = target_probabilities(splits, labels, num_classes=num_classes, voting_split=voting_split)
        issues = [
            replace(issue, probability=float(probabilities[issue.image.split][issue.image.index])) for issue in issues
        ]
    return sorted(issues, key=lambda issue: -issue.score)


def _find_copies(
    images: ImageDescriptors, rows: NDArray[np.int64], voters: ImageDescriptors, columns: NDArray[np.int64]
) -> Bool[Tensor, "R k"]:
    """Return which neighbors are near-duplicates, relative to the reference: similar images may vote."""
    cosines = np.einsum("rf,rkf->rk", images.descriptors[rows], voters.descriptors[columns])
    row, neighbor = np.nonzero(cosines >= MIN_DESCRIPTORS)
    pixels = compare_thumbnails(images.thumbnails[rows[row]], voters.thumbnails[columns[row, neighbor]])
    close = pixels >= MIN_PIXELS
    row, neighbor, pixels = row[close], neighbor[close], pixels[close]
    unique, index = np.unique(rows[row], return_inverse=True)
    reference, _ = reference_similarity(replace(images, features=None), voters, unique)
    copies = np.zeros(columns.shape, dtype=np.bool_)
    copies[row, neighbor] = is_near_duplicate(pixels, reference[index])
    return torch.from_numpy(copies)


def target_probabilities(
    splits: Mapping[str, ImageDescriptors],
    labels: Mapping[str, NDArray[np.int64]],
    *,
    num_classes: int,
    voting_split: str,
) -> dict[str, NDArray[np.float32]]:
    """Return the probability of each label by a linear head that was not trained on the image; NaN without a label.

    It is the paper's few-shot head on all images of `voting_split`, which are left out one by one in closed form.
    """
    base = splits[voting_split].features
    assert base is not None
    labeled = labels[voting_split] != UNLABELED
    features, targets = torch.tensor(base[labeled]), torch.from_numpy(labels[voting_split][labeled])
    solution = solve_ridge(features, targets, num_classes=num_classes)
    held_out_logits = solution.leave_one_out_logits(features, targets)
    head = temperature_scaled(solution.head(), held_out_logits, targets)
    scale = float(head.weight.norm() / solution.head().weight.norm().clamp(min=1e-12))
    probabilities = {}
    for name, images in splits.items():
        assert images.features is not None
        rows = labels[name] != UNLABELED
        logits = held_out_logits * scale if name == voting_split else head(torch.tensor(images.features[rows]))
        own = functional.softmax(logits, dim=1).gather(1, torch.from_numpy(labels[name][rows])[:, None])
        probabilities[name] = np.full(len(images), np.nan, dtype=np.float32)
        probabilities[name][rows] = own[:, 0].float().numpy()
    return probabilities
