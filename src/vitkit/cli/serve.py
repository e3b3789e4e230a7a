"""`vitkit serve`: trained models go in, a server that answers for images comes out, with a page for people."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.machine import set_malloc
from vitkit.cli.output import safe_text

if TYPE_CHECKING:
    from socket import socket

    from vitkit.serve.config import Precision


@click.command("serve")
@click.argument("runs_and_settings", nargs=-1, metavar="[NAME=]RUN… [SECTION.KEY=VALUE…]")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; others need a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, bf16 or int8, or several: fp32,int8.")
@click.option("--runs", type=click.Path(path_type=Path), help="A folder of runs whose curves the page shows.")
@click.option("--token-file", type=click.Path(path_type=Path), help="A file with the token that clients must send.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Images to measure bf16 and int8 on.")
@click.option("--fd", type=click.IntRange(min=0), help="A listening socket to take over, by its number.")
@click.option("--access-log", is_flag=True, help="A line on stderr for each request.")
def command(
    runs_and_settings: tuple[str, ...],
    host: str,
    port: int,
    precision: str,
    runs: Path | None,
    token_file: Path | None,
    calibration: Path | None,
    fd: int | None,
    access_log: bool,
) -> None:
    """Answer for images over HTTP with RUN, a run or weights of any origin, or several under their names.

    Prints the address; open it in a browser, or send images:

    \b
    vitkit serve runs/photos
    curl --data-binary @cat.jpg http://127.0.0.1:8000/v1/predict
    vitkit serve pets=runs/a birds=runs/b limits.deadline=5 --port 0

    Only this machine can reach it, unless --host says otherwise; then clients need a token, from VITKIT_TOKEN or
    --token-file. SIGTERM and Ctrl-C let it answer what it has accepted first. /docs lists the addresses, /metrics is
    for Prometheus, /v2 is KServe's protocol.

    \b
    limits.queue=0          images accepted and not yet answered, beyond: 429; 0 is 15 a thread, at least 30
    limits.batch=8          images computed together
    limits.deadline=10      seconds until an accepted request is given up: 504
    limits.receive=10       seconds to receive a whole request: 408
    limits.keep_alive=5     seconds that a connection may be idle
    limits.drain=30         seconds to answer the rest when asked to stop
    limits.bytes=20000000   of a request: 413
    limits.buffer=256000000 bytes of all requests that are held: 429
    limits.pixels=50000000  of an image: 422
    limits.images=16        in one request
    limits.connections=4096 open at once
    engine.device=auto      cpu, cuda, mps, or auto
    engine.threads=0        of one batch; 0 is one a core
    engine.decoders=0       requests whose images are decoded at once; 0 is by the cores
    engine.merge=0          tokens merged in each layer
    hosts=NAME,NAME         other names that clients may call it by
    """
    try:
        from vitkit.serve.server import Server, serve, tell
    except ImportError as error:
        from vitkit.core.errors import ConfigError

        if error.name is not None and error.name.startswith("vitkit"):
            raise
        raise ConfigError(f"serving needs {error.name}", hint="pip install 'vitkit[serve]'") from error
    from vitkit.serve.config import settings_and_models
    from vitkit.serve.talk import fill_standard_files, say

    fill_standard_files()
    settings, models = settings_and_models(runs_and_settings, precisions=chosen(precision))
    if not models and runs is None:
        raise click.UsageError("nothing to serve: name a RUN, or --runs DIR")
    if runs is not None and not runs.is_dir():
        raise click.UsageError(f"{runs} is no folder")
    token = token_of(token_file)
    handed_down = fd if fd is not None else socket_of_systemd()
    sock, host = listening(handed_down, host=host, port=port, has_token=token is not None)
    set_malloc(trim_above=2**23, map_above=2**22)  # what a large request took is given back
    wanted = Server(
        models=models,
        settings=settings,
        host=host,
        token=token,
        runs=runs,
        calibration=calibration,
        access_log=access_log,
    )
    serve(
        wanted,
        sock,
        shared=handed_down is not None,
        say=lambda text: say("\n".join(map(safe_text, text.splitlines()))),
        listens=tell,
    )


def chosen(text: str) -> "tuple[Precision, ...]":
    """The precisions, in their order.

    >>> chosen("fp32,int8")
    ('fp32', 'int8')
    """
    from vitkit.serve.config import PRECISIONS

    parts = dict.fromkeys(part.strip() for part in text.split(","))
    found = tuple(each for part in parts for each in PRECISIONS if each == part)
    if len(found) != len(parts):
        raise click.BadParameter(
            f"expected fp32, bf16 or int8, or several of them, got {text}", param_hint="--precision"
        )
    return found


def listening(handed_down: int | None, *, host: str, port: int, has_token: bool) -> "tuple[socket, str]":
    """The socket to listen on, and the address by which it is reached; one that others can reach needs a token."""
    from vitkit.serve.config import is_loopback
    from vitkit.serve.server import bind, inherited

    sock = None if handed_down is None else inherited(handed_down)
    if sock is not None and isinstance(sock.getsockname(), tuple):
        host = sock.getsockname()[0]  # whoever opened it has chosen who can reach it
    if not is_loopback(host) and not has_token:
        raise click.UsageError(f"{host} can be reached from other machines, which needs a token: set VITKIT_TOKEN")
    return sock or bind(host, port), host


def token_of(file: Path | None) -> str | None:
    """The token in a file, or in the environment."""
    if file is None:
        token, place = os.environ.get("VITKIT_TOKEN", "").strip(), "VITKIT_TOKEN"
        if not token:
            return None
    else:
        try:
            token, place = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file}: the token cannot be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError(f"{place} holds no token: expected letters and digits on one line")
    return token


def socket_of_systemd() -> int | None:
    """The number of the socket that systemd hands down to this process, if it does."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        return 3
    return None
