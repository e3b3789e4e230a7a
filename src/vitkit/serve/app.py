"""The line to the worker goes in, the routes come out: /v1 for people and scripts, /v2 for KServe's clients.

Routes are thin. They look at the query, hand the body on as it is, and pass back what the worker answers.
"""

import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from vitkit.serve import metrics, pages, runs, schemas
from vitkit.serve.answers import JSON, Refusal, encoded, nothing_here
from vitkit.serve.gate import Gate
from vitkit.serve.supervisor import Supervisor

Model = Annotated[
    str | None, Query(description="A model's name; the first where none is given.", pattern=r"^[A-Za-z0-9._-]+$")
]
Name = Annotated[str, Path(description="A model's name.", pattern=r"^[A-Za-z0-9._-]+$")]
Top = Annotated[int, Query(description="How many classes to name.", ge=1, le=100_000)]
Nearest = Annotated[int, Query(description="How many of the nearest classes to name.", ge=0, le=100_000)]
Layer = Annotated[int | None, Query(description="A layer, from 0: what each patch looks at in it.", ge=0, le=1000)]
Head = Annotated[str, Query(description="A head, from 0, or mean.", pattern=r"^(mean|[0-9]{1,4})$")]

SHAPE = re.compile(rb'"shape"\s*:\s*\[\s*(\d{1,9})')


class Service:
    """What the routes work with."""

    def __init__(self, supervisor: Supervisor, *, most_images: int) -> None:
        self.supervisor, self.line, self.most_images = supervisor, supervisor.line, most_images
        self.gate: Gate | None = None

    async def ask(self, request: Request, head: dict[str, Any], *, count: Callable[[bytearray], int]) -> Response:
        """Receive the body, wait in line, and pass on the answer."""
        assert self.gate is not None
        body = await self.gate.body(request.receive)
        try:
            cost = max(1, min(self.most_images, count(body)))
            answer = await self.line.ask(head, body, cost=cost, gone=connection_of(request))
        finally:
            self.gate.release(len(body))
        return Response(answer.body, status_code=answer.status, headers=answer.headers)


def connection_of(request: Request) -> Callable[[], bool]:
    """Whether the client has gone, as a question that costs nothing to ask."""
    cycle = getattr(request.scope.get("vitkit.receive"), "__self__", None)
    return lambda: bool(getattr(cycle, "disconnected", False))


def one(body: bytearray) -> int:
    """A raw body is one image."""
    return 1


def listed(body: bytearray) -> int:
    """About how many texts a JSON list holds: the worker reads it, this only says how much work it is.

    >>> listed(bytearray(b'["aGk=", "aGk="]'))
    2
    """
    return body.count(b'"') // 2


def shaped(body: bytearray, json_size: int | None) -> int:
    """How many images the shape in a KServe request speaks of, which stands before its data or behind; else, many.

    >>> shaped(bytearray(b'{"inputs": [{"shape": [3], "data": []}]}'), None)
    3
    """
    end = len(body) if json_size is None else json_size
    found = SHAPE.search(body, 0, min(4096, end)) or SHAPE.search(body, max(0, end - 4096), end)
    return int(found[1]) if found else sys.maxsize


def is_json(request: Request) -> bool:
    """Whether the body says that it is JSON; a form with files in it is neither that nor an image."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        raise Refusal(415, "a form is no image", hint="send the file itself as the body: curl --data-binary @cat.jpg")
    return kind == JSON or kind.endswith("+json")


def create_app(service: Service, *, runs_folder: FilePath | None = None) -> FastAPI:
    """All routes."""
    app = FastAPI(
        title="vitkit",
        version=version("vitkit"),
        description="Vision Transformers: labels, features and attention of images. Errors are JSON.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_errors(app)
    add_questions(app, service)
    add_models(app, service)
    add_kserve(app, service)
    app.include_router(runs.routes(runs_folder))
    pages.add_pages(app)

    app.openapi = lambda: description  # type: ignore[method-assign]

    @app.get("/metrics", summary="Numbers for Prometheus", response_class=PlainTextResponse)
    def show_metrics() -> Response:
        return Response(
            service.supervisor.metrics.text(), media_type=None, headers={"content-type": metrics.CONTENT_TYPE}
        )

    description = schemas.described(app)
    return app


def add_errors(app: FastAPI) -> None:
    """Whatever goes wrong is said in the server's own form."""

    @app.exception_handler(Refusal)
    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return Response(error.body(), status_code=error.status, media_type=JSON, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_bad_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = " ".join(str(part) for part in first.get("loc", ())[-1:])
        return Response(
            Refusal(400, f"{place}: {first.get('msg', 'not valid')}").body(), status_code=400, media_type=JSON
        )

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method = f"this address does not take {request.method[:10]}"
        said = {404: nothing_here(), 405: Refusal(405, method, hint="GET /docs says what it takes")}
        refusal = said.get(error.status_code, Refusal(error.status_code, str(error.detail)))
        return Response(refusal.body(), status_code=refusal.status, media_type=JSON, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, __: Exception) -> Response:
        body = Refusal(500, "the server failed on this request", hint="its log says where").body()
        return Response(body, status_code=500, media_type=JSON)


def add_questions(app: FastAPI, service: Service) -> None:
    """The routes that take images."""
    one_or_several = schemas.image_body(service.most_images)

    def asked(request: Request, do: str, model: str | None) -> tuple[dict[str, Any], dict[str, Any], bool]:
        several = is_json(request)
        about = service.supervisor.describe(model)
        return {"do": do, "model": about["name"], "json": several}, about, several

    @app.post(
        "/v1/predict",
        summary="The likeliest classes of an image, or of several",
        response_model=schemas.PredictedOne | schemas.PredictedSeveral,
        responses=schemas.errors(schemas.ASKING),
        openapi_extra=one_or_several,
    )
    async def predict(request: Request, model: Model = None, top: Top = 5, nearest: Nearest = 0) -> Response:
        head, about, several = asked(request, "predict", model)
        needs_classes(about)
        return await service.ask(request, head | {"top": top, "nearest": nearest}, count=listed if several else one)

    @app.post(
        "/v1/features",
        summary="What the model's head reads of an image, or of several",
        response_model=schemas.FeaturedOne | schemas.FeaturedSeveral,
        responses=schemas.errors(schemas.ASKING),
        openapi_extra=one_or_several,
    )
    async def features(request: Request, model: Model = None) -> Response:
        head, _, several = asked(request, "features", model)
        return await service.ask(request, head, count=listed if several else one)

    @app.post(
        "/v1/attention",
        summary="Where the model looks in an image",
        response_model=schemas.Attention | schemas.PatchAttention,
        responses=schemas.errors(schemas.ASKING),
        openapi_extra=schemas.image_body(None),
    )
    async def attention(
        request: Request, model: Model = None, top: Top = 5, layer: Layer = None, head: Head = "mean"
    ) -> Response:
        question, about, several = asked(request, "attention", model)
        if several:
            raise Refusal(415, "expected an image as the raw body, got JSON")
        if not about["attention"]:
            raise Refusal(400, "a ResNet has no attention", hint="ask a Vision Transformer")
        which = None if head == "mean" else int(head)
        if (layer or 0) >= about["layers"] or (which or 0) >= about["heads"]:
            raise Refusal(400, f"the model has {about['layers']} layers and {about['heads']} heads, counted from 0")
        return await service.ask(request, question | {"top": top, "layer": layer, "head": which}, count=one)


def needs_classes(about: dict[str, Any]) -> None:
    """Refuse to name classes where the model has none."""
    if not about["classes"]:
        raise Refusal(400, "the model has no classes to answer with", hint="ask for /v1/features")


def add_models(app: FastAPI, service: Service) -> None:
    """The routes that describe the models."""

    @app.get(
        "/v1/models",
        summary="All models",
        response_model=schemas.ModelList,
        responses=schemas.errors((503,)),
    )
    async def list_models() -> Response:
        if service.supervisor.models:
            service.supervisor.describe(None)
        lines = [
            {key: value for key, value in about.items() if key not in ("labels", "preprocessing")}
            for about in service.supervisor.descriptions.values()
        ]
        return Response(encoded({"models": lines}), media_type=JSON)

    @app.get(
        "/v1/models/{name}",
        summary="One model, its labels and its preprocessing",
        response_model=schemas.ModelPage,
        responses=schemas.errors((404, 503)),
    )
    async def show_model(name: Name) -> Response:
        return Response(encoded(service.supervisor.describe(name)), media_type=JSON)


def add_kserve(app: FastAPI, service: Service) -> None:
    """KServe's protocol, version 2."""
    supervisor = service.supervisor

    def not_ready() -> Refusal:
        return Refusal(503, "the models do not answer now", headers={"retry-after": "1"})

    @app.get("/v2", summary="The server", response_model=schemas.ServerMetadata)
    async def server() -> Response:
        said = {"name": "vitkit", "version": app.version, "extensions": ["binary_tensor_data"]}
        return Response(encoded(said), media_type=JSON)

    @app.get(
        "/v2/health/live",
        summary="Whether the process answers",
        response_model=schemas.Live,
    )
    async def live() -> Response:
        return Response(b'{"live": true}', media_type=JSON)

    @app.get(
        "/v2/health/ready",
        summary="Whether the models answer",
        response_model=schemas.Ready,
        responses=schemas.errors((503,)),
    )
    async def ready() -> Response:
        if not supervisor.ready:
            raise not_ready()
        return Response(b'{"ready": true}', media_type=JSON)

    about_model = schemas.errors((404, 503))

    @app.get(
        "/v2/models/{name}",
        summary="A model's inputs and outputs",
        response_model=schemas.ModelMetadata,
        responses=about_model,
    )
    async def model(name: Name) -> Response:
        return Response(encoded(schemas.metadata(supervisor.describe(name))), media_type=JSON)

    @app.get(
        "/v2/models/{name}/ready",
        summary="Whether a model answers",
        response_model=schemas.ModelReady,
        responses=about_model,
    )
    async def model_ready(name: Name) -> Response:
        supervisor.describe(name)
        if not supervisor.ready:
            raise not_ready()
        return Response(encoded({"name": name, "ready": True}), media_type=JSON)

    @app.post(
        "/v2/models/{name}/infer",
        summary="KServe's inference",
        response_model=schemas.InferAnswer,
        responses=schemas.inferred(),
        openapi_extra=schemas.infer_body(),
    )
    async def infer(request: Request, name: Name) -> Response:
        supervisor.describe(name)
        size = json_size(request)
        head = {"do": "infer", "model": name, "json": False, "json_size": size}
        return await service.ask(request, head, count=lambda body: shaped(body, size))


def json_size(request: Request) -> int | None:
    """How long the JSON before the raw tensors is; None where all is JSON."""
    text = request.headers.get(schemas.JSON_SIZE)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise Refusal(400, f"{schemas.JSON_SIZE} is not a number of bytes")
    return int(text)
