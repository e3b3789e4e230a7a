"""`vitkit serve` as a process under test, its resources and capacity, and inference without a server."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from soak.load import LoadResponse, LoadResult, closed_loop, due_times, message, open_loop, run

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("VITKIT_TEST_DATA", HERE.parents[2] / "shared" / "data"))
WEIGHTS, PHOTOS = DATA / "weights" / "Ti_16-augreg-imagenet.npz", DATA / "photos"
CLIENTS = 2 * (os.cpu_count() or 1)
"""Clients of a closed loop: two per thread keep every thread busy, and are accepted by every queue."""


class ServerError(AssertionError):
    """The server did not start or did not become ready."""


@dataclass
class Subject:
    """A model to serve, and photos to send."""

    name: str
    model: Path
    photos: list[Path]

    def requests(self, path: str = "/v1/predict", *, headers: Sequence[str] = ()) -> list[bytes]:
        return [message(path, photo.read_bytes(), headers=headers) for photo in self.photos]


def tiny(folder: Path) -> Subject:
    """Create a model of two small layers and images of 32 pixels: most of the cost is that of the server."""
    import vitkit  # noqa: PLC0415

    model = folder / "tiny"
    settings = {"width": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
    if not (model / "model.safetensors").exists():
        created = vitkit.create("Ti/16", image_size=32, num_classes=10, settings=settings)
        vitkit.save(created, model, labels=[f"class {number}" for number in range(10)])
    return Subject("a ViT of width 32 and depth 2", model, write_photos(folder / "drawn", side=32))


def usual(folder: Path) -> Subject:
    """Choose Ti/16 at 224 pixels with published weights and photos, or random ones if these are not available."""
    import vitkit  # noqa: PLC0415

    if WEIGHTS.is_file() and PHOTOS.is_dir():
        return Subject("Ti/16 and photos", WEIGHTS, sorted(PHOTOS.glob("*.jpg"))[::16])
    model = folder / "usual"
    if not (model / "model.safetensors").exists():
        created = vitkit.create("Ti/16", image_size=224, num_classes=1000)
        vitkit.save(created, model, labels=[f"class {number}" for number in range(1000)])
    return Subject("Ti/16 of random weights", model, write_photos(folder / "large", side=320))


def write_photos(folder: Path, *, side: int, count: int = 16) -> list[Path]:
    """Write images of smooth noise as JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=85)
    return paths


@dataclass
class Server:
    """A running `vitkit serve`: front end and worker."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def children(self) -> list[psutil.Process]:
        """Return the living child processes of the front end, the largest first."""
        children = []
        for child in self.front.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    children.append((child.memory_info().rss, child.pid, child))
        return [child for _, _, child in sorted(children, key=lambda each: each[:2], reverse=True)]

    def worker(self) -> psutil.Process:
        """Return the worker: the process with the models."""
        children = self.children()
        if not children:
            raise ServerError(f"the server has no worker; its log: {self.log_text()[-500:]}")
        return children[0]

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds of front end and worker."""
        spent = {"front": sum(self.front.cpu_times()[:2]), "worker": 0.0}
        for child in self.children():
            spent["worker"] += sum(child.cpu_times()[:2])
        return spent

    def resources(self) -> dict[str, float]:
        """Return memory in MB and open descriptors of all processes."""
        processes = [self.front, *self.children()]
        return {
            "MB": sum(each.memory_info().rss for each in processes) / 1e6,
            "descriptors": sum(each.num_fds() for each in processes),
        }

    def connections(self) -> set[int]:
        """Return the client ports of open connections."""
        return {each.raddr.port for each in self.front.net_connections("tcp") if each.raddr}

    def resources_at_rest(self) -> dict[str, float]:
        """Return the resources after all connections are closed."""
        self.until(lambda: not self.connections(), seconds=10.0)
        return self.resources()

    def get(self, path: str, *, seconds: float = 5.0) -> tuple[int, bytes]:
        """Send one request; the status is 0 without a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def is_ready(self) -> bool:
        return self.get("/v2/health/ready")[0] == 200

    def figures(self) -> dict[str, float]:
        """Return /metrics by name and labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def until(self, condition: Callable[[], bool], *, seconds: float, every: float = 0.02) -> float:
        """Wait for a condition; return the seconds it took, or infinity."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if condition():
                return time.monotonic() - start
            time.sleep(every)
        return float("inf")

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, *, seconds: float = 60.0) -> int:
        """Send SIGTERM and return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def start(model: Path, *settings: str, log: Path, listener: socket.socket | None = None) -> Server:
    """Start the command on a free port or an existing socket, and read its URL.

    It may not be ready yet, except on an existing socket.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    address_options = ["--port", "0"] if listener is None else ["--fd", str(listener.fileno())]
    command = [sys.executable, "-m", "vitkit", "serve", f"subject={model}", *address_options, *settings]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"NO_COLOR": "1"},
            start_new_session=True,
            pass_fds=() if listener is None else [listener.fileno()],
        )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address.startswith("http://"):
        process.kill()
        process.wait()
        process.stdout.close()
        log_text = log.read_text(encoding="utf-8", errors="replace")
        raise ServerError(f"the server printed {address!r} as its URL, and logged: {log_text[-1000:]}")
    return Server(process, int(address.rsplit(":", 1)[1].rstrip("/")), log)


@contextlib.contextmanager
def serving(model: Path, *settings: str, log: Path, seconds: float = 120.0) -> Iterator[Server]:
    """Run a server that is ready; kill all its processes at the end."""
    server = start(model, *settings, log=log)
    try:
        server.until(lambda: server.is_ready() or server.process.poll() is not None, seconds=seconds, every=0.1)
        if not server.is_ready():
            raise ServerError(f"not ready; its log: {server.log_text()[-1000:]}")
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    """Stop a server and kill its remaining processes."""
    left = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = server.children()
    if server.process.poll() is None:
        try:
            server.stop(seconds=15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if server.process.stdout:
        server.process.stdout.close()


def bare(subject: Subject, *, batch: int, seconds: float, loops: int = 1) -> dict[str, float]:
    """Measure inference without a server, in `loops` processes: images, seconds and CPU seconds in total.

    Compare a server whose two processes are both busy with two loops: hyper-threads of one core slow each other down.
    """
    command = [sys.executable, str(HERE / "bare.py"), str(subject.model), str(batch), str(seconds)]
    command += map(str, subject.photos)
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(loops)
    ]
    totals: dict[str, float] = {}
    for process in running:
        output, errors = process.communicate(timeout=600)
        if process.returncode:
            raise ServerError(f"the loop without a server failed: {errors[-500:]}")
        for name, number in json.loads(output).items():
            totals[name] = totals.get(name, 0.0) + number
    return totals


def run_arrivals_without_server(subject: Subject, *, rate: float, seconds: float, even: bool, seed: int) -> LoadResult:
    """Measure the same arrivals in threads of one process, without a server."""
    command = [sys.executable, str(HERE / "bare_arrivals.py"), str(subject.model)]
    command += map(str, (rate, seconds, "even" if even else "random", seed, *subject.photos))
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600 + seconds)
    if completed.returncode:
        raise ServerError(f"the threads without a server failed: {completed.stderr[-500:]}")
    return LoadResult(
        [LoadResponse(due, due, done, 200, -1, at) for at, (due, done) in enumerate(json.loads(completed.stdout))]
    )


def warm(server: Server, subject: Subject) -> None:
    """Send requests for two seconds as a warm-up."""
    run(closed_loop(server.port, subject.requests(), clients=CLIENTS, seconds=2.0))


def peak(server: Server, subject: Subject, *, seconds: float) -> float:
    """Measure the capacity in images per second with a closed loop."""
    outcome = run(closed_loop(server.port, subject.requests(), clients=CLIENTS, seconds=seconds))
    assert outcome.count_other(200) == 0, f"a closed loop of {CLIENTS} clients was answered {outcome.statuses()}"
    return outcome.rate()


def at(
    server: Server, subject: Subject, *, rate: float, seconds: float, even: bool = False, seed: int = 0
) -> LoadResult:
    return run(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds, even=even, seed=seed)))
