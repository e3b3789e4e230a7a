"""`vitkit serve`."""

import os
from pathlib import Path
from typing import Any

import click

from vitkit.cli.options import PRECISIONS


@click.command("serve")
@click.argument("runs_and_settings", nargs=-1, metavar="[NAME=]RUN… [SECTION.KEY=VALUE…]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a token.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--precision",
    type=PRECISIONS,
    default="fp32",
    show_default=True,
    help="fp32, bf16 or int8, or several: fp32,int8.",
)
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
    runs_and_settings: tuple[str, ...], runs: Path | None, token_file: Path | None, fd: int | None, **options: Any
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
    import vitkit
    from vitkit.core.errors import summarize
    from vitkit.server.config import TokenError, parse_arguments
    from vitkit.server.stderr import open_standard_files

    open_standard_files()
    models, settings = parse_arguments(runs_and_settings)
    if not models and runs is None:
        raise click.UsageError("nothing to serve: pass a RUN, or --runs DIR")
    try:
        vitkit.serve(
            models,
            runs=runs,
            token=None if token_file is None else read_token(token_file),
            settings=settings,
            fd=fd if fd is not None else systemd_socket(),
            **options,
        )
    except TokenError as error:
        raise click.UsageError(summarize(error)) from error


def read_token(path: Path) -> str:
    """Read the token from a file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path}: cannot read the token: {error}") from error


def systemd_socket() -> int | None:
    """Return the file descriptor of a socket passed by systemd."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        return 3
    return None
