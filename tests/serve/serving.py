"""A model on the disk, the real server in a process of its own, and waiting for things without sleeping for long."""

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

PATIENCE = 60.0
"""Seconds until a test gives up on the server: it may share its cores with many others."""
PATIENT = f"""
import sys
from vitkit.cli.main import main
from vitkit.serve import supervisor
supervisor.HUNG = {PATIENCE}
sys.exit(main())
"""
"""The command `vitkit` that leaves a worker alone which a test has stopped: the test may be slow itself."""


@dataclass
class Running:
    """A server: its address, its process, and what it has said on stderr so far."""

    url: str
    process: "subprocess.Popen[str]"
    talk: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.url

    def get(self, path: str, **headers: str) -> "Reply":
        return request(self.url + path, headers=headers)

    def post(self, path: str, body: bytes, **headers: str) -> "Reply":
        return request(self.url + path, body=body, headers=headers)

    def worker(self) -> int:
        """The process id of the worker."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(child) for child in path.read_text().split()]
        return next(
            child for child in children if b"vitkit.serve.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        )


@dataclass(frozen=True)
class Reply:
    """An answer: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    url: str, *, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Reply:
    """One request on a connection of its own; underscores in headers' names stand for hyphens."""
    place, _, path = url.removeprefix("http://").partition("/")
    named = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    connection = http.client.HTTPConnection(place, timeout=PATIENCE)
    try:
        connection.request(method or ("GET" if body is None else "POST"), f"/{path}", body=body, headers=named)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def until(what: Callable[[], Any], *, within: float = PATIENCE, every: float = 0.02) -> Any:
    """What comes of asking again and again until it is true; an error after `within` seconds."""
    event, end = threading.Event(), time.monotonic() + within
    while time.monotonic() < end:
        if found := what():
            return found
        event.wait(every)
    raise AssertionError(f"not true within {within} s")


def is_ready(server: Running) -> bool:
    """Whether its models answer."""
    return server.get("/v2/health/ready").status == 200


def metric(server: Running, name: str) -> float:
    """One number of /metrics."""
    lines = server.get("/metrics").body.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def tiny_model(folder: Path, *, classes: int = 3, seed: int = 0, image_size: int = 32, depth: int = 2) -> Path:
    """A small model whose answers differ from image to image, written as a run keeps it."""
    config = ViTConfig(image_size=image_size, patch_size=8, width=32, depth=depth, heads=2, mlp_dim=64, classes=classes)
    model = ViT(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    if classes:
        torch.nn.init.normal_(model.head.weight, std=1.0, generator=torch.Generator().manual_seed(seed))
    vitkit.save(model, folder, labels=[f"class-{number}" for number in range(classes)])
    return folder


def picture(seed: int = 0, *, side: int = 40, kind: str = "PNG") -> bytes:
    """An image file of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@contextmanager
def started(
    *arguments: object, environment: dict[str, str] | None = None, patient: bool = False, **options: Any
) -> Iterator[Running]:
    """`vitkit serve` with these arguments on a free port, its address known, perhaps not ready yet."""
    program = ["-c", PATIENT] if patient else ["-m", "vitkit"]
    command = [sys.executable, *program, "serve", *map(str, arguments)]
    if "--port" not in command and "--fd" not in command:
        command += ["--port", "0"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, **options
    )
    assert process.stdout is not None
    assert process.stderr is not None
    talk: list[str] = []
    reader = threading.Thread(target=lambda pipe=process.stderr: talk.extend(pipe), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().strip()
        yield Running(url, process, talk)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            finally:
                process.kill()
                process.wait()
        reader.join(PATIENCE)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def served(
    run: Path | str, *arguments: object, environment: dict[str, str] | None = None, patient: bool = False
) -> Iterator[Running]:
    """A server of one model that answers; its address is `server.url`, its front `server.process`."""
    with started(run, *arguments, environment=environment, patient=patient) as server:
        assert server.url.startswith("http"), "".join(server.talk)
        until(lambda: server.process.poll() is not None or server.get("/v2/health/ready").status == 200)
        assert server.process.poll() is None, "".join(server.talk)
        yield server
