"""Small runs in processes that can be started, watched, signaled, killed and compared."""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
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
ema_decay = 0.9
[schedule]
batch_size = 32
epochs = "none"
steps = 45
warmup_steps = 12
[parallel]
device = "cpu"
threads = 1
[evaluation]
every = 15
[checkpoint]
save_every = 3
[logging]
log_every = 1
"""
STEPS, WARMUP, EVALUATION = 45, 12, 15


class SlowError(AssertionError):
    """A process did not do in time what it should."""


@dataclass
class Victim:
    """A running process group."""

    pid: int
    launcher: "Launcher"
    log: Path
    code: int | None = None
    watch: int = field(init=False)

    def __post_init__(self) -> None:
        self.watch = os.pidfd_open(self.pid)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether it has ended, or ends within this time."""
        return self.code is not None or bool(select.select([self.watch], [], [], seconds)[0])

    def send(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float = 600.0) -> int:
        """Wait for the end and return the exit code."""
        if not self.has_ended(seconds):
            self.send(signal.SIGKILL)
            raise SlowError(f"still running after {seconds} s; its last output: {self.words()[-300:]}")
        if self.code is None:
            self.code = self.launcher.ask({"wait": self.pid})["code"]
            os.close(self.watch)
            self.send(signal.SIGKILL)  # loader workers that a killed parent left behind
        return self.code

    def words(self) -> str:
        """Return its output."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Launcher:
    """Starts victims by forking a process that has already imported torch."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py")],
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
        """Start `vitkit train` in a run's directory, or resume it."""
        settled = dict(setting.split("=", 1) for setting in (*run.settings, *settings))  # the last one counts
        assignments = [f"{key}={value}" for key, value in settled.items()]
        arguments = ["train", str(run.recipe), "--out", str(run.inside), *assignments]
        return self.fork(arguments, run.log, environment=environment, mounts=run.mounts, faulty_sync=faulty_sync)

    def fork(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        script: str | None = None,
        imports: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        directory: str | None = None,
        errors: Path | None = None,
        mounts: str | None = None,
        faulty_sync: tuple[int, int] | None = None,
    ) -> Victim:
        """Start a command of vitkit, or a script, after importing libraries that it needs."""
        request = {
            "arguments": list(arguments),
            "script": script,
            "imports": list(imports),
            "environment": environment or {},
            "directory": directory,
            "stdout": str(log),
            "stderr": str(errors or log),
            "mounts": mounts,
            "faulty_sync": faulty_sync,
        }
        return Victim(self.ask(request)["pid"], self, log)

    def run_example(self, path: str, *arguments: str, directory: str) -> subprocess.CompletedProcess[str]:
        """Run an exported example.py with the libraries that this process has imported."""
        source = Path(path).read_text(encoding="utf-8")
        imports = [name for name in ("timm", "transformers") if f"\nimport {name}\n" in source]
        with tempfile.TemporaryDirectory() as temporary:
            output, errors = Path(temporary, "output"), Path(temporary, "errors")
            victim = self.fork(arguments, output, script=path, imports=imports, directory=directory, errors=errors)
            code = victim.wait()
            return subprocess.CompletedProcess(
                [path, *arguments], code, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")
            )

    def run_ranks(self, script: Path, *arguments: str, ranks: int, log: Path) -> None:
        """Run a script on ranks with the environment variables of torchrun."""
        victims = [
            self.fork(arguments, log, script=str(script), environment=environment) for environment in ranks_of(ranks)
        ]
        codes = [victim.wait(900) for victim in victims]
        assert not any(codes), f"{codes}: {victims[0].words()[-3000:]}"

    def start_ranks(self, run: "Run", *settings: str, ranks: int) -> list[Victim]:
        """Start ranks with the environment variables of torchrun."""
        return [self.start(run, *settings, environment=environment) for environment in ranks_of(ranks)]

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
    """A run directory. `inside` is its path for the process, which may be in another mount namespace, `mounts`.

    `beside` is the directory of its settings and output, which survive when its disk is full.
    """

    path: Path
    settings: tuple[str, ...] = ()
    inside: Path | None = None
    beside: Path | None = None
    mounts: str | None = None
    logged_size: int = field(init=False, default=-1)
    logged_step: int = field(init=False, default=0)

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
        """Return the steps that have a checkpoint."""
        return sorted(int(entry.name[5:]) for entry in self.checkpoints.glob("step-*"))

    def being_written(self) -> list[str]:
        """Return the checkpoints that are being written, or were at a kill."""
        try:
            names = os.listdir(self.checkpoints)  # noqa: PTH208  the fastest way
        except OSError:
            return []
        return [name for name in names if name.startswith(".step-") and not name.endswith(".removed.tmp")]

    def logged(self) -> list[dict]:
        """Return the complete records of the metrics log."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def last_step(self) -> int:
        """Return the last step in the log, which is read again only when it has grown: this is polled."""
        try:
            size = (self.path / "metrics.jsonl").stat().st_size
        except OSError:
            return 0
        if size != self.logged_size:
            self.logged_size, self.logged_step = size, max((each["step"] for each in self.logged()), default=0)
        return self.logged_step

    def is_finished(self) -> bool:
        return (self.path / "summary.json").exists()

    def is_good(self, step: int) -> bool:
        """Return whether a checkpoint exists and matches its checksums."""
        folder = self.checkpoints / f"step-{step:08d}"
        if not folder.is_dir():
            return False
        expected = json.loads((folder / "checksums.json").read_bytes())
        sums = expected.get("sha256", expected)
        return len(sums) == 2 and all(sha256(folder / name) == value for name, value in sums.items())

    def outcome(self, *, state: bool = True) -> dict[str, str]:
        """Return checksums of everything that must not depend on interruptions, with or without the last state."""
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


def ranks_of(count: int) -> list[dict[str, str]]:
    """Return the environment variables by which torchrun describes each rank."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    common["LOCAL_WORLD_SIZE"] = str(count)
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def until(condition: Callable[[], object], victim: Victim, *, seconds: float = 600.0) -> bool:
    """Poll until the condition is true. Return False if the process ended first."""
    end = time.monotonic() + seconds
    polls = 0
    while not condition():
        polls += 1
        if polls % 20 == 0:
            if victim.has_ended():
                return False
            if time.monotonic() > end:
                victim.send(signal.SIGKILL)
                raise SlowError(f"nothing after {seconds} s: {victim.words()[-300:]}")
        time.sleep(0.0002)
    return True


def listens(victim: Victim) -> bool:
    """Return whether the process has a handler for SIGTERM."""
    try:
        status = Path(f"/proc/{victim.pid}/status").read_text(encoding="ascii")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                pids.append(int(entry.name))
    return pids


@dataclass
class Agents:
    """torchrun processes, one per node; all nodes are on this machine."""

    processes: list[subprocess.Popen]

    def ranks(self) -> list[int]:
        """Return the processes of the running ranks."""
        return sorted(pid for agent in self.processes for pid in children(agent.pid))

    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.processes)

    def wait(self, seconds: float) -> list[int]:
        """Wait for the ends and return the exit codes."""
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
    """Start a run under torchrun, and kill all of its ranks at the end of the context."""
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
