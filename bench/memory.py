"""Peak memory of one run, measured in a separate process."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from peers import CANDIDATES, Candidate, build
from rows import Row
from timing import make_batch, make_run, prepare

OPTION = "--memory-of"
"""Hidden option with which the script measures memory and prints the result."""
MEGA = 10**6
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Megabytes of resident memory: added by running, and in total."""

    growth: float
    total: float


def peaks_in_new_processes(row: Row) -> dict[Candidate, Peak]:
    """Return the peaks of all candidates."""
    with ThreadPoolExecutor() as pool:
        peaks = pool.map(lambda candidate: peak_in_new_process(row, candidate), CANDIDATES)
        return dict(zip(CANDIDATES, peaks, strict=True))


def peak_in_new_process(row: Row, candidate: Candidate) -> Peak:
    """Measure in a new process without other candidates or earlier runs."""
    request = json.dumps({"candidate": candidate, "row": row.as_dict()})
    command = [sys.executable, sys.argv[0], OPTION, request]
    # Passive waiting: spinning threads of the three processes would compete for the cores.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Peak(**json.loads(completed.stdout))


def handle_request(request: str) -> str:
    """Return the output of the new process as JSON."""
    fields = json.loads(request)
    return json.dumps(asdict(measure_peak(Row(**fields["row"]), fields["candidate"])))


def measure_peak(row: Row, candidate: Candidate) -> Peak:
    """Run twice and return the peak of the second run, as in a training loop."""
    model = prepare(row, build(candidate, row.model, activation=row.activation))
    run = make_run(row, model, *make_batch(row))
    before = psutil.Process().memory_info().rss
    reset_peak()
    run()
    run()
    peak = peak_rss()
    return Peak(growth=max(0, peak - before) / MEGA, total=peak / MEGA)


def reset_peak() -> None:
    """Reset the kernel's high-water mark if possible: building a model may need more than it keeps."""
    if os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text(RESET_PEAK)


def peak_rss() -> int:
    """Return the high-water mark of this process in bytes."""
    if STATUS.exists():
        results = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
        if results:
            return 1024 * int(results[1])
    import resource  # noqa: PLC0415  not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
