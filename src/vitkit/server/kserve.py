"""KServe v2 inference requests: parsing, and encoding of responses.

The protocol is https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol with the
binary tensor extension: raw numbers and encoded files follow the JSON, whose length is in a header.
"""

import base64
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitkit.server.ipc import JSON, JSON_SIZE_HEADER, HTTPError, WorkerResponse, encode_json

OUTPUTS = ("logits", "probabilities", "label", "features")


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """A parsed request: files or preprocessed pixels, and for each requested output whether it is binary."""

    files: list[bytes] | None
    pixels: NDArray[np.float32] | None
    outputs: dict[str, bool]
    id: str | None


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Constraints on a request: pixels of shape (C, H, W), the model's number of classes, and the image limit."""

    shape: tuple[int, int, int]
    num_classes: int
    max_images: int


def parse_request(body: bytes, *, json_size: int | None, spec: InputSpec) -> InferenceRequest:
    """Parse a request; raise 400 if it violates the protocol."""
    if json_size is not None and not 0 <= json_size <= len(body):
        raise HTTPError(400, f"{JSON_SIZE_HEADER} is {json_size}, the body has {len(body)} bytes")
    text = body if json_size is None else body[:json_size]
    if text.count(b",") > spec.max_images * math.prod(spec.shape) + 1000:
        raise HTTPError(413, f"more numbers than {spec.max_images} images have")
    request = parse_json(text)
    if not isinstance(request, dict):
        raise HTTPError(400, "expected a JSON object with inputs")
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise HTTPError(400, "expected one input", hint='"image" BYTES [n], or "pixels" FP32 [n, C, H, W]')
    raw = memoryview(body)[json_size:] if json_size is not None else memoryview(b"")
    files, pixels = _parse_input(inputs[0], raw, spec)
    request_id = request.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise HTTPError(400, "id is not a string")
    return InferenceRequest(files=files, pixels=pixels, outputs=_parse_outputs(request, spec), id=request_id)


def parse_json(body: bytes) -> Any:
    """Parse JSON; raise 400 if it is invalid."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise HTTPError(400, f"the body is not JSON: {reason}") from None


def _parse_input(
    tensor: dict[str, Any], raw: memoryview, spec: InputSpec
) -> tuple[list[bytes] | None, NDArray[np.float32] | None]:
    name, datatype, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if not isinstance(shape, list) or not shape or not all(type(side) is int and side > 0 for side in shape):
        raise HTTPError(400, "the shape of an input must be a list of positive integers")
    if shape[0] > spec.max_images:
        raise HTTPError(413, f"too many images: expected at most {spec.max_images}, got {shape[0]}")
    binary = _get_binary_data(tensor, raw)
    if name == "image" and datatype == "BYTES" and (len(shape) == 1 or math.prod(shape) == shape[0]):
        return _read_files(tensor, binary, shape[0]), None
    if name == "pixels" and datatype == "FP32" and tuple(shape[1:]) == spec.shape:
        return None, _read_pixels(tensor, binary, shape)
    expected = f'"image" BYTES [n], or "pixels" FP32 [n, {", ".join(map(str, spec.shape))}]'
    got = f"{str(name)[:40]!r} {str(datatype)[:20]} {str(shape)[:60]}"
    raise HTTPError(400, f"expected {expected}; got {got}")


def _get_binary_data(tensor: dict[str, Any], raw: memoryview) -> memoryview | None:
    parameters = tensor.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        if raw:
            raise HTTPError(400, "bytes follow the JSON, but no input has binary_data_size")
        return None
    if tensor.get("data") is not None:
        raise HTTPError(400, "an input has both data and binary_data_size")
    if type(size) is not int or size != len(raw):
        raise HTTPError(400, f"binary_data_size is {str(size)[:20]}, {len(raw)} bytes follow the JSON")
    return raw


def _read_files(tensor: dict[str, Any], raw: memoryview | None, count: int) -> list[bytes]:
    if raw is None:
        data = tensor.get("data")
        if not isinstance(data, list) or len(data) != count or not all(isinstance(text, str) for text in data):
            raise HTTPError(400, f"expected data with {count} base64 strings", hint="or send the files as binary data")
        return [decode_base64(text) for text in data]
    files, offset = [], 0
    for _ in range(count):
        if offset + 4 > len(raw):
            raise HTTPError(400, f"expected {count} files, each after its length in 4 bytes")
        (size,) = struct.unpack_from("<I", raw, offset)
        if offset + 4 + size > len(raw):
            raise HTTPError(400, f"a file should have {size} bytes, {len(raw) - offset - 4} follow")
        files.append(bytes(raw[offset + 4 : offset + 4 + size]))
        offset += 4 + size
    if offset != len(raw):
        raise HTTPError(400, f"{len(raw) - offset} bytes follow the last file")
    return files


def decode_base64(text: str) -> bytes:
    """Decode base64; raise 400 if it is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise HTTPError(400, "not base64", hint="encode the file's content, without a data: prefix") from None


def _read_pixels(tensor: dict[str, Any], raw: memoryview | None, shape: list[int]) -> NDArray[np.float32]:
    count = math.prod(shape)
    if raw is not None:
        if len(raw) != 4 * count:
            raise HTTPError(400, f"expected {4 * count} bytes of FP32, got {len(raw)}")
        pixels = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    else:
        try:
            numbers = np.array(tensor.get("data"))
        except (ValueError, TypeError, OverflowError):
            raise HTTPError(400, "data is not a list of numbers") from None
        if numbers.dtype.kind not in "iuf":  # strings and booleans would be converted
            raise HTTPError(400, "data is not a list of numbers")
        with np.errstate(over="ignore"):
            pixels = numbers.reshape(-1).astype(np.float32)
        if pixels.size != count:
            raise HTTPError(400, f"expected {count} numbers, got {pixels.size}")
    if not np.isfinite(pixels).all():
        raise HTTPError(400, "a pixel is not finite")
    return pixels.reshape(shape)


def _parse_outputs(request: dict[str, Any], spec: InputSpec) -> dict[str, bool]:
    available = OUTPUTS if spec.num_classes else ("features",)
    parameters = request.get("parameters")
    all_binary = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return dict.fromkeys(available, all_binary)
    if not isinstance(outputs, list):
        raise HTTPError(400, "outputs is not a list")
    requested = {}
    for output in outputs:
        name = str(output.get("name")) if isinstance(output, dict) else "none"
        if name not in available:
            raise HTTPError(400, f"no such output: {name[:40]!r}", hint=f"available: {', '.join(available)}")
        options = output.get("parameters")
        binary = options.get("binary_data") if isinstance(options, dict) else None
        requested[name] = binary if isinstance(binary, bool) else all_binary
    return requested


def encode_response(
    request: InferenceRequest, *, model: str, outputs: dict[str, NDArray[np.float32] | list[str]]
) -> WorkerResponse:
    """Return a response with the requested outputs."""
    tensors, binary_data = [], []
    for name, is_binary in request.outputs.items():
        value = outputs[name]
        datatype = "BYTES" if isinstance(value, list) else "FP32"
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(np.shape(value))}
        if is_binary:
            content = _encode_binary(value)
            binary_data.append(content)
            tensor["parameters"] = {"binary_data_size": len(content)}
        else:
            tensor["data"] = value if isinstance(value, list) else value.reshape(-1).tolist()
        tensors.append(tensor)
    identity = {} if request.id is None else {"id": request.id}
    text = encode_json({"model_name": model, "model_version": "1", **identity, "outputs": tensors})
    if not binary_data:
        return WorkerResponse(200, {"content-type": JSON}, text)
    headers = {"content-type": "application/octet-stream", JSON_SIZE_HEADER.lower(): str(len(text))}
    return WorkerResponse(200, headers, b"".join([text, *binary_data]))


def _encode_binary(value: NDArray[np.float32] | list[str]) -> bytes:
    if isinstance(value, list):
        texts = [text.encode() for text in value]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.ascontiguousarray(value, dtype="<f4").tobytes()
