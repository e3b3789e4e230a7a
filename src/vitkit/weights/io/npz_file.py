"""Reading of `.npz` files, zips of NumPy arrays.

NumPy parses the array headers. The content is read here: `np.load` would allocate what a header claims before comparing
it with the entry, and would take the memory from malloc (see `allocate`).
"""

import mmap
import tokenize
import warnings
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitkit.core.shapes import Tensor
from vitkit.weights.io.checks import (
    StoredTensor,
    check_count,
    check_name,
    check_shape,
    count_bytes,
    invalid_file,
    shorten,
)

SUFFIX = ".npy"
MAGIC = b"\x93NUMPY"
CHUNK = 1 << 20
LARGE = 1 << 20
"""Bytes of a tensor that is worth a mapping of its own."""
MAX_HEADER = 1_000
"""NumPy pads its header to 64 or 128 bytes; that of eight long axes has less than 300."""
DTYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "V2": torch.bfloat16,  # NumPy has no bfloat16; big_vision stores it as two bytes of void
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}
UNZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError, ValueError)


class ArrayHeader(NamedTuple):
    """Header of an array; `length` is its size in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_fortran: bool
    is_big_endian: bool
    length: int


def open_npz(archive: zipfile.ZipFile, *, path: Path) -> dict[str, StoredTensor]:
    """Check the arrays of a checked zip; their names are those of NumPy, without `.npy`."""
    entries = archive.infolist()
    check_count(len(entries), where=path)
    return {entry.filename.removesuffix(SUFFIX): _open_array(archive, entry, path=path) for entry in entries}


def _open_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, *, path: Path) -> StoredTensor:
    name = entry.filename.removesuffix(SUFFIX)
    if name == entry.filename:
        raise invalid_file(path, f"{shorten(name)} is not an array", expected=f"names that end in {SUFFIX}")
    check_name(name, where=path)
    try:
        with archive.open(entry) as member:
            start = member.read(len(MAGIC) + 6 + MAX_HEADER)
    except UNZIP_ERRORS as error:
        raise invalid_file(path, f"{name} cannot be unpacked: {shorten(error)}") from error
    header = parse_array_header(start, name=name, path=path)
    size = header.length + count_bytes(header.shape, header.dtype)
    if entry.file_size != size:
        expected = f"{size:,} bytes for {list(header.shape)}"
        raise invalid_file(path, f"{name} does not fill its shape", expected=expected, got=f"{entry.file_size:,}")
    return StoredTensor(
        shape=header.shape, dtype=header.dtype, read=lambda: _read_array(archive, entry, header=header, path=path)
    )


def parse_array_header(start: bytes, *, name: str, path: Path) -> ArrayHeader:
    """Parse an array's header with NumPy, from at most `MAX_HEADER` bytes."""
    stream = BytesIO(start)
    try:
        with warnings.catch_warnings(action="ignore"):  # about headers of Python 2
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):  # 3.0 is for field names in Unicode
                raise ValueError(f"format version {version[0]}.{version[1]} is not supported")
            parse = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = parse(stream, max_header_size=MAX_HEADER)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise invalid_file(path, f"{name} is not a valid NumPy array: {shorten(error)}") from error
    if dtype.names is not None or dtype.str[1:] not in DTYPES:
        raise invalid_file(path, f"{name} is not an array of numbers", expected=", ".join(DTYPES), got=shorten(dtype))
    shape = check_shape(shape, name=name, where=path)
    return ArrayHeader(shape, DTYPES[dtype.str[1:]], is_fortran, dtype.str[0] == ">", stream.tell())


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, *, header: ArrayHeader, path: Path) -> Tensor:
    """Unpack an array into a new tensor without another copy."""
    tensor = allocate(header.shape[::-1] if header.is_fortran else header.shape, header.dtype)
    target = as_bytes(tensor).data
    try:
        with archive.open(entry) as member:
            member.read(header.length)
            filled = 0
            while chunk := member.read(min(CHUNK, len(target) - filled)):
                target[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            member.read()  # zipfile compares the checksum at the end of an entry
    except UNZIP_ERRORS as error:
        raise invalid_file(path, f"{entry.filename} cannot be unpacked: {shorten(error)}") from error
    if filled != len(target):
        raise invalid_file(path, f"{entry.filename} is truncated", expected=f"{len(target):,} bytes", got=f"{filled:,}")
    if header.is_big_endian:
        np.frombuffer(target, dtype=f"u{header.dtype.itemsize}").byteswap(inplace=True)
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous() if header.is_fortran else tensor


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor whose memory returns to the system as soon as it is freed.

    malloc keeps freed blocks that are just too small for the next aligned tensor of the same size: converting a large
    model tensor by tensor then holds 1.4 copies of it.
    """
    size = count_bytes(shape, dtype)
    if size < LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Return the memory of a contiguous CPU tensor as a byte array that shares it."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
