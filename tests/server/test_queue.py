"""The request queue with a fake clock and without a worker."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.front_end import FakeClock

from vitkit.server.config import LimitsConfig
from vitkit.server.ipc import FrameDecoder, HTTPError, WorkerResponse, encode_frame
from vitkit.server.metrics import Metrics
from vitkit.server.queue import QueueFull, RequestQueue

OK = WorkerResponse(200, {}, b"ok")


class Harness:
    """A queue, the requests that were submitted to it and those that a worker has received."""

    def __init__(self, *, in_flight: int = 4, seconds_per_image: float = 0.1, **limits: Any) -> None:
        self.clock = FakeClock()
        self.queue = RequestQueue(LimitsConfig(**limits), metrics=Metrics(), clock=self.clock)
        self.capacity = {
            "min_in_flight": in_flight, "max_in_flight": in_flight, "seconds_per_image": seconds_per_image,
        }  # fmt: skip
        self.sent: list[int] = []
        self.tasks: list[asyncio.Task[WorkerResponse]] = []
        self.attach()

    def attach(self) -> None:
        self.queue.attach_worker(lambda header, body: self.sent.append(header["id"]), **self.capacity)

    async def submit(
        self, task: str = "predict", *, images: int = 1, is_disconnected: Callable[[], bool] = lambda: False
    ) -> None:
        process = self.queue.process({"task": task}, b"", images=images, is_disconnected=is_disconnected)
        self.tasks.append(asyncio.create_task(process))
        await asyncio.sleep(0)

    def complete(self, *numbers: int) -> None:
        for number in numbers:
            self.queue.complete(number, OK)

    def complete_all(self) -> None:
        while self.queue.in_flight:
            self.complete(next(iter(self.queue.in_flight)))

    async def statuses(self) -> list[int]:
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [result.status for result in results if isinstance(result, WorkerResponse | HTTPError)]

    def rejected(self) -> list[int]:
        """Return the numbers of the rejected requests, from 1."""
        return [
            number
            for number, task in enumerate(self.tasks, 1)
            if task.done() and isinstance(task.exception(), QueueFull)
        ]


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


# Limit


@pytest.mark.parametrize(
    ("target_delay", "seconds_per_image", "limit"), [(0.5, 0.01, 50), (0.2, 0.01, 20), (0.5, 0.1, 5), (0.5, 1.0, 4)]
)
def test_limit_is_target_delay_over_service_time(target_delay: float, seconds_per_image: float, limit: int) -> None:
    """But never less than what keeps the worker busy."""
    harness = Harness(target_delay=target_delay, seconds_per_image=seconds_per_image, in_flight=4)
    assert harness.queue.limit == limit


def test_limit_follows_the_measured_rate() -> None:
    queue = Harness(seconds_per_image=0.1, in_flight=1).queue
    limits = [queue.limit]
    for _ in range(100):
        queue.record_completion(4, 0.04)
        limits.append(queue.limit)
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (5, 49)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9])
def test_limit_survives_nonsense_measurements(seconds: float) -> None:
    queue = Harness().queue
    for _ in range(200):
        queue.record_completion(1, seconds)
    assert 1 <= queue.limit <= 50_000
    queue.record_completion(0, 5.0)
    assert queue.retry_after == 1


@in_event_loop
async def test_queue_rejects_when_full() -> None:
    harness = Harness(seconds_per_image=0.7, target_delay=2.1, in_flight=2)
    for _ in range(4):
        await harness.submit()
    with pytest.raises(QueueFull) as error:
        await harness.tasks[-1]
    assert error.value.status == 429
    assert error.value.headers["retry-after"] == "3"  # 3 × 0.7 s, rounded up
    harness.complete_all()
    assert await harness.statuses() == [200, 200, 200, 429]


@in_event_loop
async def test_queue_accepts_again_as_soon_as_a_request_completes() -> None:
    """A burst leaves no state behind: ordinary clients after it are not rejected."""
    harness = Harness(target_delay=0.4, in_flight=2)
    for _ in range(10):
        await harness.submit()
    assert harness.rejected() == [5, 6, 7, 8, 9, 10]
    for _ in range(20):
        harness.complete(next(iter(harness.queue.in_flight)))
        await harness.submit()
    assert harness.rejected() == [5, 6, 7, 8, 9, 10]
    harness.complete_all()


@in_event_loop
async def test_large_request_does_not_block_small_ones() -> None:
    harness = Harness(target_delay=0.4, in_flight=2)
    await harness.submit()
    await harness.submit(images=4)
    for _ in range(3):
        await harness.submit()
    assert harness.rejected() == [2]
    harness.complete_all()


@in_event_loop
async def test_empty_queue_accepts_a_request_of_any_size() -> None:
    harness = Harness(target_delay=0.1, in_flight=1)
    await harness.submit(images=16)
    assert harness.sent == [1]
    await harness.submit()
    harness.complete(1)
    assert await harness.statuses() == [200, 429]


@in_event_loop
async def test_new_worker_brings_its_own_measurement() -> None:
    harness = Harness(seconds_per_image=0.1)
    for _ in range(50):
        harness.queue.record_completion(1, 5.0)
    assert harness.queue.limit == 4
    harness.queue.detach_worker()
    harness.attach()
    assert harness.queue.limit == 5


# Order


@in_event_loop
async def test_worker_gets_max_in_flight_at_most() -> None:
    harness = Harness(in_flight=4, target_delay=1.0)
    for _ in range(7):
        await harness.submit()
    assert harness.sent == [1, 2, 3, 4]
    harness.complete(2)
    assert harness.sent == [1, 2, 3, 4, 5]
    harness.complete(1, 3, 4, 5, 6, 7)
    assert await harness.statuses() == [200] * 7
    assert harness.queue.size == 0


@in_event_loop
async def test_predictions_go_before_attention() -> None:
    harness = Harness(in_flight=2)
    for task in ("predict", "attention", "predict", "predict"):
        await harness.submit(task)
    harness.complete(1, 3)
    assert harness.sent == [1, 3, 4]
    harness.complete(4)
    assert harness.sent == [1, 3, 4, 2]
    harness.complete(2)
    assert await harness.statuses() == [200] * 4


@in_event_loop
async def test_attention_goes_first_after_half_its_deadline() -> None:
    harness = Harness(in_flight=2, deadline=10.0)
    for task in ("predict", "attention", "predict", "predict"):
        await harness.submit(task)
    harness.clock.advance(6.0)
    harness.complete(1)
    assert 2 in harness.sent
    harness.complete(2, 3, 4)
    assert await harness.statuses() == [200] * 4


@in_event_loop
async def test_suspension_of_the_server_counts_for_no_deadline() -> None:
    harness = Harness(in_flight=1, deadline=10.0)
    for _ in range(2):
        await harness.submit()
    harness.clock.suspend(60.0)
    harness.queue.expire(worker_is_alive=True)
    harness.complete(1)
    assert harness.sent == [1, 2]
    harness.clock.advance(10.0)
    harness.queue.expire(worker_is_alive=True)
    assert await harness.statuses() == [200, 504]


@in_event_loop
async def test_attention_requests_run_one_at_a_time() -> None:
    harness = Harness(deadline=10.0)
    for task in ("attention", "attention"):
        await harness.submit(task)
    harness.clock.advance(6.0)
    for _ in range(2):
        await harness.submit()
    assert harness.sent == [1, 3, 4]
    harness.complete(1)
    assert harness.sent == [1, 3, 4, 2]
    harness.complete(2, 3, 4)
    assert await harness.statuses() == [200] * 4


@in_event_loop
async def test_steady_predictions_do_not_starve_attention() -> None:
    """The worker always has one prediction, and none waits."""
    harness = Harness(deadline=10.0)
    await harness.submit()
    await harness.submit("attention")
    for number in range(3, 9):
        await harness.submit()
        harness.complete(1 if number == 3 else number - 1)
    assert 2 not in harness.sent
    harness.clock.advance(6.0)
    await harness.submit()
    assert 2 in harness.sent
    harness.complete(2, 8, 9)
    assert await harness.statuses() == [200] * 9


# Failures


@in_event_loop
async def test_requests_of_a_dead_worker_are_retried_one_at_a_time() -> None:
    harness = Harness(in_flight=4)
    for _ in range(5):
        await harness.submit()
    harness.queue.detach_worker()
    harness.sent.clear()
    harness.attach()
    assert harness.sent == [1]
    for number in (1, 2, 3):
        harness.complete(number)
        assert harness.sent[-1] == number + 1
    harness.complete(4, 5)
    assert await harness.statuses() == [200] * 5


@in_event_loop
async def test_request_that_kills_two_workers_gets_422() -> None:
    harness = Harness()
    for _ in range(3):
        await harness.submit()
    harness.queue.detach_worker()
    harness.attach()
    harness.complete(1)  # the second request kills its workers
    harness.queue.detach_worker()
    harness.attach()
    harness.complete(3)
    assert await harness.statuses() == [200, 422, 200]
    assert harness.queue.size == 0


@pytest.mark.parametrize(("worker_is_alive", "status"), [(True, 504), (False, 503)])
def test_requests_expire_after_their_deadline(worker_is_alive: bool, status: int) -> None:
    async def run() -> None:
        harness = Harness(in_flight=2, deadline=5.0)
        for _ in range(3):
            await harness.submit()
        harness.queue.expire(worker_is_alive=worker_is_alive)
        assert not any(task.done() for task in harness.tasks)
        harness.clock.advance(6.0)
        harness.queue.expire(worker_is_alive=worker_is_alive)
        assert await harness.statuses() == [status] * 3
        assert harness.queue.size == 2  # the worker still has these
        harness.complete(1, 2)
        assert harness.queue.size == 0
        assert harness.sent == [1, 2]

    asyncio.run(run())


@in_event_loop
async def test_expired_requests_are_not_dispatched() -> None:
    harness = Harness(in_flight=1, deadline=5.0)
    for _ in range(2):
        await harness.submit()
    harness.clock.advance(6.0)
    harness.complete(1)
    assert harness.sent == [1]
    assert await harness.statuses() == [200, 504]
    assert harness.queue.size == 0


@in_event_loop
async def test_requests_of_disconnected_clients_are_not_dispatched() -> None:
    harness = Harness(in_flight=2)
    is_connected = True
    for _ in range(3):
        await harness.submit()
    await harness.submit(is_disconnected=lambda: not is_connected)
    is_connected = False
    harness.complete(1, 2, 3)
    assert harness.sent == [1, 2, 3]
    assert harness.queue.size == 0
    assert await harness.statuses() == [200, 200, 200, 408]


EVENTS = st.lists(
    st.sampled_from(["predict", "large", "attention", "complete", "detach", "attach", "advance"]), max_size=60
)


@given(EVENTS)
def test_every_request_gets_exactly_one_response(events: list[str]) -> None:
    async def run() -> None:
        harness = Harness(target_delay=0.8, deadline=10.0)
        queue = harness.queue
        for event in events:
            if event == "complete" and queue.in_flight:
                harness.complete(next(iter(queue.in_flight)))
            elif event == "detach":
                queue.detach_worker()
            elif event == "attach":
                harness.attach()
            elif event == "advance":
                harness.clock.advance(3.0)
                queue.expire(worker_is_alive=True)
            elif event != "complete":
                await harness.submit("predict" if event == "large" else event, images=5 if event == "large" else 1)
            pending = (*queue.predictions, *queue.attention, *queue.in_flight.values())
            assert queue.size == sum(request.images for request in pending) <= 8
        harness.attach()
        harness.complete_all()
        assert queue.size == queue.images_in_flight == 0
        statuses = await harness.statuses()
        assert len(statuses) == len(harness.tasks)
        assert set(statuses) <= {200, 422, 429, 504}

    asyncio.run(run())


MESSAGE = st.tuples(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.binary(max_size=20))


@given(st.lists(MESSAGE, max_size=3), st.data())
@settings(max_examples=40)
def test_messages_survive_any_fragmentation(messages: list[tuple[dict[str, int], bytes]], data: Any) -> None:
    stream = b"".join(encode_frame(header, len(body)) + body for header, body in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    decoder, decoded = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoded += list(decoder.feed(stream[start:end]))
    assert decoded == messages
