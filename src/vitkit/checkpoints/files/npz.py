"""An open `.npz` file, a zip of NumPy arrays, goes in; the arrays in it come out as tensors, each read when asked for.

NumPy's own reader would evaluate and allocate what a header says; here the header is held against the entry first.
"""

import ast
import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitkit.checkpoints.files.guards import Stored, brief, byte_count, check_count, check_name, check_shape, refusal
from vitkit.core.shapes import Tensor

SUFFIX = ".npy"
MAGIC = b"\x93NUMPY"
PIECE = 1 << 20
"""How many bytes are unpacked at a time."""
LARGE = 1 << 20
"""Bytes of a tensor that is worth a mapping of its own."""
MOST_HEADER = 1_000
"""NumPy pads its header to 64 or 128 bytes; that of eight long axes has less than 300."""
DTYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "V2": torch.bfloat16,  # NumPy has no name for it and calls it two bytes of anything
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}


class Header(NamedTuple):
    """What an array's header says, and how long it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    column_first: bool
    big_endian: bool
    length: int


def stored_in_npz(archive: zipfile.ZipFile, *, path: Path) -> dict[str, Stored]:
    """The arrays of a checked zip, under the names that NumPy gives them: without `.npy`."""
    entries = archive.infolist()
    check_count(len(entries), where=path)
    return {entry.filename.removesuffix(SUFFIX): stored_array(archive, entry, path=path) for entry in entries}


def stored_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, *, path: Path) -> Stored:
    """One array, of which only the header has been read."""
    name = entry.filename.removesuffix(SUFFIX)
    if name == entry.filename:
        raise refusal(path, f"{brief(name)} is not an array", expected=f"names that end in {SUFFIX}")
    check_name(name, where=path)
    try:
        with archive.open(entry) as member:
            header = read_header(member.read(len(MAGIC) + 6 + MOST_HEADER), name=name, path=path)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError) as error:
        raise refusal(path, f"{name} cannot be unpacked: {brief(error)}") from error
    needed = header.length + byte_count(header.shape, header.dtype)
    if entry.file_size != needed:
        expected = f"{needed:,} bytes for {list(header.shape)}"
        raise refusal(path, f"{name} does not fill its shape", expected=expected, got=f"{entry.file_size:,}")
    return Stored(
        shape=header.shape, dtype=header.dtype, read=lambda: read_array(archive, entry, header=header, path=path)
    )


def read_header(start: bytes, *, name: str, path: Path) -> Header:
    """The header of an array from its first bytes."""
    if not start.startswith(MAGIC) or len(start) < 12:
        raise refusal(path, f"{name} is not a NumPy array")
    version = start[6]
    if version not in (1, 2, 3):
        raise refusal(path, f"{name} is an array of NumPy's format {version}", expected="1, 2 or 3")
    begin = 10 if version == 1 else 12
    (length,) = struct.unpack("<H" if version == 1 else "<I", start[8:begin])
    if length > MOST_HEADER:
        raise refusal(path, f"the header of {name} is too long", expected=f"at most {MOST_HEADER} bytes", got=length)
    try:
        fields = ast.literal_eval(start[begin : begin + length].decode("utf-8" if version == 3 else "latin-1"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise refusal(path, f"the header of {name} is not plain values") from error
    if not isinstance(fields, dict) or set(map(str, fields)) != {"descr", "fortran_order", "shape"}:
        raise refusal(path, f"the header of {name} is not NumPy's", expected="descr, fortran_order and shape")
    code, column_first = fields["descr"], fields["fortran_order"]
    if not isinstance(code, str) or code[1:] not in DTYPES or code[0] not in "<>|=":
        raise refusal(path, f"{name} is not an array of numbers", expected=", ".join(DTYPES), got=brief(code))
    if not isinstance(fields["shape"], tuple) or not isinstance(column_first, bool):
        raise refusal(path, f"the header of {name} is not NumPy's", expected="a tuple as shape, a boolean as order")
    shape = check_shape(fields["shape"], name=name, where=path)
    return Header(shape, DTYPES[code[1:]], column_first, code[0] == ">", begin + length)


def read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, *, header: Header, path: Path) -> Tensor:
    """The numbers of an array, unpacked into a tensor of their size and no further copy."""
    shape = header.shape[::-1] if header.column_first else header.shape
    tensor = room(shape, header.dtype)
    target = as_bytes(tensor).data
    try:
        with archive.open(entry) as member:
            member.read(header.length)
            filled = 0
            while piece := member.read(min(PIECE, len(target) - filled)):
                target[filled : filled + len(piece)] = piece
                filled += len(piece)
            member.read()  # to its end, where the checksum is compared
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError, ValueError) as error:
        raise refusal(path, f"{entry.filename} cannot be unpacked: {brief(error)}") from error
    if filled != len(target):
        raise refusal(path, f"{entry.filename} is cut short", expected=f"{len(target):,} bytes", got=f"{filled:,}")
    if header.big_endian:
        np.frombuffer(target, dtype=f"u{header.dtype.itemsize}").byteswap(inplace=True)
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous() if header.column_first else tensor


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor. That of a large one goes back to the system as soon as the tensor is let go.

    malloc would keep it, in pieces that are just too small for the next aligned tensor of that size: of a large model
    that was rearranged tensor by tensor it held on to 1.4 copies.

    >>> room((2, 3), torch.float32).shape
    torch.Size([2, 3])
    """
    size = byte_count(shape, dtype)
    if size < LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The memory of a tensor in row-major order on the CPU, as bytes that can be read and written in place.

    >>> as_bytes(torch.tensor([1.0])).tolist()
    [0, 0, 128, 63]
    """
    return tensor.reshape(-1).view(torch.uint8).numpy()
