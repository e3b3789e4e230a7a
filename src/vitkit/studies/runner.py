"""Runner of studies: plans, executes what is not finished, tests the claims and writes the report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.core.config import flatten_settings, from_mapping, to_mapping
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.files import write_csv, write_text
from vitkit.core.formatting import format_plural, format_value
from vitkit.core.lock import lock_directory
from vitkit.core.result import Result, select
from vitkit.core.signals import StopFlag
from vitkit.studies.claims import ClaimResult, evaluate_claim
from vitkit.studies.dispatch import Dispatcher
from vitkit.studies.plan import StudyRun, plan_runs
from vitkit.studies.records import RunRecord, list_checkpoints, make_table, measure_rate, probe_rate, record_run
from vitkit.studies.study import ONE_SEED, RUNS, Settings, Study
from vitkit.training.callbacks import Callback
from vitkit.training.config import RunConfig

if TYPE_CHECKING:
    import matplotlib.figure

    from vitkit.report.figures import Chart


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class StudyResult(Result):
    """Runs, claims with verdicts, and the table of a study.

    `rate` is in PFLOPs per hour, `steps` the fewest and the most steps of a run.
    """

    study: Study
    quick: bool
    runs: tuple[RunRecord, ...]
    rate: float
    steps: tuple[int, int] | None = None
    claims: tuple[ClaimResult, ...] = ()
    table: tuple[Mapping[str, object], ...] = ()
    report_path: Path | None = None

    @property
    def pflops(self) -> float:
        """PFLOPs of all runs, without early stopping."""
        return sum((run.pflops for run in self.runs), 0.0)

    @property
    def hours(self) -> float:
        """Estimated hours of the runs that are not finished, on this machine."""
        return sum((run.pflops for run in self.runs if run.status != "finished"), 0.0) / self.rate

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return sum(run.status == "finished" for run in self.runs)

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit study NAME --json` prints."""
        plain: dict[str, object] = {"study": self.study.name, "title": self.study.title}
        plain |= select(self, "quick", "steps", "pflops") | {"hours_left": self.hours}
        return plain | select(self, "claims", "runs", "table", "warnings")

    def highlights(self) -> dict[str, object]:
        """Return the study, the number of finished runs and the verdicts."""
        verdicts = "; ".join(claim.verdict for claim in self.claims)
        return {"study": self.study.name, "runs": f"{self.finished}/{len(self.runs)}", "claims": verdicts}

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw the paper's figure."""
        from vitkit.studies.figures import draw_figure  # noqa: PLC0415  matplotlib is slow to import

        return draw_figure(self.study, self.table)


def plan_study(
    study: Study, *, out: Path, data: Mapping[str, str], settings: Settings, quick: bool, rate: float | None = None
) -> StudyResult:
    """Return the runs and their cost; nothing is started or written. `rate` is that of no finished run, if known."""
    if study.inspects:
        records = tuple(list_checkpoints(study, data)) if RUNS in data else ()
        return StudyResult(study=study, quick=quick, runs=records, rate=1.0)
    runs = plan_runs(study, data=data, settings=settings, quick=quick)
    return summarize_runs(study, runs, out=out, quick=quick, jobs=1, rate=rate or expect_rate(runs, jobs=1))


def expect_rate(runs: Sequence[StudyRun], *, jobs: int) -> float:
    """Return the PFLOPs per hour that are expected before any run has finished."""
    threads = next((run.config.parallel.threads for run in runs), None)
    return probe_rate(threads=threads, jobs=jobs)


def summarize_runs(
    study: Study, runs: Sequence[StudyRun], *, out: Path, quick: bool, jobs: int, rate: float
) -> StudyResult:
    """Return the state of the runs; once one is finished, the rate is the measured one."""
    measured, records = measure_rate(runs, out), tuple(record_run(run, out) for run in runs)
    study = study.make_quick() if quick else study
    steps = [run.config.schedule.steps for run in runs if run.config.schedule.steps is not None]
    return StudyResult(
        study=study,
        quick=quick,
        runs=records,
        rate=measured * jobs if measured else rate,
        steps=(min(steps), max(steps)) if steps else None,
    )


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
    """Run everything that is not finished, and write the report. Raise `StopRequested` after a stop."""
    callback, stop = callback or Callback(), stop or StopFlag()
    check_inputs(study, data, quick=quick)
    if study.inspects:
        from vitkit.studies.inspected import inspect_checkpoints  # noqa: PLC0415  plans need no torch

        return inspect_checkpoints(study, out=out, data=data, callback=callback, stop=stop)
    with claim_study(study, out=out, data=data, settings=settings, quick=quick, callback=callback, stop=stop) as runs:
        rate = expect_rate(runs, jobs=jobs)

        def summarize() -> StudyResult:
            return summarize_runs(study, runs, out=out, quick=quick, jobs=jobs, rate=rate)

        def write() -> StudyResult:
            return write_outputs(summarize(), make_table(study, runs, out), out)

        dispatcher = Dispatcher(
            out=out,
            runs=runs,
            data=data,
            jobs=jobs,
            callback=callback,
            stop=stop,
            isolate=isolate,
            report=write,
            hours_left=lambda: summarize().hours,
        )
        if dispatcher.pending:
            write()
        dispatcher.run()
        return write()


def export_study(
    study: Study,
    *,
    out: Path,
    data: Mapping[str, str],
    settings: Settings,
    quick: bool = False,
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> StudyResult:
    """Write the runs that are not finished as recipes, for a cluster; nothing is started.

    A run that was trained in its directory by its recipe is only measured when the study runs.
    """
    from vitkit.studies.export import write_recipes  # noqa: PLC0415  plans need no torch

    callback, stop = callback or Callback(), stop or StopFlag()
    if study.inspects:
        raise ConfigError(f"{study.name} trains nothing, so it has no recipes", hint="leave out --recipes")
    check_inputs(study, data, quick=quick)
    with claim_study(study, out=out, data=data, settings=settings, quick=quick, callback=callback, stop=stop) as runs:
        waiting = write_recipes(study, runs, out, data=data)
        result = summarize_runs(study, runs, out=out, quick=quick, jobs=1, rate=expect_rate(runs, jobs=1))
    if not waiting:
        return result
    warning = f"{format_plural(len(waiting), 'run')} without a recipe, such as {waiting[0]}: others choose the rate"
    return replace(result, warnings=(f"{warning}; write the recipes again when these are finished",))


def check_inputs(study: Study, data: Mapping[str, str], *, quick: bool) -> None:
    """Raise an error if the study is inconsistent, or if data that it needs are missing or incomplete."""
    from vitkit.studies.worker import check_data  # noqa: PLC0415  plans need no torch

    study.check()
    check_data(data, study, needed=(study.make_quick() if quick else study).data)


@contextmanager
def claim_study(
    study: Study,
    *,
    out: Path,
    data: Mapping[str, str],
    settings: Settings,
    quick: bool,
    callback: Callback,
    stop: StopFlag,
) -> Iterator[list[StudyRun]]:
    """Lock the directory of a study, write or compare its plan, and search copies of test images. Yield the runs."""
    from vitkit.studies.duplicates import exclude_duplicates  # noqa: PLC0415  plans need no torch

    runs = plan_runs(study, data=data, settings=settings, quick=quick)
    create_directory(out)
    with lock_directory(out):
        check_same_study(out, study, runs, data=data)
        exclude_duplicates(out, data, study.make_quick() if quick else study, callback=callback, stop=stop)
        yield runs


def create_directory(out: Path) -> None:
    """Create the directory of a study, if it does not exist."""
    hint = "choose another out (--out)"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise TrainingError(f"{out} is a file", expected="a directory", hint=hint) from error
    except OSError as error:
        raise TrainingError(f"{out}: {error.strerror}", hint=hint) from error


def check_same_study(out: Path, study: Study, runs: Sequence[StudyRun], *, data: Mapping[str, str]) -> None:
    """Write the plan, or raise ConfigError if the directory holds a study with other runs, measures or claims.

    Settings that do not decide results, such as threads and loader processes, may change, and so may the name: two
    studies can be figures of the same runs.
    """
    from vitkit.training.run_dir import reproducibility_key  # noqa: PLC0415  plans need no torch

    file = out / "study.json"
    plan = {
        run.name: {"labels": dict(run.labels), "seed": run.seed, "counts": run.counts, "needs": list(run.needs)}
        | {"config": to_mapping(reproducibility_key(run.config))}
        for run in runs
    }
    content: Any = {"study": study.name, "data": dict(data), "runs": plan}
    content["measures"] = [asdict(measure) for measure in study.measures]
    content["claims"] = [asdict(claim) for claim in study.claims]
    content = json.loads(json.dumps(content))
    if not file.exists():
        if others := sorted(path.name for path in out.iterdir() if not path.name.startswith(".")):
            raise TrainingError(f"{out} holds other files: {', '.join(others[:3])}", hint="choose another out")
        write_text(file, json.dumps(content, indent=1) + "\n")
        return
    try:
        before = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise TrainingError(f"{file}: damaged", hint="restore the file, or choose another out") from error
    complete_configs(before)
    if before | {"study": study.name} != content:
        raise ConfigError(
            f"{out} holds another study: {describe_change(before, content)}",
            hint="choose another out, or repeat the study, data, --quick and settings to resume",
        )


def complete_configs(plan: dict[str, Any]) -> None:
    """Add the defaults of settings that an older version of vitkit did not have."""
    for run in plan.get("runs", {}).values():
        with suppress(ConfigError, KeyError, TypeError):  # a setting that is gone: the plans differ
            run["config"] = json.loads(json.dumps(to_mapping(from_mapping(RunConfig, run["config"]))))


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe in what two plans differ.

    >>> describe_change({"study": "a", "runs": {}}, {"study": "b", "runs": {}})
    'its name differs'
    """
    old, new = before.get("runs", {}), now["runs"]
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    if before.get("study") != now["study"]:
        return "its name differs"
    if changed:
        name = changed[0]
        detail = f" ({describe_difference(old[name], new[name])})" if name in old and name in new else ""
        return f"{len(changed)} of its runs differ, such as {name}{detail}"
    if before.get("claims") != now["claims"]:
        return "its claims differ, which are written before the first run"
    if before.get("data") != now["data"]:
        return f"its data differ ({describe_difference(before.get('data', {}), now['data'])})"
    return "its measures differ"


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first value in which two runs differ.

    >>> describe_difference({"config": {"seed": 1}}, {"config": {"seed": 2}})
    'seed=1, not 2'
    """
    old, new = flatten_settings(before), flatten_settings(now)
    key = next(key for key in old | new if old.get(key) != new.get(key))
    return f"{key.removeprefix('config.')}={format_value(old.get(key))}, not {format_value(new.get(key))}"


def write_outputs(
    planned: StudyResult,
    table: Sequence[Mapping[str, object]],
    out: Path,
    *,
    drawings: "Mapping[str, Sequence[tuple[str, Chart]]] | None" = None,
) -> StudyResult:
    """Test the claims on what is finished so far, and write table.csv, result.json, the figure and the report.

    `drawings` are further ones for the report, by model.
    """
    from vitkit.studies.figures import save_figures  # noqa: PLC0415  plans need no torch
    from vitkit.studies.page import render_study  # noqa: PLC0415  plans need no torch

    study = planned.study
    warnings = [f"{record.name} failed: {record.error}" for record in planned.runs if record.status == "failed"]
    if (planned.quick or study.seeds < 2) and not study.inspects:
        remedy = "run the study without --quick" if planned.quick else "give the study more"
        warnings.append(f"{ONE_SEED}: {remedy}")
    rows = study.spread_base(table)
    result = replace(
        planned,
        claims=tuple(evaluate_claim(claim, rows) for claim in study.claims),
        table=tuple(table),
        warnings=tuple(warnings),
        report_path=out / "report.html",
    )
    write_csv(out / "table.csv", result.table, study.columns)
    write_text(out / "result.json", json.dumps(result.to_dict(), indent=2) + "\n")
    save_figures(study, result.table, out)
    write_text(out / "report.html", render_study(result, drawings=drawings or {}))
    return result
