"""Limits on what clients send, how fast, from where and with which token; with a fake worker and a fake clock."""

import asyncio
import re
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps

import psutil
import pytest
import uvicorn
from server.front_end import FakeClock, FrontEnd, run_front_end
from server.serving import TIMEOUT, request, wait_until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from vitkit.core.errors import ConfigError
from vitkit.server.config import LimitsConfig, ServeConfig, ServerOptions
from vitkit.server.metrics import Metrics
from vitkit.server.middleware import App, RequestFilter, Scope, Send
from vitkit.server.protocol import Connection, check_uvicorn, create_connection_class
from vitkit.server.queue import Receive, RequestQueue

TOKEN = "a token of some length"
IMAGE = b"an image"


@pytest.fixture(scope="module")
def server() -> Iterator[FrontEnd]:
    """A front end with small limits and a token."""
    with run_front_end(bytes=100_000, token=TOKEN, hosts=("pets.example",), target_delay=60.0) as running:
        yield running


def encode_head(*lines: str, method: str = "POST", path: str = "/v1/predict") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}", *lines]
    return "\r\n".join(head).encode()


@contextmanager
def connect(server: FrontEnd) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, timeout=TIMEOUT) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def advancing(clock: FakeClock) -> Iterator[None]:
    """Let the server's time pass quickly."""
    stop = threading.Event()

    def advance() -> None:
        while not stop.wait(0.005):
            clock.advance(0.5)

    thread = threading.Thread(target=advance)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def predict(server: FrontEnd, body: bytes, **headers: str) -> int:
    return server.post("/v1/predict", body, authorization=f"Bearer {TOKEN}", **headers).status


# Headers


def test_two_authorization_headers_are_rejected(server: FrontEnd) -> None:
    for first, second in (("wrong", TOKEN), (TOKEN, "wrong"), (TOKEN, TOKEN)):
        with connect(server) as sock:
            lines = ["GET /v1/models HTTP/1.1", "Host: localhost", "Connection: close"]
            lines += [f"Authorization: Bearer {token}" for token in (first, second)]
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            response = read_all(sock)
        assert response.startswith(b"HTTP/1.1 400"), (first, second)
        assert b"two Authorization headers" in response


# Size


def test_large_body_is_rejected_by_its_length(server: FrontEnd) -> None:
    with connect(server) as sock:
        sock.sendall(encode_head("Content-Length: 100001") + b"\r\n\r\n")  # and no byte of the body
        with advancing(server.clock):
            response = read_all(sock)
    assert response.startswith(b"HTTP/1.1 413")
    assert b"100,000" in response


def test_client_that_sends_too_much_reads_the_reason(server: FrontEnd) -> None:
    assert predict(server, bytes(300_000)) == 413


def test_endless_body_is_cut_off(server: FrontEnd) -> None:
    sent = 0
    with connect(server) as sock:
        sock.sendall(encode_head("Transfer-Encoding: chunked") + b"\r\n\r\n")
        with suppress(OSError):
            while sent < 10_000_000:
                sock.sendall(b"2710\r\n" + bytes(10_000) + b"\r\n")
                sent += 10_000
        response = read_all(sock)  # may be lost with the connection
    assert not response or response.startswith(b"HTTP/1.1 413")
    assert sent < 10_000_000


def test_compressed_bodies_and_forms_are_rejected(server: FrontEnd) -> None:
    assert predict(server, IMAGE, content_encoding="gzip") == 415
    assert predict(server, IMAGE, content_encoding="identity") == 200
    assert predict(server, IMAGE, content_type="multipart/form-data; boundary=x") == 415


def test_endless_headers_are_cut_off(server: FrontEnd) -> None:
    with connect(server) as sock:
        sock.sendall(encode_head())
        with suppress(OSError):
            for _ in range(200):
                sock.sendall(b"\r\nX-Long: " + b"a" * 1000)
        response = read_all(sock)
    assert not response or response.startswith(b"HTTP/1.1 431")


def test_endless_trailers_are_cut_off(server: FrontEnd) -> None:
    with connect(server) as sock:
        sock.sendall(encode_head("Transfer-Encoding: chunked") + b"\r\n\r\n0\r\nX: ")
        sock.sendall(b"a" * 400_000)  # up to 256 KB received together with the headers are not counted
        response = sock.recv(65536)
    assert response.startswith(b"HTTP/1.1 431")
    assert b"x-content-type-options: nosniff\r\n" in response
    assert b"content-security-policy: default-src 'self'" in response


def test_rejected_bodies_are_not_kept_in_memory(server: FrontEnd) -> None:
    process = psutil.Process()
    predict(server, bytes(99_000))
    before = process.memory_info().rss
    for _ in range(100):
        predict(server, bytes(300_000))
    assert process.memory_info().rss - before < 16_000_000  # 100 bodies would be 30 MB; allocators keep some
    assert server.server.supervisor.queue.size == 0


def test_all_bodies_together_are_bounded() -> None:
    with run_front_end(bytes=1000, buffer=1500) as server, connect(server) as first, connect(server) as second:
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        first.sendall(head + bytes(999))
        wait_until(lambda: server.metric("vitkit_buffer_bytes") == 999)
        second.sendall(head)
        assert second.recv(100).startswith(b"HTTP/1.1 429")
        first.sendall(bytes(1))
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.metric("vitkit_buffer_bytes") == 0)


# Time


@pytest.mark.parametrize("kind", ["headers", "body", "chunks"])
def test_slow_request_ends_with_408(server: FrontEnd, kind: str) -> None:
    data = {
        "headers": encode_head(),
        "body": encode_head("Content-Length: 1000") + b"\r\n\r\na",
        "chunks": encode_head("Transfer-Encoding: chunked") + b"\r\n\r\n1\r\na\r\n",
    }[kind]
    with connect(server) as sock:
        sock.sendall(data)
        with advancing(server.clock):
            assert read_all(sock).startswith(b"HTTP/1.1 408")
    assert server.get("/v2/health/live").status == 200


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_silent_connection_is_closed(server: FrontEnd, data: bytes) -> None:
    with connect(server) as sock, advancing(server.clock):
        sock.sendall(data)
        assert read_all(sock) == b""


def test_idle_connection_is_closed(server: FrontEnd) -> None:
    with connect(server) as sock, advancing(server.clock):
        sock.sendall(encode_head(method="GET", path="/v1/models") + b"\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(server: FrontEnd) -> None:
    image = encode_head(f"Content-Length: {len(IMAGE)}") + b"\r\n\r\n" + IMAGE
    unknown = encode_head(method="GET", path="/unknown") + b"\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(image + unknown + image)
        received = b""
        while received.count(b"HTTP/1.1 ") < 3 and (part := sock.recv(65536)):
            received += part
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"404", b"200"]


def test_client_that_reads_no_responses_is_disconnected(server: FrontEnd) -> None:
    data = encode_head(method="GET", path="/openapi.json") + b"\r\n\r\n"
    with connect(server) as sock:
        with suppress(ConnectionError):
            sock.sendall(data * 200)
        with advancing(server.clock):
            assert read_all(sock).count(b"HTTP/1.1 200") < 20
    assert server.get("/v2/health/live").status == 200


def test_hundred_slow_connections_block_no_other(server: FrontEnd) -> None:
    slow = [socket.create_connection(server.address, timeout=TIMEOUT) for _ in range(100)]
    try:
        for sock in slow:
            sock.sendall(encode_head("Content-Length: 1000") + b"\r\n\r\nabc")
        assert predict(server, IMAGE) == 200
        with advancing(server.clock):
            assert all(read_all(sock).startswith(b"HTTP/1.1 408") for sock in slow)
    finally:
        for sock in slow:
            sock.close()


def test_client_that_expects_100_gets_it_or_the_error(server: FrontEnd) -> None:
    with connect(server) as sock:
        sock.sendall(encode_head(f"Content-Length: {len(IMAGE)}", "Expect: 100-continue") + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(IMAGE)
        assert read_all(sock).startswith(b"HTTP/1.1 200")
    with connect(server) as sock:
        sock.sendall(encode_head("Content-Length: 100001", "Expect: 100-continue") + b"\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_data_that_is_not_http_gets_400(server: FrontEnd, data: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(data)
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_idle_connections_make_room_for_new_ones() -> None:
    with run_front_end(connections=5) as server:
        idle = [socket.create_connection(server.address, timeout=TIMEOUT)]
        wait_until(lambda: server.server.server_state.connections)
        server.clock.advance(1.0)  # the first connection has been idle for longest
        idle += [socket.create_connection(server.address, timeout=TIMEOUT) for _ in range(19)]
        try:
            assert server.get("/v2/health/live").status == 200
            assert read_all(idle[0]) == b""
            wait_until(lambda: len(server.server.server_state.connections) <= 5)
        finally:
            for sock in idle:
                sock.close()


# One connection without a network


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def connect_to(app: App, clock: FakeClock) -> tuple[Connection, FakeTransport, RequestQueue]:
    limits = LimitsConfig(target_delay=0.01, batch=1)
    queue = RequestQueue(limits, metrics=Metrics(), clock=clock)
    queue.min_in_flight = 1
    options = ServerOptions(models=[], config=ServeConfig(limits=limits))
    request_filter = RequestFilter(app, options, queue=queue)
    protocol, transport = create_connection_class(limits, request_filter, clock=clock), FakeTransport()
    config = uvicorn.Config(
        request_filter, http=protocol, ws="none", lifespan="off", log_config=None, interface="asgi3"
    )
    connection = protocol(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(transport)
    return connection, transport, queue


def in_event_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), TIMEOUT))

    return run


class EchoApp:
    """An application that answers with 200 as soon as it may."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self.paths.append(scope["path"])
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


POST = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n"


@in_event_loop
async def test_pipelined_request_is_not_late_while_the_first_runs() -> None:
    """The server itself has stopped reading it; closing would lose the first response."""
    app, clock = EchoApp(), FakeClock()
    connection, transport, _ = connect_to(app, clock)
    connection.data_received(POST + b"abcdef" + POST + b"abc")
    clock.advance(100.0)
    connection.close_if_overdue(clock())
    assert not transport.is_closed
    app.may_answer.set()
    while not transport.written:
        await asyncio.sleep(0)
    connection.close_if_overdue(clock())
    assert not transport.is_closed  # its time starts now
    clock.advance(100.0)
    connection.close_if_overdue(clock())
    assert transport.is_closed


@in_event_loop
async def test_client_is_not_late_because_the_server_was_suspended() -> None:
    clock = FakeClock()
    connection, transport, _ = connect_to(EchoApp(), clock)
    connection.data_received(POST + b"abc")
    clock.suspend(100.0)
    connection.close_if_overdue(clock())
    assert not transport.is_closed
    clock.advance(10.0)
    connection.close_if_overdue(clock())
    assert transport.is_closed


@in_event_loop
async def test_pipelined_requests_are_answered_if_the_queue_is_full() -> None:
    """Only the first request of the received data is rejected by the connection itself."""
    app = EchoApp()
    connection, transport, queue = connect_to(app, FakeClock())
    connection.data_received((POST + b"abcdef") * 2 + POST + b"abc")
    while not app.paths:
        await asyncio.sleep(0)
    connection.data_received(b"def")
    queue.size = 1
    app.may_answer.set()
    while transport.written.count(b"HTTP/1.1 ") < 3:
        await asyncio.sleep(0)
    assert connection.pipeline == deque()
    connection.connection_lost(None)


@in_event_loop
async def test_connection_rejects_by_itself_if_the_queue_is_full() -> None:
    """The application does not see the request, its body is discarded, and the connection stays open."""
    app = EchoApp()
    app.may_answer.set()
    connection, transport, queue = connect_to(app, FakeClock())
    queue.size = 1
    connection.data_received(POST + b"abc")
    rejection = transport.written
    assert rejection.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in rejection
    assert b"connection: close" not in rejection
    queue.size = 0
    connection.data_received(b"def" + POST)
    connection.data_received(b"abcdef")
    while not transport.written[len(rejection) :]:
        await asyncio.sleep(0)
    assert app.paths == ["/v1/predict"]
    assert transport.written[len(rejection) :].startswith(b"HTTP/1.1 200 ")
    assert not transport.is_closed
    connection.connection_lost(None)


@pytest.mark.parametrize("version", ["0.34.0", "0.35.2", "0.44.9"])
def test_old_uvicorn_is_refused_with_a_hint(version: str) -> None:
    with pytest.raises(ConfigError, match="uvicorn") as error:
        check_uvicorn(version)
    assert "pip install" in (error.value.hint or "")


@pytest.mark.parametrize("version", ["0.45.0", "0.54.0", "1.0", "1.0b1", "0.46.0rc1"])
def test_new_uvicorn_is_accepted(version: str) -> None:
    check_uvicorn(version)


def test_uvicorn_that_does_not_call_the_hook_is_refused() -> None:
    """Neither a new name of the private method nor another way to start requests may disable the limits."""

    class OtherProtocol(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            self.loop.create_task(self.cycle.run_asgi(self.app))

    with pytest.raises(ConfigError, match="uvicorn") as error:
        check_uvicorn("0.99.0", OtherProtocol)
    assert "constraints.txt" in (error.value.hint or "")


# Origin


def test_all_routes_but_page_and_health_need_the_token(server: FrontEnd) -> None:
    for path in ("/", "/docs", "/web/main.js", "/v2/health/live", "/v2/health/ready"):
        assert server.get(path).status == 200, path
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v2", "/v2/models/pets", "/v1/runs", "/nothing"):
        response = server.get(path)
        assert response.status == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
    assert server.post("/v1/predict", IMAGE).status == 401


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_wrong_token_is_rejected(server: FrontEnd, value: str) -> None:
    assert server.get("/v1/models", authorization=value).status == 401
    assert server.get("/v1/models", authorization=f"bearer {TOKEN} ").status == 200  # case and space do not count


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("localhost.:80", 200),
        ("localhost..", 400),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("pets.example", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("10.0.0.1", 400),
        ("", 400),
        ("localhost:80:80", 400),
    ],
)
def test_unknown_host_is_rejected(server: FrontEnd, host: str, status: int) -> None:
    assert server.get("/v2/health/live", host=host).status == status


def test_pages_of_other_sites_cannot_send_images(server: FrontEnd) -> None:
    assert predict(server, IMAGE, sec_fetch_site="cross-site") == 403
    assert predict(server, IMAGE, sec_fetch_site="same-origin") == 200


def test_no_response_is_readable_by_other_origins(server: FrontEnd) -> None:
    response = request(f"{server}/v1/predict", method="OPTIONS", headers={"Origin": "http://evil.example"})
    assert response.status == 401
    assert not [name for name in response.headers if name.startswith("access-control")]
