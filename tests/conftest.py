"""What every test runs under: one thread a worker, known random numbers, property tests of a modest size, an audit."""

import contextlib
import os

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


SHARING_A_SERVER = ("tests/serve/", "tests/security/", "tests/docs/test_serving_guide.py")


class ServersApart(LoadScopeScheduling):
    """Tests go to whichever worker is free; those of a module that shares a server go together."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0] if nodeid.startswith(SHARING_A_SERVER) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ServersApart(config, log)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    torch.manual_seed(2020)
