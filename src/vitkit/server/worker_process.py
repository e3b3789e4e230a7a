"""Worker process: receives requests on a socket, runs the models and sends the responses.

The main thread reads messages and answers pings. All other threads are equal: each takes a request, decodes its images,
and then processes what is ready, as long as there is a free slot for the models. vitkit's CPU engine has a slot per
thread, so every thread processes its own request. Other engines have one slot: while a thread runs a batch, the others
decode, and the next batch is what is ready by then. No thread waits for a batch to fill.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from vitkit.core.config import from_mapping
from vitkit.core.environment import limit_threads, usable_cores
from vitkit.core.errors import VitkitError, summarize
from vitkit.core.formatting import configure_logging
from vitkit.data.decode_limits import DecodeLimits
from vitkit.server.config import LimitsConfig, ModelConfig, ServeConfig
from vitkit.server.handlers import SMALLER_IMAGE, Job, build_response, concatenate, prepare, process_attention
from vitkit.server.ipc import HTTPError, Message, WorkerResponse, encode_frame, read_messages
from vitkit.server.models import ServedModel, load_models
from vitkit.server.stderr import StderrHandler

CONCURRENT_SECONDS = 0.25
"""Seconds after concurrent requests for which more are expected."""
COMBINE_SECONDS = 0.01
"""Seconds of work that a thread takes at once: this saves messages if requests are small."""
GPU_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""Raised by torch 2.8 and newer when a GPU has failed: nothing can run on it in this process anymore."""

logger = logging.getLogger(__name__)


class Worker:
    """The models, the requests that wait for them, and the threads that process these.

    With `slots` equal to `threads` every thread processes its own request on one core; with one slot the engine
    processes batches on all cores.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: LimitsConfig,
        models: dict[str, ServedModel],
        *,
        threads: int,
        slots: int,
        decoders: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sock, self.limits, self.models, self.clock = sock, limits, models, clock
        self.threads, self.free_slots, self.decoders = threads, slots, decoders
        self.is_parallel = slots == threads
        """Whether every thread may run the models, each on one core."""
        self.decode_limits = DecodeLimits(max_bytes=limits.bytes, max_pixels=limits.pixels)
        self.requests: queue.SimpleQueue[tuple[Message, bytes]] = queue.SimpleQueue()
        self.ready: deque[Job] = deque()
        self.lock, self.send_lock = threading.Lock(), threading.Lock()
        self.decoder_slots = threading.Semaphore(decoders)
        self.running: dict[int, tuple[str, float]] = {}
        """For each thread that decodes or runs a model, which of these, and since when."""
        self.in_flight: dict[int, int] = {}
        self.max_in_flight = max(10, 5 * threads) if self.is_parallel else 2 * limits.batch
        """Images that the front end dispatches at most: one and a few more per thread, or two batches."""
        self.min_in_flight = 2 * threads if self.is_parallel else 2 * limits.batch
        """Images that keep all cores busy: one and the next per thread, or two batches."""
        self.concurrent_until = 0.0
        self.seconds_per_request = 1.0

    def listen(self, messages: Iterator[tuple[Message, bytes]]) -> None:
        """Start the threads and receive messages until the front end closes the socket."""
        for _ in range(self.threads):
            threading.Thread(target=exit_on_return, args=(self.run_thread,), daemon=True).start()
        for header, body in messages:
            if "ping" in header:
                self.send((self.build_pong(header), b""))
            else:
                self.requests.put((header, body))

    def build_pong(self, header: Message) -> Message:
        """Return the answer to a ping: for how long the oldest task of each kind has been running."""
        now = self.clock()
        seconds = dict.fromkeys(("predicting", "attention", "decoding"), 0.0)
        for kind, start in self.running.copy().values():
            seconds[kind] = max(seconds[kind], now - start)
        return {"pong": header["ping"], **seconds}

    # Threads

    def run_thread(self) -> None:
        """Process requests until the process ends."""
        if self.is_parallel:
            torch.set_num_threads(1)  # for operations of torch on this thread
        while True:
            self.process([self.requests.get()])

    def process(self, received: list[tuple[Message, bytes]]) -> None:
        """Decode a request, and this thread's part of those that wait if they are small, and run what is ready."""
        start, thread = self.clock(), threading.get_ident()
        if self.is_parallel:
            per_thread = self.requests.qsize() // self.threads
            count = min(self.limits.batch, per_thread, int(COMBINE_SECONDS / self.seconds_per_request))
            with contextlib.suppress(queue.Empty):  # another thread was faster
                while len(received) < count:
                    received.append(self.requests.get_nowait())
        count = self.in_flight[thread] = len(received)
        if sum(list(self.in_flight.values())) + self.requests.qsize() >= self.threads:  # a request for every thread
            self.concurrent_until = self.clock() + CONCURRENT_SECONDS
        jobs = [self.decode(*received.pop(0)) for _ in range(count)]
        self.run_ready([job for job in jobs if job is not None])
        del self.in_flight[thread]
        self.seconds_per_request += 0.1 * ((self.clock() - start) / count - self.seconds_per_request)

    def decode(self, header: Message, body: bytes) -> Job | None:
        """Decode the images of a request; None if that is impossible, which is answered here."""
        job = Job(id=header["id"], header=header, model=self.models[header["model"]])
        # A KServe request must not have more images than the queue counted; a list cannot be undercounted.
        max_images = min(self.limits.images, header["images"]) if header["task"] == "infer" else self.limits.images
        with self.decoder_slots:  # large images need much memory while they are decoded
            start, thread = self.clock(), threading.get_ident()
            self.running[thread] = "decoding", start
            try:
                prepare(job, body, decode_limits=self.decode_limits, max_images=max_images)
            except Exception as error:
                self.send(job.encode_response(to_error_response(error)))
                return None
            finally:
                del self.running[thread]
            job.decode_seconds = self.clock() - start
        return job

    def run_ready(self, jobs: list[Job]) -> None:
        """Add decoded jobs to those that are ready, and run batches while there are any and a slot is free."""
        with self.lock:
            self.ready.extend(jobs)
            batch = self.take_batch()
        while batch:
            self.run_batch(batch)
            with self.lock:
                self.free_slots += 1
                batch = self.take_batch()

    def take_batch(self) -> list[Job]:
        """Take a slot and the oldest job, with others of its model up to the batch limit; attention requests go alone.

        Starting with the oldest job, no kind of request can starve another one.
        """
        if not self.ready or not self.free_slots:
            return []
        self.free_slots -= 1
        first = self.ready.popleft()
        if first.is_attention:
            return [first]
        batch, images, others = [first], first.count, deque[Job]()
        for job in self.ready:
            if job.model is first.model and not job.is_attention and images + job.count <= self.limits.batch:
                batch.append(job)
                images += job.count
            else:
                others.append(job)
        self.ready = others
        return batch

    # Models

    def run_batch(self, jobs: list[Job]) -> None:
        """Run the model on one batch, and send the responses and the time it took."""
        thread, is_attention, start = threading.get_ident(), jobs[0].is_attention, self.clock()
        images = sum(job.count for job in jobs)
        single_threaded = self.is_parallel and self.uses_one_core(images)
        self.running[thread] = "attention" if is_attention else "predicting", start
        responses = self.respond(jobs, single_threaded=single_threaded)
        del self.running[thread]
        seconds, decode_seconds = self.clock() - start, sum(job.decode_seconds for job in jobs)
        if self.is_parallel:
            service_seconds = (decode_seconds + seconds) / (self.threads if single_threaded else 1)
        else:  # other threads decode meanwhile
            service_seconds = max(seconds, decode_seconds / self.decoders)
        times = {"seconds": round(seconds, 6), "service_seconds": round(service_seconds, 6)}
        completed = {"completed": images, "attention": is_attention, **times}
        self.send((completed, b""), *map(Job.encode_response, jobs, responses))

    def respond(self, jobs: list[Job], *, single_threaded: bool = False) -> list[WorkerResponse]:
        """Compute the responses of one batch. A failed GPU ends the process; other errors concern their requests."""
        try:
            if jobs[0].is_attention:
                return [self.respond_attention(jobs[0])]
            images = concatenate([job.images for job in jobs if job.images is not None])
            model = jobs[0].model
            outputs = [model.run(part, single_threaded=single_threaded) for part in images.split(self.limits.batch)]
            features, logits = (concatenate(each) for each in zip(*outputs, strict=True))
        except GPU_ERRORS:
            raise
        except Exception as error:
            return [to_error_response(error)] * len(jobs)
        responses, start = [], 0
        for job in jobs:
            rows = slice(start, start := start + job.count)
            try:
                responses.append(build_response(job, features[rows], logits[rows]))
            except Exception as error:
                responses.append(to_error_response(error))
        return responses

    def respond_attention(self, job: Job) -> WorkerResponse:
        """Compute attention maps, for which torch uses all cores."""
        if not self.is_parallel:
            return process_attention(job)
        torch.set_num_threads(self.threads)
        try:
            return process_attention(job)
        finally:
            torch.set_num_threads(1)

    def uses_one_core(self, images: int) -> bool:
        """Return whether a batch runs on one core, because there is, or was just now, a request for every thread.

        Threads that share an image wait for each other. A single request has all cores, and so has a list of images
        behind which no other request waits.
        """
        is_alone = len(self.in_flight) == 1 and self.requests.empty()
        return self.clock() < self.concurrent_until and not (is_alone and images >= self.threads)

    def send(self, *messages: tuple[Message, bytes]) -> None:
        """Send whole messages; do nothing if the front end has exited.

        Any other error ends the process: a response that is not sent would be waited for.
        """
        parts = [part for header, body in messages for part in (encode_frame(header, len(body)), body)]
        with self.send_lock, contextlib.suppress(ConnectionError):
            self.sock.sendall(b"".join(parts))


def to_error_response(error: Exception) -> WorkerResponse:
    """Return the response to a request that failed, and log what is not the client's fault."""
    if isinstance(error, MemoryError):
        error = HTTPError(422, "the image is too large for the memory", hint=SMALLER_IMAGE)
    elif not isinstance(error, HTTPError):
        logger.error("a request failed", exc_info=error)
        error = HTTPError(500, "internal server error", hint="see the server's log")
    return error.to_response()


def exit_on_return(function: Callable[[], None]) -> None:
    """Run a function that never returns, and end the process if it does: its requests would wait forever."""
    try:
        function()
    finally:
        logger.critical("a worker thread has ended", exc_info=True)
        os._exit(1)


def serve(sock: socket.socket, *, on_loaded: Callable[[], None] = lambda: None) -> None:
    """Load the models that the first message names, report that, and process requests.

    `on_loaded` is called when the models are loaded, or cannot be, before the first message is sent.
    """
    messages = read_messages(sock)
    header, _ = next(messages, ({}, b""))
    if not header:
        return
    configure_logging(header["log_format"], handler=StderrHandler(), has_timestamps=True)
    config = from_mapping(ServeConfig, header["config"])
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    else:
        limit_threads()
    configs = [from_mapping(ModelConfig, each) for each in header["models"]]
    try:
        models = load_models(
            configs, engine=config.engine, calibration=header["calibration"], batch=config.limits.batch
        )
    except (VitkitError, OSError) as error:
        on_loaded()
        sock.sendall(encode_frame({"failed": summarize(error), "hint": getattr(error, "hint", None)}))
        return
    on_loaded()
    threads = slots = torch.get_num_threads()
    decoders = config.engine.decoders or max(4, threads // 4)
    if any(model.single_threaded is None for model in models.values()):  # an engine that cannot run on single threads
        decoders = config.engine.decoders or max(1, min(4, usable_cores() // 2))
        threads, slots = decoders + 1, 1
    worker = Worker(sock, config.limits, models, threads=threads, slots=slots, decoders=decoders)
    ready = {"ready": [model.describe() for model in models.values()]}
    ready |= {
        key: max(getattr(model, key) for model in models.values()) for key in ("batch_seconds", "seconds_per_image")
    }
    worker.send((ready | {"min_in_flight": worker.min_in_flight, "max_in_flight": worker.max_in_flight}, b""))
    worker.listen(messages)
