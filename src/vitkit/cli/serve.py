"""`vitkit serve`."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.core.environment import set_malloc_thresholds
from vitkit.core.formatting import get_log_format

if TYPE_CHECKING:
    from collections.abc import Sequence
    from socket import socket

    from vitkit.server.config import ModelConfig, ServeConfig


@click.command("serve")
@click.argument("runs_and_settings", nargs=-1, metavar="[NAME=]RUN… [SECTION.KEY=VALUE…]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a token.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--precision", default="fp32", show_default=True, help="fp32, bf16 or int8, or several: fp32,int8.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of runs whose curves the web page shows.",
)
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the token that clients must send.")
@click.option("--calibration", type=click.Path(), help="Images to compare bf16 and int8 with fp32 on.")
@click.option("--fd", type=click.IntRange(min=0), help="File descriptor of a listening socket to take over.")
@click.option("--access-log", is_flag=True, help="Log every request.")
def command(
    runs_and_settings: tuple[str, ...],
    host: str,
    port: int,
    precision: str,
    runs: Path | None,
    token_file: Path | None,
    calibration: str | None,
    fd: int | None,
    access_log: bool,
) -> None:
    """Serve models over HTTP, with a web page.

    RUN is a run directory, an artifact or a weight file of any format. The URL is printed when clients may connect:

    \b
    vitkit serve runs/photos
    curl --data-binary @cat.jpg http://127.0.0.1:8000/v1/predict
    vitkit serve pets=runs/a birds=runs/b limits.deadline=5 --port 0

    By default the server can be reached from this machine only. Any other --host needs a token, from VITKIT_TOKEN or
    --token-file. On SIGTERM or Ctrl-C accepted requests are answered first. /docs lists the routes, /metrics is for
    Prometheus, /v2 is the KServe protocol.

    \b
    limits.target_delay=0.5 seconds in the queue; requests that would wait longer: 429
    limits.batch=8          images processed together
    limits.deadline=10      seconds to answer an accepted request: 504
    limits.receive=10       seconds to receive a request: 408
    limits.keep_alive=5     seconds that a connection may be idle
    limits.drain=30         seconds to answer accepted requests before exit
    limits.bytes=20000000   bytes of a request: 413
    limits.buffer=256000000 bytes of all requests in memory: 429
    limits.pixels=50000000  pixels of an image: 422
    limits.images=16        images per request
    limits.connections=4096 open connections
    engine.device=auto      cpu, cuda, mps, or auto
    engine.threads=0        CPU threads; 0 is one per core
    engine.decoders=0       requests decoded at the same time; 0 is by the cores
    engine.merge=0          tokens merged per layer
    hosts=NAME,NAME         additional host names that clients may use
    """
    require_server()
    from vitkit.server.config import ServerOptions
    from vitkit.server.server import serve
    from vitkit.server.stderr import open_standard_files

    open_standard_files()
    config, models = parse_models(runs_and_settings, precision)
    if not models and runs is None:
        raise click.UsageError("nothing to serve: pass a RUN, or --runs DIR")
    token = read_token(token_file)
    inherited = fd if fd is not None else systemd_socket()
    sock, host = open_socket(inherited, host=host, port=port, has_token=token is not None)
    set_malloc_thresholds(trim=2**23, mmap=2**22)  # return the memory of large requests to the system
    options = ServerOptions(
        models=models,
        config=config,
        host=host,
        token=token,
        runs=runs,
        calibration=calibration,
        access_log=access_log,
        log_format=get_log_format(),
        shares_socket=inherited is not None,
    )
    serve(options, sock, on_listening=click.echo)


def require_server() -> None:
    """Raise MissingDependencyError if the packages of the extra `serve` are not installed."""
    try:
        importlib.import_module("vitkit.server.server")
    except ImportError as error:
        from vitkit.core.errors import MissingDependencyError

        if error.name is not None and error.name.startswith("vitkit"):
            raise
        raise MissingDependencyError(f"serving needs {error.name}", hint="pip install 'vitkit[serve]'") from error


def parse_models(arguments: "Sequence[str]", precision: str) -> "tuple[ServeConfig, tuple[ModelConfig, ...]]":
    """Parse the runs and settings."""
    from vitkit.core.errors import ConfigError, summarize
    from vitkit.server.config import parse_arguments, parse_precisions

    try:
        precisions = parse_precisions(precision)
    except ConfigError as error:
        raise click.BadParameter(summarize(error), param_hint="--precision") from error
    return parse_arguments(arguments, precisions=precisions)


def open_socket(inherited: int | None, *, host: str, port: int, has_token: bool) -> "tuple[socket, str]":
    """Return a listening socket and its host; require a token if other machines can reach it."""
    from vitkit.server.config import is_loopback
    from vitkit.server.server import bind_socket, inherit_socket

    sock = None if inherited is None else inherit_socket(inherited)
    if sock is not None and isinstance(sock.getsockname(), tuple):
        host = sock.getsockname()[0]
    if not is_loopback(host) and not has_token:
        if sock is not None:
            sock.close()
        raise click.UsageError(f"{host} can be reached from other machines, which needs a token: set VITKIT_TOKEN")
    return sock or bind_socket(host, port), host


def read_token(path: Path | None) -> str | None:
    """Read the token from a file or from the environment."""
    if path is None:
        token, source = os.environ.get("VITKIT_TOKEN", "").strip(), "VITKIT_TOKEN"
        if not token:
            return None
    else:
        try:
            token, source = path.read_text(encoding="utf-8").strip(), str(path)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{path}: cannot read the token: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError(f"{source} has no valid token: expected letters and digits on one line")
    return token


def systemd_socket() -> int | None:
    """Return the file descriptor of a socket passed by systemd."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        return 3
    return None
