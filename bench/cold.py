"""Engines go in; the seconds from a fresh process to its first answer come out, and the memory that it needs."""

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

from contenders import CONTENDERS, THREADS, Contender, images, ready, reason_against

ROUNDS = 2
SLOW = 8.0
"""A start that takes longer is measured once."""
MEMORY_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds from the start of a process to its first answer, and the most memory it had with a batch of eight."""

    model: str
    contender: str
    seconds: float
    megabytes: float

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def cold_starts(models: Sequence[str], contenders: Sequence[Contender], folder: Path) -> list[Start]:
    """All contenders in all models, each in a fresh process; the shorter of two starts, where one is not long."""
    found = []
    for model in dict.fromkeys(models):
        for contender in contenders:
            is_ours = contender.library == "vitkit"
            if contender.form == "two streams" or (contender.precision == "bf16" and not is_ours):
                continue  # they start as in fp32
            if reason_against(contender, model, folder):
                continue
            starts = list(starts_of(contender, model, folder))
            best = min(starts, key=lambda start: start.seconds)
            print(f"{model}, {contender.key}: first answer after {best.seconds:.1f} s", file=sys.stderr, flush=True)
            found.append(best)
    return found


def starts_of(contender: Contender, model: str, folder: Path) -> Iterator[Start]:
    """One or two starts; what a compiler has kept on the disk from an earlier run is not there."""
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as empty:
            line = [sys.executable, __file__, json.dumps([contender.key, model, str(folder)])]
            given = {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": empty}
            started = time.perf_counter()
            with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | given) as process:
                assert process.stdout is not None
                process.stdout.readline()
                seconds = time.perf_counter() - started
                megabytes = json.loads(process.stdout.readline())
        yield Start(model=model, contender=contender.key, seconds=seconds, megabytes=megabytes)
        if seconds > SLOW:
            return


def main(question: str) -> None:
    """What the fresh process does: answer for an image, say so, answer for a few, say how much memory that took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    key, model, folder = json.loads(question)
    contender = next(each for each in CONTENDERS if each.key == key)
    engine = ready(contender, model, Path(folder))
    engine(images(1))()
    print("answered", file=answers, flush=True)
    run = engine(images(MEMORY_BATCH))
    run()
    print(most_memory() / 1e6, file=answers, flush=True)


def most_memory() -> int:
    """Bytes at the high-water mark of this process; `memory.resident_peak` says it too, but imports torch."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
