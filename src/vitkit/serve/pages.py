"""The files of the page go in, the routes that people open in a browser come out: the page, its parts, the addresses.

Nothing is fetched from elsewhere, and no file but those of the page can be reached.
"""

import hashlib
import json
from functools import cache
from importlib import resources

from fastapi import FastAPI, Request, Response

from vitkit.serve.answers import JSON, Refusal

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


@cache
def page_files() -> dict[str, bytes]:
    """The content of each file of the page, by its name."""
    folder = resources.files("vitkit.serve.web")
    files = [entry for entry in folder.iterdir() if entry.is_file() and entry.name.rpartition(".")[2] in KINDS]
    return {entry.name: entry.read_bytes() for entry in files}


def page_file(name: str, request: Request) -> Response:
    """One file of the page; browsers keep it, and ask each time whether it is still the same."""
    content = page_files().get(name)
    if content is None:
        raise Refusal(404, "the page has no such file")
    headers = {"cache-control": "no-cache", "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers | {"content-type": KINDS[name.rpartition(".")[2]]})


def add_pages(app: FastAPI) -> None:
    """The page, its files, and what the addresses are, for people and for programs."""

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return page_file("index.html", request)

    @app.get("/web/{name}", include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        return page_file(name, request)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return page_file("docs.html", request)

    @cache
    def description() -> bytes:  # written once: a hundred kilobytes are too dear to write for each who asks
        return json.dumps(app.openapi()).encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(description(), media_type=JSON)
