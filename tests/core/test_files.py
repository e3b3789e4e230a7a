"""Files and folders that appear whole or not at all."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from vitkit.core import files
from vitkit.core.files import (
    commit_folder,
    one_at_a_time,
    remove_leftovers,
    sha256,
    write_bytes,
    write_text,
    written_aside,
)


def names(folder) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_written_over_whole_and_leaves_nothing_aside(tmp_path) -> None:
    write_bytes(tmp_path / "a", b"old")
    write_text(tmp_path / "a", "neü")
    assert (tmp_path / "a").read_bytes() == "neü".encode()
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, broken) -> None:
    write_bytes(tmp_path / "a", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((files.os, "fsync") if broken == "fsync" else (files.Path, "replace")), full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_large_file_is_written_aside_piece_by_piece(tmp_path) -> None:
    with written_aside(tmp_path / "a") as aside, aside.open("wb") as file:
        file.write(b"one ")
        assert not (tmp_path / "a").exists()
        file.write(b"two")
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path, error) -> None:
    def cut_short() -> None:
        with written_aside(tmp_path / "a") as aside:
            aside.write_bytes(b"ne")
            raise error

    write_bytes(tmp_path / "a", b"old")
    with pytest.raises(type(error)):
        cut_short()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_folder_is_committed_whole(tmp_path) -> None:
    def fill(folder) -> None:
        assert not (tmp_path / "made" / "step").exists(), "seen before it is whole"
        write_bytes(folder / "one", b"1")
        (folder / "two").write_bytes(b"2")

    commit_folder(tmp_path / "made" / "step", fill)
    assert names(tmp_path / "made") == ["step"]
    assert names(tmp_path / "made" / "step") == ["one", "two"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_folder_that_cannot_be_filled_leaves_nothing(tmp_path, error) -> None:
    def fill(folder) -> None:
        write_bytes(folder / "one", b"1")
        raise error

    with pytest.raises(type(error)):
        commit_folder(tmp_path / "step", fill)
    assert names(tmp_path) == []


def test_a_committed_folder_does_not_change(tmp_path) -> None:
    commit_folder(tmp_path / "step", lambda folder: write_bytes(folder / "a", b"1"))
    with pytest.raises(OSError, match="step"):
        commit_folder(tmp_path / "step", lambda folder: write_bytes(folder / "a", b"2"))
    assert (tmp_path / "step" / "a").read_bytes() == b"1"
    assert names(tmp_path) == ["step"]


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path) -> None:
    (tmp_path / ".step-1.77.tmp").mkdir()
    (tmp_path / ".step-1.77.tmp" / "half").write_bytes(b"x")
    (tmp_path / ".a.77.tmp").write_bytes(b"x")
    for kept in (".hidden", "a.tmp", "a"):
        (tmp_path / kept).write_bytes(b"x")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", "a", "a.tmp"]


def test_leftovers_of_a_folder_that_is_not_there_are_none(tmp_path) -> None:
    remove_leftovers(tmp_path / "nowhere")


def test_sha256_is_that_of_the_content(tmp_path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_sha256_waits_for_no_pipe(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="not a file"):
        sha256(tmp_path / "pipe")


def test_a_block_is_entered_by_one_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    started, release = threading.Event(), threading.Event()

    def first() -> None:
        with one_at_a_time(tmp_path / "work"):
            started.set()
            release.wait(30)
            order.append("first")

    def second() -> None:
        with one_at_a_time(tmp_path / "work"):
            order.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert started.wait(30)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with one_at_a_time(tmp_path / "other"):  # another path is not waited for
        release.set()
    for thread in threads:
        thread.join(30)
    assert order == ["first", "second"]
