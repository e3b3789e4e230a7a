"""The models' names go in, a worker process that answers for them comes out, and another one when it dies or hangs.

Whether it lives is asked four times a second; a worker that is silent, or whose batch takes far longer than batches
do, is no longer ready and is then replaced. Requests that it had are the line's business.
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from vitkit.core.config import to_mapping
from vitkit.core.errors import VitkitError
from vitkit.serve.answers import Refusal
from vitkit.serve.batching import Answered, Body, Line
from vitkit.serve.config import ModelConfig, ServeConfig
from vitkit.serve.metrics import Metrics
from vitkit.serve.wire import Frames, Message, frame

TICK = 0.25
SILENT = 1.25
"""Seconds without a sign of life after which a worker is not ready."""
HUNG = 3.0
"""Seconds after which it is replaced."""
MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "8388608"}
"""For the C library: give back what a large image took, and do not keep some for every thread that decodes."""
MEASURED = ("agreement", "agreed")
"""What is said of a model that only the first worker measures."""
TOKEN = "VITKIT_TOKEN"
"""The variable that the process which reads what strangers send need not know."""
TOGETHER = 1 << 18
"""Bytes that are cheaper to copy than to write on their own."""
UNSAFE = re.compile(r"[^\x20-\x7e]")
LARGEST_ANSWER = 1 << 29
"""Bytes of one message of the worker: what each patch of a large image looks at may be 100 MB of JSON."""
MOST_SECONDS = 1e6
"""More than any time that a worker can have measured."""
LONGEST_DECODE = 15.0
LONGEST_START = 600.0
"""Seconds that the first worker may take to load its models; another has five times what one has taken."""


class StartError(VitkitError):
    """The models cannot be served."""


class Link(asyncio.Protocol):
    """The front's end of the socket to one worker."""

    def __init__(
        self, heard: Callable[[Message, bytes], None], lost: Callable[["Link"], None], garbled: Callable[[], None]
    ) -> None:
        self.heard, self.lost, self.garbled, self.frames = heard, lost, garbled, Frames()
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on the messages that are whole."""
        try:
            for head, payload in self.frames.feed(data):
                self.heard(head, payload)
            if len(self.frames.held) > LARGEST_ANSWER:
                raise ValueError(len(self.frames.held))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            self.garbled()

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker has gone."""
        self.lost(self)

    def send(self, head: Message, body: Body = b"") -> None:
        """Send one message."""
        assert self.transport is not None
        start = frame(head, len(body))
        if len(body) < TOGETHER:
            self.transport.write(start + body)
        else:
            self.transport.write(start)
            self.transport.write(body)


class Supervisor:
    """Keeps one worker running."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        settings: ServeConfig,
        *,
        line: Line,
        metrics: Metrics,
        calibration: str | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.models, self.settings, self.line, self.metrics, self.say = models, settings, line, metrics, say
        self.calibration = calibration
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.link: Link | None = None
        self.loaded = False
        self.stopping = False
        self.failed: StartError | None = None
        self.began = self.heard_at = 0.0
        self.busy = self.looking = self.decoding = 0.0
        """Seconds that the worker's oldest batch, question about attention and decoding have gone on."""
        self.slowest = {False: 0.0, True: 0.5}
        """Seconds of a batch, and of one for attention, in the recent past."""
        self.measured = 0.0
        """Seconds of a batch of the slowest model, which may not have been asked for long."""
        self.tries = 0
        self.longest_start = LONGEST_START
        self.first_ready = asyncio.Event()

    # What others ask

    @property
    def alive(self) -> bool:
        """Whether the models are loaded and the worker gives signs of life."""
        if not self.models:
            return True
        return self.loaded and time.monotonic() - self.heard_at < SILENT and not self._overdue()

    @property
    def ready(self) -> bool:
        """Whether the models answer, and new requests are welcome."""
        return self.alive and not self.stopping

    def describe(self, name: str | None) -> dict[str, Any]:
        """A model by its name, or the first; a Refusal where there is none, or nothing is loaded yet."""
        if not self.descriptions:
            if not self.models:
                raise Refusal(404, "this server has no models", hint="start it with vitkit serve RUN")
            raise Refusal(503, "the models are being loaded", hint="ask /v2/health/ready", headers={"retry-after": "1"})
        if name is None:
            return next(iter(self.descriptions.values()))
        if name not in self.descriptions:
            raise Refusal(404, "there is no model of this name", hint=f"there are {', '.join(self.descriptions)}")
        return self.descriptions[name]

    # Keeping it alive

    async def run(self) -> None:
        """Start the worker, look after it, replace it; until stopped."""
        if not self.models:
            self.first_ready.set()
            return
        await self.start()
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            late, looked = now - looked - TICK, now
            if late > TICK:  # this process slept, or the whole machine: that is no silence of the worker's
                self.heard_at = min(now, self.heard_at + late)
            self.metrics.ready.set(self.ready)
            self.line.expire(up=self.alive)
            await self.check()

    async def start(self) -> None:
        """Start a worker and tell it what to load."""
        self.loaded, self.began = False, time.monotonic()
        self.busy = self.looking = self.decoding = 0.0
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # clients may have taken all that the system has
            self._has_failed(StartError(f"no worker can be started: {error}"))
            return
        for end in (ours, theirs):
            for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, side, 1 << 20)
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "vitkit.serve.worker", str(theirs.fileno())]
        # Its results go to the socket; whatever a library prints belongs to the talk.
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=MEMORY | {name: value for name, value in os.environ.items() if name != TOKEN},
                    process_group=0,  # Ctrl-C is this process's business
                )
            except OSError as error:
                ours.close()
                self._has_failed(StartError(f"no worker can be started: {error}"))
                return
        loop = asyncio.get_running_loop()
        _, self.link = await loop.create_connection(lambda: Link(self.heard, self.lost, self.garbled), sock=ours)
        models = [to_mapping(model) for model in self.models]
        calibration = None if self.descriptions else self.calibration  # measured once: a successor is there soon
        self.link.send({"settings": to_mapping(self.settings), "models": models, "calibration": calibration})

    async def check(self) -> None:
        """Ask for a sign of life, and replace a worker that has gone or hangs."""
        now = time.monotonic()
        if self.link is None:
            if self.failed is None and now - self.began > 0.1 * 2 ** min(self.tries, 6):
                self.tries += 1
                await self.start()
            return
        if not self.loaded:
            if now - self.began > self.longest_start:
                self.kill("did not load its models in time")
            return
        if now - self.heard_at > HUNG:
            self.kill("gives no sign of life")
        elif self._overdue():
            self.kill("hangs in an image" if self.decoding > LONGEST_DECODE else "hangs in a batch")
        else:
            self.link.send({"ping": now})

    def _overdue(self) -> bool:
        for attention, seconds in ((False, self.busy), (True, self.looking)):
            if seconds > max(2.0, 20 * max(self.slowest[attention], self.measured)):
                return True
        return self.decoding > LONGEST_DECODE

    def kill(self, why: str) -> None:
        """End a worker that is of no use."""
        self.say(f"the worker {why}: it is replaced")
        if self.process is not None:
            self.process.kill()
        if self.link is not None and self.link.transport is not None:
            self.link.transport.abort()

    def garbled(self) -> None:
        """What the worker says makes no sense: it is damaged, or someone has got into it."""
        self.kill("speaks in riddles")

    def heard(self, head: Message, payload: bytes) -> None:
        """A message of the worker."""
        self.heard_at = time.monotonic()
        if "id" in head:
            status, headers = int(head["status"]), {str(name): str(value) for name, value in head["headers"].items()}
            if not 200 <= status <= 599 or UNSAFE.search("".join([*headers, *headers.values()])):
                raise ValueError(status)
            self.line.answered(head["id"], Answered(status, headers, payload))
        elif "pong" in head:
            said = (seconds_of(head[what]) for what in ("busy", "looking", "decoding"))
            self.busy, self.looking, self.decoding = said
        elif "batch" in head:
            kind, images, seconds = head["attention"], int(head["batch"]), seconds_of(head["seconds"])
            self.slowest[kind] = max(seconds, 0.99 * self.slowest[kind])
            self.metrics.computed(images, seconds)
            if not kind:
                self.line.computed(images, seconds_of(head["taken"]))
        elif "ready" in head:
            self.measured = seconds_of(head["seconds"])
            self.line.takes, self.line.needs = max(1, int(head["takes"])), max(1, int(head["needs"]))
            self._is_ready(head["ready"])
        elif "failed" in head:
            self._has_failed(StartError(head["failed"], hint=head["hint"]))

    def _is_ready(self, descriptions: list[dict[str, Any]]) -> None:
        if [each["name"] for each in descriptions] != [model.name for model in self.models]:
            raise ValueError(descriptions)
        self.loaded, self.tries = True, 0
        seconds = time.monotonic() - self.began
        before = self.longest_start if self.first_ready.is_set() else 30.0
        self.longest_start = max(before, 5 * seconds)
        if not self.first_ready.is_set():
            for each in descriptions:
                about = f"{each['model']}, {each['classes']:,} classes, {each['precision']}, {each['engine']}"
                self.say(f"{each['name']}: {about}")
                if each["remark"]:
                    self.say(f"  {each['remark']}")
                if each["agreement"]:
                    self.say(f"  {each['agreed']}")
        known, self.descriptions = self.descriptions, {}
        for new in descriptions:
            measured = {key: known[new["name"]][key] for key in MEASURED} if known else {}
            self.descriptions[new["name"]] = {key: value for key, value in (new | measured).items() if key != "remark"}
        self.say(f"ready after {seconds:.1f} s")
        assert self.link is not None
        self.line.send = self.link.send
        self.metrics.ready.set(self.ready)
        self.first_ready.set()
        self.line.pump()

    def _has_failed(self, error: StartError) -> None:
        """The models cannot be loaded: the end at the start, and later something to try again."""
        if self.first_ready.is_set():
            self.say(f"the worker cannot load its models: {error}")
            return
        self.failed = error
        self.first_ready.set()

    def lost(self, link: Link) -> None:
        """The worker's socket closed."""
        if link is not self.link:
            return
        self.link, was_loaded, self.loaded = None, self.loaded, False
        self.line.worker_lost()
        if self.process is not None:
            self.process.kill()
            # A process that held much memory takes a while to go; clients need not wait for that. Where there is no
            # thread to wait in, whoever starts the next process collects this one.
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.metrics.ready.set(0)
        if self.stopping or self.failed is not None:
            return
        self.metrics.restarts.inc()
        self.say("the worker died: another one starts")
        if not was_loaded:
            self._has_failed(StartError("the worker died while it loaded", hint="is there memory for the models?"))

    def close(self) -> None:
        """Let the worker go."""
        self.stopping = True
        if self.link is not None and self.link.transport is not None:
            self.link.transport.abort()
        if self.process is not None:
            self.process.kill()  # it has nothing to finish or to keep
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5.0)


def seconds_of(said: Any) -> float:
    """A time that the worker tells; what is none would later be a fault of ours.

    >>> seconds_of(0.25)
    0.25
    """
    if not abs(said) < MOST_SECONDS:  # nor is NaN
        raise ValueError(said)
    return float(said)
