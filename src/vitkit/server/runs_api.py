"""Read-only routes for the progress and logs of training runs.

A name in a URL is looked up in the list of the directory, so that it cannot reach any other path.
"""

import contextlib
import json
import logging
import math
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Response

from vitkit.core.config import read_toml
from vitkit.core.errors import ConfigError
from vitkit.core.files import escape_surrogates, read_bytes
from vitkit.core.lock import is_locked
from vitkit.server.ipc import JSON, HTTPError, encode_json
from vitkit.server.schemas import operation

MAX_RUNS = 500
"""Runs in a list, the latest ones; the others are counted."""
MAX_RECORDS = 5_000
"""Records in a response; clients request the rest with `after`."""
_MAX_READ = 1 << 23
_MAX_LINE = 1 << 16
_MAX_FILE = 1 << 24
_MAX_CACHED_LOGS = 64
_STATUS_FILES = ("config.toml", "metrics.jsonl", "summary.json")
"""Files whose size and time of change decide whether a run is read again."""

_DATA_FILE = "data.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Progress of a run, and when it was updated in seconds since 1970. `steps` is None if unknown."""

    name: str
    state: Literal["running", "done", "stopped"]
    step: int
    steps: int | None
    updated: float


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The runs of a directory, the latest first, and the server's time."""

    runs: list[RunStatus]
    left_out: int
    now: float


@dataclass(frozen=True, kw_only=True)
class RunRecords(RunStatus):
    """Records of a run after a step: `more` records follow, `damaged` lines are unreadable."""

    records: list[dict[str, object]]
    more: int
    damaged: int
    summary: dict[str, object] | None


def create_router(path: Path | None) -> APIRouter:
    """Create the routes below /v1/runs; without a directory they return 404."""
    router = APIRouter(tags=["runs"])
    directory = None if path is None else RunsDirectory(path)

    def get_directory() -> RunsDirectory:
        if directory is None:
            raise HTTPError(404, "this server shows no runs", hint="start it with --runs DIR")
        return directory

    @router.get("/v1/runs", **operation("List the runs, the latest first", RunList, (400, 401, 404)))
    def list_runs() -> Response:
        return Response(encode_json(asdict(get_directory().list_runs())), media_type=JSON)

    @router.get("/v1/runs/{name}", **operation("Get the log of a run", RunRecords, (400, 401, 404)))
    def get_run(
        name: str, after: Annotated[int, Query(ge=-1, le=2**53, description="Only records after this step.")] = -1
    ) -> Response:
        body = get_directory().encode_records(name, after=after)
        if body is None:
            raise HTTPError(404, "no such run", hint="GET /v1/runs lists the runs")
        return Response(body, media_type=JSON)

    return router


class RunsDirectory:
    """The runs in a directory, or the directory itself if it is a run."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._logs: OrderedDict[Path, _Log] = OrderedDict()
        self._statuses: dict[Path, _CachedStatus] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> RunList:
        """List all runs, the latest first."""
        now = time.time()
        paths = self._find_runs()
        runs = [self._status(name, path) for name, path in paths.items()]
        for path in self._statuses.copy().keys() - paths.values():  # other threads may list runs at the same time
            self._statuses.pop(path, None)
        runs.sort(key=lambda run: (-run.updated, run.name))
        return RunList(runs=runs[:MAX_RUNS], left_out=max(len(runs) - MAX_RUNS, 0), now=now)

    def encode_records(self, name: str, *, after: int) -> bytes | None:
        """Return the records of a run as JSON; None if there is no such run."""
        path = self._find_runs().get(name)
        if path is None:
            return None
        # Lines were validated when they were read and are sent as they are: a long log is parsed once.
        with self._lock:
            log = self._logs.setdefault(path, _Log())
            self._logs.move_to_end(path)
            while len(self._logs) > _MAX_CACHED_LOGS:
                self._logs.popitem(last=False)
            log.refresh(path / "metrics.jsonl")
            later = [line for step, line in log.records if step > after]
            lines, damaged, unread = later[:MAX_RECORDS], log.damaged, log.unread
        summary = _parse_json(_read(path / "summary.json"))
        header = asdict(self._status(name, path)) | {"more": len(later) - len(lines) + unread, "damaged": damaged}
        parts = (encode_json(header)[:-1], b', "summary": ', _encode(summary) if summary else b"null")
        return b"".join((*parts, b', "records": [', b",".join(lines), b"]}"))

    def _status(self, name: str, path: Path) -> RunStatus:
        """Describe a run; its files are parsed only if they have changed since the last call."""
        versions = tuple(_get_version(f"{path}/{each}") for each in _STATUS_FILES)
        cached = self._statuses.get(path)
        if cached is None or not cached.is_current(path, versions):
            cached = self._statuses[path] = _read_status(name, path, versions)
        if versions[-1] is not None:
            return replace(cached.status, state="done")
        return replace(cached.status, state="running") if is_locked(path) else cached.status

    def _find_runs(self) -> Mapping[str, Path]:
        if _is_run(self.path):
            return {self.path.name: self.path}
        runs = {}
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = self.path / entry.name
                with contextlib.suppress(OSError, RuntimeError):  # a symbolic link may lead elsewhere, or in a circle
                    is_inside = not entry.is_symlink() or path.resolve().is_relative_to(self.path)
                    if entry.name[0] != "." and is_inside and (path in self._statuses or _is_run(path)):
                        runs[escape_surrogates(entry.name)] = path
        return runs


_Version = tuple[int, int] | None
"""Time of change in nanoseconds and size of a file; None if it does not exist."""


class _CachedStatus(NamedTuple):
    """Status of a run, and the versions of the files that it was read from."""

    status: RunStatus
    versions: tuple[_Version, ...]
    data_version: _Version

    def is_current(self, path: Path, versions: tuple[_Version, ...]) -> bool:
        """Return whether the files are unchanged. A known length does not change with data.json."""
        has_steps = self.status.steps is not None
        return versions == self.versions and (has_steps or _get_version(f"{path}/{_DATA_FILE}") == self.data_version)


def _read_status(name: str, path: Path, versions: tuple[_Version, ...]) -> _CachedStatus:
    data_version = _get_version(f"{path}/{_DATA_FILE}")
    try:
        step = int(_get_positive(_read_last_record(path / "metrics.jsonl"), "step") or 0)
        steps = _compute_total_steps(path)
    except Exception:  # one run must not hide the others
        logger.exception("the run %s cannot be read", path)
        step, steps = 0, None
    updated = max((version[0] for version in versions if version), default=0) / 1e9
    status = RunStatus(name=name, state="stopped", step=step, steps=steps, updated=updated)
    return _CachedStatus(status, versions, data_version)


def _get_version(path: str) -> _Version:
    try:
        status = os.stat(path)  # noqa: PTH116  several thousand calls per request
    except (OSError, ValueError):
        return None
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


@dataclass(kw_only=True)
class _Log:
    """A growing log file, read incrementally: the step and the JSON of each record."""

    records: list[tuple[int, bytes]] = field(default_factory=list)
    offset: int = 0
    last_line: bytes = b""
    damaged: int = 0
    unread: int = 0

    def refresh(self, path: Path) -> None:
        """Read new lines; start again if the file is no longer the one that was read."""
        if not path.is_file():  # missing, or a pipe, which would block
            self._reset()
            return
        try:
            data = self._read_new(path)
        except OSError:  # not readable: reported as a damaged line
            self._reset()
            self.damaged = 1
            return
        self.unread = int(len(data) == _MAX_READ)
        end = data.rfind(b"\n") + 1
        if not end and self.unread:  # no valid line is this long
            self.damaged, self.offset, self.last_line = self.damaged + 1, self.offset + len(data), b""
        for line in data[:end].splitlines(keepends=True):
            record = _parse_json(line) if len(line) <= _MAX_LINE else {}
            encoded = _encode(record)
            if type(record.get("step")) is int and encoded != b"null":
                self.records.append((record["step"], encoded))
            else:
                self.damaged += 1
            self.last_line = line
        self.offset += end

    def _read_new(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file.seek(self.offset - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:  # resumed from an earlier step, or replaced
                self._reset()
                file.seek(0)
            return file.read(_MAX_READ)

    def _reset(self) -> None:
        self.offset, self.last_line, self.damaged, self.unread = 0, b"", 0, 0
        self.records.clear()


def _compute_total_steps(path: Path) -> int | None:
    """Return the length of the run, computed as in `vitkit.training.run`."""
    try:
        config = read_toml(path / "config.toml")
    except ConfigError:
        return None
    if steps := _get_positive(config, "schedule", "steps"):
        return int(steps)
    images = _get_positive(_parse_json(_read(path / _DATA_FILE)), "images", "train")
    batch, epochs = (_get_positive(config, "schedule", key) for key in ("batch_size", "epochs"))
    return max(1, math.ceil(images / batch * epochs)) if images and batch and epochs else None


def _get_positive(data: Any, *keys: str) -> int | float | None:
    """Return the number from 1e-9 to 1e15 under nested keys, or None."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if type(data) in (int, float) and 1e-9 < data < 1e15 else None


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def _read_last_record(path: Path) -> Mapping[str, Any]:
    """Return the last complete record of a log, reading only its end."""
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(length - _MAX_LINE, 0))
            tail = file.read(_MAX_LINE)
    except OSError:
        return {}
    lines = reversed(tail[: tail.rfind(b"\n") + 1].splitlines())
    return next(filter(None, map(_parse_json, lines)), {})


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, max_bytes=_MAX_FILE)
    except OSError:
        return b""


def _parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; anything else is empty. NaN and infinity become strings, as in vitkit's own logs."""
    names = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    try:
        value = json.loads(text, parse_constant=names.get, parse_float=_parse_float)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _encode(value: dict[str, Any]) -> bytes:
    """Encode a parsed object; null if it is nested too deeply for that, although it was parsed."""
    try:
        return encode_json(value)
    except RecursionError:
        return b"null"


def _parse_float(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else str(value)
