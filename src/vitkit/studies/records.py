"""Stored results of the runs of a study: state, table and measured speed. Imports no torch.

Directory of a study: study.json (the plan), runs/NAME (run directories), results/NAME.json (measures of finished runs),
results/NAME.failed.txt (why a run failed), jobs/ (what the processes of runs read and print), table.csv, result.json,
figure.png, .svg and .pdf, report.html.
"""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitkit.core.environment import usable_cores
from vitkit.core.errors import DataError, TrainingError, VitkitError
from vitkit.core.files import write_text
from vitkit.studies.plan import StudyRun
from vitkit.studies.study import RUNS, SEED, Study, group_label

PETA = 1e15
UTILIZATION = 0.35
"""Fraction of the rate of matrix products that small models reach, assumed until a run has measured its own speed."""
Status = Literal["planned", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run of a study: `settings` are its labels, `error` is why it failed."""

    name: str
    settings: Mapping[str, str]
    status: Status
    path: Path
    pflops: float
    error: str | None = None


def result_file(out: Path, name: str) -> Path:
    """Return the file with the result of a finished run."""
    return out / "results" / f"{name}.json"


def failure_file(out: Path, name: str) -> Path:
    """Return the file with the reason of a failed run."""
    return out / "results" / f"{name}.failed.txt"


def explain_failure(error: VitkitError) -> str:
    """Return the text of an error with what to do, in one line.

    >>> explain_failure(DataError("no images", hint="check the path"))
    'no images: check the path'
    """
    return f"{error.summary}: {error.hint}" if error.hint else error.summary


def write_failure(out: Path, name: str, error: str) -> None:
    """Keep the reason of a failure."""
    file = failure_file(out, name)
    file.parent.mkdir(exist_ok=True)
    write_text(file, error + "\n")


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    """Return the stored result of a run; None if it is not finished."""
    file = result_file(out, name)
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TrainingError(f"{file}: damaged", hint="delete the file and run again") from error
    return record


def run_path(out: Path, name: str, record: Mapping[str, Any] | None) -> Path:
    """Return the directory of a run; that of a tuning run if it was not repeated."""
    return out / "runs" / (record["directory"] if record else name)


def record_run(run: StudyRun, out: Path) -> RunRecord:
    """Return the state of a run."""
    stored, failure = read_record(out, run.name), failure_file(out, run.name)
    status: Status = "finished" if stored else "failed" if failure.exists() else "planned"
    error = failure.read_text(encoding="utf-8").strip() if status == "failed" else None
    path = run_path(out, run.name, stored)
    return RunRecord(name=run.name, settings=run.labels, status=status, path=path, pflops=run.flops / PETA, error=error)


def make_table(study: Study, runs: Sequence[StudyRun], out: Path) -> list[dict[str, object]]:
    """Return a row for each finished run that counts."""
    table = []
    for run in runs:
        stored = read_record(out, run.name) if run.counts else None
        if stored is not None:
            groups = {column: group_label(run.labels[axis]) for column, axis in study.groups.items()}
            row = {"run": run.name, **run.labels, **groups, SEED: run.seed} | stored["result"] | stored["speed"]
            table.append({column: row.get(column) for column in study.columns})
    return table


def list_checkpoints(study: Study, data: Mapping[str, str]) -> list[RunRecord]:
    """Return the finished runs of the study in the directory `runs`, without those that only chose a rate."""
    directory = Path(data[RUNS])
    try:
        plan: Any = json.loads((directory / "study.json").read_bytes())["runs"]
    except (OSError, ValueError, KeyError):
        plan = {}
    records = []
    for name, run in plan.items():
        if run["counts"] and (stored := read_record(directory, name)):
            path, labels = run_path(directory, name, stored), run["labels"] | {SEED: str(run["seed"])}
            records.append(RunRecord(name=name, settings=labels, status="finished", path=path, pflops=0.0))
    if not records:
        raise DataError(
            f"{directory} has no finished runs",
            expected="the --out directory of a study",
            hint=f"vitkit study {study.inspects} --out {shlex.quote(str(directory))}",
        )
    return records


def measure_rate(runs: Sequence[StudyRun], out: Path) -> float | None:
    """Return the PFLOPs per hour of the finished runs, evaluation included; None if there are none."""
    pflops = hours = 0.0
    for run in runs:
        if (stored := read_record(out, run.name)) and not run.is_tuned_here:
            pflops += stored["result"]["flops"] / PETA
            hours += stored["speed"]["wall_hours"]
    return pflops / hours if pflops and hours else None


def count_threads(*, threads: int | None, jobs: int) -> int:
    """Return the threads that all runs compute with: as the environment or the settings limit them."""
    cores, text = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if threads is None and jobs == 1 and text.isdigit() and int(text) > 0:
        threads = int(text)
    return cores if threads is None else min(cores, threads * jobs)


def probe_rate(*, threads: int | None = None, jobs: int = 1) -> float:
    """Return the PFLOPs per hour that this machine is expected to train, from a few matrix products in NumPy.

    `threads` are those of each run. The CPU time is measured, so that the load of the machine does not matter.
    """
    side, repeats = 768, 4
    matrix = np.ones((side, side), dtype=np.float32)
    matrix @ matrix
    start = time.process_time()
    for _ in range(repeats):
        matrix @ matrix
    per_core = repeats * 2 * side**3 / max(time.process_time() - start, 1e-6)
    return UTILIZATION * per_core * count_threads(threads=threads, jobs=jobs) * 3600 / PETA
