"""A folder goes in; a small run in it that can be started, watched, signalled, killed and compared comes out."""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = """\
seed = 3
[model]
name = "Ti/16"
image_size = 8
patch_size = 4
settings = ["width=16", "depth=2", "heads=2", "mlp_dim=32"]
[data]
path = "digits"
channels = 1
workers = 0
[optimizer]
average = 0.9
[schedule]
batch_size = 32
epochs = "none"
steps = 45
warmup_steps = 12
[parallel]
device = "cpu"
threads = 1
[keep]
log_every = 1
evaluate_every = 15
save_every = 3
"""
STEPS, WARMUP, EVALUATION = 45, 12, 15


class SlowError(AssertionError):
    """Something that should have happened by now has not."""


@dataclass
class Victim:
    """One running process group."""

    pid: int
    launcher: "Launcher"
    log: Path
    code: int | None = None
    watch: int = field(init=False)

    def __post_init__(self) -> None:
        self.watch = os.pidfd_open(self.pid)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or does so within this time."""
        return self.code is not None or bool(select.select([self.watch], [], [], seconds)[0])

    def send(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code."""
        if not self.has_ended(seconds):
            self.send(signal.SIGKILL)
            raise SlowError(f"still running after {seconds} s; its last words: {self.words()[-300:]}")
        if self.code is None:
            self.code = self.launcher.ask({"wait": self.pid})["code"]
            os.close(self.watch)
            self.send(signal.SIGKILL)  # loader workers that a killed parent left behind
        return self.code

    def words(self) -> str:
        """What it said."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Launcher:
    """Forks victims from a process that has already imported torch."""

    def __init__(self, before: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, str(HERE / "launcher.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "NO_COLOR": "1"},
        )
        self.answer()

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("the launcher has ended")
        return json.loads(line)

    def ask(self, request: dict) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def start(
        self,
        run: "Run",
        *settings: str,
        environment: dict[str, str] | None = None,
        faulty_sync: tuple[int, int] | None = None,
    ) -> Victim:
        """Start `vitkit train` on a run's folder, or go on with it."""
        settled = dict(setting.split("=", 1) for setting in (*run.settings, *settings))  # the last one counts
        assignments = [f"{key}={value}" for key, value in settled.items()]
        request = {
            "arguments": ["train", str(run.recipe), "--out", str(run.inside), *assignments],
            "environment": environment or {},
            "log": str(run.log),
            "faulty_sync": faulty_sync,
        }
        return Victim(self.ask(request)["pid"], self, run.log)

    def start_ranks(self, run: "Run", *settings: str, ranks: int) -> list[Victim]:
        """Start as many ranks, told who they are as torchrun tells it."""
        port = free_port()
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        return [
            self.start(run, *settings, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Run:
    """A run's folder, seen from outside. `inside` is its name for the process, which may live among other mounts.

    `beside` is where its settings and its words go, which are to stay when its disk is full.
    """

    path: Path
    settings: tuple[str, ...] = ()
    inside: Path | None = None
    beside: Path | None = None

    def __post_init__(self) -> None:
        self.inside = self.inside or self.path
        beside = self.beside or self.path.parent
        beside.mkdir(parents=True, exist_ok=True)
        self.recipe, self.log = beside / f"{self.path.name}.toml", beside / f"{self.path.name}.log"
        if not self.recipe.exists():
            self.recipe.write_text(SETTINGS, encoding="utf-8")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """The steps there are checkpoints of."""
        return sorted(int(entry.name[5:]) for entry in self.checkpoints.glob("step-*"))

    def being_written(self) -> list[str]:
        """The checkpoints that are being written, or were when a kill came."""
        try:
            names = os.listdir(self.checkpoints)  # noqa: PTH208  the quickest look there is
        except OSError:
            return []
        return [name for name in names if name.startswith(".step-") and not name.endswith(".removed.tmp")]

    def logged(self) -> list[dict]:
        """The whole lines of the metrics log."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def last_step(self) -> int:
        """The last step in the log."""
        return max((record["step"] for record in self.logged()), default=0)

    def is_finished(self) -> bool:
        return (self.path / "summary.json").exists()

    def is_good(self, step: int) -> bool:
        """Whether a checkpoint is there and agrees with its checksums."""
        folder = self.checkpoints / f"step-{step:08d}"
        if not folder.is_dir():
            return False
        expected = json.loads((folder / "checksums.json").read_bytes())
        sums = expected.get("sha256", expected)
        return len(sums) == 2 and all(sha256(folder / name) == value for name, value in sums.items())

    def outcome(self, *, state: bool = True) -> dict[str, str]:
        """The checksums of all that must not depend on what the run went through, with or without its last state."""
        files = {name: self.path / name for name in ("model.safetensors", "metrics.jsonl")}
        if state:
            last = self.checkpoints / f"step-{max(self.steps()):08d}"
            files |= {name: last / name for name in ("state.safetensors", "state.json")}
        return {name: sha256(file) for name, file in files.items()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], object], victim: Victim, *, seconds: float = 60.0) -> bool:
    """Look in a tight loop until something is so; False where the process ended first."""
    end = time.monotonic() + seconds
    looks = 0
    while not condition():
        looks += 1
        if looks % 20 == 0:
            if victim.has_ended():
                return False
            if time.monotonic() > end:
                victim.send(signal.SIGKILL)
                raise SlowError(f"nothing after {seconds} s: {victim.words()[-300:]}")
        time.sleep(0.0002)
    return True


def listens(victim: Victim) -> bool:
    """Whether the process has taken SIGTERM into its own hands."""
    try:
        status = Path(f"/proc/{victim.pid}/status").read_text(encoding="ascii")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@dataclass
class Agents:
    """torchrun on each of the nodes of a run; all are on this machine, and meet at a port of it."""

    processes: list[subprocess.Popen]

    def ranks(self) -> list[int]:
        """The processes of the ranks that now live."""
        return sorted(pid for agent in self.processes for pid in children(agent.pid))

    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.processes)

    def wait(self, seconds: float) -> list[int]:
        """The exit codes."""
        end = time.monotonic() + seconds
        return [agent.wait(max(0.0, end - time.monotonic())) for agent in self.processes]

    def kill(self) -> None:
        living = [agent for agent in self.processes if agent.poll() is None]
        for pid in [pid for agent in living for pid in (*children(agent.pid), agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.processes:
            agent.wait()


@contextlib.contextmanager
def torchrun(run: Run, *settings: str, ranks: int = 2, nodes: int = 1, restarts: int = 0) -> Iterator[Agents]:
    """A run under torchrun, which is ended with all its ranks when the context ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    command += ["--nproc-per-node", str(ranks // nodes), "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", run.path.name, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["-m", "vitkit", "train", str(run.recipe), "--out", str(run.inside), *run.settings, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "NO_COLOR": "1"}
    agents = Agents([])
    try:
        for _ in range(nodes):
            with run.log.open("ab") as log:
                agents.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield agents
    finally:
        agents.kill()
