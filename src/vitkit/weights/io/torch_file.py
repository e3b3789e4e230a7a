"""Reading of torch files, zips and the format before torch 1.6; tensors are memory-mapped.

`torch.load(weights_only=True)` calls only functions of a list, but some of these allocate as much memory as the pickle
requests, and it hangs on keys that take forever to hash (docs/decisions/0019). Here the opcodes are data.
"""

import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

import torch

from vitkit.core.formatting import shorten_list
from vitkit.core.pickles import IGNORED, GlobalName, PickleReader, format_global
from vitkit.core.shapes import Tensor
from vitkit.weights.io import checks
from vitkit.weights.io.checks import STORAGES, FileError, StoredTensor, count_bytes, file_size, shorten

MAX_OPCODES = 250_000
"""A tensor takes about 30, so this allows 2,000 tensors with both moments of an optimizer."""
DICTS = frozenset({"collections OrderedDict", "collections defaultdict"})
SIZE = "torch Size"
TENSORS = frozenset({"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2"})
PARAMETERS = frozenset({"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"})
HARMLESS = frozenset(
    (
        *("argparse Namespace", "pathlib PosixPath", "collections Counter"),
        *("builtins set", "__builtin__ set", "builtins dict", "__builtin__ dict", "builtins list", "__builtin__ list"),
        *("builtins int", "__builtin__ int", "builtins bytearray", "_codecs encode", "torch device"),
        *("numpy dtype", "numpy ndarray", "numpy.core.multiarray scalar", "numpy._core.multiarray scalar"),
        *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"),
        *("torch float64", "torch float32", "torch float16", "torch bfloat16", "torch int64", "torch uint8"),
    )
)
"""Globals that training scripts leave in their files. Their values are dropped, not built."""
PICKLE, BYTE_ORDER, SCRIPT = "data.pkl", "byteorder", "constants.pkl"
MAX_PICKLE = 4 << 20
"""A tensor takes about 100 bytes of pickle; a complete training state has less than half a megabyte."""
CONTAINERS = ("model", "state_dict", "teacher", "student", "module")
"""Keys of a state dict that is not at the top level, by preference. DINO evaluates its teacher."""
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""Start of every torch file before zips: the pickle of a magic number."""
LEGACY_PROTOCOL = 1001
ONLY_TENSORS = "vitkit reads tensors and runs nothing: ask for a file of the state_dict, or do not trust it"
BIG_ENDIAN = "load and save it with torch on a little-endian machine"


@dataclass(frozen=True, eq=False)
class Storage:
    """Elements of one dtype elsewhere in the file."""

    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True, eq=False, repr=False)
class TensorView:
    """A tensor as a view of a storage; nothing of it is checked yet."""

    storage: Storage
    offset: object
    shape: object
    stride: object


class TorchPickleReader(PickleReader):
    """Pickle reader that accepts tensors and ignores what training scripts store next to them."""

    max_opcodes = MAX_OPCODES
    allowed_globals = frozenset({SIZE, *DICTS, *STORAGES, *TENSORS, *PARAMETERS, *HARMLESS})

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []

    def call(self, name: str, arguments: tuple[object, ...]) -> object:
        """Return the value that stands for a call of torch."""
        if name in HARMLESS:
            return IGNORED
        if name in DICTS and all(isinstance(argument, GlobalName) for argument in arguments):
            return {}
        if name == SIZE and len(arguments) == 1 and isinstance(arguments[0], tuple):
            return arguments[0]
        if name in PARAMETERS and arguments and isinstance(arguments[0], TensorView):
            return arguments[0]
        if name in TENSORS and len(arguments) >= 4 and isinstance(arguments[0], Storage):
            return TensorView(arguments[0], *arguments[1:4])
        raise ValueError(f"it calls {format_global(name)} in a way that torch does not")

    def set_state(self, instance: object, state: object) -> None:
        """Ignore the attributes of dicts and tensors, which weights do not need."""
        if not isinstance(instance, dict | TensorView) and instance is not IGNORED:
            super().set_state(instance, state)

    def load_persistent(self, identifier: object) -> Storage:
        """Return the storage of torch's tuple: "storage", type, key, device, count."""
        match identifier:
            case ("storage", GlobalName(name), str(key), _, int(count), *rest) if rest in ([], [None]):
                if name in STORAGES:
                    self.storages.append(Storage(STORAGES[name], key, count))
                    return self.storages[-1]
        raise ValueError("it has a storage of an unknown type, or not in torch's form")

    def replace_unsupported(self, description: str) -> object:
        """Ignore sets and dicts with unusual keys, which occur in training states."""
        return IGNORED


FindOffset = Callable[[Storage], int]
"""Returns the file offset of a storage, or raises if the storage is not completely in the file."""


# Files


@dataclass(frozen=True, kw_only=True)
class TensorContents:
    """Tensors of a file, the key they were stored under, and notes for the user."""

    tensors: Mapping[str, StoredTensor]
    container: str | None = None
    notes: tuple[str, ...] = ()


def open_torch_zip(archive: zipfile.ZipFile, file: BinaryIO) -> TensorContents:
    """Open a checked zip: a pickle that describes the tensors, and an entry for each storage."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    root = next(name for name in entries if name.rpartition("/")[2] == PICKLE).removesuffix(PICKLE)
    if root + SCRIPT in entries:
        raise FileError("is a TorchScript program, not weights", hint=ONLY_TENSORS)
    if root + BYTE_ORDER in entries and _read_entry(archive, entries[root + BYTE_ORDER], 10) != b"little":
        raise FileError("was written on a big-endian machine", hint=BIG_ENDIAN)
    value, _ = _read_pickle(BytesIO(_read_entry(archive, entries[root + PICKLE], MAX_PICKLE)))

    def find_offset(storage: Storage) -> int:
        entry = entries.get(f"{root}data/{storage.key}")
        if entry is None:
            raise FileError(f"storage {shorten(storage.key)} is missing")
        if storage.count * storage.dtype.itemsize != entry.file_size:
            reason, expected = f"{shorten(entry.filename)} has the wrong size", f"{storage.count} of {storage.dtype}"
            raise FileError(reason, expected=shorten(expected), got=entry.file_size)
        return checks.find_data_offset(entry, file)

    return _find_tensors(value, find_offset, file)


def open_legacy_torch(file: BinaryIO) -> TensorContents:
    """Open a file from before torch 1.6: five pickles, then the element count and the elements of each storage."""
    file.seek(0)
    stream = BytesIO(file.read(MAX_PICKLE))
    (_, _), (protocol, _), (machine, _) = (_read_pickle(stream) for _ in range(3))
    if not isinstance(protocol, int) or protocol != LEGACY_PROTOCOL:
        reason = "has an unknown torch format version"
        raise FileError(reason, expected=LEGACY_PROTOCOL, got=shorten(type(protocol).__name__))
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise FileError("was written on a big-endian machine", hint=BIG_ENDIAN)
    (value, storages), (keys, _) = _read_pickle(stream), _read_pickle(stream)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise FileError("has an invalid list of storages")
    checks.check_count(len(keys))
    itemsizes = {storage.key: storage.dtype.itemsize for storage in storages}
    offsets: dict[str, tuple[int, int]] = {}
    position = stream.tell()
    for key in keys:
        file.seek(position)
        prefix = file.read(8)
        if len(prefix) < 8 or key not in itemsizes:
            raise FileError("is truncated, or has a storage without a tensor")
        (count,) = struct.unpack("<q", prefix)
        offsets[key] = (position + 8, count)
        position += 8 + count * itemsizes[key]
        if count < 0 or position > file_size(file):
            raise FileError("is truncated", expected=shorten(f"{position} bytes"), got=f"{file_size(file):,}")

    def find_offset(storage: Storage) -> int:
        offset, count = offsets.get(storage.key, (0, -1))
        if count != storage.count or itemsizes[storage.key] != storage.dtype.itemsize:
            raise FileError(f"storage {shorten(storage.key)} is missing")
        return offset

    return _find_tensors(value, find_offset, file)


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if entry.file_size > max_bytes:
        expected, got = f"at most {max_bytes:,} bytes", f"{entry.file_size:,}"
        raise FileError(f"{shorten(entry.filename)} is too large", expected=expected, got=got)
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError, ValueError) as error:
        raise FileError(f"{shorten(entry.filename)} cannot be read: {shorten(error)}") from error


def _read_pickle(stream: BytesIO) -> tuple[object, list[Storage]]:
    """Return the next value of the stream, with tensors as `TensorView`, and the storages it refers to."""
    reader = TorchPickleReader()
    try:
        return reader.read(stream), reader.storages
    except ValueError as error:
        reason = f"its pickle contains more than tensors: {shorten(error)}"
        raise FileError(reason, hint=ONLY_TENSORS) from error


def _find_tensors(value: object, find_offset: FindOffset, file: BinaryIO) -> TensorContents:
    """Find the state dict in a value, at the top level or under a key, and check its tensors."""
    if not isinstance(value, dict):
        raise FileError("has no named tensors", expected="a state_dict", hint=ONLY_TENSORS)
    state_dicts = {key: item for key, item in value.items() if isinstance(item, dict) and _select_tensors(item)}
    container = next((key for key in CONTAINERS if key in state_dicts), None)
    if container is None and len(state_dicts) == 1 and not _select_tensors(value):
        container = next((key for key in state_dicts if isinstance(key, str)), None)
    state_dict = state_dicts.get(container, value)
    views = _select_tensors(state_dict)
    checks.check_count(len(views))
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: changes of a tensor stay in memory
    tensors = {name: _check_view(name, view, find_offset, mapping) for name, view in views.items()}
    total = sum(count_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values())
    if total > 2 * len(mapping):  # tied weights have two names; hundreds of names for one storage are an attack
        reason = "its tensors are larger than the file"
        raise FileError(reason, expected=f"{len(mapping):,} bytes", got=f"{total:,}")
    unused = [key for key in value if key != container and (container or key not in views)]
    unused += [f"{container}.{shorten(key)}" for key in state_dict if container and key not in views]
    notes = (f"ignored: {shorten_list(list(map(shorten, unused)))}",) if unused else ()
    return TensorContents(tensors=tensors, container=container, notes=notes)


def _select_tensors(values: Mapping[object, object]) -> dict[str, TensorView]:
    return {key: item for key, item in values.items() if isinstance(key, str) and isinstance(item, TensorView)}


def _check_view(name: str, view: TensorView, find_offset: FindOffset, mapping: mmap.mmap) -> StoredTensor:
    """Reject a view that reaches outside its storage or repeats elements of it."""
    checks.check_name(name)
    storage, stride, offset = view.storage, view.stride, view.offset
    shape = checks.check_shape(view.shape, name=name)
    are_steps = isinstance(stride, tuple) and all(type(step) is int and step >= 0 for step in (*stride, offset))
    if not isinstance(stride, tuple) or not isinstance(offset, int) or not are_steps:
        raise FileError(f"{name} has an invalid stride or offset", got=shorten((stride, offset)))
    last = sum((side - 1) * step for side, step in zip(shape, stride, strict=False)) + offset
    needed = count_bytes(shape, storage.dtype) // storage.dtype.itemsize
    if len(stride) != len(shape) or last >= storage.count or needed > storage.count:
        got = shorten(f"shape {list(shape)}, stride {list(stride)}, offset {offset}")
        raise FileError(f"{name} exceeds its storage of {shorten(storage.count)} elements", got=got)
    start = find_offset(storage)

    def read() -> Tensor:
        """Return a view of the mapped file, or a copy if the storage is not aligned in it."""
        end = start + storage.count * storage.dtype.itemsize
        elements = (
            torch.frombuffer(bytearray(mapping[start:end]), dtype=storage.dtype)
            if start % storage.dtype.itemsize
            else torch.frombuffer(mapping, dtype=storage.dtype, count=storage.count, offset=start)
        )
        return elements.as_strided(shape, stride, offset)

    return StoredTensor(shape=shape, dtype=storage.dtype, read=read)
