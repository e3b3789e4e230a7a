"""The native library is compiled once, whole, and said why where it cannot be."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitkit.engine.native import build
from vitkit.engine.native.build import EngineError, find_compiler, is_built, library

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, and sources that take no time to compile."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "engine.cpp").write_text(
        '#include "part.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    (sources / "part.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler of one's own, by CXX; the file that it writes down in what it is called with."""
    seen = tmp_path / "seen"
    real = find_compiler()
    assert real is not None
    own = tmp_path / "my compiler"
    own.write_text(f'#!/bin/sh\necho "$@" >> "{seen}"\nexec {real[0]} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{own}' -DTHEIRS")
    return seen


def libraries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_it_is_compiled_once(cache) -> None:
    assert not is_built()
    path = library()
    changed = path.stat().st_mtime_ns
    assert is_built()
    assert library() == path
    assert path.stat().st_mtime_ns == changed
    assert libraries(cache) == [path.name]


def test_other_sources_are_another_library(cache) -> None:
    first = library()
    (build.SOURCES / "part.h").write_text("#define ANSWER 43\n")
    assert not is_built()
    assert library() != first
    assert len(libraries(cache)) == 2


def test_another_machine_is_another_library(cache, monkeypatch) -> None:
    first = library()
    monkeypatch.setattr(build, "_machine", lambda: "a machine with fewer instructions")
    assert library() != first


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A system that is asked for its CPU as macOS is; the file that it answers by."""
    name = tmp_path / "name"
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(build, "SYSCTL", ("cat", str(name)))
    build._cpu.cache_clear()
    yield name
    build._cpu.cache_clear()


def test_two_macs_have_two_libraries(cache, mac) -> None:
    paths = []
    for cpu in ("Intel(R) Core(TM) i5-4258U", "Apple M4"):
        mac.write_text(f"{cpu}\n")
        build._cpu.cache_clear()
        paths.append(library())
    assert len(set(paths)) == len(libraries(cache)) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_library_for_this_cpu_alone_is_made_only_where_the_cpu_is_known(
    cache, mac, is_known, compiler_calls, monkeypatch
) -> None:
    if is_known:
        mac.write_text("Apple M4\n")
    else:
        monkeypatch.setattr(build, "SYSCTL", (str(mac / "no such command"),))
    library()
    assert ("-march=native" in compiler_calls.read_text()) == is_known


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_made_anew(cache, damage) -> None:
    path = library()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert not is_built()
    assert library() == path
    assert path.read_bytes()[:4] == whole[:4]
    assert is_built()


def test_the_folder_is_ones_own_and_the_library_writable_for_nobody_else(cache) -> None:
    before = os.umask(0)
    try:
        path = library()
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not path.stat().st_mode & 0o022
    path.chmod(0o777)
    assert not is_built()
    assert library() == path
    assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_what_others_can_put_into_a_shared_folder_is_not_loaded(cache, mode) -> None:
    planted = library()
    cache.chmod(mode)
    assert not is_built()
    own = library()
    assert own.parent == cache / f"of-{os.geteuid()}"
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert (is_built(), library(), planted.exists()) == (True, own, True)
    own.parent.chmod(0o777)
    assert not is_built()
    with pytest.raises(EngineError, match="others can write to"):
        library()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("what", ["library", "folder"])
def test_what_belongs_to_somebody_else_is_not_loaded(cache, what) -> None:
    path = library()
    os.chown(path if what == "library" else cache, 12345, 12345)
    assert not is_built()
    made = library()
    assert made.stat().st_uid == made.parent.stat().st_uid == 0


def test_a_compiler_that_speaks_in_other_letters_is_quoted_all_the_same(cache, monkeypatch, tmp_path) -> None:
    own = tmp_path / "compiler"
    own.write_bytes(b"#!/bin/sh\nprintf 'error: \\377\\376 no\\n' >&2\nexit 1\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    with pytest.raises(EngineError, match="could not compile"):
        library()
    assert libraries(cache) == []


def test_without_a_compiler_it_says_so_and_leaves_nothing(cache, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler") as caught:
        library()
    assert "CXX" in str(caught.value)
    assert not cache.exists()


def test_without_a_compiler_a_library_that_is_there_is_used(cache, monkeypatch) -> None:
    path = library()
    monkeypatch.setenv("PATH", "")
    assert is_built()
    assert library() == path


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache) -> None:
    (build.SOURCES / "part.h").write_text("#error this machine has no numbers\n")
    with pytest.raises(EngineError, match="no numbers"):
        library()
    assert libraries(cache) == []


def test_a_cache_that_cannot_be_written_is_said(cache) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(EngineError, match="cannot be kept"):
        library()


def test_cxx_chooses_the_compiler(cache, compiler_calls) -> None:
    library()
    assert "-DTHEIRS" in compiler_calls.read_text()


def test_two_processes_at_once_leave_one_good_library(cache) -> None:
    script = (
        "import ctypes, sys, pathlib\nfrom vitkit.engine.native import build\n"
        "build.SOURCES = pathlib.Path(sys.argv[1])\n"
        "assert ctypes.CDLL(str(build.library())).answer() == 42"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, str(build.SOURCES)]) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len(libraries(cache)) == 1
