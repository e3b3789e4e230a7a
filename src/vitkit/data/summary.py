"""Summary of a dataset: counts, sizes, duplicates, bad files and warnings."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitkit.core.environment import usable_cores
from vitkit.core.formatting import shorten_list
from vitkit.core.result import Result, draw, select
from vitkit.data.contact_sheet import write_contact_sheet
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource, count_labels, hash_image
from vitkit.data.decode import ImageHeader, read_header
from vitkit.data.layouts.files import list_left_out
from vitkit.data.verify import BadFile, inspect_image, map_images

if TYPE_CHECKING:
    import matplotlib.figure

MIN_IMAGES_PER_CLASS = 5
MAX_IMBALANCE = 10
MIN_SIDE = 32


class SizeRange(NamedTuple):
    """Minimum, median and maximum in pixels."""

    minimum: int
    median: int
    maximum: int


class ImageSizes(NamedTuple):
    """Heights and widths of images."""

    height: SizeRange
    width: SizeRange


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

    def to_dict(self, classes: Sequence[str]) -> dict[str, object]:
        """Return plain data, with the names of classes."""
        names = dict(enumerate(classes))
        files = [{"file": name, "split": split, "class": names.get(label)} for split, name, label in self.members]
        return {"files": files} | select(self, "across_splits", "conflicting_labels")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataSummary(Result):
    """Result of `check_data`. Counts include bad files, which have no size and mode."""

    data: Dataset
    layout: str
    splits: Mapping[str, int]
    """Number of images of each split."""
    classes: tuple[str, ...]
    split_counts: Mapping[str, tuple[int, ...]]
    """Number of images of each class by label, for each split."""
    unlabeled: int
    sizes: ImageSizes | None
    modes: Mapping[str, int]
    """Number of images of each format and mode, most frequent first."""
    duplicates: tuple[DuplicateGroup, ...]
    bad: tuple[tuple[str, BadFile], ...]
    """Bad files, each with its split."""
    left_out: tuple[str, ...] = ()
    """Images that the layout does not use, such as those next to class folders."""
    contact_sheet: Path | None = None

    @property
    def path(self) -> str:
        """Path of the dataset."""
        return self.data.path

    def highlights(self) -> dict[str, object]:
        """Return the layout and the counts."""
        return {"layout": self.layout, "images": self.images, "classes": len(self.classes), "bad": len(self.bad)}

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw a contact sheet: thumbnails of each class."""
        return draw("plot_contact_sheet", self)

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
        return {
            **select(self, "path", "layout", "classes", "counts", "images", "unlabeled"),
            "splits": {
                split: {"images": images, "counts": dict(zip(self.classes, self.split_counts[split], strict=True))}
                for split, images in self.splits.items()
            },
            "bad": [file.to_dict() | {"split": split} for split, file in self.bad],
            **select(self, "sizes", "modes"),
            "duplicates": [group.to_dict(self.classes) for group in self.duplicates],
            **select(self, "left_out", "warnings", "contact_sheet"),
        }


def summarize_dataset(
    dataset: Dataset,
    *,
    channels: int = 3,
    contact_sheet: Path | str | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> DataSummary:
    """Decode every image of every split once, and report classes, counts, sizes, duplicates and bad files.

    `workers` is the number of processes, by default one per core. `contact_sheet` is a PNG file to write.
    """
    if workers is None:
        workers = usable_cores()
    headers: list[ImageHeader] = []
    bad: list[tuple[str, BadFile]] = []
    by_content: dict[bytes, list[DuplicateMember]] = {}
    for split, source in dataset.splits.items():
        checks = map_images(source, partial(_check_one, channels=channels), workers=workers)
        for index, (header, reason, checksum) in enumerate(checks):
            if header is None:
                bad.append((split, BadFile(source.name(index), reason)))
            else:
                headers.append(header)
                member = DuplicateMember(split, source.name(index), int(source.labels[index]))
                by_content.setdefault(checksum, []).append(member)
            progress(1)
    if contact_sheet is not None:
        write_contact_sheet(dataset, contact_sheet)
    duplicates = tuple(DuplicateGroup(tuple(members)) for members in by_content.values() if len(members) > 1)
    split_counts = {split: tuple(count_labels(source)) for split, source in dataset.splits.items()}
    total = len(headers) + len(bad)
    warnings = [] if total else ["there are no images"]
    if bad:
        warnings.append(f"{len(bad)} of {total} images cannot be used ({len(bad) / total:.1%})")
    warnings += _warn_about_classes(dataset.classes, split_counts)
    warnings += list_left_out(dataset.left_out)
    warnings += _warn_about_duplicates(duplicates)
    warnings += _warn_about_sizes(headers)
    return DataSummary(
        data=dataset,
        layout=dataset.layout,
        classes=dataset.classes,
        splits={split: len(source) for split, source in dataset.splits.items()},
        split_counts=split_counts,
        unlabeled=sum(int((source.labels == UNLABELED).sum()) for source in dataset.splits.values()),
        sizes=_get_sizes(headers),
        modes=dict(Counter(f"{header.format} {header.mode}" for header in headers).most_common()),
        duplicates=duplicates,
        bad=tuple(bad),
        left_out=dataset.left_out,
        warnings=tuple(warnings),
        contact_sheet=None if contact_sheet is None else Path(contact_sheet),
    )


def _check_one(source: ImageSource, index: int, *, channels: int) -> tuple[ImageHeader | None, str, bytes]:
    """Return the header of an image, or None and the reason why it is bad, and the checksum of a good one."""
    image, reason = inspect_image(source, index, channels=channels)
    return (None, reason, b"") if image is None or reason else (read_header(image), "", hash_image(image))


def _get_sizes(headers: Sequence[ImageHeader]) -> ImageSizes | None:
    sides = [header.height for header in headers], [header.width for header in headers]
    ranges = [SizeRange(min(side), int(statistics.median(side)), max(side)) for side in sides if side]
    return ImageSizes(*ranges) if ranges else None


def _warn_about_classes(classes: Sequence[str], split_counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Warn about small and uneven classes of the training split, and about classes that other splits lack."""
    if not classes:
        return []
    warnings = ["there is only one class"] if len(classes) == 1 else []
    train = "train" if "train" in split_counts else next(iter(split_counts))
    counts = split_counts[train]
    small = [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < MIN_IMAGES_PER_CLASS]
    warnings += _list(small, "class has", "classes have", f"fewer than {MIN_IMAGES_PER_CLASS} images in {train}")
    largest = max(counts)
    smallest = min((count for count in counts if count), default=largest)
    if largest > MAX_IMBALANCE * smallest:
        rare, frequent = classes[counts.index(smallest)], classes[counts.index(largest)]
        warnings.append(f"classes are imbalanced in {train}: {frequent} has {largest} images, {rare} has {smallest}")
    for split, others in split_counts.items():
        missing = [name for name, count in zip(classes, others, strict=True) if not count and split != train]
        warnings += _list(missing, "class has", "classes have", f"no images in {split}")
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
        warnings += _list(names, "image is", "images are", problem)
    return warnings


def _warn_about_sizes(headers: Sequence[ImageHeader]) -> list[str]:
    """Warn about images that are much smaller than the others; a dataset of thumbnails is small on purpose."""
    sides = [min(header.height, header.width) for header in headers]
    median = statistics.median(sides) if sides else 0
    small = [side for side in sides if side < MIN_SIDE and side * 4 < median]
    if not small:
        return []
    count = "one image is" if len(small) == 1 else f"{len(small)} images are"
    return [f"{count} very small: down to {min(small)} pixels, where others have {median:.0f}"]


def _list(names: Sequence[str], one: str, many: str, problem: str) -> list[str]:
    """Return a warning about a problem with examples; none if there are none."""
    count = f"one {one}" if len(names) == 1 else f"{len(names)} {many}"
    return [f"{count} {problem}: {shorten_list(names, limit=3)}"] if names else []
