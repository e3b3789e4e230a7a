"""Thread and memory settings of a process before training."""

import os

import pytest

from vitkit.core import environment


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "OMP_", "GOMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # restored afterwards
    monkeypatch.delenv("GOMP_SPINCOUNT")


@pytest.fixture
def retained(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(environment, "retain_freed_memory", lambda: calls.append(True))
    return calls


def test_spinning_is_limited_and_memory_retained(retained):
    environment.prepare_for_training()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert retained == [True]


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_thread_settings_of_the_user_win(monkeypatch, retained, name, value):
    monkeypatch.setenv(name, value)
    environment.prepare_for_training()
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT") in (None, "5")


def test_memory_settings_of_the_user_win(monkeypatch, retained):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    environment.prepare_for_training()
    assert retained == []


def test_ranks_hide_warnings_of_cpp_code(monkeypatch, retained):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")  # restored afterwards
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.delenv("RANK", raising=False)
    environment.prepare_for_training()
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("RANK", "1")
    environment.prepare_for_training()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    environment.prepare_for_training()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_retaining_memory_works_here():
    environment.retain_freed_memory()
