"""Server in a child process, for programs and notebooks that continue while it runs.

The parent opens the socket and passes it on. It writes the options to the child's stdin as one line of JSON, so that no
token appears on a command line, and keeps stdin open: the child stops when it closes, even if the parent crashes. The
child answers with one line of JSON on stdout: its URL when it accepts requests, or the error that prevents it.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.core import errors
from vitkit.core.config import from_mapping, to_mapping
from vitkit.core.errors import VitkitError
from vitkit.server.config import TOKEN_VARIABLE, ModelConfig, ServeConfig, ServerOptions

STOP_SECONDS = 10.0
"""Seconds that a server may take to stop, in addition to `limits.drain`."""


class Server:
    """A server that `vitkit.serve` has started; as a context it stops at the end.

    Args:
        url: Address of the server.
        process: The process of the server; None if it has ended.
        drain: Seconds that the server has to answer accepted requests.
    """

    on_stop: Callable[[], object]
    """Called after the server has ended."""

    def __init__(self, url: str, *, process: "subprocess.Popen[bytes] | None" = None, drain: float = 0.0) -> None:
        self.url, self.process, self.drain, self.on_stop = url, process, drain, lambda: None
        if process is not None:
            atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        """Whether the server still runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Answer accepted requests and end the server. A server that has ended is left alone."""
        process, self.process = self.process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        end_process(process, seconds=self.drain + STOP_SECONDS)
        self.on_stop()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server(url={self.url!r}, is_running={self.is_running})"


def start_server(options: ServerOptions, sock: socket.socket) -> Server:
    """Start a server in a child process, and return when it accepts requests.

    It has a process group of its own, so that Ctrl-C interrupts only the parent, and its models are ready.
    """
    with sock:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitkit.server.background", str(sock.fileno())],
            pass_fds=[sock.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            process_group=0,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; the exit code says so below
            process.stdin.write(json.dumps(options_to_json(options)).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        process.stdout.close()
        if not line:
            raise VitkitError(f"the server ended with exit code {process.wait()}", hint="its messages are on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["type"])(answer["error"], hint=answer["hint"])
    except BaseException:
        end_process(process, seconds=0.0)
        raise
    return Server(answer["url"], process=process, drain=options.config.limits.drain)


def end_process(process: "subprocess.Popen[bytes]", *, seconds: float) -> None:
    """Ask a process to end, kill it if it does not within some seconds, and close its pipes."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def options_to_json(options: ServerOptions) -> dict[str, object]:
    """Return the options as JSON values.

    >>> options = ServerOptions(models=[ModelConfig(name="a", source="runs/a")], config=ServeConfig(), token="x")
    >>> options_from_json(options_to_json(options)) == options
    True
    """
    return vars(options) | {
        "models": [vars(model) for model in options.models],
        "config": to_mapping(options.config),
        "runs": None if options.runs is None else str(options.runs),
    }


def options_from_json(values: dict[str, Any]) -> ServerOptions:
    """Return the options that `options_to_json` has described."""
    models = [ModelConfig(**model) for model in values["models"]]
    runs = None if values["runs"] is None else Path(values["runs"])
    config = from_mapping(ServeConfig, values["config"])
    return ServerOptions(**{**values, "models": models, "runs": runs, "config": config})


# Child process


def main(descriptor: int) -> int:
    """Serve on the socket of a descriptor with the options on stdin, and return the exit code."""
    from vitkit.server.server import inherit_socket, serve  # noqa: PLC0415  the parent does not need it

    options = replace(options_from_json(json.loads(sys.stdin.buffer.readline())), shares_socket=True)
    threading.Thread(target=stop_with_parent, name="parent", daemon=True).start()
    try:
        serve(options, inherit_socket(descriptor), on_listening=lambda url: answer_parent(url=url))
    except VitkitError as error:
        kind = next(base.__name__ for base in type(error).__mro__ if hasattr(errors, base.__name__))
        answer_parent(type=kind, error=error.summary, hint=error.hint)
        return 1
    return 0


def answer_parent(**values: object) -> None:
    """Write a line of JSON to stdout."""
    with contextlib.suppress(OSError):  # the parent has read its line, or has ended
        os.write(1, json.dumps(values).encode() + b"\n")


def stop_with_parent() -> None:
    """Wait until the parent closes stdin or ends, and stop."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
