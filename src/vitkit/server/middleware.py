"""ASGI middleware that rejects requests by their headers, before their body is read.

It is raw ASGI, because a rejection must be cheap: that is what keeps throughput at its peak under overload.
"""

import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from vitkit.server.config import LOOPBACK_NAMES, ServerOptions, is_loopback
from vitkit.server.ipc import HTTPError, not_found
from vitkit.server.queue import QueueFull, Receive, RequestQueue

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_SECURITY_POLICY = (
    b"default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
SECURITY_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
NO_STORE = (b"cache-control", b"no-store")

INFERENCE_ROUTE = "/v2/models/{name}/infer"
ROUTES = frozenset(
    {"/", "/docs", "/openapi.json", "/metrics", "/web/{name}"}
    | {"/v1/models", "/v1/predict", "/v1/features", "/v1/attention", "/v1/runs", "/v1/models/{name}", "/v1/runs/{name}"}
    | {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{name}", "/v2/models/{name}/ready", INFERENCE_ROUTE}
)
ROUTE_PATTERNS = [(re.compile(re.sub(r"{\w+}", "[^/]+", route)), route) for route in ROUTES if "{" in route]
QUEUED_ROUTES = frozenset({"/v1/predict", "/v1/features", "/v1/attention", INFERENCE_ROUTE})
PUBLIC_ROUTES = frozenset({"/", "/docs", "/web/{name}", "/v2/health/live", "/v2/health/ready"})

UNIQUE_HEADERS = {b"host": "Host", b"authorization": "Authorization"}
"""Headers that decide about access: a proxy and this server might each read another one of two."""

access_log = logging.getLogger("vitkit.server.access")


def match_route(path: str) -> str:
    """Return the route of a path as a metrics label: one of a few, whatever clients request."""
    if path in ROUTES:
        return path
    return next((route for pattern, route in ROUTE_PATTERNS if pattern.fullmatch(path)), "other")


class AllowedHosts:
    """The host names by which clients may address the server."""

    def __init__(self, host: str, extra_names: Iterable[str] = ()) -> None:
        self.names = {name.lower() for name in (*LOOPBACK_NAMES, host, *extra_names)}
        self.allows_addresses = not is_loopback(host)

    def matches(self, header: bytes) -> bool:
        """Return whether a Host header names this server. An IP address cannot be a rebound DNS name."""
        text = header.decode("latin-1").strip().lower()
        name = re.sub(r":\d*$", "", text) if not text.endswith("]") else text
        name = name.removeprefix("[").removesuffix("]").removesuffix(".")
        if name in self.names or "*" in self.names:
            return True
        try:
            return self.allows_addresses and bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class RequestFilter:
    """ASGI middleware: checks the headers, adds security headers, counts and logs the response."""

    def __init__(self, app: App, options: ServerOptions, *, queue: RequestQueue) -> None:
        self.app, self.queue, self.metrics = app, queue, queue.metrics
        self.hosts, self.access_log = AllowedHosts(options.host, options.config.hosts), options.access_log
        self.token = None if options.token is None else options.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it to the routes."""
        if scope["type"] != "http":
            return
        start = time.perf_counter()
        if "/versions/1" in scope["path"]:  # KServe clients may name a model's version, and there is one
            scope["path"] = re.sub(r"^(/v2/models/[^/]+)/versions/1(?=/|$)", r"\1", scope["path"])
        route = match_route(scope["path"])
        status = 500

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append(NO_STORE)
            await send(message)

        try:
            self.check(scope, route)
        except HTTPError as error:
            response = error.to_response()
            start_message = {"type": "http.response.start", "status": error.status, "headers": response.raw_headers()}
            await send_with_headers(start_message)
            await send({"type": "http.response.body", "body": response.body})
        else:
            # HEAD is GET for the routes; the connection omits the body.
            forwarded = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(forwarded, receive, send_with_headers)
        finally:
            self.record(scope, route, status, seconds=time.perf_counter() - start)

    def reject_early(self, scope: Scope) -> QueueFull | None:
        """Return the rejection of a valid request for which the queue has no room, and count it as answered.

        The connection sends it without creating a task, for a tenth of the CPU time of a request that is let through.
        """
        if self.queue.has_room():
            return None
        route = match_route(scope["path"])
        try:
            self.check(scope, route)
        except HTTPError as error:
            if isinstance(error, QueueFull):
                self.record(scope, route, error.status, seconds=0.0)
                return error
        return None

    def record(self, scope: Scope, route: str, status: int, *, seconds: float) -> None:
        """Count and log a response."""
        self.metrics.record_response(route, status, seconds)
        if self.access_log:
            client, method, path = (scope.get("client") or ("?",))[0], scope["method"], scope["path"][:200]
            fields = {"client": client, "method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
            message = f"{client} {method} {path} {status} {1e3 * seconds:.1f} ms"
            access_log.info("%s", message, extra={"fields": fields})

    def check(self, scope: Scope, route: str) -> None:
        """Raise an `HTTPError` for a request that can be rejected by its headers."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in UNIQUE_HEADERS and name in headers:
                raise HTTPError(400, f"the request has two {UNIQUE_HEADERS[name]} headers")
            headers[name] = value
        host = headers.get(b"host")
        if host is None or not self.hosts.matches(host):
            raise HTTPError(400, "the Host header is not a name of this server", hint="allow the name with hosts=NAME")
        if self.token is not None and route not in PUBLIC_ROUTES:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token):  # in constant time
                hint = "send Authorization: Bearer TOKEN"
                challenge = {"www-authenticate": "Bearer"}
                raise HTTPError(401, "the token is missing or wrong", hint=hint, headers=challenge)
        if route == "other":
            raise not_found()
        if scope["method"] != "POST":
            return
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise HTTPError(403, "pages of other sites may not send images")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HTTPError(415, "the body has a Content-Encoding", hint="send it without compression")
        length = int(headers.get(b"content-length", 0))
        self.queue.check_body(length, buffered=self.queue.buffered + length)
        if route in QUEUED_ROUTES and not self.queue.has_room():
            raise QueueFull(self.queue.retry_after)
