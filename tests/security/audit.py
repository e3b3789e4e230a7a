"""Audit hook for events by which vitkit would start a program, unpickle or use the network, with their lines.

As a pytest plugin it fails tests in which vitkit causes such an event, and tests that use the network. Child processes
are audited by `audited.py`, next to this file.

Guarantees X1 and X3 of docs/reliability.md.
"""

import ipaddress
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import pytest

RUNS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"})
"""Events that start a program. Forks do not: they run the same program."""
CALLS_OUT = frozenset(
    {
        "socket.connect",
        "socket.sendto",
        "socket.sendmsg",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "urllib.Request",
    }
)
WATCHED = RUNS | CALLS_OUT | {"pickle.find_class"}


@dataclass(frozen=True, kw_only=True)
class Event:
    """An audit event, the module of vitkit that caused it, and the module that raised it."""

    name: str
    arguments: str
    outside: bool
    """Whether the event contacts another machine."""
    vitkit: str
    """Innermost module of vitkit on the stack; empty if there is none."""
    line: int
    done_by: str
    importing: bool
    """Whether a module was imported between the two."""

    def __str__(self) -> str:
        where = f"{self.vitkit}, line {self.line}" if self.vitkit else "the test"
        return f"{self.name} {self.arguments} by {self.done_by}, from {where}"


def is_message(event: Event) -> bool:
    own = event.name == "pickle.find_class" or (event.name in CALLS_OUT and not event.outside)
    return own and event.done_by.startswith(("multiprocessing.", "torch.distributed"))


def is_of_the_doctor(event: Event) -> bool:
    return event.name in RUNS and event.vitkit == "vitkit.inference.machine"


def is_the_worker(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.server.supervisor"


def is_the_background_server(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.server.background"


def is_the_run_of_a_study(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.studies.dispatch"


def is_a_download(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.weights.download"


def is_the_proof(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.exporters.verification"


def is_the_compiler(event: Event) -> bool:
    return event.name in RUNS and event.vitkit == "vitkit.inference.native.library"


def is_torchs_compiler(event: Event) -> bool:
    return event.name in RUNS and event.done_by == "subprocess" and event.vitkit.startswith("vitkit.model.")


def is_an_import(event: Event) -> bool:
    return event.importing and event.name in RUNS


def is_among_ranks(event: Event) -> bool:
    return event.name in CALLS_OUT and not event.outside and event.vitkit.startswith("vitkit.training.")


ALLOWED: dict[Callable[[Event], bool], str] = {
    is_message: "processes of one run send each other objects; nobody else can write to those pipes",
    is_of_the_doctor: "vitkit doctor tries imports in a process of its own, and asks macOS for its sizes",
    is_the_worker: "the server starts its own worker, with Python's own path and no words of anybody's",
    is_the_background_server: "vitkit.serve(block=False) starts the server with Python's own path; options go by stdin",
    is_the_run_of_a_study: "a study starts its runs with Python's own path and the file of a job that it wrote itself",
    is_a_download: "default weights are downloaded with Python's own path and a name that was parsed",
    is_the_proof: "export runs the example that it wrote, in which nothing of the model's is code, as a user would",
    is_the_compiler: "the native engine is compiled from vitkit's own sources",
    is_torchs_compiler: "torch.compile calls the C++ compiler on what it wrote itself",
    is_an_import: "libraries look for compilers and processors while they are imported",
    is_among_ranks: "the ranks of a run on one machine find each other by its loopback",
}
"""Allowed events, with reasons. All others that vitkit causes fail the test."""


class Audit:
    """Audit hook. Hooks cannot be removed, so there is one per process."""

    def __init__(self, record: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.record = record or self.events.append
        sys.addaudithook(self.on_event)

    def on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in WATCHED:  # checked first: every import and every opened file is an event
            self.record(describe_event(name, arguments, sys._getframe(1)))

    def faults(self) -> list[Event]:
        """Return the forbidden events since the last call."""
        events = self.events.copy()
        self.events.clear()
        return [event for event in events if is_fault(event)]

    @contextmanager
    def redirect(self) -> Iterator[list[Event]]:
        """Collect events in another list meanwhile, so that they do not fail the test."""
        record, events = self.record, list[Event]()
        self.record = events.append
        try:
            yield events
        finally:
            self.record = record


def is_fault(event: Event) -> bool:
    """Return whether an event is forbidden: it uses the network, or vitkit causes it and it is not allowed."""
    return event.outside or bool(event.vitkit and not any(allows(event) for allows in ALLOWED))


def describe_event(name: str, arguments: tuple[Any, ...], frame: FrameType | None) -> Event:
    """Create the event with the modules on the stack."""
    done_by, importing = "", False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("importlib."):
            importing = True
        else:
            done_by = done_by or module
        if is_vitkit(module):
            break
        frame = frame.f_back
    return Event(
        name=name,
        arguments=format_arguments(name, arguments),
        outside=name in CALLS_OUT and is_outside(name, arguments),
        vitkit="" if frame is None else str(frame.f_globals["__name__"]),
        line=0 if frame is None else frame.f_lineno,
        done_by=done_by,
        importing=importing,
    )


def is_vitkit(module: str) -> bool:
    return module == "vitkit" or module.startswith("vitkit.")


def format_arguments(name: str, arguments: tuple[Any, ...]) -> str:
    return repr(arguments[1:] if name.startswith("socket.") and len(arguments) > 1 else arguments)[:200]


def is_outside(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether an address is on another machine."""
    address = arguments[0] if name in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request") else arguments[1]
    if name == "socket.getaddrinfo" and len(arguments) > 4 and arguments[4] & _PASSIVE:
        return False  # to listen
    host = address[0] if isinstance(address, tuple) and address else address
    if name == "urllib.Request":
        host = urlsplit(str(address)).hostname or ""
    if host is None or (
        isinstance(host, bytes | str) and name in ("socket.connect", "socket.sendto") and host is address
    ):
        return False  # Unix sockets have paths; connected sockets have no address
    text = host.decode("latin-1") if isinstance(host, bytes) else str(host)
    if text in ("", "localhost", "ip6-localhost") or text in _OWN_NAMES:
        return False
    try:
        return not ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return True


_PASSIVE = 1
_OWN_NAMES = frozenset({os.uname().nodename}) if hasattr(os, "uname") else frozenset()


class Plugin:
    """Plugin that fails tests with forbidden events."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def _check(self) -> None:
        if faults := self.audit.faults():
            pytest.fail("forbidden audit events:\n" + "\n".join(map(str, faults)), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        result = yield
        self._check()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        result = yield
        self._check()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        result = yield
        self._check()
        return result


_audit: list[Audit] = []


def get_audit() -> Audit:
    """Return the audit of this process."""
    if not _audit:
        _audit.append(Audit())
    return _audit[0]


def install(config: pytest.Config) -> None:
    """Audit all tests, including doctests in `src`, which the hooks of a conftest would not see."""
    config.pluginmanager.register(Plugin(get_audit()), "vitkit-audit")
