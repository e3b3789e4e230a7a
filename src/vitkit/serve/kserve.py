"""The body of a KServe v2 inference request goes in, images or pixels and the wished outputs come out; then its answer.

The protocol is that of https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol with the
binary tensor extension: raw numbers and encoded files follow the JSON, whose length is in a header.
"""

import base64
import binascii
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitkit.serve.answers import Refusal

OUTPUTS = ("logits", "probabilities", "label", "features")
HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request asks: files or prepared pixels, which outputs, and which of them as raw bytes."""

    files: list[bytes] | None
    pixels: NDArray[np.float32] | None
    outputs: dict[str, bool]
    id: str | None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the model takes: C, H, W of its pixels, whether it has classes, and how many images at once."""

    sides: tuple[int, int, int]
    classes: int
    images: int


def wish(body: bytes, *, json_size: int | None, bounds: Bounds) -> Wish:
    """Read a request; what does not follow the protocol is refused with 400.

    >>> body = b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}]}'
    >>> wish(body, json_size=None, bounds=Bounds(sides=(3, 32, 32), classes=2, images=16)).files
    [b'hi']
    """
    if json_size is not None and not 0 <= json_size <= len(body):
        raise Refusal(400, f"{HEADER} is {json_size}, the body has {len(body)} bytes")
    text = body if json_size is None else body[:json_size]
    if text.count(b",") > bounds.images * math.prod(bounds.sides) + 1000:
        raise Refusal(413, f"more numbers than {bounds.images} images have")
    asked = parsed(text)
    if not isinstance(asked, dict):
        raise Refusal(400, "expected a JSON object with inputs")
    inputs = asked.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Refusal(400, "expected one input", hint='"image" BYTES [n], or "pixels" FP32 [n, C, H, W]')
    raw = memoryview(body)[json_size:] if json_size is not None else memoryview(b"")
    files, pixels = _input(inputs[0], raw, bounds)
    identity = asked.get("id")
    if identity is not None and not isinstance(identity, str):
        raise Refusal(400, "id is text")
    return Wish(files=files, pixels=pixels, outputs=_outputs(asked, bounds), id=identity)


def parsed(body: bytes) -> Any:
    """The JSON of a body; what is none is refused with 400.

    >>> parsed(b"[1, 2]")
    [1, 2]
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise Refusal(400, f"the body is not JSON: {reason}") from None


Raw = memoryview | None


def _input(
    given: dict[str, Any], raw: memoryview, bounds: Bounds
) -> tuple[list[bytes] | None, NDArray[np.float32] | None]:
    name, datatype, shape = given.get("name"), given.get("datatype"), given.get("shape")
    if not isinstance(shape, list) or not shape or not all(type(side) is int and side > 0 for side in shape):
        raise Refusal(400, "an input's shape is a list of positive integers")
    if shape[0] > bounds.images:
        raise Refusal(413, f"too many images: expected at most {bounds.images}, got {shape[0]}")
    own = _raw(given, raw)
    if name == "image" and datatype == "BYTES" and (len(shape) == 1 or math.prod(shape) == shape[0]):
        return _files(given, own, shape[0]), None
    if name == "pixels" and datatype == "FP32" and tuple(shape[1:]) == bounds.sides:
        return None, _pixels(given, own, shape)
    sides = ", ".join(map(str, bounds.sides))
    raise Refusal(
        400,
        f'expected "image" BYTES [n], or "pixels" FP32 [n, {sides}]; got {str(name)[:40]!r} {str(datatype)[:20]} '
        f"{str(shape)[:60]}",
    )


def _raw(given: dict[str, Any], raw: memoryview) -> Raw:
    parameters = given.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        if raw:
            raise Refusal(400, "bytes follow the JSON, and no input says that they are its own: binary_data_size")
        return None
    if "data" in given and given["data"] is not None:
        raise Refusal(400, "an input has both data and binary_data_size")
    if type(size) is not int or size != len(raw):
        raise Refusal(400, f"binary_data_size is {str(size)[:20]}, {len(raw)} bytes follow the JSON")
    return raw


def _files(given: dict[str, Any], raw: Raw, count: int) -> list[bytes]:
    if raw is None:
        data = given.get("data")
        if not isinstance(data, list) or len(data) != count or not all(isinstance(text, str) for text in data):
            raise Refusal(400, f"expected data with {count} texts in base64", hint="or send the files as raw bytes")
        return [unbased(text) for text in data]
    files, place = [], 0
    for _ in range(count):
        if place + 4 > len(raw):
            raise Refusal(400, f"expected {count} files, each behind its length in 4 bytes")
        (size,) = struct.unpack_from("<I", raw, place)
        if place + 4 + size > len(raw):
            raise Refusal(400, f"a file says that it has {size} bytes, {len(raw) - place - 4} follow")
        files.append(bytes(raw[place + 4 : place + 4 + size]))
        place += 4 + size
    if place != len(raw):
        raise Refusal(400, f"{len(raw) - place} bytes follow the last file")
    return files


def unbased(text: str) -> bytes:
    """The bytes that base64 stands for; what is none is refused with 400.

    >>> unbased("aGk=")
    b'hi'
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, "not base64", hint="send the file's content in base64, without a data: prefix") from None


def _pixels(given: dict[str, Any], raw: Raw, shape: list[int]) -> NDArray[np.float32]:
    count = math.prod(shape)
    if raw is not None:
        if len(raw) != 4 * count:
            raise Refusal(400, f"expected {4 * count} bytes of FP32, got {len(raw)}")
        found = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    else:
        try:
            numbers = np.array(given.get("data"))
        except (ValueError, TypeError, OverflowError):
            raise Refusal(400, "data is not a list of numbers") from None
        if numbers.dtype.kind not in "iuf":  # texts would be read as numbers, true as 1
            raise Refusal(400, "data is not a list of numbers")
        with np.errstate(over="ignore"):
            found = numbers.reshape(-1).astype(np.float32)
        if found.size != count:
            raise Refusal(400, f"expected {count} numbers, got {found.size}")
    if not np.isfinite(found).all():
        raise Refusal(400, "a pixel is not a finite number")
    return found.reshape(shape)


def _outputs(asked: dict[str, Any], bounds: Bounds) -> dict[str, bool]:
    """The wished outputs, and whether each is wished as raw bytes."""
    known = OUTPUTS if bounds.classes else ("features",)
    parameters = asked.get("parameters")
    all_raw = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    outputs = asked.get("outputs")
    if outputs is None or outputs == []:
        return dict.fromkeys(known, all_raw)
    if not isinstance(outputs, list):
        raise Refusal(400, "outputs is a list")
    wished = {}
    for output in outputs:
        name = str(output.get("name")) if isinstance(output, dict) else "none"
        if name not in known:
            raise Refusal(400, f"there is no output {name[:40]!r}", hint=f"there are {', '.join(known)}")
        own = output.get("parameters")
        raw = own.get("binary_data") if isinstance(own, dict) else None
        wished[name] = all_raw if not isinstance(raw, bool) else raw
    return wished


def answer(
    request: Wish, *, model: str, found: dict[str, NDArray[np.float32] | list[str]]
) -> tuple[bytes, dict[str, str]]:
    """The body and headers of an answer, from all outputs by name.

    >>> asked = Wish(files=None, pixels=None, outputs={"label": False}, id=None)
    >>> answer(asked, model="pets", found={"label": ["cat"]})[0][-72:]
    b'[{"name": "label", "datatype": "BYTES", "shape": [1], "data": ["cat"]}]}'
    """
    outputs, tail = [], []
    for name, raw in request.outputs.items():
        value = found[name]
        shape = [len(value)] if isinstance(value, list) else list(value.shape)
        said: dict[str, Any] = {
            "name": name,
            "datatype": "BYTES" if isinstance(value, list) else "FP32",
            "shape": shape,
        }
        if raw:
            content = _packed(value)
            tail.append(content)
            said["parameters"] = {"binary_data_size": len(content)}
        else:
            said["data"] = value if isinstance(value, list) else value.reshape(-1).tolist()
        outputs.append(said)
    head: dict[str, Any] = {"model_name": model, "model_version": "1"}
    if request.id is not None:
        head["id"] = request.id
    text = json.dumps(head | {"outputs": outputs}, allow_nan=False).encode()
    if not tail:
        return text, {"content-type": "application/json"}
    return b"".join([text, *tail]), {"content-type": "application/octet-stream", HEADER.lower(): str(len(text))}


def _packed(value: NDArray[np.float32] | list[str]) -> bytes:
    if isinstance(value, list):
        texts = [text.encode() for text in value]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.ascontiguousarray(value, dtype="<f4").tobytes()
