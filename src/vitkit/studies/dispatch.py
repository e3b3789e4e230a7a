"""Execution of the runs of a study: one after the other or several at a time, each in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.core.environment import usable_cores
from vitkit.core.errors import VitkitError
from vitkit.core.files import write_text
from vitkit.core.formatting import format_clock
from vitkit.core.signals import StopFlag
from vitkit.studies.plan import StudyRun
from vitkit.studies.records import explain_failure, failure_file, read_record, write_failure
from vitkit.training.callbacks import Callback

REPORT_SECONDS = 60
"""Seconds between two reports of a study that is not finished."""
POLL_SECONDS = 0.2
KILLED = -9
OUT_OF_MEMORY = "killed by the system, probably out of memory: lower schedule.batch_size or --jobs"


@dataclass(kw_only=True)
class Dispatcher:
    """Execution of the runs that are not finished, `jobs` at a time, each after those that it needs.

    With `isolate`, each run is a process of its own, which may run out of memory without ending the study.
    """

    out: Path
    runs: Sequence[StudyRun]
    data: Mapping[str, str]
    jobs: int
    callback: Callback
    stop: StopFlag
    isolate: bool
    report: Callable[[], object] = lambda: None
    hours_left: Callable[[], float] = lambda: 0.0
    pending: list[StudyRun] = field(init=False)
    finished: set[str] = field(init=False)
    failed: set[str] = field(init=False, default_factory=set)
    running: dict[Future[str | None], StudyRun] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.finished = {run.name for run in self.runs if read_record(self.out, run.name) is not None}
        self.pending = [run for run in self.runs if run.name not in self.finished]

    def run(self) -> None:
        """Execute the runs. A failed one is recorded, and so are those that need it; a stop raises `StopRequested`."""
        last_report = time.monotonic()
        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            while self.start_runs(pool):
                for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                    run, error = self.running.pop(future), future.result()
                    if error is not None:
                        self.record_failure(run, error)
                    elif not self.stop.requested:
                        self.finished.add(run.name)
                if time.monotonic() - last_report > REPORT_SECONDS and not self.stop.requested:
                    self.report()
                    last_report = time.monotonic()
        self.stop.raise_if_requested()

    def start_runs(self, pool: ThreadPoolExecutor) -> bool:
        """Start runs whose needs are finished, `jobs` at a time; return whether any is running."""
        for run in list(self.pending):
            if self.stop.requested:
                break
            if failed_needs := sorted(self.failed & set(run.needs)):
                self.pending.remove(run)
                self.record_failure(run, f"needs {failed_needs[0]}, which failed")
            elif len(self.running) < self.jobs and self.finished >= set(run.needs):
                self.pending.remove(run)
                number = len(self.finished) + len(self.failed) + len(self.running) + 1
                left = f", about {format_clock(3600 * self.hours_left())} left"
                self.callback.on_message(f"run {number} of {len(self.runs)}{left}: {run.name}")
                self.running[pool.submit(self.execute, run)] = run
        return bool(self.running)

    def execute(self, run: StudyRun) -> str | None:
        """Execute a run; return the reason if it failed."""
        from vitkit.studies.worker import execute, make_job  # noqa: PLC0415  plans need no torch

        job = make_job(run, self.out, data=self.data)
        failure_file(self.out, run.name).unlink(missing_ok=True)
        if self.isolate:
            return self.execute_process(run.name, job.to_json())
        try:
            execute(job, callback=Callback(), stop=self.stop)
        except VitkitError as error:
            return explain_failure(error)
        return None

    def execute_process(self, name: str, job: str) -> str | None:
        """Execute a run in a process, which ends with this one; return the reason if it failed."""
        directory = self.out / "jobs"
        directory.mkdir(exist_ok=True)
        file, log = directory / f"{name}.json", directory / f"{name}.log"
        write_text(file, job)
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.jobs))}
        environment = threads | dict(os.environ) if self.jobs == 1 else dict(os.environ) | threads
        with (
            log.open("wb") as errors,
            # A session of its own: Ctrl-C reaches the study alone, which then stops its runs.
            subprocess.Popen(
                # -P: Python files of the working directory do not hide modules.
                [sys.executable, "-P", "-m", "vitkit.studies.worker", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            code = self.wait(process)
        if code == 0 or self.stop.requested:
            return None
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return OUT_OF_MEMORY if code == KILLED else lines[-1] if lines else f"ended with code {code}"

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Return the exit code of a process, which is asked to stop once if a stop is requested."""
        while not self.stop.requested:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=POLL_SECONDS)
        process.terminate()
        return process.wait()

    def record_failure(self, run: StudyRun, error: str) -> None:
        """Keep the reason of a failure and name the run; the others continue."""
        self.failed.add(run.name)
        write_failure(self.out, run.name, error)
        self.callback.on_warning(f"{run.name} failed: {error}")
