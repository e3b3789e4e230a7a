"""A model and settings go in; `vitkit serve` as a process that can be asked, measured and hit comes out."""

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
from soak.load import Answer, Seen, closed_loop, due_times, message, open_loop, run

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("VITKIT_TEST_DATA", HERE.parents[2] / "shared" / "data"))
WEIGHTS, PHOTOS = DATA / "weights" / "Ti_16-augreg-imagenet.npz", DATA / "photos"
CLIENTS = 8
"""Of a closed loop: enough to keep every thread at work, and fewer than half of the shortest line."""


class ServerError(AssertionError):
    """The server did not do what any of this needs: start, or become ready."""


@dataclass
class Subject:
    """What is served, and what it is asked: a model's place and the contents of photos."""

    name: str
    model: Path
    photos: list[Path]

    def requests(self, path: str = "/v1/predict", *, headers: Sequence[str] = ()) -> list[bytes]:
        return [message(path, photo.read_bytes(), headers=headers) for photo in self.photos]


def tiny(folder: Path) -> Subject:
    """A model of two small layers and pictures of 32 pixels: what is left of a request's cost is the server's own."""
    import vitkit  # noqa: PLC0415

    model = folder / "tiny"
    settings = ("width=32", "depth=2", "heads=2", "mlp_dim=64")
    if not (model / "model.safetensors").exists():
        created = vitkit.create("Ti/16", image_size=32, classes=10, settings=settings)
        vitkit.save(created, model, labels=[f"class {number}" for number in range(10)])
    return Subject("a ViT of width 32 and depth 2", model, drawn(folder / "drawn", side=32))


def usual(folder: Path) -> Subject:
    """Ti/16 at 224 pixels: published weights and photos where they are, else random weights and drawn pictures."""
    import vitkit  # noqa: PLC0415

    if WEIGHTS.is_file() and PHOTOS.is_dir():
        return Subject("Ti/16 and photos", WEIGHTS, sorted(PHOTOS.glob("*.jpg"))[::16])
    model = folder / "usual"
    if not (model / "model.safetensors").exists():
        created = vitkit.create("Ti/16", image_size=224, classes=1000)
        vitkit.save(created, model, labels=[f"class {number}" for number in range(1000)])
    return Subject("Ti/16 of random weights", model, drawn(folder / "large", side=320))


def drawn(folder: Path, *, side: int, count: int = 16) -> list[Path]:
    """Pictures of smooth noise, as JPEG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=85)
    return paths


@dataclass
class Server:
    """A running `vitkit serve`: the front, and below it the process that computes."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def below(self) -> list[psutil.Process]:
        """The processes that the front has started and that are alive, the largest first."""
        found = []
        for child in self.front.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append((child.memory_info().rss, child.pid, child))
        return [child for _, _, child in sorted(found, key=lambda each: each[:2], reverse=True)]

    def worker(self) -> psutil.Process:
        """The process that computes: the one that holds the models."""
        below = self.below()
        if not below:
            raise ServerError(f"the server has no worker; its last words: {self.words()[-500:]}")
        return below[0]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, of the front and of all below it."""
        spent = {"front": sum(self.front.cpu_times()[:2]), "worker": 0.0}
        for child in self.below():
            spent["worker"] += sum(child.cpu_times()[:2])
        return spent

    def holds(self) -> dict[str, float]:
        """Megabytes of memory and open descriptors, of all its processes together."""
        everyone = [self.front, *self.below()]
        return {
            "MB": sum(each.memory_info().rss for each in everyone) / 1e6,
            "descriptors": sum(each.num_fds() for each in everyone),
        }

    def connections(self) -> set[int]:
        """The ports of the clients that it has a socket for."""
        return {each.raddr.port for each in self.front.net_connections("tcp") if each.raddr}

    def holds_at_rest(self) -> dict[str, float]:
        """The same, once it has noticed that its clients have gone."""
        self.until(lambda: not self.connections(), seconds=10.0)
        return self.holds()

    def get(self, path: str, *, seconds: float = 5.0) -> tuple[int, bytes]:
        """Ask once, on a connection of its own; status 0 where there is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def is_ready(self) -> bool:
        return self.get("/v2/health/ready")[0] == 200

    def figures(self) -> dict[str, float]:
        """What /metrics says, by name and labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def until(self, condition: Callable[[], bool], *, seconds: float, every: float = 0.02) -> float:
        """Wait for something; how long it took, or infinity where it did not come in time."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if condition():
                return time.monotonic() - start
            time.sleep(every)
        return float("inf")

    def words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, *, seconds: float = 60.0) -> int:
        """Ask it to end, and its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def start(model: Path, *settings: str, log: Path, listener: socket.socket | None = None) -> Server:
    """Start the command, on a port of its own or on a socket that is there, and read its address.

    It may not be ready yet; on a given socket it says its address only once it is.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    place = ["--port", "0"] if listener is None else ["--fd", str(listener.fileno())]
    command = [sys.executable, "-m", "vitkit", "serve", f"subject={model}", *place, *settings]
    with log.open("ab") as words:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
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
        words_said = log.read_text(encoding="utf-8", errors="replace")
        raise ServerError(f"the server said {address!r} for its address, and: {words_said[-1000:]}")
    return Server(process, int(address.rsplit(":", 1)[1].rstrip("/")), log)


@contextlib.contextmanager
def serving(model: Path, *settings: str, log: Path, seconds: float = 120.0) -> Iterator[Server]:
    """A server that is ready; whatever is left of it at the end is killed."""
    server = start(model, *settings, log=log)
    try:
        server.until(lambda: server.is_ready() or server.process.poll() is not None, seconds=seconds, every=0.1)
        if not server.is_ready():
            raise ServerError(f"not ready; its last words: {server.words()[-1000:]}")
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    """Make sure that nothing of a server is left."""
    left = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = server.below()
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
    """What the same photos cost in loops without a server, a batch of so many at a time: images and seconds of all.

    Where a server's two processes are both at work, compare it with two loops: cores may be two threads of one, and
    the same work then takes more CPU time on each while the other is busy.
    """
    command = [sys.executable, str(HERE / "bare.py"), str(subject.model), str(batch), str(seconds)]
    command += map(str, subject.photos)
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(loops)
    ]
    found: dict[str, float] = {}
    for process in running:
        said, errors = process.communicate(timeout=600)
        if process.returncode:
            raise ServerError(f"the loop without a server failed: {errors[-500:]}")
        for name, number in json.loads(said).items():
            found[name] = found.get(name, 0.0) + number
    return found


def bare_at(subject: Subject, *, rate: float, seconds: float, even: bool, seed: int) -> Seen:
    """What the same arrivals come to in threads of one process, a core each, without a server."""
    command = [sys.executable, str(HERE / "bare_arrivals.py"), str(subject.model)]
    command += map(str, (rate, seconds, "even" if even else "random", seed, *subject.photos))
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600 + seconds)
    if said.returncode:
        raise ServerError(f"the threads without a server failed: {said.stderr[-500:]}")
    return Seen([Answer(due, due, done, 200, -1, at) for at, (due, done) in enumerate(json.loads(said.stdout))])


def warm(server: Server, subject: Subject) -> None:
    """A few seconds of requests, so that what happens once has happened."""
    run(closed_loop(server.port, subject.requests(), clients=CLIENTS, seconds=2.0))


def peak(server: Server, subject: Subject, *, seconds: float) -> float:
    """Images a second when there is always one waiting: the capacity."""
    seen = run(closed_loop(server.port, subject.requests(), clients=CLIENTS, seconds=seconds))
    assert seen.others(200) == 0, f"a closed loop of {CLIENTS} clients was answered {seen.statuses()}"
    return seen.rate()


def at(server: Server, subject: Subject, *, rate: float, seconds: float, even: bool = False, seed: int = 0) -> Seen:
    return run(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds, even=even, seed=seed)))
