"""The files of the page go in, the routes that people open in a browser come out: the page, its parts, the addresses.

Nothing is fetched from elsewhere, and no file but those of the page can be reached.
"""

import html
import json
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI, Response

from vitkit.serve.answers import JSON, Refusal

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "json": JSON,
    "webmanifest": "application/manifest+json",
}
FRESH = {"cache-control": "no-cache"}


@cache
def page_files() -> dict[str, bytes]:
    """The content of each file of the page, by its name."""
    folder = resources.files("vitkit.serve.web")
    files = [entry for entry in folder.iterdir() if entry.is_file() and entry.name.rpartition(".")[2] in KINDS]
    return {entry.name: entry.read_bytes() for entry in files}


def page_file(name: str) -> Response:
    """One file of the page."""
    content = page_files().get(name)
    if content is None:
        raise Refusal(404, "the page has no such file")
    return Response(content, headers={"content-type": KINDS[name.rpartition(".")[2]]} | FRESH)


def add_pages(app: FastAPI) -> None:
    """The page, its files, and what the addresses are, for people and for programs."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page_file("index.html")

    @app.get("/web/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page_file(name)

    @cache
    def description() -> bytes:  # written once: a hundred kilobytes are too dear to write for each who asks
        return json.dumps(app.openapi()).encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(description(), media_type=JSON)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        if "docs.html" in page_files():
            return page_file("docs.html")
        return Response(addresses(app.openapi()), headers={"content-type": KINDS["html"]} | FRESH)


def addresses(schema: dict[str, Any]) -> str:
    """All addresses of an OpenAPI description as one plain page.

    >>> "GET /v1/models" in addresses({"paths": {"/v1/models": {"get": {"responses": {}}}}})
    True
    """
    rows = []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parameters = "".join(
                f"<li><code>{html.escape(each['name'])}</code> ({html.escape(each['in'])}) "
                f"{html.escape(each.get('description', ''))}</li>"
                for each in operation.get("parameters", ())
            )
            answers = "".join(
                f"<li><code>{html.escape(status)}</code> {html.escape(answer.get('description', ''))}</li>"
                for status, answer in operation["responses"].items()
            )
            title = f"{method.upper()} {html.escape(path)}"
            summary = html.escape(operation.get("summary", ""))
            rows.append(
                f"<section><h2><code>{title}</code></h2><p>{summary}</p><ul>{parameters}</ul>"
                f"<details><summary>Answers</summary><ul>{answers}</ul></details></section>"
            )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vitkit: addresses</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"></head><body><main><h1>Addresses of this server</h1>'
        '<p>For programs: <a href="/openapi.json">openapi.json</a>. <a href="/">The page</a>.</p>'
        f"{''.join(rows)}</main></body></html>"
    )
