"""The one who looks after the worker, without one: what it makes of nonsense, and how often it tries again."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import torch

from vitkit.engine.compiled import PATIENCE
from vitkit.serve.batching import Answered, Line
from vitkit.serve.config import LimitsConfig, ModelConfig, ServeConfig
from vitkit.serve.metrics import Metrics
from vitkit.serve.models import Served, warm_up
from vitkit.serve.supervisor import Link, Supervisor
from vitkit.serve.wire import frame


class Pipe(asyncio.WriteTransport):
    """What a link writes to."""

    aborted = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


class Office:
    """A supervisor whose worker is whoever calls `link.data_received`, with one request that waits for it."""

    def __init__(self) -> None:
        metrics, self.said = Metrics(), list[str]()
        self.line, self.pipe = Line(LimitsConfig(), metrics), Pipe()
        models = [ModelConfig(name="pets", place="pets")]
        self.supervisor = Supervisor(models, ServeConfig(), line=self.line, metrics=metrics, say=self.said.append)
        self.link = self.supervisor.link = Link(self.supervisor.heard, self.supervisor.lost, self.supervisor.garbled)
        self.link.transport = self.pipe
        self.line.send = self.link.send
        self.asked = asyncio.create_task(self.line.ask({"do": "predict"}, b"", cost=1, gone=lambda: False))


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def told() -> None:
        await asyncio.wait_for(story(), 20.0)

    asyncio.run(told())


@pytest.mark.parametrize(
    "said",
    [
        b"\x05\0\0\0\0\0\0\0\0\0\0\0hello",
        b"\x01\0\0\0\0\0\0\0\0\0\0\0\xff",
        frame({"id": 1}),
        frame({"id": 1, "status": "good", "headers": {}}),
        frame({"id": 1, "status": 99, "headers": {}}),
        frame({"id": 1, "status": 1e400, "headers": {}}),
        frame({"id": 1, "status": 200, "headers": []}),
        frame({"id": 1, "status": 200, "headers": {"a": "b\r\nSet-Cookie: c"}}),
        frame({"id": [], "status": 200, "headers": {}}),
        frame({"pong": 1}),
        frame({"pong": 1, "busy": "long", "looking": 0.0, "decoding": 0.0}),
        frame({"pong": 1, "busy": 0.0, "looking": 0.0, "decoding": [1.0]}),
        frame({"pong": 1, "busy": float("nan"), "looking": 0.0, "decoding": 0.0}),
        frame({"batch": 1}),
        frame({"batch": 1, "seconds": float("nan"), "attention": False}),
        frame({"batch": 1, "seconds": float("inf"), "attention": False}),
        frame({"batch": 1, "seconds": 1e300, "attention": False}),
        frame({"batch": float("inf"), "seconds": 1.0, "attention": False}),
        frame({"batch": -1, "seconds": 1.0, "attention": False}),
        frame({"ready": [{"name": "pets"}], "seconds": "long"}),
        frame({"ready": [], "seconds": 1.0}),
        frame({"ready": [{"name": "cats"}], "seconds": 1.0}),
        b"\x03\0\0\0\0\0\0\0\0\0\0\0[1]",
    ],
)
def test_a_worker_that_speaks_nonsense_is_replaced_and_nobody_gets_to_hear_it(said: bytes) -> None:
    async def story() -> None:
        office = Office()
        office.supervisor.loaded = True
        await asyncio.sleep(0)
        office.link.data_received(said)
        await asyncio.sleep(0)
        assert office.pipe.aborted
        assert not office.asked.done()
        assert office.line.held == 1
        office.line.expire(up=office.supervisor.alive)
        await office.supervisor.check()
        assert office.line.retry_after() == 1
        office.asked.cancel()

    run(story)


def test_a_worker_that_never_comes_to_the_end_of_an_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr("vitkit.serve.supervisor.LARGEST_ANSWER", 1000)
        office = Office()
        await asyncio.sleep(0)
        office.link.data_received(frame({"id": 1, "status": 200, "headers": {}}, 1 << 60))
        for _ in range(10):
            assert not office.pipe.aborted
            office.link.data_received(bytes(100))
        assert office.pipe.aborted
        office.asked.cancel()

    run(story)


def test_an_answer_that_makes_sense_is_passed_on() -> None:
    async def story() -> None:
        office = Office()
        await asyncio.sleep(0)
        whole = frame({"id": 1, "status": 200, "headers": {"content-type": "application/json"}}, 2) + b"{}"
        for number in range(len(whole)):
            office.link.data_received(whole[number : number + 1])
        assert await office.asked == Answered(200, {"content-type": "application/json"}, b"{}")
        assert not office.pipe.aborted

    run(story)


def test_after_thousands_of_failures_it_still_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        office, started = Office(), []
        office.supervisor.link, office.supervisor.tries = None, 5000

        async def start() -> None:
            started.append(1)

        monkeypatch.setattr(office.supervisor, "start", start)
        await office.supervisor.check()
        assert started
        office.asked.cancel()

    run(story)


def test_without_descriptors_for_a_worker_it_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the models have answered: clients may have taken all that there are, and will give them back."""

    async def story() -> None:
        office = Office()
        office.supervisor.link = None
        office.supervisor.first_ready.set()

        def none_left() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("socket.socketpair", none_left)
        await office.supervisor.start()
        assert office.supervisor.failed is None
        assert "Too many open files" in office.said[-1]
        office.asked.cancel()

    run(story)


ABOUT = {"model": "ViT", "classes": 3, "precision": "fp32", "engine": "torch"}
READY = [ABOUT | {"name": "pets", "remark": None, "agreement": None, "agreed": None}]


def test_a_large_model_that_was_not_asked_for_long_may_take_its_time() -> None:
    """A small one beside it answers in no time, again and again; the limit is that of the large one all the same."""

    async def story() -> None:
        office = Office()
        await asyncio.sleep(0)
        office.link.data_received(frame({"ready": READY, "seconds": 3.0, "takes": 10, "needs": 6}))
        assert (office.line.takes, office.line.needs) == (10, 6)
        for _ in range(1000):
            office.link.data_received(frame({"batch": 1, "seconds": 0.001, "taken": 0.0005, "attention": False}))
        assert office.line.seconds_an_image < 0.00051  # two hands were at it
        office.link.data_received(frame({"pong": 1, "busy": 40.0, "looking": 0.0, "decoding": 0.0}))
        assert office.supervisor.alive
        office.link.data_received(frame({"pong": 1, "busy": 61.0, "looking": 0.0, "decoding": 0.0}))
        assert not office.supervisor.alive
        office.asked.cancel()

    run(story)


def test_attention_has_the_patience_that_attention_needs_and_predictions_theirs() -> None:
    async def story() -> None:
        office = Office()
        await asyncio.sleep(0)
        office.link.data_received(frame({"ready": READY, "seconds": 0.01, "takes": 10, "needs": 6}))
        for busy, looking, alive in ((0.0, 9.0, True), (2.5, 9.0, False), (0.0, 11.0, False), (1.9, 0.0, True)):
            office.link.data_received(frame({"pong": 1, "busy": busy, "looking": looking, "decoding": 0.0}))
            assert office.supervisor.alive == alive, (busy, looking)
        office.asked.cancel()

    run(story)


def test_what_a_dead_worker_had_is_tried_again_though_no_thread_can_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        office = Office()
        await asyncio.sleep(0)

        def no_thread(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", no_thread)
        office.supervisor.process = SimpleNamespace(kill=lambda: None, wait=lambda: 0)  # type: ignore[assignment]
        office.supervisor.first_ready.set()
        office.link.connection_lost(None)
        assert office.line.send is None
        assert not office.line.at_work
        assert [ticket.retried for ticket in office.line.waiting] == [True]
        office.asked.cancel()

    run(story)


class Counting(Served):
    """A model that only counts what it is asked."""

    sides = (4, 4)
    preprocessing = SimpleNamespace(channels=3)

    def __init__(self, device: str) -> None:
        self.predictor, self.apart = SimpleNamespace(device=torch.device(device)), None
        self.counts: list[int] = []

    def answer(self, images: torch.Tensor, *, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts.append(len(images))
        return images, images


@pytest.mark.parametrize(("device", "before"), [("cpu", 0), ("cuda", PATIENCE)])
def test_on_a_gpu_a_model_is_asked_until_it_has_compiled(device: str, before: int) -> None:
    """An engine there compiles after some batches, for a minute: clients, and who looks after it, should not wait."""
    served = Counting(device)
    warm_up(served, batch=8)
    assert len(served.counts) > before
    assert len(set(served.counts[before:])) >= 2  # a size for one, and one for all others
    assert served.counts[-2:] == [8, 8]
