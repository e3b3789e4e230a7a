"""Faults of a real server: its worker dies or hangs, or it has no room; no accepted request is lost.

And of a worker alone: who goes first in it, and what it says that it cannot do.
"""

import base64
import errno
import http.client
import itertools
import json
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve.serving import PATIENCE, Reply, Running, is_ready, metric, picture, served, tiny_model, until

from vitkit.core.errors import DataError
from vitkit.data.decode import Gate
from vitkit.serve.answers import Refusal
from vitkit.serve.config import LimitsConfig
from vitkit.serve.models import Looked, Served
from vitkit.serve.wire import messages
from vitkit.serve.work import Job, prepare
from vitkit.serve.worker import Worker, batches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("worker") / "pets", depth=1)


@pytest.fixture(scope="module", params=["engine.threads=2", "engine.merge=1"], ids=["two hands", "one computes"])
def engine(request: pytest.FixtureRequest) -> str:
    """Our own engine, whose threads each answer requests, and torch's."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(model: Path, engine: str) -> Iterator[Running]:
    """A server that holds six images at most and is patient with them, and with its worker."""
    with served(model, "limits.queue=6", "limits.batch=2", "limits.deadline=60", engine, patient=True) as running:
        yield running


def test_a_worker_that_is_killed_is_replaced_and_its_requests_are_answered(server: Running) -> None:
    expected = server.post("/v1/predict", picture()).body
    before, worker = metric(server, "vitkit_worker_restarts_total"), server.worker()
    os.kill(worker, signal.SIGSTOP)  # so that the requests are in it for certain
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.post, "/v1/predict", picture()) for _ in range(4)]
        until(lambda: metric(server, "vitkit_queue_images") == 4)
        os.kill(worker, signal.SIGKILL)
        until(lambda: not is_ready(server), within=2.0)
        assert server.get("/v2/health/live").status == 200
        assert [reply.result().status for reply in asked] == [200] * 4
    assert {reply.result().body for reply in asked} == {expected}
    assert is_ready(server)
    assert metric(server, "vitkit_worker_restarts_total") == before + 1
    assert metric(server, "vitkit_queue_images") == 0


def test_a_worker_that_hangs_is_not_ready_after_two_seconds(server: Running) -> None:
    """Asked once and not before: how late this test is itself does not matter then."""
    worker = server.worker()
    os.kill(worker, signal.SIGSTOP)
    try:
        time.sleep(2.0)
        assert not is_ready(server)
        assert server.get("/v2/health/live").status == 200
    finally:
        os.kill(worker, signal.SIGCONT)
    until(lambda: is_ready(server))
    assert server.worker() == worker


def test_a_worker_that_hangs_is_replaced(model: Path, engine: str) -> None:
    with served(model, engine) as server:
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        until(lambda: not is_ready(server))
        until(lambda: is_ready(server))
        assert server.worker() != worker
        assert server.post("/v1/predict", picture()).status == 200


def test_what_has_no_room_is_refused_at_once_with_a_time_and_the_rest_is_answered(server: Running) -> None:
    worker = server.worker()
    os.kill(worker, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(server.post, "/v1/predict", picture()) for _ in range(6)]
            until(lambda: metric(server, "vitkit_queue_images") == 6)
            refused = server.post("/v1/predict", picture())
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refusal_before_body(server).status == 429
            assert server.get("/v2/health/live").status == 200
            os.kill(worker, signal.SIGCONT)
            assert [reply.result().status for reply in asked] == [200] * 6
    finally:
        if worker == server.worker():
            os.kill(worker, signal.SIGCONT)
    until(lambda: server.post("/v1/predict", picture()).status == 200)


def refusal_before_body(server: Running) -> Reply:
    """What the server says to the headers of a request alone."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    connection.putrequest("POST", "/v1/predict")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    answer = connection.getresponse()
    try:
        return Reply(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def test_a_list_of_more_images_than_the_line_holds_is_taken_when_it_is_empty(server: Running) -> None:
    body = json.dumps([base64.b64encode(picture(seed)).decode() for seed in range(9)]).encode()
    reply = server.post("/v1/predict", body, content_type="application/json")
    assert reply.status == 200
    assert len(reply.json["results"]) == 9


def test_attention_and_predictions_are_both_answered_under_load(server: Running) -> None:
    stop = threading.Event()

    def keep_asking() -> set[int]:
        statuses = set()
        while not stop.is_set():
            statuses.add(server.post("/v1/predict", picture()).status)
        return statuses

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking) for _ in range(2)]
        replies = [server.post("/v1/attention", picture(seed)).status for seed in range(3)]
        stop.set()
        assert set.union(*[one.result() for one in asking]) == {200}
    assert replies == [200] * 3


def test_a_deadline_is_kept_when_nothing_answers(model: Path) -> None:
    with served(model, "limits.deadline=0.5", patient=True) as server:
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        reply = server.post("/v1/predict", picture())
        assert reply.status in (503, 504)  # whether the worker counts as alive by then is a matter of milliseconds
        assert "retry-after" in reply.headers
        os.kill(worker, signal.SIGKILL)


# A worker alone


class LookedError(BaseException):
    """Somebody's question about attention has its turn; nothing in a worker stops this one."""


class Busy(Served):
    """A model that is asked again before it has answered."""

    preprocessing = SimpleNamespace(channels=3)

    def __init__(self, sock: socket.socket) -> None:
        self.name, self.model = "pets", SimpleNamespace(config=SimpleNamespace(grid=(1, 1)))
        self.worker = Worker(sock, LimitsConfig(batch=2), {})
        self.asked = 0

    def ask(self, do: str) -> None:
        asked = {"do": do, "json": False, "layer": None}
        job = Job(id=self.asked, asked=asked, served=self, images=torch.zeros(1, 1, 1, 1))
        (self.worker.attention if do == "attention" else self.worker.ready).append(job)

    def answer(self, images: torch.Tensor, *, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        assert not apart, "nobody else computes"
        self.asked += 1
        if self.asked == 3:
            self.ask("attention")
        if self.asked > 10:
            pytest.fail("attention waits until nobody asks for anything else")
        self.ask("features")
        return images.flatten(1), images.flatten(1)

    def look(self, image: torch.Tensor) -> Looked:
        raise LookedError


def test_attention_has_its_turn_though_there_is_always_a_prediction_to_compute() -> None:
    """Whoever sends it has decided already that it has waited for long enough."""
    here, there = socket.socketpair()
    with here, there:
        busy = Busy(here)
        busy.ask("features")
        with pytest.raises(LookedError):
            busy.worker.compute()
    assert busy.asked == 3


class Counted(Served):
    """A model that notes with which threads it is asked, and answers when somebody allows it."""

    def __init__(self) -> None:
        self.name, self.model = "pets", None
        self.asked: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self.allowed = threading.Semaphore(0)

    def answer(self, images: torch.Tensor, *, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.put((len(images), apart))
        assert self.allowed.acquire(timeout=PATIENCE)
        return images.flatten(1), images.flatten(1)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Worker, Counted, socket.socket]]:
    """A worker of two hands, its model, and the front's end of its socket; whatever is sent is an image."""

    def prepare_any(job: Job, *_: object, **__: object) -> None:
        job.images, job.errors = torch.zeros(1, 1, 1, 1), [None]

    monkeypatch.setattr("vitkit.serve.worker.prepare", prepare_any)
    threads, (here, there) = torch.get_num_threads(), socket.socketpair()
    there.settimeout(PATIENCE)
    with here, there:
        counted = Counted()
        worker = Worker(here, LimitsConfig(), {"pets": counted}, hands=2)
        yield worker, counted, there
    torch.set_num_threads(threads)  # hands have their own number, and threads that begin after them take it over


def arrive(worker: Worker, *numbers: int) -> None:
    for number in numbers:
        worker.arrived.put(({"do": "features", "model": "pets", "json": False, "id": number}, b""))


def replies(sock: socket.socket, count: int) -> list[int]:
    """The numbers of the next so many answers."""
    answered = (head["id"] for head, _ in messages(sock) if "id" in head)
    return sorted(itertools.islice(answered, count))


@pytest.mark.parametrize(("hands", "takes", "needs"), [(0, 16, 16), (1, 10, 3), (2, 10, 6), (64, 320, 192)])
def test_a_worker_says_how_many_images_it_has_at_most_and_how_many_keep_it_busy(
    hands: int, takes: int, needs: int
) -> None:
    with socket.socket() as sock:
        worker = Worker(sock, LimitsConfig(batch=8), {}, hands=hands)
    assert (worker.takes, worker.needs) == (takes, needs)


def test_who_comes_alone_has_all_threads(hands: tuple[Worker, Counted, socket.socket]) -> None:
    worker, counted, sock = hands
    worker.listen(iter(()))
    arrive(worker, 1)
    assert counted.asked.get(timeout=PATIENCE) == (1, False)
    counted.allowed.release()
    assert replies(sock, 1) == [1]


def test_those_who_come_together_are_shared_out_and_each_hand_computes_alone(
    hands: tuple[Worker, Counted, socket.socket],
) -> None:
    worker, counted, sock = hands
    worker.seconds_a_request = 0.001  # so that a few of them take no time
    arrive(worker, *range(1, 7))
    worker.listen(iter(()))
    both = [counted.asked.get(timeout=PATIENCE) for _ in range(2)]  # at the same time: none is answered yet
    assert all(apart for _, apart in both)
    assert max(count for count, _ in both) <= 3  # nobody takes more than a share of what waits
    counted.allowed.release(6)
    assert replies(sock, 6) == [1, 2, 3, 4, 5, 6]


def test_requests_that_take_long_are_taken_one_by_one(hands: tuple[Worker, Counted, socket.socket]) -> None:
    worker, counted, sock = hands
    worker.seconds_a_request = 0.02
    arrive(worker, *range(1, 7))
    worker.listen(iter(()))
    assert [counted.asked.get(timeout=PATIENCE)[0] for _ in range(2)] == [1, 1]
    counted.allowed.release(6)
    assert replies(sock, 6) == [1, 2, 3, 4, 5, 6]


def test_a_list_that_nobody_waits_behind_has_all_threads_though_there_was_a_crowd(
    hands: tuple[Worker, Counted, socket.socket],
) -> None:
    worker, _, _ = hands
    worker.crowded_until, worker.in_hand = math.inf, {1: 1}
    assert not worker.is_crowded(2)
    assert worker.is_crowded(1)  # one image cannot be shared out
    worker.in_hand[2] = 1
    assert worker.is_crowded(16)


def test_no_more_are_decoded_at_once_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    lock, begun = threading.Lock(), threading.Semaphore(0)

    def prepare_slowly(job: Job, *_: object, **__: object) -> None:
        nonlocal at_once, most
        with lock:
            at_once, most = at_once + 1, max(most, at_once + 1)
        begun.acquire(timeout=0.05)  # nobody releases it: the others have time to come in, if they may
        with lock:
            at_once -= 1

    monkeypatch.setattr("vitkit.serve.worker.prepare", prepare_slowly)
    with socket.socket() as sock, ThreadPoolExecutor(6) as pool:
        worker = Worker(sock, LimitsConfig(), {"pets": Counted()}, hands=6, decoders=2)
        head = {"do": "features", "model": "pets", "json": False}
        list(pool.map(lambda number: worker.prepared({**head, "id": number}, b""), range(6)))
    assert most == 2


def test_a_hand_that_hangs_is_noticed_though_the_other_works(hands: tuple[Worker, Counted, socket.socket]) -> None:
    worker, counted, sock = hands
    worker.listen(iter(()))
    arrive(worker, 1)
    counted.asked.get(timeout=PATIENCE)
    for hand, (attention, began) in worker.computing.items():
        worker.computing[hand] = attention, began - 1000.0
    arrive(worker, 2)
    counted.asked.get(timeout=PATIENCE)
    pulse = worker.pulse({"ping": 1})
    assert pulse["busy"] >= 1000.0
    assert pulse["looking"] == pulse["decoding"] == 0.0
    counted.allowed.release(2)
    assert replies(sock, 2) == [1, 2]


def test_what_is_asked_of_two_models_is_computed_apart_and_attention_alone() -> None:
    with socket.socket() as sock:
        pets, birds = Busy(sock), Busy(sock)
    kinds = [("features", pets), ("attention", pets), ("features", birds), ("predict", pets), ("attention", pets)]
    jobs = [Job(id=number, asked={"do": do}, served=model) for number, (do, model) in enumerate(kinds)]
    assert [[job.id for job in together] for together in batches(jobs)] == [[0, 3], [2], [1], [4]]


def test_a_worker_whose_gpu_has_failed_ends_and_any_other_fault_is_said_to_those_whom_it_concerns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as sock:
        busy = Busy(sock)
    job = Job(id=1, asked={"do": "features", "json": False}, served=busy, images=torch.zeros(1, 1, 1, 1))
    faults = iter([RuntimeError("sizes differ"), torch.AcceleratorError("an illegal memory access was encountered")])

    def fail(*_: object, **__: object) -> Any:
        raise next(faults)

    monkeypatch.setattr(busy, "answer", fail)
    assert [reply.status for reply in busy.worker.answers([job])] == [500]
    with pytest.raises(torch.AcceleratorError):
        busy.worker.answers([job])


class Full(socket.socket):
    """A socket of a system that has no memory for what is sent."""

    def sendall(self, *_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_an_answer_that_cannot_be_sent_is_not_forgotten() -> None:
    """The request would count as one at work for ever; a worker that ends is replaced, and the request tried again."""
    with Full() as sock, pytest.raises(OSError, match="No buffer space"):
        Worker(sock, LimitsConfig(), {}).send(({"id": 1}, b""))


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (DataError("too large for the memory"), "smaller"),
        (MemoryError(), "smaller"),
        (DataError("too many frames", expected="at most 256", got="300"), "smaller"),
        (DataError("the file is truncated"), "JPEG"),
        (DataError("the file is truncated", hint="send the rest"), "the rest"),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_what_cannot_be_prepared_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, hint: str, *, several: bool
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise fault

    monkeypatch.setattr("vitkit.serve.work.decode", fail)
    with socket.socket() as sock:
        job = Job(id=1, asked={"do": "predict", "json": several}, served=Busy(sock))
    with pytest.raises(Refusal) as refused:
        prepare(job, b'["aGk=", "aGk="]' if several else b"hi", gate=Gate(), most=16)
    assert refused.value.status == 422
    assert hint in (refused.value.hint or "")
