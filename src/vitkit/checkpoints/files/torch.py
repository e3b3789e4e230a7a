"""A file of `torch.save` goes in, zip or of before 2020; the tensors in it come out, memory-mapped."""

import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import torch

from vitkit.checkpoints.files.guards import (
    Stored,
    brief,
    byte_count,
    check_count,
    check_name,
    check_shape,
    refusal,
    size_of,
)
from vitkit.checkpoints.files.pickles import Placed, Storage, read_torch_pickle
from vitkit.checkpoints.files.zips import start_of
from vitkit.core.shapes import Tensor

PICKLE, BYTE_ORDER, SCRIPT = "data.pkl", "byteorder", "constants.pkl"
MOST_PICKLE = 4 << 20
"""A tensor takes about 100 bytes of pickle; a whole training state has less than half a megabyte."""
CONTAINERS = ("model", "state_dict", "teacher", "student", "module")
"""Where the tensors are if not at the top; the first that is there. Of DINO's two, the teacher is the one in use."""
OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How every torch file began before zips: the pickle of one large number."""
OLD_PROTOCOL = 1001
ONLY_TENSORS = "vitkit reads tensors and runs nothing: ask for a file of its state_dict, or do not trust it"

Locate = Callable[[Storage], int]
"""Where in the file the bytes of a storage begin; an error where they are not all there."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The tensors of a file, the key that they were under, and what else is to be said."""

    stored: Mapping[str, Stored]
    container: str | None
    notes: tuple[str, ...]


def stored_in_torch_zip(archive: zipfile.ZipFile, file: BinaryIO, *, path: Path) -> Contents:
    """The tensors of a checked zip: a pickle that says what they are, and their numbers in entries beside it."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    root = next(name for name in entries if name.rpartition("/")[2] == PICKLE).removesuffix(PICKLE)
    if root + SCRIPT in entries:
        raise refusal(path, "is a TorchScript program, not weights", hint=ONLY_TENSORS)
    if root + BYTE_ORDER in entries and read_entry(archive, entries[root + BYTE_ORDER], 10, path=path) != b"little":
        raise refusal(path, "was written by a big-endian machine", hint="load and save it with torch on this one")
    value = read_value(BytesIO(read_entry(archive, entries[root + PICKLE], MOST_PICKLE, path=path)), path=path)

    def locate(storage: Storage) -> int:
        entry = entries.get(f"{root}data/{storage.key}")
        if entry is None:
            raise refusal(path, f"the numbers of storage {brief(storage.key)} are missing")
        if storage.count * storage.dtype.itemsize != entry.file_size:
            expected = brief(f"{storage.count} of {storage.dtype}")
            raise refusal(path, f"{brief(entry.filename)} has another size", expected=expected, got=entry.file_size)
        return start_of(entry, file, path=path)

    return contents(value, locate, file, path=path)


def stored_in_old_torch(file: BinaryIO, *, path: Path) -> Contents:
    """The tensors of a file of before 2020: five pickles, then the numbers of each storage after their count."""
    file.seek(0)
    stream = BytesIO(file.read(MOST_PICKLE))
    read_value(stream, path=path)  # the magic number, which was seen already
    protocol, machine = read_value(stream, path=path), read_value(stream, path=path)
    if not isinstance(protocol, int) or protocol != OLD_PROTOCOL:
        raise refusal(path, "is of an unknown torch format", expected=OLD_PROTOCOL, got=brief(type(protocol).__name__))
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise refusal(path, "was written by a big-endian machine", hint="load and save it with torch on this one")
    (value, storages), keys = read_pickle(stream, path=path), read_value(stream, path=path)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise refusal(path, "does not say where its numbers are")
    check_count(len(keys), where=path)
    sizes = {storage.key: storage.dtype.itemsize for storage in storages}
    starts: dict[str, tuple[int, int]] = {}
    position = stream.tell()
    for key in keys:
        file.seek(position)
        head = file.read(8)
        if len(head) < 8 or key not in sizes:
            raise refusal(path, "is cut short, or has numbers that belong to no tensor")
        (count,) = struct.unpack("<q", head)
        starts[key] = (position + 8, count)
        position += 8 + count * sizes[key]
        if count < 0 or position > size_of(file):
            raise refusal(path, "is cut short", expected=brief(f"{position} bytes"), got=f"{size_of(file):,}")

    def locate(storage: Storage) -> int:
        start, count = starts.get(storage.key, (0, -1))
        if count != storage.count or sizes[storage.key] != storage.dtype.itemsize:
            raise refusal(path, f"the numbers of storage {brief(storage.key)} are missing")
        return start

    return contents(value, locate, file, path=path)


def read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int, *, path: Path) -> bytes:
    """A small entry of a zip."""
    if entry.file_size > most:
        expected, got = f"at most {most:,} bytes", f"{entry.file_size:,}"
        raise refusal(path, f"{brief(entry.filename)} is too long", expected=expected, got=got)
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError, ValueError) as error:
        raise refusal(path, f"{brief(entry.filename)} cannot be read: {brief(error)}") from error


def read_pickle(stream: BytesIO, *, path: Path) -> tuple[object, list[Storage]]:
    """What the next pickle says, read as data, and the storages in it."""
    try:
        return read_torch_pickle(stream)
    except ValueError as error:
        raise refusal(path, f"its pickle is not of tensors alone: {brief(error)}", hint=ONLY_TENSORS) from error


def read_value(stream: BytesIO, *, path: Path) -> object:
    """What the next pickle says."""
    return read_pickle(stream, path=path)[0]


def contents(value: object, locate: Locate, file: BinaryIO, *, path: Path) -> Contents:
    """The named tensors of a value, at its top or in the one container that holds them."""
    if not isinstance(value, dict):
        raise refusal(path, "holds no named tensors", expected="a state_dict", hint=ONLY_TENSORS)
    inner = {key: item for key, item in value.items() if isinstance(item, dict) and named(item)}
    container = next((key for key in CONTAINERS if key in inner), None)
    if container is None and len(inner) == 1 and not named(value):
        container = next((key for key in inner if isinstance(key, str)), None)
    holder = inner.get(container, value)
    tensors = named(holder)
    check_count(len(tensors), where=path)
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: what a model does to it stays in memory
    stored = {name: checked(name, place, locate, mapping, path=path) for name, place in tensors.items()}
    total = sum(byte_count(tensor.shape, tensor.dtype) for tensor in stored.values())
    if total > 2 * len(mapping):  # two names for one tensor are a habit, hundreds are a trap
        raise refusal(
            path, "its tensors are larger than the file", expected=f"{len(mapping):,} bytes", got=f"{total:,}"
        )
    left = [key for key in value if key != container and (container or key not in tensors)]
    left += [f"{container}.{brief(key)}" for key in holder if container and key not in tensors]
    notes = (f"left aside: {listed(left)}",) if left else ()
    return Contents(stored=stored, container=container, notes=notes)


def listed(names: Sequence[object]) -> str:
    """A few names in words.

    >>> listed(["epoch", "optimizer"])
    'epoch, optimizer'
    """
    return ", ".join(map(brief, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def named(holder: Mapping[object, object]) -> dict[str, Placed]:
    """The tensors of a dict that have a name."""
    return {key: item for key, item in holder.items() if isinstance(key, str) and isinstance(item, Placed)}


def checked(name: str, place: Placed, locate: Locate, mapping: mmap.mmap, *, path: Path) -> Stored:
    """One tensor, whose numbers are all in its storage, and none of them twice."""
    check_name(name, where=path)
    storage, stride, offset = place.storage, place.stride, place.offset
    shape = check_shape(place.shape, name=name, where=path)
    if not isinstance(stride, tuple) or not isinstance(offset, int) or not all(map(is_step, (*stride, offset))):
        raise refusal(path, f"{name} has no possible place in its storage", got=brief((stride, offset)))
    last = sum((side - 1) * step for side, step in zip(shape, stride, strict=False)) + offset
    needed = byte_count(shape, storage.dtype) // storage.dtype.itemsize
    if len(stride) != len(shape) or last >= storage.count or needed > storage.count:
        got = brief(f"{list(shape)} in steps of {list(stride)} from {offset}")
        raise refusal(path, f"{name} does not lie in its storage of {brief(storage.count)} numbers", got=got)
    start = locate(storage)
    return Stored(
        shape=shape,
        dtype=storage.dtype,
        read=lambda: mapped(mapping, storage, start).as_strided(shape, stride, offset),
    )


def is_step(value: object) -> bool:
    """Whether a value is a number of places to go forward."""
    return type(value) is int and value >= 0


def mapped(mapping: mmap.mmap, storage: Storage, start: int) -> Tensor:
    """The numbers of a storage in the mapped file; a copy where they do not begin at a multiple of their size."""
    if start % storage.dtype.itemsize == 0:
        return torch.frombuffer(mapping, dtype=storage.dtype, count=storage.count, offset=start)
    end = start + storage.count * storage.dtype.itemsize
    return torch.frombuffer(bytearray(mapping[start:end]), dtype=storage.dtype)
