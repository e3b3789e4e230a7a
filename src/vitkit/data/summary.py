"""Summary of a dataset: counts, sizes, duplicates, bad files, warnings, and a contact sheet of thumbnails."""

import contextlib
import io
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitkit.core.environment import usable_cores
from vitkit.core.errors import DataError, summarize
from vitkit.core.files import write_bytes
from vitkit.core.formatting import format_plural
from vitkit.core.result import Result, draw
from vitkit.data.dataset import UNLABELED, Dataset, ImageSource, count_labels, hash_image
from vitkit.data.decode import ImageHeader, decode, read_header
from vitkit.data.layouts.files import list_left_out, shorten_list
from vitkit.data.verify import BadFile, check_image, map_images, read_image

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
        return {
            "files": files,
            "across_splits": self.across_splits,
            "conflicting_labels": self.conflicting_labels,
        }


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
        sizes = self.sizes and {side: size._asdict() for side, size in self.sizes._asdict().items()}
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
            "duplicates": [group.to_dict(self.classes) for group in self.duplicates],
            "left_out": list(self.left_out),
            "warnings": list(self.warnings),
            "contact_sheet": None if self.contact_sheet is None else str(self.contact_sheet),
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
    """Return the header of an image, or None and the reason why it is bad, and a checksum of its content."""
    checksum = b""
    try:
        image = read_image(source, index)
        checksum = hash_image(image)
        check_image(image, channels=channels)
        return read_header(image), "", checksum
    except DataError as error:
        return None, summarize(error), checksum


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
    images_are = "one image is" if len(small) == 1 else f"{len(small)} images are"
    very_small = f"{images_are} very small: down to {min(small, default=0)} pixels, where others have {median:.0f}"
    return [very_small] if small else []


def _list(names: Sequence[str], one: str, many: str, problem: str) -> list[str]:
    """Return a warning about a problem with examples; none if there are none."""
    count = f"one {one}" if len(names) == 1 else f"{len(names)} {many}"
    return [f"{count} {problem}: {shorten_list(names, limit=3)}"] if names else []


_MAX_ROWS = 20
_SIDE, _GAP, _MARGIN, _LABEL_WIDTH, _TITLE_HEIGHT = 112, 8, 28, 190, 64
_BACKGROUND, _CELL, _TEXT, _LIGHT, _RED = "#ffffff", "#f1f3f5", "#1f2328", "#6e7781", "#c0392b"


def write_contact_sheet(dataset: Dataset, path: Path | str, *, columns: int = 8) -> None:
    """Write a contact sheet as a PNG file."""
    file = io.BytesIO()
    draw_contact_sheet(dataset, columns=columns).save(file, "PNG", optimize=True)
    try:
        write_bytes(path, file.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def draw_contact_sheet(dataset: Dataset, *, columns: int = 8) -> Image.Image:
    """Draw a row of thumbnails per class, evenly selected from the training split."""
    split = "train" if "train" in dataset.splits else next(iter(dataset.splits))
    source = dataset.splits[split]
    rows: list[tuple[int | None, list[int]]] = [
        (label, _select_evenly(np.flatnonzero(source.labels == label), columns))
        for label in range(min(len(dataset.classes), _MAX_ROWS))
    ]
    if not dataset.classes:
        selected = _select_evenly(np.arange(len(source)), columns * _MAX_ROWS)
        rows = [(None, selected[start : start + columns]) for start in range(0, len(selected), columns)]
    left = _MARGIN + (_LABEL_WIDTH if dataset.classes else 0)
    step = _SIDE + _GAP
    width = left + columns * step - _GAP + _MARGIN
    height = _MARGIN + _TITLE_HEIGHT + max(len(rows), 1) * step - _GAP + _MARGIN
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    _draw_title(pen, dataset, split)
    for number, (label, indices) in enumerate(rows):
        top = _MARGIN + _TITLE_HEIGHT + number * step
        if label is not None:
            _draw_label(pen, dataset.classes[label], int((source.labels == label).sum()), top=top)
        for column, index in enumerate(indices):
            _draw_thumbnail(sheet, pen, source, index, position=(left + column * step, top))
    return sheet


def _select_evenly(indices: NDArray[np.int64], count: int) -> list[int]:
    """Select at most `count` indices at even distances."""
    count = min(count, len(indices))
    return list(map(int, indices[np.arange(count) * len(indices) // max(count, 1)]))


def _draw_title(pen: ImageDraw.ImageDraw, dataset: Dataset, split: str) -> None:
    facts = [dataset.layout, f"{len(dataset.splits[split]):,} images in {split}"]
    if dataset.classes:
        facts.append(f"{len(dataset.classes):,} classes" if len(dataset.classes) != 1 else "1 class")
    if len(dataset.classes) > _MAX_ROWS:
        facts.append(f"the first {_MAX_ROWS} shown")
    _draw_text(pen, Path(dataset.path).name or dataset.path, (_MARGIN, _MARGIN), 24)
    _draw_text(pen, " · ".join(facts), (_MARGIN, _MARGIN + 32), 14, _LIGHT)


def _draw_label(pen: ImageDraw.ImageDraw, name: str, count: int, *, top: int) -> None:
    """Draw the name of a class on one line or two, and its number of images below."""
    lines = _break_lines(_printable(name), width=_LABEL_WIDTH - 16)
    y = top + _SIDE // 2 - 11 * len(lines) - 8
    for line in lines:
        _draw_text(pen, line, (_MARGIN, y), 17)
        y += 22
    _draw_text(pen, format_plural(count, "image"), (_MARGIN, y), 13, _LIGHT)


def _draw_thumbnail(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, source: ImageSource, index: int, *, position: tuple[int, int]
) -> None:
    """Draw an image in its cell, or a cross if it cannot be decoded."""
    left, top = position
    pen.rounded_rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), radius=6, fill=_CELL)
    try:
        image = decode(read_image(source, index), draft_size=(_SIDE, _SIDE))
    except DataError:
        pen.line((left + 38, top + 38, left + 74, top + 74), fill=_RED, width=3)
        pen.line((left + 38, top + 74, left + 74, top + 38), fill=_RED, width=3)
        return
    assert isinstance(image, Image.Image)
    # Tiny images are enlarged without smoothing.
    kernel = Image.Resampling.NEAREST if max(image.size) * 2 <= _SIDE else Image.Resampling.LANCZOS
    scale = _SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))  # a side must not round to 0
    thumbnail = image.resize(size, kernel)
    sheet.paste(thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + (_SIDE - thumbnail.height) // 2))


_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Pillow's own font has Latin letters; for others, fonts of the system, by the number of their alphabets.
_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "arial.ttf", "Arial Unicode.ttf"),
    *("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc"),
)


def _draw_text(pen: ImageDraw.ImageDraw, text: str, position: tuple[int, int], size: int, color: str = _TEXT) -> None:
    text = _printable(text)
    font = _find_font(size, text)
    pen.text(position, _shorten(text, font, 800), fill=color, font=font)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _find_font(size: int, text: str) -> _Font:
    """Return Pillow's font, or the first font of the system that has all letters."""
    default = ImageFont.load_default(size)
    if _has_letters(default, text):
        return default
    for name in _FONTS:
        with contextlib.suppress(OSError):
            font = ImageFont.truetype(name, size)
            if _has_letters(font, text):
                return font
    return default


def _has_letters(font: _Font, text: str) -> bool:
    """Return whether a font has all letters; missing ones are rendered as a box."""
    box = bytes(font.getmask("\U0010ffff"))
    return all(bytes(font.getmask(letter)) != box for letter in set(text) - {" "})


def _break_lines(text: str, *, width: int) -> list[str]:
    """Break a text between words into at most two lines."""
    font, first, words = _find_font(17, text), "", text.split(" ")
    while words and font.getlength(f"{first} {words[0]}".strip()) <= width:
        first = f"{first} {words.pop(0)}".strip()
    lines = [line for line in (first, " ".join(words)) if line]
    return [_shorten(line, font, width) for line in lines] or [""]


def _shorten(text: str, font: _Font, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
