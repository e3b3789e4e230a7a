"""Bytes of a connection go in, requests come out; a client that takes too long over one, or over its answer, is let go.

uvicorn has no limit on the time to receive a request in, nor on its headers. This adds both to its protocol: every
connection notes since when it waits for the client, and a sweep four times a second ends those that wait too long.
A request that there is no room for is refused here, once its headers are read: a server that has too much to do should
not do much to say so.
"""

import asyncio
import heapq
import time
from collections.abc import Iterable
from typing import cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from vitkit.serve.answers import JSON, Refusal, error_body
from vitkit.serve.config import LimitsConfig
from vitkit.serve.gate import NO_STORE, SECURITY, Gate, Scope

MOST_HEADERS = 65_536
"""Bytes of the request line and headers."""
MOST_PIPELINED = 8
"""Requests that may wait on one connection for the one before them: nobody who reads the answers sends more."""
SWEEP = 0.25
LAST_CALL = 1.0
"""Seconds that a silent connection may still send a request in, once the server drains."""


ALWAYS = b"".join(b"%b: %b\r\n" % header for header in (*SECURITY, NO_STORE))
"""Headers of what a connection says itself, as of all other answers."""


def answer(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """An answer as it goes over the wire."""
    lines = [*(b"%b: %b\r\n" % header for header in headers), b"content-length: %d\r\n\r\n" % len(body)]
    return b"".join((STATUS_LINE[status], ALWAYS, *lines, body))


class TooManyError(Exception):
    """More requests came at once than a client reads the answers of; raised so that the parser goes no further."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    limits: LimitsConfig
    gate: Gate
    draining = False

    # What is known of it

    waiting_since: float | None = None
    """When the wait for the client's request, or the rest of it, began; None while the server owes an answer."""
    receiving = False
    """Whether a request has begun and is not whole."""
    writing_since: float | None = None
    closing_since: float | None = None
    header_bytes = 0
    in_headers = False
    body_bytes = 0
    other_bytes = 0
    """What came after the headers and is no body: the sizes of chunks and, behind them, more headers."""
    closes = False
    """Whether the connection ends with the present request."""
    discarded = 0
    deciding = False
    """Whether headers are being read that are the first of what was received together."""
    running: RequestResponseCycle | None = None

    @property
    def had_request(self) -> bool:
        """Whether the headers of a request have come; uvicorn has no cycle before."""
        return bool(self.cycle)

    @property
    def owes_answer(self) -> bool:
        """Whether the answer to an earlier request is due: until then it is us whom the next one waits for."""
        running = self.running
        return running is not None and not running.response_complete and (self.in_headers or running is not self.cycle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Someone connected; where there is no room, the one that has been silent for longest goes."""
        super().connection_made(transport)
        self.waiting_since = time.monotonic()
        if len(self.connections) > self.limits.connections:
            others = [cast("Connection", each) for each in self.connections]
            silent = [
                each for each in others if each.waiting_since is not None and not each.owes_answer and each is not self
            ]
            if silent:
                # Some more than one, so that a crowd is not searched again for each who comes.
                several = 1 + self.limits.connections // 64
                for each in heapq.nsmallest(several, silent, key=lambda each: each.waiting_since or 0.0):
                    each.transport.abort()
            else:
                self.say(503, "too many connections", retry_after=1)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        is_plain = cycle.keep_alive and not (self.draining or self.expect_100_continue or self.flow.write_paused)
        refusal = self.gate.full(cast("Scope", cycle.scope)) if self.deciding and is_plain else None
        if refusal is None:
            super()._start_asgi_task(cycle, app)
        else:
            self.refuse(cycle, refusal)

    def refuse(self, cycle: RequestResponseCycle, refusal: Refusal) -> None:
        """Answer a request whose body is still to come, and which nobody else will hear of."""
        known = [*self.server_state.default_headers, (b"content-type", JSON.encode())]
        said = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
        self.transport.write(answer(refusal.status, [*known, *said], refusal.body()))
        cycle.response_started = cycle.response_complete = True
        cycle.on_response = lambda: None  # it leads back here, and nobody else would let go of it
        self.server_state.total_requests += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone; uvicorn tells the last request on the connection, which need not be the one at work."""
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        if self.transport.is_closing():
            return
        if self.in_headers or not self.receiving:
            self.header_bytes += len(data)
        else:
            self.other_bytes += len(data)
        self.deciding = True
        super().data_received(data)
        self.deciding = False  # what is taken out of the pipeline later has others behind it
        if self.in_headers and self.header_bytes > MOST_HEADERS:
            self.say(431, f"the headers are longer than {MOST_HEADERS:,} bytes")
        elif self.receiving and self.other_bytes > MOST_HEADERS + self.body_bytes // 8:
            self.say(431, f"what is around the body is longer than {MOST_HEADERS:,} bytes")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.waiting_since, self.receiving = time.monotonic(), True
        self.in_headers, self.discarded = True, 0
        self.body_bytes = self.other_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those behind a body have nothing to say to us."""
        if self.in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its headers are whole: whoever decides on it may do so before the body comes."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise TooManyError
        super().on_headers_complete()
        self.deciding = False
        self.in_headers, self.header_bytes = False, 0
        # To close while the client sends would reset the connection, and it would never read why it was refused.
        # One that waits for a go-ahead sends nothing yet, and may never: then the connection ends with the answer.
        self.closes = not self.cycle.keep_alive or self.draining or self.expect_100_continue
        self.cycle.keep_alive = not self.expect_100_continue

    def on_body(self, body: bytes) -> None:
        """Some of its body; what comes after the answer is thrown away, up to a limit."""
        self.body_bytes += len(body)
        self.other_bytes -= len(body)
        if self.cycle.response_complete:
            self.discarded += len(body)
            if self.discarded > 4 * self.limits.bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is whole."""
        self.receiving = False
        if self.cycle.response_complete:
            self.waiting_since = time.monotonic()
            if self.closes:
                self.transport.close()
        else:
            self.waiting_since = None
            if self.closes or self.draining:
                self.cycle.keep_alive = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It is answered."""
        if self.receiving and (self.in_headers or self.running is not self.cycle):
            self.waiting_since = time.monotonic()  # the next request, which had to wait, may come now
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the sweep does that, for silent connections of every kind
        if not self.receiving and self.cycle.response_complete:  # not so while a pipelined request is at work
            self.waiting_since = time.monotonic()

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it could have it."""
        self.writing_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        self.writing_since = None
        super().resume_writing()

    def shutdown(self) -> None:
        """The server drains: the present request is the last one."""
        if self.had_request and not self.cycle.response_complete and not self.receiving:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """What was sent is not HTTP."""
        self.say(400, "this is not HTTP/1.1")

    def say(self, status: int, error: str, *, retry_after: int | None = None) -> None:
        """Answer in the server's name, if no answer has begun, and end the connection."""
        if self.transport.is_closing():
            return
        # While the answer to an earlier request is due, this would be taken for it.
        earlier = self.in_headers or not self.receiving
        due = self.had_request and not self.cycle.response_complete and (earlier or self.cycle.response_started)
        if not due and not self.pipeline:
            after = [] if retry_after is None else [(b"retry-after", b"%d" % retry_after)]
            headers = [(b"content-type", JSON.encode()), (b"connection", b"close"), *after]
            self.transport.write(answer(status, headers, error_body(error)))
        self.transport.close()

    def sweep(self, now: float) -> None:
        """End the connection if it has waited too long for its client."""
        limits = self.limits
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
            if now - self.closing_since > limits.receive:
                self.transport.abort()
        elif self.writing_since is not None and now - self.writing_since > limits.receive:
            self.transport.abort()
        elif self.waiting_since is None or self.owes_answer:
            return
        elif self.receiving:
            if now - self.waiting_since > limits.receive:
                self.too_late()
        else:
            unread = self.transport.get_write_buffer_size() > 0
            patience = limits.keep_alive if self.had_request and not unread else limits.receive
            if now - self.waiting_since > (min(LAST_CALL, patience) if self.draining and not unread else patience):
                self.transport.abort() if unread else self.transport.close()

    def too_late(self) -> None:
        """The request did not come in time."""
        if self.had_request and self.cycle.response_complete and not self.in_headers:
            self.transport.abort()  # it has its answer, and sends on
        else:
            self.say(408, f"the request was not received within {self.limits.receive:g} s")


def connection_class(limits: LimitsConfig, gate: Gate) -> type[Connection]:
    """The protocol with these limits and gate; uvicorn makes one object a connection and passes none of its own."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "gate": gate})
