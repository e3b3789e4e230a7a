"""What a client may not do: send too much, too slowly, from elsewhere or without the token; on a real server."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import uvicorn
from PIL import Image
from serve.serving import PATIENCE, Running, picture, request, served, started, tiny_model, until
from uvicorn.server import ServerState

from vitkit.serve.batching import Line
from vitkit.serve.config import LimitsConfig
from vitkit.serve.gate import App, Gate, Hosts, Receive, Scope, Send
from vitkit.serve.metrics import Metrics
from vitkit.serve.protocol import Connection, connection_class

LIMITS = ("limits.bytes=100000", "limits.pixels=250000", "limits.receive=1.0", "limits.keep_alive=1.0")
TOKEN = "a token of some length"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("limits") / "pets")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of impatient limits that wants a token."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    with served(model, *LIMITS, "--token-file", file, "hosts=pets.example") as running:
        yield running


def head(server: Running, *lines: str, method: str = "POST", path: str = "/v1/predict") -> bytes:
    place = server.url.removeprefix("http://")
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", f"Host: {place}", f"Authorization: Bearer {TOKEN}", *lines]
    ).encode()


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
        yield sock


def heard(sock: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def asked(server: Running, body: bytes, **headers: str) -> int:
    return server.post("/v1/predict", body, authorization=f"Bearer {TOKEN}", **headers).status


# Too much


def test_a_body_that_is_too_large_is_refused_by_its_length(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(head(server, "Content-Length: 100001") + b"\r\n\r\n")  # and not a byte of it
        answer = heard(sock)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100,000" in answer


def test_a_client_that_sends_too_much_before_it_listens_still_learns_why(server: Running) -> None:
    assert asked(server, bytes(300_000)) == 413


def test_an_endless_body_is_cut_off(server: Running) -> None:
    """Sent in pieces without a length, it is refused at the limit, and its connection ends soon after."""
    sent = 0
    with connected(server) as sock:
        sock.sendall(head(server, "Transfer-Encoding: chunked") + b"\r\n\r\n")
        with suppress(OSError):
            while sent < 10_000_000:
                sock.sendall(b"2710\r\n" + bytes(10_000) + b"\r\n")
                sent += 10_000
        said = heard(sock)  # what was on its way when the connection ended may be lost
    assert not said or said.startswith(b"HTTP/1.1 413")
    assert sent < 10_000_000


def test_pixels_beyond_the_limit_are_refused_by_the_header(server: Running) -> None:
    assert asked(server, picture(side=32)) == 200
    file = BytesIO()
    Image.new("1", (501, 500)).save(file, "PNG")
    reply = server.post("/v1/predict", file.getvalue(), authorization=f"Bearer {TOKEN}")
    assert reply.status == 422
    assert "250,000" in reply.json["error"]
    assert "smaller" in reply.json["hint"]


def test_an_encoded_body_and_a_form_are_refused(server: Running) -> None:
    assert asked(server, picture(), content_encoding="gzip") == 415
    assert asked(server, picture(), content_encoding="identity") == 200
    assert asked(server, picture(), content_type="multipart/form-data; boundary=x") == 415


def test_headers_without_end_are_cut_off(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(head(server))
        with suppress(OSError):
            for _ in range(200):
                sock.sendall(b"\r\nX-Long: " + b"a" * 1000)
        said = heard(sock)
    assert not said or said.startswith(b"HTTP/1.1 431")


def test_hostile_bodies_do_not_let_the_front_grow(server: Running) -> None:
    process = psutil.Process(server.process.pid)
    asked(server, bytes(99_000))
    before = process.memory_info().rss
    for _ in range(100):
        asked(server, bytes(99_000))
    assert process.memory_info().rss - before < 16_000_000  # 100 bodies held would be 10 MB; allocators keep some


# Too slow


def slowly(server: Running, start: bytes, piece: bytes) -> tuple[float, bytes]:
    """Send a byte at a time until the server has had enough; after how long, and what it said."""
    began = time.monotonic()
    with connected(server) as sock:
        sock.sendall(start)
        sock.settimeout(0.1)
        said = b""
        while time.monotonic() - began < PATIENCE:
            try:
                sock.sendall(piece)
                part = sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if not part:
                break
            said += part
    return time.monotonic() - began, said


@pytest.mark.parametrize("kind", ["headers", "body", "chunks"])
def test_a_request_that_dribbles_in_ends_with_408(server: Running, kind: str) -> None:
    start, piece = {
        "headers": (head(server), b"\r\nX-A: b"),
        "body": (head(server, "Content-Length: 1000") + b"\r\n\r\n", b"a"),
        "chunks": (head(server, "Transfer-Encoding: chunked") + b"\r\n\r\n", b"1\r\na\r\n"),
    }[kind]
    seconds, said = slowly(server, start, piece)
    assert said.startswith(b"HTTP/1.1 408")
    assert seconds >= 0.9  # the limit is a second, and a sweep comes four times in one
    assert server.get("/v2/health/live").status == 200


@pytest.mark.parametrize("piece", [b"", b"\r\n"])
def test_a_silent_connection_is_closed_without_a_word(server: Running, piece: bytes) -> None:
    seconds, said = slowly(server, b"", piece)
    assert said == b""
    assert seconds < PATIENCE


def test_a_kept_connection_is_closed_when_it_idles(server: Running) -> None:
    with connected(server) as sock:
        sock.sendall(head(server, method="GET", path="/v1/models") + b"\r\n\r\n")
        answer = heard(sock)
    assert answer.startswith(b"HTTP/1.1 200")


def test_several_requests_share_a_connection_and_may_be_sent_at_once(server: Running) -> None:
    image = picture()
    one = head(server, f"Content-Length: {len(image)}") + b"\r\n\r\n" + image
    with connected(server) as sock:
        sock.sendall(one * 3)
        assert heard(sock).count(b"HTTP/1.1 200") == 3


class Wire(asyncio.Transport):
    """What a connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def connected_to(app: App) -> tuple[Connection, Wire, Line]:
    """A connection without a network, what is written to it, and the line that it asks for room."""
    limits, metrics = LimitsConfig(queue=1), Metrics()
    line = Line(limits, metrics)
    gate = Gate(app, line=line, limits=limits, hosts=Hosts("127.0.0.1"), metrics=metrics, token=None)
    kind, wire = connection_class(limits, gate), Wire()
    config = uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_config=None, interface="asgi3")
    connection = kind(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(wire)
    return connection, wire, line


def test_while_a_request_is_at_work_the_next_one_on_its_connection_is_not_too_slow() -> None:
    """The server itself stops to read it; were the connection closed, the answer to the first one would be lost."""

    async def story() -> None:
        computed = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["more_body"]:
                pass
            await computed.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        connection, wire, _ = connected_to(app)
        one = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
        connection.data_received(one + one[:-1])
        assert connection.waiting_since is not None
        connection.waiting_since -= 100
        connection.sweep(time.monotonic())
        assert not wire.closed
        computed.set()
        while not wire.written:
            await asyncio.sleep(0)
        connection.sweep(time.monotonic())
        assert not wire.closed  # its time begins now
        connection.sweep(time.monotonic() + 100)
        assert wire.closed

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_what_was_sent_behind_a_request_is_answered_in_turn_though_there_is_no_room() -> None:
    """Only what is read first is refused by the connection itself: else nobody would begin what waits behind it."""
    asked, go_on = [], asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        asked.append(scope["path"])
        await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        connection, wire, line = connected_to(app)
        one = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\nabcdef"
        connection.data_received(one + one + one[:-3])
        while not asked:
            await asyncio.sleep(0)
        connection.data_received(one[-3:])
        line.held = 1  # the first has the last place
        go_on.set()
        while wire.written.count(b"HTTP/1.1 ") < 3:
            await asyncio.sleep(0)
        assert connection.pipeline == deque()
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_where_there_is_no_room_the_connection_says_so_itself_and_goes_on() -> None:
    """Nobody else hears of the request, its body is read and forgotten, and the next one there is let in."""
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        heard.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        connection, wire, line = connected_to(app)
        line.held = 1
        head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n"
        connection.data_received(head + b"abc")
        refused = wire.written
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1\r\n" in refused
        assert b"connection: close" not in refused
        line.held = 0
        connection.data_received(b"def" + head)
        connection.data_received(b"abcdef")
        while not heard:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert heard == ["/v1/predict"]
        assert wire.written[len(refused) :].startswith(b"HTTP/1.1 200 ")
        assert not wire.closed
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_a_hasty_client_that_reads_no_answers_is_let_go(server: Running) -> None:
    one = head(server, method="GET", path="/openapi.json") + b"\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(one * 200)
        assert heard(sock).count(b"HTTP/1.1 200") < 20
    assert server.get("/v2/health/live").status == 200


def test_a_hundred_slow_connections_all_end_and_hold_up_nobody(server: Running) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    slow = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(100)]
    try:
        for sock in slow:
            sock.sendall(head(server, "Content-Length: 1000") + b"\r\n\r\nabc")
        assert asked(server, picture()) == 200
        assert all(heard(sock).startswith(b"HTTP/1.1 408") for sock in slow)
    finally:
        for sock in slow:
            sock.close()


def test_expecting_a_go_ahead_a_client_gets_it_or_its_refusal(server: Running) -> None:
    image = picture()
    with connected(server) as sock:
        sock.sendall(head(server, f"Content-Length: {len(image)}", "Expect: 100-continue") + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(image)
        assert heard(sock).startswith(b"HTTP/1.1 200")
    with connected(server) as sock:
        sock.sendall(head(server, "Content-Length: 100001", "Expect: 100-continue") + b"\r\n\r\n")
        assert heard(sock).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_told_so(server: Running, data: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(data)
        assert heard(sock).startswith(b"HTTP/1.1 400")


# From elsewhere


def test_the_token_is_needed_for_all_but_the_page_and_health(server: Running) -> None:
    for path in ("/", "/docs", "/web/main.js", "/v2/health/live", "/v2/health/ready"):
        assert server.get(path).status == 200, path
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v2", "/v2/models/pets", "/v1/runs", "/nothing"):
        reply = server.get(path)
        assert reply.status == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
    assert server.post("/v1/predict", picture()).status == 401


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_a_token_that_is_nearly_right_is_wrong(server: Running, given: str) -> None:
    assert server.get("/v1/models", authorization=given).status == 401
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
def test_a_name_that_is_not_the_servers_is_refused(server: Running, host: str, status: int) -> None:
    assert server.get("/v2/health/live", host=host).status == status


def test_a_page_of_another_site_cannot_send_images(server: Running) -> None:
    assert asked(server, picture(), sec_fetch_site="cross-site") == 403
    assert asked(server, picture(), sec_fetch_site="same-origin") == 200


def test_no_answer_lets_other_origins_read_it(server: Running) -> None:
    reply = request(f"{server}/v1/predict", method="OPTIONS", headers={"Origin": "http://evil.example"})
    assert reply.status == 401
    assert not [name for name in reply.headers if name.startswith("access-control")]


# Starting


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_another_address_without_a_token_refuses_to_start(model: Path, host: str) -> None:
    with started(model, "--host", host, environment={"VITKIT_TOKEN": ""}) as server:
        assert server.process.wait(PATIENCE) == 2
    assert "token" in "".join(server.talk)


def test_at_the_limit_of_connections_the_one_that_was_silent_for_longest_goes(model: Path) -> None:
    with served(model, "limits.connections=5") as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        silent = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(20)]
        try:
            assert server.get("/v2/health/live").status == 200
            assert heard(silent[0]) == b""
            until(lambda: len(psutil.Process(server.process.pid).net_connections()) <= 8)
        finally:
            for sock in silent:
                sock.close()
