"""The front end in this process, with a fake worker and a fake clock: nothing depends on real time or on a model."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from server.serving import TIMEOUT, Client

from vitkit.data.preprocessing import Preprocessing
from vitkit.server.clock import RunningClock
from vitkit.server.config import LimitsConfig, ModelConfig, ServeConfig, ServerOptions
from vitkit.server.ipc import Message, encode_frame, read_messages
from vitkit.server.server import GracefulServer, bind_socket, create_server, run_server
from vitkit.server.supervisor import CHECK_INTERVAL

PREDICTION = b'{"model": "pets", "predictions": [{"label": "cat", "probability": 1.0}]}'
EVEN = [[0.0625] * 4] * 4
ATTENTION = json.dumps(
    {"model": "pets", "grid": [4, 4], "layers": 2, "heads": 2, "predictions": [], "rollout": EVEN}
    | {"maps": [[EVEN] * 2] * 2}
).encode()
DESCRIPTION = {
    "name": "pets",
    "model": "ViT",
    "precision": "fp32",
    "engine": "fake",
    "classes": 2,
    "image_size": [32, 32],
    "channels": 3,
    "features": 4,
    "layers": 2,
    "heads": 2,
    "grid": [4, 4],
    "parameters": 10,
    "attention": True,
    "agreement": None,
    "agreed": None,
    "remark": None,
    "labels": ["cat", "dog"],
    "preprocessing": Preprocessing(image_size=32).to_hub(),
}


class FakeClock(RunningClock):
    """A clock that a test advances, from any thread."""

    def __init__(self) -> None:
        self.real_time, self.lock, self.reads = 1000.0, threading.Lock(), 0
        super().__init__(lambda: self.real_time)

    def __call__(self) -> float:
        with self.lock:
            self.reads += 1
            return super().__call__()

    def advance(self, seconds: float) -> None:
        """Let time pass in which the clock is read as often as in a server."""
        end = self.real_time + seconds
        while self.real_time < end:
            with self.lock:
                self.real_time = min(end, self.real_time + CHECK_INTERVAL)
                super().__call__()

    def suspend(self, seconds: float) -> None:
        """Let time pass in which the process does not run."""
        self.real_time += seconds


class FakeWorker:
    """A thread on the worker's end of the socket. It holds requests while `holds` is set, else it answers at once."""

    pid = os.getpid()

    def __init__(self, sock: socket.socket, fleet: "WorkerFleet") -> None:
        self.sock, self.fleet = sock.dup(), fleet
        self.sock.setblocking(True)
        self.start_message: Message = {}
        self.held: list[Message] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError, StopIteration):  # a server that stops may send nothing
            messages = read_messages(self.sock)
            self.start_message, _ = next(messages)
            self.send(self.fleet.ready)
            for header, _ in messages:
                if "ping" in header:
                    self.send({"pong": header["ping"], "predicting": 0.0, "attention": 0.0, "decoding": 0.0})
                else:
                    self.on_request(header)

    def on_request(self, header: Message) -> None:
        with self.fleet.changed:
            self.fleet.requests.append(header)
            if self.fleet.holds:
                self.held.append(header)
            else:
                self.answer(header)
            self.fleet.changed.notify_all()

    def answer(self, header: Message) -> None:
        headers = {"content-type": "application/json"}
        body = ATTENTION if header["task"] == "attention" else PREDICTION
        self.send({"id": header["id"], "status": 200, "headers": headers}, body)

    def send(self, header: Message, body: bytes = b"") -> None:
        with self.lock, contextlib.suppress(OSError):
            self.sock.sendall(encode_frame(header, len(body)) + body)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        return 0


@dataclass
class WorkerFleet:
    """All workers that a front end has started, the current one last."""

    holds: bool = False
    workers: list[FakeWorker] = field(default_factory=list)
    requests: list[Message] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: dict[str, Any] = field(
        default_factory=lambda: {
            "ready": [DESCRIPTION],
            "batch_seconds": 0.01,
            "seconds_per_image": 0.01,
            "min_in_flight": 4,
            "max_in_flight": 4,
        }
    )

    def launch(self, sock: socket.socket) -> FakeWorker:
        self.workers.append(FakeWorker(sock, self))
        return self.workers[-1]

    def wait_for(self, count: int) -> None:
        """Wait until workers have received so many requests in total."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= count, TIMEOUT)

    def release(self) -> None:
        """Answer the held requests, and all others at once from now on."""
        with self.changed:
            self.holds = False
            for worker in self.workers[-1:]:
                for header in worker.held:
                    worker.answer(header)
                worker.held.clear()


@dataclass
class FrontEnd(Client):
    """A running front end."""

    server: GracefulServer
    fleet: WorkerFleet
    clock: FakeClock
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the event loop and return its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT)

    def stop(self, *, number: int = signal.SIGTERM) -> None:
        """Request a stop as a signal does."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, number, None)

    def join(self) -> None:
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()


@contextmanager
def run_front_end(
    *,
    fleet: WorkerFleet | None = None,
    sock: socket.socket | None = None,
    port: int = 0,
    models: Sequence[str] = ("pets",),
    runs: Path | None = None,
    token: str | None = None,
    hosts: tuple[str, ...] = (),
    **limits: Any,
) -> Iterator[FrontEnd]:
    """Run a front end, by default with the model `pets`, until the end of the block or `stop`."""
    clock = FakeClock()
    if fleet is None:
        fleet = WorkerFleet()
        fleet.ready["ready"] = [DESCRIPTION | {"name": name} for name in models]
    options = ServerOptions(
        models=[ModelConfig(name=name, source=name) for name in models],
        config=ServeConfig(hosts=hosts, limits=LimitsConfig(**limits)),
        token=token,
        runs=runs,
        shares_socket=sock is not None,
    )
    listener = bind_socket("127.0.0.1", port) if sock is None else sock
    ready, urls, failures = threading.Event(), list[str](), list[BaseException]()
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitkit.server.server.CLOSE_INTERVAL", 0.01)
        patch.setattr("vitkit.server.supervisor.CHECK_INTERVAL", 0.01)
        patch.setattr(GracefulServer, "capture_signals", lambda self: contextlib.nullcontext())
        server = create_server(options, launch=fleet.launch, clock=clock)

        async def main() -> None:
            running = asyncio.create_task(run_server(server, listener, on_listening=urls.append))
            while not running.done() and not (server.started and server.supervisor.is_ready):
                await asyncio.sleep(0.001)
            ready.set()
            await running

        def run() -> None:
            try:
                loop.run_until_complete(main())
            except BaseException as error:
                failures.append(error)
            finally:
                ready.set()
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(TIMEOUT)
        assert urls, failures
        front_end = FrontEnd(urls[0], server, fleet, clock, loop, thread)
        try:
            yield front_end
        finally:
            if thread.is_alive():
                fleet.release()
                front_end.stop()
                front_end.stop(number=signal.SIGINT)  # the second signal does not wait for idle connections
            front_end.join()
    assert not failures, failures
