"""A port, requests and when to send them go in; when each was answered, and with what, comes out.

In an open loop requests are sent when they are due, whatever became of those before, as strangers send them. In a
closed loop each client waits for its answer before it asks again. Latencies count from when a request was due, so that
a server which holds the generator up is not spared the wait (no coordinated omission). The generator shares its cores
with the server: it speaks raw HTTP/1.1 over kept-alive sockets and parses no more than it must.
`python tests/soak/load.py` says what a request costs it.
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
"""What stands for a status: closed without an answer, no connection to be had, no answer in time."""

CLOSE_WAIT = 8
"""The kernel's number for a connection that the other side has closed in good order."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after: *(\d+)\r", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
T = TypeVar("T")


class Answer(NamedTuple):
    """What became of one request. Times are of `time.perf_counter`; `retry_after` is -1 where the header is missing."""

    due: float
    sent: float
    done: float
    status: int
    retry_after: int
    number: int
    """Which of the requests it was, from 0."""

    @property
    def latency(self) -> float:
        return self.done - self.due


@dataclass
class Seen:
    """All answers of a load, in the order they came, and what the generator itself spent."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    again: int = 0
    """Requests sent a second time: the server had closed a kept-alive connection before it saw them."""

    def statuses(self) -> dict[int, int]:
        return dict(sorted(Counter(answer.status for answer in self.answers).items()))

    def having(self, status: int) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == status]

    def others(self, *statuses: int) -> int:
        """How many answers have none of these statuses."""
        return sum(answer.status not in statuses for answer in self.answers)

    def latency(self, quantile: float, *, status: int = 200) -> float:
        """A quantile of the latencies of this status, in seconds: the least that is not exceeded by so large a share.

        >>> seen = Seen([Answer(0.0, 0.0, each / 10, 200, -1, each) for each in range(1, 101)])
        >>> seen.latency(0.5), seen.latency(0.99), seen.latency(1.0)
        (5.0, 9.9, 10.0)
        """
        ordered = sorted(answer.latency for answer in self.having(status))
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan

    def rate(self, *, status: int = 200) -> float:
        """Answers of this status a second, from the first that was due to the last of these."""
        chosen = self.having(status)
        if not chosen:
            return 0.0
        start = min(answer.due for answer in self.answers)
        return len(chosen) / max(max(answer.done for answer in chosen) - start, 1e-9)

    def lateness(self, quantile: float = 0.99) -> float:
        """How late the generator itself was to send, in seconds: what of a latency is not the server's."""
        ordered = sorted(answer.sent - answer.due for answer in self.answers)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else math.nan


def message(path: str, body: bytes = b"", *, content_type: str = "image/jpeg", headers: Sequence[str] = ()) -> bytes:
    """A request as it goes over the wire: a POST where there is a body, else a GET.

    >>> message("/v2/health/live")
    b'GET /v2/health/live HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n'
    """
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def due_times(rate: float, *, seconds: float, even: bool = False, seed: int = 0) -> list[float]:
    """When requests are due: evenly, or at random moments with this many a second on average (Poisson).

    >>> due_times(4, seconds=1, even=True)
    [0.0, 0.25, 0.5, 0.75]
    """
    if even:
        return [number / rate for number in range(round(rate * seconds))]
    chance, times = random.Random(seed), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times[:-1]


class _Connection(asyncio.Protocol):
    """One socket; at most one request at a time is under way on it."""

    def __init__(self, pool: "Pool", port: int) -> None:
        self.pool, self.port = pool, port
        self.transport: asyncio.Transport
        self.pending: tuple[float, bytes, int] | None = None
        self.sent, self.expected, self.asked = 0.0, -1, 0
        self.was_read = False
        self.buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def ask(self, due: float, payload: bytes, number: int) -> None:
        self.pending, self.sent, self.expected, self.buffer = (due, payload, number), time.perf_counter(), -1, b""
        self.asked += 1
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
            self._answered()

    def _answered(self) -> None:
        done, head = time.perf_counter(), self.buffer[: self.expected]
        due, _, number = self.pending
        status, wait = int(head[9:12]), -1
        if status != 200:
            found = _RETRY.search(head)
            wait = int(found[1]) if found else -1
        self.pending = None
        if _CLOSE.search(head):
            self.transport.close()
        else:
            self.pool.free(self)
        self.pool.record(Answer(due, self.sent, done, status, wait, number), head)

    def eof_received(self) -> None:
        """The server closes. Had it not read all that was sent, or had it closed before, the kernel would know."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)
        state, unacknowledged = info[0], int.from_bytes(info[24:28], sys.byteorder)
        self.was_read = state == CLOSE_WAIT and not unacknowledged and not self.transport.get_write_buffer_size()

    def connection_lost(self, _: Exception | None) -> None:
        self.pool.forget(self)
        if self.pending is None:
            return
        due, payload, number = self.pending
        self.pending = None
        # Closed while it was idle, before the server could read the request: any client then asks on a new connection.
        if self.asked > 1 and not self.buffer and not self.was_read:
            self.pool.seen.again += 1
            self.pool.send(due, payload, number)
        else:
            self.pool.record(Answer(due, self.sent, time.perf_counter(), LOST, -1, number), self.buffer)


class Pool:
    """Connections to a server. `port` may change under way: new requests then go to the new server."""

    def __init__(self, port: int, *, most: int = 512, keep: bool = True) -> None:
        self.port, self.most, self.keep = port, most, keep
        self.seen = Seen()
        self.idle: list[_Connection] = []
        self.all: set[_Connection] = set()
        self.waiting: deque[tuple[float, bytes, int]] = deque()
        self.opening, self.under_way = 0, 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.answered: Callable[[Answer, bytes], None] | None = None
        self.all_done = asyncio.Event()

    def send(self, due: float, payload: bytes, number: int = 0) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.port == self.port and not connection.transport.is_closing():
                connection.ask(due, payload, number)
                return
            connection.transport.close()
        if len(self.all) + self.opening >= self.most:
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
            self.record(Answer(due, now, now, UNREACHABLE, -1, number), b"")
            return
        finally:
            self.opening -= 1
        if connection.transport.is_closing():  # closed by the server as soon as it was open
            now = time.perf_counter()
            self.record(Answer(due, now, now, LOST, -1, number), b"")
            return
        self.all.add(connection)
        connection.ask(due, payload, number)

    def free(self, connection: _Connection) -> None:
        if not self.keep:
            connection.transport.close()
        elif self.waiting:
            connection.ask(*self.waiting.popleft())
        else:
            self.idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self.all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if self.waiting:
            self.send(*self.waiting.popleft())

    def record(self, answer: Answer, head: bytes) -> None:
        self.seen.answers.append(answer)
        self.under_way -= 1
        if self.answered:
            self.answered(answer, head)
        if not self.under_way:
            self.all_done.set()

    def begin(self, due: float, payload: bytes, number: int) -> None:
        """Send a request that is due now."""
        self.under_way += 1
        self.all_done.clear()
        self.send(due, payload, number)

    async def close(self, *, patience: float) -> Seen:
        """Wait for what is under way; what is not answered in time is written down as late."""
        try:
            if self.under_way:
                await asyncio.wait_for(self.all_done.wait(), patience)
        except TimeoutError:
            now = time.perf_counter()
            for connection in [each for each in self.all if each.pending]:
                due, _, number = connection.pending  # type: ignore[misc]
                connection.pending = None
                self.record(Answer(due, connection.sent, now, LATE, -1, number), b"")
            for due, _, number in self.waiting:
                self.record(Answer(due, now, now, LATE, -1, number), b"")
            self.waiting.clear()
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.all):
            connection.transport.abort()
        await asyncio.sleep(0)
        return self.seen


async def open_loop(
    port: int | Pool, requests: Sequence[bytes], times: Iterable[float], *, most: int = 512, patience: float = 30.0
) -> Seen:
    """Send the requests in turn, each when it is due, over at most so many connections."""
    pool = port if isinstance(port, Pool) else Pool(port, most=most)
    payloads, start, spent = itertools.cycle(requests), time.perf_counter(), time.process_time()
    loop, coming = asyncio.get_running_loop(), enumerate(zip(times, payloads, strict=False))
    offset, sent_all = loop.time() - start, loop.create_future()

    def send_from(number: int, due: float, payload: bytes) -> None:
        """Send a request and all that are due by then; a timer is far cheaper than a task that sleeps."""
        for _ in range(64):  # where the generator is behind, answers are let in now and then
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
        except Exception as error:  # a timer's would be printed, and the end never come
            sent_all.set_exception(error)

    if (first := next(coming, None)) is not None:
        number, (moment, payload) = first
        loop.call_at(start + moment + offset, send, number, start + moment, payload)
        await sent_all
    seen = await pool.close(patience=patience)
    seen.seconds, seen.cpu = time.perf_counter() - start, time.process_time() - spent
    return seen


async def closed_loop(
    port: int | Pool,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float = math.inf,
    count: int = 1_000_000,
    patience: float = 30.0,
) -> Seen:
    """So many clients, each of which asks again when it was answered, until the time or the count is up."""
    pool = port if isinstance(port, Pool) else Pool(port, most=clients)
    payloads, numbers = itertools.cycle(requests), iter(range(count))
    start, spent = time.perf_counter(), time.process_time()

    def again(_: Answer, __: bytes) -> None:
        now = time.perf_counter()
        if now - start < seconds and (number := next(numbers, None)) is not None:
            pool.begin(now, next(payloads), number)

    pool.answered = again
    for number in itertools.islice(numbers, clients):
        pool.begin(time.perf_counter(), next(payloads), number)
    limit = min(seconds, 600.0)
    try:
        await asyncio.wait_for(pool.all_done.wait(), limit)
    except TimeoutError:
        pool.answered = None
    seen = await pool.close(patience=patience)
    seen.seconds, seen.cpu = time.perf_counter() - start, time.process_time() - spent
    return seen


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the cheapest event loop there is."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Trivial(asyncio.Protocol):
    """The least a server can do: every whole request is answered at once. What it costs to ask is measured on it."""

    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

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
            self.transport.write(self.answer)  # type: ignore[attr-defined]


def _own_cost() -> Iterator[str]:
    """What a request costs the generator, against the trivial server in a process of its own."""
    import multiprocessing  # noqa: PLC0415

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    process = multiprocessing.get_context("fork").Process(target=_serve_trivially, args=(listener,), daemon=True)
    process.start()
    port = listener.getsockname()[1]
    try:
        for size in (400, 40_000):
            requests = [message("/", b"x" * size)]
            seen = run(closed_loop(port, requests, clients=16, count=5_000, seconds=30))
            yield _cost(f"closed loop, {size} bytes", seen)
            seen = run(open_loop(port, requests, due_times(500, seconds=5)))
            yield _cost(f"open loop, 500/s, {size} bytes", seen)
    finally:
        process.terminate()
        process.join()
        listener.close()


def _cost(name: str, seen: Seen) -> str:
    each = 1e3 * seen.cpu / len(seen.answers)
    p99 = 1e3 * seen.latency(0.99)
    return f"{name}: {each:.3f} CPU ms a request, {seen.rate():.0f}/s, p99 {p99:.1f} ms, {seen.statuses()}"


def _serve_trivially(listener: socket.socket) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(Trivial, sock=listener)
        await server.serve_forever()

    run(forever())


if __name__ == "__main__":
    for line in _own_cost():
        sys.stdout.write(f"{line}\n")
