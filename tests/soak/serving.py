"""Guarantees S1 to S4 of docs/reliability.md: cost of HTTP, steady load, overload and slow clients.

Loads are bounded in count and time, and random arrivals are seeded. Times are meaningful on an otherwise idle machine
only.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
import os
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from soak import load
from soak.faults import Finding
from soak.load import LoadResult, Pool, closed_loop, due_times, message, open_loop
from soak.machine_noise import NoiseMonitor
from soak.server import (
    CLIENTS,
    Server,
    Subject,
    at,
    bare,
    peak,
    run_arrivals_without_server,
    serving,
    tiny,
    usual,
    warm,
)
from soak.sizes import COUNTS, Size
from soak.slow import KINDS, SlowConnection, open_slow_connections

from vitkit.server.config import LimitsConfig

LIVE = message("/v2/health/live")


def measure_http_cost(folder: Path, size: Size) -> Finding:
    """S1: compare with inference without a server: CPU time of a tiny model, throughput of a usual one."""
    counts, result = COUNTS[size], Finding("S1 the cost of HTTP")
    small, large = tiny(folder), usual(folder)
    spent, alone, requests = {"front": 0.0, "worker": 0.0}, {"images": 0.0, "cpu": 0.0}, counts.front // counts.rounds
    with one_thread(), serving(small.model, "engine.threads=1", log=folder / "tiny.log") as server:
        load.run(closed_loop(server.port, small.requests(), clients=CLIENTS, count=300, seconds=60))
        for _ in range(counts.rounds):
            before, batches = server.cpu(), batches_so_far(server)
            outcome = load.run(closed_loop(server.port, small.requests(), clients=CLIENTS, count=requests, seconds=300))
            result.expect(outcome.statuses() == {200: requests}, f"not all were answered: {outcome.statuses()}")
            for name, after in server.cpu().items():
                spent[name] += 1e3 * (after - before[name]) / counts.front
            batch = mean_batch(server, batches)
            without = bare(small, batch=batch, seconds=min(counts.peak, 5.0), loops=2)
            alone = {name: value + without[name] for name, value in alone.items()}
    inference = 1e3 * alone["cpu"] / alone["images"]
    over = spent["front"] + spent["worker"] - inference
    result.figures |= {
        "requests": counts.front,
        "batch": batch,
        "front, CPU ms": round(spent["front"], 3),
        "worker, CPU ms": round(spent["worker"], 3),
        "bare, CPU ms": round(inference, 3),
        "over, CPU ms": round(over, 3),
        "generator, CPU ms": round(1e3 * outcome.cpu / requests, 3),
    }
    result.expect(over <= 1.0, f"a request costs {over:.2f} ms of CPU over bare inference, more than 1 ms")
    with serving(large.model, log=folder / "usual.log") as server:
        warm(server, large)
        batches = batches_so_far(server)
        rate = load.run(closed_loop(server.port, large.requests(), clients=CLIENTS, seconds=counts.peak)).rate()
        batch = mean_batch(server, batches)
    measured_loops = [bare(large, batch=batch, seconds=counts.peak)]
    with one_thread():  # on a busy machine, threads that wait for each other are slower
        measured_loops.append(bare(large, batch=batch, seconds=counts.peak))
    loop = max(alone["images"] / alone["seconds"] for alone in measured_loops)
    result.figures |= {
        "model": large.name,
        "served, images/s": round(rate, 1),
        "bare, images/s": round(loop, 1),
        "of bare": f"{rate / loop:.0%}",
    }
    result.expect(rate >= 0.85 * loop, f"{rate:.1f} images a second are less than 85 % of {loop:.1f} without a server")
    return result


TURN = 20.0
"""Seconds of requests between two measurements of the capacity.

The speed of some machines varies. The capacity is the mean of all measurements so far, because 70 % of a fast moment
may be too much for a slow one.
"""


@dataclass
class Arrivals:
    """Results of the server and, alternating with it, of threads without a server, for one kind of arrivals."""

    name: str
    seconds: float
    served: LoadResult = field(default_factory=LoadResult)
    alone: LoadResult = field(default_factory=LoadResult)


def run_at_70_percent(folder: Path, size: Size) -> Finding:
    """S2: at 70 % of the capacity there are no errors, and p99 is at most 1.5 times that of threads without a server.

    Moments at which the machine was quiet are also reported separately.
    """
    counts, result = COUNTS[size], Finding("S2 70 % of capacity")
    subject, capacities = usual(folder), list[float]()
    kinds_of_arrivals = (Arrivals("even", counts.even), Arrivals("random", counts.steady))
    with NoiseMonitor() as monitor, serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        resources_before, moment = dict[str, float](), min(counts.peak, TURN / 4)
        for _ in range(counts.rounds):
            capacities.append(peak(server, subject, seconds=moment))
        for number, arrivals in itertools.product(range(math.ceil(counts.even / TURN)), kinds_of_arrivals):
            capacities.append(peak(server, subject, seconds=moment))
            rate, seconds, even = (
                0.7 * statistics.mean(capacities),
                min(arrivals.seconds, TURN),
                arrivals.name == "even",
            )
            served = partial(at, server, subject, rate=rate, seconds=seconds, even=even, seed=number)
            alone = partial(run_arrivals_without_server, subject, rate=rate, seconds=seconds, even=even, seed=number)
            both = [(arrivals.served, served), (arrivals.alone, alone)]
            for outcome, measure in both if number % 2 == 0 else reversed(both):
                outcome.responses += measure().responses
            resources_before = resources_before or server.resources_at_rest()
        grown = {name: value - resources_before[name] for name, value in server.resources_at_rest().items()}
    mean = statistics.mean(capacities)
    result.figures["capacity, images/s"] = f"{mean:.1f} ({min(capacities):.1f} to {max(capacities):.1f})"
    for arrivals in kinds_of_arrivals:
        check_steady_load(result, arrivals, monitor)
    result.figures |= {
        "random: ratio of a perfect server": round(perfect_ratio(os.cpu_count() or 1, utilization=0.7), 2),
        "grown, MB": round(grown["MB"], 1),
        "grown, descriptors": int(grown["descriptors"]),
    }
    result.expect(grown["MB"] <= 64.0, f"memory grew by {grown['MB']:.0f} MB")
    result.expect(grown["descriptors"] <= 16, f"{grown['descriptors']:.0f} descriptors more than before")
    return result


def check_steady_load(result: Finding, arrivals: Arrivals, monitor: NoiseMonitor) -> None:
    """Report results at 70 % of the capacity, overall and at quiet moments, and check the guarantee."""
    name, served = arrivals.name, arrivals.served
    quiet, quiet_alone = (
        LoadResult([response for response in outcome.responses if monitor.was_quiet(response.due)])
        for outcome in (served, arrivals.alone)
    )
    quiet_fraction, rejected = len(quiet.responses) / len(served.responses), len(quiet.with_status(429))
    result.figures |= {
        f"{name}: requests": len(served.responses),
        f"{name}: p50, ms": round(1e3 * served.latency(0.5), 1),
        f"{name}: p99, ms": round(1e3 * served.latency(0.99), 1),
        f"{name}: rejected": len(served.with_status(429)),
        f"{name}: ratio": round(ratio(served), 2),
        f"{name}: ratio without a server": round(ratio(arrivals.alone), 2),
        f"{name}: quiet": f"{quiet_fraction:.0%}",
        f"{name}: quiet, p50, ms": round(1e3 * quiet.latency(0.5), 1),
        f"{name}: quiet, p99, ms": round(1e3 * quiet.latency(0.99), 1),
        f"{name}: quiet, rejected": rejected,
        f"{name}: quiet, ratio": round(ratio(quiet), 2),
        f"{name}: quiet, ratio without a server": round(ratio(quiet_alone), 2),
    }
    result.expect(served.count_other(200, 429) == 0, f"{name} arrivals: errors: {served.statuses()}")
    # Once in some ten thousand random arrivals, more requests coincide than any queue holds; never with even arrivals.
    allowed, all_rejected = 0 if name == "even" else 1 + len(served.responses) // 10_000, len(served.with_status(429))
    result.expect(all_rejected <= allowed, f"{name} arrivals: {all_rejected} of {len(served.responses)} rejected")
    if name == "even":
        slowdown = served.latency(0.99) / arrivals.alone.latency(0.99)
        result.figures["even: p99 / p99 without a server"] = round(slowdown, 2)
        result.expect(slowdown <= 1.5, f"p99 is {slowdown:.2f} times that of the same threads without a server")


def ratio(outcome: LoadResult) -> float:
    return outcome.latency(0.99) / outcome.latency(0.5)


def perfect_ratio(cores: int, *, utilization: float, count: int = 200_000) -> float:
    """Simulate p99 / p50 of an ideal server: constant service time, one request per core, in order of arrival.

    Arrivals are random with a fraction of the capacity, so this ratio is due to chance alone.

    >>> [round(perfect_ratio(cores, utilization=0.7), 1) for cores in (1, 2, 4)]
    [4.3, 3.5, 2.5]
    """
    rng, now, free, waits = random.Random(1), 0.0, [0.0] * cores, list[float]()
    for _ in range(count):
        now += rng.expovariate(utilization * cores)
        done = max(heapq.heappop(free), now) + 1.0
        heapq.heappush(free, done)
        waits.append(done - now)
    waits.sort()
    return waits[int(0.99 * count)] / waits[count // 2]


@dataclass(frozen=True)
class Steady:
    """Capacity and latency without overload, for comparison."""

    capacity: float
    p99: float
    """At 70 % of the capacity, in seconds."""


def overload(folder: Path, size: Size) -> Finding:
    """S3: goodput stays near the peak, accepted requests wait at most twice the target delay, rejections are fast.

    The capacity is measured before and after each overload, because the speed of some machines varies.
    """
    counts, result = COUNTS[size], Finding("S3 overload")
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        capacity = peak(server, subject, seconds=2 * counts.peak)
        for times in (2, 5, 10):
            steady = at(server, subject, rate=0.7 * capacity, seconds=min(counts.steady, 60.0))
            before = server.cpu()["front"]
            outcome, alive, after = load.run(
                overloaded(server, subject, capacity, times=times, seconds=counts.overload)
            )
            request_count = sum(len(each.responses) for each in (outcome, alive, after))
            result.figures[f"{times}×: front, CPU ms"] = round(
                1e3 * (server.cpu()["front"] - before) / request_count, 3
            )
            capacity, then = peak(server, subject, seconds=2 * counts.peak), capacity
            baseline = Steady(capacity=(then + capacity) / 2, p99=steady.latency(0.99))
            check_overload(result, f"{times}×", outcome, alive, after, baseline=baseline, seconds=counts.overload)
    return result


async def overloaded(
    server: Server, subject: Subject, capacity: float, *, times: float, seconds: float, recovery: float = 9.0
) -> tuple[LoadResult, LoadResult, LoadResult]:
    """Return the results under overload, of liveness meanwhile, and at half of the capacity right after it."""
    requests = subject.requests()
    whole = due_times(10, seconds=seconds + recovery, even=True)
    watching = asyncio.ensure_future(open_loop(Pool(server.port, keep=False), [LIVE], whole))
    outcome = await open_loop(server.port, requests, due_times(times * capacity, seconds=seconds))
    after = await open_loop(server.port, requests, due_times(0.5 * capacity, seconds=recovery, even=True), timeout=15.0)
    return outcome, await watching, after


def check_overload(
    result: Finding,
    name: str,
    outcome: LoadResult,
    alive: LoadResult,
    after: LoadResult,
    *,
    baseline: Steady,
    seconds: float,
) -> None:
    began = min(response.due for response in outcome.responses)
    good = sum(response.done <= began + seconds for response in outcome.with_status(200)) / seconds
    rejected = outcome.with_status(429)
    p99, slowest = outcome.latency(0.99), outcome.latency(0.99, status=429)
    ended = began + seconds
    disturbed = [response.due - ended for response in after.responses if response.status != 200]
    normal = max(disturbed, default=0.0)
    late = [response for response in after.responses if response.due - ended > 5.0]
    result.figures |= {
        f"{name}: capacity, images/s": round(baseline.capacity, 1),
        f"{name}: p99 at 70 %, ms": round(1e3 * baseline.p99, 1),
        f"{name}: goodput": f"{good / baseline.capacity:.0%}",
        f"{name}: accepted p99, ms": round(1e3 * p99, 1),
        f"{name}: rejected": len(rejected),
        f"{name}: rejected p99, ms": round(1e3 * slowest, 1),
        f"{name}: live p99, ms": round(1e3 * alive.latency(0.99), 1),
        f"{name}: normal after, s": round(normal, 1),
        f"{name}: generator late p99, ms": round(1e3 * outcome.send_delay(), 1),
    }
    # Real clients run on other machines; the generator takes a part of the server's cores.
    generator = outcome.cpu / outcome.seconds / (os.cpu_count() or 1)
    possible = (1.0 - generator) * baseline.capacity
    result.figures[f"{name}: generator's part of the cores"] = f"{generator:.1%}"
    result.expect(good >= 0.85 * possible, f"{name}: goodput {good:.1f}/s is less than 85 % of {possible:.1f}")
    longest = 2.0 * LimitsConfig().target_delay + baseline.p99
    result.expect(p99 <= longest, f"{name}: accepted p99 {1e3 * p99:.0f} ms, more than {1e3 * longest:.0f} ms")
    result.expect(outcome.count_other(200, 429) == 0, f"{name}: other responses: {outcome.statuses()}")
    result.expect(all(response.retry_after >= 1 for response in rejected), f"{name}: a 429 without Retry-After")
    result.expect(not rejected or slowest <= 0.05, f"{name}: rejections took {1e3 * slowest:.0f} ms (p99)")
    result.expect(rejected, f"{name}: nothing was rejected")
    result.expect(alive.count_other(200) == 0, f"{name}: liveness: {alive.statuses()}")
    result.expect(normal <= 5.0, f"{name}: still rejecting {normal:.1f} s after the overload: {after.statuses()}")
    late_p99 = LoadResult(late).latency(0.99)
    result.expect(late_p99 <= 2.0 * baseline.p99, f"{name}: p99 {1e3 * late_p99:.0f} ms 5 s after the overload")


def slow_clients(folder: Path, size: Size) -> Finding:
    """S4: slow connections are closed within 15 s, and p99 of other clients is at most 1.5 times as high."""
    counts, result = COUNTS[size], Finding("S4 slow connections")
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        rate = 0.5 * peak(server, subject, seconds=counts.peak)
        resources_before, without, with_slow, connections = (
            server.resources_at_rest(),
            LoadResult(),
            LoadResult(),
            list[SlowConnection](),
        )
        for _ in range(counts.rounds):
            outcome, _ = load.run(run_next_to_slow_clients(server, subject, rate=rate, seconds=counts.beside, slow=0))
            without.responses += outcome.responses
            outcome, slow = load.run(
                run_next_to_slow_clients(server, subject, rate=rate, seconds=counts.beside, slow=counts.slow)
            )
            with_slow.responses += outcome.responses
            connections += slow
        after = server.resources_at_rest()
    result.figures |= {"slow connections": len(connections)}
    for kind in KINDS:
        longest = max(each.seconds for each in connections if each.kind == kind)
        result.figures[f"{kind}: longest, s"] = round(longest, 1)
        open_ = sum(math.isinf(each.closed) for each in connections if each.kind == kind)
        result.expect(longest <= 15.0, f"{kind}: {open_} still open, the longest for {longest:.1f} s")
    ratio = with_slow.latency(0.99) / without.latency(0.99)
    result.figures |= {
        "other clients' p99 without, ms": round(1e3 * without.latency(0.99), 1),
        "other clients' p99 beside, ms": round(1e3 * with_slow.latency(0.99), 1),
        "ratio": round(ratio, 2),
        "grown, MB": round(after["MB"] - resources_before["MB"], 1),
        "grown, descriptors": int(after["descriptors"] - resources_before["descriptors"]),
    }
    result.expect(without.count_other(200) == 0, f"without slow connections: {without.statuses()}")
    result.expect(with_slow.count_other(200) == 0, f"with slow connections: {with_slow.statuses()}")
    result.expect(ratio <= 1.5, f"other clients' p99 is {ratio:.2f} times what it is without slow connections")
    result.expect(after["descriptors"] - resources_before["descriptors"] <= 16, "descriptors were left behind")
    return result


async def run_next_to_slow_clients(
    server: Server, subject: Subject, *, rate: float, seconds: float, slow: int
) -> tuple[LoadResult, list[SlowConnection]]:
    """Return the results of ordinary clients, and the slow connections that were open meanwhile."""
    ordinary = asyncio.ensure_future(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds)))
    if not slow:
        return await ordinary, []
    large = message("/openapi.json")
    connections = await open_slow_connections(
        server.port, count=slow, seconds=20.0, large=large, server_side=server.connections
    )
    return await ordinary, connections


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict processes started meanwhile to one thread: threads that wait for each other spend CPU time."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def batches_so_far(server: Server) -> tuple[float, float]:
    """Return the numbers of images and batches so far."""
    figures = server.figures()
    return tuple(  # type: ignore[return-value]
        sum(value for name, value in figures.items() if name.partition("{")[0].endswith(f"batch_images{end}"))
        for end in ("_sum", "_count")
    )


def mean_batch(server: Server, before: tuple[float, float]) -> int:
    images, batches = (now - then for now, then in zip(batches_so_far(server), before, strict=True))
    return max(1, round(images / batches)) if batches else 1
