"""Bounded request queue between the HTTP front end and the worker process, and bounded buffer for request bodies.

Requests wait about `limits.target_delay` seconds at most: the queue holds target_delay / seconds_per_image images and
rejects the rest with 429. The limit follows the measured service rate. Predictions are dispatched before attention
requests.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from vitkit.server.config import LimitsConfig
from vitkit.server.ipc import Body, HTTPError, Message, WorkerResponse
from vitkit.server.metrics import Metrics

SMOOTHING = 0.1
"""Weight of the latest batch in the moving average of the service time."""
MIN_SECONDS_PER_IMAGE = 1e-5
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class QueueFull(HTTPError):  # noqa: N818  named like asyncio.QueueFull
    """A rejection with 429 and the number of seconds after which to retry."""

    def __init__(self, retry_after: int, reason: str = "its queue is full") -> None:
        hint, headers = "retry after the seconds in Retry-After", {"retry-after": str(retry_after)}
        super().__init__(429, f"the server is busy: {reason}", hint=hint, headers=headers)


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that was accepted and has no response yet."""

    header: Message
    body: Body
    images: int
    arrived: float
    response: asyncio.Future[WorkerResponse]
    is_disconnected: Callable[[], bool]
    was_retried: bool = False

    @property
    def is_attention(self) -> bool:
        """Whether the request asks for attention maps."""
        return bool(self.header["task"] == "attention")


class RequestQueue:
    """All requests that were accepted and have no response: those that wait and those in flight at the worker."""

    def __init__(self, limits: LimitsConfig, *, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.metrics, self.clock = limits, metrics, clock
        self.predictions: deque[PendingRequest] = deque()
        self.attention: deque[PendingRequest] = deque()
        self.in_flight: dict[int, PendingRequest] = {}
        self.size = self.images_in_flight = self.buffered = 0
        self.min_in_flight = self.max_in_flight = 2 * limits.batch
        self.seconds_per_image = 0.05
        self.send: Callable[[Message, Body], None] | None = None
        self._last_id = 0
        metrics.buffered.set_function(lambda: self.buffered)

    # Bodies

    def check_body(self, size: int, *, buffered: int) -> None:
        """Raise 413 for a body that is too large, and 429 if there is no memory for all of them."""
        if size > self.limits.bytes:
            raise HTTPError(413, f"the body is too large: expected at most {self.limits.bytes:,} bytes, got {size:,}")
        if buffered > self.limits.buffer:
            raise QueueFull(self.retry_after, "too many bytes are being received")

    async def read_body(self, receive: Receive) -> bytearray:
        """Read a whole body. The caller passes its size to `release_body` when it is no longer needed."""
        body = bytearray()  # grows in place: joining chunks would hold the body twice
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise HTTPError(408, "the client has disconnected")
                body += message["body"]
                self.buffered += len(message["body"])
                self.check_body(len(body), buffered=self.buffered)
                if not message.get("more_body", False):
                    return body
        except BaseException:
            self.release_body(len(body))
            raise

    def release_body(self, size: int) -> None:
        """Note that a body is no longer in memory."""
        self.buffered -= size

    # Admission

    @property
    def limit(self) -> int:
        """Number of images that the queue may hold."""
        return max(self.min_in_flight, int(self.limits.target_delay / self.seconds_per_image))

    def has_room(self, images: int = 1) -> bool:
        """Return whether so many more images are accepted. An empty queue accepts any request."""
        return self.size == 0 or self.size + images <= self.limit

    @property
    def retry_after(self) -> int:
        """Whole seconds after which the present queue should be processed."""
        return max(1, math.ceil(self.size * self.seconds_per_image))

    async def process(
        self, header: Message, body: Body, *, images: int, is_disconnected: Callable[[], bool]
    ) -> WorkerResponse:
        """Queue one request and wait for its response. Raise `QueueFull` if there is no room."""
        if not self.has_room(images):
            raise QueueFull(self.retry_after)
        self._last_id += 1
        header = header | {"id": self._last_id, "images": images}
        response = asyncio.get_running_loop().create_future()
        request = PendingRequest(header, body, images, self.clock(), response, is_disconnected)
        self._waiting_queue(request).append(request)
        self._resize(images)
        self.dispatch()
        return await request.response

    # Dispatch

    def attach_worker(
        self, send: Callable[[Message, Body], None], *, min_in_flight: int, max_in_flight: int, seconds_per_image: float
    ) -> None:
        """Dispatch to a worker that is ready, given how many images keep it busy and how many it can use at most."""
        self.send, self.min_in_flight, self.max_in_flight = send, min_in_flight, max_in_flight
        self.seconds_per_image = max(MIN_SECONDS_PER_IMAGE, seconds_per_image)
        self.dispatch()

    def dispatch(self) -> None:
        """Send requests to the worker until it has enough.

        Requests whose client has disconnected or whose deadline has passed are dropped.
        """
        while self.send is not None and (queue := self._next_queue()):
            request = queue.popleft()
            if self._is_expired(request):
                self._fail(request, worker_is_alive=True)
            if request.response.done() or request.is_disconnected():
                self._release(request)
                continue
            self.in_flight[request.header["id"]] = request
            self.images_in_flight += request.images
            self.metrics.queue_seconds.observe(self.clock() - request.arrived)
            self.send(request.header, request.body)

    def _next_queue(self) -> deque[PendingRequest] | None:
        """Return the queue whose first request is next, or None if the worker has enough."""
        is_overdue = self._attention_is_overdue()
        queue = self.attention if is_overdue else self.predictions or self.attention
        if not queue or not self.in_flight:
            return queue or None
        if queue[0].was_retried or any(request.was_retried for request in self.in_flight.values()):
            return None  # one of these was in flight when a worker died: alone, it can harm no other
        if is_overdue:
            return queue
        has_room = queue is self.predictions and self.images_in_flight + queue[0].images <= self.max_in_flight
        return queue if has_room else None

    def _attention_is_overdue(self) -> bool:
        """Return whether an attention request has given way to predictions for half of its time."""
        if not self.attention or any(request.is_attention for request in self.in_flight.values()):
            return False
        return self.clock() - self.attention[0].arrived > self.limits.deadline / 2

    # Completion

    def complete(self, request_id: int, response: WorkerResponse) -> None:
        """Pass on the worker's response to a request, which may have been given up meanwhile."""
        if (request := self.in_flight.pop(request_id, None)) is not None:
            self.images_in_flight -= request.images
            self._release(request)
            if not request.response.done():
                request.response.set_result(response)
            self.dispatch()

    def record_completion(self, images: int, seconds: float) -> None:
        """Update the measured service rate (exponential moving average) and thereby the limit."""
        if images > 0:
            updated = self.seconds_per_image + SMOOTHING * (seconds / images - self.seconds_per_image)
            self.seconds_per_image = max(MIN_SECONDS_PER_IMAGE, updated)

    def detach_worker(self) -> None:
        """Take back the requests of a worker that died.

        Each is retried once, alone. A request that was in flight when a second worker died is answered with 422.
        """
        self.send = None
        requests, self.in_flight, self.images_in_flight = list(self.in_flight.values()), {}, 0
        for request in reversed(requests):
            if not request.was_retried:
                request.was_retried = True
                self._waiting_queue(request).appendleft(request)
                continue
            self._release(request)
            if not request.response.done():
                error = HTTPError(422, "the image could not be processed", hint="it may be damaged: encode it again")
                request.response.set_result(error.to_response())

    def expire(self, *, worker_is_alive: bool) -> None:
        """Answer the requests whose deadline has passed."""
        pending = (*self.predictions, *self.attention, *self.in_flight.values())
        expired = [request for request in pending if self._is_expired(request)]
        for request in expired:
            self._fail(request, worker_is_alive=worker_is_alive)
            if request.header["id"] not in self.in_flight:
                self._waiting_queue(request).remove(request)
                self._release(request)
        if expired:
            self.dispatch()

    def _is_expired(self, request: PendingRequest) -> bool:
        return request.arrived + self.limits.deadline < self.clock()

    def _fail(self, request: PendingRequest, *, worker_is_alive: bool) -> None:
        if request.response.done():
            return
        if worker_is_alive:
            error = HTTPError(504, f"no response within {self.limits.deadline:g} s", hint="retry later")
        else:
            error = HTTPError(503, "the worker is being replaced", hint="retry")
        error.headers["retry-after"] = str(self.retry_after)
        request.response.set_exception(error)

    def _waiting_queue(self, request: PendingRequest) -> deque[PendingRequest]:
        return self.attention if request.is_attention else self.predictions

    def _release(self, request: PendingRequest) -> None:
        self._resize(-request.images)
        if not request.response.done() and request.is_disconnected():
            request.response.set_exception(HTTPError(408, "the client has disconnected"))

    def _resize(self, images: int) -> None:
        self.size += images
        self.metrics.queue_images.set(self.size)
