"""Named tensors go in, and are in a file when it has its name: written aside one at a time, synced and renamed.

Beside the tensors that are given, no more than one is ever in memory; a mapping that reads or makes its tensors when
asked is asked for one at a time.
"""

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from vitkit.checkpoints.files.guards import byte_count, check_name
from vitkit.checkpoints.files.npz import DTYPES as NPZ_DTYPES
from vitkit.checkpoints.files.npz import SUFFIX, as_bytes
from vitkit.checkpoints.files.safetensors import DTYPES as SAFETENSORS_DTYPES
from vitkit.checkpoints.files.safetensors import METADATA
from vitkit.core.errors import WeightsError
from vitkit.core.files import sync_file, sync_folder
from vitkit.core.shapes import Tensor

NPZ_CODES = {dtype: code for code, dtype in NPZ_DTYPES.items()}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


@contextmanager
def written_aside(path: Path | str) -> Iterator[Path]:
    """A path to write to; what is written there gets its name at the end of the block, if there was no error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except OSError as error:
        raise WeightsError(
            f"{path}: cannot be written: {error.strerror}", hint="check the folder and the disk"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def save_npz(path: Path | str, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as NumPy arrays in a zip, not packed; bfloat16 as two bytes of anything, as big_vision does."""
    with written_aside(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name in tensors:
            check_name(name, where=path)
            tensor = plain(name, tensors[name], codes=NPZ_CODES, path=path)
            code = NPZ_CODES[tensor.dtype]
            fields = {"descr": ("|" if code in ("V2", "i1", "u1", "b1") else "<") + code}
            with archive.open(zipfile.ZipInfo(name + SUFFIX), "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member, fields | {"fortran_order": False, "shape": tuple(tensor.shape)}
                )
                member.write(as_bytes(tensor).data)


def save_safetensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file.

    The library's own writer wants all tensors at once, and copies all of them in versions before 0.8; the format is a
    line of JSON and the numbers after it.
    """
    places = {}
    for name in tensors:
        check_name(name, where=path)
        tensor = tensors[name]
        check_dtype(name, tensor, codes=SAFETENSORS_CODES, path=path)
        places[name] = (tensor.dtype, tuple(tensor.shape))
    order = sorted(places, key=lambda name: (-places[name][0].itemsize, name))  # so that each begins at its multiple
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = places[name]
        begin, end = end, end + byte_count(shape, dtype)
        header[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": shape, "data_offsets": (begin, end)}
    line = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    line += b" " * (-len(line) % 8)
    with written_aside(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(line)) + line)
        for name in order:
            file.write(as_bytes(plain(name, tensors[name], codes=SAFETENSORS_CODES, path=path)).data)


def save_torch(path: Path | str, tensors: Mapping[str, Tensor], container: str | None = None) -> None:
    """Write what `torch.load(weights_only=True)` reads: the tensors at the top, or under a key such as "model".

    torch writes whole storages. A tensor that is a part of one whose other parts are not written is copied first, so
    that nothing else gets into the file.
    """
    state = {name: tensors[name].detach().cpu() for name in tensors}
    parts: dict[int, dict[int, int]] = {}
    for tensor in state.values():
        parts.setdefault(tensor.untyped_storage().data_ptr(), {})[int(tensor.storage_offset())] = tensor.nbytes
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        if sum(parts[storage.data_ptr()].values()) != storage.nbytes() or not tensor.is_contiguous():
            state[name] = tensor.clone(memory_format=torch.contiguous_format)
    with written_aside(path) as temporary, temporary.open("wb") as file:  # by path, torch would write its name into it
        torch.save(state if container is None else {container: state}, file)


def plain(name: str, tensor: Tensor, *, codes: Mapping[torch.dtype, str], path: Path | str) -> Tensor:
    """The tensor in row-major order on the CPU, of a type that the file can hold."""
    check_dtype(name, tensor, codes=codes, path=path)
    return tensor.detach().cpu().contiguous()


def check_dtype(name: str, tensor: Tensor, *, codes: Mapping[torch.dtype, str], path: Path | str) -> None:
    """Refuse a tensor of a type that the file has no code for."""
    if tensor.dtype not in codes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)
        raise WeightsError(f"{path}: cannot hold {name}", expected=expected, got=tensor.dtype)
