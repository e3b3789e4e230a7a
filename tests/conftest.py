"""What every test runs under: one thread a worker, known random numbers, property tests of a modest size, an audit."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings
from security import audit
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

collect_ignore = ["security/listening"]  # a server's processes import it, under an audit of their own

# Models are slow to build and a laptop's clock is noisy, so no deadline. In CI the same examples run every time.
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    audit.install(config)
    settings.load_profile("ci" if os.environ.get("CI") else "local")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores: more threads would only wait for each other


def pytest_sessionstart() -> None:
    """Compile the fast engine once, and not while a test waits for its server."""
    from vitkit.engine.native.build import EngineError, library  # noqa: PLC0415 - not before its types are checked

    if "PYTEST_XDIST_WORKER" not in os.environ:
        with contextlib.suppress(EngineError):
            library()


class SharersTogether(LoadScopeScheduling):
    """Tests go to whichever worker is free; those of a module that makes something for all of them go together."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return module if shares(self.config.rootpath / module) else nodeid


@functools.cache
def shares(module: Path) -> bool:
    """Whether a module has a server, runs or files that its tests share; each worker would make its own."""
    return module.suffix == ".py" and '(scope="module")' in module.read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return SharersTogether(config, log)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    torch.manual_seed(2020)


@pytest.fixture
def at_full_speed() -> Iterator[None]:
    """Without the checks of types that only tests make: where many small calls are timed they take most of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
