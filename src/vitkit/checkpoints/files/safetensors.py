"""An open safetensors file goes in, the tensors in it come out, memory-mapped.

The header is read here first, with limits; then the library opens the file.
"""

import struct
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from vitkit.checkpoints.files.guards import (
    Stored,
    brief,
    byte_count,
    check_count,
    check_name,
    check_shape,
    parsed_json,
    refusal,
    size_of,
)

MOST_HEADER = 2 << 20
"""One tensor takes about 100 bytes of header, so this is four times what `MOST_TENSORS` need."""
DTYPES = {
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


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file that begins so has a header's length and then a header.

    >>> looks_like_safetensors(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}")
    True
    """
    return start[8:9] == b"{"


def stored_in_safetensors(file: BinaryIO, *, path: Path, resources: ExitStack) -> dict[str, Stored]:
    """The tensors of a file whose header holds no lies."""
    places = read_header(file, path=path)
    opened: Any = resources.enter_context(safe_open(path, framework="pt", device="cpu"))
    return {
        name: Stored(shape=shape, dtype=dtype, read=partial(opened.get_tensor, name))
        for name, (shape, dtype) in places.items()
    }


def read_header(file: BinaryIO, *, path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and element type of each tensor, after each claim was held against the file's size."""
    size = size_of(file)
    if size < 8:
        raise refusal(path, "ends before its header", expected="at least 8 bytes", got=size)
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MOST_HEADER:
        raise refusal(path, "the header is too long", expected=f"at most {MOST_HEADER:,} bytes", got=f"{length:,}")
    if 8 + length > size:
        raise refusal(path, "ends in the middle of its header", expected=f"{8 + length:,} bytes", got=f"{size:,}")
    header = parsed_json(file.read(length), where=path)
    if not isinstance(header, dict):
        raise refusal(path, "the header is not an object", got=brief(type(header).__name__))
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refusal(path, f"{METADATA} holds more than texts")
    check_count(len(header), where=path)
    places, spans = {}, []
    for name, claim in header.items():
        shape, dtype, span = checked_claim(name, claim, path=path)
        places[name] = (shape, dtype)
        spans.append(span)
    check_spans(sorted(spans), size - 8 - length, path=path)
    return places


def checked_claim(name: str, claim: object, *, path: Path) -> tuple[tuple[int, ...], torch.dtype, tuple[int, int]]:
    """What the header says of one tensor: shape, element type, and where its bytes begin and end."""
    check_name(name, where=path)
    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise refusal(path, f"the header does not say what {name} is", expected="dtype, shape and data_offsets")
    code, span = claim["dtype"], claim["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise refusal(path, f"{name} has elements of an unknown type", expected=", ".join(DTYPES), got=brief(code))
    shape, dtype = check_shape(claim["shape"], name=name, where=path), DTYPES[code]
    if not isinstance(span, list) or len(span) != 2 or not all(type(end) is int and end >= 0 for end in span):
        raise refusal(path, f"{name} has no possible place in the file", got=brief(span))
    if span[1] - span[0] != byte_count(shape, dtype):
        expected = f"{byte_count(shape, dtype):,} bytes for {list(shape)} of {code}"
        raise refusal(path, f"{name} does not fill its place", expected=expected, got=brief(span))
    return shape, dtype, (span[0], span[1])


def check_spans(spans: list[tuple[int, int]], size: int, *, path: Path) -> None:
    """Refuse tensors that overlap, leave gaps, or reach beyond the end."""
    end = spans[-1][1]
    if end > size:
        raise refusal(path, "is cut short", expected=f"{end:,} bytes of tensors", got=f"{size:,}")
    for before, after in pairwise(((0, 0), *spans)):
        if after[0] < before[1]:
            raise refusal(path, f"two tensors overlap at byte {after[0]:,}")
        if after[0] > before[1]:
            raise refusal(path, f"bytes {before[1]:,} to {after[0]:,} belong to no tensor")
    if end < size:
        raise refusal(path, f"{size - end:,} bytes at the end belong to no tensor")
