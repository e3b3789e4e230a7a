"""Guarantees S5 to S7: hostile images, malformed HTTP, bombs and generated requests.

python tests/soak/attacks.py [--size full] [--only S5,S6,S7] [--out FILE.json]

Only servers started by this process on loopback are attacked.
"""

import argparse
import functools
import http.client
import itertools
import json
import os
import random
import re
import socket
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: the directory of this file would hide the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from server.serving import RunningServer, encode_image, run_server, save_tiny_model
from soak.bombs import BOMBS
from soak.faults import Finding
from soak.malformed import inconsistent_requests, malformed_http, raw
from soak.sizes import Size

DATA = Path(os.environ.get("VITKIT_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
HOSTILE = DATA / "hostile" / "hostile-images.tar.gz"
MAX_GROWTH = 64 << 20
MAX_SECONDS = 0.1
PATHS = ("/v1/predict?top=2", "/v1/features", "/v1/attention", "/v1/predict?nearest=3", "/v1/attention?layer=0&head=1")


# --- images


def valid_images() -> list[bytes]:
    """Return an image in each format."""
    return [
        encode_image(number, image_format=name)
        for number, name in enumerate(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"))
    ]


def hostile_images() -> list[bytes]:
    """Return the collected files that broke other decoders, if they are available."""
    if not HOSTILE.is_file():
        return []
    with tarfile.open(HOSTILE) as archive:
        return [stream.read() for member in archive if (stream := archive.extractfile(member)) is not None]


WRONG_NUMBERS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff", b"\x80\0\0\0")


def mutate(contents: Sequence[bytes], *, count: int, seed: int) -> Iterator[bytes]:
    """Flip bits, truncate files, insert parts of others, and replace numbers in headers."""
    rng = random.Random(seed)
    for _ in range(count):
        content = bytearray(rng.choice(contents)[: 1 << 20])
        for _ in range(rng.randrange(1, 4)):
            offset = rng.randrange(len(content) + 1)
            match rng.randrange(5):
                case 0:
                    for _ in range(rng.randrange(1, 12)):
                        if content:
                            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                case 1:
                    del content[offset:]
                case 2:
                    other = rng.choice(contents)
                    start = rng.randrange(len(other) + 1)
                    content[offset : offset + rng.randrange(64)] = other[start : start + rng.randrange(512)]
                case 3:  # sizes are near the start
                    here = rng.randrange(min(len(content), 64) + 1)
                    number = rng.choice(WRONG_NUMBERS)
                    content[here : here + len(number)] = number
                case _:
                    del content[offset : offset + rng.randrange(1, 200)]
        yield bytes(content)


# --- monitoring


@dataclass
class ServerMonitor:
    """Memory and processes of a server since the creation of this object."""

    server: RunningServer
    worker: int = 0
    before: int = 0

    def __post_init__(self) -> None:
        self.worker = self.server.worker()
        self.before = self.memory()

    def memory(self) -> int:
        """Return the resident bytes of front end and worker."""
        return sum(status(process, "VmRSS") for process in (self.server.process.pid, self.worker))

    def check(self, result: Finding) -> None:
        """Record every violation."""
        result.expect(self.server.process.poll() is None, "the server ended")
        result.expect(self.server.worker() == self.worker, "the worker was replaced")
        restarts = re.search(
            rb"^vitkit_worker_restarts\w*(?:_total)? ([0-9.]+)$", self.server.get("/metrics").body, re.MULTILINE
        )
        result.expect(restarts is None or float(restarts[1]) == 0, f"the worker was started again: {restarts}")
        growth = self.memory() - self.before
        result.most("MB grown", growth / 2**20)
        result.expect(growth < MAX_GROWTH, f"memory grew by {growth / 2**20:.0f} MB")
        result.expect(self.server.get("/v2/health/ready").status == 200, "it is not ready afterwards")


def status(process: int, key: str) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process, with a resolution of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_expected_status(code: int) -> bool:
    """Return whether a status is a success or a client error."""
    return code == 200 or 400 <= code < 500


# --- S5


@dataclass
class Client:
    """A client with a kept-alive connection."""

    server: RunningServer
    statuses: Counter[int] = field(default_factory=Counter)
    connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Return status and body; a connection that was closed meanwhile is opened again, once."""
        for attempt in (0, 1):
            if self.connection is None:
                host = self.server.url.removeprefix("http://")
                self.connection = http.client.HTTPConnection(host, timeout=60)
            try:
                self.connection.request("POST", path, body, headers or {})
                response = self.connection.getresponse()
                content = response.read()
            except (ConnectionError, http.client.HTTPException):
                self.close()
                if attempt:
                    raise
                continue
            if response.will_close:
                self.close()
            self.statuses[response.status] += 1
            return response.status, content
        raise AssertionError

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def send_images(server: RunningServer, contents: Iterable[bytes], result: Finding, *, connections: int = 4) -> None:
    """Send every image, with several connections and routes in turn."""
    clients = [Client(server) for _ in range(connections)]
    turns = zip(itertools.cycle(clients), itertools.cycle(PATHS), contents, strict=False)
    for number, (client, path, content) in enumerate(turns):
        code, body = client.post(path, content)
        result.count("images sent")
        if not result.expect(is_expected_status(code), f"image {number} to {path}: {code} {body[:200]!r}"):
            return
        response = json.loads(body)
        result.expect(("error" in response) == (code != 200), f"image {number}: {code} {body[:100]!r}")
    for client in clients:
        for code, count in client.statuses.items():
            result.count(f"{code}", count)
        client.close()


def exchange(server: RunningServer, content: bytes, *, timeout: float = 3.0) -> bytes:
    """Send bytes and return what the server sends until it closes the connection or is silent."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=timeout) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        except OSError:  # closed meanwhile, or silent
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all responses in the received bytes."""
    return [int(code) for code in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]


def send_malformed_http(server: RunningServer, result: Finding) -> None:
    """Send every malformed request on its own connection; a smuggled request must not be answered."""
    for name, content in malformed_http().items():
        answer = exchange(server, content)
        codes = [code for code in statuses(answer) if code != 100]
        result.count("malformed requests")
        result.count(f"malformed: {codes[0] if codes else 'closed'}")
        wrong = [code for code in codes if not is_expected_status(code)]
        result.expect(not wrong, f"{name}: {codes} {answer[:200]!r}")
        if name.startswith("smuggled"):
            result.expect(len(codes) <= 1, f"{name}: answered {codes}")
        result.expect(b"root:" not in answer and b"Traceback" not in answer, f"{name}: {answer[:300]!r}")


def send_hostile(folder: Path, size: Size) -> Finding:
    """S5: send hostile images, mutated images and malformed HTTP."""
    result = Finding("only 200 and 4xx, no dead worker, memory growth below 64 MB")
    collected = hostile_images()
    count = {"small": 300, "medium": 3000, "full": 30_000}[size]
    with server_with_short_timeouts(folder) as server:
        send_images(server, valid_images() * 3, result)  # warm-up
        watch = ServerMonitor(server)
        send_images(server, collected[:: 1 if size == "full" else 12], result)
        send_images(server, mutate([*valid_images(), *collected], count=count, seed=2020), result)
        send_malformed_http(server, result)
        watch.check(result)
    result.figures["collected files"] = len(collected)
    return result


def server_with_short_timeouts(folder: Path) -> Any:
    """Run a server with short timeouts."""
    model = folder / "pets"
    if not model.exists():
        save_tiny_model(model)
    return run_server(model, "limits.receive=2", "limits.keep_alive=2")


# --- S6


@dataclass(frozen=True)
class Cost:
    """Cost of a request: seconds until the response, CPU seconds of the server, peak memory."""

    seconds: float
    work: float
    memory: int
    status: int
    message: str


def measure_cost(server: RunningServer, send: Callable[[], tuple[int, bytes]]) -> Cost:
    """Measure one request to an idle server, with the peak memory of both processes."""
    processes = (server.process.pid, server.worker())
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")  # reset VmHWM
    before = [status(process, "VmRSS") for process in processes]
    work_before = sum(map(cpu_seconds, processes))
    start = time.perf_counter()
    code, body = send()
    seconds = time.perf_counter() - start
    work = sum(map(cpu_seconds, processes)) - work_before
    grown = sum(status(process, "VmHWM") - start for process, start in zip(processes, before, strict=True))
    return Cost(seconds, work, max(0, grown), code, body[:120].decode("utf-8", "replace"))


def send_endless_body(server: RunningServer) -> tuple[int, bytes]:
    """Send an endless chunked body until the server responds."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw("/v1/predict", headers=["Transfer-Encoding: chunked"]))
        piece = b"40000\r\n" + bytes(0x40000) + b"\r\n"
        connection.setblocking(True)
        connection.settimeout(0.001)
        answer = b""
        for _ in range(4000):
            try:
                connection.settimeout(5)
                connection.sendall(piece)
                connection.settimeout(0.0005)
                answer += connection.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if answer:
                break
        codes = statuses(answer)
        return (codes[0] if codes else 0), answer.partition(b"\r\n\r\n")[2]


def bombs(folder: Path, size: Size) -> Finding:
    """S6: send files that are small and would be expensive to decode."""
    result = Finding("rejected or answered within 100 ms and 64 MB")
    with server_with_short_timeouts(folder) as server:
        client = Client(server)
        for body in valid_images():
            client.post("/v1/predict", body)
        requests: dict[str, Callable[[], tuple[int, bytes]]] = {}
        for name, build in BOMBS.items():
            requests[name] = functools.partial(client.post, "/v1/predict", build())
        for name, (path, body, headers) in inconsistent_requests().items():
            requests[name] = functools.partial(client.post, path, body, headers)
        gzipped = {"Content-Encoding": "gzip"}
        requests["gzip body"] = lambda: client.post("/v1/predict", b"\x1f\x8b" + bytes(1000), gzipped)
        requests["endless chunked body"] = lambda: send_endless_body(server)
        times = 3 if size != "small" else 2
        rows = []
        for name, send in requests.items():
            costs = [measure_cost(server, send) for _ in range(times)]
            best = min(costs, key=lambda cost: cost.seconds)
            memory = min(cost.memory for cost in costs)
            work = min(cost.work for cost in costs)
            measured = [round(1000 * best.seconds), round(1000 * work), round(memory / 2**20)]
            rows.append([name, *measured, best.status, best.message])
            result.count("bombs")
            result.expect(is_expected_status(best.status), f"{name}: {best}")
            result.expect(memory < MAX_GROWTH, f"{name}: {memory / 2**20:.0f} MB")
            # CPU time of the server: elapsed time depends on other programs.
            result.expect(work <= MAX_SECONDS, f"{name}: {measured} ms, ms of work, MB; {best.status}")
            result.most("slowest response, ms", 1000 * best.seconds)
            result.most("most work, ms", 1000 * work)
            result.most("most memory, MB", memory / 2**20)
        client.close()
    result.figures["rows"] = rows
    return result


# --- S7


def generated_requests(folder: Path, size: Size) -> Finding:
    """S7: send requests that schemathesis generates from the OpenAPI description, and validate the responses."""
    result = Finding("no 5xx, and no response outside the description")
    with server_with_short_timeouts(folder) as server:
        watch = ServerMonitor(server)
        fuzz(server, result, examples={"small": 6, "medium": 60, "full": 400}[size])
        watch.check(result)
    return result


def fuzz(server: RunningServer, result: Finding, *, examples: int, seed: int = 2020) -> None:
    """Send `examples` generated requests to each operation."""
    import hypothesis  # noqa: PLC0415  not needed for the other guarantees
    import schemathesis  # noqa: PLC0415
    from schemathesis.checks import not_a_server_error  # noqa: PLC0415
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for parsed in schema.get_all_operations():
        operation = parsed.ok()
        label = operation.label

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy())
        def send(case: Any) -> None:
            result.count("generated requests")
            case.call_and_validate(checks=checks)

        try:
            send()
        except Exception as error:  # every exception is a violation
            result.expect(False, f"{label}: {' '.join(str(error).split())[:600]}")
        result.count("operations")


CAMPAIGNS: dict[str, Callable[[Path, Size], Finding]] = {
    "S5": send_hostile,
    "S6": bombs,
    "S7": generated_requests,
}


def main() -> int:
    """Run the selected campaigns; return 1 if a guarantee is violated."""
    parser = argparse.ArgumentParser(description="Attack a local server.")
    parser.add_argument("--size", choices=["small", "medium", "full"], default="small")
    parser.add_argument("--only", default="", help="comma-separated: S5,S6,S7")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    results = {}
    for name, campaign in CAMPAIGNS.items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            result = campaign(Path(folder), arguments.size)
        figures = {key: value for key, value in result.figures.items() if key != "rows"}
        print(f"{name} {'passed' if result.passed else 'FAILED'} {figures} {time.monotonic() - start:.0f} s")
        for row in result.figures.get("rows", []):  # type: ignore[attr-defined]
            print("   ", *row, sep=" | ")
        for failure in result.failures[:40]:
            print("   ", failure)
        results[name] = {"passed": result.passed, "figures": result.figures, "failures": result.failures}
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    return int(not all(each["passed"] for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
