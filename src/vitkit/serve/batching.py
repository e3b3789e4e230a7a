"""Accepted requests go in, the worker gets as many as it can use and each gets one answer, or learns why there is none.

The line is short on purpose: what would wait for long is refused at once, while refusing is cheap. A rush may come near
its end, and so may what piles up while others have the cores; where somebody finds it full there are too many clients,
and what keeps the worker busy is enough until they are fewer. Predictions go before attention.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vitkit.serve.answers import JSON, Refusal
from vitkit.serve.config import LimitsConfig
from vitkit.serve.metrics import Metrics
from vitkit.serve.wire import Message

Body = bytes | bytearray
Send = Callable[[Message, Body], None]
LONGEST_CUT = 500
"""After the time that so many whole lines take, it is tried whether all of it is enough again."""
MOMENT = 0.1
"""Seconds that this process may need to bring the worker something new, where its cores are busy."""
POISON = Refusal(422, "the image could not be processed", hint="it may be damaged; save it again with another program")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer as the client will get it."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(eq=False, slots=True)
class Ticket:
    """One accepted request."""

    number: int
    head: Message
    body: Body
    cost: int
    deadline: float
    future: asyncio.Future[Answered]
    gone: Callable[[], bool]
    attention: bool
    arrived: float
    retried: bool = False


class Line:
    """The requests that are accepted and not yet answered."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.waiting: deque[Ticket] = deque()
        self.looking: deque[Ticket] = deque()
        self.at_work: dict[int, Ticket] = {}
        self.held = 0
        self.working = 0
        self.takes = 2 * limits.batch
        """Images that the worker has at most; more of them need not be there."""
        self.needs = 2 * limits.batch
        """Images with which it has something to do while the next ones come."""
        self.cut_since = self.cut_until = -math.inf
        self.numbers = 0
        self.seconds_an_image = 0.05
        self.send: Send | None = None

    # Coming in

    def has_room(self, cost: int = 1) -> bool:
        """Whether so many images more are accepted; an empty line takes any request."""
        return self.held + cost <= self.room() or self.held == 0

    def room(self) -> int:
        """Images that may be in line now: far fewer once somebody was refused, until nobody has been for a while."""
        return self.few if time.monotonic() < self.cut_until else self.most

    @property
    def most(self) -> int:
        """Images that may be in line in a rush."""
        return self.limits.queue or 3 * self.takes

    @property
    def few(self) -> int:
        """Images that may be in line while there are too many clients: what keeps the worker busy, at most half."""
        half = self.most // 2
        lasts_a_moment = half if self.seconds_an_image * half < MOMENT else math.ceil(MOMENT / self.seconds_an_image)
        return max(1, min(max(self.needs, lasts_a_moment), half))

    def retry_after(self) -> int:
        """Whole seconds after which there should be room."""
        return max(1, math.ceil(self.held * self.seconds_an_image))

    def busy(self) -> Refusal:
        """The refusal where there is no room."""
        if not self.has_room():
            self._cut()
        return Refusal(
            429,
            "the server is busy: as many images wait as it accepts",
            hint="send it again after the seconds in Retry-After",
            headers={"retry-after": str(self.retry_after())},
        )

    def _cut(self) -> None:
        """A few have to be enough until nobody was refused for as long as a whole line takes, or for very long.

        Nobody is refused either while this process has no core: that time must not pass for an end of the crowd.
        Clients who do not wait before they ask again may be few enough for the whole line, and never let it end.
        """
        now, a_line = time.monotonic(), self.most * self.seconds_an_image
        if now >= self.cut_until:
            self.cut_since = now
        self.cut_until = min(now + a_line, self.cut_since + LONGEST_CUT * a_line)

    async def ask(self, head: Message, body: Body, *, cost: int, gone: Callable[[], bool]) -> Answered:
        """Wait in line for the answer to one request."""
        if not self.has_room(cost):
            raise self.busy()
        self.numbers += 1
        now = time.monotonic()
        ticket = Ticket(
            number=self.numbers,
            head=head | {"id": self.numbers, "cost": cost},
            body=body,
            cost=cost,
            deadline=now + self.limits.deadline,
            future=asyncio.get_running_loop().create_future(),
            gone=gone,
            attention=head["do"] == "attention",
            arrived=now,
        )
        (self.looking if ticket.attention else self.waiting).append(ticket)
        self._hold(cost)
        self.pump()
        return await ticket.future

    # Going to the worker

    def pump(self) -> None:
        """Hand the worker what it can use now."""
        while self.send is not None and (line := self._next_line()) is not None:
            ticket = line.popleft()
            if ticket.future.done() or ticket.gone():
                self._release(ticket)
                continue
            self.at_work[ticket.number] = ticket
            self.working += ticket.cost
            self.send(ticket.head, ticket.body)

    def _next_line(self) -> deque[Ticket] | None:
        """The line whose first request goes next; None where the worker has enough."""
        line = self.waiting or self.looking
        one_looks = any(ticket.attention for ticket in self.at_work.values())
        oldest = self.looking[0].arrived if self.looking and not one_looks else math.inf
        has_waited = time.monotonic() - oldest > self.limits.deadline / 2
        if has_waited:
            line = self.looking  # it has let others go first for long enough
        if not line or not self.at_work:
            return line or None
        if line[0].retried or any(ticket.retried for ticket in self.at_work.values()):
            return None  # one of these was there when a worker died: alone, it harms no other
        if has_waited:
            return line
        most = 0 if line is self.looking else self.takes
        return line if self.working + line[0].cost <= most else None

    # Coming back

    def answered(self, number: int, answer: Answered) -> None:
        """The worker's answer to a request, which may have been given up meanwhile."""
        ticket = self.at_work.pop(number, None)
        if ticket is None:
            return
        self.working -= ticket.cost
        self._settle(ticket, answer)
        self.pump()

    def computed(self, images: int, seconds: float) -> None:
        """How long a batch took, which says how long others will."""
        if images:
            self.seconds_an_image += 0.1 * (seconds / images - self.seconds_an_image)

    def worker_lost(self) -> None:
        """The worker died: what it had is tried once more, each request alone; what dies with a second is answered."""
        self.send = None
        tickets, self.at_work, self.working = list(self.at_work.values()), {}, 0
        for ticket in reversed(tickets):
            if ticket.retried:
                self._settle(ticket, Answered(POISON.status, {"content-type": JSON}, POISON.body()))
            else:
                ticket.retried = True
                (self.looking if ticket.attention else self.waiting).appendleft(ticket)

    def expire(self, *, up: bool) -> None:
        """Answer those that have waited too long."""
        now = time.monotonic()
        late = [ticket for ticket in (*self.waiting, *self.looking, *self.at_work.values()) if ticket.deadline < now]
        for ticket in late:
            if ticket.future.done():
                continue
            if up:
                refusal = Refusal(504, f"no answer within {self.limits.deadline:g} s", hint="send it again later")
            else:
                refusal = Refusal(503, "the worker is being replaced", hint="send it again")
            refusal.headers["retry-after"] = str(self.retry_after())
            ticket.future.set_exception(refusal)
        if late:
            for line in (self.waiting, self.looking):
                for ticket in [ticket for ticket in line if ticket.future.done()]:
                    line.remove(ticket)
                    self._release(ticket)
            self.pump()

    def _settle(self, ticket: Ticket, answer: Answered) -> None:
        self._release(ticket)
        if not ticket.future.done():
            ticket.future.set_result(answer)

    def _hold(self, cost: int) -> None:
        self.held += cost
        self.metrics.waiting.set(self.held)

    def _release(self, ticket: Ticket) -> None:
        self._hold(-ticket.cost)
        if not ticket.future.done() and ticket.gone():
            ticket.future.set_exception(Refusal(408, "the client has gone"))
