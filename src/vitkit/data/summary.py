"""Summary of a dataset: counts, sizes, duplicates, bad files and warnings."""

import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitkit.core.errors import DataError, summarize
from vitkit.data.contact_sheet import write_contact_sheet
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource, hash_image
from vitkit.data.decode import ImageHeader, read_header
from vitkit.data.layouts.files import shorten_list
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, check_image, map_images, read_image

MIN_IMAGES_PER_CLASS = 5
MAX_IMBALANCE = 10
MIN_SIDE = 32


class SizeRange(NamedTuple):
    """Minimum, median and maximum in pixels."""

    minimum: int
    median: int
    maximum: int


class DuplicateMember(NamedTuple):
    """One image of a group of duplicates."""

    split: str
    name: str
    label: int


@dataclass(frozen=True)
class DuplicateGroup:
    """Images with the same content."""

    members: tuple[DuplicateMember, ...]

    @property
    def across_splits(self) -> bool:
        """Whether the image is in more than one split."""
        return len({member.split for member in self.members}) > 1

    @property
    def conflicting_labels(self) -> bool:
        """Whether the image has more than one label."""
        return len({member.label for member in self.members}) > 1


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Result of `check_data`. Counts include bad files, which have no size and mode."""

    path: str
    layout: str
    splits: Mapping[str, int]
    """Number of images of each split."""
    classes: tuple[str, ...]
    split_counts: Mapping[str, tuple[int, ...]]
    """Number of images of each class by label, for each split."""
    unlabeled: int
    height: SizeRange | None
    width: SizeRange | None
    modes: Mapping[str, int]
    """Number of images of each format and mode, most frequent first."""
    duplicates: tuple[DuplicateGroup, ...]
    bad: tuple[tuple[str, BadFile], ...]
    """Bad files, each with its split."""
    warnings: tuple[str, ...]
    contact_sheet: Path | None = None

    @property
    def images(self) -> int:
        """Number of images of all splits."""
        return sum(self.splits.values())

    @property
    def counts(self) -> dict[str, int]:
        """Number of images of each class, of all splits."""
        totals = map(sum, zip(*self.split_counts.values(), strict=True))
        return dict(zip(self.classes, totals, strict=True))

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `vitkit data check`."""
        sizes = {"height": self.height._asdict(), "width": self.width._asdict()} if self.height and self.width else None
        classes = dict(enumerate(self.classes))
        return {
            "path": self.path,
            "layout": self.layout,
            "classes": list(self.classes),
            "counts": self.counts,
            "images": self.images,
            "unlabeled": self.unlabeled,
            "splits": {
                split: {"images": images, "counts": dict(zip(self.classes, self.split_counts[split], strict=True))}
                for split, images in self.splits.items()
            },
            "bad": [{"file": file.name, "reason": file.reason, "split": split} for split, file in self.bad],
            "sizes": sizes,
            "modes": dict(self.modes),
            "duplicates": [
                {
                    "files": [
                        {"file": member.name, "split": member.split, "class": classes.get(member.label)}
                        for member in group.members
                    ],
                    "across_splits": group.across_splits,
                    "conflicting_labels": group.conflicting_labels,
                }
                for group in self.duplicates
            ],
            "warnings": list(self.warnings),
            "contact_sheet": None if self.contact_sheet is None else str(self.contact_sheet),
        }


class ImageCheck(NamedTuple):
    """Header of an image, or the reason why it is bad, and a checksum of its content."""

    header: ImageHeader | None
    reason: str
    checksum: bytes


def check_data(
    data: Dataset | Path | str,
    *,
    layout: str | None = None,
    channels: int = 3,
    contact_sheet: Path | str | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> DataSummary:
    """Decode every image of every split once, and report classes, counts, sizes, duplicates and bad files.

    `workers` is the number of processes, by default one per core. `contact_sheet` is a PNG file to write.
    """
    dataset = data if isinstance(data, Dataset) else open_dataset(data, layout=layout)
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks: dict[str, list[ImageCheck]] = {split: [] for split in dataset.splits}
    check_one = partial(_check_one, channels=channels)
    for split, source in dataset.splits.items():
        for check in map_images(source, check_one, workers=workers):
            checks[split].append(check)
            progress(1)
    if contact_sheet is not None:
        write_contact_sheet(dataset, contact_sheet)
    headers = [check.header for of_split in checks.values() for check in of_split if check.header]
    split_counts = {split: _count_labels(source) for split, source in dataset.splits.items()}
    duplicates = _find_duplicates(dataset, checks)
    bad = tuple(
        (split, BadFile(dataset.splits[split].name(index), check.reason))
        for split, of_split in checks.items()
        for index, check in enumerate(of_split)
        if check.header is None
    )
    total = sum(map(len, checks.values()))
    warnings = [] if total else ["there are no images"]
    if bad:
        warnings.append(f"{len(bad)} of {total} images cannot be used ({len(bad) / total:.1%})")
    warnings += _warn_about_classes(dataset.classes, split_counts)
    warnings += _warn_about_duplicates(duplicates)
    warnings += _warn_about_sizes(headers)
    return DataSummary(
        path=dataset.path,
        layout=dataset.layout,
        classes=dataset.classes,
        splits={split: len(source) for split, source in dataset.splits.items()},
        split_counts=split_counts,
        unlabeled=sum(int((source.labels == UNLABELED).sum()) for source in dataset.splits.values()),
        height=_get_range([header.height for header in headers]),
        width=_get_range([header.width for header in headers]),
        modes=dict(Counter(f"{header.format} {header.mode}" for header in headers).most_common()),
        duplicates=duplicates,
        bad=bad,
        warnings=tuple(warnings),
        contact_sheet=None if contact_sheet is None else Path(contact_sheet),
    )


def _check_one(source: ImageSource, index: int, *, channels: int) -> ImageCheck:
    checksum = b""
    try:
        image = read_image(source, index)
        checksum = hash_image(image)
        check_image(image, channels=channels)
        return ImageCheck(read_header(image), "", checksum)
    except DataError as error:
        return ImageCheck(None, summarize(error), checksum)


def _count_labels(source: ImageSource) -> tuple[int, ...]:
    labels = source.labels[source.labels != UNLABELED]
    return tuple(np.bincount(labels, minlength=len(source.classes)).tolist())


def _get_range(numbers: Sequence[int]) -> SizeRange | None:
    return SizeRange(min(numbers), int(statistics.median(numbers)), max(numbers)) if numbers else None


def _find_duplicates(dataset: Dataset, checks: Mapping[str, Sequence[ImageCheck]]) -> tuple[DuplicateGroup, ...]:
    """Return groups of two or more good images, in the order of their first members."""
    groups: dict[bytes, list[DuplicateMember]] = {}
    for split, source in dataset.splits.items():
        for index, check in enumerate(checks[split]):
            if check.header is not None:
                member = DuplicateMember(split, source.name(index), int(source.labels[index]))
                groups.setdefault(check.checksum, []).append(member)
    return tuple(DuplicateGroup(tuple(members)) for members in groups.values() if len(members) > 1)


# Warnings


def _warn_about_classes(classes: Sequence[str], split_counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Warn about small and uneven classes of the training split, and about classes that other splits lack."""
    if not classes:
        return []
    warnings = ["there is only one class"] if len(classes) == 1 else []
    train = "train" if "train" in split_counts else next(iter(split_counts))
    counts = split_counts[train]
    small = [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < MIN_IMAGES_PER_CLASS]
    if small:
        problem = f"fewer than {MIN_IMAGES_PER_CLASS} images in {train}"
        warnings.append(f"{_count(small, 'one class has', 'classes have')} {problem}: {_shorten(small)}")
    largest = max(counts)
    smallest = min((count for count in counts if count), default=largest)
    if largest > MAX_IMBALANCE * smallest:
        rare, frequent = classes[counts.index(smallest)], classes[counts.index(largest)]
        warnings.append(f"classes are imbalanced in {train}: {frequent} has {largest} images, {rare} has {smallest}")
    for split, others in split_counts.items():
        missing = [name for name, count in zip(classes, others, strict=True) if not count]
        if split != train and missing:
            count = _count(missing, "one class has", "classes have")
            warnings.append(f"{count} no images in {split}: {_shorten(missing)}")
    return warnings


def _warn_about_duplicates(duplicates: Sequence[DuplicateGroup]) -> list[str]:
    problems = {
        "in more than one split, so scores will be too high": [group for group in duplicates if group.across_splits],
        "labeled differently": [group for group in duplicates if group.conflicting_labels],
        "duplicated": [group for group in duplicates if not group.across_splits and not group.conflicting_labels],
    }
    warnings = []
    for problem, groups in problems.items():
        names = [" = ".join(f"{member.split}: {member.name}" for member in group.members[:3]) for group in groups]
        if groups:
            warnings.append(f"{_count(groups, 'one image is', 'images are')} {problem}: {_shorten(names)}")
    return warnings


def _warn_about_sizes(headers: Sequence[ImageHeader]) -> list[str]:
    """Warn about images that are much smaller than the others; a dataset of thumbnails is small on purpose."""
    sides = [min(header.height, header.width) for header in headers]
    median = statistics.median(sides) if sides else 0
    small = [side for side in sides if side < MIN_SIDE and side * 4 < median]
    if not small:
        return []
    images_are = _count(small, "one image is", "images are")
    return [f"{images_are} very small: down to {min(small)} pixels, where others have {median:.0f}"]


def _count(items: Sequence[object], one: str, many: str) -> str:
    return one if len(items) == 1 else f"{len(items)} {many}"


def _shorten(names: Sequence[str]) -> str:
    return shorten_list(names, limit=3)
