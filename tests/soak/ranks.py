"""Guarantee R8: ranks that die or hang."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from soak.faults import Finding, divisible_batch
from soak.victim import Agents, Launcher, Run, SlowError, torchrun, until

SETTINGS = ("schedule.steps=600", "checkpoint.save_every=20", "evaluation.every=300")


def killed_rank(folder: Path, *, count: int, mode: str = "ddp", nodes: int = 1, processes: int = 2) -> Finding:
    """R8: torchrun restarts the ranks after a kill, and the result is that of an uninterrupted run."""
    where = f"{mode}, {processes} ranks, {nodes} node{'s' if nodes > 1 else ''}"
    finding = Finding(f"R8 a rank is killed, {where}", {"kills": 0, "slowest recovery, s": 0.0})
    settings = (*SETTINGS, f"parallel.mode={mode}", *divisible_batch(processes))
    reference = never_hit(folder / "reference", settings, processes=processes)
    for number in range(count):
        run = Run(folder / f"killed-{number}", settings)
        with torchrun(run, ranks=processes, nodes=nodes, restarts=3) as agents:
            takes_steps(run, agents, after=30)
            os.kill(agents.ranks()[number % processes], signal.SIGKILL)
            killed, before = time.monotonic(), run.last_step()
            finding.count("kills")
            says(run, agents, "resuming from step")
            takes_steps(run, agents, after=before)
            finding.most("slowest recovery, s", time.monotonic() - killed)
            finding.expect(not any(agents.wait(600)), f"run {number} did not finish")
        finding.expect(run.outcome() == reference.outcome(), f"run {number} differs from the run that was not hit")
    finding.expect(float(str(finding.figures["slowest recovery, s"])) <= 30.0, "a recovery took more than 30 s")
    return finding


def stopped_rank(folder: Path, *, count: int, timeout: int = 10) -> Finding:
    """R8: a rank hangs; the others report which one within the timeout, and torchrun restarts all of them."""
    finding = Finding("R8 a rank hangs", {"hangs": 0, "slowest message, s": 0.0, "slowest recovery, s": 0.0})
    settings = (*SETTINGS, f"parallel.timeout={timeout}")
    reference = never_hit(folder / "reference", settings)
    for number in range(count):
        run = Run(folder / f"stopped-{number}", settings)
        with torchrun(run, restarts=1) as agents:
            takes_steps(run, agents, after=30)
            hung = (number + 1) % 2
            pid = next(pid for pid in agents.ranks() if rank_of(pid) == hung)
            os.kill(pid, signal.SIGSTOP)
            stopped, before = time.monotonic(), run.last_step()
            finding.count("hangs")
            says(run, agents, f"rank {hung} did not respond", seconds=2.0 * timeout)
            finding.most("slowest message, s", time.monotonic() - stopped)
            takes_steps(run, agents, after=before)
            finding.most("slowest recovery, s", time.monotonic() - stopped)
            finding.expect(not Path(f"/proc/{pid}").exists(), "the rank that hung is still there")
            finding.expect(not any(agents.wait(600)), f"run {number} did not finish")
        finding.expect(run.outcome() == reference.outcome(), f"run {number} differs from the run that was not hit")
    return finding


def report_hung_rank(launcher: Launcher, folder: Path, *, timeout: int) -> Finding:
    """R8 without a restart: one rank is stopped, the other reports which one and ends."""
    finding = Finding("R8 a rank hangs")
    run = Run(folder / "hung", (*SETTINGS, f"parallel.timeout={timeout}"))
    victims = launcher.start_ranks(run, ranks=2)
    try:
        until(lambda: run.last_step() > 20, victims[0])
        victims[1].send(signal.SIGSTOP)
        finding.expect(victims[0].wait() != 0, "the other rank finished")
        finding.expect("rank 1 did not respond" in victims[0].words(), f"not reported: {victims[0].words()[-500:]}")
    finally:
        for victim in victims:
            victim.send(signal.SIGKILL)
            victim.wait()
    return finding


def never_hit(path: Path, settings: tuple[str, ...], *, processes: int = 2) -> Run:
    """Return an uninterrupted run."""
    run = Run(path, settings)
    with torchrun(run, ranks=processes) as agents:
        assert agents.wait(600) == [0], run.log.read_text(encoding="utf-8")
    return run


def takes_steps(run: Run, agents: Agents, *, after: int) -> None:
    """Wait until the run has logged a step after this one."""
    wait_for(lambda: run.last_step() > after, agents)


def says(run: Run, agents: Agents, words: str, *, seconds: float = 600.0) -> None:
    """Wait until the output of the run has this text."""
    wait_for(lambda: words in run.log.read_text(encoding="utf-8", errors="replace"), agents, seconds=seconds)


def wait_for(condition: Callable[[], object], agents: Agents, *, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or (agents.ended() and not condition()):
            raise SlowError(f"not within {seconds} s, or torchrun ended")
        time.sleep(0.02)


def rank_of(pid: int) -> int | None:
    """Return the rank of a process."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return int(entry[5:])
    return None
