"""Schemas of requests and responses for the OpenAPI description.

Responses are not validated with them at run time; the tests do that.
"""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from vitkit.server.ipc import JSON, JSON_SIZE_HEADER


class Strict(BaseModel):
    """An object without additional keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Error(Strict):
    """The error of a request, or of one image in a list, and a hint what to do."""

    error: str
    hint: str | SkipJsonSchema[None] = None


class ClassProbability(Strict):
    """A class and its probability."""

    label: str
    probability: float = Field(ge=0, le=1.000001)


class ClassSimilarity(Strict):
    """A class and the cosine similarity between its head weights and the image's features."""

    label: str
    similarity: float


class ImageResult(Strict):
    """The most probable classes of one image and, if requested, the nearest ones."""

    predictions: list[ClassProbability]
    nearest: list[ClassSimilarity] | SkipJsonSchema[None] = None


class ImageFeatures(Strict):
    """Features of one image."""

    features: list[float]


class ModelResponse(Strict):
    """A response that names the model."""

    model: str


class SinglePrediction(ModelResponse, ImageResult):
    """Predictions for one image."""


class PredictionList(ModelResponse):
    """Predictions for a list of images, in the same order."""

    results: list[ImageResult | Error]


class SingleFeatures(ModelResponse, ImageFeatures):
    """Features of one image, with the model."""


class FeaturesList(ModelResponse):
    """Features of a list of images, in the same order."""

    results: list[ImageFeatures | Error]


class AttentionMaps(ModelResponse):
    """Attention of the token that the head reads: the rollout, and a map for each layer and head."""

    grid: tuple[int, int]
    layers: int
    heads: int
    predictions: list[ClassProbability]
    rollout: list[list[float]]
    maps: list[list[list[list[float]]]]


class PatchAttention(ModelResponse):
    """Attention from patch to patch in one layer; row i belongs to patch i."""

    grid: tuple[int, int]
    layer: int
    head: int | Literal["mean"]
    patches: list[list[float]]


class ModelRecord(Strict):
    """A model in the list."""

    name: str
    model: str
    precision: Literal["fp32", "bf16", "int8"]
    engine: str
    classes: int
    image_size: tuple[int, int]
    channels: int
    features: int
    layers: int
    heads: int
    grid: tuple[int, int]
    parameters: int
    attention: bool
    agreement: dict[str, Any] | None
    agreed: str | None


class ModelList(Strict):
    """All models; the first is the default."""

    models: list[ModelRecord]


class ModelDetails(ModelRecord):
    """A model with its labels and preprocessing."""

    labels: list[str]
    preprocessing: dict[str, Any]


class ServerMetadata(Strict):
    """KServe's description of a server."""

    name: str
    version: str
    extensions: list[str]


class Live(Strict):
    """The server runs."""

    live: bool


class Ready(Strict):
    """The models are ready."""

    ready: bool


class ModelReady(Ready):
    """The model is ready."""

    name: str


class TensorMetadata(Strict):
    """KServe's description of an input or output; -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Strict):
    """KServe's description of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class TensorParameters(BaseModel):
    """Binary encoding of a tensor."""

    binary_data_size: int | None = Field(default=None, ge=0)
    binary_data: bool | None = None


class InferInput(BaseModel):
    """An input: files in base64, or preprocessed pixels."""

    name: Literal["image", "pixels"]
    datatype: Literal["BYTES", "FP32"]
    shape: list[int] = Field(min_length=1)
    parameters: TensorParameters | None = None
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    """An output to return."""

    name: Literal["logits", "probabilities", "label", "features"]
    parameters: TensorParameters | None = None


class InferRequest(BaseModel):
    """A KServe inference request."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: list[InferInput] = Field(min_length=1, max_length=1)
    outputs: list[RequestedOutput] | None = None


class InferOutput(Strict):
    """An output: its data, or the size of its binary data after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | SkipJsonSchema[None] = None
    data: list[float] | list[str] | SkipJsonSchema[None] = None


class InferResponse(Strict):
    """A KServe inference response."""

    model_name: str
    model_version: str
    id: str | SkipJsonSchema[None] = None
    outputs: list[InferOutput]


REASONS = {
    400: "The request is not valid.",
    401: "The token is missing or wrong.",
    403: "Pages of other sites may not send images.",
    404: "There is no such route, model or run.",
    405: "The route does not have this method.",
    408: "The request was not received in time.",
    413: "Too many bytes or images.",
    415: "The body is compressed, or a form.",
    422: "The image cannot be processed.",
    429: "The queue is full: retry after Retry-After seconds.",
    431: "The headers are too long.",
    500: "Internal server error.",
    503: "The models are not ready: retry after Retry-After seconds.",
    504: "No response within the deadline.",
}
COMMON_ERRORS = (400, 401, 405, 408, 431)
"""Errors of the connection and the middleware, which any route may return."""
INFERENCE_ERRORS = (400, 403, 404, 413, 415, 422, 429, 503, 504)
"""Errors of routes that take images."""
OCTET_STREAM = "application/octet-stream"
BINARY = {"schema": {"type": "string", "format": "binary"}}
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}


def operation(summary: str, response: Any, errors: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the keyword arguments of a route decorator that describe it and its error responses."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted(errors):
        headers = {"headers": RETRY_AFTER} if status in (429, 503) else {}
        responses[status] = {"model": Error, "description": REASONS[status], **headers}
    return {"summary": summary, "response_model": response, "responses": responses}


def image_operation(summary: str, response: Any, max_images: int | None = None) -> dict[str, Any]:
    """Return the keyword arguments of the decorator of a route that takes an image or, with `max_images`, a list."""
    content: dict[str, Any] = dict.fromkeys(("image/*", OCTET_STREAM), BINARY)
    if max_images is not None:
        text = {"type": "string", "contentEncoding": "base64"}
        content[JSON] = {"schema": {"type": "array", "items": text, "minItems": 1, "maxItems": max_images}}
    body = {"required": True, "description": "An image file, unmodified.", "content": content}
    return operation(summary, response, INFERENCE_ERRORS) | {"openapi_extra": {"requestBody": body}}


def infer_operation(summary: str) -> dict[str, Any]:
    """Return the keyword arguments of the decorator of KServe inference.

    Requests and responses may be JSON followed by binary tensors. `build_openapi` adds the definitions of the schema.
    """
    schema = _infer_schema()
    del schema["$defs"]
    digits = {"type": "string", "pattern": "^[0-9]{1,9}$"}
    size: dict[str, Any] = {"name": JSON_SIZE_HEADER, "in": "header", "required": False, "schema": digits}
    size["description"] = "Length of the JSON before binary tensors."
    body = {"required": True, "content": {JSON: {"schema": schema}, OCTET_STREAM: BINARY}}
    details = operation(summary, InferResponse, INFERENCE_ERRORS)
    details["responses"] |= {200: {"content": {OCTET_STREAM: BINARY}}}
    return details | {"openapi_extra": {"requestBody": body, "parameters": [size]}}


def to_kserve_metadata(description: dict[str, Any]) -> dict[str, Any]:
    """Convert a description of /v1/models to KServe's format."""
    classes, shape = description["classes"], [description["channels"], *description["image_size"]]
    shapes = {"logits": [-1, classes], "probabilities": [-1, classes], "label": [-1]} if classes else {}
    shapes |= {"features": [-1, description["features"]]}
    pixels = {"name": "pixels", "datatype": "FP32", "shape": [-1, *shape]}
    inputs = [{"name": "image", "datatype": "BYTES", "shape": [-1]}, pixels]
    outputs = [
        {"name": name, "datatype": "BYTES" if name == "label" else "FP32", "shape": shape}
        for name, shape in shapes.items()
    ]
    metadata = {"name": description["name"], "versions": ["1"], "platform": "vitkit"}
    return metadata | {"inputs": inputs, "outputs": outputs}


def _infer_schema() -> dict[str, Any]:
    return InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")


def build_openapi(app: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI description of all routes, with the errors of middleware and connection."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    common = {str(status): {"description": REASONS[status], "content": content} for status in COMMON_ERRORS}
    for methods in schema["paths"].values():
        for details in methods.values():
            responses = details["responses"]
            if "HTTPValidationError" in str(responses.get("422")):  # FastAPI's default, which is never sent
                del responses["422"]
            details["responses"] = dict(sorted((common | responses).items()))
    components = schema["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    schema["components"]["schemas"] = dict(sorted((components | _infer_schema()["$defs"]).items()))
    return schema
