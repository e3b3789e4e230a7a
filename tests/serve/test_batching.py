"""The line, without a server: what waits, what goes to the worker, and what becomes of it when a worker dies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.serve.answers import Refusal
from vitkit.serve.batching import LONGEST_CUT, Answered, Line
from vitkit.serve.config import LimitsConfig
from vitkit.serve.metrics import Metrics
from vitkit.serve.wire import Frames, frame

GOOD = Answered(200, {}, b"good")


class Desk:
    """A line, the worker's side of it, and the requests that were made."""

    def __init__(self, **limits: Any) -> None:
        self.line = Line(LimitsConfig(**limits), Metrics())
        self.sent: list[int] = []
        self.asked: list[asyncio.Task[Answered]] = []
        self.open()

    def open(self) -> None:
        self.line.send = lambda head, body: self.sent.append(head["id"])
        self.line.pump()

    async def ask(self, do: str = "predict", *, cost: int = 1, gone: Callable[[], bool] = lambda: False) -> None:
        self.asked.append(asyncio.create_task(self.line.ask({"do": do}, b"", cost=cost, gone=gone)))
        await asyncio.sleep(0)

    def answer(self, number: int) -> None:
        self.line.answered(number, GOOD)

    def finish(self) -> None:
        while self.line.at_work:
            self.answer(next(iter(self.line.at_work)))

    def fail(self) -> None:
        self.line.worker_lost()

    def refused(self) -> list[int]:
        """Which of the requests so far had no room, from 1."""
        return [number for number, task in enumerate(self.asked, 1) if task.done() and task.exception() is not None]

    async def results(self) -> list[int]:
        found = await asyncio.gather(*self.asked, return_exceptions=True)
        return [one.status for one in found if isinstance(one, Answered | Refusal)]


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Let a story happen; one in which somebody waits for ever is a failure."""

    async def told() -> None:
        await asyncio.wait_for(story(), 20.0)

    asyncio.run(told())


def test_the_worker_has_two_batches_at_most_and_gets_more_as_it_answers() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=10)
        for _ in range(7):
            await desk.ask()
        assert desk.sent == [1, 2, 3, 4]
        desk.answer(2)
        assert desk.sent == [1, 2, 3, 4, 5]
        for number in (1, 3, 4, 5, 6, 7):
            desk.answer(number)
        assert await desk.results() == [200] * 7
        assert desk.line.held == 0

    run(story)


def test_beyond_the_queue_is_429_with_the_time_that_the_rest_will_take() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=3)
        desk.line.seconds_an_image = 0.7
        for _ in range(4):
            await desk.ask()
        with pytest.raises(Refusal) as refused:
            await desk.asked[-1]
        assert refused.value.status == 429
        assert refused.value.headers["retry-after"] == "3"  # 3 × 0.7 s, in whole seconds
        for task in desk.asked[:3]:
            task.cancel()

    run(story)


def test_a_full_line_is_cut_until_nobody_has_been_refused_for_a_while() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=4)
        desk.line.seconds_an_image = 10.0  # so that a while is 40 s
        for _ in range(5):
            await desk.ask()
        assert desk.refused() == [5]  # a rush may fill it, and no more
        desk.answer(1)
        desk.answer(2)
        await desk.ask()
        assert desk.refused() == [5, 6]  # two are in line, which is half of it
        desk.answer(3)
        await desk.ask()
        assert desk.refused() == [5, 6]
        desk.line.cut_until -= 60.0
        for _ in range(3):
            await desk.ask()
        assert desk.refused() == [5, 6, 10]
        desk.finish()

    run(story)


def test_who_only_looks_for_room_does_not_let_the_cut_last_and_who_is_refused_does() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=4)
        desk.line.seconds_an_image = 10.0
        for _ in range(5):
            await desk.ask()
        before = desk.line.cut_until = desk.line.cut_until - 5.0
        assert not desk.line.has_room()
        assert desk.line.cut_until == before
        await desk.ask()
        assert desk.line.cut_until > before
        desk.finish()

    run(story)


def test_clients_who_never_wait_do_not_keep_the_line_cut_for_ever() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=4)
        desk.line.seconds_an_image = 10.0
        for _ in range(5):
            await desk.ask()
        desk.answer(1)
        desk.answer(2)
        desk.line.cut_since -= LONGEST_CUT * 40.0
        await desk.ask()
        await desk.ask()
        assert desk.refused() == [5, 6]  # the first was one too many for half of the line, but not for all of it
        desk.finish()

    run(story)


def test_a_long_list_that_has_no_room_does_not_cut_the_line_for_others() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=4)
        desk.line.seconds_an_image = 10.0
        await desk.ask()
        await desk.ask(cost=4)
        for _ in range(3):
            await desk.ask()
        assert desk.refused() == [2]
        desk.finish()

    run(story)


def test_unless_it_is_said_the_line_is_three_times_what_the_worker_takes() -> None:
    line = Desk().line
    line.takes = 5
    assert line.most == 15


@pytest.mark.parametrize(("queue", "few"), [(100, 5), (20, 5), (6, 3), (1, 1)])
def test_a_crowd_has_as_much_of_a_line_as_keeps_the_worker_busy_and_half_of_it_at_most(queue: int, few: int) -> None:
    line = Desk(queue=queue).line
    line.needs, line.seconds_an_image = 5, 0.1
    assert (line.most, line.few) == (queue, few)


@pytest.mark.parametrize(("seconds", "few"), [(0.01, 10), (0.001, 50), (0.0, 50), (-1.0, 50)])
def test_where_images_take_no_time_a_crowd_has_as_many_as_last_for_a_moment(seconds: float, few: int) -> None:
    """Whatever the worker tells of its time, and it may tell nonsense."""
    line = Desk(queue=100).line
    line.needs, line.seconds_an_image = 5, seconds
    assert line.few == few


def test_an_empty_line_takes_a_request_of_any_size() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=3)
        await desk.ask(cost=16)
        assert desk.sent == [1]
        await desk.ask()
        desk.answer(1)
        assert await desk.results() == [200, 429]

    run(story)


def test_predictions_go_before_attention() -> None:
    async def story() -> None:
        desk = Desk(batch=1, queue=10)
        await desk.ask()
        await desk.ask("attention")
        await desk.ask()
        await desk.ask()
        for number in (1, 3):
            desk.answer(number)
        assert desk.sent == [1, 3, 4]
        desk.answer(4)
        assert desk.sent == [1, 3, 4, 2]
        desk.answer(2)
        assert await desk.results() == [200] * 4

    run(story)


def test_attention_that_waited_for_half_its_time_goes_first() -> None:
    async def story() -> None:
        desk = Desk(batch=1, queue=10)
        for do in ("predict", "attention", "predict", "predict"):
            await desk.ask(do)
        desk.line.looking[0].arrived -= 6
        desk.answer(1)
        assert 2 in desk.sent
        for number in (2, 3, 4):
            desk.answer(number)
        assert await desk.results() == [200] * 4

    run(story)


def test_while_one_looks_for_attention_others_do_not_keep_predictions_from_going() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=10)
        for _ in range(2):
            await desk.ask("attention")
        desk.line.looking[0].arrived -= 6  # it may go before predictions, but not beside another of its kind
        for _ in range(2):
            await desk.ask()
        assert desk.sent == [1, 3, 4]
        desk.answer(1)
        assert desk.sent == [1, 3, 4, 2]
        for number in (2, 3, 4):
            desk.answer(number)
        assert await desk.results() == [200] * 4

    run(story)


def test_when_a_worker_dies_its_requests_are_tried_again_one_at_a_time() -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=10)
        for _ in range(5):
            await desk.ask()
        desk.fail()
        desk.sent.clear()
        desk.open()
        assert desk.sent == [1]
        for number in (1, 2, 3):
            desk.answer(number)
            assert desk.sent[-1] == number + 1
        desk.answer(4)
        desk.answer(5)
        assert await desk.results() == [200] * 5

    run(story)


def test_the_request_that_kills_a_second_worker_is_answered_422_and_the_others_with_theirs() -> None:
    async def story() -> None:
        desk = Desk(batch=4, queue=10)
        for _ in range(3):
            await desk.ask()
        desk.fail()
        desk.open()
        desk.answer(1)  # the second one is the culprit
        desk.fail()
        desk.open()
        desk.answer(3)
        assert await desk.results() == [200, 422, 200]
        assert desk.line.held == 0

    run(story)


def test_what_waits_too_long_is_504_or_503_where_there_is_no_worker() -> None:
    async def story() -> None:
        for up, status in ((True, 504), (False, 503)):
            desk = Desk(batch=1, queue=10, deadline=5.0)
            for _ in range(3):
                await desk.ask()
            for ticket in (*desk.line.waiting, *desk.line.at_work.values()):
                ticket.deadline -= 6
            desk.line.expire(up=up)
            assert await desk.results() == [status] * 3
            assert desk.line.held == 2  # the worker still has these
            desk.answer(1)
            desk.answer(2)
            assert desk.line.held == 0

    run(story)


def test_a_request_whose_client_has_gone_is_not_computed() -> None:
    async def story() -> None:
        desk = Desk(batch=1, queue=10)
        present = True
        for _ in range(3):
            await desk.ask()
        await desk.ask(gone=lambda: not present)
        present = False
        for number in (1, 2, 3):
            desk.answer(number)
        assert desk.sent == [1, 2, 3]
        assert desk.line.held == 0
        assert (await desk.results())[:3] == [200] * 3

    run(story)


MOVES = st.lists(st.sampled_from(["ask", "ask several", "look", "answer", "die", "open"]), max_size=60)


@given(MOVES)
def test_whatever_happens_every_request_has_one_answer_and_nothing_stays_held(moves: list[str]) -> None:
    async def story() -> None:
        desk = Desk(batch=2, queue=8)
        for move in moves:
            if move.startswith("ask"):
                await desk.ask(cost=5 if move == "ask several" else 1)
            elif move == "look":
                await desk.ask("attention")
            elif move == "answer" and desk.line.at_work:
                desk.answer(next(iter(desk.line.at_work)))
            elif move == "die":
                desk.fail()
            elif move == "open":
                desk.open()
            assert desk.line.held <= 8
            assert desk.line.held == sum(
                one.cost for one in (*desk.line.waiting, *desk.line.looking, *desk.line.at_work.values())
            )
        desk.open()
        desk.finish()
        assert desk.line.held == desk.line.working == 0
        assert set(await desk.results()) <= {200, 422, 429}
        assert len(await desk.results()) == len(desk.asked)

    run(story)


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary()), max_size=5), st.data())
def test_messages_survive_any_cut_of_their_bytes(messages: list[tuple[dict[str, int], bytes]], data: Any) -> None:
    sent = b"".join(frame(head, len(body)) + body for head, body in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    frames, found = Frames(), []
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found += list(frames.feed(sent[begin:end]))
    assert found == messages


def test_attention_goes_in_its_time_though_the_worker_always_has_one_prediction() -> None:
    """Two clients who ask again as soon as they are answered: nobody waits, and the worker is never without work."""

    async def story() -> None:
        desk = Desk(batch=2, queue=10)
        await desk.ask()
        await desk.ask("attention")
        for number in range(3, 9):
            await desk.ask()
            desk.answer(1 if number == 3 else number - 1)
        assert 2 not in desk.sent
        desk.line.looking[0].arrived -= 6
        await desk.ask()
        assert 2 in desk.sent
        for number in (2, 8, 9):
            desk.answer(number)
        assert await desk.results() == [200] * 9

    run(story)
