"""Real server processes, small models and HTTP requests for tests."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitkit
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

TIMEOUT = 300.0
"""Seconds after which a test fails; only a server that hangs takes that long, on however busy a machine."""
GENEROUS_LIMITS = {"target_delay": 600, "deadline": 600, "receive": 60, "keep_alive": 60}
"""Limits with which a server rejects no request because the machine is busy."""


@dataclass(frozen=True)
class HTTPResponse:
    """Status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """HTTP client for the server at a URL; every request has its own connection."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def get(self, path: str, **headers: str) -> HTTPResponse:
        return request(self.url + path, headers=headers)

    def post(self, path: str, body: bytes, **headers: str) -> HTTPResponse:
        return request(self.url + path, body=body, headers=headers)

    def is_ready(self) -> bool:
        return self.get("/v2/health/ready").status == 200

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").body.decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@dataclass
class RunningServer(Client):
    """A `vitkit serve` process and the lines it has logged."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)

    def worker(self) -> int:
        """Return the process id of the worker."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(child) for child in path.read_text().split()]
        return next(
            child for child in children if b"vitkit.server.worker_start" in Path(f"/proc/{child}/cmdline").read_bytes()
        )


def request(
    url: str, *, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
) -> HTTPResponse:
    """Send one request; underscores in header names stand for hyphens."""
    address, _, path = url.removeprefix("http://").partition("/")
    named = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request(method or ("GET" if body is None else "POST"), f"/{path}", body=body, headers=named)
        response = connection.getresponse()
        lowered = {name.lower(): value for name, value in response.getheaders()}
        return HTTPResponse(response.status, lowered, response.read())
    finally:
        connection.close()


def wait_until(condition: Callable[[], Any], *, timeout: float = TIMEOUT, interval: float = 0.02) -> Any:
    """Poll a condition until it is true and return its value."""
    event, end = threading.Event(), time.monotonic() + timeout
    while time.monotonic() < end:
        if value := condition():
            return value
        event.wait(interval)
    raise AssertionError(f"not true within {timeout} s")


def save_tiny_model(path: Path, *, num_classes: int = 3, seed: int = 0, image_size: int = 32, depth: int = 2) -> Path:
    """Save a small model whose predictions differ from image to image."""
    config = ViTConfig(
        image_size=image_size, patch_size=8, width=32, depth=depth, heads=2, mlp_dim=64, num_classes=num_classes
    )
    model = ViT(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    if num_classes:
        torch.nn.init.normal_(model.head.weight, std=1.0, generator=torch.Generator().manual_seed(seed))
    vitkit.save(model, path, labels=[f"class-{index}" for index in range(num_classes)])
    return path


def encode_image(seed: int = 0, *, side: int = 40, image_format: str = "PNG") -> bytes:
    """Encode an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, image_format)
    return file.getvalue()


@contextmanager
def start_server(
    *arguments: object, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[RunningServer]:
    """Run `vitkit serve` on a free port, with generous limits if none are given; it may not be ready yet."""
    command = [sys.executable, "-m", "vitkit", "serve", *map(str, arguments)]
    limits = {f"limits.{name}": value for name, value in GENEROUS_LIMITS.items()}
    command += [f"{name}={value}" for name, value in limits.items() if not any(name in part for part in command)]
    if "--port" not in command and "--fd" not in command:
        command += ["--port", "0"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, **options
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda pipe=process.stderr: log.extend(pipe), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().strip()
        yield RunningServer(url, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(TIMEOUT)
            finally:
                process.kill()
                process.wait()
        reader.join(TIMEOUT)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def run_server(*arguments: object, environment: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """Run `vitkit serve` and wait until its models are ready."""
    with start_server(*arguments, environment=environment) as server:
        assert server.url.startswith("http"), "".join(server.log)
        wait_until(lambda: server.process.poll() is not None or server.is_ready())
        assert server.process.poll() is None, "".join(server.log)
        yield server
