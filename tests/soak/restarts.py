"""Guarantees S8 and S9: workers and servers that die, hang or are replaced under load."""

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
from soak.load import LATE, LOST, UNREACHABLE, LoadResult, Pool, due_times, message, open_loop
from soak.server import Server, Subject, peak, serving, start, tiny, usual, warm
from soak.server import end as end_server
from soak.sizes import COUNTS, Size

LIVE, READY = message("/v2/health/live"), message("/v2/health/ready")


def kill_worker(folder: Path, size: Size) -> Finding:
    """S8: kill or stop the worker; not ready within 2 s, ready again within 10 s, live all the time."""
    counts, result = (
        COUNTS[size],
        Finding("S8 the worker dies or hangs", {"slowest not ready, s": 0.0, "slowest recovery, s": 0.0}),
    )
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        rate = 0.3 * peak(server, subject, seconds=min(counts.peak, 5.0))
        for number in range(counts.faults):
            fault = (signal.SIGKILL, signal.SIGSTOP)[number % 2]
            outcome = load.run(one_fault(server, subject, fault, rate=rate, seconds=20.0))
            check_fault(result, fault.name, outcome)
    result.expect(result.figures["slowest not ready, s"] <= 2.0, "ready took more than 2 s to turn false")
    result.expect(result.figures["slowest recovery, s"] <= 10.0, "recovery took more than 10 s")
    return result


@dataclass(frozen=True)
class Fault:
    """Observations around one fault."""

    hit: float
    before: int
    after: int
    ready: LoadResult
    live: LoadResult
    predictions: LoadResult


async def one_fault(server: Server, subject: Subject, fault: signal.Signals, *, rate: float, seconds: float) -> Fault:
    """Kill or stop the worker after a second, and observe."""
    often = due_times(20, seconds=seconds, even=True)
    probing = [
        asyncio.ensure_future(open_loop(Pool(server.port, keep=False), [probe], often)) for probe in (READY, LIVE)
    ]
    predicting = asyncio.ensure_future(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds)))
    worker = server.worker().pid
    await asyncio.sleep(1.0)
    hit = time.perf_counter()
    os.kill(worker, fault)
    ready, live, predictions = [await each for each in (*probing, predicting)]
    return Fault(hit, worker, server.worker().pid, ready, live, predictions)


def check_fault(result: Finding, name: str, outcome: Fault) -> None:
    result.count(name)
    by_time = sorted(
        (response for response in outcome.ready.responses if response.done > outcome.hit), key=lambda each: each.done
    )
    not_ready = [response.done - outcome.hit for response in by_time if response.status != 200]
    first, last = (not_ready[0], not_ready[-1]) if not_ready else (0.0, 0.0)
    recovered = min(
        (response.done - outcome.hit for response in by_time if response.done - outcome.hit > last), default=math.inf
    )
    good = [
        response.done - outcome.hit
        for response in outcome.predictions.with_status(200)
        if response.sent - outcome.hit > last
    ]
    result.expect(outcome.before != outcome.after, f"{name}: the worker is the same process as before")
    result.expect(not_ready or good, f"{name}: ready never turned false, and nothing was answered")
    result.most("slowest not ready, s", first)
    result.most("slowest recovery, s", max(recovered, min(good, default=math.inf)))
    result.expect(outcome.live.count_other(200) == 0, f"{name}: liveness: {outcome.live.statuses()}")
    result.expect(outcome.ready.count_other(200, 503) == 0, f"{name}: readiness: {outcome.ready.statuses()}")
    result.expect(
        outcome.predictions.count_other(200, 429, 503, 504) == 0, f"{name}: requests: {outcome.predictions.statuses()}"
    )
    has_retry_after = all(response.retry_after >= 1 for response in outcome.predictions.with_status(503))
    result.expect(has_retry_after, f"{name}: a 503 without Retry-After")
    for status, count in outcome.predictions.statuses().items():
        result.count(f"responses {status}", count)


def stop_servers_under_load(folder: Path, size: Size) -> Finding:
    """S9: send SIGTERM under load; accepted requests are answered, and the exit code is 0."""
    counts, result = (
        COUNTS[size],
        Finding("S9 SIGTERM under load", {"stops": 0, "lost": 0, "slowest end, s": 0.0}),
    )
    subjects = (usual(folder), tiny(folder))  # one with long batches, one with many requests per second
    for number in range(counts.stops):
        subject = subjects[number % 2]
        with serving(subject.model, log=folder / f"server-{number}.log") as server:
            warm(server, subject)
            kept, fresh, ended, code = load.run(stop_under_load(server, subject, seconds=3.0 + 0.37 * (number % 7)))
        result.count("stops")
        result.expect(code == 0, f"stop {number}: exit code {code}")
        result.most("slowest end, s", ended)
        for name, outcome in (("kept-alive", kept), ("new", fresh)):
            check_stop(result, f"stop {number}, {name} connections", outcome)
    return result


def check_stop(result: Finding, name: str, outcome: LoadResult) -> None:
    lost = outcome.statuses().get(LOST, 0) + outcome.statuses().get(LATE, 0)
    result.count("lost", lost)
    result.count("answered", len(outcome.with_status(200)))
    result.count("sent again", outcome.again)
    result.count("not connected", len(outcome.with_status(UNREACHABLE)))
    result.expect(lost == 0, f"{name}: {lost} lost: {outcome.statuses()}")
    result.expect(outcome.count_other(200, 429, 503, UNREACHABLE, LOST, LATE) == 0, f"{name}: {outcome.statuses()}")


async def stop_under_load(
    server: Server, subject: Subject, *, seconds: float
) -> tuple[LoadResult, LoadResult, float, int]:
    """Send requests on kept-alive and on new connections, and SIGTERM after some seconds."""
    requests, loop = subject.requests(), asyncio.get_running_loop()
    stopping = asyncio.Event()
    kept = asyncio.ensure_future(closed_until(Pool(server.port, max_connections=8), requests, stopping, clients=8))
    fresh = asyncio.ensure_future(
        closed_until(Pool(server.port, max_connections=8, keep=False), requests, stopping, clients=4)
    )
    await asyncio.sleep(seconds)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = await loop.run_in_executor(None, functools.partial(server.process.wait, 60))
    ended = time.monotonic() - began
    stopping.set()
    return await kept, await fresh, ended, code


async def closed_until(pool: Pool, requests: list[bytes], stopping: asyncio.Event, *, clients: int) -> LoadResult:
    """Run a closed loop whose clients stop when they can no longer connect."""
    number = 0

    def again(response: load.LoadResponse, _: bytes) -> None:
        nonlocal number
        if response.status not in (UNREACHABLE, LATE) and not stopping.is_set():
            number += 1
            pool.begin(time.perf_counter(), requests[number % len(requests)], number)

    pool.on_result = again
    for _ in range(clients):
        number += 1
        pool.begin(time.perf_counter(), requests[number % len(requests)], number)
    await stopping.wait()
    return await pool.close(timeout=10.0)


def restart_rolling(folder: Path, size: Size) -> Finding:
    """S9: replace servers behind a load balancer, which switches to the new one when it is ready."""
    result = Finding("S9 rolling restarts under load, a port each", {"restarts": 0})
    return roll(result, folder, generations=COUNTS[size].generations, listener=None)


def restart_on_shared_socket(folder: Path, size: Size) -> Finding:
    """S9: replace servers on one socket, as systemd does; clients see one server all the time."""
    result = Finding("S9 rolling restarts under load, one socket", {"restarts": 0})
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        return roll(result, folder, generations=COUNTS[size].generations, listener=listener)


def roll(result: Finding, folder: Path, *, generations: int, listener: socket.socket | None) -> Finding:
    subject = tiny(folder)  # hundreds of requests per second, so that many meet the switch
    first = start(subject.model, log=folder / "generation-0.log", listener=listener)
    alive = [first]
    try:
        result.expect(first.until(first.is_ready, seconds=120, every=0.1) < 120, "the first generation is not ready")
        rate = 0.3 * peak(first, subject, seconds=5.0)

        def start_next(generation: int) -> Server:
            alive.append(start(subject.model, log=folder / f"generation-{generation}.log", listener=listener))
            return alive[-1]

        outcomes = load.run(restarts(result, first, start_next, subject, rate=rate, generations=generations))
    finally:
        for server in alive:
            end_server(server)
    for name, outcome in outcomes.items():
        for status, count in outcome.statuses().items():
            result.count(f"{name}: {status}", count)
        result.count("sent again", outcome.again)
        result.expect(
            outcome.count_other(200, 429) == 0, f"{name} connections: not all were answered: {outcome.statuses()}"
        )
    return result


async def restarts(
    result: Finding,
    old: Server,
    start_next: Callable[[int], Server],
    subject: Subject,
    *,
    rate: float,
    generations: int,
) -> dict[str, LoadResult]:
    """Replace the server several times under load, half of it on new connections."""
    loop, requests = asyncio.get_running_loop(), subject.requests()
    pools = {"kept-alive": Pool(old.port), "new": Pool(old.port, keep=False)}
    stopping = asyncio.Event()

    async def send_requests() -> None:
        began = time.perf_counter()
        for number, moment in enumerate(due_times(rate, seconds=600.0)):
            due = began + moment
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if stopping.is_set():
                return
            pools["new" if number % 2 else "kept-alive"].begin(due, requests[number % len(requests)], number)

    predicting = asyncio.ensure_future(send_requests())
    try:
        for generation in range(1, generations + 1):
            new = await loop.run_in_executor(None, start_next, generation)
            ready = functools.partial(new.until, new.is_ready, seconds=120, every=0.1)
            result.expect(await loop.run_in_executor(None, ready) < 120, f"generation {generation} is not ready")
            for pool in pools.values():
                pool.port = new.port
            old.process.send_signal(signal.SIGTERM)
            code = await loop.run_in_executor(None, functools.partial(old.process.wait, 60))
            result.expect(code == 0, f"generation {generation - 1}: exit code {code}")
            result.count("restarts")
            old = new
    finally:
        stopping.set()
        await predicting
    return {name: await pool.close(timeout=15.0) for name, pool in pools.items()}
