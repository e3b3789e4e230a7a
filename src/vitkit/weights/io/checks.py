"""Limits and checks for untrusted weight files and zip directories, applied before any tensor is read.

The limits are far above the largest Vision Transformer and low enough that a hostile file is rejected within a fraction
of a second and a few megabytes of memory.
"""

import json
import math
import os
import reprlib
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, NoReturn, ParamSpec, TypeVar

import torch

from vitkit.core.errors import WeightsError, summarize
from vitkit.core.files import describe_file_type
from vitkit.core.shapes import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")
MAX_TENSORS = 5_000
"""ViT-22B has about 600 tensors, and three times as many with Adam's moments."""
MAX_AXES = 8
"""A convolution kernel has 4 axes, and one more if blocks are stacked."""
MAX_AXIS_SIZE = 10**8
"""The longest axis of a Vision Transformer is its 21,843 classes or its patches."""
MAX_NAME_LENGTH = 1_000
"""The longest names have about 100 characters."""
MAX_JSON_BYTES = 4 << 20
"""A config.json with the 21,843 labels of ImageNet-21k in both directions has about 2 MiB."""
MAX_BRACKETS = 4 * MAX_TENSORS
"""A safetensors header has three per tensor. One MB of empty lists would take a second and 100 MB to parse."""
MAX_JSON_DEPTH = 32
"""A config.json has two or three levels."""
MAX_SETTINGS = {"depth": 1_000, "units": 1_000, "image_size": 100_000, "registers": 10_000}
"""Limits by key of a configuration: layers are built one by one, and images are resized before inference."""
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxtuple, SHORT.maxlist = 2, MAX_AXES, MAX_AXES
"""Bounded representation: a tuple that contains another one twice, forty levels deep, has an endless plain one."""
DAMAGED = "download it again; if the error persists, do not trust the file"
MAX_ENTRIES = MAX_TENSORS + 100
"""Each tensor is an entry; torch adds a few of its own."""
MAX_DIRECTORY = 2 << 20
"""An entry takes about 100 bytes, so this is four times what `MAX_ENTRIES` need."""
SMALL = 64 << 20
"""A file that expands to no more than this is harmless at any ratio."""
MAX_EXPANSION = 20
"""Trained weights are hardly compressible; a zero classifier is, but not the model around it."""
END, END_64, LOCATOR_64, LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x03\x04"
END_SIZE, END_64_SIZE, LOCATOR_64_SIZE, LOCAL_SIZE = 22, 56, 20, 30
ENCRYPTED = 0x1 | 0x40
_DTYPES = (
    (torch.float64, "F64", "f8", "Double"),
    (torch.float32, "F32", "f4", "Float"),
    (torch.float16, "F16", "f2", "Half"),
    (torch.bfloat16, "BF16", "V2", "BFloat16"),  # NumPy has no bfloat16; big_vision stores it as two bytes of void
    (torch.int64, "I64", "i8", "Long"),
    (torch.int32, "I32", "i4", "Int"),
    (torch.int16, "I16", "i2", "Short"),
    (torch.int8, "I8", "i1", "Char"),
    (torch.uint8, "U8", "u1", "Byte"),
    (torch.bool, "BOOL", "b1", "Bool"),
)
SAFETENSORS_DTYPES = {code: dtype for dtype, code, _, _ in _DTYPES}
NPZ_DTYPES = {code: dtype for dtype, _, code, _ in _DTYPES}
STORAGES = {f"torch {name}Storage": dtype for dtype, _, _, name in _DTYPES}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, read on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class FileError(WeightsError):
    """Error of a file whose path is not part of the message yet; `name_file` adds it."""

    def __init__(self, message: str, *, expected: object = None, got: object = None, hint: str = DAMAGED) -> None:
        super().__init__(message, expected=expected, got=got, hint=hint)


@contextmanager
def name_file(path: Path | str) -> Iterator[None]:
    """Add the path of a file to the errors of its content."""
    try:
        yield
    except FileError as error:
        message = f"{escape_controls(str(path))}: {error.message}"
        raise WeightsError(message, expected=error.expected, got=error.got, hint=error.hint) from error


def names_file(function: Callable[Concatenate[Path, P], Result]) -> Callable[Concatenate[Path, P], Result]:
    """Decorate a function of a path, so that its errors name the file."""

    @wraps(function)
    def wrapper(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        with name_file(path):
            return function(path, *args, **kwargs)

    return wrapper


@names_file
def is_directory(path: Path) -> bool:
    """Return whether a path is a directory; reject pipes and devices, on which reading would block."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        hint = "it is a dangling link" if path.is_symlink() else "check the path"
        raise FileError("no such file", hint=hint) from error
    except (OSError, ValueError) as error:
        raise FileError(f"cannot be opened: {shorten(error)}", hint="check the path") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        expected, got = "a file or a directory", describe_file_type(mode)
        raise FileError("not a file", expected=expected, got=got, hint="check the path")
    return stat.S_ISDIR(mode)


@names_file
def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading without blocking."""
    if is_directory(path):
        hint = "give the path of the file in it"
        raise FileError("not a file", expected="a file", got="a directory", hint=hint)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        raise FileError(f"cannot be opened: {shorten(error)}", hint="check its permissions") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it was replaced meanwhile
        file.close()
        raise FileError("not a file", expected="a file", hint="check the path")
    return file


def file_size(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def shorten(value: object) -> str:
    """Format a value from a file for an error message: one line, at most 120 characters."""
    text = summarize(value) if isinstance(value, Exception) else value if isinstance(value, str) else SHORT.repr(value)
    return escape_controls(text if len(text) <= 120 else f"{text[:120]}…")


def escape_controls(text: str) -> str:
    """Escape characters that a terminal would interpret."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_count(count: int) -> None:
    """Reject a file without tensors or with more than any model has."""
    if count == 0:
        raise FileError("holds no tensors")
    if count > MAX_TENSORS:
        raise FileError("holds too many tensors", expected=f"at most {MAX_TENSORS:,}", got=f"{count:,}")


def check_name(name: str) -> None:
    """Reject a name that is a path outside the file, or not a line of text."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise FileError(f"invalid tensor name '{shorten(name)}'")
    if name.startswith("/") or "\\" in name or name[1:2] == ":" or ".." in name.split("/"):
        raise FileError(f"unsafe name '{shorten(name)}': it points outside the file")


def check_shape(shape: object, *, name: str) -> tuple[int, ...]:
    """Return the shape as a tuple, or reject it."""
    if isinstance(shape, Sequence) and not isinstance(shape, str | bytes) and len(shape) <= MAX_AXES:
        sides = tuple(shape)
        if all(type(side) is int and 0 < side <= MAX_AXIS_SIZE for side in sides):
            return sides
    raise FileError(f"{name} has an invalid shape", got=shorten(shape))


def count_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def parse_json(content: bytes) -> Any:
    """Parse JSON. Duplicate keys are rejected, because parsers disagree on which one counts."""

    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise FileError(f"has the key '{shorten(key)}' twice")
        return dict(pairs)

    def reject_constant(text: str) -> NoReturn:
        raise FileError(f"contains {text}, which is not valid JSON")

    if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
        raise FileError("has too many lists and objects", expected=f"at most {MAX_BRACKETS:,}")
    try:
        return json.loads(content.decode(), object_pairs_hook=check_unique, parse_constant=reject_constant)
    except WeightsError:
        raise
    except RecursionError as error:
        raise FileError("is nested too deeply") from error
    except ValueError as error:
        raise FileError(f"is not JSON: {shorten(error)}") from error


@names_file
def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object from a small file."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise FileError("is not a JSON object", got=shorten(type(value).__name__))
    return value


@names_file
def read_json_value(path: Path) -> Any:
    """Read any JSON value from a small file."""
    with open_file(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise FileError("is too large", expected=f"at most {MAX_JSON_BYTES:,} bytes")
    value = parse_json(content)
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise FileError("is nested too deeply", expected=f"at most {MAX_JSON_DEPTH} levels")
    return value


def check_config_limits(value: object, *, where: Path | str, key: str = "") -> None:
    """Reject a configuration with a size that no model has, before a model is built from it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_config_limits(item, where=where, key=str(name))
    elif isinstance(value, list):
        for item in value:
            check_config_limits(item, where=where, key=key)
    elif isinstance(value, int | float) and not abs(value) <= (limit := MAX_SETTINGS.get(key, MAX_AXIS_SIZE)):
        with name_file(where):
            message, expected = f"{shorten(key)} is too large for a model", f"at most {limit:,}"
            raise FileError(message, expected=expected, got=shorten(value))


# Zip archives


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open a zip file after checking its directory."""
    check_directory_size(file)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise FileError(f"is a damaged zip file: {shorten(error)}") from error
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise FileError("has too many entries", expected=f"at most {MAX_ENTRIES:,}", got=f"{len(entries):,}")
    if len({entry.filename for entry in entries}) != len(entries):
        raise FileError("has a duplicate entry")
    for entry in entries:
        check_entry(entry)
    check_extents(entries, directory_start=archive.start_dir)
    return archive


def check_directory_size(file: BinaryIO) -> None:
    """Reject a directory that is too large, by the record at the end of the file."""
    size = file_size(file)
    start = max(0, size - END_SIZE - LOCATOR_64_SIZE - END_64_SIZE)
    file.seek(start)
    tail = file.read(size - start)
    end = tail[-END_SIZE:]
    if len(end) < END_SIZE or not end.startswith(END) or end[-2:] != b"\0\0":
        raise FileError("is a zip file that is truncated or has data after its end")
    count, length = struct.unpack("<HI", end[10:16])
    if tail[-END_SIZE - LOCATOR_64_SIZE :].startswith(LOCATOR_64):
        if not tail.startswith(END_64):
            raise FileError("is a zip file without a directory")
        count, length = struct.unpack("<QQ", tail[32:48])
    if count == 0 or length == 0:
        raise FileError("is an empty zip file: it holds no tensors")
    if count > MAX_ENTRIES:
        raise FileError("has too many entries", expected=f"at most {MAX_ENTRIES:,}", got=f"{count:,}")
    if length > min(MAX_DIRECTORY, size):
        expected = f"at most {min(MAX_DIRECTORY, size):,} bytes"
        raise FileError("the directory of the zip file is too large", expected=expected, got=f"{length:,}")


def check_entry(entry: zipfile.ZipInfo) -> None:
    """Reject an entry with an unsafe name, encryption or unusual compression."""
    check_name(entry.orig_filename)
    name = shorten(entry.filename)
    if entry.flag_bits & ENCRYPTED:
        raise FileError(f"{name} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FileError(f"{name} uses compression method {entry.compress_type}", expected="stored or deflated")
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size != entry.file_size:
        raise FileError(f"{name} is not compressed but has two sizes")


def check_extents(entries: list[zipfile.ZipInfo], *, directory_start: int) -> None:
    """Reject zip bombs, and entries that overlap each other or the directory at the end of the file."""
    spans = sorted((entry.header_offset, entry.header_offset + LOCAL_SIZE + entry.compress_size) for entry in entries)
    if spans[0][0] < 0 or spans[-1][1] > directory_start:
        raise FileError("has an entry outside the file")
    if any(following[0] < current[1] for current, following in pairwise(spans)):
        raise FileError("has overlapping entries")
    expanded = sum(entry.file_size for entry in entries)
    if expanded > (limit := max(SMALL, MAX_EXPANSION * directory_start)):
        expected = f"at most {limit:,} bytes"
        raise FileError("expands to far more than weights do", expected=expected, got=f"{expanded:,}")


def find_data_offset(entry: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Return the file offset of the data of an uncompressed entry."""
    if entry.compress_type != zipfile.ZIP_STORED:
        expected = "uncompressed, as torch writes it"
        raise FileError(f"{shorten(entry.filename)} is compressed", expected=expected)
    file.seek(entry.header_offset)
    local = file.read(LOCAL_SIZE)
    if len(local) < LOCAL_SIZE or not local.startswith(LOCAL):
        raise FileError(f"{shorten(entry.filename)} is not where the directory says")
    start = entry.header_offset + LOCAL_SIZE + sum(struct.unpack("<HH", local[26:30]))
    if start + entry.file_size > file_size(file):
        raise FileError(f"{shorten(entry.filename)} exceeds the file")
    return start
