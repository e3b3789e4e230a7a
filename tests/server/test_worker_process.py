"""The worker's threads, batches and error handling, with fake models and sockets."""

import errno
import itertools
import math
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server.front_end import FakeClock
from server.serving import TIMEOUT

from vitkit.core.errors import DataError
from vitkit.data.decode_limits import DecodeLimits
from vitkit.server.config import LimitsConfig
from vitkit.server.handlers import Job, prepare
from vitkit.server.ipc import HTTPError, read_messages
from vitkit.server.models import ServedModel
from vitkit.server.worker_process import Worker
from vitkit.server.worker_start import Heartbeat

HEADER = {"task": "features", "model": "pets", "is_list": False, "images": 1, "layer": None}


class BlockingModel(ServedModel):
    """A model that reports its batches and returns when the test allows it."""

    preprocessing = SimpleNamespace(channels=3)

    def __init__(self) -> None:
        self.name, self.model = "pets", SimpleNamespace(config=SimpleNamespace(grid=(1, 1)))
        self.batches: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self.allowed = threading.Semaphore(0)

    def run(self, images: torch.Tensor, *, single_threaded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches.put((len(images), single_threaded))
        assert self.allowed.acquire(timeout=TIMEOUT)
        return images.flatten(1), images.flatten(1)

    def compute_attention(self, image: torch.Tensor) -> Any:
        raise HTTPError(418, "attention")

    def next_batch(self) -> tuple[int, bool]:
        return self.batches.get(timeout=TIMEOUT)


def make_worker(sock: socket.socket, model: ServedModel, *, threads: int, slots: int, **options: Any) -> Worker:
    options = {"decoders": threads, "clock": FakeClock()} | options
    return Worker(sock, LimitsConfig(batch=4), {"pets": model}, threads=threads, slots=slots, **options)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The worker's and the front end's socket; every body is decoded to an image of one pixel."""

    def decode_any(job: Job, *_: object, **__: object) -> None:
        job.images, job.errors = torch.zeros(1, 1, 1, 1), [None]

    monkeypatch.setattr("vitkit.server.worker_process.prepare", decode_any)
    threads, (ours, theirs) = torch.get_num_threads(), socket.socketpair()
    theirs.settimeout(TIMEOUT)
    with ours, theirs:
        yield ours, theirs
    torch.set_num_threads(threads)  # threads that start later inherit the number of the last one


@pytest.fixture
def parallel(sockets: tuple[socket.socket, socket.socket]) -> tuple[Worker, BlockingModel, socket.socket]:
    """A worker with two threads that may both run the model."""
    model = BlockingModel()
    return make_worker(sockets[0], model, threads=2, slots=2), model, sockets[1]


def receive(worker: Worker, *numbers: int, task: str = "features") -> None:
    for number in numbers:
        worker.requests.put((HEADER | {"id": number, "task": task}, b""))


def read_ids(sock: socket.socket, count: int) -> list[int]:
    ids = (header["id"] for header, _ in read_messages(sock) if "id" in header)
    return sorted(itertools.islice(ids, count))


# Parallel: a slot per thread


@pytest.mark.parametrize(
    ("threads", "slots", "max_in_flight", "min_in_flight"),
    [(5, 1, 8, 8), (1, 1, 10, 2), (2, 2, 10, 4), (64, 64, 320, 128)],
)
def test_worker_reports_how_many_images_it_can_use(
    threads: int, slots: int, max_in_flight: int, min_in_flight: int
) -> None:
    with socket.socket() as sock:
        worker = make_worker(sock, BlockingModel(), threads=threads, slots=slots)
    assert (worker.max_in_flight, worker.min_in_flight) == (max_in_flight, min_in_flight)


def test_single_request_uses_all_cores(parallel: tuple[Worker, BlockingModel, socket.socket]) -> None:
    worker, model, sock = parallel
    worker.listen(iter(()))
    receive(worker, 1)
    assert model.next_batch() == (1, False)
    model.allowed.release()
    assert read_ids(sock, 1) == [1]


def test_concurrent_requests_use_one_core_each(parallel: tuple[Worker, BlockingModel, socket.socket]) -> None:
    worker, model, sock = parallel
    worker.seconds_per_request = 0.001  # small enough to be combined
    receive(worker, *range(1, 7))
    worker.listen(iter(()))
    both = [model.next_batch() for _ in range(2)]  # at the same time: none has returned
    assert all(single_threaded for _, single_threaded in both)
    assert max(count for count, _ in both) <= 3  # no thread takes more than its part of what waits
    model.allowed.release(6)
    assert read_ids(sock, 6) == [1, 2, 3, 4, 5, 6]


def test_large_requests_are_not_combined(parallel: tuple[Worker, BlockingModel, socket.socket]) -> None:
    worker, model, sock = parallel
    worker.seconds_per_request = 0.02
    receive(worker, *range(1, 7))
    worker.listen(iter(()))
    assert [model.next_batch()[0] for _ in range(2)] == [1, 1]
    model.allowed.release(6)
    assert read_ids(sock, 6) == [1, 2, 3, 4, 5, 6]


def test_list_without_successors_uses_all_cores(parallel: tuple[Worker, BlockingModel, socket.socket]) -> None:
    worker, _, _ = parallel
    worker.concurrent_until, worker.in_flight = math.inf, {1: 1}
    assert not worker.uses_one_core(2)
    assert worker.uses_one_core(1)  # one image cannot be distributed
    worker.in_flight[2] = 1
    assert worker.uses_one_core(16)


def test_service_time_is_shared_by_the_threads(parallel: tuple[Worker, BlockingModel, socket.socket]) -> None:
    worker, model, sock = parallel
    ticks = itertools.count()
    worker.clock = lambda: float(next(ticks))
    model.allowed.release(2)
    worker.concurrent_until = math.inf
    worker.in_flight = {1: 1, 2: 1}
    job = Job(id=1, header=HEADER, model=model, images=torch.zeros(1, 1, 1, 1), decode_seconds=3.0)
    worker.run_batch([job])
    header, _ = next(read_messages(sock))
    assert header["seconds"] == 2.0  # between three ticks
    assert header["service_seconds"] == (3.0 + 2.0) / 2


def test_hang_of_one_thread_is_reported_while_others_work(
    parallel: tuple[Worker, BlockingModel, socket.socket],
) -> None:
    worker, model, sock = parallel
    worker.listen(iter(()))
    receive(worker, 1)
    model.next_batch()
    worker.clock.advance(1000.0)
    receive(worker, 2)
    model.next_batch()
    pong = worker.build_pong({"ping": 1})
    assert pong == {"pong": 1, "predicting": 1000.0, "attention": 0.0, "decoding": 0.0}
    model.allowed.release(2)
    assert read_ids(sock, 2) == [1, 2]


# One slot: batches


def test_requests_decoded_during_a_batch_form_the_next_one(sockets: tuple[socket.socket, socket.socket]) -> None:
    model = BlockingModel()
    worker = make_worker(sockets[0], model, threads=3, slots=1)
    worker.listen(iter(()))
    receive(worker, 1)
    assert model.next_batch() == (1, False)
    receive(worker, *range(2, 8))
    while len(worker.ready) < 6:
        threading.Event().wait(0.001)
    model.allowed.release(3)
    assert model.next_batch() == (4, False)  # the limit
    assert model.next_batch() == (2, False)
    assert read_ids(sockets[1], 7) == [1, 2, 3, 4, 5, 6, 7]


def test_batches_are_of_one_model_and_attention_runs_alone() -> None:
    pets, birds = BlockingModel(), BlockingModel()
    with socket.socket() as sock:
        worker = make_worker(sock, pets, threads=2, slots=1)
    jobs = [("features", pets), ("attention", pets), ("features", birds), ("predict", pets), ("attention", pets)]
    for number, (task, model) in enumerate(jobs):
        images = torch.zeros(1, 1, 1, 1)
        worker.ready.append(Job(id=number, header={"task": task}, model=model, images=images))
    batches = []
    while batch := worker.take_batch():
        batches.append([job.id for job in batch])
        worker.free_slots += 1
    assert batches == [[0, 3], [1], [2], [4]]


def test_steady_predictions_do_not_delay_attention() -> None:
    with socket.socket() as sock:
        worker = make_worker(sock, BlockingModel(), threads=2, slots=1)
    model = BlockingModel()

    def add(number: int, task: str) -> None:
        job = Job(id=number, header={"task": task}, model=model, images=torch.zeros(1, 1, 1, 1))
        worker.ready.append(job)

    add(0, "features")
    add(1, "attention")
    for number in range(2, 20):
        add(number, "features")
        batch = worker.take_batch()
        worker.free_slots += 1
        if batch[0].is_attention:
            assert number <= 3
            return
    pytest.fail("the attention request was not processed")


# Decoding and errors


def test_decoders_bound_concurrent_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    allowed = threading.Semaphore(0)

    def decode_when_allowed(job: Job, *_: object, **__: object) -> None:
        started.put(job.id)
        assert allowed.acquire(timeout=TIMEOUT)

    monkeypatch.setattr("vitkit.server.worker_process.prepare", decode_when_allowed)
    with socket.socket() as sock:
        worker = make_worker(sock, BlockingModel(), threads=6, slots=6, decoders=2)
    threads = [threading.Thread(target=worker.decode, args=(HEADER | {"id": number}, b"")) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        started.get(timeout=TIMEOUT)
    for _ in range(4):
        assert started.empty()
        assert len(worker.running) <= 2
        allowed.release()
        started.get(timeout=TIMEOUT)
    allowed.release(2)
    for thread in threads:
        thread.join(TIMEOUT)


def test_gpu_failure_ends_the_worker_and_other_errors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BlockingModel()
    with socket.socket() as sock:
        worker = make_worker(sock, model, threads=2, slots=1)
    job = Job(id=1, header=HEADER, model=model, images=torch.zeros(1, 1, 1, 1))
    errors = iter([RuntimeError("sizes differ"), torch.AcceleratorError("an illegal memory access was encountered")])

    def fail(*_: object, **__: object) -> Any:
        raise next(errors)

    monkeypatch.setattr(model, "run", fail)
    assert [response.status for response in worker.respond([job])] == [500]
    with pytest.raises(torch.AcceleratorError):
        worker.respond([job])


class FullSocket(socket.socket):
    def sendall(self, *_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_response_that_cannot_be_sent_raises() -> None:
    """The request would stay in flight for ever; a worker that ends is replaced, and the request retried."""
    with FullSocket() as sock, pytest.raises(OSError, match="No buffer space"):
        make_worker(sock, BlockingModel(), threads=1, slots=1).send(({"id": 1}, b""))


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (DataError("too large for the memory"), "smaller"),
        (MemoryError(), "smaller"),
        (DataError("too many frames", expected="at most 256", got="300"), "smaller"),
        (DataError("the file is truncated"), "JPEG"),
        (DataError("the file is truncated", hint="send the rest"), "the rest"),
    ],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_image_that_cannot_be_decoded_gets_422_with_hint(
    monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str, *, is_list: bool
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr("vitkit.server.handlers.decode", fail)
    job = Job(id=1, header={"task": "predict", "is_list": is_list}, model=BlockingModel())
    with pytest.raises(HTTPError) as raised:
        prepare(job, b'["aGk=", "aGk="]' if is_list else b"hi", decode_limits=DecodeLimits(), max_images=16)
    assert raised.value.status == 422
    assert hint in (raised.value.hint or "")


def test_worker_ends_with_its_front_end_while_loading() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "vitkit.server.worker_start", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with ours:
        ours.settimeout(TIMEOUT)
        assert next(read_messages(ours))[0] == {"starting": "importing"}
    assert process.wait(TIMEOUT) == 0


def test_heartbeat_is_sent_until_the_models_are_loaded() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT)
    with ours, theirs:
        heartbeat = Heartbeat(ours)
        messages = read_messages(theirs)
        assert next(messages)[0] == {"starting": "importing"}
        heartbeat.phase = "loading"
        heartbeat.stop()
        assert not heartbeat.thread.is_alive()
        ours.shutdown(socket.SHUT_WR)
        assert all(header["starting"] in ("importing", "loading") for header, _ in messages)
