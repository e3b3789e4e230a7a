"""HTTP routes: /v1 is vitkit's own API, /v2 the KServe protocol, and the web page.

Routes check the query, pass the body unread to the queue, and return the worker's response.
"""

import hashlib
import re
import sys
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from vitkit.server import metrics, runs_api, schemas
from vitkit.server.ipc import JSON, JSON_SIZE_HEADER, HTTPError, Message, encode_json, not_found
from vitkit.server.supervisor import Supervisor

DESCRIPTION = "Labels, features and attention of images by Vision Transformers. Errors are JSON."
MODEL_PATTERN = r"^[A-Za-z0-9._-]+$"
ModelQuery = Annotated[str | None, Query(description="Model name; the first model by default.", pattern=MODEL_PATTERN)]
ModelName = Annotated[str, Path(description="Model name.", pattern=MODEL_PATTERN)]
Top = Annotated[int, Query(description="Number of most probable classes.", ge=1, le=100_000)]
Nearest = Annotated[int, Query(description="Number of nearest classes by cosine similarity.", ge=0, le=100_000)]
LAYER = "Layer from 0: return its attention from patch to patch."
Layer = Annotated[int | None, Query(description=LAYER, ge=0, le=1000)]
Head = Annotated[str, Query(description="Head from 0, or mean.", pattern=r"^(mean|[0-9]{1,4})$")]

CONTENT_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
SHAPE = re.compile(rb'"shape"\s*:\s*\[\s*(\d{1,9})')


def json_response(value: object) -> Response:
    """Return a value as a JSON response."""
    return Response(encode_json(value), media_type=JSON)


def count_images(header: Message, body: bytearray) -> int:
    """Return an upper bound of the images in a body, which only the worker parses."""
    if header["task"] == "infer":  # the first shape near either end of the JSON; without one, assume the maximum
        end = len(body) if header["json_size"] is None else header["json_size"]
        match = SHAPE.search(body, 0, min(4096, end)) or SHAPE.search(body, max(0, end - 4096), end)
        return int(match[1]) if match else sys.maxsize
    return body.count(b'"') // 2 if header["is_list"] else 1  # strings in a JSON list


def has_json_body(request: Request) -> bool:
    """Return whether the body is declared as JSON; raise 415 for a form."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type.startswith("multipart/"):
        raise HTTPError(415, "the body is a form", hint="send the file itself as the body: curl --data-binary @cat.jpg")
    return content_type == JSON or content_type.endswith("+json")


def parse_json_size(request: Request) -> int | None:
    """Return the length of the JSON before binary tensors; None if the whole body is JSON."""
    text = request.headers.get(JSON_SIZE_HEADER)
    if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
        raise HTTPError(400, f"{JSON_SIZE_HEADER} is not a number of bytes")
    return None if text is None else int(text)


def create_app(supervisor: Supervisor) -> FastAPI:
    """Create the ASGI application with all routes."""
    # Without openapi_url, FastAPI adds no pages of its own.
    app = FastAPI(title="vitkit", version=version("vitkit"), description=DESCRIPTION, openapi_url=None)
    app.router.redirect_slashes = False
    add_error_handlers(app)
    add_inference_routes(app, supervisor)
    add_model_routes(app, supervisor)
    app.include_router(runs_api.create_router(supervisor.options.runs))
    add_page_routes(app)

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    def get_metrics() -> Response:
        return Response(supervisor.metrics.render(), headers={"content-type": metrics.CONTENT_TYPE})

    schema = schemas.build_openapi(app)
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Return every error as `{"error": …, "hint": …}`."""

    @app.exception_handler(HTTPError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        response = convert_error(error, method=request.method).to_response()
        return Response(response.body, status_code=response.status, headers=response.headers)


def convert_error(error: Exception, *, method: str) -> HTTPError:
    """Return the response to an exception; one of any other class is a bug."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = " ".join(str(part) for part in first.get("loc", ())[-1:])
        return HTTPError(400, f"{name}: {first.get('msg', 'not valid')}")
    if not isinstance(error, HTTPException):
        return HTTPError(500, "internal server error", hint="see the server's log")
    converted = HTTPError(error.status_code, str(error.detail))
    if error.status_code == 404:
        converted = not_found()
    elif error.status_code == 405:
        converted = HTTPError(405, f"this route has no method {method[:10]}", hint="see GET /docs")
    converted.headers |= dict(error.headers or {})
    return converted


def add_inference_routes(app: FastAPI, supervisor: Supervisor) -> None:
    """Add the routes that take images."""
    queue, max_images = supervisor.queue, supervisor.options.config.limits.images
    predictions = schemas.SinglePrediction | schemas.PredictionList
    feature_vectors = schemas.SingleFeatures | schemas.FeaturesList
    attention_maps = schemas.AttentionMaps | schemas.PatchAttention

    def start(request: Request, task: str, model: str | None) -> tuple[Message, dict[str, Any]]:
        is_list = has_json_body(request)
        description = supervisor.describe(model)
        return {"task": task, "model": description["name"], "is_list": is_list}, description

    async def process(request: Request, header: Message) -> Response:
        """Read the body, queue the request and return the worker's response."""
        body = await queue.read_body(request.receive)
        try:
            images = max(1, min(max_images, count_images(header, body)))
            is_disconnected = request.scope.get("vitkit.is_disconnected", lambda: False)
            response = await queue.process(header, body, images=images, is_disconnected=is_disconnected)
        finally:
            queue.release_body(len(body))
        return Response(response.body, status_code=response.status, headers=response.headers)

    @app.post("/v1/predict", **schemas.image_operation("Classify an image, or several", predictions, max_images))
    async def predict(request: Request, model: ModelQuery = None, top: Top = 5, nearest: Nearest = 0) -> Response:
        header, description = start(request, "predict", model)
        if not description["classes"]:
            raise HTTPError(400, "the model has no classes", hint="use /v1/features")
        return await process(request, header | {"top": top, "nearest": nearest})

    summary = "Compute features of an image, or several"

    @app.post("/v1/features", **schemas.image_operation(summary, feature_vectors, max_images))
    async def features(request: Request, model: ModelQuery = None) -> Response:
        return await process(request, start(request, "features", model)[0])

    @app.post("/v1/attention", **schemas.image_operation("Compute the attention maps of an image", attention_maps))
    async def attention(
        request: Request, model: ModelQuery = None, top: Top = 5, layer: Layer = None, head: Head = "mean"
    ) -> Response:
        header, description = start(request, "attention", model)
        if header["is_list"]:
            raise HTTPError(415, "expected an image as the raw body, got JSON")
        if not description["attention"]:
            raise HTTPError(400, "the model is a ResNet and has no attention", hint="choose a Vision Transformer")
        layers, heads = description["layers"], description["heads"]
        head_index = None if head == "mean" else int(head)
        if (layer or 0) >= layers or (head_index or 0) >= heads:
            raise HTTPError(400, f"the model has {layers} layers and {heads} heads, counted from 0")
        return await process(request, header | {"top": top, "layer": layer, "head": head_index})

    @app.post("/v2/models/{name}/infer", **schemas.infer_operation("Run KServe inference"))
    async def infer(request: Request, name: ModelName) -> Response:
        supervisor.describe(name)
        header = {"task": "infer", "model": name, "is_list": False, "json_size": parse_json_size(request)}
        return await process(request, header)


def add_model_routes(app: FastAPI, supervisor: Supervisor) -> None:
    """Add the routes that describe the server and its models, in vitkit's and in KServe's format."""

    def check_ready() -> None:
        if not supervisor.is_ready:
            raise HTTPError(503, "the models are not ready", headers={"retry-after": "1"})

    @app.get("/v1/models", **schemas.operation("List the models", schemas.ModelList, (503,)))
    async def list_models() -> Response:
        if supervisor.models:
            supervisor.describe(None)
        summaries = [description.copy() for description in supervisor.descriptions.values()]
        for each in summaries:
            del each["labels"], each["preprocessing"]
        return json_response({"models": summaries})

    summary = "Describe a model with labels and preprocessing"

    @app.get("/v1/models/{name}", **schemas.operation(summary, schemas.ModelDetails, (404, 503)))
    async def get_model(name: ModelName) -> Response:
        return json_response(supervisor.describe(name))

    @app.get("/v2", **schemas.operation("Describe the server", schemas.ServerMetadata))
    async def server() -> Response:
        return json_response({"name": "vitkit", "version": app.version, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live", **schemas.operation("Check that the server runs", schemas.Live))
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/v2/health/ready", **schemas.operation("Check that the models are ready", schemas.Ready, (503,)))
    async def ready() -> Response:
        check_ready()
        return json_response({"ready": True})

    summary = "Describe a model's inputs and outputs"

    @app.get("/v2/models/{name}", **schemas.operation(summary, schemas.ModelMetadata, (404, 503)))
    async def model(name: ModelName) -> Response:
        return json_response(schemas.to_kserve_metadata(supervisor.describe(name)))

    summary = "Check that a model is ready"

    @app.get("/v2/models/{name}/ready", **schemas.operation(summary, schemas.ModelReady, (404, 503)))
    async def model_ready(name: ModelName) -> Response:
        supervisor.describe(name)
        check_ready()
        return json_response({"name": name, "ready": True})


@cache
def load_static_files() -> dict[str, bytes]:
    """Return the content of each file in web/ by name. No other file can be requested."""
    entries = resources.files("vitkit.server").joinpath("web").iterdir()
    files = [entry for entry in entries if entry.is_file() and entry.name.rpartition(".")[2] in CONTENT_TYPES]
    return {entry.name: entry.read_bytes() for entry in files}


def serve_static_file(name: str, request: Request) -> Response:
    """Return a file of the page; browsers cache it and revalidate with its ETag."""
    content = load_static_files().get(name)
    if content is None:
        raise HTTPError(404, "no such file")
    headers = {"cache-control": "no-cache", "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=CONTENT_TYPES[name.rpartition(".")[2]])


def add_page_routes(app: FastAPI) -> None:
    """Add the page, its files, /docs and /openapi.json."""

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def page(request: Request) -> Response:
        return serve_static_file("index.html" if request.url.path == "/" else "docs.html", request)

    @app.get("/web/{name}", include_in_schema=False)
    async def static_file(name: str, request: Request) -> Response:
        return serve_static_file(name, request)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return json_response(app.openapi())
