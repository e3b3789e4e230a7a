"""A data set goes in; its counts, sizes, duplicates, bad files, what to worry about and a contact sheet come out."""

import contextlib
import hashlib
import io
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitkit.core.errors import DataError
from vitkit.core.files import write_bytes
from vitkit.data.decode import DEFAULT_GATE, Gate, Header, decode, describe
from vitkit.data.source import UNLABELLED, Content, DataSet, Source
from vitkit.data.verify import BadFile, check_content, examine, read_image

FEW_IMAGES = 5
IMBALANCE = 10
SMALL_SIDE = 32


class Spread(NamedTuple):
    """The least, the middle and the most of some numbers."""

    minimum: int
    median: int
    maximum: int


class Member(NamedTuple):
    """One image of a group of duplicates."""

    split: str
    name: str
    label: int


@dataclass(frozen=True)
class Duplicates:
    """Images of one and the same content."""

    members: tuple[Member, ...]

    @property
    def leak(self) -> bool:
        """Whether the image is in more than one split."""
        return len({member.split for member in self.members}) > 1

    @property
    def conflict(self) -> bool:
        """Whether the image is given more than one label."""
        return len({member.label for member in self.members}) > 1


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a data set holds. Counts are of all images that are listed; bad ones have no size and no mode."""

    place: str
    kind: str
    classes: tuple[str, ...]
    splits: Mapping[str, int]
    """Images of each split."""
    counts: Mapping[str, tuple[int, ...]]
    """Images of each class, by label, for each split."""
    unlabelled: int
    height: Spread | None
    width: Spread | None
    modes: Mapping[str, int]
    """Images of each format and mode, the most frequent first."""
    duplicates: tuple[Duplicates, ...]
    bad: tuple[tuple[str, BadFile], ...]
    """Each bad file behind its split."""
    warnings: tuple[str, ...]

    @property
    def images(self) -> int:
        """Images of all splits."""
        return sum(self.splits.values())

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Images of each class in all splits together, by label."""
        return tuple(map(sum, zip(*self.counts.values(), strict=True)))


class Finding(NamedTuple):
    """What was seen of one image: its header, or the reason why there is none, and a digest of its content."""

    header: Header | None
    reason: str
    digest: bytes


def survey(
    dataset: DataSet,
    *,
    channels: int = 3,
    gate: Gate = DEFAULT_GATE,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Look at every image of every split once; `progress` is told how many images are done."""
    findings: dict[str, list[Finding]] = {}
    work = partial(_find, channels=channels, gate=gate)
    done = 0
    for split, source in dataset.splits.items():
        findings[split] = []
        for finding in examine(source, work, workers=workers):
            findings[split].append(finding)
            done += 1
            if progress is not None:
                progress(done)
    headers = [finding.header for found in findings.values() for finding in found if finding.header]
    counts = {split: _counts(source, classes=len(dataset.classes)) for split, source in dataset.splits.items()}
    duplicates = _duplicates(dataset, findings)
    bad = tuple(
        (split, BadFile(dataset.splits[split].name(index), finding.reason))
        for split, found in findings.items()
        for index, finding in enumerate(found)
        if finding.header is None
    )
    warnings = (
        *([] if done else ["there are no images"]),
        *([f"{len(bad)} of {done} images cannot be used ({len(bad) / done:.2g} of all)"] if bad else []),
        *_warn_of_classes(dataset.classes, counts),
        *_warn_of_duplicates(duplicates),
        *_warn_of_sizes(headers),
    )
    return Survey(
        place=dataset.place,
        kind=dataset.kind,
        classes=dataset.classes,
        splits={split: len(source) for split, source in dataset.splits.items()},
        counts=counts,
        unlabelled=sum(int((source.labels == UNLABELLED).sum()) for source in dataset.splits.values()),
        height=_spread([header.height for header in headers]),
        width=_spread([header.width for header in headers]),
        modes=dict(Counter(f"{header.format} {header.mode}" for header in headers).most_common()),
        duplicates=duplicates,
        bad=bad,
        warnings=warnings,
    )


def _find(source: Source, index: int, *, channels: int, gate: Gate) -> Finding:
    """What can be seen of one image."""
    digest = b""
    try:
        content = read_image(source, index)
        digest = _digest(content)
        check_content(content, channels=channels, gate=gate)
        return Finding(describe(content, gate=gate), "", digest)
    except DataError as error:
        return Finding(None, str(error), digest)


def _digest(content: Content) -> bytes:
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    return hashlib.sha256(repr(content.shape).encode() + content.tobytes()).digest()


def _counts(source: Source, *, classes: int) -> tuple[int, ...]:
    labelled = source.labels[source.labels != UNLABELLED]
    return tuple(np.bincount(labelled, minlength=classes).tolist())


def _spread(numbers: Sequence[int]) -> Spread | None:
    return Spread(min(numbers), int(statistics.median(numbers)), max(numbers)) if numbers else None


def _duplicates(dataset: DataSet, findings: Mapping[str, Sequence[Finding]]) -> tuple[Duplicates, ...]:
    """Groups of two or more, in the order of their first members. Empty files are bad, not alike."""
    groups: dict[bytes, list[Member]] = {}
    for split, source in dataset.splits.items():
        for index, finding in enumerate(findings[split]):
            if finding.header is not None:
                member = Member(split, source.name(index), int(source.labels[index]))
                groups.setdefault(finding.digest, []).append(member)
    return tuple(Duplicates(tuple(members)) for members in groups.values() if len(members) > 1)


# What to worry about, in words


def _warn_of_classes(classes: Sequence[str], counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Worry about the classes of the split that is learned from, and about those that others lack."""
    if not classes:
        return []
    warnings = ["there is only one class, and nothing to tell it from"] if len(classes) == 1 else []
    learned = "train" if "train" in counts else next(iter(counts))
    numbers = counts[learned]
    few = [f"{name} ({number})" for name, number in zip(classes, numbers, strict=True) if number < FEW_IMAGES]
    if few:
        warnings.append(
            f"{_count(few, 'one class has', 'classes have')} fewer than {FEW_IMAGES} images in {learned}: {_some(few)}"
        )
    most = max(numbers)
    least = min((number for number in numbers if number), default=most)
    if most > IMBALANCE * least:
        small, large = classes[numbers.index(least)], classes[numbers.index(most)]
        warnings.append(f"classes are uneven in {learned}: {large} has {most} images, {small} has {least}")
    for split, others in counts.items():
        absent = [name for name, number in zip(classes, others, strict=True) if not number]
        if split != learned and absent:
            warnings.append(f"{_count(absent, 'one class has', 'classes have')} no images in {split}: {_some(absent)}")
    return warnings


def _warn_of_duplicates(duplicates: Sequence[Duplicates]) -> list[str]:
    """Worry most about images in two splits, then about two labels, then about mere repeats."""
    worries = {
        "in more than one split, so scores will be too good": [group for group in duplicates if group.leak],
        "given different labels": [group for group in duplicates if group.conflict],
        "there more than once": [group for group in duplicates if not group.leak and not group.conflict],
    }
    warnings = []
    for worry, groups in worries.items():
        count = _count(groups, "one image is", "images are")
        names = [" = ".join(f"{member.split}: {member.name}" for member in group.members[:3]) for group in groups]
        warnings += [f"{count} {worry}: {_some(names)}"] if groups else []
    return warnings


def _warn_of_sizes(headers: Sequence[Header]) -> list[str]:
    """Worry about images that are small beside the rest; a set of thumbnails is small on purpose."""
    sides = [min(header.height, header.width) for header in headers]
    usual = statistics.median(sides) if sides else 0
    small = [side for side in sides if side < SMALL_SIDE and side * 4 < usual]
    if not small:
        return []
    count = _count(small, "one image is", "images are")
    return [f"{count} very small: down to {min(small)} pixels, where others have {usual:.0f}"]


def _count(things: Sequence[object], one: str, many: str) -> str:
    return one if len(things) == 1 else f"{len(things)} {many}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# The contact sheet

_SIDE, _GAP, _MARGIN, _LABELS, _TITLE = 112, 8, 28, 190, 64
_PAPER, _CELL, _INK, _FAINT, _RED = "#ffffff", "#f1f3f5", "#1f2328", "#6e7781", "#c0392b"


def contact_sheet(
    dataset: DataSet, path: Path | str, *, columns: int = 8, per_class: int = 8, max_classes: int = 20
) -> None:
    """Write a PNG of thumbnails, a row of labelled ones for each class, taken evenly from the split to learn from."""
    split = "train" if "train" in dataset.splits else next(iter(dataset.splits))
    source = dataset.splits[split]
    rows = _sheet_rows(source, columns=columns, per_class=per_class, max_classes=max_classes)
    left = _MARGIN + (_LABELS if dataset.classes else 0)
    step = _SIDE + _GAP
    width = left + columns * step - _GAP + _MARGIN
    height = _MARGIN + _TITLE + max(len(rows), 1) * step - _GAP + _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    _draw_title(pen, dataset, split, shown=max_classes)
    for number, (label, indices) in enumerate(rows):
        top = _MARGIN + _TITLE + number * step
        if label is not None:
            _draw_label(pen, dataset.classes[label], int((source.labels == label).sum()), top=top)
        for column, index in enumerate(indices):
            _draw_thumbnail(sheet, pen, source, index, place=(left + column * step, top))
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    try:
        write_bytes(path, file.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error


def _sheet_rows(
    source: Source, *, columns: int, per_class: int, max_classes: int
) -> list[tuple[int | None, list[int]]]:
    """The indices of each row, behind the label where a class begins."""
    if not source.classes:
        every = _evenly(np.arange(len(source)), columns * max_classes)
        return [(None, every[start : start + columns]) for start in range(0, len(every), columns)]
    rows: list[tuple[int | None, list[int]]] = []
    for label in range(min(len(source.classes), max_classes)):
        chosen = _evenly(np.flatnonzero(source.labels == label), per_class)
        rows.append((label, chosen[:columns]))
        rows += [(None, chosen[start : start + columns]) for start in range(columns, len(chosen), columns)]
    return rows


def _evenly(indices: NDArray[np.int64], count: int) -> list[int]:
    """At most `count` of the indices, at even distances."""
    count = min(count, len(indices))
    return list(map(int, indices[np.arange(count) * len(indices) // max(count, 1)]))


def _draw_title(pen: ImageDraw.ImageDraw, dataset: DataSet, split: str, *, shown: int) -> None:
    facts = [dataset.kind, f"{len(dataset.splits[split]):,} images in {split}"]
    if dataset.classes:
        facts.append(f"{len(dataset.classes):,} classes" if len(dataset.classes) != 1 else "1 class")
    if len(dataset.classes) > shown:
        facts.append(f"the first {shown} shown")
    _write(pen, Path(dataset.place).name or dataset.place, place=(_MARGIN, _MARGIN), size=24)
    _write(pen, " · ".join(facts), place=(_MARGIN, _MARGIN + 32), size=14, ink=_FAINT)


def _draw_label(pen: ImageDraw.ImageDraw, name: str, count: int, *, top: int) -> None:
    """Write a class's name on one line, or two, and its number of images below."""
    lines = _lines(_printable(name), width=_LABELS - 16)
    place = top + _SIDE // 2 - 11 * len(lines) - 8
    for line in lines:
        _write(pen, line, place=(_MARGIN, place), size=17)
        place += 22
    _write(pen, "1 image" if count == 1 else f"{count:,} images", place=(_MARGIN, place), size=13, ink=_FAINT)


def _draw_thumbnail(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, source: Source, index: int, *, place: tuple[int, int]
) -> None:
    """Draw the whole image in its cell; a bad one as a crossed cell."""
    left, top = place
    pen.rounded_rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), radius=6, fill=_CELL)
    try:
        picture = decode(read_image(source, index), fit=(_SIDE, _SIDE))
    except DataError:
        pen.line((left + 38, top + 38, left + 74, top + 74), fill=_RED, width=3)
        pen.line((left + 38, top + 74, left + 74, top + 38), fill=_RED, width=3)
        return
    assert isinstance(picture, Image.Image)
    # Single pixels of a tiny image are what there is to see of it.
    kernel = Image.Resampling.NEAREST if max(picture.size) * 2 <= _SIDE else Image.Resampling.LANCZOS
    thumbnail = ImageOps.contain(picture, (_SIDE, _SIDE), kernel)
    sheet.paste(thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + (_SIDE - thumbnail.height) // 2))


# Words on the sheet

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Pillow's own font has English letters; for others, fonts that systems have, by the reach of their alphabets.
_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "arial.ttf", "Arial Unicode.ttf"),
    *("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc"),
)


def _write(pen: ImageDraw.ImageDraw, text: str, *, place: tuple[int, int], size: int, ink: str = _INK) -> None:
    text = _printable(text)
    font = _font(size, text)
    pen.text(place, _shortened(text, font, 800), fill=ink, font=font)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _font(size: int, text: str) -> _Font:
    """Pillow's font, or the first of the system's that has the letters that it lacks."""
    own = ImageFont.load_default(size)
    if _covers(own, text):
        return own
    for name in _FONTS:
        with contextlib.suppress(OSError):
            font = ImageFont.truetype(name, size)
            if _covers(font, text):
                return font
    return own


def _covers(font: _Font, text: str) -> bool:
    """Whether no letter comes out as the box that stands for those a font lacks."""
    box = bytes(font.getmask("\U0010ffff"))
    return all(bytes(font.getmask(letter)) != box for letter in set(text) - {" "})


def _lines(text: str, *, width: int) -> list[str]:
    """The text on one line, or broken once between words."""
    font, first, rest = _font(17, text), "", text.split(" ")
    while rest and font.getlength(f"{first} {rest[0]}".strip()) <= width:
        first = f"{first} {rest.pop(0)}".strip()
    lines = [line for line in (first, " ".join(rest)) if line]
    return [_shortened(line, font, width) for line in lines] or [""]


def _shortened(text: str, font: _Font, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
