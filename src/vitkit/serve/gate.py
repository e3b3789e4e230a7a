"""A request's headers go in; it is let through to the routes, or refused before its body is read.

Raw ASGI, because a refusal must cost next to nothing: what is unwelcome, too large, encoded or too much ends here.
"""

import hmac
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from vitkit.serve.answers import JSON, Refusal, nothing_here
from vitkit.serve.batching import Line
from vitkit.serve.config import LOOPBACK_NAMES, LimitsConfig, is_loopback
from vitkit.serve.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = [
    b"default-src 'self'",
    b"img-src 'self' blob: data:",
    b"object-src 'none'",
    b"base-uri 'none'",
    b"form-action 'none'",
    b"frame-ancestors 'none'",
]
SECURITY = [
    (b"content-security-policy", b"; ".join(POLICY)),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
NO_STORE = (b"cache-control", b"no-store")

FIXED = (
    "/",
    "/docs",
    "/openapi.json",
    "/metrics",
    "/v1/models",
    "/v1/predict",
    "/v1/features",
    "/v1/attention",
    "/v1/runs",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
)
PATTERNS = [
    (re.compile(r"/web/.*"), "/web/{file}"),
    (re.compile(r"/v1/models/[^/]+"), "/v1/models/{name}"),
    (re.compile(r"/v1/runs/[^/]+"), "/v1/runs/{name}"),
    (re.compile(r"/v2/models/[^/]+"), "/v2/models/{name}"),
    (re.compile(r"/v2/models/[^/]+/ready"), "/v2/models/{name}/ready"),
    (re.compile(r"/v2/models/[^/]+/infer"), "/v2/models/{name}/infer"),
]
WORK = frozenset({"/v1/predict", "/v1/features", "/v1/attention", "/v2/models/{name}/infer"})
PUBLIC = frozenset({"/", "/docs", "/web/{file}", "/v2/health/live", "/v2/health/ready"})


def route_of(path: str) -> str:
    """The route of a path, for counting: one of a few, whatever strangers ask for.

    >>> route_of("/v2/models/pets/infer"), route_of("/../etc/passwd")
    ('/v2/models/{name}/infer', 'other')
    """
    if path in FIXED:
        return path
    return next((route for pattern, route in PATTERNS if pattern.fullmatch(path)), "other")


class Hosts:
    """The names by which clients may call the server.

    >>> hosts = Hosts("127.0.0.1", ["pets.example"])
    >>> hosts.know(b"localhost:8000"), hosts.know(b"pets.example"), hosts.know(b"evil.example")
    (True, True, False)
    """

    def __init__(self, host: str, others: Iterable[str] = ()) -> None:
        self.names = {name.lower() for name in (*LOOPBACK_NAMES, host, *others)}
        self.any_address = not is_loopback(host)

    def know(self, header: bytes) -> bool:
        """Whether a Host header names this server. An address cannot be a stranger's name for it."""
        text = header.decode("latin-1").strip().lower()
        name = re.sub(r":\d*$", "", text) if not text.endswith("]") else text
        name = name.removeprefix("[").removesuffix("]").removesuffix(".")
        if name in self.names or "*" in self.names:
            return True
        if not self.any_address:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Gate:
    """The ASGI application that stands before the routes."""

    def __init__(
        self, app: App, *, line: Line, limits: LimitsConfig, hosts: Hosts, metrics: Metrics, token: str | None
    ) -> None:
        self.app, self.line, self.limits, self.hosts, self.metrics = app, line, limits, hosts, metrics
        self.token = None if token is None else token.encode()
        self.buffered = 0
        self.log: Callable[[str], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or hand on one request."""
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        if "/versions/1" in scope["path"]:  # KServe's clients may name a model's version, and there is one
            scope["path"] = re.sub(r"^(/v2/models/[^/]+)/versions/1(?=/|$)", r"\1", scope["path"])
        route = route_of(scope["path"])
        status = 500

        async def guarded(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"] = [*message.get("headers", ()), *SECURITY]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append(NO_STORE)
            await send(message)

        scope["vitkit.receive"] = receive
        try:
            self.check(scope, route)
        except Refusal as refusal:
            await refuse(guarded, refusal)
        else:
            # HEAD is GET to the routes; the connection knows better, and sends no body.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(asked, receive, guarded)
        finally:
            self.answered(scope, route, status, seconds=time.perf_counter() - began)

    def full(self, scope: Scope) -> Refusal | None:
        """The refusal of a request that has come at a moment when there is no room for it, and is otherwise welcome.

        It is counted as answered: a connection says it at once, for a tenth of what a request costs that is let in.
        """
        if self.line.has_room():
            return None
        route = route_of(scope["path"])
        try:
            self.check(scope, route)
        except Refusal as refusal:
            if refusal.status == 429:
                self.answered(scope, route, 429, seconds=0.0)
                return refusal
        return None

    def answered(self, scope: Scope, route: str, status: int, *, seconds: float) -> None:
        """Count and note an answer."""
        if status == 429:
            self.metrics.refused.inc()
        self.metrics.answered(route, status, seconds)
        if self.log is not None:
            client = (scope.get("client") or ("?",))[0]
            self.log(f"{client} {scope['method']} {scope['path'][:200]} {status} {1e3 * seconds:.1f} ms")

    def check(self, scope: Scope, route: str) -> None:
        """Refuse what can be refused by its headers."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host" and name in headers:
                raise Refusal(400, "the Host header is there twice")
            headers[name] = value
        host = headers.get(b"host")
        if host is None or not self.hosts.know(host):
            raise Refusal(
                400, "this server does not go by that name", hint="add the name to its setting hosts: hosts=NAME"
            )
        if self.token is not None and route not in PUBLIC:
            self.check_token(headers.get(b"authorization", b""))
        if route == "other":
            raise nothing_here()
        if scope["method"] != "POST":
            return
        if headers.get(b"sec-fetch-site") == b"cross-site":
            raise Refusal(403, "a page of another site may not send images here")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "the body is encoded", hint="send it as it is, without Content-Encoding")
        length = headers.get(b"content-length")
        if length is not None and int(length) > self.limits.bytes:
            raise self.too_large(int(length))
        if route in WORK and (not self.line.has_room() or self.buffered + int(length or 0) > self.limits.buffer):
            raise self.line.busy()

    def check_token(self, given: bytes) -> None:
        """Refuse whoever does not know the token; how long that takes does not depend on how near they are."""
        scheme, _, said = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(said.strip(), self.token or b""):
            raise Refusal(
                401,
                "the token is missing or wrong",
                hint="send it as Authorization: Bearer TOKEN",
                headers={"www-authenticate": "Bearer"},
            )

    def too_large(self, size: int) -> Refusal:
        """The refusal of a body that is too large."""
        return Refusal(413, f"the body is too large: expected at most {self.limits.bytes:,} bytes, got {size:,}")

    async def body(self, receive: Receive) -> bytearray:
        """The whole body of a request, which is counted until `release`; a Refusal as soon as it is too large."""
        body = bytearray()  # grows in its place: pieces that are joined would be there twice
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refusal(408, "the client has gone")
                if chunk := message["body"]:
                    body += chunk
                    self.buffered += len(chunk)
                    if len(body) > self.limits.bytes:
                        raise self.too_large(len(body))
                    if self.buffered > self.limits.buffer:
                        raise self.line.busy()
                if not message.get("more_body", False):
                    return body
        except BaseException:
            self.release(len(body))
            raise

    def release(self, size: int) -> None:
        """A body is no longer held."""
        self.buffered -= size


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answer with a refusal."""
    body = refusal.body()
    headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
