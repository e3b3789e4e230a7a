"""Faults and overload in the front end, with fake workers and a fake clock: no accepted request is lost."""

import http.client
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from server.front_end import DESCRIPTION, PREDICTION, FrontEnd, WorkerFleet, run_front_end
from server.serving import TIMEOUT, HTTPResponse, wait_until

IMAGE = b"an image"


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    """A front end with room for six images, whose worker holds all requests."""
    fleet = WorkerFleet(holds=True)
    fleet.ready |= {"min_in_flight": 6, "max_in_flight": 4, "seconds_per_image": 10.0}
    with run_front_end(fleet=fleet) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def predict(front_end: FrontEnd) -> HTTPResponse:
    return front_end.post("/v1/predict", IMAGE)


def queue_size(front_end: FrontEnd) -> int:
    return front_end.call(lambda: front_end.server.supervisor.queue.size)


def test_requests_of_a_dead_worker_are_answered_by_the_next(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    fleet = front_end.fleet
    replies = [pool.submit(predict, front_end) for _ in range(4)]
    fleet.wait_for(4)
    fleet.holds = False
    front_end.clock.advance(1.0)
    fleet.workers[0].kill()
    responses = [reply.result(TIMEOUT) for reply in replies]
    assert [response.status for response in responses] == [200] * 4
    assert {response.body for response in responses} == {PREDICTION}
    assert len(fleet.workers) == 2
    assert front_end.is_ready()
    assert front_end.metric("vitkit_worker_restarts_total") == 1
    assert front_end.metric("vitkit_queue_images") == 0


def test_server_is_not_ready_but_live_without_a_worker(front_end: FrontEnd) -> None:
    front_end.fleet.workers[0].kill()
    wait_until(lambda: not front_end.is_ready())  # the clock stands still, so no other worker is started
    assert front_end.get("/v2/health/live").status == 200
    front_end.clock.advance(1.0)
    wait_until(front_end.is_ready)


def test_full_queue_rejects_with_retry_after(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    replies = [pool.submit(predict, front_end) for _ in range(6)]
    wait_until(lambda: queue_size(front_end) == 6)
    rejected = predict(front_end)
    assert rejected.status == 429
    assert int(rejected.headers["retry-after"]) == 60
    assert send_headers_only(front_end).status == 429
    assert front_end.get("/v2/health/live").status == 200
    assert front_end.metric("vitkit_rejected_total") == 2
    front_end.fleet.release()
    assert [reply.result(TIMEOUT).status for reply in replies] == [200] * 6
    assert predict(front_end).status == 200


def send_headers_only(front_end: FrontEnd) -> HTTPResponse:
    connection = http.client.HTTPConnection(*front_end.address, timeout=TIMEOUT)
    connection.putrequest("POST", "/v1/predict")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    response = connection.getresponse()
    try:
        return HTTPResponse(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def test_requests_of_disconnected_clients_leave_the_queue(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    """Afterwards ordinary clients are not rejected."""
    waiting = [pool.submit(predict, front_end) for _ in range(4)]
    front_end.fleet.wait_for(4)
    for number in range(2):
        with socket.create_connection(front_end.address, timeout=TIMEOUT) as sock:
            sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi")
            wait_until(lambda number=number: queue_size(front_end) == 5 + number)
    wait_until(lambda: len(front_end.server.server_state.connections) <= 4)
    front_end.fleet.release()
    assert [reply.result(TIMEOUT).status for reply in waiting] == [200] * 4
    wait_until(lambda: queue_size(front_end) == 0)
    assert len(front_end.fleet.requests) == 4
    assert [predict(front_end).status for _ in range(10)] == [200] * 10


def test_incomplete_requests_never_enter_the_queue(front_end: FrontEnd) -> None:
    for _ in range(10):
        with socket.create_connection(front_end.address, timeout=TIMEOUT) as sock:
            sock.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhi")
    wait_until(lambda: not front_end.server.server_state.connections)
    assert queue_size(front_end) == 0
    wait_until(lambda: front_end.metric("vitkit_buffer_bytes") == 0)


def test_deadline_is_kept_if_the_worker_does_not_answer(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    reply = pool.submit(predict, front_end)
    front_end.fleet.wait_for(1)
    front_end.clock.advance(11.0)
    response = reply.result(TIMEOUT)
    assert response.status in (503, 504)  # depending on whether the next ping has been answered
    assert int(response.headers["retry-after"]) >= 1


def test_suspended_server_answers_what_it_had_accepted(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    reply = pool.submit(predict, front_end)
    front_end.fleet.wait_for(1)
    front_end.clock.suspend(60.0)
    reads = front_end.clock.reads
    wait_until(lambda: front_end.clock.reads > reads + 100)
    front_end.fleet.release()
    assert reply.result(TIMEOUT).status == 200
    assert len(front_end.fleet.workers) == 1


def test_stop_answers_accepted_requests_and_refuses_connections(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    idle = socket.create_connection(front_end.address, timeout=TIMEOUT)
    replies = [pool.submit(predict, front_end) for _ in range(6)]
    wait_until(lambda: queue_size(front_end) == 6)
    front_end.stop()
    wait_until(lambda: refuses_connections(front_end.address))
    front_end.fleet.release()
    assert [reply.result(TIMEOUT).status for reply in replies] == [200] * 6
    front_end.clock.advance(2.0)
    assert idle.recv(1) == b""
    idle.close()
    front_end.join()


def test_second_interrupt_does_not_wait(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    reply = pool.submit(predict, front_end)
    front_end.fleet.wait_for(1)
    front_end.stop(number=signal.SIGINT)
    front_end.stop(number=signal.SIGINT)
    front_end.join()
    assert isinstance(reply.exception(TIMEOUT), OSError | http.client.HTTPException)


def test_drain_ends_after_its_limit(front_end: FrontEnd, pool: ThreadPoolExecutor) -> None:
    reply = pool.submit(predict, front_end)
    front_end.fleet.wait_for(1)
    front_end.stop()
    wait_until(lambda: refuses_connections(front_end.address))
    while front_end.thread.is_alive():
        front_end.clock.advance(31.0)
        front_end.thread.join(0.01)
    assert reply.exception(TIMEOUT) is not None or reply.result().status in (503, 504)


def refuses_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    return False


def test_two_servers_take_turns_on_one_socket() -> None:
    """A rolling restart: clients with a new connection per request see no failure."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.setblocking(False)
        statuses: list[int] = []
        done = False

        def keep_asking(front_end: FrontEnd) -> None:
            while not done:
                statuses.append(predict(front_end).status)

        with run_front_end(sock=listener.dup()) as first:
            asking = pool.submit(keep_asking, first)
            with run_front_end(sock=listener.dup()) as second:
                first.stop()
                first.join()  # the client closes its connections; none is idle
                wait_until(lambda: len(second.fleet.requests) > 5)
                done = True
                asking.result(TIMEOUT)
    assert set(statuses) == {200}


def test_successor_does_not_measure_agreement_again(front_end: FrontEnd) -> None:
    agreement = {"images": 6}
    fleet = WorkerFleet()
    fleet.ready |= {"ready": [DESCRIPTION | {"agreement": agreement, "agreed": "6 of 6 images"}]}
    with run_front_end(fleet=fleet) as running:
        fleet.ready |= {"ready": [DESCRIPTION]}
        running.clock.advance(1.0)
        fleet.workers[0].kill()
        wait_until(lambda: len(fleet.workers) == 2 and running.is_ready())
        assert running.get("/v1/models/pets").json["agreement"] == agreement
    assert [worker.start_message["calibration"] for worker in fleet.workers] == [None, None]


def test_error_is_not_taken_for_the_response_to_an_earlier_request(front_end: FrontEnd) -> None:
    with socket.create_connection(front_end.address, timeout=TIMEOUT) as sock:
        sock.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi" + b"\x00nonsense\r\n\r\n"
        )
        with suppress(OSError):
            assert not sock.recv(100).startswith(b"HTTP/1.1 400")
    front_end.fleet.release()
    wait_until(lambda: queue_size(front_end) == 0)
    assert predict(front_end).status == 200


def odd_requests() -> list[bytes]:
    """Return complete and incomplete, oversized, chunked and inconsistent requests for every route with images."""
    requests = []
    for path in ("/v1/predict", "/v1/features", "/v1/attention", "/v1/attention?layer=0", "/v2/models/pets/infer"):
        start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        for content_type in (b"image/png", b"application/json"):
            head = start + b"Content-Type: " + content_type + b"\r\n"
            for body in (IMAGE, b"[]", b'["aGk=", "aGk="]', b"", bytes(150_000)):
                requests.append(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                requests.append(head + b"Content-Length: %d\r\n\r\n" % (len(body) + 9) + body)  # incomplete
                chunk = b"%x\r\n" % max(1, len(body)) + body + b"\r\nzz"
                requests.append(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
            requests.append(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"fff\r\n" + b"x" * 0xFFF + b"\r\n")
        requests.append(start + b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n") * 5)
        requests.append(start + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"Trailer: x\r\n" * 10_000)
        requests.append((start + b"Content-Length: 2\r\n\r\nhi") * 12)
    return requests


def send_and_leave(front_end: FrontEnd, number: int, content: bytes) -> None:
    """Send a request and disconnect: at once, after the first bytes of the response, or with a reset."""
    with suppress(OSError), socket.create_connection(front_end.address, timeout=TIMEOUT) as sock:
        if number % 3 == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(content)
        if number % 3 == 1:
            sock.settimeout(0.05)  # some requests get no response before the connection closes
            sock.recv(100)


def test_nothing_is_held_after_a_storm_of_odd_requests(caplog: pytest.LogCaptureFixture) -> None:
    """The worker dies in the middle of it."""
    with run_front_end(bytes=200_000, buffer=1_000_000, target_delay=0.08) as front_end:
        with ThreadPoolExecutor(12) as pool:
            requests = odd_requests()
            sent = [pool.submit(send_and_leave, front_end, *each) for each in enumerate(requests)]
            sent[len(sent) // 3].result(TIMEOUT)
            front_end.fleet.workers[0].kill()
            front_end.clock.advance(1.0)
            for each in sent:
                each.result(TIMEOUT)
        wait_until(lambda: len(front_end.fleet.workers) == 2 and front_end.is_ready())
        front_end.clock.advance(11.0)
        wait_until(lambda: front_end.metric("vitkit_queue_images") == 0)
        wait_until(lambda: front_end.metric("vitkit_buffer_bytes") == 0)
        wait_until(lambda: len(front_end.server.server_state.connections) < 5)
        assert predict(front_end).status == 200
    assert "Traceback" not in caplog.text
