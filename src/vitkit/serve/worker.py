"""The process that computes: requests come in on a socket, their answers go out on it, until it closes.

    python -m vitkit.serve.worker FD

One thread listens and answers whether it is alive. Where an engine's callers may each have a thread of their own, every
core has a hand: it takes a request, or its share of those that wait, and sees it through from its bytes to its answer.
Else a few threads prepare images and one runs models: it takes what waits for one model, up to a batch, and never waits
for more. Signals are the other process's business; when that goes, this goes.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vitkit.core.config import from_mapping
from vitkit.core.errors import VitkitError
from vitkit.data.decode import Gate
from vitkit.serve.answers import Refusal
from vitkit.serve.config import LimitsConfig, ModelConfig, ServeConfig
from vitkit.serve.models import Served, load_models
from vitkit.serve.wire import Message, frame, messages
from vitkit.serve.work import SMALLER, Job, Reply, attend, finish, prepare, refused

TOO_LARGE = Refusal(422, "the image is too large for the memory", hint=SMALLER)
CROWDED = 0.25
"""Seconds that requests are taken to come one beside the other, once they have."""
BROKE = Refusal(500, "the server failed on this request", hint="its log says where")


class Worker:
    """The models, the requests and images that wait for them, and the socket to answer on."""

    def __init__(
        self, sock: socket.socket, limits: LimitsConfig, models: dict[str, Served], *, hands: int = 0, decoders: int = 1
    ) -> None:
        self.sock, self.limits, self.models = sock, limits, models
        self.hands, self.decoders = hands, decoders
        self.gate = Gate(max_bytes=limits.bytes, max_pixels=limits.pixels)
        self.arrived: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.ready: deque[Job] = deque()
        self.attention: deque[Job] = deque()
        self.sending = threading.Lock()
        self.decoding: dict[int, float] = {}
        self.computing: dict[int, float] = {}
        self.in_hand: dict[int, int] = {}
        self.crowded_until = 0.0

    @property
    def takes(self) -> int:
        """Images that keep it busy: for each hand one and a few to come, or a batch and the next one."""
        return max(10, 5 * self.hands) if self.hands else 2 * self.limits.batch

    def listen(self, arriving: Iterator[tuple[Message, bytes]]) -> None:
        """Take messages until the other side goes."""
        crew = [(self.see_through, self.hands)] if self.hands else [(self.compute, 1), (self.decode, self.decoders)]
        for work, count in crew:
            for _ in range(count):
                threading.Thread(target=or_else_all_ends, args=(work,), name=work.__name__, daemon=True).start()
        for head, payload in arriving:
            if "ping" in head:
                self.send((self.pulse(head), b""))
            else:
                self.arrived.put((head, payload))

    def pulse(self, head: Message) -> Message:
        """That this process is alive, and for how long the oldest of its present work has gone on."""
        now = time.monotonic()
        busy, decoding = (now - min(list(begun.values()), default=now) for begun in (self.computing, self.decoding))
        return {"pong": head["ping"], "busy": busy, "decoding": decoding}

    # Each hand for itself

    def see_through(self) -> None:
        """Take requests and answer them, again and again."""
        me = threading.get_ident()
        while True:
            requests = [self.arrived.get()]
            share = min(self.limits.batch, self.arrived.qsize() // self.hands)
            with contextlib.suppress(queue.Empty):  # another hand was faster
                while len(requests) < share:
                    requests.append(self.arrived.get_nowait())
            self.in_hand[me] = len(requests)
            apart = self.is_crowded()
            prepared = [self.prepared(*requests.pop(0)) for _ in range(len(requests))]
            for jobs in batches([job for job in prepared if job is not None]):
                self.run(jobs, apart=apart)
            del self.in_hand[me]

    def is_crowded(self) -> bool:
        """Whether there is a request for each hand, or was a moment ago.

        Then an image has one thread: threads that share an image wait for each other, and for whoever else needs the
        core meanwhile. Who comes alone has all of them.
        """
        now = time.monotonic()
        if sum(list(self.in_hand.values())) + self.arrived.qsize() >= self.hands:
            self.crowded_until = now + CROWDED
        return now < self.crowded_until

    # Some prepare, one computes

    def decode(self) -> None:
        """Prepare the images of one request after the other."""
        while True:
            job = self.prepared(*self.arrived.get())
            if job is not None:
                with self.changed:
                    (self.attention if is_attention(job) else self.ready).append(job)
                    self.changed.notify()

    def compute(self) -> None:
        """Run batch after batch."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ready or self.attention)
                jobs = self.take()
            self.run(jobs)

    def take(self) -> list[Job]:
        """What goes next: a question about attention, or as many jobs for one model as fit into a batch.

        Who comes first is decided before they come here: attention is sent when nothing else is at work, or when it has
        waited for long, and busy clients would let it wait for ever if it gave way once more.
        """
        if self.attention:
            return [self.attention.popleft()]
        first = self.ready.popleft()
        jobs, images, others = [first], first.count, deque[Job]()
        while self.ready:
            job = self.ready.popleft()
            if job.served is first.served and images + job.count <= self.limits.batch:
                jobs.append(job)
                images += job.count
            else:
                others.append(job)
        self.ready = others
        return jobs

    # What both do

    def prepared(self, head: Message, body: bytes) -> Job | None:
        """A request with its images; None where it cannot be, which is answered here."""
        job = Job(id=head["id"], asked=head, served=self.models[head["model"]])
        self.decoding[job.id] = time.monotonic()
        try:
            # What a request said of itself to get into line holds; a list of images cannot say too little.
            most = min(self.limits.images, head["cost"]) if head["do"] == "infer" else self.limits.images
            prepare(job, body, gate=self.gate, most=most)
        except Refusal as refusal:
            self.send(reply(job, refused(refusal)))
        except MemoryError:
            self.send(reply(job, refused(TOO_LARGE)))
        except Exception:
            say_what_broke()
            self.send(reply(job, refused(BROKE)))
        else:
            return job
        finally:
            del self.decoding[job.id]
        return None

    def run(self, jobs: list[Job], *, apart: bool = False) -> None:
        """Compute and answer one batch, on all threads or on this one alone."""
        me = threading.get_ident()
        self.computing[me] = began = time.monotonic()
        replies = self.answers(jobs, apart=apart)
        seconds = time.monotonic() - began
        del self.computing[me]
        done = {
            "batch": sum(job.count for job in jobs),
            "seconds": round(seconds, 6),
            "attention": is_attention(jobs[0]),
            "beside": self.hands if apart else 1,
        }
        self.send((done, b""), *map(reply, jobs, replies))

    def answers(self, jobs: list[Job], *, apart: bool = False) -> list[Reply]:
        """The answers of one batch; what goes wrong is said to those whom it concerns."""
        try:
            if is_attention(jobs[0]):
                return [attend(jobs[0])]
            images = torch.cat([job.images for job in jobs if job.images is not None])
            parts = [jobs[0].served.answer(part, apart=apart) for part in images.split(self.limits.batch)]
            features, logits = (torch.cat(each).split([job.count for job in jobs]) for each in zip(*parts, strict=True))
        except Refusal as refusal:
            return [refused(refusal)] * len(jobs)
        except Exception:
            say_what_broke()
            return [refused(BROKE)] * len(jobs)
        replies = []
        for job, some_features, some_logits in zip(jobs, features, logits, strict=True):
            try:
                replies.append(finish(job, some_features, some_logits))
            except Refusal as refusal:
                replies.append(refused(refusal))
            except Exception:
                say_what_broke()
                replies.append(refused(BROKE))
        return replies

    def send(self, *messages: tuple[Message, bytes]) -> None:
        """Send messages, each whole, together; nobody is told if the other side has gone.

        Whatever else goes wrong is the end of this process: an answer that was only forgotten would be waited for.
        """
        parts = [part for head, body in messages for part in (frame(head, len(body)), body)]
        with self.sending, contextlib.suppress(ConnectionError):
            self.sock.sendall(b"".join(parts))


def is_attention(job: Job) -> bool:
    """Whether it asks where a model looks, which is a pass of its own."""
    return bool(job.asked["do"] == "attention")


def batches(jobs: list[Job]) -> list[list[Job]]:
    """What may be computed together: predictions of one model."""
    found: dict[object, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.id if is_attention(job) else job.served, []).append(job)
    return list(found.values())


def or_else_all_ends(work: Callable[[], None]) -> None:
    """Run what never returns; if it does, a process without it would let requests wait: another one is better."""
    try:
        work()
    finally:
        say_what_broke()
        os._exit(1)


def say_what_broke() -> None:
    """The traceback of what went wrong, if anyone takes it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def leave_with(sock: socket.socket) -> None:
    """End with the other process, also in the middle of loading."""
    ending = select.poll()
    ending.register(sock, 0)  # that the other side has gone is told unasked
    ending.poll()
    os._exit(0)


def reply(job: Job, answer: Reply) -> tuple[Message, bytes]:
    """An answer as a message."""
    return {"id": job.id, "status": answer.status, "headers": answer.headers}, answer.body


def serve(sock: socket.socket) -> None:
    """Load the models that the first message names, say so, and work."""
    arriving = messages(sock)
    said, _ = next(arriving, ({}, b""))
    if not said:
        return
    settings = from_mapping(ServeConfig, said["settings"])
    if settings.engine.threads:
        torch.set_num_threads(settings.engine.threads)
    try:
        models = load_models(
            [from_mapping(ModelConfig, each) for each in said["models"]],
            engine=settings.engine,
            calibration=said["calibration"],
            batch=settings.limits.batch,
        )
    except (VitkitError, OSError) as error:
        failed = {"failed": str(error), "hint": getattr(error, "hint", None)}
        sock.sendall(frame(failed))
        return
    decoders = settings.engine.decoders or max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    hands = torch.get_num_threads() if all(served.apart for served in models.values()) else 0
    worker = Worker(sock, settings.limits, models, hands=hands, decoders=decoders)
    descriptions = [served.description() for served in models.values()]
    seconds = max(served.seconds for served in models.values())
    worker.send(({"ready": descriptions, "seconds": seconds, "takes": worker.takes}, b""))
    worker.listen(arriving)


def main() -> None:
    """Serve on the socket whose number is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # where memory runs out, this is the process that can be replaced
        Path("/proc/self/oom_score_adj").write_text("500")
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sock.setblocking(True)
        threading.Thread(target=leave_with, args=(sock,), daemon=True).start()
        serve(sock)
        os._exit(0)  # threads may still be at work for someone who has gone


if __name__ == "__main__":
    main()
