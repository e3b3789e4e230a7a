"""HTTP load generator with open and closed loops.

In an open loop requests are sent when they are due, independently of earlier responses. In a closed loop each client
waits for its response before the next request. Latencies count from the due time, so that a server that delays the
generator is charged for it (no coordinated omission). The generator shares its cores with the server, so it sends raw
HTTP/1.1 over kept-alive sockets and parses as little as possible. `python tests/soak/load.py` measures its own cost.
"""

import asyncio
import itertools
import math
import random
import re
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

LOST, UNREACHABLE, LATE = 0, -1, -2
"""Instead of a status: closed without a response, connection refused, no response in time."""

CLOSE_WAIT = 8
"""TCP state after an orderly close by the peer."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after: *(\d+)\r", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
T = TypeVar("T")


class LoadResponse(NamedTuple):
    """Result of one request. Times are of `time.perf_counter`; `retry_after` is -1 without the header."""

    due: float
    sent: float
    done: float
    status: int
    retry_after: int
    number: int
    """Index of the request."""

    @property
    def latency(self) -> float:
        return self.done - self.due


@dataclass
class LoadResult:
    """All results in the order of arrival, and the cost of the generator."""

    responses: list[LoadResponse] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    again: int = 0
    """Requests sent again, because the server closed a kept-alive connection before it read them."""

    def statuses(self) -> dict[int, int]:
        return dict(sorted(Counter(response.status for response in self.responses).items()))

    def with_status(self, status: int) -> list[LoadResponse]:
        return [response for response in self.responses if response.status == status]

    def count_other(self, *statuses: int) -> int:
        """Count the results with other statuses."""
        return sum(response.status not in statuses for response in self.responses)

    def latency(self, quantile: float, *, status: int = 200) -> float:
        """Return a quantile of the latencies of this status in seconds.

        >>> result = LoadResult([LoadResponse(0.0, 0.0, each / 10, 200, -1, each) for each in range(1, 101)])
        >>> result.latency(0.5), result.latency(0.99), result.latency(1.0)
        (5.0, 9.9, 10.0)
        """
        ordered = sorted(response.latency for response in self.with_status(status))
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan

    def rate(self, *, status: int = 200) -> float:
        """Return results of this status per second."""
        chosen = self.with_status(status)
        if not chosen:
            return 0.0
        start = min(response.due for response in self.responses)
        return len(chosen) / max(max(response.done for response in chosen) - start, 1e-9)

    def send_delay(self, quantile: float = 0.99) -> float:
        """Return a quantile of the delay of the generator itself, in seconds."""
        ordered = sorted(response.sent - response.due for response in self.responses)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan


def message(path: str, body: bytes = b"", *, content_type: str = "image/jpeg", headers: Sequence[str] = ()) -> bytes:
    """Encode a request: POST with a body, else GET.

    >>> message("/v2/health/live")
    b'GET /v2/health/live HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n'
    """
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def due_times(rate: float, *, seconds: float, even: bool = False, seed: int = 0) -> list[float]:
    """Return due times: evenly spaced, or a Poisson process with this rate.

    >>> due_times(4, seconds=1, even=True)
    [0.0, 0.25, 0.5, 0.75]
    """
    if even:
        return [number / rate for number in range(round(rate * seconds))]
    rng, times = random.Random(seed), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1]


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight."""

    def __init__(self, pool: "Pool", port: int) -> None:
        self.pool, self.port = pool, port
        self.transport: asyncio.Transport
        self.pending: tuple[float, bytes, int] | None = None
        self.sent, self.expected, self.sent_count = 0.0, -1, 0
        self.was_read = False
        self.buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def send(self, due: float, payload: bytes, number: int) -> None:
        self.pending, self.sent, self.expected, self.buffer = (due, payload, number), time.perf_counter(), -1, b""
        self.sent_count += 1
        self.transport.write(payload)

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        if self.expected < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self.buffer, 0, end + 2)
            self.expected = end + 4 + (int(length[1]) if length else 0)
        if len(self.buffer) >= self.expected and self.pending:
            self._complete()

    def _complete(self) -> None:
        done, head = time.perf_counter(), self.buffer[: self.expected]
        due, _, number = self.pending
        status, wait = int(head[9:12]), -1
        if status != 200:
            match = _RETRY.search(head)
            wait = int(match[1]) if match else -1
        self.pending = None
        if _CLOSE.search(head):
            self.transport.close()
        else:
            self.pool.free(self)
        self.pool.record(LoadResponse(due, self.sent, done, status, wait, number), head)

    def eof_received(self) -> None:
        """Ask the kernel whether the server has read the whole request before it closed the connection."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
        state, unacknowledged = info[0], int.from_bytes(info[24:28], sys.byteorder)
        self.was_read = state == CLOSE_WAIT and not unacknowledged and not self.transport.get_write_buffer_size()

    def connection_lost(self, _: Exception | None) -> None:
        self.pool.forget(self)
        if self.pending is None:
            return
        due, payload, number = self.pending
        self.pending = None
        # Closed while idle, before the request was read: any client then retries on a new connection.
        if self.sent_count > 1 and not self.buffer and not self.was_read:
            self.pool.result.again += 1
            self.pool.send(due, payload, number)
        else:
            self.pool.record(LoadResponse(due, self.sent, time.perf_counter(), LOST, -1, number), self.buffer)


class Pool:
    """Connections to a server. `port` may change: new requests then go to the new server."""

    def __init__(self, port: int, *, max_connections: int = 512, keep: bool = True) -> None:
        self.port, self.max_connections, self.keep = port, max_connections, keep
        self.result = LoadResult()
        self.idle: list[_Connection] = []
        self.all: set[_Connection] = set()
        self.waiting: deque[tuple[float, bytes, int]] = deque()
        self.opening, self.in_flight = 0, 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.on_result: Callable[[LoadResponse, bytes], None] | None = None
        self.all_done = asyncio.Event()

    def send(self, due: float, payload: bytes, number: int = 0) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.port == self.port and not connection.transport.is_closing():
                connection.send(due, payload, number)
                return
            connection.transport.close()
        if len(self.all) + self.opening >= self.max_connections:
            self.waiting.append((due, payload, number))
            return
        self.opening += 1
        task = asyncio.get_running_loop().create_task(self._open(due, payload, number))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _open(self, due: float, payload: bytes, number: int) -> None:
        port, loop = self.port, asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self, port), "127.0.0.1", port)
        except OSError:
            now = time.perf_counter()
            self.record(LoadResponse(due, now, now, UNREACHABLE, -1, number), b"")
            return
        finally:
            self.opening -= 1
        if connection.transport.is_closing():  # closed by the server at once
            now = time.perf_counter()
            self.record(LoadResponse(due, now, now, LOST, -1, number), b"")
            return
        self.all.add(connection)
        connection.send(due, payload, number)

    def free(self, connection: _Connection) -> None:
        if not self.keep:
            connection.transport.close()
        elif self.waiting:
            connection.send(*self.waiting.popleft())
        else:
            self.idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self.all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if self.waiting:
            self.send(*self.waiting.popleft())

    def record(self, response: LoadResponse, head: bytes) -> None:
        self.result.responses.append(response)
        self.in_flight -= 1
        if self.on_result:
            self.on_result(response, head)
        if not self.in_flight:
            self.all_done.set()

    def begin(self, due: float, payload: bytes, number: int) -> None:
        """Send a request now."""
        self.in_flight += 1
        self.all_done.clear()
        self.send(due, payload, number)

    async def close(self, *, timeout: float) -> LoadResult:
        """Wait for requests in flight; count those without a response in time as late."""
        try:
            if self.in_flight:
                await asyncio.wait_for(self.all_done.wait(), timeout)
        except TimeoutError:
            now = time.perf_counter()
            for connection in [each for each in self.all if each.pending]:
                due, _, number = connection.pending  # type: ignore[misc]
                connection.pending = None
                self.record(LoadResponse(due, connection.sent, now, LATE, -1, number), b"")
            for due, _, number in self.waiting:
                self.record(LoadResponse(due, now, now, LATE, -1, number), b"")
            self.waiting.clear()
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.all):
            connection.transport.abort()
        await asyncio.sleep(0)
        return self.result


async def open_loop(
    port: int | Pool,
    requests: Sequence[bytes],
    times: Iterable[float],
    *,
    max_connections: int = 512,
    timeout: float = 30.0,
) -> LoadResult:
    """Send each request when it is due, over at most `max_connections` connections."""
    pool = port if isinstance(port, Pool) else Pool(port, max_connections=max_connections)
    payloads, start, spent = itertools.cycle(requests), time.perf_counter(), time.process_time()
    loop, coming = asyncio.get_running_loop(), enumerate(zip(times, payloads, strict=False))
    offset, sent_all = loop.time() - start, loop.create_future()

    def send_from(number: int, due: float, payload: bytes) -> None:
        """Send a request and all that are due by then; a timer is cheaper than a sleeping task."""
        for _ in range(64):  # process responses now and then if the generator is behind
            pool.begin(min(due, time.perf_counter()), payload, number)  # timers may fire a little early
            following = next(coming, None)
            if following is None:
                sent_all.set_result(None)
                return
            number, (moment, payload) = following
            due = start + moment
            if due > time.perf_counter():
                break
        loop.call_at(due + offset, send, number, due, payload)

    def send(number: int, due: float, payload: bytes) -> None:
        try:
            send_from(number, due, payload)
        except Exception as error:  # an exception in a timer would only be printed
            sent_all.set_exception(error)

    if (first := next(coming, None)) is not None:
        number, (moment, payload) = first
        loop.call_at(start + moment + offset, send, number, start + moment, payload)
        await sent_all
    result = await pool.close(timeout=timeout)
    result.seconds, result.cpu = time.perf_counter() - start, time.process_time() - spent
    return result


async def closed_loop(
    port: int | Pool,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float = math.inf,
    count: int = 1_000_000,
    timeout: float = 30.0,
) -> LoadResult:
    """Run clients that send the next request after each response, until the time or the count is reached."""
    pool = port if isinstance(port, Pool) else Pool(port, max_connections=clients)
    payloads, numbers = itertools.cycle(requests), iter(range(count))
    start, spent = time.perf_counter(), time.process_time()

    def again(_: LoadResponse, __: bytes) -> None:
        now = time.perf_counter()
        if now - start < seconds and (number := next(numbers, None)) is not None:
            pool.begin(now, next(payloads), number)

    pool.on_result = again
    for number in itertools.islice(numbers, clients):
        pool.begin(time.perf_counter(), next(payloads), number)
    limit = min(seconds, 600.0)
    try:
        await asyncio.wait_for(pool.all_done.wait(), limit)
    except TimeoutError:
        pool.on_result = None
    result = await pool.close(timeout=timeout)
    result.seconds, result.cpu = time.perf_counter() - start, time.process_time() - spent
    return result


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop if it is installed."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class TrivialServer(asyncio.Protocol):
    """Protocol that answers every request at once, to measure the generator itself."""

    response = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

    def __init__(self) -> None:
        self.left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.left += data
        while (end := self.left.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self.left, 0, end + 2)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.left) < whole:
                return
            self.left = self.left[whole:]
            self.transport.write(self.response)  # type: ignore[attr-defined]


def _own_cost() -> Iterator[str]:
    """Measure the cost of a request for the generator with a trivial server in another process."""
    import multiprocessing  # noqa: PLC0415

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    process = multiprocessing.get_context("fork").Process(target=_serve_trivially, args=(listener,), daemon=True)
    process.start()
    port = listener.getsockname()[1]
    try:
        for size in (400, 40_000):
            requests = [message("/", b"x" * size)]
            result = run(closed_loop(port, requests, clients=16, count=5_000, seconds=30))
            yield _cost(f"closed loop, {size} bytes", result)
            result = run(open_loop(port, requests, due_times(500, seconds=5)))
            yield _cost(f"open loop, 500/s, {size} bytes", result)
    finally:
        process.terminate()
        process.join()
        listener.close()


def _cost(name: str, result: LoadResult) -> str:
    each = 1e3 * result.cpu / len(result.responses)
    p99 = 1e3 * result.latency(0.99)
    return f"{name}: {each:.3f} CPU ms per request, {result.rate():.0f}/s, p99 {p99:.1f} ms, {result.statuses()}"


def _serve_trivially(listener: socket.socket) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(TrivialServer, sock=listener)
        await server.serve_forever()

    run(forever())


if __name__ == "__main__":
    for line in _own_cost():
        sys.stdout.write(f"{line}\n")
