"""The shapes of answers, as OpenAPI describes them; answers themselves are built elsewhere and not checked twice."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from vitkit.serve.answers import JSON


class Strict(BaseModel):
    """An object with these keys and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Error(Strict):
    """What was expected and came, and what to do."""

    error: str
    hint: str | SkipJsonSchema[None] = None


class Prediction(Strict):
    """A class and how likely it is."""

    label: str
    probability: float = Field(ge=0, le=1.000001)


class Near(Strict):
    """A class and the cosine between its direction and the image's features."""

    label: str
    similarity: float


class Predicted(Strict):
    """The likeliest classes of one image, and the nearest where they were asked for."""

    predictions: list[Prediction]
    nearest: list[Near] | SkipJsonSchema[None] = None


class PredictedOne(Predicted):
    """The answer for an image."""

    model: str


class Failed(Strict):
    """Why an image of several has no answer."""

    error: str


class PredictedSeveral(Strict):
    """The answers for several images, in their order."""

    model: str
    results: list[Predicted | Failed]


class Featured(Strict):
    """The features of one image."""

    features: list[float]


class FeaturedOne(Featured):
    """The answer for an image."""

    model: str


class FeaturedSeveral(Strict):
    """The answers for several images, in their order."""

    model: str
    results: list[Featured | Failed]


class Attention(Strict):
    """Where the model looks, seen from the token that its head reads."""

    model: str
    grid: tuple[int, int]
    layers: int
    heads: int
    predictions: list[Prediction]
    rollout: list[list[float]]
    maps: list[list[list[list[float]]]]


class PatchAttention(Strict):
    """What each patch looks at in one layer: row i is patch i's."""

    model: str
    grid: tuple[int, int]
    layer: int
    head: int | Literal["mean"]
    patches: list[list[float]]


class ModelLine(Strict):
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
    """All models; the first answers where none is named."""

    models: list[ModelLine]


class ModelPage(ModelLine):
    """A model with the names of its classes and what is done to an image."""

    labels: list[str]
    preprocessing: dict[str, Any]


class ServerMetadata(Strict):
    """KServe's description of a server."""

    name: str
    version: str
    extensions: list[str]


class Live(Strict):
    """The process answers."""

    live: bool


class Ready(Strict):
    """The models answer."""

    ready: bool


class ModelReady(Strict):
    """The model answers."""

    name: str
    ready: bool


class TensorMetadata(Strict):
    """KServe's description of an input or output; -1 is any number."""

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
    """How a tensor travels."""

    binary_data_size: int | None = Field(default=None, ge=0)
    binary_data: bool | None = None


class InferInput(BaseModel):
    """One input: files in base64, or prepared pixels."""

    name: Literal["image", "pixels"]
    datatype: Literal["BYTES", "FP32"]
    shape: list[int] = Field(min_length=1)
    parameters: TensorParameters | None = None
    data: list[Any] | None = None


class InferOutputWish(BaseModel):
    """An output that is asked for."""

    name: Literal["logits", "probabilities", "label", "features"]
    parameters: TensorParameters | None = None


class InferRequest(BaseModel):
    """KServe's question."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: list[InferInput] = Field(min_length=1, max_length=1)
    outputs: list[InferOutputWish] | None = None


class InferOutput(Strict):
    """An output: data here, or its size where its bytes follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | SkipJsonSchema[None] = None
    data: list[float] | list[str] | SkipJsonSchema[None] = None


class InferAnswer(Strict):
    """KServe's answer."""

    model_name: str
    model_version: str
    id: str | SkipJsonSchema[None] = None
    outputs: list[InferOutput]


REASONS = {
    400: "The request is not what it should be.",
    401: "The token is missing or wrong.",
    403: "A page of another site may not send images here.",
    404: "There is none of this name.",
    405: "The address does not do that.",
    408: "The request was not received in time.",
    413: "Too many bytes or images.",
    415: "The body is encoded, or no image.",
    422: "The image was refused, or cannot be read.",
    429: "No room: send it again after Retry-After seconds.",
    431: "The headers are too long.",
    500: "The server failed.",
    503: "The models do not answer now: send it again after Retry-After seconds.",
    504: "No answer within the deadline.",
}
EVERYWHERE = (400, 401, 405, 408, 431)
"""What any address may answer: the gate and the connection stand before all of them."""
ASKING = (400, 403, 404, 413, 415, 422, 429, 503, 504)
"""What an address that takes images may answer as well."""
OCTETS = "application/octet-stream"
RAW = {"schema": {"type": "string", "format": "binary"}}
JSON_SIZE = "Inference-Header-Content-Length"
WAITS = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}


def errors(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for OpenAPI.

    >>> errors((404,))[404]["description"]
    'There is none of this name.'
    """
    return {
        status: {"model": Error, "description": REASONS[status]} | ({"headers": WAITS} if status in (429, 503) else {})
        for status in sorted(statuses)
    }


def inferred() -> dict[int | str, dict[str, Any]]:
    """The answers of KServe's inference, which may be JSON with raw tensors behind it."""
    return {200: {"content": {OCTETS: RAW}}, **errors(ASKING)}


def metadata(description: dict[str, Any]) -> dict[str, Any]:
    """What /v2/models/NAME says of a model that /v1/models describes.

    >>> about = {"name": "pets", "classes": 2, "channels": 3, "image_size": [32, 32], "features": 16}
    >>> metadata(about)["outputs"][0]
    {'name': 'logits', 'datatype': 'FP32', 'shape': [-1, 2]}
    """
    classes, sides = description["classes"], [description["channels"], *description["image_size"]]
    shapes = {"logits": [-1, classes], "probabilities": [-1, classes], "label": [-1]} if classes else {}
    shapes |= {"features": [-1, description["features"]]}
    return {
        "name": description["name"],
        "versions": ["1"],
        "platform": "vitkit",
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
            {"name": "pixels", "datatype": "FP32", "shape": [-1, *sides]},
        ],
        "outputs": [
            {"name": name, "datatype": "BYTES" if name == "label" else "FP32", "shape": shape}
            for name, shape in shapes.items()
        ],
    }


def image_body(most: int | None) -> dict[str, Any]:
    """The body of a route that takes an image or, where `most` says how many, a list of them."""
    content: dict[str, Any] = dict.fromkeys(("image/*", OCTETS), RAW)
    if most is not None:
        text = {"type": "string", "contentEncoding": "base64"}
        content[JSON] = {"schema": {"type": "array", "items": text, "minItems": 1, "maxItems": most}}
    return {"requestBody": {"required": True, "description": "An image file as it is.", "content": content}}


def infer_body() -> dict[str, Any]:
    """The body of KServe's inference; what the schema refers to is put beside the others by `described`."""
    schema = _infer_schema()
    del schema["$defs"]
    content = {JSON: {"schema": schema}, OCTETS: RAW}
    size = {
        "name": JSON_SIZE,
        "in": "header",
        "required": False,
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"},
    }
    size["description"] = "How long the JSON before the raw tensors is; only where there are any."
    return {"requestBody": {"required": True, "content": content}, "parameters": [size]}


def _infer_schema() -> dict[str, Any]:
    return InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")


def described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of all routes, with what the gate and the connection may answer in their place."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    said = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    common = {str(status): {"description": REASONS[status], "content": said} for status in EVERYWHERE}
    for operations in schema["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):  # FastAPI's own, which is never sent
                del answers["422"]
            operation["responses"] = dict(sorted((common | answers).items()))
    components = schema["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    schema["components"]["schemas"] = dict(sorted((components | _infer_schema()["$defs"]).items()))
    return schema
