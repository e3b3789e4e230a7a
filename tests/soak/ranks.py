"""A rank that dies or hangs goes in; what torchrun and the other ranks make of it comes out: promise R8."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from soak.faults import Finding
from soak.victim import Run, SlowError, children, torchrun

SETTINGS = ("schedule.steps=600", "keep.save_every=20", "keep.evaluate_every=300")


def killed_rank(folder: Path, *, count: int) -> Finding:
    """R8: torchrun starts the ranks again when one was killed, and the result is that of a run without kills."""
    finding = Finding("R8 a rank is killed", {"kills": 0, "slowest recovery, s": 0.0})
    reference = Run(folder / "reference", SETTINGS)
    with torchrun(reference) as agent:
        finding.expect(agent.wait(120) == 0, "the reference did not finish")
    for number in range(count):
        run = Run(folder / f"killed-{number}", SETTINGS)
        with torchrun(run, restarts=3) as agent:
            takes_steps(run, agent, after=30)
            os.kill(sorted(children(agent.pid))[number % 2], signal.SIGKILL)
            killed, before = time.monotonic(), run.last_step()
            finding.count("kills")
            says(run, agent, "going on from step")
            takes_steps(run, agent, after=before)
            finding.most("slowest recovery, s", time.monotonic() - killed)
            finding.expect(agent.wait(120) == 0, f"run {number} did not finish")
        finding.expect(run.outcome() == reference.outcome(), f"run {number} differs from the run that was not hit")
    finding.expect(float(str(finding.figures["slowest recovery, s"])) <= 30.0, "a recovery took more than 30 s")
    return finding


def stopped_rank(folder: Path, *, count: int, timeout: int = 10) -> Finding:
    """R8: a rank hangs; the others end within the set time and say which it was."""
    finding = Finding("R8 a rank hangs", {"hangs": 0, "slowest message, s": 0.0, "slowest end, s": 0.0})
    for number in range(count):
        run = Run(folder / f"stopped-{number}", (*SETTINGS, f"parallel.timeout={timeout}"))
        with torchrun(run) as agent:
            takes_steps(run, agent, after=30)
            hung = (number + 1) % 2
            pid = next(pid for pid in children(agent.pid) if rank_of(pid) == hung)
            os.kill(pid, signal.SIGSTOP)
            stopped = time.monotonic()
            finding.count("hangs")
            says(run, agent, f"rank {hung} did not answer", seconds=2.0 * timeout)
            finding.most("slowest message, s", time.monotonic() - stopped)
            finding.expect(agent.wait(90) != 0, "torchrun did not notice")
            finding.most("slowest end, s", time.monotonic() - stopped)
            finding.expect(not Path(f"/proc/{pid}").exists(), "the rank that hung is still there")
    return finding


def named(folder: Path, *, timeout: int) -> Finding:
    """R8, without the half minute that torchrun grants a hung rank: one is stopped, the other says which and ends."""
    finding = Finding("R8 a rank hangs")
    run = Run(folder / "hung", (*SETTINGS, f"parallel.timeout={timeout}"))
    with torchrun(run) as agent:
        takes_steps(run, agent, after=20)
        os.kill(next(pid for pid in children(agent.pid) if rank_of(pid) == 1), signal.SIGSTOP)
        says(run, agent, "rank 1 did not answer", seconds=10.0 * timeout)
    return finding


def takes_steps(run: Run, agent: subprocess.Popen, *, after: int) -> None:
    """Wait until the run has logged a step after this one."""
    wait_for(lambda: run.last_step() > after, agent)


def says(run: Run, agent: subprocess.Popen, words: str, *, seconds: float = 120.0) -> None:
    """Wait until the run has said this."""
    wait_for(lambda: words in run.log.read_text(encoding="utf-8", errors="replace"), agent, seconds=seconds)


def wait_for(condition: Callable[[], object], agent: subprocess.Popen, *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        ended = agent.poll()
        if time.monotonic() > end or (ended is not None and not condition()):
            raise SlowError(f"not within {seconds} s, or torchrun ended ({ended})")
        time.sleep(0.02)


def rank_of(pid: int) -> int | None:
    """The rank that torchrun gave a process."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return int(entry[5:])
    return None
