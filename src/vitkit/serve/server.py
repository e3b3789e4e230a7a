"""Models and settings go in, a server runs until it is asked to stop, and has then answered all that it accepted.

    front process: sockets, HTTP, the line ── socket pair ── worker process: images, models

The front never computes and the worker never sees a client, so neither can hold up or take down the other.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn

from vitkit.core.errors import ConfigError
from vitkit.serve.app import Service, create_app
from vitkit.serve.batching import Line
from vitkit.serve.config import ModelConfig, ServeConfig
from vitkit.serve.gate import Gate, Hosts
from vitkit.serve.metrics import Metrics
from vitkit.serve.protocol import SWEEP, Connection, connection_class
from vitkit.serve.supervisor import Supervisor
from vitkit.serve.talk import unblocked

BACKLOG = 4096
OWN_FILES = 64
"""File descriptors that are ours whatever clients do: to replace a worker takes a few."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """All that a server is started with."""

    models: Sequence[ModelConfig]
    settings: ServeConfig
    host: str = "127.0.0.1"
    token: str | None = None
    runs: Path | None = None
    calibration: Path | None = None
    access_log: bool = False


class Drained(uvicorn.Server):
    """uvicorn's server, which answers what was accepted before it goes."""

    def __init__(
        self, config: uvicorn.Config, *, supervisor: Supervisor, connection: type[Connection], shared: bool
    ) -> None:
        super().__init__(config)
        self.supervisor, self.connection, self.shared = supervisor, connection, shared

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ask for the end at SIGTERM and Ctrl-C; unlike uvicorn's own, the signal is not raised again after it."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not ready from now on; a second Ctrl-C does not wait."""
        self.supervisor.stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, answer what came, then let the last connections go."""
        if not self.shared:
            await self.accept_the_rest(sockets or [])
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        self.connection.draining = True
        for connection in list(self.server_state.connections):
            connection.shutdown()
        end = time.monotonic() + self.supervisor.settings.limits.drain
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.02)
        if left := len(self.server_state.tasks):
            self.supervisor.say(f"{left} requests were not answered in time")
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that is all there is to say of them
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def accept_the_rest(self, sockets: list[socket.socket]) -> None:
        """Take the connections that the kernel has accepted already: closing the socket would reset them."""
        loop, accepted = asyncio.get_running_loop(), []
        for sock in sockets:
            with contextlib.suppress(OSError):  # that there is none left
                while True:
                    accepted.append(sock.accept()[0])
        for client in accepted:
            client.setblocking(False)
        made = (loop.connect_accepted_socket(self.make_connection, client) for client in accepted)
        await asyncio.gather(*made, return_exceptions=True)  # a client may have gone already

    def make_connection(self) -> asyncio.Protocol:
        """A connection that uvicorn has not made itself."""
        return self.connection(config=self.config, server_state=self.server_state, app_state={})


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; what is in the way is an error with a way out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}", hint="choose another --port; 0 takes any that is free"
        ) from error
    sock.setblocking(False)
    return sock


def inherited(number: int) -> socket.socket:
    """A socket that someone else listens on and hands down, so that two servers can take turns without a gap."""
    try:
        sock = socket.socket(fileno=number)
        sock.getsockname()
    except OSError as error:
        raise ConfigError(f"--fd {number} is no socket: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    """The address to open in a browser.

    >>> with bind("127.0.0.1", 0) as sock:
    ...     address(sock).rpartition(":")[0]
    'http://127.0.0.1'
    """
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_many_connections() -> int:
    """Take as many file descriptors as the system lets us; how many connections that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - OWN_FILES)


def work_steadily() -> None:
    """Let this process and its worker finish what they are at rather than give way at once, and look for less garbage.

    To the scheduler it is work in batches: who gets a message need not interrupt who computes, and takes several
    together. What is there before the first request stays, and need not be looked through again and again.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux alone knows it, and a sandbox may not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # who has chosen another had a reason
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.collect()
    gc.freeze()


def serve(
    wanted: Server, sock: socket.socket, *, shared: bool, say: Callable[[str], None], listens: Callable[[str], None]
) -> None:
    """Run until SIGTERM or Ctrl-C; `listens` is told the address once clients may connect.

    With `shared`, a socket that others listen on too, it takes connections only once its models answer.
    """
    # What strangers send that is not HTTP is no news; what goes wrong in here is.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    factory = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415  faster where it is there

        factory = uvloop.new_event_loop
    work_steadily()
    with unblocked(), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(wanted, sock, shared=shared, say=say, listens=listens))


async def _serve(
    wanted: Server, sock: socket.socket, *, shared: bool, say: Callable[[str], None], listens: Callable[[str], None]
) -> None:
    settings, limits, metrics = wanted.settings, wanted.settings.limits, Metrics()
    line = Line(limits, metrics)
    calibration = None if wanted.calibration is None else str(wanted.calibration)
    supervisor = Supervisor(wanted.models, settings, line=line, metrics=metrics, calibration=calibration, say=say)
    service = Service(supervisor, most_images=limits.images)
    hosts = Hosts(wanted.host, settings.hosts)
    app = create_app(service, runs_folder=wanted.runs)
    gate = service.gate = Gate(app, line=line, limits=limits, hosts=hosts, metrics=metrics, token=wanted.token)
    gate.log = say if wanted.access_log else None
    metrics.buffered.set_function(lambda: gate.buffered)
    connection = connection_class(replace(limits, connections=min(limits.connections, allow_many_connections())), gate)
    config = uvicorn.Config(
        gate,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        interface="asgi3",
    )
    server = Drained(config, supervisor=supervisor, connection=connection, shared=shared)
    keeping = asyncio.create_task(supervisor.run())
    sweeping = asyncio.create_task(sweep(server, sock, metrics))
    if wanted.models:
        keeping.add_done_callback(lambda _: setattr(server, "should_exit", True))  # it never ends but by a fault
    watching = asyncio.create_task(stop_if_failed(server))
    with server.capture_signals():  # from before anyone can know the address until the worker has gone
        try:
            while shared and not (supervisor.first_ready.is_set() or server.should_exit):
                await asyncio.sleep(0.05)
            if supervisor.failed is None and not server.should_exit:
                listens(address(sock))
                await server.serve(sockets=[sock])
        finally:
            for task in (keeping, sweeping, watching):
                task.cancel()
            supervisor.close()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping  # what went wrong in it, if something did
    if supervisor.failed is not None:
        raise supervisor.failed


async def sweep(server: Drained, sock: socket.socket, metrics: Metrics) -> None:
    """End connections that wait too long and take those that wait to be taken, again and again."""
    while True:
        await asyncio.sleep(SWEEP)
        if server.started and not server.should_exit:
            await server.accept_the_rest([sock])  # the event loop takes one each time it has been round the others
        now = time.monotonic()
        connections = list(server.server_state.connections)
        metrics.connections.set(len(connections))
        for connection in connections:
            if isinstance(connection, Connection):
                connection.sweep(now)


async def stop_if_failed(server: Drained) -> None:
    """Where the models cannot be loaded there is nothing to serve."""
    await server.supervisor.first_ready.wait()
    if server.supervisor.failed is not None:
        server.should_exit = True


def tell(url: str) -> None:
    """Print the address as the first line of the results."""
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
