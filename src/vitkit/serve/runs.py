"""A folder of runs goes in; routes that tell how far each run is, and what it has logged so far, come out.

Only reads, and only what a run folder is known to hold. A name reaches a run of the folder, or nothing.
"""

import json
import math
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from vitkit.core.files import as_text, read_bytes
from vitkit.serve.answers import JSON, Refusal, encoded
from vitkit.serve.schemas import errors

State = Literal["running", "done", "stopped"]

MOST_RUNS = 500
"""Runs in a list, the latest; the others are counted."""
MOST_RECORDS = 5_000
"""Records in an answer; whoever reads asks again for the rest."""
_READ_AT_ONCE = 1 << 23
_LONGEST_LINE = 1 << 16
_LARGEST_FILE = 1 << 24
_LOGS_KEPT = 64
_QUIET = 120.0
"""Seconds without a word after which an unfinished run has stopped, unless its own pace is slower."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How far a run is. `steps` is unknown where its files do not say; `updated` is seconds since 1970."""

    name: str
    state: State
    step: int
    steps: int | None
    updated: float


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of a folder, the latest first, and the server's clock."""

    runs: list[Run]
    left_out: int
    now: float


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a run has logged after a step: `more` records follow, `damaged` lines could not be read."""

    name: str
    state: State
    step: int
    steps: int | None
    records: list[dict[str, object]]
    more: int
    damaged: int
    summary: dict[str, object] | None


def routes(folder: Path | None) -> APIRouter:
    """The routes below /v1/runs; without a folder they say how to name one.

    >>> [route.path for route in routes(Path("runs")).routes]
    ['/v1/runs', '/v1/runs/{name}']
    """
    router = APIRouter(tags=["runs"])
    shelf = None if folder is None else Shelf(folder)

    def opened() -> Shelf:
        if shelf is None:
            raise Refusal(
                404, "this server shows no runs", hint="start it with --runs DIR, which holds the run folders"
            )
        return shelf

    @router.get(
        "/v1/runs",
        summary="The runs that can be watched, the latest first",
        response_model=Runs,
        responses=errors((400, 401, 404)),
    )
    def list_runs() -> Response:
        return Response(encoded(asdict(opened().list())), media_type=JSON)

    @router.get(
        "/v1/runs/{name}",
        summary="What a run has logged",
        response_model=Records,
        responses=errors((400, 401, 404)),
    )
    def show_run(
        name: str,
        after: Annotated[int, Query(ge=-1, le=2**53, description="only what was logged after this step")] = -1,
    ) -> Response:
        answer = opened().records(name, after=after)
        if answer is None:
            raise Refusal(404, "there is no run of that name in the folder", hint="GET /v1/runs lists them")
        return Response(answer, media_type=JSON)

    return router


class Shelf:
    """The runs in a folder; where the folder is itself a run, that one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "first")
    ...     path.mkdir()
    ...     _ = (path / "config.toml").write_text("[schedule]\\nsteps = 40\\n", encoding="utf-8")
    ...     _ = (path / "metrics.jsonl").write_text('{"step": 10, "loss": 2.3}\\n', encoding="utf-8")
    ...     run = Shelf(Path(folder)).list().runs[0]
    >>> run.name, run.state, run.step, run.steps
    ('first', 'running', 10, 40)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._logs: OrderedDict[Path, _Log] = OrderedDict()
        self._lock = threading.Lock()

    def list(self) -> Runs:
        """Every run, the latest first."""
        now = time.time()
        found = [_describe(name, path, now=now) for name, path in self._paths().items()]
        found.sort(key=lambda run: (-run.updated, run.name))
        return Runs(runs=found[:MOST_RUNS], left_out=max(len(found) - MOST_RUNS, 0), now=now)

    def records(self, name: str, *, after: int) -> bytes | None:
        """The answer for one run, as JSON; None where there is none of that name."""
        path = self._paths().get(name)
        if path is None:
            return None
        # Lines were checked when they were read, and go out as they are: nothing is parsed twice for a long log.
        with self._lock:
            log = self._logs.setdefault(path, _Log())
            self._logs.move_to_end(path)
            while len(self._logs) > _LOGS_KEPT:
                self._logs.popitem(last=False)
            log.refresh(path / "metrics.jsonl")
            later = [line for step, line in zip(log.steps, log.lines, strict=True) if step > after]
            shown, damaged, unread = later[:MOST_RECORDS], log.damaged, log.unread
        run = _describe(name, path, now=time.time())
        head = {
            "name": name,
            "state": run.state,
            "step": run.step,
            "steps": run.steps,
            "more": len(later) - len(shown) + unread,
            "damaged": damaged,
            "summary": _json_object(path / "summary.json"),
        }
        return b"".join((json.dumps(head).encode()[:-1], b', "records": [', b",".join(shown), b"]}"))

    def _paths(self) -> Mapping[str, Path]:
        """The run folders by name. Names come from the folder's own list, so that none can lead out of it."""
        if _is_run(self.folder):
            return {self.folder.name: self.folder}
        try:
            entries = sorted(self.folder.iterdir())
        except OSError:
            return {}
        shown = (entry for entry in entries if not entry.name.startswith(".") and self._holds(entry))
        return {as_text(entry.name): entry for entry in shown if _is_run(entry)}

    def _holds(self, entry: Path) -> bool:
        """Whether an entry is in the folder itself; a link may lead elsewhere, or in a circle."""
        try:
            return entry.resolve().is_relative_to(self.folder)
        except (OSError, RuntimeError):
            return False


@dataclass(kw_only=True)
class _Log:
    """A log read so far, line by line as it grows."""

    offset: int = 0
    last: bytes = b""
    steps: list[int] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    damaged: int = 0
    unread: int = 0

    def refresh(self, path: Path) -> None:
        """Read what was added; begin again where the log is no longer the one that was read."""
        if not path.is_file():  # not there yet, or a pipe, which would wait for ever
            self._begin_again()
            return
        try:
            added = self._added(path)
        except OSError:  # it may not be read: its lines are missed, and that is told
            self._begin_again()
            self.damaged = 1
            return
        self.unread = int(len(added) == _READ_AT_ONCE)
        whole = added.rfind(b"\n") + 1
        if not whole and self.unread:  # no line is this long
            self.damaged, self.offset, self.last = self.damaged + 1, self.offset + len(added), b""
            return
        for line in added[:whole].splitlines(keepends=True):
            self._take(line)
        if whole:
            self.offset += whole
            self.last = added[:whole].splitlines(keepends=True)[-1]

    def _added(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file.seek(self.offset - len(self.last))
            if file.read(len(self.last)) != self.last:  # a resumed run has dropped lines, or another run has begun
                self._begin_again()
                file.seek(0)
            return file.read(_READ_AT_ONCE)

    def _begin_again(self) -> None:
        self.offset, self.last, self.damaged, self.unread = 0, b"", 0, 0
        self.steps.clear()
        self.lines.clear()

    def _take(self, line: bytes) -> None:
        record = _parsed(line) if len(line) <= _LONGEST_LINE else None
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is not int:
            self.damaged += 1
            return
        self.steps.append(step)
        self.lines.append(json.dumps(record).encode())


def _describe(name: str, path: Path, *, now: float) -> Run:
    """A run's state, from the ends of its logs alone."""
    updated = max(_changed(path / each) for each in ("config.toml", "metrics.jsonl", "speed.jsonl", "summary.json"))
    config = _toml(path / "config.toml")
    step = _whole(_last_record(path / "metrics.jsonl").get("step")) or 0
    state: State = "running" if now - updated < max(_QUIET, 5 * _pace(path, config)) else "stopped"
    if (path / "summary.json").is_file():
        state = "done"
    return Run(name=name, state=state, step=step, steps=_steps(path, config), updated=updated)


def _steps(path: Path, config: Mapping[str, object]) -> int | None:
    """How many steps the run will have, as `vitkit.train.run.rhythm` counts them."""
    schedule = _section(config, "schedule")
    if steps := _whole(schedule.get("steps")):
        return steps
    images = _whole(_section(_json_object(path / "data.json") or {}, "images").get("train"))
    batch, epochs = _whole(schedule.get("batch_size")), schedule.get("epochs")
    if not images or not batch or not isinstance(epochs, int | float) or not math.isfinite(epochs):
        return None
    return max(1, math.ceil(images / batch * epochs))


def _pace(path: Path, config: Mapping[str, object]) -> float:
    """Seconds between two lines of the log, where the run has measured its speed."""
    speed = _last_record(path / "speed.jsonl").get("images_per_second")
    every = _whole(_section(config, "keep").get("log_every"))
    batch = _whole(_section(config, "schedule").get("batch_size"))
    if not isinstance(speed, int | float) or not speed > 0 or not every or not batch:
        return 0.0
    return every * batch / speed


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_record(path: Path) -> Mapping[str, object]:
    """The last whole line of a log, from its end."""
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(length - _LONGEST_LINE, 0))
            ending = file.read(_LONGEST_LINE)
    except OSError:
        return {}
    for line in reversed(ending[: ending.rfind(b"\n") + 1].splitlines()):
        record = _parsed(line)
        if isinstance(record, dict):
            return record
    return {}


def _json_object(path: Path) -> dict[str, object] | None:
    content = _content(path)
    found = None if content is None else _parsed(content)
    return found if isinstance(found, dict) else None


def _toml(path: Path) -> Mapping[str, object]:
    content = _content(path)
    try:
        return tomllib.loads((content or b"").decode())
    except (ValueError, RecursionError):
        return {}


def _content(path: Path) -> bytes | None:
    """What is in a small file; None where there is none, or it cannot be read."""
    try:
        return read_bytes(path, most=_LARGEST_FILE)
    except OSError:
        return None


def _parsed(text: bytes) -> object:
    """What a JSON text says; JSON has no NaN and no infinity, so they become texts, as in our own logs."""
    names = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    try:
        return json.loads(text, parse_constant=lambda name: names[name])
    except (ValueError, RecursionError):
        return None


def _section(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
