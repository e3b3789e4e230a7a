"""What a command does to its process before it trains."""

import os

import pytest

from vitkit.cli import machine


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "OMP_", "GOMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
    monkeypatch.delenv("GOMP_SPINCOUNT")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: calls.append(True))
    return calls


def test_threads_spin_for_a_moment_and_memory_is_kept(kept):
    machine.prepare_for_training()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert kept == [True]


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_says_of_threads_counts(monkeypatch, kept, name, value):
    monkeypatch.setenv(name, value)
    machine.prepare_for_training()
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT") in (None, "5")


def test_what_the_user_says_of_memory_counts(monkeypatch, kept):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    machine.prepare_for_training()
    assert kept == []


def test_memory_can_be_kept_on_this_machine():
    machine.keep_freed_memory()
