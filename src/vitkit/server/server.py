"""Life cycle of the server: start, serve until a stop is requested, answer what was accepted, exit.

    front-end process: sockets, HTTP, queue ── socket pair ── worker process: images, models

The front end never runs a model and the worker has no connection to clients, so neither can block or crash the other.
A request passes through protocol → middleware → routes → queue → worker_process → handlers.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from vitkit.core.environment import set_malloc_thresholds
from vitkit.core.errors import ConfigError
from vitkit.core.formatting import configure_logging
from vitkit.server.clock import RunningClock
from vitkit.server.config import ServerOptions
from vitkit.server.metrics import Metrics
from vitkit.server.middleware import RequestFilter
from vitkit.server.protocol import Connection, create_connection_class
from vitkit.server.queue import RequestQueue
from vitkit.server.routes import create_app
from vitkit.server.stderr import StderrHandler, nonblocking_stderr
from vitkit.server.supervisor import Launch, Supervisor, launch_worker

BACKLOG = 4096
CLOSE_INTERVAL = 0.25
"""Seconds between two checks for overdue connections."""
RESERVED_DESCRIPTORS = 64
"""File descriptors that clients cannot take: replacing a worker needs a few."""

logger = logging.getLogger(__name__)


class GracefulServer(uvicorn.Server):
    """uvicorn's server, which answers all accepted requests before it exits."""

    def __init__(self, config: uvicorn.Config, *, supervisor: Supervisor, connection: type[Connection]) -> None:
        super().__init__(config)
        self.supervisor, self.connection = supervisor, connection
        self.shares_socket = supervisor.options.shares_socket

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and Ctrl-C; unlike in uvicorn, the signal is not raised again afterwards."""
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Become not ready and stop; on a second Ctrl-C, without waiting."""
        self.supervisor.is_stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, answer accepted requests, then close the connections."""
        if not self.shares_socket:
            await self.accept_backlog(sockets or [])
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for _ in range(8):  # a connection that is being accepted is registered a few iterations later
            await asyncio.sleep(0)
        self.connection.is_draining = True
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = self.connection.clock() + self.supervisor.options.config.limits.drain
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            if self.connection.clock() > deadline:
                break
            await asyncio.sleep(0.02)
        if unanswered := len(self.server_state.tasks):
            logger.warning("%d requests were not answered in time", unanswered)
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would log each of them
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def accept_backlog(self, sockets: list[socket.socket]) -> None:
        """Accept the connections that the kernel has completed: closing the socket would reset them."""
        loop, clients = asyncio.get_running_loop(), []
        for sock in sockets:
            with contextlib.suppress(OSError):  # until there are none left
                while True:
                    clients.append(sock.accept()[0])
        for client in clients:
            client.setblocking(False)
        create = partial(self.connection, config=self.config, server_state=self.server_state, app_state={})
        connecting = (loop.connect_accepted_socket(create, client) for client in clients)
        await asyncio.gather(*connecting, return_exceptions=True)  # a client may have disconnected already

    async def close_idle_connections(self, sock: socket.socket) -> None:
        """Close overdue connections and accept waiting ones, four times a second."""
        while True:
            await asyncio.sleep(CLOSE_INTERVAL)
            if self.started and not self.should_exit:
                await self.accept_backlog([sock])  # the event loop accepts one connection per iteration
            now = self.connection.clock()
            connections = list(self.server_state.connections)
            self.supervisor.metrics.connections.set(len(connections))
            for connection in connections:
                if isinstance(connection, Connection):
                    connection.close_if_overdue(now)


# Sockets


def bind_socket(host: str, port: int) -> socket.socket:
    """Create a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        hint = "choose another --port; 0 takes a free one"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", hint=hint) from error
    sock.setblocking(False)
    return sock


def inherit_socket(number: int) -> socket.socket:
    """Take over a listening socket, so that two servers can replace each other without a gap."""
    try:
        sock = socket.socket(fileno=number)
        sock.getsockname()
    except OSError as error:
        raise ConfigError(f"--fd {number} is not a socket: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def get_socket_url(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# Serving


def serve(options: ServerOptions, sock: socket.socket, *, on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; `on_listening` is called with the URL when clients may connect."""
    configure_logging(options.log_format, handler=StderrHandler(), has_timestamps=True)
    loop_factory = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415  faster, and not available on every platform

        loop_factory = uvloop.new_event_loop
    set_malloc_thresholds(trim=2**23, mmap=2**22)  # return the memory of large requests to the system
    reduce_preemption()
    with nonblocking_stderr(), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run_server(create_server(options), sock, on_listening=on_listening))


async def run_server(server: GracefulServer, sock: socket.socket, *, on_listening: Callable[[str], None]) -> None:
    """Run the front end and its worker until the server is asked to stop."""
    supervisor = server.supervisor
    tasks = [asyncio.create_task(each) for each in (supervisor.run(), server.close_idle_connections(sock))]
    if supervisor.models:
        tasks[0].add_done_callback(lambda _: setattr(server, "should_exit", True))  # it ends only with an exception
    with server.capture_signals():  # from before the URL is known until the worker has ended
        try:
            while server.shares_socket and not (supervisor.was_ready or server.should_exit):
                await asyncio.sleep(0.05)
            if not server.should_exit:
                on_listening(get_socket_url(sock))
                await server.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            supervisor.close()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks[0]  # raises the exception of the supervisor, if there was one


def create_server(
    options: ServerOptions, *, launch: Launch = launch_worker, clock: RunningClock | None = None
) -> GracefulServer:
    """Connect the parts of a server along the path of a request."""
    limits, clock = options.config.limits, clock or RunningClock()
    queue = RequestQueue(limits, metrics=Metrics(), clock=clock)
    supervisor = Supervisor(options, queue=queue, clock=clock, launch=launch)
    request_filter = RequestFilter(create_app(supervisor), options, queue=queue)
    connections = min(limits.connections, raise_descriptor_limit())
    connection = create_connection_class(replace(limits, connections=connections), request_filter, clock=clock)
    settings: dict[str, Any] = {"http": connection, "ws": "none", "lifespan": "off", "interface": "asgi3"}
    settings |= dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
    uvicorn_config = uvicorn.Config(request_filter, backlog=BACKLOG, log_config=None, **settings)
    return GracefulServer(uvicorn_config, supervisor=supervisor, connection=connection)


def raise_descriptor_limit() -> int:
    """Raise the limit on file descriptors as far as allowed, and return the connections that it permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED_DESCRIPTORS)


def reduce_preemption() -> None:
    """Use Linux' batch scheduling, and exempt everything loaded so far from garbage collection.

    With SCHED_BATCH a process that receives a message does not preempt the one that computes, and receives several
    together.
    """
    with contextlib.suppress(AttributeError, OSError):  # other systems, and sandboxes
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.collect()
    gc.freeze()
