"""The bytes of a MATLAB 5 file go in, its numeric arrays come out by name; just what Flowers-102 needs."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError

MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)
MOST_BYTES = 64 << 20


def read_matlab(content: bytes, *, where: str) -> dict[str, NDArray[np.int64]]:
    """The arrays of whole numbers in a MATLAB 5 file, each as one row."""
    if len(content) < 128 or content[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{where} is not a MATLAB 5 file", hint="fetch it again, or save it with -v7")
    order = "<" if content[126:128] == b"IM" else ">"
    found = {}
    try:
        for kind, data in elements(content[128:], order=order):
            if kind == COMPRESSED:
                for inner_kind, inner in elements(unpacked(data), order=order):
                    if inner_kind == MATRIX:
                        found.update(matrix(inner, order=order))
            elif kind == MATRIX:
                found.update(matrix(data, order=order))
    except (struct.error, zlib.error, ValueError, StopIteration, UnicodeDecodeError) as error:
        raise DataError(f"{where} is damaged: {error}", hint="fetch it again") from error
    return found


def elements(content: bytes, *, order: str) -> Iterator[tuple[int, bytes]]:
    """Type and data of the elements one after another: a small one has both lengths in four bytes."""
    position = 0
    while position + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, position)
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            start, end = position + 4, position + 8
        else:
            start = position + 8
            end = start + size if kind == COMPRESSED else start + size + -size % 8
        if start + size > len(content):
            raise ValueError("it ends within an array")
        yield kind, content[start : start + size]
        position = end


def unpacked(data: bytes) -> bytes:
    """The content of a compressed element, of a bounded size."""
    content = zlib.decompressobj().decompress(data, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError("it has an array of more than 64 MB")
    return content


def matrix(data: bytes, *, order: str) -> dict[str, NDArray[np.int64]]:
    """Name and numbers of an array; nothing where it holds other than numbers."""
    parts = elements(data, order=order)
    flags = struct.unpack_from(f"{order}I", next(parts)[1])[0]
    if flags & 0xFF not in NUMERIC_CLASSES:
        return {}
    _, name = next(parts), next(parts)[1]
    kind, numbers = next(parts)
    if kind not in NUMBERS:
        raise ValueError(f"it has numbers of the unknown type {kind}")
    array = np.frombuffer(numbers, dtype=np.dtype(NUMBERS[kind]).newbyteorder("<" if order == "<" else ">"))
    if array.dtype.kind == "f" and not (np.isfinite(array) & (abs(array) < 2**53)).all():
        return {}
    return {name.decode("ascii"): array.astype(np.int64)}
