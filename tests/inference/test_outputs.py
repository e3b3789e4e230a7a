"""Locking of prediction files: one writer, and the lock ends with its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.inference.outputs import PredictionFile, open_exclusively
from vitkit.inference.predictions import ImagePrediction

fcntl = pytest.importorskip("fcntl", reason="this system has no file locks")

KILLED = """
import os, signal, sys
from pathlib import Path
from vitkit.inference.outputs import open_exclusively

with open_exclusively(Path(sys.argv[1])):
    child = os.fork()  # like the loader's workers
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
    tried = subprocess.run([sys.executable, "-c", TRYING, path], capture_output=True, timeout=600, check=False)
    return tried.returncode == 0


def test_orphaned_child_processes_hold_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv.partial"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        assert killed.wait(timeout=600) == -signal.SIGKILL
        os.kill(child, 0)  # it is still running
        with open_exclusively(path):
            assert not others_can_write(path)
    assert others_can_write(path)


def test_reading_the_rows_keeps_the_lock(tmp_path: Path) -> None:
    file = PredictionFile(tmp_path / "predictions.csv", {"model": "m"}, fingerprints={})
    with file.open() as done:
        assert (done, others_can_write(file.partial_path)) == (0, False)
        assert len(list(file.append([[ImagePrediction(file="a.png", error="not an image")]]))) == 1
        assert len(list(file._rows())) == 1
        assert not others_can_write(file.partial_path)
        file.finalize(model="m", classes=2, features=0)


def test_file_removed_while_waiting_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lockf, times = tmp_path / "predictions.csv.partial", fcntl.lockf, []

    def late(file: object, how: int) -> None:
        times.append(1)
        if len(times) == 1:
            path.unlink()  # by the process that held the lock
        lockf(file, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    with open_exclusively(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
    assert len(times) == 2


def test_file_system_without_locks_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with open_exclusively(tmp_path / "predictions.csv.partial") as file:
        file.write(b"x")
    assert (tmp_path / "predictions.csv.partial").read_bytes() == b"x"
