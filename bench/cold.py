"""Cold starts: seconds from a new process to its first output, and peak memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from candidates import CANDIDATES, THREADS, Candidate, create_engine, images, unavailable_reason

ROUNDS = 2
SLOW = 8.0
"""A start that takes longer is measured once."""
MEMORY_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Seconds from the start of a process to its first output, and its peak memory with a batch of eight."""

    model: str
    candidate: str
    seconds: float
    megabytes: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self)


def cold_starts(models: Sequence[str], candidates: Sequence[Candidate], folder: Path) -> list[ColdStart]:
    """Measure all candidates and models, each in a new process; report the shorter of two starts unless one is long."""
    results = []
    for model in dict.fromkeys(models):
        for candidate in candidates:
            is_ours = candidate.library == "vitkit"
            if candidate.form == "two streams" or (candidate.precision == "bf16" and not is_ours):
                continue  # starts like fp32
            if unavailable_reason(candidate, model, folder):
                continue
            starts = list(measure_starts(candidate, model, folder))
            best = min(starts, key=lambda start: start.seconds)
            print(f"{model}, {candidate.key}: first output after {best.seconds:.1f} s", file=sys.stderr, flush=True)
            results.append(best)
    return results


def measure_starts(candidate: Candidate, model: str, folder: Path) -> Iterator[ColdStart]:
    """Measure one or two starts without files that a compiler cached in an earlier run."""
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as empty:
            line = [sys.executable, __file__, json.dumps([candidate.key, model, str(folder)])]
            variables = {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": empty}
            started = time.perf_counter()
            with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | variables) as process:
                assert process.stdout is not None
                process.stdout.readline()
                seconds = time.perf_counter() - started
                megabytes = json.loads(process.stdout.readline())
        yield ColdStart(model=model, candidate=candidate.key, seconds=seconds, megabytes=megabytes)
        if seconds > SLOW:
            return


def main(request: str) -> None:
    """Run one image, report it, run a batch, and report the peak memory."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    key, model, folder = json.loads(request)
    candidate = next(each for each in CANDIDATES if each.key == key)
    engine = create_engine(candidate, model, Path(folder))
    engine(images(1))()
    print("ready", file=output, flush=True)
    run = engine(images(MEMORY_BATCH))
    run()
    print(peak_memory() / 1e6, file=output, flush=True)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; `memory.peak_rss` would import torch."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
