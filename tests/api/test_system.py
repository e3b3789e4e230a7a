"""`doctor`, `cache_info` and `clear_cache`: the results of the commands."""

from pathlib import Path

import pytest
from cli.tiny_runs import Shell

import vitkit
from vitkit.api import system
from vitkit.core.cache_dir import create_cache_dir
from vitkit.errors import ConfigError
from vitkit.inference.machine import examine_machine


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    return Shell(capsys)


def test_doctor_equals_the_command(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine_machine()
    monkeypatch.setattr(system, "examine_machine", lambda: report)
    result = vitkit.doctor()
    assert shell("doctor", "--json").json == result.to_dict() == {**result.facts, "advice": result.advice}
    assert repr(result).startswith("MachineReport(python=3.")
    assert "\n" not in repr(result)
    assert "<table>" in result._repr_html_()


def test_cache_functions_equal_the_commands(shell: Shell) -> None:
    assert vitkit.cache_info().to_dict() == shell("cache", "--json").json
    entry = create_cache_dir("features") / "entry"
    entry.write_bytes(bytes(1000))
    info = vitkit.cache_info()
    assert (info.size_bytes, info.sizes["features"]) == (1000, 1000)
    assert info.to_dict() == shell("cache", "--json").json
    assert vitkit.clear_cache() == info
    assert not entry.exists()
    assert vitkit.cache_info().size_bytes == 0
    assert repr(info).startswith("CacheInfo(path=")


def test_wrong_size_limit_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE_LIMIT", "plenty")
    with pytest.raises(ConfigError, match="VITKIT_CACHE_LIMIT is not a size"):
        vitkit.cache_info()
