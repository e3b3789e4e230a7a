"""Quality check of a dataset: near-duplicates and label errors."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitkit.core.errors import ConfigError
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, logger, skip_unreadable
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
from vitkit.inference.engine import resolve_device
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle

StartTask = Callable[[str, int], Callable[[int], None]]
"""Function that starts a progress bar with a description and a total, and returns a function to advance it."""

TableRow = dict[str, str | int | float | bool | None]

NEAR_DUPLICATE_COLUMNS = (
    "file", "split", "class", "other_file", "other_split", "other_class", "pixels", "features", "flipped"
)  # fmt: skip
LABEL_ISSUE_COLUMNS = (
    "file", "split", "given_label", "suggested_label", "score", "given_fraction", "suggested_fraction", "probability",
    *(f"neighbor_{number + 1}" for number in range(REPORTED_NEIGHBORS)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataQualityReport:
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
        return [
            {
                "file": self.get_file(pair.one),
                "split": pair.one.split,
                "class": self.get_class(pair.one),
                "other_file": self.get_file(pair.other),
                "other_split": pair.other.split,
                "other_class": self.get_class(pair.other),
                "pixels": _round(pair.pixels),
                "features": _round(pair.features),
                "flipped": pair.flipped,
            }
            for pair in self.near_duplicates
        ]

    def label_issue_rows(self) -> list[TableRow]:
        """Return a table row per label issue, worst first."""
        rows: list[TableRow] = []
        for issue in self.label_issues or ():
            row: TableRow = {
                "file": self.get_file(issue.image),
                "split": issue.image.split,
                "given_label": self.data.classes[issue.given_label],
                "suggested_label": self.data.classes[issue.suggested_label],
                "score": _round(issue.score),
                "given_fraction": _round(issue.given_fraction),
                "suggested_fraction": _round(issue.suggested_fraction),
                "probability": _round(issue.probability),
            }
            for number, neighbor in enumerate(self.get_neighbors(issue), start=1):
                row[f"neighbor_{number}"] = self.get_file(neighbor)
            rows.append(row)
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
            "bad": [{"file": file.name, "reason": file.reason, "split": split} for split, file in self.bad],
        }


def check_data_quality(
    data: Dataset | Path | str,
    *,
    model: str | None = None,
    within_splits: bool = False,
    match_flips: bool = False,
    min_score: float | None = None,
    probability: bool = False,
    workers: int = 2,
    device: str = "auto",
    start_task: StartTask = lambda description, total: lambda images: None,
    warn: Callable[[str], None] = logger.warning,
) -> DataQualityReport:
    """Find near-duplicates and, with a model, wrong labels.

    Args:
        data: Path of a dataset, or the dataset.
        model: Run or weights of any format, whose features find label errors and more near-duplicates.
        within_splits: Also search within each split; always if there is only one.
        match_flips: Also match horizontally flipped images.
        min_score: Smallest score of a reported label issue, −1…1.
        probability: Add the probability of each label by a head that was not trained on the image.
        workers: Number of processes that read images.
        device: Device of the model.
        start_task: Progress display.
        warn: Called with a message for each unreadable image.
    """
    if model is None and (probability or min_score is not None):
        raise ConfigError("probability and min_score are for label issues, which need a model", hint="set model")
    bundle = None if model is None else load_bundle(model)
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    within_splits = within_splits or len(dataset.splits) == 1  # nothing else to compare
    splits: dict[str, ImageSource] = {}
    bad: list[tuple[str, BadFile]] = []
    for name, source in dataset.splits.items():
        splits[name], files = skip_unreadable(
            source,
            path=dataset.path,
            channels=bundle.preprocessing.channels if bundle else 3,
            workers=workers,
            progress=start_task("checking images", 0 if source.always_readable else len(source)),
            warn=warn,
        )
        bad += [(name, file) for file in files]
    dataset = Dataset(dataset.path, splits)
    descriptors = {
        name: _describe_images(source, bundle, workers=workers, device=device, start_task=start_task)
        for name, source in splits.items()
    }
    searches = list_searches(descriptors, within_splits=within_splits)
    total = sum(min(len(descriptors[one]), len(descriptors[other])) for one, other in searches)
    near_duplicates = find_near_duplicates(
        descriptors,
        within_splits=within_splits,
        match_flips=match_flips,
        progress=start_task("searching near-duplicates", total * (2 if match_flips else 1)),
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
            progress=start_task("checking labels", sum(map(len, descriptors.values()))),
        )
    return DataQualityReport(
        data=dataset,
        near_duplicates=near_duplicates,
        label_issues=label_issues,
        voting_split=voting_split,
        bad=bad,
        model=bundle.name if bundle else None,
        within_splits=within_splits,
    )


def _round(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def _describe_images(
    source: ImageSource, bundle: ModelBundle | None, *, workers: int, device: str, start_task: StartTask
) -> ImageDescriptors:
    thumbnails = make_thumbnails(source, workers=workers, progress=start_task("reading images", len(source)))
    if bundle is None:
        return ImageDescriptors.from_thumbnails(thumbnails)
    progress = start_task("computing features", len(source))
    features = compute_features(bundle, source, workers=workers, device=resolve_device(device), progress=progress)
    return ImageDescriptors.from_thumbnails(thumbnails, features)
