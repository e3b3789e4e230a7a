"""The supervisor with a fake clock and a fake worker: invalid messages, hangs, restarts."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server.front_end import DESCRIPTION, FakeClock

from vitkit.inference.engine import WARMUP_BATCHES
from vitkit.server.clock import MAX_INTERVAL
from vitkit.server.config import LimitsConfig, ModelConfig, ServeConfig, ServerOptions
from vitkit.server.ipc import Message, WorkerResponse, encode_frame
from vitkit.server.metrics import Metrics
from vitkit.server.models import ServedModel, warm_up
from vitkit.server.process_activity import BUSY_STATES, MIN_CPU_SECONDS, ActivityWatch, ProcessActivity, probe_process
from vitkit.server.queue import RequestQueue
from vitkit.server.supervisor import (
    CHECK_INTERVAL,
    MAX_SILENT_STARTS,
    MAX_START_SECONDS,
    NOT_READY_AFTER,
    REPLACE_AFTER,
    REPLACE_LOADING_AFTER,
    Supervisor,
    WorkerConnection,
)


class FakeTransport(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


class Harness:
    """A supervisor whose worker is the test, with one request in flight."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.queue = RequestQueue(LimitsConfig(), metrics=Metrics(), clock=self.clock)
        self.supervisor = Supervisor(
            ServerOptions(models=[ModelConfig(name="pets", source="pets")], config=ServeConfig()),
            queue=self.queue,
            clock=self.clock,
            launch=self.launch,
            probe=lambda pid: self.activity,
        )
        self.activity: ProcessActivity | None = ProcessActivity("sleeping", 0.0)
        self.launched = 0
        self.transport = FakeTransport()
        self.connection = self.supervisor.connection = WorkerConnection(self.supervisor)
        self.connection.transport = self.transport
        self.queue.send = self.connection.send
        process = self.queue.process({"task": "predict"}, b"", images=1, is_disconnected=lambda: False)
        self.response = asyncio.create_task(process)

    def launch(self, sock: socket.socket) -> Any:
        self.launched += 1
        return SimpleNamespace(pid=1, kill=lambda: None, wait=lambda timeout=None: 0)

    def receive(self, header: Message, body: bytes = b"") -> None:
        self.connection.data_received(encode_frame(header, len(body)) + body)

    def become_ready(self, *, batch_seconds: float = 0.01) -> None:
        self.receive(
            {
                "ready": [DESCRIPTION],
                "batch_seconds": batch_seconds,
                "seconds_per_image": 0.01,
                "min_in_flight": 6,
                "max_in_flight": 10,
            }
        )

    def pong(self, **seconds: float) -> None:
        self.receive({"pong": 1, "predicting": 0.0, "attention": 0.0, "decoding": 0.0} | seconds)


def with_harness(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop with a harness whose request has been dispatched."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        async def main() -> None:
            harness = Harness()
            await asyncio.sleep(0)
            try:
                await test(harness, **arguments)
            finally:
                harness.response.cancel()

        asyncio.run(main())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look for a fixture named harness
    return run


INVALID = [
    b"\x05\0\0\0\0\0\0\0\0\0\0\0hello",
    b"\x01\0\0\0\0\0\0\0\0\0\0\0\xff",
    b"\x03\0\0\0\0\0\0\0\0\0\0\0[1]",
    *(
        encode_frame(header)
        for header in (
            {"id": 1},
            {"id": 1, "status": "good", "headers": {}},
            {"id": 1, "status": 99, "headers": {}},
            {"id": 1, "status": 1e400, "headers": {}},
            {"id": 1, "status": 200, "headers": []},
            {"id": 1, "status": 200, "headers": {"a": "b\r\nSet-Cookie: c"}},
            {"id": [], "status": 200, "headers": {}},
            {"pong": 1},
            {"pong": 1, "predicting": "long", "attention": 0.0, "decoding": 0.0},
            {"pong": 1, "predicting": 0.0, "attention": 0.0, "decoding": [1.0]},
            {"pong": 1, "predicting": float("nan"), "attention": 0.0, "decoding": 0.0},
            {"completed": 1},
            {"completed": 1, "seconds": float("nan"), "attention": False},
            {"completed": 1, "seconds": float("inf"), "attention": False},
            {"completed": 1, "seconds": 1e300, "attention": False},
            {"completed": 1, "seconds": 1.0, "service_seconds": float("nan"), "attention": False},
            {"completed": float("inf"), "seconds": 1.0, "attention": False},
            {"completed": -1, "seconds": 1.0, "attention": False},
            {"ready": [{"name": "pets"}], "batch_seconds": "long"},
            {"ready": [], "batch_seconds": 1.0, "seconds_per_image": 0.1, "min_in_flight": 1, "max_in_flight": 1},
            {"ready": [{"name": "cats"}], "batch_seconds": 1.0},
        )
    ),
]


@pytest.mark.parametrize("data", INVALID)
def test_worker_with_invalid_messages_is_replaced(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        harness = Harness()
        harness.supervisor.is_loaded = True
        await asyncio.sleep(0)
        harness.connection.data_received(data)
        await asyncio.sleep(0)
        assert harness.transport.is_aborted
        assert not harness.response.done()
        assert harness.queue.size == 1
        harness.queue.expire(worker_is_alive=harness.supervisor.is_alive)
        await harness.supervisor.check()
        assert harness.queue.retry_after == 1
        harness.response.cancel()

    asyncio.run(main())
    assert "invalid message" in caplog.text


@with_harness
async def test_worker_with_an_endless_message_is_replaced(harness: Harness) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitkit.server.supervisor.MAX_MESSAGE_BYTES", 1000)
        harness.connection.data_received(encode_frame({"id": 1, "status": 200, "headers": {}}, 1 << 60))
        for _ in range(10):
            assert not harness.transport.is_aborted
            harness.connection.data_received(bytes(100))
    assert harness.transport.is_aborted


@with_harness
async def test_valid_response_is_passed_on(harness: Harness) -> None:
    data = encode_frame({"id": 1, "status": 200, "headers": {"content-type": "application/json"}}, 2) + b"{}"
    for number in range(len(data)):
        harness.connection.data_received(data[number : number + 1])
    assert await harness.response == WorkerResponse(200, {"content-type": "application/json"}, b"{}")
    assert not harness.transport.is_aborted


@with_harness
async def test_start_is_retried_after_thousands_of_failures(harness: Harness) -> None:
    harness.supervisor.connection, harness.supervisor.failed_starts = None, 5000
    await harness.supervisor.check()
    assert harness.launched == 1
    harness.supervisor.close()


@with_harness
async def test_restarts_are_delayed_exponentially(harness: Harness) -> None:
    supervisor = harness.supervisor
    supervisor.connection, supervisor.failed_starts, supervisor.started_at = None, 3, harness.clock()
    harness.clock.advance(0.7)
    await supervisor.check()
    assert harness.launched == 0
    harness.clock.advance(0.2)
    await supervisor.check()
    assert harness.launched == 1
    supervisor.close()


def test_missing_file_descriptors_do_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Clients may have taken them all once the models were ready, and will return them."""

    def fail() -> None:
        raise OSError(24, "Too many open files")

    @with_harness
    async def run(harness: Harness) -> None:
        harness.supervisor.connection = None
        harness.supervisor.was_ready = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vitkit.server.supervisor.socket.socketpair", fail)
            await harness.supervisor.start()
        assert harness.supervisor.start_error is None

    run()
    assert "Too many open files" in caplog.text


@with_harness
async def test_silent_worker_is_first_not_ready_and_then_replaced(harness: Harness) -> None:
    supervisor = harness.supervisor
    harness.become_ready()
    assert supervisor.is_ready
    harness.clock.advance(NOT_READY_AFTER)
    assert not supervisor.is_ready
    await supervisor.check()
    assert not harness.transport.is_aborted
    harness.pong()
    assert supervisor.is_ready
    harness.clock.advance(REPLACE_AFTER + 0.1)
    await supervisor.check()
    assert harness.transport.is_aborted


async def pass_time(harness: Harness, seconds: float, **message: str) -> None:
    """Let time pass in an event loop, with or without a message of the worker every quarter of a second."""
    for _ in range(round(seconds / CHECK_INTERVAL)):
        harness.clock.advance(CHECK_INTERVAL)
        if message:
            harness.receive(message)
        await harness.supervisor.check()


def begin_loading(harness: Harness) -> None:
    supervisor = harness.supervisor
    supervisor.started_at = supervisor.last_alive_at = harness.clock()
    supervisor.is_importing = True
    supervisor.activity = ActivityWatch(1, probe=supervisor.probe)


@with_harness
async def test_worker_that_never_loads_is_replaced(harness: Harness) -> None:
    begin_loading(harness)
    await pass_time(harness, MAX_START_SECONDS, starting="loading")
    assert not harness.transport.is_aborted
    await pass_time(harness, 1.0, starting="loading")
    assert harness.transport.is_aborted


@pytest.mark.parametrize("phase", ["importing", "loading"])
@pytest.mark.parametrize("was_ready", [False, True])
@pytest.mark.parametrize("state", ["stopped", "sleeping", None])
def test_worker_stopped_while_loading_is_replaced(state: str | None, was_ready: bool, phase: str) -> None:
    @with_harness
    async def run(harness: Harness) -> None:
        harness.supervisor.was_ready = was_ready
        begin_loading(harness)
        harness.activity = state and ProcessActivity(state, 0.0)
        await pass_time(harness, 25.0, starting=phase)
        await pass_time(harness, REPLACE_LOADING_AFTER)
        assert not harness.transport.is_aborted
        await pass_time(harness, CHECK_INTERVAL)
        assert harness.transport.is_aborted
        harness.connection.connection_lost(None)
        assert harness.supervisor.start_error is None
        await pass_time(harness, 1.0)
        assert harness.launched == 1
        harness.supervisor.close()

    run()


@pytest.mark.parametrize("was_ready", [False, True])
@pytest.mark.parametrize(
    ("state", "cpu_seconds"), [("running", 0.0), ("disk-sleep", 0.0), ("sleeping", MIN_CPU_SECONDS)]
)
def test_import_may_take_long_while_the_process_is_at_work(state: str, cpu_seconds: float, was_ready: bool) -> None:
    """`cpu_seconds` are taken every nine seconds."""

    @with_harness
    async def run(harness: Harness) -> None:
        harness.supervisor.was_ready = was_ready
        begin_loading(harness)
        await pass_time(harness, 1.0, starting="importing")
        for step in range(1, 7):
            harness.activity = ProcessActivity(state, 1.001 * step * cpu_seconds)
            await pass_time(harness, 9.0)
        assert not harness.transport.is_aborted
        harness.activity = ProcessActivity("stopped", 1.001 * 6 * cpu_seconds)
        await pass_time(harness, REPLACE_LOADING_AFTER + CHECK_INTERVAL)
        assert harness.transport.is_aborted

    run()


@with_harness
async def test_thread_that_waits_for_the_interpreter_is_no_sign_of_life(harness: Harness) -> None:
    begin_loading(harness)
    for step in range(int(REPLACE_LOADING_AFTER) + 1):
        harness.activity = ProcessActivity("sleeping", 0.002 * step)
        await pass_time(harness, 1.0)
    assert harness.transport.is_aborted


@pytest.mark.parametrize("state", ["running", "disk-sleep"])
def test_process_at_work_must_still_send_heartbeats_while_it_loads(state: str) -> None:
    @with_harness
    async def run(harness: Harness) -> None:
        begin_loading(harness)
        harness.activity = ProcessActivity(state, 0.0)
        harness.receive({"starting": "loading"})
        await pass_time(harness, REPLACE_LOADING_AFTER)
        assert not harness.transport.is_aborted
        await pass_time(harness, CHECK_INTERVAL)
        assert harness.transport.is_aborted

    run()


def test_probe_tells_a_stopped_process_from_a_running_one() -> None:
    code = "import time\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = probe_process(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = probe_process(process.pid)
        process.kill()
    assert running is not None
    assert stopped is not None
    assert running.state in BUSY_STATES
    assert stopped.state not in BUSY_STATES
    assert stopped.cpu_seconds >= running.cpu_seconds > 0.0
    assert probe_process(process.pid) is None


@with_harness
async def test_server_ends_if_every_first_worker_stops_responding(harness: Harness) -> None:
    begin_loading(harness)
    harness.receive({"starting": "loading"})
    harness.supervisor.failed_starts = MAX_SILENT_STARTS
    await pass_time(harness, REPLACE_LOADING_AFTER + 1.0)
    harness.connection.connection_lost(None)
    assert harness.supervisor.start_error is not None


@pytest.mark.parametrize("kind", ["decoding", "predicting"])
def test_worker_is_not_replaced_if_the_whole_server_was_suspended(kind: str) -> None:
    @with_harness
    async def run(harness: Harness) -> None:
        harness.become_ready()
        begin_loading(harness)
        await pass_time(harness, 2.0)
        harness.pong(**{kind: 1.0})
        harness.clock.suspend(17.0)
        harness.pong(**{kind: 18.0})  # arrives before the timer of the event loop
        assert harness.supervisor.is_alive
        await pass_time(harness, 0.5)
        assert not harness.transport.is_aborted
        harness.pong(**{kind: 18.5})
        assert harness.supervisor.running_seconds[kind] == pytest.approx(1.5 + MAX_INTERVAL)
        await pass_time(harness, 15.0, ping="")
        harness.pong(**{kind: 33.5})  # since then it hangs
        await pass_time(harness, CHECK_INTERVAL)
        assert harness.transport.is_aborted

    run()


@with_harness
async def test_suspended_batch_does_not_raise_the_hang_limit(harness: Harness) -> None:
    harness.become_ready()
    begin_loading(harness)
    harness.clock.suspend(60.0)
    harness.receive({"completed": 1, "seconds": 60.1, "service_seconds": 0.1, "attention": False})
    assert harness.supervisor.slowest_seconds["predicting"] == pytest.approx(0.1 + MAX_INTERVAL)


@with_harness
async def test_hang_limit_is_that_of_the_slowest_model(harness: Harness) -> None:
    """Even if a small model has processed all recent batches."""
    harness.become_ready(batch_seconds=3.0)
    assert (harness.queue.min_in_flight, harness.queue.max_in_flight) == (6, 10)
    for _ in range(1000):
        harness.receive({"completed": 1, "seconds": 0.001, "service_seconds": 0.0005, "attention": False})
    assert harness.queue.seconds_per_image < 0.00051
    harness.pong(predicting=40.0)
    assert harness.supervisor.is_alive
    harness.pong(predicting=61.0)
    assert not harness.supervisor.is_alive


@with_harness
async def test_attention_and_predictions_have_own_hang_limits(harness: Harness) -> None:
    harness.become_ready()
    for predicting, attention, decoding, is_alive in (
        (0.0, 9.0, 0.0, True),
        (2.5, 9.0, 0.0, False),
        (0.0, 11.0, 0.0, False),
        (1.9, 0.0, 14.0, True),
        (0.0, 0.0, 16.0, False),
    ):
        harness.pong(predicting=predicting, attention=attention, decoding=decoding)
        assert harness.supervisor.is_alive == is_alive, (predicting, attention, decoding)


@with_harness
async def test_requests_are_retried_if_no_thread_can_wait_for_the_worker(harness: Harness) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with socket.socket() as sock:
        harness.supervisor.process = harness.launch(sock)
    harness.supervisor.was_ready = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", fail)
        harness.connection.connection_lost(None)
    assert harness.queue.send is None
    assert not harness.queue.in_flight
    assert [request.was_retried for request in harness.queue.predictions] == [True]


class CountingModel(ServedModel):
    """A model that records the sizes of its batches."""

    image_size = (4, 4)
    preprocessing = SimpleNamespace(channels=3)

    def __init__(self, device: str) -> None:
        self.predictor, self.single_threaded = SimpleNamespace(device=torch.device(device)), None
        self.sizes: list[int] = []

    def run(self, images: torch.Tensor, *, single_threaded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(len(images))
        return images, images


@pytest.mark.parametrize(("device", "before"), [("cpu", 0), ("cuda", WARMUP_BATCHES)])
def test_warm_up_on_a_gpu_lasts_until_it_has_compiled(device: str, before: int) -> None:
    model = CountingModel(device)
    ticks = iter(range(100))
    warm_up(model, batch=8, clock=lambda: float(next(ticks)))
    assert len(model.sizes) > before
    assert len(set(model.sizes[before:])) >= 2  # a single image, and batches
    assert model.sizes[-2:] == [8, 8]
    assert (model.batch_seconds, model.seconds_per_image) == (1.0, 1 / 8)
