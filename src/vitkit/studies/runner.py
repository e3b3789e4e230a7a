"""Runner of studies: executes the runs that are not finished, tests the claims and writes the report.

Directory of a study: study.json (the plan), runs/NAME (run directories), results/NAME.json (measures of finished runs),
table.csv, result.json, figure.png, .svg and .pdf, report.html.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitkit.core.config import to_mapping
from vitkit.core.environment import usable_cores
from vitkit.core.errors import ConfigError, DataError, TrainingError, VitkitError, summarize
from vitkit.core.files import write_csv, write_text
from vitkit.core.formatting import format_clock
from vitkit.core.lock import lock_directory
from vitkit.core.result import Result
from vitkit.core.signals import EXIT_INTERRUPTED, StopFlag, StopRequested
from vitkit.studies.claims import ClaimResult, evaluate_claim
from vitkit.studies.study import ONE_SEED, SEED, Settings, Study, StudyRun, group_label, plan_runs
from vitkit.training.callbacks import Callback

if TYPE_CHECKING:
    import matplotlib.figure

PETA = 1e15
PFLOPS_PER_HOUR = 0.15
"""Training PFLOPs per hour and core, assumed until the study has measured its own."""
REPORT_SECONDS = 60
"""Seconds between two reports of a study that is not finished."""
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

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        values = {"name": self.name, "settings": dict(self.settings), "status": self.status, "path": str(self.path)}
        return values | {"pflops": self.pflops, "error": self.error}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class StudyResult(Result):
    """Runs, claims with verdicts, and the table of a study."""

    study: Study
    quick: bool
    runs: tuple[RunRecord, ...]
    claims: tuple[ClaimResult, ...] = ()
    table: tuple[Mapping[str, object], ...] = ()
    report_path: Path | None = None

    @property
    def pflops(self) -> float:
        """PFLOPs of all runs, without early stopping."""
        return sum(run.pflops for run in self.runs)

    @property
    def hours(self) -> float:
        """Estimated hours of the runs that are not finished, on all cores of this machine."""
        left = sum(run.pflops for run in self.runs if run.status != "finished")
        return left / (PFLOPS_PER_HOUR * usable_cores())

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit study NAME --json` prints."""
        return {
            "study": self.study.name,
            "title": self.study.title,
            "quick": self.quick,
            "pflops": self.pflops,
            "hours_left": self.hours,
            "claims": [claim.to_dict() for claim in self.claims],
            "runs": [run.to_dict() for run in self.runs],
            "table": [dict(row) for row in self.table],
            "warnings": list(self.warnings),
        }

    def highlights(self) -> dict[str, object]:
        """Return the study, the number of finished runs and the verdicts."""
        done = sum(run.status == "finished" for run in self.runs)
        verdicts = "; ".join(claim.verdict for claim in self.claims)
        return {"study": self.study.name, "runs": f"{done}/{len(self.runs)}", "claims": verdicts}

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw the paper's figure."""
        from vitkit.studies.figures import draw_figure  # noqa: PLC0415  matplotlib is slow to import

        return draw_figure(self.study, self.table)


def plan_study(
    study: Study, *, out: Path | None, data: Mapping[str, str], settings: Settings, quick: bool
) -> StudyResult:
    """Return the runs and their cost; nothing is started or written."""
    runs = [] if study.inspects else plan_runs(study, data=data, settings=settings, quick=quick)
    directory = out or Path("runs") / study.name
    return StudyResult(study=study, quick=quick, runs=tuple(record_run(run, directory) for run in runs))


def run_study(
    study: Study,
    *,
    out: Path,
    data: Mapping[str, str],
    settings: Settings,
    quick: bool = False,
    jobs: int = 1,
    callback: Callback | None = None,
    stop: StopFlag | None = None,
    isolate: bool = True,
) -> StudyResult:
    """Run everything that is not finished, and write the report. Raise `StopRequested` after a stop.

    With `isolate`, each run is a process of its own, which may run out of memory without ending the study.
    """
    from vitkit.studies.worker import check_data  # noqa: PLC0415  plans need no torch

    callback, stop = callback or Callback(), stop or StopFlag()
    study.check()
    check_data(data, study.data, study=study.name)
    if study.inspects:
        return inspect_runs(study, out=out, data=data)
    runs = plan_runs(study, data=data, settings=settings, quick=quick)
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        check_same_study(out, study, runs, data=data)
        dispatcher = Dispatcher(out=out, runs=runs, data=data, jobs=jobs, callback=callback, stop=stop, isolate=isolate)
        dispatcher.on_finished = lambda: write_outputs(study, runs, out, quick=quick)
        dispatcher.run()
        return write_outputs(study, runs, out, quick=quick)


def check_same_study(out: Path, study: Study, runs: Sequence[StudyRun], *, data: Mapping[str, str]) -> None:
    """Write the plan, or raise ConfigError if the directory holds a study with other runs."""
    file = out / "study.json"
    plan = {run.name: to_mapping(run.config) | {"needs": list(run.needs)} for run in runs}
    content: Any = json.loads(json.dumps({"study": study.name, "data": dict(data), "runs": plan}))
    if not file.exists():
        if others := sorted(path.name for path in out.iterdir() if not path.name.startswith(".")):
            raise TrainingError(f"{out} holds other files: {', '.join(others[:3])}", hint="choose another out")
        write_text(file, json.dumps(content, indent=1) + "\n")
        return
    try:
        before = json.loads(file.read_bytes())
    except ValueError as error:
        raise TrainingError(f"{file}: damaged", hint="delete the file; finished runs are kept") from error
    if before != content:
        changed = [
            name for name in before["runs"] | content["runs"] if before["runs"].get(name) != content["runs"].get(name)
        ]
        what = f"of its runs {len(changed)} differ, such as {changed[0]}" if changed else "its data or name differ"
        raise ConfigError(
            f"{out} holds another study: {what}",
            hint="choose another out, or repeat the study, data, --quick and settings to resume",
        )


@dataclass(kw_only=True)
class Dispatcher:
    """Execution of the runs that are not finished, `jobs` at a time, each after those that it needs."""

    out: Path
    runs: Sequence[StudyRun]
    data: Mapping[str, str]
    jobs: int
    callback: Callback
    stop: StopFlag
    isolate: bool
    on_finished: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Execute the runs; a failed one is recorded, and so are those that need it."""
        pending = [run for run in self.runs if read_result(run, self.out) is None]
        failed: set[str] = set()
        running: dict[Future[str | None], StudyRun] = {}
        total, start, done_flops = sum(run.flops for run in pending), time.monotonic(), 0.0
        last_report = start
        with ThreadPoolExecutor(max_workers=max(1, self.jobs)) as pool:
            while pending or running:
                finished = {run.name for run in self.runs if read_result(run, self.out) is not None}
                for run in list(pending):
                    if failed & set(run.needs):
                        failed.add(run.name)
                        self.record_failure(run, f"needs {next(iter(failed & set(run.needs)))}, which failed")
                        pending.remove(run)
                    elif len(running) < self.jobs and finished >= set(run.needs) and not self.stop.requested:
                        pending.remove(run)
                        done = len(self.runs) - len(pending) - len(running)
                        left = (time.monotonic() - start) / done_flops * (total - done_flops) if done_flops else None
                        text = f"; about {format_clock(left)} left" if left else ""
                        self.callback.on_message(f"run {done} of {len(self.runs)}: {run.name}{text}")
                        running[pool.submit(self.execute, run)] = run
                if not running:
                    if self.stop.requested:
                        break
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    done_flops += run.flops
                    error = future.result()
                    if error is not None:
                        failed.add(run.name)
                        self.record_failure(run, error)
                    elif not self.stop.requested and time.monotonic() - last_report > REPORT_SECONDS:
                        self.on_finished()
                        last_report = time.monotonic()
        if self.stop.requested:
            raise StopRequested

    def execute(self, run: StudyRun) -> str | None:
        """Execute a run; return the reason if it failed."""
        from vitkit.studies.worker import execute, make_job  # noqa: PLC0415  plans need no torch

        results = {name: result["result"] for name in run.needs if (result := read_record(self.out, name)) is not None}
        job = make_job(run, self.out, data=self.data, results=results)
        failure_file(self.out, run.name).unlink(missing_ok=True)
        if self.isolate:
            return self.execute_process(job.name, job.to_json())
        try:
            execute(job, callback=Callback(), stop=self.stop)
        except VitkitError as error:
            return summarize(error)
        return None

    def execute_process(self, name: str, job: str) -> str | None:
        """Execute a run in a process, which ends with this one; return the reason if it failed."""
        directory = self.out / "jobs"
        directory.mkdir(exist_ok=True)
        file = directory / f"{name}.json"
        write_text(file, job)
        threads = str(max(1, usable_cores() // self.jobs))
        environment = (
            {"OMP_NUM_THREADS": threads} | dict(os.environ)
            if self.jobs == 1
            else dict(os.environ) | {"OMP_NUM_THREADS": threads}
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "vitkit.studies.worker", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
        )
        errors = ""
        while True:
            try:
                process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if self.stop.requested:
                    process.terminate()
        assert process.stderr is not None
        assert process.stdin is not None
        errors = process.stderr.read()
        process.stdin.close()
        process.stderr.close()
        code = process.returncode
        if code in (0, EXIT_INTERRUPTED) or self.stop.requested:
            return None
        if code == -9:
            return "killed by the system, probably out of memory: lower schedule.batch_size or --jobs"
        return errors.strip().splitlines()[-1] if errors.strip() else f"ended with code {code}"

    def record_failure(self, run: StudyRun, error: str) -> None:
        """Keep the reason of a failure and name the run; the others continue."""
        file = failure_file(self.out, run.name)
        file.parent.mkdir(exist_ok=True)
        write_text(file, error + "\n")
        self.callback.on_warning(f"{run.name} failed: {error}")


def failure_file(out: Path, name: str) -> Path:
    """Return the file with the reason of a failed run."""
    return out / "results" / f"{name}.failed.txt"


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    """Return the stored result of a run; None if it is not finished."""
    file = out / "results" / f"{name}.json"
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TrainingError(f"{file}: damaged", hint="delete the file and run again") from error
    return record


def read_result(run: StudyRun, out: Path) -> dict[str, Any] | None:
    """Return the stored result of a run; None if it is not finished."""
    return read_record(out, run.name)


def record_run(run: StudyRun, out: Path) -> RunRecord:
    """Return the state of a run."""
    failure = failure_file(out, run.name)
    status: Status = "finished" if read_result(run, out) else "failed" if failure.exists() else "planned"
    error = failure.read_text(encoding="utf-8").strip() if status == "failed" else None
    path = out / "runs" / run.name
    return RunRecord(name=run.name, settings=run.labels, status=status, path=path, pflops=run.flops / PETA, error=error)


def make_table(study: Study, runs: Sequence[StudyRun], out: Path) -> list[dict[str, object]]:
    """Return a row for each finished run that counts."""
    table = []
    for run in runs:
        stored = read_result(run, out) if run.counts else None
        if stored is not None:
            groups = {column: group_label(run.labels[axis]) for column, axis in study.groups.items()}
            row = {"run": run.name, **run.labels, **groups, SEED: run.seed} | stored["result"] | stored["speed"]
            table.append({column: row.get(column) for column in study.columns})
    return table


def write_outputs(study: Study, runs: Sequence[StudyRun], out: Path, *, quick: bool) -> StudyResult:
    """Test the claims on what is finished so far, and write table, figure and report."""
    table = make_table(study, runs, out)
    records = tuple(record_run(run, out) for run in runs)
    return finish(study, table, records, out, quick=quick)


def finish(
    study: Study, table: Sequence[Mapping[str, object]], records: tuple[RunRecord, ...], out: Path, *, quick: bool
) -> StudyResult:
    """Write table.csv, result.json, the figure and the report."""
    from vitkit.studies.figures import save_figures  # noqa: PLC0415  plans need no torch
    from vitkit.studies.page import render_study  # noqa: PLC0415  plans need no torch

    failed = [record for record in records if record.status == "failed"]
    warnings = [f"{record.name} failed: {record.error}" for record in failed]
    if quick or study.seeds < 2:
        warnings.append(ONE_SEED)
    result = StudyResult(
        study=study,
        quick=quick,
        runs=records,
        claims=tuple(evaluate_claim(claim, table) for claim in study.claims),
        table=tuple(table),
        warnings=tuple(warnings),
        report_path=out / "report.html",
    )
    write_csv(out / "table.csv", result.table, study.columns)
    write_text(out / "result.json", json.dumps(result.to_dict(), indent=2) + "\n")
    save_figures(study, result.table, out)
    write_text(out / "report.html", render_study(result))
    return result


def inspect_runs(study: Study, *, out: Path, data: Mapping[str, str]) -> StudyResult:
    """Measure the attention distance of the checkpoints of another study."""
    from vitkit.studies.worker import measure_distances  # noqa: PLC0415  plans need no torch
    from vitkit.training.run_dir import RunDir  # noqa: PLC0415  plans need no torch
    from vitkit.weights.load import load_bundle  # noqa: PLC0415  plans need no torch

    directory = Path(data["runs"])
    found = sorted(path for path in (directory / "runs").glob("*") if RunDir(path).summary.exists())
    if not found:
        raise DataError(
            f"{directory} has no finished runs",
            expected="the --out directory of a study",
            hint=f"vitkit study {study.inspects} --out {shlex.quote(str(directory))}",
        )
    table, records = list[dict[str, object]](), list[RunRecord]()
    for path in found:
        config: Any = load_bundle(str(path)).config
        if not hasattr(config, "heads") or config.block.axial:
            continue
        family = "hybrid" if config.backbone else "ViT"
        seed = int(path.name.rpartition("seed")[2] or 0)
        rows = measure_distances(path, data["upstream"])
        table += [{"run": path.name, "family": family, SEED: seed} | row for row in rows]
        records.append(RunRecord(name=path.name, settings={}, status="finished", path=path, pflops=0.0))
    out.mkdir(parents=True, exist_ok=True)
    result = finish(study, table, tuple(records), out, quick=False)
    return replace(result, warnings=result.warnings)
