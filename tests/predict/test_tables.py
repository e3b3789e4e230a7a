"""A file of answers is written by one process, and its lock ends with that process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.predict.stream import Answer
from vitkit.predict.tables import AnswerFile, opened_alone

fcntl = pytest.importorskip("fcntl", reason="this system has no such locks")

KILLED = """
import os, signal, sys
from pathlib import Path
from vitkit.predict.tables import opened_alone

with opened_alone(Path(sys.argv[1])):
    child = os.fork()  # as those that decode
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

TRYING = """
import fcntl, sys
with open(sys.argv[1], "ab+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def others_can_write(path: Path) -> bool:
    tried = subprocess.run([sys.executable, "-c", TRYING, path], capture_output=True, timeout=60, check=False)
    return tried.returncode == 0


def test_processes_that_are_left_behind_keep_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv.partial"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        assert killed.wait(timeout=60) == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        with opened_alone(path):
            assert not others_can_write(path)
    assert others_can_write(path)


def test_reading_the_answers_back_keeps_the_lock(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.csv", {"model": "m"}, seen={})
    with file.begun() as done:
        assert (done, others_can_write(file.partial)) == (0, False)
        assert len(list(file.add([[Answer(file="a.png", error="no picture")]]))) == 1
        assert file._counted()["images"] == 1
        assert not others_can_write(file.partial)
        file.finish(model="m", classes=2, features=0)


def test_a_file_that_was_finished_and_removed_meanwhile_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lockf, times = tmp_path / "answers.csv.partial", fcntl.lockf, []

    def late(file: object, how: int) -> None:
        times.append(1)
        if len(times) == 1:
            path.unlink()  # by who had the lock until now
        lockf(file, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with opened_alone(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
    assert len(times) == 2


def test_a_disk_without_locks_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with opened_alone(tmp_path / "answers.csv.partial") as file:
        file.write(b"x")
    assert (tmp_path / "answers.csv.partial").read_bytes() == b"x"
