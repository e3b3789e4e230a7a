"""Python's audit events go in; those by which vitkit would run, unpickle or call out come out, each with its line.

As a plugin of pytest it fails the test in which such an event comes from vitkit, and any test that reaches for the
network. A process that a test starts is listened to by way of `audited.py`, beside this file.

Promises X1 and X3 of docs/reliability.md.
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
"""A program is started. Forks are not among them: they run what runs already."""
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
    """What Python announced: by which module of vitkit it came about, and which module did it in the end."""

    name: str
    arguments: str
    outside: bool
    """Whether it reaches for another machine."""
    vitkit: str
    """The innermost module of vitkit on the stack; empty where there is none."""
    line: int
    done_by: str
    importing: bool
    """Whether a module was being imported between the two."""

    def __str__(self) -> str:
        where = f"{self.vitkit}, line {self.line}" if self.vitkit else "the test"
        return f"{self.name} {self.arguments} by {self.done_by}, from {where}"


def is_message(event: Event) -> bool:
    own = event.name == "pickle.find_class" or (event.name in CALLS_OUT and not event.outside)
    return own and event.done_by.startswith(("multiprocessing.", "torch.distributed"))


def is_of_the_doctor(event: Event) -> bool:
    return event.name in RUNS and event.vitkit == "vitkit.cli.doctor"


def is_the_worker(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.serve.supervisor"


def is_the_proof(event: Event) -> bool:
    return event.name == "subprocess.Popen" and event.vitkit == "vitkit.export.exporting"


def is_the_compiler(event: Event) -> bool:
    return event.name in RUNS and event.vitkit == "vitkit.engine.native.build"


def is_torchs_compiler(event: Event) -> bool:
    return event.name in RUNS and event.done_by == "subprocess" and event.vitkit.startswith("vitkit.model.")


def is_an_import(event: Event) -> bool:
    return event.importing and event.name in RUNS


def is_among_ranks(event: Event) -> bool:
    return event.name in CALLS_OUT and not event.outside and event.vitkit.startswith("vitkit.train.")


ALLOWED: dict[Callable[[Event], bool], str] = {
    is_message: "processes of one run send each other objects; nobody else can write to those pipes",
    is_of_the_doctor: "vitkit doctor tries imports in a process of its own, and asks macOS for its sizes",
    is_the_worker: "the server starts its own worker, with Python's own path and no words of anybody's",
    is_the_proof: "export runs the example that it wrote, in which nothing of the model's is code, as a user would",
    is_the_compiler: "the native engine is compiled from vitkit's own sources",
    is_torchs_compiler: "torch.compile calls the C++ compiler on what it wrote itself",
    is_an_import: "libraries look for compilers and processors while they are imported",
    is_among_ranks: "the ranks of a run on one machine find each other by its loopback",
}
"""What may happen, and why. All else that comes from vitkit fails the test."""


class Audit:
    """Listens from now on; a hook cannot be taken off again, so there is one of these a process."""

    def __init__(self, heard: Callable[[Event], None] | None = None) -> None:
        self.seen: list[Event] = []
        self.heard = heard or self.seen.append
        sys.addaudithook(self.hear)

    def hear(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in WATCHED:  # first, because every import and every opened file comes by here
            self.heard(described(name, arguments, sys._getframe(1)))

    def faults(self) -> list[Event]:
        """What may not happen of what was seen since this was asked last."""
        seen = self.seen.copy()
        self.seen.clear()
        return [event for event in seen if is_fault(event)]

    @contextmanager
    def aside(self) -> Iterator[list[Event]]:
        """A list that events go to meanwhile, so that they fail nothing."""
        heard, caught = self.heard, list[Event]()
        self.heard = caught.append
        try:
            yield caught
        finally:
            self.heard = heard


def is_fault(event: Event) -> bool:
    """Whether an event breaks a promise: it reaches for the network, or comes from vitkit and has no reason to."""
    return event.outside or bool(event.vitkit and not any(allows(event) for allows in ALLOWED))


def described(name: str, arguments: tuple[Any, ...], frame: FrameType | None) -> Event:
    """The event with what is on the stack."""
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
        arguments=shown(name, arguments),
        outside=name in CALLS_OUT and is_outside(name, arguments),
        vitkit="" if frame is None else str(frame.f_globals["__name__"]),
        line=0 if frame is None else frame.f_lineno,
        done_by=done_by,
        importing=importing,
    )


def is_vitkit(module: str) -> bool:
    return module == "vitkit" or module.startswith("vitkit.")


def shown(name: str, arguments: tuple[Any, ...]) -> str:
    return repr(arguments[1:] if name.startswith("socket.") and len(arguments) > 1 else arguments)[:200]


def is_outside(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an address is other than this machine's own."""
    address = arguments[0] if name in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request") else arguments[1]
    if name == "socket.getaddrinfo" and len(arguments) > 4 and arguments[4] & _PASSIVE:
        return False  # asked in order to listen
    host = address[0] if isinstance(address, tuple) and address else address
    if name == "urllib.Request":
        host = urlsplit(str(address)).hostname or ""
    if host is None or (
        isinstance(host, bytes | str) and name in ("socket.connect", "socket.sendto") and host is address
    ):
        return False  # a socket of Unix is a path; nothing at all is sent where the socket was connected to
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
    """Fails each test in which something happened that may not."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def _check(self) -> None:
        if faults := self.audit.faults():
            pytest.fail("the audit heard:\n" + "\n".join(map(str, faults)), pytrace=False)

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


def the_audit() -> Audit:
    """The one of this process."""
    if not _audit:
        _audit.append(Audit())
    return _audit[0]


def install(config: pytest.Config) -> None:
    """Listen over all tests, those of the examples in `src` too, which a conftest's own hooks would not see."""
    config.pluginmanager.register(Plugin(the_audit()), "vitkit-audit")
