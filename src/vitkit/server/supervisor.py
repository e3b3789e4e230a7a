"""Supervisor of the worker process: starts it, checks that it is alive, and replaces it when it dies or hangs.

The worker is pinged four times a second. A worker that does not answer, or whose batch takes far longer than batches
do, is first not ready and then replaced. The queue retries the requests that were in flight. While a worker loads its
models it sends heartbeats. Importing torch may hold the interpreter for long, so meanwhile it is also enough that the
process is at work. Time in which the front end itself did not run counts for nothing (`RunningClock`).
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.server.clock import RunningClock
from vitkit.server.config import TOKEN_VARIABLE, ServerOptions
from vitkit.server.ipc import Body, FrameDecoder, HTTPError, Message, WorkerResponse, encode_frame
from vitkit.server.process_activity import ActivityWatch, ProcessProbe, probe_process
from vitkit.server.queue import RequestQueue

CHECK_INTERVAL = 0.25
NOT_READY_AFTER = 1.25
"""Seconds without a message after which a worker is not ready."""
REPLACE_AFTER = 3.0
"""Seconds without a message after which a worker is replaced."""
REPLACE_LOADING_AFTER = 10.0
"""Seconds without a message or activity after which a worker that loads its models is replaced."""
MAX_SILENT_STARTS = 3
"""First workers that may stop responding while loading before the server gives up."""
MAX_DECODE_SECONDS = 15.0
MAX_START_SECONDS = 600.0
"""Seconds for the first worker to load its models; later workers have five times what the first one took."""
MAX_MESSAGE_BYTES = 1 << 29
"""Bytes of one message from the worker: the patch attention of a large image may be 100 MB of JSON."""
MAX_SECONDS = 1e6
COPY_BELOW = 1 << 18
"""Bytes that are cheaper to copy than to write separately."""
UNSAFE_HEADER = re.compile(r"[^\x20-\x7e]")
MALLOC_SETTINGS = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "8388608"}
"""Make glibc return the memory of large images, and not keep some for every thread that decodes."""
MEASURED_ONCE = ("agreement", "agreed")
"""Keys of a model description that only the first worker measures."""

logger = logging.getLogger(__name__)
Launch = Callable[[socket.socket], "subprocess.Popen[bytes]"]
"""Starts a worker process on its end of a socket pair."""


class StartError(WeightsError):
    """The models cannot be served."""


def launch_worker(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker process on its end of a socket pair.

    It has a process group of its own, so that Ctrl-C reaches only the front end, and it does not get the token.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "vitkit.server.worker_start", str(sock.fileno())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=MALLOC_SETTINGS | {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
        process_group=0,
    )


class WorkerConnection(asyncio.Protocol):
    """The front end's side of the socket to one worker."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self.supervisor, self.decoder = supervisor, FrameDecoder()
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on complete messages. A worker that sends invalid ones is damaged or compromised."""
        try:
            for header, body in self.decoder.feed(data):
                self.supervisor.on_message(header, body)
            if len(self.decoder.buffer) > MAX_MESSAGE_BYTES:
                raise ValueError(len(self.decoder.buffer))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            self.supervisor.kill("sent an invalid message")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the worker has closed the socket."""
        self.supervisor.on_disconnect(self)

    def send(self, header: Message, body: Body = b"") -> None:
        """Send one message."""
        assert self.transport is not None
        frame = encode_frame(header, len(body))
        for part in [frame + body] if len(body) < COPY_BELOW else [frame, body]:
            self.transport.write(part)

    def abort(self) -> None:
        """Close the socket at once."""
        if self.transport is not None:
            self.transport.abort()


class Supervisor:
    """Keeps one worker process running and knows what its models are."""

    def __init__(
        self,
        options: ServerOptions,
        *,
        queue: RequestQueue,
        clock: RunningClock,
        launch: Launch = launch_worker,
        probe: ProcessProbe = probe_process,
    ) -> None:
        self.options, self.models, self.launch, self.probe = options, options.models, launch, probe
        self.queue, self.metrics, self.clock = queue, queue.metrics, clock
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.activity: ActivityWatch | None = None
        self.connection: WorkerConnection | None = None
        self.is_loaded = False
        self.is_stopping = False
        self.start_error: StartError | None = None
        self.was_ready = False
        self.failed_starts = 0
        self.max_start_seconds = MAX_START_SECONDS
        self.started_at = 0.0
        self.last_alive_at = 0.0
        """When the worker last sent a message or, while it imports, was seen at work."""
        self.is_importing, self.is_silent = False, False
        self.running_seconds = {"predicting": 0.0, "attention": 0.0, "decoding": 0.0}
        """For how long the worker's oldest task of each kind has been running."""
        self.slowest_seconds = {"predicting": 0.0, "attention": 0.5}
        """Duration of the slowest recent batch of each kind."""
        self.batch_seconds = 0.0
        """Duration of a batch of the slowest model, measured when it was loaded."""

    # State

    @property
    def is_alive(self) -> bool:
        """Whether the models are loaded and the worker answers."""
        if not self.models:
            return True
        is_responding = self.clock() - self.last_alive_at < NOT_READY_AFTER
        return self.is_loaded and is_responding and not self._is_overdue()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.is_alive and not self.is_stopping

    def describe(self, name: str | None) -> dict[str, Any]:
        """Return the description of a model, or of the first one; raise an `HTTPError` if there is none."""
        if not self.descriptions:
            if not self.models:
                raise HTTPError(404, "this server has no models", hint="start it with vitkit serve RUN")
            hint, headers = "see /v2/health/ready", {"retry-after": "1"}
            raise HTTPError(503, "the models are being loaded", hint=hint, headers=headers)
        if name is None:
            return next(iter(self.descriptions.values()))
        if name not in self.descriptions:
            raise HTTPError(404, "no such model", hint=f"available: {', '.join(self.descriptions)}")
        return self.descriptions[name]

    # Life cycle

    async def run(self) -> None:
        """Start the worker and supervise it until cancelled. Raise `StartError` if the first worker cannot start."""
        if not self.models:
            self.was_ready = True
            return
        await self.start()
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            if self.start_error is not None:
                raise self.start_error
            self.metrics.ready.set(self.is_ready)
            self.queue.expire(worker_is_alive=self.is_alive)
            await self.check()

    async def start(self) -> None:
        """Start a worker and send it the models to load."""
        self.is_loaded, self.is_importing, self.is_silent = False, True, False
        self.started_at = self.last_alive_at = self.clock()
        self.running_seconds = dict.fromkeys(self.running_seconds, 0.0)
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                for end in (ours, theirs):
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                        end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
                try:
                    self.process = self.launch(theirs)
                    self.activity = ActivityWatch(self.process.pid, probe=self.probe)
                except OSError:
                    ours.close()
                    raise
        except OSError as error:  # clients may have taken all file descriptors
            self._on_start_error(StartError(f"cannot start a worker: {error}"))
            return
        ours.setblocking(False)
        connection = self.connection = WorkerConnection(self)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        models = [to_mapping(model) for model in self.models]
        calibration = None if self.descriptions else self.options.calibration  # once
        start = {"config": to_mapping(self.options.config), "models": models, "calibration": calibration}
        connection.send(start | {"log_format": self.options.log_format})

    async def check(self) -> None:
        """Ping the worker; replace one that has died or hangs."""
        now = self.clock()
        if self.connection is None:
            if now - self.started_at > 0.1 * 2 ** min(self.failed_starts, 6):
                self.failed_starts += 1
                await self.start()
        elif not self.is_loaded:
            if self.is_importing and self.activity is not None and self.activity.is_at_work():
                self.last_alive_at = now
            if now - self.started_at > self.max_start_seconds:
                self.kill("did not load its models in time")
            elif now - self.last_alive_at > REPLACE_LOADING_AFTER:
                self.is_silent = True
                self.kill("stopped responding while it loaded its models")
        elif now - self.last_alive_at > REPLACE_AFTER:
            self.kill("does not respond")
        elif self._is_overdue():
            is_decoding = self.running_seconds["decoding"] > MAX_DECODE_SECONDS
            self.kill("hangs in an image" if is_decoding else "hangs in a batch")
        else:
            self.connection.send({"ping": now})

    def kill(self, reason: str) -> None:
        """End a worker that has to be replaced."""
        logger.warning("the worker %s and is replaced", reason)
        if self.process is not None:
            self.process.kill()
        if self.connection is not None:
            self.connection.abort()

    def close(self) -> None:
        """End the worker together with the server."""
        self.is_stopping = True
        if self.connection is not None:
            self.connection.abort()
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5.0)

    def _is_overdue(self) -> bool:
        limits = {kind: max(2.0, 20 * max(slow, self.batch_seconds)) for kind, slow in self.slowest_seconds.items()}
        limits["decoding"] = MAX_DECODE_SECONDS
        return any(self.running_seconds[kind] > limit for kind, limit in limits.items())

    # Events of the worker connection

    def on_message(self, header: Message, body: bytes) -> None:
        """Process a message of the worker; raise one of several exceptions if it is invalid."""
        self.last_alive_at = self.clock()
        if "id" in header:
            self.queue.complete(header["id"], _parse_response(header, body))
        elif "pong" in header:
            self.running_seconds = {
                kind: self.clock.running_part(_parse_seconds(header[kind])) for kind in self.running_seconds
            }
        elif "completed" in header:
            kind = "attention" if header["attention"] else "predicting"
            images, seconds = int(header["completed"]), _parse_seconds(header["seconds"])
            self.slowest_seconds[kind] = max(self.clock.running_part(seconds), 0.99 * self.slowest_seconds[kind])
            self.metrics.record_batch(images, seconds)
            if not header["attention"]:
                self.queue.record_completion(images, _parse_seconds(header["service_seconds"]))
        elif "starting" in header:
            self.is_importing = header["starting"] == "importing"
        elif "ready" in header:
            self._on_ready(header)
        elif "failed" in header:
            self._on_start_error(StartError(header["failed"], hint=header["hint"]))

    def on_disconnect(self, connection: WorkerConnection) -> None:
        """Take back the requests of a worker that has disconnected."""
        if connection is not self.connection:
            return
        self.connection, was_loaded, self.is_loaded = None, self.is_loaded, False
        self.queue.detach_worker()
        if self.process is not None:
            self.process.kill()
            # A process with much memory takes a while to exit; clients need not wait for it. Without a thread to wait
            # in, the next subprocess call collects it.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.metrics.ready.set(0)
        if self.is_stopping or self.start_error is not None:
            return
        self.metrics.restarts.inc()
        logger.warning("the worker died; starting another one")
        if not was_loaded and not (self.is_silent and self.failed_starts < MAX_SILENT_STARTS):
            self._on_start_error(StartError("the worker died while loading", hint="is there enough memory?"))

    def _on_ready(self, header: Message) -> None:
        descriptions = header["ready"]
        if [description["name"] for description in descriptions] != [model.name for model in self.models]:
            raise ValueError(descriptions)
        self.batch_seconds = _parse_seconds(header["batch_seconds"])
        minimum, maximum = (max(1, int(header[key])) for key in ("min_in_flight", "max_in_flight"))
        seconds_per_image, seconds = _parse_seconds(header["seconds_per_image"]), self.clock() - self.started_at
        previous = self.max_start_seconds if self.was_ready else 30.0
        self.max_start_seconds = max(previous, 5 * seconds)
        for each in () if self.was_ready else descriptions:
            facts = f"{each['model']}, {each['classes']:,} classes, {each['precision']}, {each['engine']}"
            logger.info("%s: %s", each["name"], facts)
            for remark in filter(None, (each["remark"], each["agreed"])):
                logger.info("  %s", remark)
        measured = self.descriptions
        self.descriptions = {
            new["name"]: {key: value for key, value in new.items() if key != "remark"}
            | {key: measured[new["name"]][key] for key in MEASURED_ONCE if measured}
            for new in descriptions
        }
        logger.info("ready after %.1f s", seconds)
        self.is_loaded, self.was_ready, self.failed_starts = True, True, 0
        self.metrics.ready.set(self.is_ready)
        assert self.connection is not None
        send = self.connection.send
        self.queue.attach_worker(
            send, min_in_flight=minimum, max_in_flight=maximum, seconds_per_image=seconds_per_image
        )

    def _on_start_error(self, error: StartError) -> None:
        """Stop the server if the first worker cannot start; otherwise try again."""
        if self.was_ready:
            logger.error("the worker cannot load its models: %s", error)
        else:
            self.start_error = error


def _parse_response(header: Message, body: bytes) -> WorkerResponse:
    status, headers = int(header["status"]), {str(name): str(value) for name, value in header["headers"].items()}
    if not 200 <= status <= 599 or UNSAFE_HEADER.search("".join([*headers, *headers.values()])):
        raise ValueError(status)
    return WorkerResponse(status, headers, body)


def _parse_seconds(value: Any) -> float:
    if not abs(value) < MAX_SECONDS:  # also raises for NaN and for values that are not numbers
        raise ValueError(value)
    return float(value)
