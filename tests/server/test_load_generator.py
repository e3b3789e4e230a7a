"""The load generator of the soak tests: what it counts as answered, lost, late and unreachable."""

import asyncio
import socket
import time

import pytest
from soak import load
from soak.load import LATE, LOST, UNREACHABLE, LoadResult, Pool, closed_loop, due_times, message, open_loop

LIVE = message("/v2/health/live")
TIMEOUT = 300.0


@pytest.mark.parametrize("even", [True, False])
def test_open_loop_measures_from_the_due_time(even: bool) -> None:
    times = due_times(50, seconds=0.2, even=even)

    async def send() -> LoadResult:
        listener = await asyncio.get_running_loop().create_server(load.TrivialServer, "127.0.0.1", 0)
        observed = await open_loop(listener.sockets[0].getsockname()[1], [LIVE], times, timeout=TIMEOUT)
        listener.close()
        return observed

    observed = load.run(send())
    assert observed.statuses() == {200: len(times)}
    assert sorted(answer.number for answer in observed.responses) == list(range(len(times)))
    assert all(answer.due <= answer.sent <= answer.done for answer in observed.responses)


def test_lost_late_and_unreachable_are_distinguished() -> None:
    """A server that closes, one that is silent, and none."""

    class Closing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    async def send(protocol: type[asyncio.Protocol], *, timeout: float) -> dict[int, int]:
        listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        observed = await open_loop(listener.sockets[0].getsockname()[1], [LIVE], [0.0], timeout=timeout)
        listener.close()
        return observed.statuses()

    async def send_all() -> tuple[dict[int, int], dict[int, int]]:
        return await send(Closing, timeout=TIMEOUT), await send(asyncio.Protocol, timeout=0.2)

    assert load.run(send_all()) == ({LOST: 1}, {LATE: 1})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert load.run(open_loop(port, [LIVE], [0.0])).statuses() == {UNREACHABLE: 1}


@pytest.mark.parametrize(("reads", "expected"), [(False, ({200: 2}, 1)), (True, ({LOST: 1, 200: 1}, 0))])
def test_request_is_lost_if_read_and_resent_if_not(reads: bool, expected: tuple[dict[int, int], int]) -> None:
    """A server that closes a kept-alive connection just before or after reading the second request on it."""

    class Closing(load.TrivialServer):
        responses = 0

        def data_received(self, data: bytes) -> None:
            if not self.responses:
                super().data_received(data)
                self.responses = 1
            if not reads or data == second:
                self.transport.close()

    first, second = message("/first"), message("/second")

    async def send() -> LoadResult:
        listener = await asyncio.get_running_loop().create_server(Closing, "127.0.0.1", 0)
        pool = Pool(listener.sockets[0].getsockname()[1])

        def send_second(answer: load.LoadResponse, _: bytes) -> None:
            if answer.number == 0:
                pool.begin(time.perf_counter(), second, 1)

        pool.on_result = send_second
        pool.begin(time.perf_counter(), first, 0)
        observed = await pool.close(timeout=TIMEOUT)
        listener.close()
        return observed

    observed = load.run(send())
    assert (observed.statuses(), observed.again) == expected


def test_closed_loop_ends_after_its_time() -> None:
    async def send() -> tuple[LoadResult, float]:
        listener = await asyncio.get_running_loop().create_server(load.TrivialServer, "127.0.0.1", 0)
        start = time.monotonic()
        observed = await closed_loop(listener.sockets[0].getsockname()[1], [LIVE], clients=3, seconds=0.2)
        listener.close()
        return observed, time.monotonic() - start

    observed, seconds = load.run(send())
    assert list(observed.statuses()) == [200]
    assert seconds >= 0.19  # timers may fire a little early
