"""`doctor`, `cache_info` and `clear_cache`."""

from pathlib import Path

import pytest

import vitkit
from vitkit.core.cache_dir import create_cache_dir
from vitkit.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def test_doctor_has_facts_and_advice() -> None:
    result = vitkit.doctor()
    assert result.to_dict() == {**result.facts, "advice": result.advice}
    assert repr(result).startswith("MachineReport(python=3.")
    assert "\n" not in repr(result)
    assert "<table>" in result._repr_html_()


@pytest.mark.usefixtures("cache")
def test_cache_is_measured_and_cleared() -> None:
    assert vitkit.cache_info().size_bytes == 0
    entry = create_cache_dir("features") / "entry"
    entry.write_bytes(bytes(1000))
    info = vitkit.cache_info()
    assert (info.size_bytes, info.sizes["features"]) == (1000, 1000)
    assert vitkit.clear_cache() == info
    assert not entry.exists()
    assert vitkit.cache_info().size_bytes == 0
    assert repr(info).startswith("CacheInfo(path=")


@pytest.mark.usefixtures("cache")
def test_wrong_size_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "plenty")
    with pytest.raises(ConfigError, match="VITKIT_CACHE_LIMIT is not a size"):
        vitkit.cache_info()
