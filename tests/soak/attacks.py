"""A running server goes in; hostile images, odd HTTP, bombs and made-up questions are put to it; what it did comes out.

python tests/soak/attacks.py [--full] [--only S5,S6,S7] [--out FILE.json]

Only servers of this process's own, on the loopback, are asked.
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

if __name__ == "__main__":  # run as a script, this file's folder comes first, and would hide the package of its name
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from serve.serving import Running, picture, served, tiny_model
from soak.bombs import BOMBS
from soak.faults import Finding
from soak.odd import odd_http, questions, raw
from soak.sizes import Size

DATA = Path(os.environ.get("VITKIT_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
HOSTILE = DATA / "hostile" / "hostile-images.tar.gz"
MOST_GROWTH = 64 << 20
MOST_SECONDS = 0.1
ASKED = ("/v1/predict?top=2", "/v1/features", "/v1/attention", "/v1/predict?nearest=3", "/v1/attention?layer=0&head=1")


# --- what is sent


def own_images() -> list[bytes]:
    """A picture of each format."""
    return [
        picture(number, kind=kind) for number, kind in enumerate(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"))
    ]


def hostile_images() -> list[bytes]:
    """The collected files that broke other readers; none where they are not here."""
    if not HOSTILE.is_file():
        return []
    with tarfile.open(HOSTILE) as archive:
        return [stream.read() for member in archive if (stream := archive.extractfile(member)) is not None]


LIES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff", b"\x80\0\0\0")


def mutated(contents: Sequence[bytes], *, count: int, seed: int) -> Iterator[bytes]:
    """Files with bits flipped, ends cut off, parts of others put in, numbers in their headers replaced."""
    chance = random.Random(seed)
    for _ in range(count):
        content = bytearray(chance.choice(contents)[: 1 << 20])
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(content) + 1)
            match chance.randrange(5):
                case 0:
                    for _ in range(chance.randrange(1, 12)):
                        if content:
                            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                case 1:
                    del content[place:]
                case 2:
                    other = chance.choice(contents)
                    start = chance.randrange(len(other) + 1)
                    content[place : place + chance.randrange(64)] = other[start : start + chance.randrange(512)]
                case 3:  # sizes stand in the beginning
                    here = chance.randrange(min(len(content), 64) + 1)
                    lie = chance.choice(
                        [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff", b"\x80\0\0\0"]
                    )
                    content[here : here + len(lie)] = lie
                case _:
                    del content[place : place + chance.randrange(1, 200)]
        yield bytes(content)


# --- who is watched


@dataclass
class Watch:
    """The memory and the processes of a server, from a moment on."""

    server: Running
    worker: int = 0
    before: int = 0

    def __post_init__(self) -> None:
        self.worker = self.server.worker()
        self.before = self.memory()

    def memory(self) -> int:
        """Bytes that front and worker hold."""
        return sum(status(process, "VmRSS") for process in (self.server.process.pid, self.worker))

    def judge(self, finding: Finding) -> None:
        """Write down what may not be."""
        finding.expect(self.server.process.poll() is None, "the server ended")
        finding.expect(self.server.worker() == self.worker, "the worker was replaced")
        restarts = re.search(
            rb"^vitkit_worker_restarts\w*(?:_total)? ([0-9.]+)$", self.server.get("/metrics").body, re.MULTILINE
        )
        finding.expect(restarts is None or float(restarts[1]) == 0, f"the worker was started again: {restarts}")
        growth = self.memory() - self.before
        finding.most("MB grown", growth / 2**20)
        finding.expect(growth < MOST_GROWTH, f"memory grew by {growth / 2**20:.0f} MB")
        finding.expect(self.server.get("/v2/health/ready").status == 200, "it is not ready afterwards")


def status(process: int, key: str) -> int:
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def work_of(process: int) -> float:
    """Seconds that a process has computed for, to a hundredth."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_fine(code: int) -> bool:
    """Whether an answer is one that a client's mistake may get: never a failure of the server."""
    return code == 200 or 400 <= code < 500


# --- S5


@dataclass
class Client:
    """A connection that is kept alive as long as the server lets it."""

    server: Running
    statuses: Counter[int] = field(default_factory=Counter)
    connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """The answer; a connection that was closed meanwhile is opened again, once."""
        for attempt in (0, 1):
            if self.connection is None:
                host = self.server.url.removeprefix("http://")
                self.connection = http.client.HTTPConnection(host, timeout=60)
            try:
                self.connection.request("POST", path, body, headers or {})
                answer = self.connection.getresponse()
                content = answer.read()
            except (ConnectionError, http.client.HTTPException):
                self.close()
                if attempt:
                    raise
                continue
            if answer.will_close:
                self.close()
            self.statuses[answer.status] += 1
            return answer.status, content
        raise AssertionError

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def send_images(server: Running, contents: Iterable[bytes], finding: Finding, *, connections: int = 4) -> None:
    """Ask of each, by several connections in turn, one route after the other."""
    clients = [Client(server) for _ in range(connections)]
    turns = zip(itertools.cycle(clients), itertools.cycle(ASKED), contents, strict=False)
    for number, (client, path, content) in enumerate(turns):
        code, body = client.post(path, content)
        finding.count("images sent")
        if not finding.expect(is_fine(code), f"image {number} to {path}: {code} {body[:200]!r}"):
            return
        said = json.loads(body)
        finding.expect(("error" in said) == (code != 200), f"image {number}: {code} {body[:100]!r}")
    for client in clients:
        for code, count in client.statuses.items():
            finding.count(f"{code}", count)
        client.close()


def exchanged(server: Running, content: bytes, *, patience: float = 3.0) -> bytes:
    """What comes back for bytes, until the server closes the connection or says nothing for a while."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=patience) as link:
        try:
            link.sendall(content)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                answer += piece
        except OSError:  # it was closed meanwhile, or nothing came
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    """The statuses of all answers in what came back."""
    return [int(code) for code in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]


def send_odd_http(server: Running, finding: Finding) -> None:
    """Each oddity on a connection of its own; what is smuggled may not be answered."""
    for name, content in odd_http().items():
        answer = exchanged(server, content)
        codes = [code for code in statuses(answer) if code != 100]
        finding.count("odd requests")
        finding.count(f"odd: {codes[0] if codes else 'closed'}")
        wrong = [code for code in codes if not is_fine(code)]
        finding.expect(not wrong, f"{name}: {codes} {answer[:200]!r}")
        if name.startswith("smuggled"):
            finding.expect(len(codes) <= 1, f"{name}: answered {codes}")
        finding.expect(b"root:" not in answer and b"Traceback" not in answer, f"{name}: {answer[:300]!r}")


def hostile(folder: Path, size: Size) -> Finding:
    """S5: collected hostile images, mutations of them, and odd HTTP."""
    finding = Finding("only 200 and 4xx; no 5xx, no worker's death, memory grows by less than 64 MB")
    collected = hostile_images()
    count = {"small": 300, "medium": 3000, "full": 30_000}[size]
    with quick_server(folder) as server:
        send_images(server, own_images() * 3, finding)  # so that what is loaded once is loaded
        watch = Watch(server)
        send_images(server, collected[:: 1 if size == "full" else 12], finding)
        send_images(server, mutated([*own_images(), *collected], count=count, seed=2020), finding)
        send_odd_http(server, finding)
        watch.judge(finding)
    finding.figures["collected files"] = len(collected)
    return finding


def quick_server(folder: Path) -> Any:
    """A server that soon gives up on slow clients."""
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    return served(model, "limits.receive=2", "limits.keep_alive=2")


# --- S6


@dataclass(frozen=True)
class Cost:
    """What a request cost: seconds until the answer, those of the server's own work, memory at the most, the answer."""

    seconds: float
    work: float
    memory: int
    status: int
    said: str


def cost_of(server: Running, ask: Callable[[], tuple[int, bytes]]) -> Cost:
    """The cost of one request to an idle server, by the highest memory of both processes."""
    processes = (server.process.pid, server.worker())
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = [status(process, "VmRSS") for process in processes]
    worked = sum(map(work_of, processes))
    began = time.perf_counter()
    code, body = ask()
    seconds = time.perf_counter() - began
    work = sum(map(work_of, processes)) - worked
    grown = sum(status(process, "VmHWM") - start for process, start in zip(processes, before, strict=True))
    return Cost(seconds, work, max(0, grown), code, body[:120].decode("utf-8", "replace"))


def endless(server: Running) -> tuple[int, bytes]:
    """A chunked body without an end: it is sent until the server answers."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(raw("/v1/predict", headers=["Transfer-Encoding: chunked"]))
        piece = b"40000\r\n" + bytes(0x40000) + b"\r\n"
        link.setblocking(True)
        link.settimeout(0.001)
        answer = b""
        for _ in range(4000):
            try:
                link.settimeout(5)
                link.sendall(piece)
                link.settimeout(0.0005)
                answer += link.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if answer:
                break
        codes = statuses(answer)
        return (codes[0] if codes else 0), answer.partition(b"\r\n\r\n")[2]


def bombs(folder: Path, size: Size) -> Finding:
    """S6: what is small to send and would be large to take."""
    finding = Finding("refused or answered within 100 ms and 64 MB")
    with quick_server(folder) as server:
        client = Client(server)
        for body in own_images():
            client.post("/v1/predict", body)
        asked: dict[str, Callable[[], tuple[int, bytes]]] = {}
        for name, build in BOMBS.items():
            asked[name] = functools.partial(client.post, "/v1/predict", build())
        for name, (path, body, headers) in questions().items():
            asked[name] = functools.partial(client.post, path, body, headers)
        gzipped = {"Content-Encoding": "gzip"}
        asked["gzip body"] = lambda: client.post("/v1/predict", b"\x1f\x8b" + bytes(1000), gzipped)
        asked["endless chunked body"] = lambda: endless(server)
        times = 3 if size != "small" else 2
        rows = []
        for name, ask in asked.items():
            costs = [cost_of(server, ask) for _ in range(times)]
            best = min(costs, key=lambda cost: cost.seconds)
            memory = min(cost.memory for cost in costs)
            work = min(cost.work for cost in costs)
            took = [round(1000 * best.seconds), round(1000 * work), round(memory / 2**20)]
            rows.append([name, *took, best.status, best.said])
            finding.count("bombs")
            finding.expect(is_fine(best.status), f"{name}: {best}")
            finding.expect(memory < MOST_GROWTH, f"{name}: {memory / 2**20:.0f} MB")
            # By the server's own work: how long the bytes take to come depends on who else is at work on the machine.
            finding.expect(work <= MOST_SECONDS, f"{name}: {took} ms, ms of work, MB; {best.status}")
            finding.most("slowest answer, ms", 1000 * best.seconds)
            finding.most("most work, ms", 1000 * work)
            finding.most("most memory, MB", memory / 2**20)
        client.close()
    finding.figures["rows"] = rows
    return finding


# --- S7


def made_up(folder: Path, size: Size) -> Finding:
    """S7: schemathesis makes up questions by the server's own description, and holds the answers against it."""
    finding = Finding("no 5xx, and no answer that the description does not know")
    with quick_server(folder) as server:
        watch = Watch(server)
        fuzz(server, finding, examples={"small": 6, "medium": 60, "full": 400}[size])
        watch.judge(finding)
    return finding


def fuzz(server: Running, finding: Finding, *, examples: int, seed: int = 2020) -> None:
    """Ask so many questions of each operation."""
    import hypothesis  # noqa: PLC0415  not needed for the other promises
    import schemathesis  # noqa: PLC0415
    from schemathesis.checks import not_a_server_error  # noqa: PLC0415
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
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
        def ask(case: Any) -> None:
            finding.count("made-up questions")
            case.call_and_validate(checks=checks)

        try:
            ask()
        except Exception as error:  # of many kinds; each is a finding
            finding.expect(False, f"{label}: {' '.join(str(error).split())[:600]}")
        finding.count("operations")


CAMPAIGNS: dict[str, Callable[[Path, Size], Finding]] = {"S5": hostile, "S6": bombs, "S7": made_up}


def main() -> int:
    """Run the campaigns that were asked for; 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(description="Attack a server of one's own.")
    parser.add_argument("--size", choices=["small", "medium", "full"], default="small")
    parser.add_argument("--only", default="", help="S5, S6, S7, by commas")
    parser.add_argument("--out", type=Path, help="write what was seen to this file as JSON")
    arguments = parser.parse_args()
    seen = {}
    for name, campaign in CAMPAIGNS.items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            finding = campaign(Path(folder), arguments.size)
        figures = {key: value for key, value in finding.figures.items() if key != "rows"}
        print(f"{name} {'kept' if finding.kept else 'NOT KEPT'} {figures} {time.monotonic() - began:.0f} s")
        for row in finding.figures.get("rows", []):  # type: ignore[attr-defined]
            print("   ", *row, sep=" | ")
        for failure in finding.failures[:40]:
            print("   ", failure)
        seen[name] = {"kept": finding.kept, "figures": finding.figures, "failures": finding.failures}
    if arguments.out:
        arguments.out.write_text(json.dumps(seen, indent=2, default=str) + "\n", encoding="utf-8")
    return int(not all(each["kept"] for each in seen.values()))


if __name__ == "__main__":
    raise SystemExit(main())
