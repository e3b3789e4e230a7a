"""Speed of a model on this machine, export to other runtimes and libraries, and serving."""

import asyncio
import importlib
import os
import pathlib
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.core.console import logger
from vitkit.core.errors import ConfigError, MissingDependencyError, check_not_negative, check_positive
from vitkit.core.formatting import get_log_format
from vitkit.exporters.exporter import ExportResult, export_model
from vitkit.inference.benchmark import BenchmarkResult, benchmark_model
from vitkit.inference.engine import check_precision, resolve_device
from vitkit.server.background import Server, start_server
from vitkit.server.config import TOKEN_VARIABLE, ServerOptions, TokenError, configure_server, default_name, is_loopback
from vitkit.typing import DataSource, ModelSource, Path, Settings
from vitkit.weights.load import save, source_name


@public
def benchmark(
    model: ModelSource,
    *,
    images: DataSource | None = None,
    batch_size: Sequence[int] = (1, 8, 32),
    precision: Sequence[str] = ("fp32", "bf16", "int8"),
    merge: int = 0,
    seconds: float = 2.0,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> BenchmarkResult:
    """Measure how fast and how exactly this machine runs a model, with every engine and precision.

    All engines are timed in turns, which gives a fair comparison on a busy machine too. Each is compared with the
    unmodified model in fp32.

    Args:
        model: A run, an artifact, weights of any format, or a model. A name such as "B/16" means random weights, and
            nothing is downloaded.
        images: Images on which agreement with fp32 is measured; by default one synthetic image.
        batch_size: Batch sizes to measure.
        precision: Precisions to measure: fp32, bf16, int8.
        merge: Also merge so many tokens in every layer.
        seconds: Time per engine and batch size.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode `images`; by default none, because there are at most 64.
        progress: Show progress; None shows it where it fits the display.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 1})
    >>> result = vitkit.benchmark(model, batch_size=[2], precision=["fp32"], seconds=0.0, progress=False)
    >>> result.rows[0].engine, result.rows[0].batch_size, result.rows[0].images_per_second > 0
    ('torch, eager', 2, True)
    """
    for name, values in (("batch_size", batch_size), ("precision", precision)):
        if not values:
            raise ConfigError(f"{name} has no values to measure", hint=f"use {name}=[…]")
    for size in batch_size:
        check_positive("batch_size", size)
    check_not_negative("seconds", seconds)
    with show_progress(progress) as report_progress:
        return benchmark_model(
            model,
            images=images,
            batch_sizes=batch_size,
            precisions=[check_precision(each) for each in precision],
            merge=merge,
            seconds=seconds,
            device=resolve_device(str(device)),
            workers=workers or 0,
            report=logger.info,
            progress=report_progress,
        )


@public
def export(
    model: ModelSource,
    out: Path,
    *,
    to: str = "huggingface",
    images: DataSource | None = None,
    settings: Settings | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ExportResult:
    """Write a model as a program for a runtime, or as weights for another library, and verify it.

    `out` is a new directory with labels, preprocessing and an example.py that does not need vitkit; or, with the suffix
    .npz or .pth, a file with only the weights. What is written is run and compared with the model before it gets its
    name: if the top-1 class of an image or a logit (by more than 1e-4) differs, nothing is left. Repeating an export
    changes nothing.

    Args:
        model: A run, an artifact, a weight file of any format, the name of a published model, or a model itself.
        out: The directory or file to write.
        to: A program: onnx, torch, openvino. Weights: huggingface, timm, google, torchvision, and other formats.
        images: Images for the verification; by default built-in ones.
        settings: Settings that change what the model computes, for formats that cannot represent it otherwise.
        overwrite: Replace `out`.
        progress: Show progress; None shows it where it fits the display.

    >>> import tempfile, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=2, settings={"depth": 1})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     vitkit.export(model, f"{directory}/model.npz", to="google", progress=False).files
    ('model.npz', 'model.npz.verification.json')
    """
    with show_progress(progress) as report_progress:
        return export_model(
            model,
            pathlib.Path(out),
            to=to,
            images=images,
            settings=settings or {},
            overwrite=overwrite,
            report=logger.info,
            progress=report_progress,
        )


@public
def serve(  # noqa: PLR0913  the options of `vitkit serve`
    models: ModelSource | Mapping[str, ModelSource] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    precision: Sequence[str] = ("fp32",),
    runs: Path | None = None,
    token: str | None = None,
    calibration: Path | None = None,
    settings: Settings | None = None,
    access_log: bool = False,
    fd: int | None = None,
    block: bool = True,
) -> Server:
    """Serve models over HTTP, with a web page, until SIGTERM or Ctrl-C.

    The URL is printed when clients may connect. With `block=False` the same server runs in a child process, and the
    call returns when its models are ready: `with vitkit.serve(model, port=0, block=False) as server:` stops it at the
    end, and so does the end of this program.

    Args:
        models: A model, or models by the names that clients use. Models in memory are written to a temporary artifact.
        host: Address to listen on. By default the server can be reached from this machine only.
        port: Port; 0 takes a free one.
        precision: fp32, bf16 or int8, or several of them.
        runs: Directory of runs whose curves the web page shows.
        token: Token that clients must send; by default VITKIT_TOKEN. An address other than loopback needs one.
        calibration: Images to compare bf16 and int8 with fp32 on.
        settings: Settings such as {"limits.deadline": 5}; `vitkit serve --help` lists them.
        access_log: Log every request.
        fd: File descriptor of a listening socket to take over.
        block: Serve in this process and return when the server has stopped.

    >>> import vitkit
    >>> vitkit.serve(host="0.0.0.0", runs=".", block=False)
    Traceback (most recent call last):
    vitkit.server.config.TokenError: 0.0.0.0 can be reached from other machines, which needs a token: set VITKIT_TOKEN
    """
    _require_server()
    if block:
        _check_can_block()
    if isinstance(models, list | tuple):
        raise ConfigError("several models need names", got="a list", hint='serve({"photos": "runs/photos"})')
    if models is None and runs is None:
        raise ConfigError("nothing to serve", hint="pass a model, or runs=DIRECTORY")
    with ExitStack() as cleanup:
        sources = _write_models(models, cleanup)
        precisions = [check_precision(each) for each in dict.fromkeys(precision)]
        config, configured = configure_server(sources, settings or {}, precisions=precisions)
        token = check_token(os.environ.get(TOKEN_VARIABLE, "").strip() or None if token is None else token)
        sock, host = _open_socket(fd, host=host, port=port, has_token=token is not None)
        options = ServerOptions(
            models=configured,
            config=config,
            host=host,
            token=token,
            runs=None if runs is None else pathlib.Path(runs),
            calibration=None if calibration is None else os.fspath(calibration),
            access_log=access_log,
            log_format=get_log_format(),
            shares_socket=fd is not None,
        )
        if not block:
            started = start_server(options, sock)
            started.on_stop = cleanup.pop_all().close
            return started
        from vitkit.server import server

        urls: list[str] = []

        def announce(url: str) -> None:
            urls.append(url)
            print(url, flush=True)  # noqa: T201  the caller waits in this call, and nothing else reports the port

        server.serve(options, sock, on_listening=announce)
        return Server(urls[0] if urls else "")


def check_token(token: str | None) -> str | None:
    """Return a token, or raise TokenError if clients could not send it."""
    if token is not None and (not token or not token.isascii() or not token.isprintable()):
        raise TokenError("the token is not valid", expected="letters and digits on one line")
    return token


def _require_server() -> None:
    """Raise ConfigError on Windows, and MissingDependencyError without the packages of the extra `serve`."""
    try:
        importlib.import_module("resource")
    except ImportError as error:
        hint = "on Windows, install vitkit in WSL and serve from there"
        raise ConfigError("serving needs Linux, macOS or WSL", hint=hint) from error
    try:
        importlib.import_module("vitkit.server.server")
    except ImportError as error:
        if error.name is not None and error.name.startswith("vitkit"):
            raise
        raise MissingDependencyError(f"serving needs {error.name}", hint="pip install 'vitkit[serve]'") from error


def _check_can_block() -> None:
    """Raise ConfigError where a server cannot handle signals or has no event loop of its own."""
    problem = "this is not the main thread" if threading.current_thread() is not threading.main_thread() else None
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        problem = "an event loop is running here, as in a notebook"
    if problem is not None:
        raise ConfigError(f"cannot serve in this process: {problem}", hint="use block=False")


def _write_models(models: ModelSource | Mapping[str, ModelSource] | None, cleanup: ExitStack) -> dict[str, str]:
    """Return the paths or names of models by name; models in memory are written to a temporary directory."""
    if models is None:
        return {}
    sources: dict[str, str] = {}
    for name, source in (models if isinstance(models, Mapping) else {"": models}).items():
        if isinstance(source, torch.nn.Module):
            directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="vitkit-serve-"))
            path = str(save(source, pathlib.Path(directory) / "model"))
            sources[name or "model"] = path
        else:
            path = source_name(source)
            sources[name or default_name(path)] = path
    return sources


def _open_socket(fd: int | None, *, host: str, port: int, has_token: bool) -> tuple[socket.socket, str]:
    """Return a listening socket and its host; require a token if other machines can reach it."""
    from vitkit.server.server import bind_socket, inherit_socket

    sock = None if fd is None else inherit_socket(fd)
    if sock is not None and isinstance(sock.getsockname(), tuple):
        host = sock.getsockname()[0]
    if not is_loopback(host) and not has_token:
        if sock is not None:
            sock.close()
        raise TokenError(f"{host} can be reached from other machines, which needs a token: set VITKIT_TOKEN")
    return sock or bind_socket(host, port), host
