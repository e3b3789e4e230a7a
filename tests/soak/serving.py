"""A size goes in; a server is loaded, overloaded, held up, hit and replaced, and what was promised and seen comes out.

Every function here is one promise of docs/reliability.md, "Serving under load". Loads are bounded in count and time,
and their random arrivals are seeded. What is about speed holds for a machine that does nothing else.
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
from soak.load import Pool, Seen, closed_loop, due_times, message, open_loop
from soak.server import CLIENTS, Server, Subject, at, bare, bare_at, peak, serving, tiny, usual, warm
from soak.sizes import COUNTS, Size
from soak.slow import KINDS, Slow, crowd
from soak.weather import Weather

LIVE = message("/v2/health/live")


def cost_of_http(folder: Path, size: Size) -> Finding:
    """S1: what a request costs over bare inference: CPU time on a tiny model, throughput on a usual one."""
    counts, finding = COUNTS[size], Finding("S1 the cost of HTTP")
    small, large = tiny(folder), usual(folder)
    spent, alone, requests = {"front": 0.0, "worker": 0.0}, {"images": 0.0, "cpu": 0.0}, counts.front // counts.rounds
    with one_thread(), serving(small.model, "engine.threads=1", log=folder / "tiny.log") as server:
        load.run(closed_loop(server.port, small.requests(), clients=CLIENTS, count=300, seconds=60))
        for _ in range(counts.rounds):
            before, batches = server.cpu(), batches_so_far(server)
            seen = load.run(closed_loop(server.port, small.requests(), clients=CLIENTS, count=requests, seconds=300))
            finding.expect(seen.statuses() == {200: requests}, f"not all were answered: {seen.statuses()}")
            for name, after in server.cpu().items():
                spent[name] += 1e3 * (after - before[name]) / counts.front
            batch = mean_batch(server, batches)
            without = bare(small, batch=batch, seconds=min(counts.peak, 5.0), loops=2)
            alone = {name: value + without[name] for name, value in alone.items()}
    inference = 1e3 * alone["cpu"] / alone["images"]
    over = spent["front"] + spent["worker"] - inference
    finding.figures |= {
        "requests": counts.front,
        "batch": batch,
        "front, CPU ms": round(spent["front"], 3),
        "worker, CPU ms": round(spent["worker"], 3),
        "bare, CPU ms": round(inference, 3),
        "over, CPU ms": round(over, 3),
        "generator, CPU ms": round(1e3 * seen.cpu / requests, 3),
    }
    finding.expect(over <= 1.0, f"a request costs {over:.2f} ms of CPU over bare inference, more than 1 ms")
    with serving(large.model, log=folder / "usual.log") as server:
        warm(server, large)
        batches = batches_so_far(server)
        rate = load.run(closed_loop(server.port, large.requests(), clients=CLIENTS, seconds=counts.peak)).rate()
        batch = mean_batch(server, batches)
    ways = [bare(large, batch=batch, seconds=counts.peak)]
    with one_thread():  # where others want the cores too, threads that wait for each other are the slower way
        ways.append(bare(large, batch=batch, seconds=counts.peak))
    loop = max(alone["images"] / alone["seconds"] for alone in ways)
    finding.figures |= {
        "model": large.name,
        "served, images/s": round(rate, 1),
        "bare, images/s": round(loop, 1),
        "of bare": f"{rate / loop:.0%}",
    }
    finding.expect(rate >= 0.85 * loop, f"{rate:.1f} images a second are less than 85 % of {loop:.1f} without a server")
    return finding


TURN = 20.0
"""Seconds of requests between two measurements of the capacity.

Some machines are faster now and slower then. The capacity is the mean of all that was measured so far: after a fast
moment comes a slower one, for which 70 % of the fast one may be too much.
"""


@dataclass
class Arrivals:
    """Requests that come one way: how the server answered them, and in turns with it threads without one."""

    name: str
    seconds: float
    served: Seen = field(default_factory=Seen)
    alone: Seen = field(default_factory=Seen)


def seventy_percent(folder: Path, size: Size) -> Finding:
    """S2: at 70 % of capacity there are no errors, p99 stays near p50, and memory and descriptors do not grow.

    Where a host has other work, the capacity is there at some moments and not at others: calm ones are told apart.
    """
    counts, finding = COUNTS[size], Finding("S2 70 % of capacity")
    subject, capacities = usual(folder), list[float]()
    ways = (Arrivals("even", counts.even), Arrivals("random", counts.steady))
    with Weather() as weather, serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        held, moment = dict[str, float](), min(counts.peak, TURN / 4)
        for _ in range(counts.rounds):
            capacities.append(peak(server, subject, seconds=moment))
        for number, way in itertools.product(range(math.ceil(counts.even / TURN)), ways):
            capacities.append(peak(server, subject, seconds=moment))
            rate, seconds, even = 0.7 * statistics.mean(capacities), min(way.seconds, TURN), way.name == "even"
            served = partial(at, server, subject, rate=rate, seconds=seconds, even=even, seed=number)
            alone = partial(bare_at, subject, rate=rate, seconds=seconds, even=even, seed=number)
            both = [(way.served, served), (way.alone, alone)]
            for seen, ask in both if number % 2 == 0 else reversed(both):
                seen.answers += ask().answers
            held = held or server.holds_at_rest()
        grown = {name: value - held[name] for name, value in server.holds_at_rest().items()}
    mean = statistics.mean(capacities)
    finding.figures["capacity, images/s"] = f"{mean:.1f} ({min(capacities):.1f} to {max(capacities):.1f})"
    for way in ways:
        judge(finding, way, weather)
    finding.figures |= {
        "random: ratio of a perfect server": round(perfect_ratio(os.cpu_count() or 1, share=0.7), 2),
        "grown, MB": round(grown["MB"], 1),
        "grown, descriptors": int(grown["descriptors"]),
    }
    finding.expect(grown["MB"] <= 64.0, f"memory grew by {grown['MB']:.0f} MB")
    finding.expect(grown["descriptors"] <= 16, f"{grown['descriptors']:.0f} descriptors more than before")
    return finding


def judge(finding: Finding, way: Arrivals, weather: Weather) -> None:
    """What came of requests at 70 % of the capacity; beside it, at those moments at which there was that capacity."""
    name, served = way.name, way.served
    calm, calm_alone = (
        Seen([answer for answer in seen.answers if weather.was_calm(answer.due)]) for seen in (served, way.alone)
    )
    share, refused = len(calm.answers) / len(served.answers), len(calm.having(429))
    finding.figures |= {
        f"{name}: requests": len(served.answers),
        f"{name}: p50, ms": round(1e3 * served.latency(0.5), 1),
        f"{name}: p99, ms": round(1e3 * served.latency(0.99), 1),
        f"{name}: refused": len(served.having(429)),
        f"{name}: ratio": round(ratio(served), 2),
        f"{name}: ratio without a server": round(ratio(way.alone), 2),
        f"{name}: calm": f"{share:.0%}",
        f"{name}: calm, p50, ms": round(1e3 * calm.latency(0.5), 1),
        f"{name}: calm, p99, ms": round(1e3 * calm.latency(0.99), 1),
        f"{name}: calm, refused": refused,
        f"{name}: calm, ratio": round(ratio(calm), 2),
        f"{name}: calm, ratio without a server": round(ratio(calm_alone), 2),
    }
    finding.expect(served.others(200, 429) == 0, f"{name} arrivals: errors: {served.statuses()}")
    # Chance piles up more than any line holds once in some ten thousand random arrivals, and never in even ones.
    allowed, all_refused = 0 if name == "even" else 1 + len(served.answers) // 10_000, len(served.having(429))
    finding.expect(all_refused <= allowed, f"{name} arrivals: {all_refused} of {len(served.answers)} refused")
    if name == "even":
        finding.expect(ratio(served) <= 3.0, f"p99 is {ratio(served):.1f} times p50 though requests come evenly")


def ratio(seen: Seen) -> float:
    return seen.latency(0.99) / seen.latency(0.5)


def perfect_ratio(cores: int, *, share: float, count: int = 200_000) -> float:
    """p99 over p50 of a server that costs nothing: each core takes the same time for every request, first come first.

    Requests come at random, at a share of the capacity. What is left is chance, which no server can do anything about.

    >>> [round(perfect_ratio(cores, share=0.7), 1) for cores in (1, 2, 4)]
    [4.3, 3.5, 2.5]
    """
    chance, now, free, waits = random.Random(1), 0.0, [0.0] * cores, list[float]()
    for _ in range(count):
        now += chance.expovariate(share * cores)
        done = max(heapq.heappop(free), now) + 1.0
        heapq.heappush(free, done)
        waits.append(done - now)
    waits.sort()
    return waits[int(0.99 * count)] / waits[count // 2]


@dataclass(frozen=True)
class Steady:
    """What a server does when it has not too much to do: the scale for what it does under overload."""

    capacity: float
    p99: float
    """At 70 % of the capacity, in seconds."""


def overload(folder: Path, size: Size) -> Finding:
    """S3: what is too much is refused at once, the rest answered as fast as ever, and that ends with the load.

    A machine that others use is now faster, now slower: the capacity is measured before and after each overload.
    """
    counts, finding = COUNTS[size], Finding("S3 overload")
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        capacity = peak(server, subject, seconds=2 * counts.peak)
        for times in (2, 5, 10):
            calm = at(server, subject, rate=0.7 * capacity, seconds=min(counts.steady, 60.0))
            before = server.cpu()["front"]
            seen, alive, after = load.run(overloaded(server, subject, capacity, times=times, seconds=counts.overload))
            asked = sum(len(each.answers) for each in (seen, alive, after))
            finding.figures[f"{times}×: front, CPU ms"] = round(1e3 * (server.cpu()["front"] - before) / asked, 3)
            capacity, then = peak(server, subject, seconds=2 * counts.peak), capacity
            usually = Steady(capacity=(then + capacity) / 2, p99=calm.latency(0.99))
            judge_overload(finding, f"{times}×", seen, alive, after, usually=usually, seconds=counts.overload)
    return finding


async def overloaded(
    server: Server, subject: Subject, capacity: float, *, times: float, seconds: float, recovery: float = 9.0
) -> tuple[Seen, Seen, Seen]:
    """The answers under overload, those of liveness meanwhile, and those at half of the capacity right after it."""
    requests = subject.requests()
    whole = due_times(10, seconds=seconds + recovery, even=True)
    watching = asyncio.ensure_future(open_loop(Pool(server.port, keep=False), [LIVE], whole))
    seen = await open_loop(server.port, requests, due_times(times * capacity, seconds=seconds))
    after = await open_loop(
        server.port, requests, due_times(0.5 * capacity, seconds=recovery, even=True), patience=15.0
    )
    return seen, await watching, after


def judge_overload(
    finding: Finding, name: str, seen: Seen, alive: Seen, after: Seen, *, usually: Steady, seconds: float
) -> None:
    began = min(answer.due for answer in seen.answers)
    good = sum(answer.done <= began + seconds for answer in seen.having(200)) / seconds
    refused = seen.having(429)
    p99, slowest = seen.latency(0.99), seen.latency(0.99, status=429)
    ended = began + seconds
    disturbed = [answer.due - ended for answer in after.answers if answer.status != 200]
    normal = max(disturbed, default=0.0)
    late = [answer for answer in after.answers if answer.due - ended > 5.0]
    finding.figures |= {
        f"{name}: capacity, images/s": round(usually.capacity, 1),
        f"{name}: p99 at 70 %, ms": round(1e3 * usually.p99, 1),
        f"{name}: goodput": f"{good / usually.capacity:.0%}",
        f"{name}: accepted p99, ms": round(1e3 * p99, 1),
        f"{name}: refused": len(refused),
        f"{name}: refused p99, ms": round(1e3 * slowest, 1),
        f"{name}: live p99, ms": round(1e3 * alive.latency(0.99), 1),
        f"{name}: normal after, s": round(normal, 1),
        f"{name}: generator late p99, ms": round(1e3 * seen.lateness(), 1),
    }
    # Clients are elsewhere; these take their part of the server's own cores, and the more the more they ask.
    generator = seen.cpu / seen.seconds / (os.cpu_count() or 1)
    possible = (1.0 - generator) * usually.capacity
    finding.figures[f"{name}: generator's share of the cores"] = f"{generator:.1%}"
    finding.expect(good >= 0.9 * possible, f"{name}: goodput {good:.1f}/s is less than 90 % of {possible:.1f}")
    finding.expect(
        p99 <= 2.0 * usually.p99, f"{name}: accepted p99 {1e3 * p99:.0f} ms, S2's is {1e3 * usually.p99:.0f} ms"
    )
    finding.expect(seen.others(200, 429) == 0, f"{name}: other answers: {seen.statuses()}")
    finding.expect(all(answer.retry_after >= 1 for answer in refused), f"{name}: a 429 without Retry-After")
    finding.expect(not refused or slowest <= 0.05, f"{name}: refusals took {1e3 * slowest:.0f} ms (p99)")
    finding.expect(refused, f"{name}: nothing was refused")
    finding.expect(alive.others(200) == 0, f"{name}: liveness: {alive.statuses()}")
    finding.expect(normal <= 5.0, f"{name}: still refusing {normal:.1f} s after the overload: {after.statuses()}")
    calm = Seen(late).latency(0.99)
    finding.expect(calm <= 2.0 * usually.p99, f"{name}: p99 {1e3 * calm:.0f} ms 5 s after the overload")


def slow_clients(folder: Path, size: Size) -> Finding:
    """S4: slow connections are all closed within 15 s, and other clients hardly notice them."""
    counts, finding = COUNTS[size], Finding("S4 slow connections")
    subject = usual(folder)
    with serving(subject.model, log=folder / "server.log") as server:
        warm(server, subject)
        rate = 0.5 * peak(server, subject, seconds=counts.peak)
        held, without, beside_them, everyone = server.holds_at_rest(), Seen(), Seen(), list[Slow]()
        for _ in range(counts.rounds):
            seen, _ = load.run(beside(server, subject, rate=rate, seconds=counts.beside, slow=0))
            without.answers += seen.answers
            seen, slow = load.run(beside(server, subject, rate=rate, seconds=counts.beside, slow=counts.slow))
            beside_them.answers += seen.answers
            everyone += slow
        after = server.holds_at_rest()
    finding.figures |= {"slow connections": len(everyone)}
    for kind in KINDS:
        longest = max(each.seconds for each in everyone if each.kind == kind)
        finding.figures[f"{kind}: longest, s"] = round(longest, 1)
        open_ = sum(math.isinf(each.closed) for each in everyone if each.kind == kind)
        finding.expect(longest <= 15.0, f"{kind}: {open_} still open, the longest for {longest:.1f} s")
    ratio = beside_them.latency(0.99) / without.latency(0.99)
    finding.figures |= {
        "others' p99 without, ms": round(1e3 * without.latency(0.99), 1),
        "others' p99 beside, ms": round(1e3 * beside_them.latency(0.99), 1),
        "ratio": round(ratio, 2),
        "grown, MB": round(after["MB"] - held["MB"], 1),
        "grown, descriptors": int(after["descriptors"] - held["descriptors"]),
    }
    finding.expect(without.others(200) == 0, f"others without slow ones: {without.statuses()}")
    finding.expect(beside_them.others(200) == 0, f"others beside slow ones: {beside_them.statuses()}")
    finding.expect(ratio <= 1.5, f"others' p99 is {ratio:.2f} times what it is without slow connections")
    finding.expect(after["descriptors"] - held["descriptors"] <= 16, "descriptors were left behind")
    return finding


async def beside(
    server: Server, subject: Subject, *, rate: float, seconds: float, slow: int
) -> tuple[Seen, list[Slow]]:
    """The answers of honest clients, and the slow connections that were there meanwhile."""
    honest = asyncio.ensure_future(open_loop(server.port, subject.requests(), due_times(rate, seconds=seconds)))
    if not slow:
        return await honest, []
    large = message("/openapi.json")
    everyone = await crowd(server.port, count=slow, seconds=20.0, large=large, server_side=server.connections)
    return await honest, everyone


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Processes started meanwhile compute on one thread: threads that wait for each other burn CPU time too."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def batches_so_far(server: Server) -> tuple[float, float]:
    """How many images went through the models, and in how many batches."""
    figures = server.figures()
    return tuple(  # type: ignore[return-value]
        sum(value for name, value in figures.items() if name.partition("{")[0].endswith(f"batch_images{end}"))
        for end in ("_sum", "_count")
    )


def mean_batch(server: Server, before: tuple[float, float]) -> int:
    images, batches = (now - then for now, then in zip(batches_so_far(server), before, strict=True))
    return max(1, round(images / batches)) if batches else 1
