"""Writing of tensor files, atomically and one tensor at a time.

A mapping that reads or converts its tensors on access is never asked for more than one at a time, which the libraries'
own writers do not support: they take all tensors at once.
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

from vitkit.core.errors import WeightsError
from vitkit.core.files import atomic_write
from vitkit.core.shapes import Tensor
from vitkit.weights.io import checks
from vitkit.weights.io.checks import check_name, count_bytes, name_file
from vitkit.weights.io.readers import METADATA, SUFFIX, as_bytes

NPZ_CODES = {dtype: code for code, dtype in checks.NPZ_DTYPES.items()}
SAFETENSORS_CODES = {dtype: code for code, dtype in checks.SAFETENSORS_DTYPES.items()}
TORCH_STORAGES: dict[torch.dtype, type] = {
    dtype: getattr(torch, name.removeprefix("torch ")) for name, dtype in checks.STORAGES.items()
}
PADDING = 0x4246
"""Identifier of the extra field with which torch pads zip headers."""


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` at the end of the block."""
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        message, hint = f"{path}: cannot be written: {error.strerror}", "check the directory and the disk"
        raise WeightsError(message, hint=hint) from error


def save_npz(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as uncompressed NumPy arrays; bfloat16 as two bytes of void, as big_vision does."""
    with atomic_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name in tensors:
            with name_file(path):
                check_name(name)
            tensor = check_dtype(name, tensors[name], codes=NPZ_CODES, path=path)
            code = NPZ_CODES[tensor.dtype]
            descr = ("|" if code in ("V2", "i1", "u1", "b1") else "<") + code
            header = {"descr": descr, "fortran_order": False, "shape": tuple(tensor.shape)}
            with archive.open(zipfile.ZipInfo(name + SUFFIX), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                member.write(as_bytes(tensor))
            del tensor  # before the next one is read


def save_safetensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file: the length of the header, the header in JSON, and the data."""
    specs = check_tensors(tensors, codes=SAFETENSORS_CODES, path=path)
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))  # keeps every tensor aligned
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = specs[name]
        begin, end = end, end + count_bytes(shape, dtype)
        header[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": shape, "data_offsets": (begin, end)}
    line = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    line += b" " * (-len(line) % 8)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(line)) + line)
        for name in order:
            file.write(as_bytes(tensors[name]))


@dataclass(frozen=True)
class StorageRef:
    """A storage in an entry next to the pickle."""

    type: type
    key: str
    count: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor that pickles as torch's do: a call that rebuilds it from a storage."""

    storage: StorageRef
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        steps = torch.empty(self.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.storage, 0, self.shape, steps, False, OrderedDict())


class TorchPickler(pickle.Pickler):
    """Pickler that refers to storages by persistent id, as torch does."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        """Return torch's identifier of a storage."""
        return ("storage", value.type, value.key, "cpu", value.count) if isinstance(value, StorageRef) else None


def save_torch(path: Path | str, tensors: Mapping[str, Tensor], container: str | None = None) -> None:
    """Write a state dict for `torch.load(weights_only=True)`, at the top level or under a key such as "model".

    The file is a zip with a pickle that describes the tensors, and an entry for each storage.
    """
    specs = check_tensors(tensors, codes=TORCH_STORAGES, path=path)
    state = {
        name: TensorRef(StorageRef(TORCH_STORAGES[dtype], str(number), math.prod(shape)), shape)
        for number, (name, (dtype, shape)) in enumerate(specs.items())
    }
    description = BytesIO()
    TorchPickler(description, protocol=2).dump(state if container is None else {container: state})
    with atomic_file(path) as temporary, temporary.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", description.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            write_aligned(archive, name, memoryview(content), start=file.tell())
        for name, item in state.items():
            data = as_bytes(tensors[name])
            write_aligned(archive, f"data/{item.storage.key}", data, start=file.tell())
            del data  # before the next tensor is read


def write_aligned(archive: zipfile.ZipFile, name: str, content: memoryview, *, start: int) -> None:
    """Write an entry whose data is aligned to 64 bytes, so that it can be memory-mapped."""
    entry = zipfile.ZipInfo(f"archive/{name}")
    entry.file_size = len(content)
    # torch pads with an extra field that readers skip. 64-bit sizes take another field of 20 bytes.
    is_large = len(content) * 1.05 > zipfile.ZIP64_LIMIT
    head = checks.LOCAL_SIZE + len(entry.filename) + 4 + (20 if is_large else 0)
    padding = -(start + head) % 64
    entry.extra = struct.pack("<HH", PADDING, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=is_large) as member:
        member.write(content)


def check_tensors(
    tensors: Mapping[str, Tensor], *, codes: Mapping[torch.dtype, object], path: Path | str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor, after checking names and dtypes before anything is written."""
    specs = {}
    for name in tensors:
        with name_file(path):
            check_name(name)
        tensor = check_dtype(name, tensors[name], codes=codes, path=path)
        specs[name] = tensor.dtype, tuple(tensor.shape)
        del tensor  # before the next one is read
    return specs


def check_dtype(name: str, tensor: Tensor, *, codes: Mapping[torch.dtype, object], path: Path | str) -> Tensor:
    """Return the tensor, or reject a dtype that the file does not support."""
    if tensor.dtype not in codes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)
        raise WeightsError(f"{path}: cannot store {name}", expected=expected, got=tensor.dtype)
    return tensor
