"""The bytes of an image file go in; a DataError comes out where they are put together to cost time, not to be seen.

Pillow reads the parts of a file one by one, in Python, before it knows the picture: a file of a few megabytes that is
nothing but parts takes it seconds. Here each format's parts are counted first, and no further than any photo has them.
"""

import re
import struct

from vitkit.core.errors import DataError

MOST_SEGMENTS = 1_000
"""Of a JPEG, before its first scan: 16 MB of colour profile are 255."""
MOST_EXIF = 16
"""Segments of EXIF, 64 KB each."""
MOST_FILLING = 10_000
"""Bytes between a JPEG's segments that mean nothing."""
MOST_CHUNKS = 20_000
"""Of a PNG: 64 MB in pieces of 4 KB are 16,000."""
MOST_PACKED_TEXTS = 16
MOST_BLOCKS = 2_000
"""Of a GIF, images and remarks."""
MOST_PIECES = 300_000
"""Of a GIF: 64 MB in pieces of 255 bytes are 250,000."""
MOST_ENTRIES = 2_000
"""Of a TIFF or of EXIF, in one directory."""
MOST_SLOW_BYTES = 1_000_000
"""Of what Pillow decodes in Python, number by number."""
PPM_GAP = rb"(?:[ \t\r\n\v\f]|#[^\r\n]*[\r\n])+"
PPM_HEADER = re.compile(rb"P([1-6])" + PPM_GAP + rb"\d{1,9}" + PPM_GAP + rb"\d{1,9}(?:" + PPM_GAP + rb"(\d{1,9}))?")
PPM_HEADER_BYTES = 4_096


def check_structure(content: bytes, *, max_frames: int) -> None:
    """Refuse a file that has more parts than any picture; what is no image at all passes, others will say so.

    >>> check_structure(b"\\xff\\xd8" + b"\\xff\\xfe\\0\\2" * 2000, max_frames=1)
    Traceback (most recent call last):
    vitkit.core.errors.DataError: too many segments (expected at most 1,000)
    """
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


def is_plain_exif(exif: bytes) -> bool:
    """Whether EXIF is short enough to be looked at: cameras write some dozens of entries.

    >>> is_plain_exif(b"Exif\\0\\0II*\\0\\x08\\0\\0\\0\\x01\\0")
    True
    """
    entries = list(_directories(exif.removeprefix(b"Exif\0\0"), most=1))
    return not entries or entries[0] <= MOST_ENTRIES


def _most(what: str, most: int) -> DataError:
    return DataError(f"too many {what}", expected=f"at most {most:,}")


def _check_jpeg(content: bytes) -> None:
    place, segments, filling, exif = 2, 0, 0, 0
    while place + 4 <= len(content):
        marker = content[place + 1]
        if content[place] != 0xFF or marker in (0x00, 0xFF):
            filling, place = filling + 1, place + 1
            if filling > MOST_FILLING:
                raise _most("bytes between segments", MOST_FILLING)
            continue
        if marker == 0xDA:  # the pixels begin
            return
        segments += 1
        if segments > MOST_SEGMENTS:
            raise _most("segments", MOST_SEGMENTS)
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # stands alone
            place += 2
            continue
        exif += marker == 0xE1 and content.startswith(b"Exif", place + 4)
        if exif > MOST_EXIF:
            raise _most("segments of EXIF", MOST_EXIF)
        place += 2 + max(2, int.from_bytes(content[place + 2 : place + 4], "big"))


def _check_png(content: bytes) -> None:
    place, packed = 8, 0
    for _ in range(MOST_CHUNKS):
        if place + 8 > len(content):
            return
        length, kind = struct.unpack_from(">I4s", content, place)
        packed += kind in (b"zTXt", b"iTXt", b"iCCP")
        if packed > MOST_PACKED_TEXTS:
            raise _most("packed texts", MOST_PACKED_TEXTS)
        place += 12 + length
    raise _most("chunks", MOST_CHUNKS)


def _check_gif(content: bytes, *, max_frames: int) -> None:
    """Blocks and pieces, until there are too many frames, which the gate will count by itself."""

    def palette(place: int) -> int:
        flags = content[place] if place < len(content) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    place, frames, pieces, end = 13 + palette(10), 0, 0, len(content)
    for _ in range(MOST_BLOCKS):
        if place >= end or content[place] == 0x3B or frames > max_frames:
            return
        if content[place] == 0x2C:
            frames += 1
            place += 11 + palette(place + 9)
        elif content[place] == 0x21:
            place += 2
        else:
            place += 1
            continue
        while place < end and (size := content[place]):
            place += 1 + size
            pieces += 1
            if pieces > MOST_PIECES:
                raise _most("pieces", MOST_PIECES)
        place += 1
    raise _most("blocks", MOST_BLOCKS)


def _check_tiff(content: bytes, *, max_frames: int) -> None:
    if sum(_directories(content, most=max_frames + 1)) > MOST_ENTRIES * 10:
        raise _most("entries", MOST_ENTRIES * 10)
    if next(iter(_directories(content, most=1)), 0) > MOST_ENTRIES:
        raise _most("entries", MOST_ENTRIES)


def _directories(content: bytes, *, most: int) -> list[int]:
    """How many entries each of the first directories of a TIFF has, or of EXIF, which is one."""
    if not content.startswith((b"II", b"MM")):
        return []
    order = "<" if content.startswith(b"II") else ">"
    large = content[2:4] in (b"+\0", b"\0+")
    count, offset, entry = (f"{order}Q", f"{order}Q", 20) if large else (f"{order}H", f"{order}I", 12)
    found: list[int] = []
    try:
        (place,) = struct.unpack_from(offset, content, 8 if large else 4)
        while place and len(found) < most:
            (entries,) = struct.unpack_from(count, content, place)
            found.append(entries)
            (place,) = struct.unpack_from(offset, content, place + struct.calcsize(count) + entry * entries)
    except (struct.error, OverflowError):  # it ends here: whoever reads it will say so
        pass
    return found


def _check_bmp(content: bytes) -> None:
    runs = len(content) >= 34 and struct.unpack_from("<I", content, 30)[0] in (1, 2)
    if runs and len(content) > MOST_SLOW_BYTES:
        raise DataError("too many bytes in runs", expected=f"at most {MOST_SLOW_BYTES:,}", got=f"{len(content):,}")


def _check_ppm(content: bytes) -> None:
    header = PPM_HEADER.match(content[:PPM_HEADER_BYTES])
    if header is None or (header[1] not in b"14" and header[2] is None):
        raise DataError("damaged PPM file: its header cannot be read")
    slow = header[1] in b"123" or (header[1] in b"56" and int(header[2]) not in (255, 65535))
    if slow and len(content) > MOST_SLOW_BYTES:
        what = "too many bytes for a PPM of digits or odd steps"
        raise DataError(what, expected=f"at most {MOST_SLOW_BYTES:,}", got=f"{len(content):,}")
