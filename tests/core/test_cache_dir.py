"""The cache: location, size limit with least recently used first, and clearing."""

import os
from pathlib import Path

import pytest

from vitkit.cli.main import main
from vitkit.core.cache_dir import cache_dir, cache_info, cache_limit, clear_cache, create_cache_dir, trim_cache
from vitkit.core.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITKIT_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


def add(name: str, file: str, *, size: int, used: int) -> Path:
    path = create_cache_dir(name) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (used, used))
    return path


def test_least_recently_used_entries_are_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    old, recent = add("features", "old.npy", size=60, used=1), add("features", "recent.npy", size=60, used=3)
    kernels = add("kernels", "native.so", size=60, used=2)
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "130")
    assert trim_cache() == [old]
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "70")
    assert trim_cache(keep=kernels) == [recent]
    assert kernels.exists()
    assert trim_cache() == []


def test_inductor_is_removed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    add("inductor", "ab/kernel.py", size=50, used=1)
    add("inductor", "cd/kernel.py", size=50, used=5)
    add("features", "a.npy", size=50, used=3)
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "120")
    assert [path.name for path in trim_cache()] == ["a.npy"]
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "99")
    assert trim_cache() == [cache_dir("inductor")]


def test_info_and_clear_report_sizes(cache: Path) -> None:
    assert (cache_info().size_bytes, cache_info().path) == (0, cache)
    add("features", "a.npy", size=10, used=1)
    add("kernels", "b.so", size=5, used=1)
    (cache / "mine.txt").write_text("not a cache entry")
    info = clear_cache()
    assert (info.size_bytes, info.sizes) == (15, {"kernels": 5, "inductor": 0, "features": 10, "images": 0})
    assert cache_info().size_bytes == 0
    assert [path.name for path in cache.iterdir()] == ["mine.txt"]


def test_limit_is_5_gb_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_limit() == 5 * 10**9
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "20 GB")
    assert cache_limit() == 20 * 10**9
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "much")
    with pytest.raises(ConfigError, match="not a size"):
        cache_limit()


def test_command_shows_and_clears(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add("features", "a.npy", size=1500, used=1)
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(cache) in shown.replace("\n", "").replace(" ", "")
    assert "1.5 kB of at most 5.0 GB" in shown
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"removed 1.5 kB from {cache}\n"
    assert main(["cache", "--json"]) == 0
    assert '"size_bytes": 0' in capsys.readouterr().out
