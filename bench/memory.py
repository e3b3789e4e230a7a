"""A row and a contender go in, the memory that one run needs comes out, measured in a process of its own."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from peers import CONTENDERS, Contender, build
from rows import Row
from timing import make_batch, one_run, prepare

OPTION = "--memory-of"
"""The script's hidden option that makes it measure memory and print the answer."""
MEGA = 10**6
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Megabytes of resident memory: what running added to libraries and model, and all of it."""

    growth: float
    total: float


def peaks_in_new_processes(row: Row) -> dict[Contender, Peak]:
    """The peaks of all contenders, measured side by side."""
    with ThreadPoolExecutor() as pool:
        peaks = pool.map(lambda contender: peak_in_new_process(row, contender), CONTENDERS)
        return dict(zip(CONTENDERS, peaks, strict=True))


def peak_in_new_process(row: Row, contender: Contender) -> Peak:
    """Measure in a fresh process, which knows neither the other contenders nor an earlier run."""
    question = json.dumps({"contender": contender, "row": row.as_dict()})
    command = [sys.executable, sys.argv[0], OPTION, question]
    # Threads that wait asleep: awake, they would keep the cores from those they wait for.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Peak(**json.loads(answer.stdout))


def answer(question: str) -> str:
    """What the fresh process prints."""
    asked = json.loads(question)
    return json.dumps(asdict(peak_here(Row(**asked["row"]), asked["contender"])))


def peak_here(row: Row, contender: Contender) -> Peak:
    """Run twice; what the second run needs beyond the first is what a training loop would see."""
    model = prepare(row, build(contender, row.model, activation=row.activation))
    run = one_run(row, model, *make_batch(row))
    before = psutil.Process().memory_info().rss
    forget_peak()
    run()
    run()
    peak = resident_peak()
    return Peak(growth=max(0, peak - before) / MEGA, total=peak / MEGA)


def forget_peak() -> None:
    """Start the kernel's high-water mark anew where it can be: building a model may have needed more than it keeps."""
    if os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text(RESET_PEAK)


def resident_peak() -> int:
    """Bytes at the high-water mark of this process."""
    if STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
        if found:
            return 1024 * int(found[1])
    import resource  # noqa: PLC0415  not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
