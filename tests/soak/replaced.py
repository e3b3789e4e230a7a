"""A size goes in; workers and servers are hit under load and replaced, and what was promised and seen comes out."""

import asyncio
import functools
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak import load
from soak.faults import Finding
from soak.load import LATE, LOST, UNREACHABLE, Pool, Seen, due_times, message, open_loop
from soak.server import Server, Subject, peak, serving, start, tiny, usual, warm
from soak.server import end as end_server
from soak.sizes import COUNTS, Size

LIVE, READY = message("/v2/health/live"), message("/v2/health/ready")


def hit_worker(folder: Path, size: Size) -> Finding:
    """S8: the worker is killed or stopped; ready says so within 2 s, a new one answers within 10 s, live stays 200."""
    counts, finding = (
        COUNTS[size],
        Finding("S8 the worker dies or hangs", {"slowest false, s": 0.0, "slowest heal, s": 0.0}),
    )
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        rate = 0.3 * peak(server, subject, seconds=min(counts.peak, 5.0))
        for number in range(counts.faults):
            fault = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
            seen = load.run(one_fault(server, subject, fault, rate=rate, seconds=20.0))
            judge_fault(finding, fault.name, seen)
    finding.expect(finding.figures["slowest false, s"] <= 2.0, "ready took more than 2 s to turn false")
    finding.expect(finding.figures["slowest heal, s"] <= 10.0, "healing took more than 10 s")
    return finding


@dataclass(frozen=True)
class Fault:
    """What was seen around one fault."""

    hit: float
    before: int
    after: int
    ready: Seen
    live: Seen
    asked: Seen


async def one_fault(server: Server, subject: Subject, fault: signal.Signals, *, rate: float, seconds: float) -> Fault:
    """Hit the worker after a second, and watch."""
    often = due_times(20, seconds=seconds, even=True)
    watching = [
        asyncio.ensure_future(open_loop(Pool(server.port, keep=False), [probe], often)) for probe in (READY, LIVE)
    ]
    asking = asyncio.ensure_future(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds)))
    worker = server.worker().pid
    await asyncio.sleep(1.0)
    hit = time.perf_counter()
    os.kill(worker, fault)
    ready, live, asked = [await each for each in (*watching, asking)]
    return Fault(hit, worker, server.worker().pid, ready, live, asked)


def judge_fault(finding: Finding, name: str, seen: Fault) -> None:
    finding.count(name)
    by_time = sorted((answer for answer in seen.ready.answers if answer.done > seen.hit), key=lambda each: each.done)
    gone = [answer.done - seen.hit for answer in by_time if answer.status != 200]
    first, last = (gone[0], gone[-1]) if gone else (0.0, 0.0)
    healed = min((answer.done - seen.hit for answer in by_time if answer.done - seen.hit > last), default=math.inf)
    good = [answer.done - seen.hit for answer in seen.asked.having(200) if answer.sent - seen.hit > last]
    finding.expect(seen.before != seen.after, f"{name}: the worker is the same process as before")
    finding.expect(gone or good, f"{name}: ready never turned false, and nothing was answered")
    finding.most("slowest false, s", first)
    finding.most("slowest heal, s", max(healed, min(good, default=math.inf)))
    finding.expect(seen.live.others(200) == 0, f"{name}: liveness: {seen.live.statuses()}")
    finding.expect(seen.ready.others(200, 503) == 0, f"{name}: readiness: {seen.ready.statuses()}")
    finding.expect(seen.asked.others(200, 429, 503, 504) == 0, f"{name}: requests: {seen.asked.statuses()}")
    told = all(answer.retry_after >= 1 for answer in seen.asked.having(503))
    finding.expect(told, f"{name}: a 503 without Retry-After")
    for status, count in seen.asked.statuses().items():
        finding.count(f"answers {status}", count)


def stopped_under_load(folder: Path, size: Size) -> Finding:
    """S9: SIGTERM under load: what was accepted is answered, and the process ends with exit code 0."""
    counts, finding = COUNTS[size], Finding("S9 SIGTERM under load", {"stops": 0, "lost": 0, "slowest end, s": 0.0})
    subjects = (usual(folder), tiny(folder))  # one whose batches take long, one with many requests a second
    for number in range(counts.stops):
        subject = subjects[number % 2]
        with serving(subject.model, log=folder / f"server-{number}.log") as server:
            warm(server, subject)
            kept, fresh, ended, code = load.run(stop_in_the_middle(server, subject, seconds=3.0 + 0.37 * (number % 7)))
        finding.count("stops")
        finding.expect(code == 0, f"stop {number}: exit code {code}")
        finding.most("slowest end, s", ended)
        for name, seen in (("kept-alive", kept), ("new", fresh)):
            judge_stop(finding, f"stop {number}, {name} connections", seen)
    return finding


def judge_stop(finding: Finding, name: str, seen: Seen) -> None:
    lost = seen.statuses().get(LOST, 0) + seen.statuses().get(LATE, 0)
    finding.count("lost", lost)
    finding.count("answered", len(seen.having(200)))
    finding.count("sent again", seen.again)
    finding.count("not connected", len(seen.having(UNREACHABLE)))
    finding.expect(lost == 0, f"{name}: {lost} lost: {seen.statuses()}")
    finding.expect(seen.others(200, 429, 503, UNREACHABLE, LOST, LATE) == 0, f"{name}: {seen.statuses()}")


async def stop_in_the_middle(server: Server, subject: Subject, *, seconds: float) -> tuple[Seen, Seen, float, int]:
    """Load on kept-alive and on new connections, SIGTERM after so many seconds, and the load goes on until it ended."""
    requests, loop = subject.requests(), asyncio.get_running_loop()
    stopping = asyncio.Event()
    kept = asyncio.ensure_future(closed_until(Pool(server.port, most=8), requests, stopping, clients=8))
    fresh = asyncio.ensure_future(closed_until(Pool(server.port, most=8, keep=False), requests, stopping, clients=4))
    await asyncio.sleep(seconds)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = await loop.run_in_executor(None, functools.partial(server.process.wait, 60))
    ended = time.monotonic() - began
    stopping.set()
    return await kept, await fresh, ended, code


async def closed_until(pool: Pool, requests: list[bytes], stopping: asyncio.Event, *, clients: int) -> Seen:
    """A closed loop whose clients each stop when they can no longer connect."""
    number = 0

    def again(answer: load.Answer, _: bytes) -> None:
        nonlocal number
        if answer.status not in (UNREACHABLE, LATE) and not stopping.is_set():
            number += 1
            pool.begin(time.perf_counter(), requests[number % len(requests)], number)

    pool.answered = again
    for _ in range(clients):
        number += 1
        pool.begin(time.perf_counter(), requests[number % len(requests)], number)
    await stopping.wait()
    return await pool.close(patience=10.0)


def rolling_restarts(folder: Path, size: Size) -> Finding:
    """S9: one generation after another behind a balancer, which sends what comes to the new one once it is ready."""
    finding = Finding("S9 rolling restarts under load, a port each", {"restarts": 0})
    return roll(finding, folder, generations=COUNTS[size].generations, listener=None)


def shared_restarts(folder: Path, size: Size) -> Finding:
    """S9: one generation after another on one socket, as systemd hands it down: clients see one server all the time."""
    finding = Finding("S9 rolling restarts under load, one socket", {"restarts": 0})
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        return roll(finding, folder, generations=COUNTS[size].generations, listener=listener)


def roll(finding: Finding, folder: Path, *, generations: int, listener: socket.socket | None) -> Finding:
    subject = tiny(folder)  # hundreds of requests a second meet the moment of a change
    first = start(subject.model, log=folder / "generation-0.log", listener=listener)
    alive = [first]
    try:
        finding.expect(first.until(first.is_ready, seconds=120, every=0.1) < 120, "the first generation is not ready")
        rate = 0.3 * peak(first, subject, seconds=5.0)

        def another(generation: int) -> Server:
            alive.append(start(subject.model, log=folder / f"generation-{generation}.log", listener=listener))
            return alive[-1]

        everything = load.run(restarts(finding, first, another, subject, rate=rate, generations=generations))
    finally:
        for server in alive:
            end_server(server)
    for name, seen in everything.items():
        for status, count in seen.statuses().items():
            finding.count(f"{name}: {status}", count)
        finding.count("sent again", seen.again)
        finding.expect(seen.others(200, 429) == 0, f"{name} connections: not all were answered: {seen.statuses()}")
    return finding


async def restarts(
    finding: Finding,
    old: Server,
    another: Callable[[int], Server],
    subject: Subject,
    *,
    rate: float,
    generations: int,
) -> dict[str, Seen]:
    """Replace the server so often while requests come, half of them each on a new connection."""
    loop, requests = asyncio.get_running_loop(), subject.requests()
    pools = {"kept-alive": Pool(old.port), "new": Pool(old.port, keep=False)}
    stopping = asyncio.Event()

    async def ask() -> None:
        began = time.perf_counter()
        for number, moment in enumerate(due_times(rate, seconds=600.0)):
            due = began + moment
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if stopping.is_set():
                return
            pools["new" if number % 2 else "kept-alive"].begin(due, requests[number % len(requests)], number)

    asking = asyncio.ensure_future(ask())
    try:
        for generation in range(1, generations + 1):
            new = await loop.run_in_executor(None, another, generation)
            ready = functools.partial(new.until, new.is_ready, seconds=120, every=0.1)
            finding.expect(await loop.run_in_executor(None, ready) < 120, f"generation {generation} is not ready")
            for pool in pools.values():
                pool.port = new.port
            old.process.send_signal(signal.SIGTERM)
            code = await loop.run_in_executor(None, functools.partial(old.process.wait, 60))
            finding.expect(code == 0, f"generation {generation - 1}: exit code {code}")
            finding.count("restarts")
            old = new
    finally:
        stopping.set()
        await asking
    return {name: await pool.close(patience=15.0) for name, pool in pools.items()}
