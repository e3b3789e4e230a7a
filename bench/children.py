"""Engines go in, each library in a process of its own; times of runs come out, while all other processes wait.

A process reads one question a line and answers with one line. Between its turns it blocks on its pipe, so that no pool
of threads disturbs another's, and nobody has a competitor's settings.
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

from contenders import CONTENDERS, THREADS, Contender, Once, Ready, images, prepare, ready

PEAK = "peak"
SLOW_PRODUCT = 2.0
"""Seconds of a product that is measured once: bf16 on a CPU without AVX-512 takes a quarter of a minute."""
FILES = "files"
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
"""The same for all: so many threads, and malloc keeps what is freed."""
TURN = 0.1
"""Seconds that a turn lasts at least: the runs of one contender before it is another's turn."""
SLOW = 4.0
"""Seconds of a run that is not repeated to warm up."""
SETTLE = 0.02
"""Seconds after a turn in which threads that still spin may fall asleep."""


class Child:
    """A process for one library, which runs what it is asked to."""

    def __init__(self, library: str, folder: Path) -> None:
        line = [sys.executable, __file__, library, str(folder)]
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer to a question, once it has been found."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: a process ended with code {self.process.wait()} when asked for {question}")
        time.sleep(SETTLE)
        answer: dict[str, Any] = json.loads(line)
        return answer

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


class Engines:
    """What a child does: it makes engines ready, and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ready: dict[str, Ready] = {}
        self.runs: dict[tuple[str, int], Once] = {}

    def make(self, *, contender: str, model: str) -> dict[str, Any]:
        """Make a contender ready for a model, and say what it is."""
        self.ready[contender] = ready(by_key(contender), model, self.folder)
        return {"engine": getattr(self.ready[contender], "engine", "")}

    def warm(self, *, contender: str, batch: int) -> dict[str, Any]:
        """Make ready for a batch and run it: once where that takes long, else twice; with the first two answers.

        The first run of a compiled model compiles, however long that takes.
        """
        self.runs[contender, batch] = run = self.ready[contender](images(batch))
        started = time.perf_counter()
        logits = run()
        seconds = time.perf_counter() - started
        if seconds < SLOW or by_key(contender).form == "compiled":
            seconds = timed(run)
        return {"seconds": seconds, "logits": logits[:2].tolist()}

    def run(self, *, contender: str, batch: int, times: int) -> dict[str, Any]:
        """Run so many times; where there is more than one, the first only warms the caches."""
        run = self.runs[contender, batch]
        seconds = [timed(run) for _ in range(times)]
        return {"seconds": seconds[1:] or seconds}

    def forget(self) -> dict[str, Any]:
        """Let everything go."""
        self.ready.clear()
        self.runs.clear()
        return {}


class Peaks:
    """What the child for the peak does: it multiplies matrices."""

    def __init__(self) -> None:
        self.products: dict[str, list[Callable[[], Any]]] = {}
        self.slow: dict[str, float] = {}

    def run(self, *, contender: str, times: int) -> dict[str, Any]:
        """The best of so many products in a precision, in 10^9 operations a second."""
        from peaks import GIGAFLOP, products  # noqa: PLC0415  imports torch, which not every process should

        if contender not in self.products:
            self.products[contender] = products(contender)  # type: ignore[arg-type]
        ways = self.products[contender]
        once = self.slow.get(contender) or min(timed(way) for way in ways)
        if once > SLOW_PRODUCT:
            self.slow[contender] = once
            return {"gigaflops": GIGAFLOP / once}
        return {"gigaflops": GIGAFLOP / min(timed(way) for way in ways for _ in range(times))}


class Files:
    """What the child for files does: it writes what the others read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, *, model: str) -> dict[str, Any]:
        """The files of one model."""
        prepare(model, self.folder)
        return {}


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def by_key(key: str) -> Contender:
    """The contender of that name."""
    return next(contender for contender in CONTENDERS if contender.key == key)


def main(library: str, folder: Path) -> None:
    """Answer until nobody asks any more. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answerer: Peaks | Files | Engines = Engines(folder)
    if library in {PEAK, FILES}:
        answerer = Peaks() if library == PEAK else Files(folder)
    gc.disable()
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(answerer, question.pop("do"))(**question)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
