"""Measurement processes, one per library, of which only one runs at a time.

A process reads one JSON request per line and writes one JSON response. Between its turns it blocks on its pipe, so that
thread pools do not disturb each other and settings of one library do not affect another.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from candidates import CANDIDATES, THREADS, Candidate, PrepareBatch, RunBatch, create_engine, images, prepare

PEAK = "peak"
SLOW_PRODUCT = 2.0
"""A product that takes longer is measured once: bf16 without AVX-512 takes 15 seconds."""
FILES = "files"
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
"""The same for all processes; malloc keeps freed memory."""
TURN = 0.1
"""Minimum seconds of a turn, in which one candidate runs repeatedly."""
SLOW = 4.0
"""A run that takes longer is not repeated for warm-up."""
SETTLE = 0.02
"""Pause after a turn in which spinning threads go to sleep."""


class Child:
    """A process for one library that executes requests."""

    def __init__(self, library: str, folder: Path) -> None:
        line = [sys.executable, __file__, library, str(folder)]
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
        )

    def call(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: a process ended with code {self.process.wait()} on the request {request}")
        time.sleep(SETTLE)
        response: dict[str, Any] = json.loads(line)
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if kind is not None:
            self.process.terminate()
        self.process.wait()


class EngineHandler:
    """Requests of a library's process: create engines and run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: dict[str, PrepareBatch] = {}
        self.runs: dict[tuple[str, int], RunBatch] = {}

    def create(self, *, candidate: str, model: str) -> dict[str, Any]:
        """Create a candidate's engine for a model and return its name."""
        self.engines[candidate] = create_engine(find_candidate(candidate), model, self.folder)
        return {"engine": getattr(self.engines[candidate], "engine", "")}

    def warm_up(self, *, candidate: str, batch: int) -> dict[str, Any]:
        """Prepare for a batch and run it: once if that takes long, else twice; return the first two logits.

        The first run of a compiled model includes the compilation and is always repeated.
        """
        self.runs[candidate, batch] = run = self.engines[candidate](images(batch))
        started = time.perf_counter()
        logits = run()
        seconds = time.perf_counter() - started
        if seconds < SLOW or find_candidate(candidate).form == "compiled":
            seconds = time_run(run)
        return {"seconds": seconds, "logits": logits[:2].tolist()}

    def run(self, *, candidate: str, batch: int, times: int) -> dict[str, Any]:
        """Run `times` times and return the seconds; the first of several only warms the caches."""
        run = self.runs[candidate, batch]
        seconds = [time_run(run) for _ in range(times)]
        return {"seconds": seconds[1:] or seconds}

    def release(self) -> dict[str, Any]:
        """Release all engines."""
        self.engines.clear()
        self.runs.clear()
        return {}


class PeakHandler:
    """Requests of the process that measures the peak: matrix products."""

    def __init__(self) -> None:
        self.products: dict[str, list[Callable[[], Any]]] = {}
        self.slow: dict[str, float] = {}

    def run(self, *, candidate: str, times: int) -> dict[str, Any]:
        """Return the best of `times` products in a precision, in 10^9 operations per second."""
        from peaks import GIGAFLOP, products  # noqa: PLC0415  imports torch, which not every process should

        if candidate not in self.products:
            self.products[candidate] = products(candidate)  # type: ignore[arg-type]
        products = self.products[candidate]
        once = self.slow.get(candidate) or min(time_run(product) for product in products)
        if once > SLOW_PRODUCT:
            self.slow[candidate] = once
            return {"gigaflops": GIGAFLOP / once}
        return {"gigaflops": GIGAFLOP / min(time_run(product) for product in products for _ in range(times))}


class Files:
    """Requests of the process that writes the files of all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, *, model: str) -> dict[str, Any]:
        """Write the files of one model."""
        prepare(model, self.folder)
        return {}


def time_run(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def find_candidate(key: str) -> Candidate:
    """Return the candidate of that name."""
    return next(candidate for candidate in CANDIDATES if candidate.key == key)


def main(library: str, folder: Path) -> None:
    """Execute requests until stdin is closed. Output of libraries goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handler: PeakHandler | FileHandler | EngineHandler = EngineHandler(folder)
    if library in {PEAK, FILES}:
        handler = PeakHandler() if library == PEAK else FileHandler(folder)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        response = getattr(handler, request.pop("method"))(**request)
        print(json.dumps(response), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
