"""Named tensors go in, and are in a file when it has its name: written aside one at a time, synced and renamed.

Beside the tensors that are given, no more than one is ever in memory; a mapping that reads or makes its tensors when
asked is asked for one at a time.
"""

import json
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from vitkit.checkpoints.files.guards import byte_count, check_name
from vitkit.checkpoints.files.npz import DTYPES as NPZ_DTYPES
from vitkit.checkpoints.files.npz import SUFFIX, as_bytes
from vitkit.checkpoints.files.pickles import STORAGES
from vitkit.checkpoints.files.safetensors import DTYPES as SAFETENSORS_DTYPES
from vitkit.checkpoints.files.safetensors import METADATA
from vitkit.checkpoints.files.zips import LOCAL_SIZE
from vitkit.core.errors import WeightsError
from vitkit.core.files import written_aside
from vitkit.core.shapes import Tensor

NPZ_CODES = {dtype: code for code, dtype in NPZ_DTYPES.items()}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
TORCH_STORAGES: dict[torch.dtype, type] = {
    dtype: getattr(torch, name.removeprefix("torch ")) for name, dtype in STORAGES.items()
}
PADDING = 0x4246
"""The number of the field by which torch fills up the headers of a zip."""


@contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """A path to write to; what is written there gets its name at the end of the block. A full disk is named."""
    try:
        with written_aside(path) as temporary:
            yield temporary
    except OSError as error:
        raise WeightsError(
            f"{path}: cannot be written: {error.strerror}", hint="check the folder and the disk"
        ) from error


def save_npz(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as NumPy arrays in a zip, not packed; bfloat16 as two bytes of anything, as big_vision does."""
    with new_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name in tensors:
            check_name(name, where=path)
            write_array(archive, name, plain(name, tensors[name], codes=NPZ_CODES, path=path))


def write_array(archive: zipfile.ZipFile, name: str, tensor: Tensor) -> None:
    """Write one array as NumPy does."""
    code = NPZ_CODES[tensor.dtype]
    fields = {"descr": ("|" if code in ("V2", "i1", "u1", "b1") else "<") + code}
    with archive.open(zipfile.ZipInfo(name + SUFFIX), "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, fields | {"fortran_order": False, "shape": tuple(tensor.shape)})
        member.write(as_bytes(tensor).data)


def save_safetensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file.

    The library's own writer wants all tensors at once, and copies all of them in versions before 0.8; the format is a
    line of JSON and the numbers after it.
    """
    places = places_of(tensors, codes=SAFETENSORS_CODES, path=path)
    order = sorted(places, key=lambda name: (-places[name][0].itemsize, name))  # so that each begins at its multiple
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = places[name]
        begin, end = end, end + byte_count(shape, dtype)
        header[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": shape, "data_offsets": (begin, end)}
    line = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    line += b" " * (-len(line) % 8)
    with new_file(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(line)) + line)
        for name in order:
            file.write(as_bytes(plain(name, tensors[name], codes=SAFETENSORS_CODES, path=path)).data)


@dataclass(frozen=True)
class Numbers:
    """The numbers of a tensor, in an entry of the file beside its pickle."""

    storage: type
    key: str
    count: int


@dataclass(frozen=True)
class Described:
    """A tensor to be pickled as torch pickles it: how to make it of numbers that lie elsewhere."""

    numbers: Numbers
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        steps = torch.empty(self.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.numbers, 0, self.shape, steps, False, OrderedDict())


class TorchPickler(pickle.Pickler):
    """The pickle of a torch file: tensors by description, and by key where their numbers are."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        """What torch looks for to find the numbers."""
        return ("storage", value.storage, value.key, "cpu", value.count) if isinstance(value, Numbers) else None


def save_torch(path: Path | str, tensors: Mapping[str, Tensor], container: str | None = None) -> None:
    """Write what `torch.load(weights_only=True)` reads: the tensors at the top, or under a key such as "model".

    `torch.save` wants all tensors at once. What it writes is a zip: a pickle that says what the tensors are, and their
    numbers in entries beside it.
    """
    places = places_of(tensors, codes=TORCH_STORAGES, path=path)
    state = {
        name: Described(Numbers(TORCH_STORAGES[dtype], str(number), math.prod(shape)), shape)
        for number, (name, (dtype, shape)) in enumerate(places.items())
    }
    described = BytesIO()
    TorchPickler(described, protocol=2).dump(state if container is None else {container: state})
    with new_file(path) as temporary, temporary.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", described.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            write_aligned(archive, name, memoryview(content), start=file.tell())
        for name, item in state.items():
            numbers = as_bytes(plain(name, tensors[name], codes=TORCH_STORAGES, path=path)).data
            write_aligned(archive, f"data/{item.numbers.key}", numbers, start=file.tell())
            del numbers  # before the next is made


def write_aligned(archive: zipfile.ZipFile, name: str, content: memoryview, *, start: int) -> None:
    """Write an entry whose bytes begin at a multiple of 64, so that they can be mapped into memory and used there."""
    entry = zipfile.ZipInfo(f"archive/{name}")
    entry.file_size = len(content)
    # As torch does: a field that no reader knows, as long as need be. Sizes of 64 bits take a field of 20 bytes too.
    is_large = len(content) * 1.05 > zipfile.ZIP64_LIMIT
    head = LOCAL_SIZE + len(entry.filename) + 4 + (20 if is_large else 0)
    padding = -(start + head) % 64
    entry.extra = struct.pack("<HH", PADDING, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=is_large) as member:
        member.write(content)


def places_of(
    tensors: Mapping[str, Tensor], *, codes: Mapping[torch.dtype, object], path: Path | str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor, before any is written; a mapping that makes tensors makes each for this alone."""

    def place(name: str, tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        check_name(name, where=path)
        check_dtype(name, tensor, codes=codes, path=path)
        return tensor.dtype, tuple(tensor.shape)

    return {name: place(name, tensors[name]) for name in tensors}


def plain(name: str, tensor: Tensor, *, codes: Mapping[torch.dtype, object], path: Path | str) -> Tensor:
    """The tensor in row-major order on the CPU, of a type that the file can hold."""
    check_dtype(name, tensor, codes=codes, path=path)
    return tensor.detach().cpu().contiguous()


def check_dtype(name: str, tensor: Tensor, *, codes: Mapping[torch.dtype, object], path: Path | str) -> None:
    """Refuse a tensor of a type that the file has no code for."""
    if tensor.dtype not in codes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)
        raise WeightsError(f"{path}: cannot hold {name}", expected=expected, got=tensor.dtype)
