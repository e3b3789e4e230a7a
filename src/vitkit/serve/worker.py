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
from vitkit.serve.work import SMALLER, Job, Reply, attend, finish, joined, prepare, refused

TOO_LARGE = Refusal(422, "the image is too large for the memory", hint=SMALLER)
CROWDED = 0.25
"""Seconds that requests are taken to come one beside the other, once they have."""
AT_ONCE = 0.01
"""Seconds of work that a hand takes at once: it saves messages where requests are small, and answers wait for it."""
GPU_FAILED: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""What torch raises, from 2.8 on, once a GPU has failed."""
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
        self.may_decode = threading.Semaphore(decoders)
        self.decoding: dict[int, float] = {}
        self.computing: dict[int, tuple[bool, float]] = {}
        self.in_hand: dict[int, int] = {}
        self.crowded_until = 0.0
        self.seconds_a_request = 1.0

    @property
    def takes(self) -> int:
        """Images that it has at most: for each hand one and a few to come, or a batch and the next one."""
        return max(10, 5 * self.hands) if self.hands else 2 * self.limits.batch

    @property
    def needs(self) -> int:
        """Images that keep it busy: for each hand one and two to come, or a batch and the next one."""
        return 3 * self.hands if self.hands else 2 * self.limits.batch

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
        """That this process is alive, and for how long the oldest of its present work of each kind has gone on."""
        now, computing = time.monotonic(), list(self.computing.values())
        begun = {
            "busy": [began for attention, began in computing if not attention],
            "looking": [began for attention, began in computing if attention],
            "decoding": list(self.decoding.values()),
        }
        return {"pong": head["ping"], **{kind: now - min(moments, default=now) for kind, moments in begun.items()}}

    # Each hand for itself

    def see_through(self) -> None:
        """Take requests and answer them, again and again."""
        torch.set_num_threads(1)  # of this hand: what torch does for it, it does on its own core
        while True:
            self.see_to([self.arrived.get()])

    def see_to(self, taken: list[tuple[Message, bytes]]) -> None:
        """Answer a request, and a share of those that wait where that takes no time; none is held on to."""
        began, me = time.monotonic(), threading.get_ident()
        share = min(self.limits.batch, self.arrived.qsize() // self.hands, int(AT_ONCE / self.seconds_a_request))
        with contextlib.suppress(queue.Empty):  # another hand was faster
            while len(taken) < share:
                taken.append(self.arrived.get_nowait())
        count = self.in_hand[me] = len(taken)
        self.note_crowd()
        prepared = [self.prepared(*taken.pop(0)) for _ in range(count)]
        done = began
        for jobs in batches([job for job in prepared if job is not None]):
            done = self.run(jobs, since=done, apart=self.is_crowded(sum(job.count for job in jobs)))
        del self.in_hand[me]
        self.seconds_a_request += 0.1 * ((time.monotonic() - began) / count - self.seconds_a_request)

    def note_crowd(self) -> None:
        """Remember when there was a request for each hand."""
        if sum(list(self.in_hand.values())) + self.arrived.qsize() >= self.hands:
            self.crowded_until = time.monotonic() + CROWDED

    def is_crowded(self, images: int) -> bool:
        """Whether there is a request for each hand, or was a moment ago: then an image has one thread.

        Threads that share an image wait for each other, and for whoever else needs the core meanwhile. Who comes alone
        has all of them, and so has a list that nobody waits behind: its images are shared out whole.
        """
        is_alone = len(self.in_hand) == 1 and self.arrived.empty()
        return time.monotonic() < self.crowded_until and not (is_alone and images >= self.hands)

    def look(self, job: Job) -> Reply:
        """Answer a question about attention, for which torch has all threads."""
        if not self.hands:
            return attend(job)
        torch.set_num_threads(self.hands)
        try:
            return attend(job)
        finally:
            torch.set_num_threads(1)

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
            self.run(jobs, since=time.monotonic())

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
        with self.may_decode:  # large images take much memory while they are decoded
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

    def run(self, jobs: list[Job], *, since: float, apart: bool = False) -> float:
        """Compute and answer one batch, on all threads or on this one alone, and say what it took since then."""
        me, attention, began = threading.get_ident(), is_attention(jobs[0]), time.monotonic()
        self.computing[me] = attention, began
        replies = self.answers(jobs, apart=apart)
        del self.computing[me]
        now = time.monotonic()
        done = {
            "batch": sum(job.count for job in jobs),
            "seconds": round(now - began, 6),
            "taken": round((now - since) / (self.hands if apart else 1), 6),
            "attention": attention,
        }
        self.send((done, b""), *map(reply, jobs, replies))
        return now

    def answers(self, jobs: list[Job], *, apart: bool = False) -> list[Reply]:
        """The answers of one batch; what goes wrong is said to those whom it concerns.

        Once a GPU has failed nothing computes on it any more: that is the end of this process, and another one begins.
        """
        try:
            if is_attention(jobs[0]):
                return [self.look(jobs[0])]
            images = joined([job.images for job in jobs if job.images is not None])
            parts = [jobs[0].served.answer(part, apart=apart) for part in images.split(self.limits.batch)]
            features, logits = (joined(each) for each in zip(*parts, strict=True))
        except Refusal as refusal:
            return [refused(refusal)] * len(jobs)
        except GPU_FAILED:
            raise
        except Exception:
            say_what_broke()
            return [refused(BROKE)] * len(jobs)
        replies, first = [], 0
        for job in jobs:
            own = slice(first, first := first + job.count)
            try:
                replies.append(finish(job, features[own], logits[own]))
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
    """What may be computed together: predictions of one model; attention, which takes longer, comes last."""
    found: dict[object, list[Job]] = {}
    for job in sorted(jobs, key=is_attention):
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
    hands = torch.get_num_threads() if all(served.apart for served in models.values()) else 0
    usual = max(4, hands // 4) if hands else max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    decoders = settings.engine.decoders or usual
    worker = Worker(sock, settings.limits, models, hands=hands, decoders=decoders)
    descriptions = [served.description() for served in models.values()]
    seconds = max(served.seconds for served in models.values())
    worker.send(({"ready": descriptions, "seconds": seconds, "takes": worker.takes, "needs": worker.needs}, b""))
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
