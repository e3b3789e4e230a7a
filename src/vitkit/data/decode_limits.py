"""Limits on image files, checked before Pillow decodes them.

Pillow parses the parts of a file one by one, in Python, before it knows the image: a few megabytes of nothing but parts
cost seconds. The parts of each format are therefore counted first, up to more than any photo has.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vitkit.core.errors import DataError

MAX_SEGMENTS = 1_000
"""JPEG segments before the first scan; a color profile of 16 MB takes 255."""
MAX_EXIF_SEGMENTS = 16
"""JPEG segments with EXIF, 64 KB each."""
MAX_FILL_BYTES = 10_000
"""Bytes without meaning between JPEG segments."""
MAX_CHUNKS = 20_000
"""PNG chunks; 64 MB in chunks of 4 KB take 16,000."""
MAX_COMPRESSED_TEXTS = 16
MAX_BLOCKS = 2_000
"""GIF images and extensions."""
MAX_SUB_BLOCKS = 300_000
"""GIF sub-blocks; 64 MB in sub-blocks of 255 bytes take 250,000."""
MAX_ENTRIES = 2_000
"""Entries in one directory of a TIFF file or of EXIF data."""
MAX_SLOW_BYTES = 1_000_000
"""Bytes in encodings that Pillow decodes in Python, number by number."""
PPM_GAP = rb"(?:[ \t\r\n\v\f]|#[^\r\n]*[\r\n])+"
PPM_HEADER = re.compile(rb"P([1-6])" + PPM_GAP + rb"\d{1,9}" + PPM_GAP + rb"\d{1,9}(?:" + PPM_GAP + rb"(\d{1,9}))?")
PPM_HEADER_BYTES = 4_096


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """Limits that a file must keep to be decoded. They are checked on its header."""

    formats: tuple[str, ...] = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "AVIF", "HEIF")
    """Formats by Pillow's names. HEIF, which phones write as .heic, needs pillow-heif. Formats that run or call
    programs, such as EPS, must not be added."""
    max_bytes: int = 64_000_000
    max_pixels: int = 100_000_000
    """Pillow's own limit, twice its MAX_IMAGE_PIXELS (179 million by default), applies as well."""
    max_frames: int = 256
    """Only the first frame is used; files with very many frames are made to be expensive."""
    max_scans: int = 100
    """A progressive JPEG is decoded once per scan. Photos have about 10; hundreds make 100 kB cost seconds."""


DEFAULT_LIMITS = DecodeLimits()


def check_structure(content: bytes, *, max_frames: int) -> None:
    """Raise DataError for a file with more parts than any image has. Files that are no images pass."""
    if content.startswith(b"\xff\xd8"):
        _check_jpeg(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(content)
    elif content.startswith(b"GIF8"):
        _check_gif(content, max_frames=max_frames)
    elif content.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        _check_tiff(content, max_frames=max_frames)
    elif content.startswith(b"BM"):
        _check_bmp(content)
    elif re.match(rb"P[1-6]", content):
        _check_ppm(content)


def is_small_exif(exif: bytes) -> bool:
    """Return whether EXIF data is small enough to be parsed. Cameras write some dozens of entries."""
    entries = _count_entries(exif.removeprefix(b"Exif\0\0"), max_directories=1)
    return not entries or entries[0] <= MAX_ENTRIES


def count_gif_frames(content: bytes, *, max_frames: int) -> int:
    """Count the image blocks of a GIF, up to one more than `max_frames`. Pillow would decode each."""
    return sum(block == 0x2C for block, _ in _iterate_gif_blocks(content, max_frames=max_frames))


def check_limit(parts: str, count: int, limit: int) -> None:
    """Raise DataError if there are too many parts."""
    if count > limit:
        raise DataError(f"too many {parts}", expected=f"at most {limit:,}", got=f"{count:,}")


def _check_jpeg(content: bytes) -> None:
    offset, segments, fill_bytes, exif = 2, 0, 0, 0
    while offset + 4 <= len(content):
        marker = content[offset + 1]
        if content[offset] != 0xFF or marker in (0x00, 0xFF):
            fill_bytes, offset = fill_bytes + 1, offset + 1
            check_limit("bytes between segments", fill_bytes, MAX_FILL_BYTES)
            continue
        if marker == 0xDA:  # start of scan
            return
        segments += 1
        check_limit("segments", segments, MAX_SEGMENTS)
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # no payload
            offset += 2
            continue
        exif += marker == 0xE1 and content.startswith(b"Exif", offset + 4)
        check_limit("segments of EXIF", exif, MAX_EXIF_SEGMENTS)
        offset += 2 + max(2, int.from_bytes(content[offset + 2 : offset + 4], "big"))


def _check_png(content: bytes) -> None:
    offset, chunks, texts = 8, 0, 0
    while offset + 8 <= len(content):
        length, chunk = struct.unpack_from(">I4s", content, offset)
        chunks, texts = chunks + 1, texts + (chunk in (b"zTXt", b"iTXt", b"iCCP"))
        check_limit("compressed texts", texts, MAX_COMPRESSED_TEXTS)
        check_limit("chunks", chunks, MAX_CHUNKS)
        offset += 12 + length


def _check_gif(content: bytes, *, max_frames: int) -> None:
    sub_blocks = 0
    for blocks, (_, count) in enumerate(_iterate_gif_blocks(content, max_frames=max_frames), start=1):
        sub_blocks += count
        check_limit("sub-blocks", sub_blocks, MAX_SUB_BLOCKS)
        check_limit("blocks", blocks, MAX_BLOCKS)


def _iterate_gif_blocks(content: bytes, *, max_frames: int) -> Iterator[tuple[int, int]]:
    """Yield type and number of sub-blocks of each block, until there are too many frames or sub-blocks."""

    def palette_size(offset: int) -> int:
        flags = content[offset] if offset < len(content) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    offset, frames, end = 13 + palette_size(10), 0, len(content)
    while offset < end and content[offset] != 0x3B and frames <= max_frames:
        block = content[offset]
        if block == 0x2C:  # image: position, palette, code size
            frames += 1
            offset += 11 + palette_size(offset + 9)
        elif block == 0x21:  # extension
            offset += 2
        else:
            offset += 1
            yield block, 0
            continue
        sub_blocks = 0
        while offset < end and content[offset] and sub_blocks <= MAX_SUB_BLOCKS:
            offset += 1 + content[offset]
            sub_blocks += 1
        offset += 1
        yield block, sub_blocks


def _check_tiff(content: bytes, *, max_frames: int) -> None:
    entries = _count_entries(content, max_directories=max_frames + 1)
    check_limit("entries", sum(entries), MAX_ENTRIES * 10)
    check_limit("entries", sum(entries[:1]), MAX_ENTRIES)


def _count_entries(content: bytes, *, max_directories: int) -> list[int]:
    """Return the number of entries in each of the first directories of TIFF or EXIF data."""
    if not content.startswith((b"II", b"MM")):
        return []
    order = "<" if content.startswith(b"II") else ">"
    is_big = content[2:4] in (b"+\0", b"\0+")
    count, pointer, entry_size = (f"{order}Q", f"{order}Q", 20) if is_big else (f"{order}H", f"{order}I", 12)
    counts: list[int] = []
    try:
        (offset,) = struct.unpack_from(pointer, content, 8 if is_big else 4)
        while offset and len(counts) < max_directories:
            (entries,) = struct.unpack_from(count, content, offset)
            counts.append(entries)
            (offset,) = struct.unpack_from(pointer, content, offset + struct.calcsize(count) + entry_size * entries)
    except (struct.error, OverflowError):  # truncated, which the decoder reports
        pass
    return counts


def _check_bmp(content: bytes) -> None:
    if len(content) >= 34 and struct.unpack_from("<I", content, 30)[0] in (1, 2):
        check_limit("bytes for a run-length encoded BMP", len(content), MAX_SLOW_BYTES)


def _check_ppm(content: bytes) -> None:
    header = PPM_HEADER.match(content[:PPM_HEADER_BYTES])
    if header is None or (header[1] not in b"14" and header[2] is None):
        raise DataError("damaged PPM file: its header cannot be read")
    if header[1] in b"123" or (header[1] in b"56" and int(header[2]) not in (255, 65535)):
        check_limit("bytes for a PPM file in ASCII or with unusual levels", len(content), MAX_SLOW_BYTES)
