"""Setup of all tests: one thread per worker, fixed seeds, hypothesis profiles, and an audit of system calls."""

import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import settings
from quick_runs import shorten_runs
from security import audit
from soak.victim import Launcher
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
if (
    "VITKIT_TEST_GPU" not in os.environ
):  # figures of the tests are those of CPUs; processes that they start inherit this
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
WITHOUT_TYPE_CHECKS = {"api", "cli", "docs", "report", "security", "server", "training"}
"""Directories of tests of whole commands and public functions, where checks of shapes and types at run time take more
than half of the time, and would reject wrong arguments before the function can explain them.

The same functions are checked in the directories of their packages, and training in the modules below.
"""
WITH_TYPE_CHECKS = {"test_every_objective.py", "test_loop.py", "test_muon.py", "test_optim.py", "test_trainer.py"}
SLOW_DIRECTORIES = WITHOUT_TYPE_CHECKS | {"exporters", "inference", "oracle", "studies", "weights"}
collect_ignore = ["security/listening"]  # imported by server processes, which have an audit of their own

# No deadline: models are slow to build and machines are busy. The same examples run every time.
settings.register_profile("local", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("ci", settings.get_profile("local"), print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    audit.install(config)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # runs look for default weights
    settings.load_profile("ci" if os.environ.get("CI") else "local")
    jaxtyping.config.update("jaxtyping_disable", True)  # modules build parameters with functions that tests check
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores


def pytest_sessionstart() -> None:
    """Compile the native kernels once, before a test waits for a server."""
    from vitkit.inference.native.library import EngineError, build_library  # noqa: PLC0415 - after jaxtyping hooks the import

    if "PYTEST_XDIST_WORKER" not in os.environ:
        with contextlib.suppress(EngineError):
            build_library()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules without garbage collections: almost nothing of them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Prepare a process that runs tests."""
    gc.freeze()  # garbage collections skip what all modules imported
    shorten_runs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Decide about type checks before fixtures are set up."""
    directory, name = item.path.parent, item.path.name
    unchecked = directory.parent == TESTS and directory.name in WITHOUT_TYPE_CHECKS and name not in WITH_TYPE_CHECKS
    jaxtyping.config.update("jaxtyping_disable", unchecked)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run modules that stay together first and the shortest tests last, so that all workers end at the same time."""

    def order(item: pytest.Item) -> int:
        if has_shared_state(item.path):
            return 0
        return 1 if is_slow(item.path) else 2

    items.sort(key=order)


class SharedStateScheduling(LoadScopeScheduling):
    """Scheduler that sends a test to any free worker, except that modules whose tests share values stay together.

    So do the cases of a quick test, most of which take less time than a message to a worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        module = self.config.rootpath / path
        if has_shared_state(module):
            return path
        return nodeid if is_slow(module) else nodeid.partition("[")[0]


@functools.cache
def has_shared_state(module: Path) -> bool:
    """Return whether tests of a module share a server, runs, files or values, which each worker would create again."""
    if module.suffix != ".py":
        return False
    return bool(re.search(r'\(scope="module"\)|^@cache$', module.read_text(encoding="utf-8"), flags=re.MULTILINE))


def is_slow(module: Path) -> bool:
    return module.parent.parent == TESTS and module.parent.name in SLOW_DIRECTORIES


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return SharedStateScheduling(config, log)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(2020)


@pytest.fixture
def without_type_checks() -> None:
    """Disable the run-time checks of shapes and types, which only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """A process that forks commands and scripts, so that each of them does not import torch again."""
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def forked_examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the example.py of an export from a process that has its library; other programs are started as usual."""
    start = subprocess.run

    def run(command: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[:2] != [sys.executable, "-P"] or not command[2].endswith("example.py"):
            return start(command, **options)
        launcher: Launcher = request.getfixturevalue("launcher")
        return launcher.run_example(command[2], *command[3:], directory=options["cwd"])

    monkeypatch.setattr(subprocess, "run", run)
