"""Quality check of a dataset: near-duplicates and label errors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitkit.core.result import Result, draw
from vitkit.core.signals import ProgressFunction, ignore_progress, start_task
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource
from vitkit.data.layouts.files import list_left_out
from vitkit.data.loader import CPU
from vitkit.data.verify import BadFile, skip_unreadable
from vitkit.data_quality.label_errors import MIN_SCORE, REPORTED_NEIGHBORS, LabelIssue, find_label_issues
from vitkit.data_quality.near_duplicates import (
    ImageDescriptors,
    ImageRef,
    NearDuplicate,
    find_near_duplicates,
    list_searches,
    make_thumbnails,
)
from vitkit.evaluation.features import compute_features
from vitkit.weights.bundle import ModelBundle

if TYPE_CHECKING:
    import matplotlib.figure

TableRow = dict[str, str | int | float | bool | None]

NEAR_DUPLICATE_COLUMNS = (
    "file", "split", "class", "other_file", "other_split", "other_class", "pixels", "features", "flipped"
)  # fmt: skip
LABEL_ISSUE_COLUMNS = (
    "file", "split", "given_label", "suggested_label", "score", "given_fraction", "suggested_fraction", "probability",
    *(f"neighbor_{number + 1}" for number in range(REPORTED_NEIGHBORS)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataQualityReport(Result):
    """Result of `check_data_quality`. `data` holds the images that could be read."""

    data: Dataset
    near_duplicates: Sequence[NearDuplicate]
    label_issues: Sequence[LabelIssue] | None
    """None without a model."""
    voting_split: str
    """Split of the neighbors that vote on labels."""
    bad: Sequence[tuple[str, BadFile]] = ()
    """Unreadable files, each with its split."""
    model: str | None = None
    within_splits: bool = False
    report_path: Path | None = None

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw pairs of near-duplicates, those with different labels first, and images with label issues."""
        return draw("plot_data_quality", self)

    def highlights(self) -> dict[str, object]:
        """Return the number of pairs and of label issues."""
        issues = "not checked" if self.label_issues is None else len(self.label_issues)
        return {"path": self.data.path, "near_duplicates": len(self.near_duplicates), "label_issues": issues}

    def get_file(self, image: ImageRef) -> str:
        """Return the name of an image."""
        return self.data.splits[image.split].name(image.index)

    def get_class(self, image: ImageRef) -> str | None:
        """Return the name of the class of an image."""
        label = int(self.data.splits[image.split].labels[image.index])
        return None if label == UNLABELED else self.data.classes[label]

    def get_neighbors(self, issue: LabelIssue) -> list[ImageRef]:
        """Return the nearest neighbors of an image with a label issue."""
        return [ImageRef(split=self.voting_split, index=index) for index in issue.neighbors]

    @property
    def across_splits(self) -> list[NearDuplicate]:
        """Near-duplicates in different splits."""
        return [pair for pair in self.near_duplicates if pair.one.split != pair.other.split]

    @property
    def conflicts(self) -> list[NearDuplicate]:
        """Near-duplicates with different labels."""
        return [pair for pair in self.near_duplicates if self.get_class(pair.one) != self.get_class(pair.other)]

    def count_leaked(self) -> dict[str, int]:
        """Return the number of images of each split that are in another one, too."""
        images = {(image.split, image.index) for pair in self.across_splits for image in (pair.one, pair.other)}
        counts = Counter(split for split, _ in images)
        return {split: counts[split] for split in self.data.splits if counts[split]}

    def count_confusions(self) -> list[tuple[str, str, int]]:
        """Return given class, suggested class and number of issues, most frequent first."""
        counts = Counter((issue.given_label, issue.suggested_label) for issue in self.label_issues or ())
        names = self.data.classes
        return [(names[label], names[suggested], count) for (label, suggested), count in counts.most_common()]

    def near_duplicate_rows(self) -> list[TableRow]:
        """Return a table row per pair."""
        rows = []
        for pair in self.near_duplicates:
            one, other = ((self.get_file(each), each.split, self.get_class(each)) for each in (pair.one, pair.other))
            values = (*one, *other, _round(pair.pixels), _round(pair.features), pair.flipped)
            rows.append(dict(zip(NEAR_DUPLICATE_COLUMNS, values, strict=True)))
        return rows

    def label_issue_rows(self) -> list[TableRow]:
        """Return a table row per label issue, worst first."""
        rows = []
        for issue in self.label_issues or ():
            names = (self.data.classes[issue.given_label], self.data.classes[issue.suggested_label])
            numbers = (issue.score, issue.given_fraction, issue.suggested_fraction, issue.probability)
            neighbors = map(self.get_file, self.get_neighbors(issue))
            values = (self.get_file(issue.image), issue.image.split, *names, *map(_round, numbers), *neighbors)
            rows.append(dict(zip(LABEL_ISSUE_COLUMNS, values, strict=False)))  # there may be fewer neighbors
        return rows

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `vitkit data quality`."""
        return {
            "path": self.data.path,
            "layout": self.data.layout,
            "images": {split: len(source) for split, source in self.data.splits.items()},
            "model": self.model,
            "within_splits": self.within_splits,
            "leaked": self.count_leaked(),
            "near_duplicates": self.near_duplicate_rows(),
            "label_issues": None if self.label_issues is None else self.label_issue_rows(),
            "bad": [file.to_dict() | {"split": split} for split, file in self.bad],
        }


def find_quality_issues(
    dataset: Dataset,
    *,
    bundle: ModelBundle | None = None,
    within_splits: bool = False,
    match_flips: bool = False,
    min_score: float | None = None,
    probability: bool = False,
    workers: int = 0,
    device: torch.device = CPU,
    progress: ProgressFunction = ignore_progress,
) -> DataQualityReport:
    """Find near-duplicates and, with a model, wrong labels; `within_splits` is implied by a single split."""
    warnings = list_left_out(dataset.left_out)
    within_splits = within_splits or len(dataset.splits) == 1  # nothing else to compare
    splits: dict[str, ImageSource] = {}
    bad: list[tuple[str, BadFile]] = []
    for name, source in dataset.splits.items():
        splits[name], files = skip_unreadable(
            source,
            path=dataset.path,
            channels=bundle.preprocessing.channels if bundle else 3,
            workers=workers,
            progress=start_task(progress, "checking images", 0 if source.always_readable else len(source)),
            warn=warnings.append,
        )
        bad += [(name, file) for file in files]
    dataset = replace(dataset, splits=splits)
    descriptors: dict[str, ImageDescriptors] = {}
    for name, source in splits.items():
        advance = start_task(progress, "reading images", len(source))
        thumbnails, features = make_thumbnails(source, workers=workers, progress=advance), None
        if bundle is not None:
            advance = start_task(progress, "computing features", len(source))
            features = compute_features(bundle, source, workers=workers, device=device, progress=advance)
        descriptors[name] = ImageDescriptors.from_thumbnails(thumbnails, features)
    searches = list_searches(descriptors, within_splits=within_splits)
    total = sum(min(len(descriptors[one]), len(descriptors[other])) for one, other in searches)
    near_duplicates = find_near_duplicates(
        descriptors,
        within_splits=within_splits,
        match_flips=match_flips,
        progress=start_task(progress, "searching near-duplicates", total * (2 if match_flips else 1)),
    )
    voting_split = next((name for name in ("train", "all") if name in splits), next(iter(splits)))
    label_issues = None
    if bundle is not None and dataset.classes:
        label_issues = find_label_issues(
            descriptors,
            {name: source.labels for name, source in splits.items()},
            num_classes=len(dataset.classes),
            voting_split=voting_split,
            min_score=MIN_SCORE if min_score is None else min_score,
            probability=probability,
            progress=start_task(progress, "checking labels", sum(map(len, descriptors.values()))),
        )
    return DataQualityReport(
        data=dataset,
        near_duplicates=near_duplicates,
        label_issues=label_issues,
        voting_split=voting_split,
        bad=bad,
        model=bundle.name if bundle else None,
        within_splits=within_splits,
        warnings=tuple(warnings),
    )


def _round(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
