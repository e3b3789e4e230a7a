"""Contact sheets: thumbnails of the images of each class in one picture."""

import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitkit.core.errors import DataError
from vitkit.core.files import atomic_write
from vitkit.core.formatting import format_plural
from vitkit.data.dataset import Dataset, ImageSource
from vitkit.data.decode import decode
from vitkit.data.verify import read_image

_MAX_ROWS = 20
_SIDE, _GAP, _MARGIN, _LABEL_WIDTH, _TITLE_HEIGHT = 112, 8, 28, 190, 64
_BACKGROUND, _CELL, _TEXT, _LIGHT, _RED = "#ffffff", "#f1f3f5", "#1f2328", "#6e7781", "#c0392b"


def write_contact_sheet(dataset: Dataset, path: Path | str) -> None:
    """Write a contact sheet as a PNG file."""
    sheet = draw_contact_sheet(dataset)
    try:
        with atomic_write(path) as temporary:
            sheet.save(temporary, "PNG", optimize=True)
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
