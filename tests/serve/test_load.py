"""The promises of serving at small counts, on a real server: what it does under load and faults, not how fast.

`python tests/soak/soak.py --medium --only S` measures; see docs/reliability.md.
"""

import asyncio
import math
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak import load
from soak.load import LATE, LOST, UNREACHABLE, Pool, Seen, closed_loop, due_times, message, open_loop
from soak.replaced import closed_until
from soak.server import Server, Subject, drawn, serving, start, tiny
from soak.server import end as end_server
from soak.slow import KINDS, UNREAD, Slow, crowd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what became of a connection is asked of Linux")

LIVE = message("/v2/health/live")
LIMITS = ("limits.queue=2", "limits.batch=1", "limits.receive=1.0", "limits.keep_alive=1.0", "engine.threads=1")
SOON = 60.0
"""Seconds for what takes a second or two on a machine with nothing else to do."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return tiny(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def server(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes two images at a time and is patient for a second."""
    with serving(subject.model, *LIMITS, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


@pytest.mark.parametrize("even", [True, False])
def test_a_load_sends_every_request_and_counts_latency_from_when_it_was_due(server: Server, even: bool) -> None:
    times = due_times(50, seconds=1.0, even=even)
    seen = load.run(open_loop(server.port, [LIVE], times))
    assert seen.statuses() == {200: len(times)}
    assert sorted(answer.number for answer in seen.answers) == list(range(len(times)))
    assert all(answer.due <= answer.sent <= answer.done for answer in seen.answers)


def test_two_clients_at_a_time_are_always_answered_and_leave_nothing_open(server: Server, subject: Subject) -> None:
    before = server.connections()
    seen = load.run(closed_loop(server.port, subject.requests(), clients=2, count=100, seconds=SOON))
    assert seen.statuses() == {200: 100}
    assert server.until(lambda: server.connections() <= before, seconds=SOON) < SOON


def test_what_is_too_much_is_refused_with_a_time_to_come_back_while_liveness_answers(
    server: Server, tmp_path: Path
) -> None:
    """Sixty large pictures at once, where two have room."""
    requests = [message("/v1/predict", path.read_bytes()) for path in drawn(tmp_path, side=1600, count=4)]

    async def both() -> tuple[Seen, Seen]:
        probes = Pool(server.port, keep=False)
        alive = asyncio.ensure_future(open_loop(probes, [LIVE], due_times(20, seconds=1.0, even=True)))
        return await open_loop(server.port, requests, [0.0] * 60), await alive

    seen, alive = load.run(both())
    refused = seen.having(429)
    assert seen.others(200, 429) == 0, seen.statuses()
    assert len(refused) > 10
    assert len(seen.having(200)) >= 2
    assert all(answer.retry_after >= 1 for answer in refused)
    assert alive.others(200) == 0, alive.statuses()
    assert load.run(closed_loop(server.port, requests, clients=1, count=3, seconds=SOON)).statuses() == {200: 3}


def test_slow_connections_are_closed_by_the_deadline_of_receipt(server: Server, subject: Subject) -> None:
    async def both() -> tuple[list[Slow], Seen]:
        honest = asyncio.ensure_future(
            open_loop(server.port, subject.requests(), due_times(5, seconds=2.0, even=True), patience=SOON)
        )
        everyone = await crowd(
            server.port,
            count=5 * len(KINDS),
            seconds=SOON,
            large=message("/openapi.json"),
            server_side=server.connections,
            every=0.2,
        )
        return everyone, await honest

    everyone, honest = load.run(both())
    still_open = {slow.kind for slow in everyone if math.isinf(slow.closed)}
    assert not still_open
    assert all(slow.said[9:12] in (b"", b"400", b"408") for slow in everyone if slow.kind not in UNREAD)
    assert honest.others(200) == 0, honest.statuses()


def test_who_asks_for_more_than_it_reads_is_let_go_before_all_of_it_is_computed(server: Server) -> None:
    """One request after another is sent at once and no answer read: a cheap way to keep a server from everyone else."""

    def answered() -> float:
        return sum(value for name, value in server.figures().items() if 'total{route="/openapi.json"' in name)

    before, hasty = answered(), 20
    everyone = load.run(
        crowd(
            server.port,
            count=hasty,
            seconds=SOON,
            large=message("/openapi.json"),
            server_side=server.connections,
            kinds=("hasty",),
            every=0.2,
        )
    )
    assert not any(math.isinf(slow.closed) for slow in everyone)
    assert answered() - before < hasty * UNREAD["hasty"] / 3


def test_clients_that_go_away_leave_nobody_in_line(server: Server, subject: Subject) -> None:
    """Every second one resets its connection, every third has not sent all."""
    whole = subject.requests()[0]
    for number in range(60):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(whole if number % 3 else whole[:-200])
    assert server.until(lambda: server.figures()["vitkit_queue_images"] == 0.0, seconds=SOON) < SOON
    seen = load.run(closed_loop(server.port, [whole], clients=2, count=20, seconds=SOON))
    assert seen.statuses() == {200: 20}


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_dies_or_hangs_makes_ready_false_and_is_replaced(
    server: Server, subject: Subject, fault: signal.Signals
) -> None:
    worker = server.worker().pid
    os.kill(worker, fault)
    lives = set()

    def is_unready() -> bool:
        lives.add(server.get("/v2/health/live", seconds=SOON)[0])
        return not server.is_ready()

    def is_healed() -> bool:
        lives.add(server.get("/v2/health/live", seconds=SOON)[0])
        return server.is_ready()

    assert server.until(is_unready, seconds=SOON) < SOON
    assert server.until(is_healed, seconds=SOON, every=0.1) < SOON
    assert lives == {200}
    assert server.worker().pid != worker
    seen = load.run(closed_loop(server.port, subject.requests(), clients=1, count=5, seconds=SOON))
    assert seen.statuses() == {200: 5}


def test_no_request_is_lost_when_the_server_is_asked_to_stop(subject: Subject, tmp_path: Path) -> None:
    """Load on kept-alive and on new connections; from the signal on it may refuse, but not forget."""

    async def stopped(server: Server) -> list[Seen]:
        stopping = asyncio.Event()
        pools = [Pool(server.port, most=4), Pool(server.port, most=4, keep=False)]
        asking = [asyncio.ensure_future(closed_until(pool, subject.requests(), stopping, clients=4)) for pool in pools]
        while min(len(pool.seen.having(200)) for pool in pools) < 20:
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, SOON)
        stopping.set()
        return [await each for each in asking]

    server = start(subject.model, log=tmp_path / "server.log")
    try:
        assert server.until(server.is_ready, seconds=SOON, every=0.1) < SOON
        everything = load.run(asyncio.wait_for(stopped(server), SOON))
    finally:
        end_server(server)
    assert server.process.returncode == 0
    for seen in everything:
        assert seen.others(200, 429, 503, UNREACHABLE) == 0, seen.statuses()


def test_a_load_tells_apart_what_was_lost_late_or_never_connected() -> None:
    """The measure itself: a server that closes, one that is silent, and none."""

    class Closes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    async def met(protocol: type[asyncio.Protocol]) -> dict[int, int]:
        listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        seen = await open_loop(port, [LIVE], [0.0], patience=0.2)
        listener.close()
        return seen.statuses()

    async def all_three() -> tuple[dict[int, int], dict[int, int]]:
        return await met(Closes), await met(asyncio.Protocol)

    assert load.run(all_three()) == ({LOST: 1}, {LATE: 1})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert load.run(open_loop(port, [LIVE], [0.0])).statuses() == {UNREACHABLE: 1}


@pytest.mark.parametrize(("reads", "expected"), [(False, ({200: 2}, 1)), (True, ({LOST: 1, 200: 1}, 0))])
def test_a_request_counts_as_lost_where_it_was_read_and_is_sent_again_where_it_was_not(
    reads: bool, expected: tuple[dict[int, int], int]
) -> None:
    """A server that closes a kept-alive connection just before, or just after, it has read the second request on it."""

    class Closes(load.Trivial):
        answers = 0

        def data_received(self, data: bytes) -> None:
            if not self.answers:
                super().data_received(data)
                self.answers = 1
            if not reads or data == second:
                self.transport.close()

    first, second = message("/first"), message("/second")

    async def asked() -> Seen:
        listener = await asyncio.get_running_loop().create_server(Closes, "127.0.0.1", 0)
        pool = Pool(listener.sockets[0].getsockname()[1])

        def then(answer: load.Answer, _: bytes) -> None:
            if answer.number == 0:
                pool.begin(time.perf_counter(), second, 1)

        pool.answered = then
        pool.begin(time.perf_counter(), first, 0)
        seen = await pool.close(patience=SOON)
        listener.close()
        return seen

    seen = load.run(asked())
    assert (seen.statuses(), seen.again) == expected


def test_a_closed_loop_ends_with_its_time() -> None:
    """A server that answers at once and for ever."""

    async def asked() -> tuple[Seen, float]:
        listener = await asyncio.get_running_loop().create_server(load.Trivial, "127.0.0.1", 0)
        start = time.monotonic()
        seen = await closed_loop(listener.sockets[0].getsockname()[1], [LIVE], clients=3, seconds=0.2)
        listener.close()
        return seen, time.monotonic() - start

    seen, seconds = load.run(asked())
    assert list(seen.statuses()) == [200]
    assert 0.19 <= seconds < SOON  # timers may fire a little early
