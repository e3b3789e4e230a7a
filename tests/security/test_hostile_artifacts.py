"""Guarantee X2: hostile data, configurations and models run no code, write no files, and are rejected fast."""

import functools
import gc
import os
import re
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from security.artifacts import CASES, Way, own, photos, png, toml, write_file

from vitkit.cli.main import main
from vitkit.core.errors import VitkitError
from vitkit.server.config import EngineConfig, ModelConfig
from vitkit.server.models import ServedModel, load_models

MOST_SECONDS = 1.0
"""CPU seconds of this process, after the modules of the command were imported."""
MOST_MEMORY = 1 << 30
"""Bytes of address space, so that unbounded allocations fail."""
PATIENCE = 20
"""Seconds of wall time after which a command is considered hung, on a busy machine, too."""
MODEL_COMMANDS = ("predict {model} {photo}", "eval {model} {photos} --workers 0", "export {model} {out}",
                  "weights info {model}", "inspect {model} {photo} --out {out}")  # fmt: skip


class Writes:
    """Audit hook that records files that are changed outside of one folder. Hooks cannot be removed."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    CHANGES = frozenset({"os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.rmdir", "os.truncate"})

    def __init__(self) -> None:
        self.inside = ""
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.inside or (event != "open" and event not in self.CHANGES):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & self.WRITES):
            return
        place = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if place and place != os.devnull and not os.path.abspath(place).startswith(self.inside):  # noqa: PTH100
            self.seen.append(f"{event} {place}")


@pytest.fixture(scope="module")
def writes() -> Writes:
    return Writes()


@pytest.fixture
def watched(writes: Writes, tmp_path: Path) -> Iterator[Writes]:
    writes.seen.clear()
    gc.freeze()  # to look through what earlier tests left is no work of a command's
    yield writes
    gc.unfreeze()
    writes.inside = ""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid photos and a valid model."""
    folder = tmp_path_factory.mktemp("sound")
    own(folder)
    photos(folder)
    return folder


@pytest.fixture(scope="module")
def warm(sound: Path) -> Callable[[Way], None]:
    """Import the modules of every command once."""

    @functools.cache
    def run_once(way: Way) -> None:
        path = {"data": sound / "photos", "toml": toml(sound, "nothing = 1"), "model": sound / "own"}[way]
        for line in commands(way, path, sound=sound, out=sound / "out"):
            assert main(line) == (1 if way == "toml" else 0)

    return run_once


def commands(way: str, path: Path, *, sound: Path, out: Path) -> list[list[str]]:
    if way == "data":
        return [["data", "check", str(path), "--workers", "0", "--json"]]
    if way == "toml":
        return [["train", str(path), "--out", str(out), f"data={sound / 'photos'}"]]
    words = {"model": path, "photo": sound / "photos" / "cat" / "0.png", "photos": sound / "photos"}
    quoted = {name: shlex.quote(str(value)) for name, value in words.items()}
    return [
        shlex.split(line.format(**quoted, out=shlex.quote(f"{out}-{number}")))
        for number, line in enumerate(MODEL_COMMANDS)
    ]


def run(line: Sequence[str]) -> tuple[int, float]:
    """Run a command and return exit code and CPU seconds; a signal interrupts a command that hangs."""

    def wake(*_: object) -> None:
        raise TimeoutError(f"{line[0]} hangs")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(PATIENCE)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    here = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + MOST_MEMORY, limits[1]))
    started = time.process_time()
    try:
        return main(list(line)), time.process_time() - started
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("forked_examples")
@pytest.mark.parametrize("case", CASES)
def test_hostile_artifact_is_rejected(case, tmp_path, sound, warm, watched, capfd, monkeypatch):
    warm(CASES[case].way)
    path = CASES[case].build(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in commands(CASES[case].way, path, sound=sound, out=tmp_path / "out"):
        capfd.readouterr()
        watched.inside = str(tmp_path)
        code, seconds = run(line)
        watched.inside = ""
        said, talk = capfd.readouterr()
        everything = said + talk
        assert "Traceback" not in everything
        assert "bug in vitkit" not in everything, talk
        # A bad photo among good ones is listed and left out; everything else ends the command.
        assert (code == 1) or (code == 0 and '"reason"' in said), (line[0], code, everything[:300])
        reason = said if code == 0 else " ".join(talk.split())
        assert re.search(CASES[case].reason, reason), reason[:400]
        assert seconds < MOST_SECONDS
        assert watched.seen == []
        assert not (tmp_path / "it-ran").exists()
        assert len(talk) < 3000


@pytest.mark.usefixtures("forked_examples")
@pytest.mark.parametrize("case", ["photo_that_is_a_pipe", "photo_without_an_end", "photo_of_a_terabyte"])
def test_predict_reports_hostile_files_and_continues(case, tmp_path, sound, warm, capfd):
    warm("model")
    place = CASES[case].build(tmp_path)
    capfd.readouterr()
    code, seconds = run(["predict", str(sound / "own"), str(place), "--json", "--workers", "0"])
    said = capfd.readouterr().out
    assert code in (0, 1)  # some could not be read
    assert len(said.splitlines()) == 5
    assert re.search(CASES[case].reason, said)
    assert seconds < MOST_SECONDS


def test_there_are_sixty_hostile_artifacts():
    assert len(CASES) >= 60


def test_file_access_monitor_works(watched, tmp_path):
    watched.inside = str(tmp_path / "inside")
    write_file(tmp_path / "outside.png", png())
    (tmp_path / "made").mkdir()
    watched.inside = ""
    assert [seen.split()[0] for seen in watched.seen if "outside" in seen or "made" in seen] == ["open", "os.mkdir"]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].way == "model"])
def test_server_rejects_hostile_model(case, tmp_path, sound, watched, monkeypatch):
    def loaded(place: Path) -> dict[str, ServedModel]:
        return load_models(
            [ModelConfig(name="model", source=str(place))], engine=EngineConfig(device="cpu"), calibration=None, batch=1
        )

    loaded(sound / "own")
    path = CASES[case].build(tmp_path)
    monkeypatch.chdir(tmp_path)
    watched.inside = str(tmp_path)
    started = time.process_time()
    with pytest.raises((VitkitError, OSError), match=CASES[case].reason):
        loaded(path)
    assert time.process_time() - started < MOST_SECONDS
    assert watched.seen == []
    assert not (tmp_path / "it-ran").exists()
