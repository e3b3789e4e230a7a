"""Opening of weight files and directories; nothing in them is ever run.

The type of a file is detected by its content, not by its name. Shapes are known before any tensor is read.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from safetensors import SafetensorError, safe_open

from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.weights.formats.base import FileMetadata, FileType
from vitkit.weights.io.checks import (
    DAMAGED,
    END,
    LOCAL,
    StoredTensor,
    check_count,
    check_name,
    check_shape,
    file_size,
    invalid_file,
    is_directory,
    open_file,
    open_zip,
    parse_json,
    read_json,
    shorten,
)
from vitkit.weights.io.npz_file import MAGIC as NUMPY_MAGIC
from vitkit.weights.io.npz_file import open_npz
from vitkit.weights.io.torch_file import (
    LEGACY_MAGIC,
    PICKLE,
    TensorContents,
    join_names,
    open_legacy_torch,
    open_torch_zip,
)

MAX_SAFETENSORS_HEADER = 2 << 20
"""A tensor takes about 100 bytes of header, so this is four times what `MAX_TENSORS` need."""
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
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
        try:
            return stored.read()
        except WeightsError:
            raise
        except READ_ERRORS as error:
            raise invalid_file(self.path, f"{shorten(name)} cannot be read: {shorten(error)}") from error

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
        try:
            is_dir = is_directory(path)
            file_type, contents = _open_directory(path, resources) if is_dir else _open_file(path, resources)
            config_file = (path if is_dir else path.parent) / CONFIG
            config = read_json(config_file) if config_file.exists() or config_file.is_symlink() else {}
        except WeightsError:
            raise
        except READ_ERRORS as error:
            raise invalid_file(path, f"cannot be read: {shorten(error)}") from error
        metadata = FileMetadata(file_type=file_type, container=contents.container, config=config)
        return TensorFile(_strip_prefixes(contents), path=path, metadata=metadata, resources=resources.pop_all())


def _open_file(path: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    file = resources.enter_context(open_file(path))
    start = file.read(len(LEGACY_MAGIC) + 16)
    if not start:
        raise invalid_file(path, "is empty")
    if start.startswith((LOCAL, END)):
        return _open_zip(file, path, resources)
    if start.startswith(LEGACY_MAGIC):
        return "torch", open_legacy_torch(file, path=path)
    if start[8:9] == b"{":  # after the length of the header
        return "safetensors", TensorContents(tensors=open_safetensors(file, path=path, resources=resources))
    reason, hint = next(
        ((reason, hint) for magic, reason, hint in KNOWN_MISTAKES if start.startswith(magic)),
        ("is not a weight file", DAMAGED),
    )
    raise invalid_file(path, reason, expected="safetensors, .npz or a torch file", hint=hint)


def _open_zip(file: BinaryIO, path: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    """Open a zip as a torch file if it has a pickle, else as npz."""
    archive = resources.enter_context(open_zip(file, path=path))
    if any(name.rpartition("/")[2] == PICKLE for name in archive.namelist()):
        return "torch", open_torch_zip(archive, file, path=path)
    return "npz", TensorContents(tensors=open_npz(archive, path=path))


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
        got = join_names(weights or names) or "nothing"
        raise invalid_file(directory, reason, expected=WEIGHTS[0], got=got, hint="give the path of the file in it")
    return _open_file(directory / weights[0], resources)


def _open_shards(index: Path, resources: ExitStack) -> tuple[FileType, TensorContents]:
    """Open the files of an index, which maps tensor names to files of the same directory."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise invalid_file(index, "does not map tensors to files", expected="weight_map")
    files = sorted(set(weight_map.values()))
    if len(files) > MAX_SHARDS or not files:
        raise invalid_file(index, "has an invalid number of files", expected=f"1 to {MAX_SHARDS}", got=len(files))
    tensors: dict[str, StoredTensor] = {}
    file_type: FileType = "safetensors"
    for name in files:
        if Path(name).name != name or "\\" in name or name[1:2] == ":":
            raise invalid_file(index, f"unsafe name '{shorten(name)}': it points outside the directory")
        file_type, contents = _open_file(index.parent / name, resources)
        expected = {tensor for tensor, file in weight_map.items() if file == name}
        if differing := sorted(expected ^ contents.tensors.keys()):
            raise invalid_file(index, f"does not agree with {shorten(name)} on {shorten(differing[0])}")
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
        raise invalid_file(path, f"is not a valid safetensors file: {shorten(reason)}") from error
    return {name: _check_tensor(handle, name, path=path) for name in handle.keys()}  # noqa: SIM118  not a mapping


def check_header(file: BinaryIO, *, path: Path) -> None:
    """Reject a header that is too large to parse, has too many entries or has a key twice.

    The library accepts all of these: a header of 100 MB takes seconds, and of duplicate keys the last one counts.
    """
    size = file_size(file)
    if size < 8:
        raise invalid_file(path, "ends before its header", expected="at least 8 bytes", got=size)
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_SAFETENSORS_HEADER:
        raise invalid_file(
            path, "the header is too large", expected=f"at most {MAX_SAFETENSORS_HEADER:,} bytes", got=f"{length:,}"
        )
    if 8 + length > size:
        raise invalid_file(path, "ends inside its header", expected=f"{8 + length:,} bytes", got=f"{size:,}")
    header = parse_json(file.read(length), where=path)
    check_count(len(header.keys() - {METADATA}), where=path)


def _check_tensor(handle: Any, name: str, *, path: Path) -> StoredTensor:
    check_name(name, where=path)
    view = handle.get_slice(name)
    shape, code = check_shape(view.get_shape(), name=name, where=path), view.get_dtype()
    if code not in SAFETENSORS_DTYPES:
        raise invalid_file(
            path, f"{name} has an unsupported dtype", expected=", ".join(SAFETENSORS_DTYPES), got=shorten(code)
        )
    return StoredTensor(shape=shape, dtype=SAFETENSORS_DTYPES[code], read=partial(handle.get_tensor, name))
