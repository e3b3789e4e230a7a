"""A storm of odd requests, and a log that nobody reads: afterwards the server holds nothing, and answers as before."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from serve.serving import PATIENCE, Running, is_ready, metric, picture, served, tiny_model, until

LIMITS = ("limits.queue=8", "limits.batch=2", "limits.bytes=200000", "limits.receive=1", "limits.keep_alive=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("storm") / "pets", depth=1)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with served(model, *LIMITS, "limits.buffer=1000000", "limits.deadline=5") as running:
        yield running


def odd_requests() -> list[bytes]:
    """Whole and half ones, too large, in pieces, that lie, that are no images, for every address that takes some."""
    image = picture()
    found = []
    for path in ("/v1/predict", "/v1/features", "/v1/attention", "/v1/attention?layer=0", "/v2/models/pets/infer"):
        start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        for kind in (b"image/png", b"application/json"):
            head = start + b"Content-Type: " + kind + b"\r\n"
            for body in (image, b"[]", json.dumps(["aGk="] * 3).encode(), b"", bytes(150_000)):
                found.append(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                found.append(head + b"Content-Length: %d\r\n\r\n" % (len(body) + 9) + body)  # the rest never comes
                found.append(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % max(1, len(body)) + body + b"\r\nzz")
            found.append(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"fff\r\n" + b"x" * 0xFFF + b"\r\n")
        found.append(start + b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n") * 5)
        found.append(start + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"Trailer: x\r\n" * 10_000)
        found.append((start + b"Content-Length: %d\r\n\r\n" % len(image) + image) * 12)
    return found


def throw(server: Running, number: int, content: bytes) -> None:
    """Send it, and leave: at once, after a first word of the answer, or with a reset."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
        if number % 3 == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(content)
        if number % 3 == 1:
            sock.recv(100)


def test_after_a_storm_nothing_is_held_and_questions_are_answered(server: Running) -> None:
    """A worker dies in the middle of it."""
    storm = odd_requests()
    first = server.worker()
    with ThreadPoolExecutor(12) as pool:
        thrown = [pool.submit(throw, server, number, content) for number, content in enumerate(storm)]
        thrown[len(thrown) // 3].result()
        os.kill(first, signal.SIGKILL)
        for each in thrown:
            each.result()
    until(lambda: metric(server, "vitkit_queue_images") == 0)
    until(lambda: metric(server, "vitkit_buffer_bytes") == 0)
    until(lambda: server.post("/v1/predict", picture()).status == 200)
    assert metric(server, "vitkit_connections") < len(storm) / 4
    assert "Traceback" not in "".join(server.talk)
    assert server.process.poll() is None


def test_headers_behind_a_body_have_an_end_too_and_what_says_so_is_as_safe_as_all_answers(server: Running) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    start = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "
    until(lambda: server.post("/v1/predict", picture()).status == 200)  # else it is refused by its headers
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
        sock.sendall(start)
        sock.sendall(b"a" * 400_000)  # what comes in one read with the headers, 256 KB at most, is not counted
        said = sock.recv(65536)
    assert said.startswith(b"HTTP/1.1 431")
    assert b"x-content-type-options: nosniff\r\n" in said
    assert b"content-security-policy: default-src 'self'" in said


def test_a_stranger_sentence_behind_a_request_is_not_taken_for_its_answer(server: Running) -> None:
    """Who sends nonsense behind a question gets the answer to the question or none, never that to the nonsense."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    image = picture()
    asked = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(image) + image
    worker = server.worker()
    os.kill(worker, signal.SIGSTOP)  # so that the answer is still due
    try:
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
            sock.sendall(asked + b"\x00nonsense\r\n\r\n")
            with suppress(OSError):
                assert not sock.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        with suppress(ProcessLookupError):  # replaced, where this took seconds
            os.kill(worker, signal.SIGCONT)
    until(lambda: metric(server, "vitkit_queue_images") == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="how much a pipe holds is known of Linux")
def test_a_log_that_nobody_reads_holds_up_nobody(model: Path) -> None:
    """Its pipe is full before the server starts; then there are more lines than any pipe holds."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "vitkit", "serve", str(model), "--port", "0", "--access-log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True) as process:
        os.close(writing)
        try:
            assert process.stdout is not None
            server = Running(process.stdout.readline().strip(), process)
            until(lambda: is_ready(server))
            assert all(server.get("/nothing/" + "x" * 190).status == 404 for _ in range(400))
            assert server.post("/v1/predict", picture()).status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            os.close(reading)


def test_without_stdin_stdout_and_stderr_it_serves_all_the_same(model: Path) -> None:
    """As some that start services leave it; the port is one that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    program = "import os, sys; [os.close(number) for number in (0, 1, 2)]; os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "vitkit", "serve", str(model), "--port", str(port)]
    with subprocess.Popen([sys.executable, "-c", program, *command], text=True) as process:
        try:
            server = Running(f"http://127.0.0.1:{port}", process)

            def answers() -> bool:
                with suppress(OSError):
                    return is_ready(server)
                return False

            until(answers)
            assert server.post("/v1/predict", picture()).status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_asked_twice_to_stop_it_does_not_wait(model: Path) -> None:
    with served(model, "limits.deadline=60", patient=True) as server:
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        asking = threading.Thread(target=lambda: suppressed(server), daemon=True)
        asking.start()
        until(lambda: metric(server, "vitkit_queue_images") == 1)
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0
        asking.join(PATIENCE)
    assert not Path(f"/proc/{worker}").exists()
    assert "Traceback" not in "".join(server.talk)


def suppressed(server: Running) -> None:
    with suppress(OSError):
        server.post("/v1/predict", picture())


def test_a_front_that_is_killed_while_its_worker_loads_leaves_none(model: Path) -> None:
    with served(model) as server:
        first = server.worker()
        os.kill(first, signal.SIGKILL)
        second = until(lambda: next_worker(server, first))
        server.process.kill()
        until(lambda: not Path(f"/proc/{second}").exists())


def next_worker(server: Running, before: int) -> int | None:
    with suppress(StopIteration, OSError):
        found = server.worker()
        return None if found == before else found
    return None
