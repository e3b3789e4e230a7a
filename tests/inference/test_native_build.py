"""Compilation of the native library: once per machine, private and intact."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitkit.inference.native import library
from vitkit.inference.native.library import EngineError, build_library, find_compiler, is_built

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and sources that compile quickly."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "engine.cpp").write_text(
        '#include "part.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    (sources / "part.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler selected by CXX; return the file in which it logs its arguments."""
    log = tmp_path / "log"
    real = find_compiler()
    assert real is not None
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nexec {real[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' -DTHEIRS")
    return log


def libraries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "kernels").glob("*") if path.suffix not in (".lock", ".failed"))


def test_library_is_compiled_once(cache) -> None:
    assert not is_built()
    path = build_library()
    changed = path.stat().st_mtime_ns
    assert is_built()
    assert build_library() == path
    assert path.stat().st_mtime_ns == changed
    assert libraries(cache) == [path.name]


def test_changed_sources_give_another_library(cache) -> None:
    first = build_library()
    (library.SOURCES / "part.h").write_text("#define ANSWER 43\n")
    assert not is_built()
    assert build_library() != first
    assert len(libraries(cache)) == 2


def test_another_machine_has_another_library(cache, monkeypatch) -> None:
    first = build_library()
    monkeypatch.setattr(library, "_cpu", lambda: "a machine with fewer instructions")
    assert build_library() != first


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Identify the CPU as on macOS; return the file with its name."""
    name = tmp_path / "name"
    monkeypatch.setattr(library.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(library, "SYSCTL", ("cat", str(name)))
    library._cpu.cache_clear()
    yield name
    library._cpu.cache_clear()


def test_two_macs_have_two_libraries(cache, mac) -> None:
    paths = []
    for cpu in ("Intel(R) Core(TM) i5-4258U", "Apple M4"):
        mac.write_text(f"{cpu}\n")
        library._cpu.cache_clear()
        paths.append(build_library())
    assert len(set(paths)) == len(libraries(cache)) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_native_flags_need_a_known_cpu(cache, mac, is_known, compiler_calls, monkeypatch) -> None:
    if is_known:
        mac.write_text("Apple M4\n")
    else:
        monkeypatch.setattr(library, "SYSCTL", (str(mac / "no such command"),))
    build_library()
    assert ("-march=native" in compiler_calls.read_text()) == is_known


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_damaged_library_is_rebuilt(cache, damage) -> None:
    path = build_library()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert not is_built()
    assert build_library() == path
    assert path.read_bytes()[:4] == whole[:4]
    assert is_built()


def test_library_is_private_for_any_umask(cache) -> None:
    before = os.umask(0)
    try:
        path = build_library()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (cache, cache / "kernels")} == {0o700}
    assert not path.stat().st_mode & 0o022
    path.chmod(0o777)
    assert not is_built()
    assert build_library() == path
    assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_library_in_a_shared_directory_is_not_loaded(cache, mode) -> None:
    planted = build_library()
    cache.chmod(mode)
    assert not is_built()
    own = build_library()
    assert own.parent == cache / f"of-{os.geteuid()}" / "kernels"
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert (is_built(), build_library(), planted.exists()) == (True, own, True)
    own.parent.chmod(0o777)
    assert not is_built()
    with pytest.raises(EngineError, match="other users can write to"):
        build_library()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("owned", ["library", "cache"])
def test_library_of_another_user_is_not_loaded(cache, owned) -> None:
    path = build_library()
    os.chown(path if owned == "library" else cache, 12345, 12345)
    assert not is_built()
    path = build_library()
    assert path.stat().st_uid == path.parent.stat().st_uid == 0


def test_undecodable_compiler_output_is_quoted(cache, monkeypatch, tmp_path) -> None:
    own = tmp_path / "compiler"
    own.write_bytes(b"#!/bin/sh\nprintf 'error: \\377\\376 no\\n' >&2\nexit 1\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    with pytest.raises(EngineError, match="could not compile"):
        build_library()
    assert libraries(cache) == []


def test_missing_compiler_is_reported(cache, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match="no C\\+\\+ compiler") as caught:
        build_library()
    assert "CXX" in str(caught.value)
    assert not cache.exists()


def test_existing_library_needs_no_compiler(cache, monkeypatch) -> None:
    path = build_library()
    monkeypatch.setenv("PATH", "")
    assert is_built()
    assert build_library() == path


def test_compiler_error_is_quoted(cache) -> None:
    (library.SOURCES / "part.h").write_text("#error this machine has no numbers\n")
    with pytest.raises(EngineError, match="no numbers"):
        build_library()
    assert libraries(cache) == []


def test_unwritable_cache_is_reported(cache) -> None:
    cache.write_text("a file, not a directory")
    with pytest.raises(EngineError, match="cannot be stored"):
        build_library()


def test_cxx_selects_the_compiler(cache, compiler_calls) -> None:
    build_library()
    assert "-DTHEIRS" in compiler_calls.read_text()


def test_concurrent_builds_leave_one_library(cache) -> None:
    script = (
        "import ctypes, sys, pathlib\nfrom vitkit.inference.native import library\n"
        "library.SOURCES = pathlib.Path(sys.argv[1])\n"
        "assert ctypes.CDLL(str(library.build_library())).answer() == 42"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(library.SOURCES)]) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(libraries(cache)) == 1


@pytest.mark.usefixtures("cache")
def test_noexec_cache_is_reported_before_compiling(compiler_calls, monkeypatch):
    status = os.statvfs("/")
    flags = SimpleNamespace(f_flag=status.f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: flags)
    with pytest.raises(EngineError, match="mounted noexec") as caught:
        build_library()
    assert "VITKIT_CACHE" in caught.value.hint
    assert "-shared" not in (compiler_calls.read_text() if compiler_calls.exists() else "")


@pytest.mark.usefixtures("cache")
def test_full_cache_is_reported_before_compiling(compiler_calls, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(EngineError, match=r"1\.0 MB of free space"):
        build_library()
    assert "-shared" not in (compiler_calls.read_text() if compiler_calls.exists() else "")


HAS_MOUNTS = (
    sys.platform == "linux"
    and subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0
)


@pytest.mark.skipif(not HAS_MOUNTS, reason="mounting a file system needs Linux and root")
@pytest.mark.parametrize(
    ("options", "reason"),
    [("noexec", "mounted noexec"), ("size=1m", "1.0 MB of free space"), ("ro", "Read-only file system")],
)
def test_unsuitable_file_system_is_reported(tmp_path, options, reason) -> None:
    program = "from vitkit.inference.native.library import build_library; build_library()"
    mount = 'mount -t tmpfs -o "$1" none "$VITKIT_CACHE" && exec "$2" -c "$3"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", options, sys.executable, program],
        env=os.environ | {"VITKIT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "EngineError: the native engine cannot be stored" in result.stderr
    assert reason in result.stderr


def test_library_that_cannot_be_loaded_is_an_engine_error(cache, monkeypatch):
    build_library()

    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")  # as Linux does on a file system mounted noexec

    monkeypatch.setattr(library.mmap, "mmap", refuse)
    with pytest.raises(EngineError, match=r"cannot be loaded from .*: .*not permitted") as caught:
        build_library()
    assert "VITKIT_CACHE" in caught.value.hint


def test_failed_compilation_is_not_repeated(cache, compiler_calls):
    (library.SOURCES / "engine.cpp").write_text("not C++\n")
    with pytest.raises(EngineError, match="could not compile") as first:
        build_library()
    attempts = compiler_calls.read_text().count("-shared")
    assert attempts > 0
    with pytest.raises(EngineError, match="earlier attempt") as second:
        build_library()
    assert compiler_calls.read_text().count("-shared") == attempts
    assert str(first.value.got) in str(second.value)
    (library.SOURCES / "part.h").write_text("#define ANSWER 43\n")  # another version is tried
    with pytest.raises(EngineError, match="could not compile"):
        build_library()


def test_compiler_does_not_need_the_temporary_directory(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    build_library()
    assert len(libraries(cache)) == 1
