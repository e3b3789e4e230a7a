"""Atomic files and directories, locks and checksums."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from vitkit.core import files
from vitkit.core.files import (
    atomic_write,
    commit_directory,
    file_lock,
    remove_temporary_files,
    sha256,
    write_bytes,
    write_text,
)


def names(folder) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_write_replaces_a_file_and_leaves_no_temporary(tmp_path) -> None:
    write_bytes(tmp_path / "a", b"old")
    write_text(tmp_path / "a", "neü")
    assert (tmp_path / "a").read_bytes() == "neü".encode()
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, broken) -> None:
    write_bytes(tmp_path / "a", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((files.os, "fsync") if broken == "fsync" else (files.Path, "replace")), full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_atomic_write_appears_at_the_end_of_the_block(tmp_path) -> None:
    with atomic_write(tmp_path / "a") as aside, aside.open("wb") as file:
        file.write(b"one ")
        assert not (tmp_path / "a").exists()
        file.write(b"two")
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_file(tmp_path, error) -> None:
    def cut_short() -> None:
        with atomic_write(tmp_path / "a") as aside:
            aside.write_bytes(b"ne")
            raise error

    write_bytes(tmp_path / "a", b"old")
    with pytest.raises(type(error)):
        cut_short()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_directory_appears_complete(tmp_path) -> None:
    def fill(folder) -> None:
        assert not (tmp_path / "made" / "step").exists(), "seen before it is whole"
        write_bytes(folder / "one", b"1")
        (folder / "two").write_bytes(b"2")

    commit_directory(tmp_path / "made" / "step", fill)
    assert names(tmp_path / "made") == ["step"]
    assert names(tmp_path / "made" / "step") == ["one", "two"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_failed_commit_leaves_nothing(tmp_path, error) -> None:
    def fill(folder) -> None:
        write_bytes(folder / "one", b"1")
        raise error

    with pytest.raises(type(error)):
        commit_directory(tmp_path / "step", fill)
    assert names(tmp_path) == []


def test_committed_directory_does_not_change(tmp_path) -> None:
    commit_directory(tmp_path / "step", lambda folder: write_bytes(folder / "a", b"1"))
    with pytest.raises(OSError, match="step"):
        commit_directory(tmp_path / "step", lambda folder: write_bytes(folder / "a", b"2"))
    assert (tmp_path / "step" / "a").read_bytes() == b"1"
    assert names(tmp_path) == ["step"]


def test_only_temporary_files_are_removed(tmp_path) -> None:
    (tmp_path / ".step-1.77.tmp").mkdir()
    (tmp_path / ".step-1.77.tmp" / "half").write_bytes(b"x")
    (tmp_path / ".a.77.tmp").write_bytes(b"x")
    for kept in (".hidden", "a.tmp", "a"):
        (tmp_path / kept).write_bytes(b"x")
    remove_temporary_files(tmp_path)
    assert names(tmp_path) == [".hidden", "a", "a.tmp"]


def test_removing_temporary_files_of_a_missing_directory(tmp_path) -> None:
    remove_temporary_files(tmp_path / "nowhere")


def test_sha256_of_a_file(tmp_path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_sha256_rejects_a_pipe(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="not a file"):
        sha256(tmp_path / "pipe")


def test_file_lock_is_exclusive_per_path(tmp_path: Path) -> None:
    order: list[str] = []
    started, release = threading.Event(), threading.Event()

    def first() -> None:
        with file_lock(tmp_path / "work"):
            started.set()
            release.wait(30)
            order.append("first")

    def second() -> None:
        with file_lock(tmp_path / "work"):
            order.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert started.wait(30)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with file_lock(tmp_path / "other"):  # another path is not waited for
        release.set()
    for thread in threads:
        thread.join(30)
    assert order == ["first", "second"]
