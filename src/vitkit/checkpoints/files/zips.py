"""An open zip file goes in; its directory comes out, once nothing in it can hurt: bombs, overlaps, paths, ciphers."""

import struct
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from vitkit.checkpoints.files.guards import MOST_TENSORS, brief, check_name, refusal, size_of

MOST_ENTRIES = MOST_TENSORS + 100
"""A tensor is an entry; torch adds a handful of its own."""
MOST_DIRECTORY = 2 << 20
"""An entry takes about 100 bytes of directory, so this is four times what `MOST_ENTRIES` need."""
SMALL = 64 << 20
"""What unpacks to no more than this can do no harm, however small it was packed."""
MOST_EXPANSION = 20
"""Trained weights hardly pack at all; a classifier of zeros packs a thousandfold, but not the model around it."""
END, END_64, LOCATOR_64, LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x03\x04"
END_SIZE, END_64_SIZE, LOCATOR_64_SIZE, LOCAL_SIZE = 22, 56, 20, 30
ENCRYPTED = 0x1 | 0x40


def checked_zip(file: BinaryIO, *, path: Path) -> zipfile.ZipFile:
    """The zip, after its directory was held against the file and against what weights need."""
    check_directory_size(file, path=path)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise refusal(path, f"is a damaged zip: {brief(error)}") from error
    entries = archive.infolist()
    if len(entries) > MOST_ENTRIES:
        raise refusal(path, "has too many entries", expected=f"at most {MOST_ENTRIES:,}", got=f"{len(entries):,}")
    if len({entry.filename for entry in entries}) != len(entries):
        raise refusal(path, "has an entry twice")
    for entry in entries:
        check_entry(entry, path=path)
    check_sizes(entries, archive.start_dir, path=path)
    return archive


def check_directory_size(file: BinaryIO, *, path: Path) -> None:
    """Refuse a directory that is too long to be read, by what the last bytes of the file say of it."""
    size = size_of(file)
    start = max(0, size - END_SIZE - LOCATOR_64_SIZE - END_64_SIZE)
    file.seek(start)
    tail = file.read(size - start)
    end = tail[-END_SIZE:]
    if len(end) < END_SIZE or not end.startswith(END) or end[-2:] != b"\0\0":
        raise refusal(path, "is a zip that is cut short, or has something after its end")
    count, length = struct.unpack("<HI", end[10:16])
    if tail[-END_SIZE - LOCATOR_64_SIZE :].startswith(LOCATOR_64):
        if not tail.startswith(END_64):
            raise refusal(path, "is a zip whose directory cannot be found")
        count, length = struct.unpack("<QQ", tail[32:48])
    if count == 0 or length == 0:
        raise refusal(path, "is an empty zip: it holds no tensors")
    if count > MOST_ENTRIES:
        raise refusal(path, "has too many entries", expected=f"at most {MOST_ENTRIES:,}", got=f"{count:,}")
    if length > min(MOST_DIRECTORY, size):
        expected = f"at most {min(MOST_DIRECTORY, size):,} bytes"
        raise refusal(path, "the zip's directory is too long", expected=expected, got=f"{length:,}")


def check_entry(entry: zipfile.ZipInfo, *, path: Path) -> None:
    """Refuse an entry that leads out of the file, or that is packed in a way that nobody packs weights."""
    check_name(entry.orig_filename, where=path)
    name = brief(entry.filename)
    if entry.flag_bits & ENCRYPTED:
        raise refusal(path, f"{name} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise refusal(path, f"{name} is packed by method {entry.compress_type}", expected="stored or deflated")
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise refusal(path, f"{name} is not packed, and yet has two sizes")


def check_sizes(entries: list[zipfile.ZipInfo], end: int, *, path: Path) -> None:
    """Refuse entries that overlap or reach beyond the end, and bombs."""
    spans = sorted((entry.header_offset, entry.header_offset + LOCAL_SIZE + entry.compress_size) for entry in entries)
    if spans[0][0] < 0 or spans[-1][1] > end:
        raise refusal(path, "has an entry outside of the file")
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        raise refusal(path, "has entries that overlap")
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > max(SMALL, MOST_EXPANSION * end):
        expected = f"at most {max(SMALL, MOST_EXPANSION * end):,} bytes"
        raise refusal(path, "unpacks to far more than weights do", expected=expected, got=f"{unpacked:,}")


def start_of(entry: zipfile.ZipInfo, file: BinaryIO, *, path: Path) -> int:
    """Where in the file the bytes of an entry begin that is not packed."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise refusal(path, f"{brief(entry.filename)} is packed", expected="as it is, as torch writes it")
    file.seek(entry.header_offset)
    local = file.read(LOCAL_SIZE)
    if len(local) < LOCAL_SIZE or not local.startswith(LOCAL):
        raise refusal(path, f"{brief(entry.filename)} is not where the directory says")
    start = entry.header_offset + LOCAL_SIZE + sum(struct.unpack("<HH", local[26:30]))
    if start + entry.file_size > size_of(file):
        raise refusal(path, f"{brief(entry.filename)} reaches beyond the end of the file")
    return start
