"""Opening of weight files and directories; nothing in them is ever run.

The type of a file is detected by its content, not by its name. Shapes are known before any tensor is read.
"""

import mmap
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors import SafetensorError, safe_open

from vitkit.core.errors import WeightsError
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Tensor
from vitkit.weights.formats.base import FileMetadata, FileType
from vitkit.weights.io import checks, torch_file
from vitkit.weights.io.checks import FileError, StoredTensor, count_bytes, file_size, name_file, names_file, shorten
from vitkit.weights.io.torch_file import TensorContents

MAX_SAFETENSORS_HEADER = 2 << 20
"""A tensor takes about 100 bytes of header, so this is four times what `MAX_TENSORS` need."""
SUFFIX, NUMPY_MAGIC = ".npy", b"\x93NUMPY"
CHUNK = 1 << 20
LARGE = 1 << 20
"""Bytes of a tensor that is worth a mapping of its own."""
MAX_HEADER = 1_000
"""NumPy pads its header to 64 or 128 bytes; that of eight long axes has less than 300."""
METADATA = "__metadata__"
CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""File names in directories of vitkit, timm and Hugging Face, by preference."""
INDEX = ".index.json"
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to every name."""
MAX_SHARDS = 100
"""The largest Vision Transformers have about ten."""
KNOWN_MISTAKES = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file", "run `git lfs pull` in its repository"),
    (b"<!DOCTYPE", "is a web page", "the download failed: download the file itself"),
    (b"<html", "is a web page", "the download failed: download the file itself"),
    (b"\x89HDF", "is an HDF5 file, as written by Keras", "export it as safetensors"),
    (b"\x1f\x8b", "is compressed with gzip", "decompress it first"),
    (b"GGUF", "is a GGUF file", "download the safetensors file"),
    (NUMPY_MAGIC, "is a single array without a name", "download the .npz file"),
    (b"\x80", "is a pickle that torch did not write", "it could run any code: ask for safetensors"),
)
READ_ERRORS = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, OverflowError, MemoryError, EOFError),
    *(RecursionError, NotImplementedError, struct.error, zlib.error, zipfile.BadZipFile, safetensors.SafetensorError),
)
"""Errors of the libraries for damage that the checks do not cover."""
UNZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError, ValueError)


@contextmanager
def _report_read_errors(*subject: str) -> Iterator[None]:
    try:
        yield
    except WeightsError:
        raise
    except READ_ERRORS as error:
        raise FileError(" ".join([*subject, "cannot be read:", shorten(error)])) from error


class TensorFile(Mapping[str, Tensor]):
    """Tensors of a file or directory by name, read or memory-mapped on access.

    `notes` tell the user what was renamed or ignored.
    """

    def __init__(self, contents: TensorContents, *, path: Path, metadata: FileMetadata, resources: ExitStack) -> None:
        self.path = path
        self.metadata = metadata
        self.notes = contents.notes
        self.shapes: Mapping[str, tuple[int, ...]] = {name: item.shape for name, item in contents.tensors.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: item.dtype for name, item in contents.tensors.items()}
        self._stored = contents.tensors
        self._resources = resources

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        with name_file(self.path), _report_read_errors(shorten(name)):
            return stored.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.shapes

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()  # tensors that were read stay valid


def open_tensors(path: Path | str) -> TensorFile:
    """Open a safetensors, npz or torch file, or a directory with one of them or with shards."""
    path = Path(path)
    with ExitStack() as resources:
        with name_file(path), _report_read_errors():
            is_dir = checks.is_directory(path)
            file_type, contents = _open_directory(path, resources) if is_dir else _open_file(path, resources)
            config_file = (path if is_dir else path.parent) / CONFIG
            config = checks.read_json(config_file) if config_file.exists() or config_file.is_symlink() else {}
        metadata = FileMetadata(file_type=file_type, container=contents.container, config=config, file_name=path.name)
        return TensorFile(_strip_prefixes(contents), path=path, metadata=metadata, resources=resources.pop_all())


@names_file
def _open_file(path: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    file = resources.enter_context(checks.open_file(path))
    start = file.read(len(torch_file.LEGACY_MAGIC) + 16)
    if not start:
        raise FileError("is empty")
    if start.startswith((checks.LOCAL, checks.END)):
        archive = resources.enter_context(checks.open_zip(file))
        if any(name.rpartition("/")[2] == torch_file.PICKLE for name in archive.namelist()):
            return "torch", torch_file.open_torch_zip(archive, file)
        return "npz", TensorContents(tensors=open_npz(archive, path=path))
    if start.startswith(torch_file.LEGACY_MAGIC):
        return "torch", torch_file.open_legacy_torch(file)
    if start[8:9] == b"{":  # after the length of the header
        return "safetensors", TensorContents(tensors=open_safetensors(file, path=path, resources=resources))
    mistakes = ((reason, hint) for magic, reason, hint in KNOWN_MISTAKES if start.startswith(magic))
    reason, hint = next(mistakes, ("is not a weight file", checks.DAMAGED))
    raise FileError(reason, expected="safetensors, .npz or a torch file", hint=hint)


@names_file
def _open_directory(directory: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    """Open the weights under a standard name, complete or in shards, else the only weight file."""
    for name in WEIGHTS:
        if (directory / name).exists():
            return _open_file(directory / name, resources)
        if (directory / (name + INDEX)).exists():
            return _open_shards(directory / (name + INDEX), resources)
    names = sorted(entry.name for entry in directory.iterdir())
    weights = [name for name in names if name.endswith(SUFFIXES)]
    if len(weights) != 1:
        reason = "has several weight files" if weights else "has no weight file"
        got = shorten_list(list(map(shorten, weights or names))) or "nothing"
        raise FileError(reason, expected=WEIGHTS[0], got=got, hint="give the path of the file in it")
    return _open_file(directory / weights[0], resources)


@names_file
def _open_shards(index: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    """Open the files of an index, which maps tensor names to files of the same directory."""
    weight_map = checks.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FileError("does not map tensors to files", expected="weight_map")
    files = sorted(set(weight_map.values()))
    if len(files) > MAX_SHARDS or not files:
        raise FileError("has an invalid number of files", expected=f"1 to {MAX_SHARDS}", got=len(files))
    tensors: dict[str, StoredTensor] = {}
    file_type: FileType = "safetensors"
    for name in files:
        if Path(name).name != name or "\\" in name or name[1:2] == ":":
            raise FileError(f"unsafe name '{shorten(name)}': it points outside the directory")
        file_type, contents = _open_file(index.parent / name, resources)
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        if differing := sorted(expected ^ contents.tensors.keys()):
            raise FileError(f"does not agree with {shorten(name)} on {shorten(differing[0])}")
        tensors |= contents.tensors
    return file_type, TensorContents(tensors=tensors, notes=(f"read from {len(files)} files",))


def _strip_prefixes(contents: TensorContents) -> TensorContents:
    """Remove the prefixes of training wrappers that all names have."""
    tensors, removed = contents.tensors, ""
    while prefix := next((prefix for prefix in WRAPPERS if all(name.startswith(prefix) for name in tensors)), ""):
        tensors, removed = {name.removeprefix(prefix): item for name, item in tensors.items()}, removed + prefix
    if not removed:
        return contents
    return replace(contents, tensors=tensors, notes=(*contents.notes, f"removed the prefix {removed!r} from all names"))


# Safetensors


def open_safetensors(file: BinaryIO, *, path: Path, resources: ExitStack) -> dict[str, StoredTensor]:
    """Open a file and check every tensor's name, shape and dtype; tensors are memory-mapped."""
    check_header(file, path=path)
    try:
        handle: Any = resources.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError, OverflowError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise FileError(f"is not a valid safetensors file: {shorten(reason)}") from error
    tensors = {}
    for name in handle.keys():  # noqa: SIM118  not a mapping
        checks.check_name(name)
        view = handle.get_slice(name)
        shape, code = checks.check_shape(view.get_shape(), name=name), view.get_dtype()
        if code not in checks.SAFETENSORS_DTYPES:
            expected = ", ".join(checks.SAFETENSORS_DTYPES)
            raise FileError(f"{name} has an unsupported dtype", expected=expected, got=shorten(code))
        read = partial(handle.get_tensor, name)
        tensors[name] = StoredTensor(shape=shape, dtype=checks.SAFETENSORS_DTYPES[code], read=read)
    return tensors


def check_header(file: BinaryIO, *, path: Path) -> int:
    """Return the size that a file states; reject a header that is too large, has too many entries or a key twice.

    The library accepts all of these: a header of 100 MB takes seconds, and of duplicate keys the last one counts.
    """
    with name_file(path):
        size = file_size(file)
        if size < 8:
            raise FileError("ends before its header", expected="at least 8 bytes", got=size)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_SAFETENSORS_HEADER:
            expected = f"at most {MAX_SAFETENSORS_HEADER:,} bytes"
            raise FileError("the header is too large", expected=expected, got=f"{length:,}")
        if 8 + length > size:
            raise FileError("ends inside its header", expected=f"{8 + length:,} bytes", got=f"{size:,}")
        header = checks.parse_json(file.read(length))
        checks.check_count(len(header.keys() - {METADATA}))
        try:
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != METADATA]
        except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise FileError("has a tensor without data_offsets") from error
        return 8 + int(length) + max(ends, default=0)


# NumPy


class ArrayHeader(NamedTuple):
    """Header of an array; `length` is its size in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_fortran: bool
    is_big_endian: bool
    length: int


def open_npz(archive: zipfile.ZipFile, *, path: Path) -> dict[str, StoredTensor]:
    """Check the arrays of a checked zip; their names are those of NumPy, without `.npy`.

    NumPy parses the array headers. The content is read here: `np.load` would allocate what a header claims before
    comparing it with the entry, and would take the memory from malloc (see `allocate`).
    """
    entries = archive.infolist()
    checks.check_count(len(entries))
    return {entry.filename.removesuffix(SUFFIX): _open_array(path, archive, entry) for entry in entries}


def _open_array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> StoredTensor:
    name = entry.filename.removesuffix(SUFFIX)
    if name == entry.filename:
        raise FileError(f"{shorten(name)} is not an array", expected=f"names that end in {SUFFIX}")
    checks.check_name(name)
    try:
        with archive.open(entry) as member:
            start = member.read(len(NUMPY_MAGIC) + 6 + MAX_HEADER)
    except UNZIP_ERRORS as error:
        raise FileError(f"{name} cannot be unpacked: {shorten(error)}") from error
    header = parse_array_header(start, name=name)
    size = header.length + count_bytes(header.shape, header.dtype)
    if entry.file_size != size:
        expected = f"{size:,} bytes for {list(header.shape)}"
        raise FileError(f"{name} does not fill its shape", expected=expected, got=f"{entry.file_size:,}")
    read = partial(_read_array, path, archive, entry, header)
    return StoredTensor(shape=header.shape, dtype=header.dtype, read=read)


def parse_array_header(start: bytes, *, name: str) -> ArrayHeader:
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
        # NumPy would have a large header read with allow_pickle=True, which runs any code.
        is_large = "max_header_size" in str(error)
        reason = f"its header has more than {MAX_HEADER:,} bytes" if is_large else shorten(error)
        raise FileError(f"{name} is not a valid NumPy array: {reason}") from error
    if dtype.names is not None or dtype.str[1:] not in checks.NPZ_DTYPES:
        raise FileError(f"{name} is not an array of numbers", expected=", ".join(checks.NPZ_DTYPES), got=shorten(dtype))
    shape = checks.check_shape(shape, name=name)
    return ArrayHeader(shape, checks.NPZ_DTYPES[dtype.str[1:]], is_fortran, dtype.str[0] == ">", stream.tell())


@names_file
def _read_array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, header: ArrayHeader) -> Tensor:
    """Unpack an array into a new tensor without another copy."""
    tensor = allocate(header.shape[::-1] if header.is_fortran else header.shape, header.dtype)
    target = as_bytes(tensor)
    try:
        with archive.open(entry) as member:
            member.read(header.length)
            filled = 0
            while chunk := member.read(min(CHUNK, len(target) - filled)):
                target[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            member.read()  # zipfile compares the checksum at the end of an entry
    except UNZIP_ERRORS as error:
        raise FileError(f"{entry.filename} cannot be unpacked: {shorten(error)}") from error
    if filled != len(target):
        raise FileError(f"{entry.filename} is truncated", expected=f"{len(target):,} bytes", got=f"{filled:,}")
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


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor; of a copy if it is on a GPU or not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
