"""HTTP connections with time and size limits, on top of uvicorn's httptools protocol.

uvicorn has no limit on the time to receive a request, on the size of its headers, or on the time a client takes to read
a response. Every connection notes since when it waits for its client, and `close_if_overdue` is called four times a
second. A request for which the queue has no room is rejected here as soon as its headers are read.
"""

import asyncio
import heapq
import re
import time
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from vitkit.core.errors import ConfigError
from vitkit.server.config import LimitsConfig
from vitkit.server.ipc import HTTPError
from vitkit.server.middleware import NO_STORE, SECURITY_HEADERS, RequestFilter, Scope

MIN_UVICORN = (0, 45)
"""First version that starts requests with `_start_asgi_task`, a private method that `Connection` overrides."""
MAX_HEADER_BYTES = 65_536
"""Bytes of the request line and headers."""
MAX_PIPELINED = 8
"""Requests that may wait on one connection for the one before them."""
DRAIN_GRACE = 1.0
"""Seconds that an idle connection may still start a request in after a stop was requested."""
COMMON_HEADERS = b"".join(b"%b: %b\r\n" % header for header in (*SECURITY_HEADERS, NO_STORE))


def check_uvicorn(version: str = uvicorn.__version__, protocol: Any = HttpToolsProtocol) -> None:
    """Raise an error unless uvicorn calls the private methods that `Connection` overrides: limits would not apply."""
    is_old = tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_UVICORN
    is_called = "_start_asgi_task" in protocol.on_headers_complete.__code__.co_names
    if is_old or not is_called or not hasattr(protocol, "_unset_keepalive_if_required"):
        hint = "pip install --upgrade 'vitkit[serve]'" if is_old else "install the version in constraints.txt"
        raise ConfigError("unsupported version of uvicorn", expected="0.45 or newer", got=version, hint=hint)


check_uvicorn()


def encode_error(error: HTTPError, *headers: tuple[bytes, bytes]) -> bytes:
    """Encode an error that the connection itself sends."""
    response = error.to_response()
    lines = [b"%b: %b\r\n" % header for header in (*headers, *response.raw_headers())]
    return b"".join((STATUS_LINE[error.status], COMMON_HEADERS, *lines, b"\r\n", response.body))


class TooManyPipelinedError(Exception):
    """Stops the parser: the client sends requests without reading responses."""


class Connection(HttpToolsProtocol):
    """A client connection with limits."""

    limits: LimitsConfig
    request_filter: RequestFilter
    clock: Callable[[], float] = staticmethod(time.monotonic)
    is_draining = False

    waiting_since: float | None = None
    """When the wait for the client's request, or the rest of it, began; None while a response is due."""
    is_receiving = False
    """Whether a request has begun and is not complete."""
    write_blocked_since: float | None = None
    closing_since: float | None = None
    in_headers = False
    header_bytes = 0
    body_bytes = 0
    framing_bytes = 0
    """Bytes after the headers that are not body: chunk sizes and trailers."""
    discarded_bytes = 0
    closes_after_request = False
    may_reject_early = False
    """Whether the headers being parsed are the first of the received data."""
    running: RequestResponseCycle | None = None
    """The request that is being answered, or the last one; uvicorn's `cycle` may be a later one in the pipeline."""

    @property
    def is_response_due(self) -> bool:
        """Whether an earlier request is not answered: until then the next one waits for the server."""
        running = self.running
        return running is not None and not running.response_complete and (self.in_headers or running is not self.cycle)

    # Connection events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; beyond the limit, close those that were idle for longest."""
        super().connection_made(transport)
        self.waiting_since = self.clock()
        if len(self.connections) <= self.limits.connections:
            return
        others = [cast("Connection", each) for each in self.connections if each is not self]
        waiting = [each for each in others if each.waiting_since is not None and not each.is_response_due]
        idle = [each for each in waiting if not each.transport.is_closing()]
        if not idle:
            self.send_and_close(HTTPError(503, "too many connections", headers={"retry-after": "1"}))
        # Several at once, so that a flood of connections is not searched again for each of them.
        several = 1 + self.limits.connections // 64
        for each in heapq.nsmallest(several, idle, key=lambda each: each.waiting_since or 0.0):
            each.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request; uvicorn notifies only the last one, which may still wait in the pipeline."""
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and check the size of everything that is not body."""
        if self.transport.is_closing():
            return
        if self.in_headers or not self.is_receiving:
            self.header_bytes += len(data)
        else:
            self.framing_bytes += len(data)
        self.may_reject_early = True
        super().data_received(data)
        self.may_reject_early = False  # requests taken from the pipeline later have others behind them
        if self.in_headers and self.header_bytes > MAX_HEADER_BYTES:
            self.send_and_close(HTTPError(431, f"the headers are longer than {MAX_HEADER_BYTES:,} bytes"))
        elif self.is_receiving and self.framing_bytes > MAX_HEADER_BYTES + self.body_bytes // 8:
            self.send_and_close(HTTPError(431, f"chunk sizes and trailers exceed {MAX_HEADER_BYTES:,} bytes"))

    def pause_writing(self) -> None:
        """Note that the client does not read its response."""
        self.write_blocked_since = self.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self.write_blocked_since = None
        super().resume_writing()

    # Parser events

    def on_message_begin(self) -> None:
        """Start to measure a request."""
        super().on_message_begin()
        self.waiting_since, self.is_receiving = self.clock(), True
        self.in_headers, self.discarded_bytes = True, 0
        self.body_bytes = self.framing_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header; trailers are ignored."""
        if self.in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request: it may be rejected before its body arrives."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise TooManyPipelinedError
        super().on_headers_complete()
        self.may_reject_early = False
        self.in_headers, self.header_bytes = False, 0
        # Closing while the client sends would reset the connection before it reads why it was rejected. A client that
        # waits for 100-continue sends nothing yet and may never: then the connection closes with the response.
        self.closes_after_request = not self.cycle.keep_alive or self.is_draining or self.expect_100_continue
        self.cycle.keep_alive = not self.expect_100_continue

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body; after the response the rest is discarded, up to a limit."""
        self.body_bytes += len(body)
        self.framing_bytes -= len(body)
        if self.cycle.response_complete:
            self.discarded_bytes += len(body)
            if self.discarded_bytes > 4 * self.limits.bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self.is_receiving = False
        if self.cycle.response_complete:
            self.waiting_since = self.clock()
            if self.closes_after_request:
                self.transport.close()
        else:
            self.waiting_since = None
            if self.closes_after_request or self.is_draining:
                self.cycle.keep_alive = False
        super().on_message_complete()

    # Responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.running = cycle
        scope = cast("Scope", cycle.scope)
        is_plain = cycle.keep_alive and not (self.is_draining or self.expect_100_continue or self.flow.write_paused)
        error = self.request_filter.reject_early(scope) if self.may_reject_early and is_plain else None
        if error is not None:
            self.reject(cycle, error)
            return
        scope["vitkit.is_disconnected"] = lambda: cycle.disconnected
        super()._start_asgi_task(cycle, app)

    def reject(self, cycle: RequestResponseCycle, error: HTTPError) -> None:
        """Answer a request whose body is still to come, without a task for it."""
        self.transport.write(encode_error(error, *self.server_state.default_headers))
        cycle.response_started = cycle.response_complete = True
        cycle.on_response = lambda: None  # break the reference cycle to this connection
        self.server_state.total_requests += 1

    def on_response_complete(self) -> None:
        """Wait for the next request, or start the next one in the pipeline."""
        if self.is_receiving and (self.in_headers or self.running is not self.cycle):
            self.waiting_since = self.clock()  # the next request, which had to wait, may be received now
        super().on_response_complete()
        self._unset_keepalive_if_required()  # close_if_overdue does that, for idle connections of every kind
        if not self.is_receiving and self.cycle.response_complete:  # unless a pipelined request is running
            self.waiting_since = self.clock()

    def shutdown(self) -> None:
        """Make the present request the last one: the server drains."""
        if self.running is not None and not self.cycle.response_complete and not self.is_receiving:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        self.send_and_close(HTTPError(400, "the request is not valid HTTP/1.1"))

    def send_and_close(self, error: HTTPError) -> None:
        """Send an error, unless it would be taken for the response to an earlier request, and close the connection."""
        if self.transport.is_closing():
            return
        is_earlier = self.in_headers or not self.is_receiving
        is_due = self.running is not None and not self.cycle.response_complete
        if not (is_due and (is_earlier or self.cycle.response_started)) and not self.pipeline:
            self.transport.write(encode_error(error, (b"connection", b"close")))
        self.transport.close()

    # Deadlines

    def close_if_overdue(self, now: float) -> None:
        """Close the connection if it has waited too long for its client."""
        limits = self.limits
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
            if now - self.closing_since > limits.receive:
                self.transport.abort()
        elif self.write_blocked_since is not None and now - self.write_blocked_since > limits.receive:
            self.transport.abort()
        elif self.waiting_since is None or self.is_response_due:
            return
        elif self.is_receiving:
            if now - self.waiting_since <= limits.receive:
                return
            if self.running is not None and self.cycle.response_complete and not self.in_headers:
                self.transport.abort()  # it was answered, and still sends
            else:
                self.send_and_close(HTTPError(408, f"the request was not received within {limits.receive:g} s"))
        else:
            has_unread = self.transport.get_write_buffer_size() > 0
            timeout = limits.keep_alive if self.running is not None and not has_unread else limits.receive
            if self.is_draining and not has_unread:
                timeout = min(DRAIN_GRACE, timeout)
            if now - self.waiting_since > timeout:
                self.transport.abort() if has_unread else self.transport.close()


def create_connection_class(
    limits: LimitsConfig, request_filter: RequestFilter, *, clock: Callable[[], float] = time.monotonic
) -> type[Connection]:
    """Bind arguments to a subclass: uvicorn creates one object per connection and passes none of ours."""
    attributes = {"limits": limits, "request_filter": request_filter, "clock": staticmethod(clock)}
    return type("LimitedConnection", (Connection,), attributes)
