"""Suites: several models, each fine-tuned and evaluated on several datasets.

A task is one model on one dataset: a sweep with a final run, or the evaluation of a model that another task trained.
Every task has a directory of its own, so a suite resumes, and finished tasks are not run again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.core.errors import ConfigError, DataError, TrainingError, summarize
from vitkit.core.files import write_json
from vitkit.core.formatting import format_clock
from vitkit.core.result import to_json
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.verify import skip_unreadable
from vitkit.evaluation.evaluation import choose_split
from vitkit.evaluation.leaderboard import LeaderboardScore
from vitkit.evaluation.protocols import Protocol, evaluate_protocol, prepare
from vitkit.training.build import resolve_workers
from vitkit.training.callbacks import Callback
from vitkit.training.config import ParallelConfig, RunConfig
from vitkit.training.data import open_config_dataset
from vitkit.training.distributed import Ranks, join_ranks, run_on_main
from vitkit.training.run import SWEEP_FILE, run_sweep, run_training, with_lr
from vitkit.training.run_dir import TRIALS_DIR, RunDir
from vitkit.weights.load import load_bundle

VAL_AS_TEST = "val-as-test"
INITIAL_WEIGHTS = "init"
"""`model_from` of a task that evaluates the initial weights."""
EVALUATION_FILE = "evaluation.json"
ASSUMED_STEPS = 1000
"""Steps of a run whose length is set in epochs, for the estimate of the time left."""


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One model on one dataset.

    Args:
        rates: Learning rates to try on held-out images; the final run is on all training images.
        model_from: Evaluate only: the model fine-tuned on this dataset, or "init" for the initial weights.
        protocol: Evaluation protocol of a task with `model_from`.
    """

    dataset: str
    model: str
    config: RunConfig
    rates: tuple[float, ...] = ()
    model_from: str | None = None
    protocol: Protocol = Protocol()

    @property
    def steps(self) -> int:
        """Number of training steps, for the estimate of the time left."""
        runs = len(self.rates) + 1 if len(self.rates) > 1 else 1
        return 0 if self.model_from else runs * (self.config.schedule.steps or ASSUMED_STEPS)

    def with_layout(self, layout: str | None) -> "SuiteTask":
        """Return the task with another layout of the dataset."""
        return replace(self, config=replace(self.config, data=replace(self.config.data, layout=layout)))


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """Accuracies by dataset and model, and whether all tasks are finished."""

    scores: Mapping[tuple[str, str], LeaderboardScore]
    finished: bool


def task_dir(task: SuiteTask, out: Path) -> Path:
    """Return the directory of a task."""
    return out / "runs" / task.model / task.dataset


def check_tasks(tasks: Sequence[SuiteTask], out: Path) -> list[SuiteTask]:
    """Return the tasks with their layouts resolved; raise errors that otherwise would show after hours."""
    trained = {(task.dataset, task.model) for task in tasks if task.model_from is None}
    layouts: dict[str, str | None] = {}
    for task in tasks:
        if task.model_from is None:
            if task.dataset not in layouts:
                layouts[task.dataset] = choose_layout(task, out)
            path = task_dir(task, out)
            if len(task.rates) > 1 and RunDir(path).config.exists() and not (path / TRIALS_DIR).exists():
                raise ConfigError(
                    f"{path} holds a run with a single learning rate",
                    got=f"rates {', '.join(f'{rate:g}' for rate in task.rates)}",
                    hint="choose another out (--out), or give that rate alone to resume this one",
                )
        elif (
            task.model_from != INITIAL_WEIGHTS
            and (task.model_from, task.model) not in trained
            and RunDir(task_dir(replace(task, dataset=task.model_from), out)).read_summary() is None
        ):
            raise ConfigError(
                f"{task.dataset} evaluates the model of {task.model_from}, which is not trained here",
                expected=" or ".join(sorted({name for name, _ in trained} | {INITIAL_WEIGHTS})),
            )
    return [task if task.model_from else task.with_layout(layouts[task.dataset]) for task in tasks]


def choose_layout(task: SuiteTask, out: Path) -> str | None:
    """Return the layout of a dataset; without a test split, validation becomes the test split, as in papers."""
    data, run_dir = task.config.data, RunDir(task_dir(task, out))
    if run_dir.config.exists():  # if the layout changed, `check_same_settings` and the run raise the error
        was_val_as_test = data.layout is None and run_dir.read_config().data.layout == VAL_AS_TEST
        return VAL_AS_TEST if was_val_as_test else data.layout
    splits = open_config_dataset(data).splits
    if "test" in splits:
        return data.layout
    if "val" in splits and data.layout is None:
        return VAL_AS_TEST
    raise DataError(
        f"{task.dataset}: {data.path} has no images for evaluation",
        expected="a split called test, or val",
        got=", ".join(splits),
        hint="put some images of each class in a directory called test",
    )


def run_suite(
    tasks: Sequence[SuiteTask],
    out: Path | str,
    *,
    parallel: ParallelConfig,
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> SuiteResult:
    """Run every task that is not finished, one after the other; a stopped suite is saved and can be resumed."""
    out, stop = Path(out), stop or StopFlag()
    scores: dict[tuple[str, str], LeaderboardScore] = {}
    with join_ranks(parallel) as ranks:
        callback = callback if callback and ranks.is_main else Callback()
        tasks = check_tasks(tasks, out)
        steps_done, start = 0, time.monotonic()
        steps_left = sum(task.steps for task in tasks if read_score(task, out) is None)
        for number, task in enumerate(tasks, start=1):
            score = read_score(task, out)
            if score is None:
                seconds_per_step = (time.monotonic() - start) / steps_done if steps_done else 0.0
                time_left = f"; about {format_clock(seconds_per_step * steps_left)} left" if seconds_per_step else ""
                callback.on_message(f"task {number} of {len(tasks)}: {task.model} on {task.dataset}{time_left}")
                if not run_task(task, out, ranks=ranks, callback=callback, stop=stop):
                    return SuiteResult(scores=scores, finished=False)
                score = read_score(task, out)
                steps_done, steps_left = steps_done + task.steps, steps_left - task.steps
            else:
                check_same_settings(task, out)
            if score is None:
                raise TrainingError(f"{task_dir(task, out)}: the run was not evaluated", hint="it had no test images")
            scores[task.dataset, task.model] = score
    return SuiteResult(scores=scores, finished=True)


def run_task(task: SuiteTask, out: Path, *, ranks: Ranks, callback: Callback, stop: StopFlag) -> bool:
    """Fine-tune with a sweep if there are several rates, or evaluate. Return False if a stop was requested."""
    if task.model_from is None:
        path = task_dir(task, out)
        if len(task.rates) > 1:
            result = run_sweep(task.config, task.rates, path, callback=callback, stop=stop)
        else:
            result = run_training(final_config(task, *task.rates), path, callback=callback, stop=stop)
        return result.summary is not None
    try:
        run_on_main(
            ranks,
            lambda heartbeat: evaluate_task(task, out, ranks=ranks, callback=callback, stop=stop, heartbeat=heartbeat),
        )
    except StopRequested:
        return False
    return True


def final_config(task: SuiteTask, lr: float | None = None) -> RunConfig:
    """Return the configuration of the run on all training images, at the chosen learning rate."""
    config = task.config if lr is None else with_lr(task.config, lr)
    return replace(config, data=replace(config.data, train_on="all"))


def check_same_settings(task: SuiteTask, out: Path) -> None:
    """Raise an error if a finished run has other settings or learning rates than this task."""
    run_dir, rates = RunDir(task_dir(task, out)), task.rates
    if task.model_from is not None:
        return  # `read_score` has compared
    if len(rates) > 1:
        record = json.loads((run_dir.path / SWEEP_FILE).read_bytes())
        if (old_rates := [trial["lr"] for trial in record["trials"]]) != list(rates):
            raise ConfigError(
                f"{run_dir.path} holds a sweep of other learning rates",
                expected=old_rates,
                got=list(rates),
                hint="choose another out (--out), or give the same rates to resume this one",
            )
        rates = (record["chosen"],)
    run_dir.claim(final_config(task, *rates))


def read_finished(
    tasks: Sequence[SuiteTask], out: Path | str
) -> tuple[dict[tuple[str, str], LeaderboardScore], list[str]]:
    """Return the accuracies of tasks that are finished, and an error message for each with other settings."""
    out, scores, errors = Path(out), {}, []
    for task in tasks:
        try:
            score = read_score(task, out)
            if score is not None:
                layout = task.config.data.layout if task.model_from else choose_layout(task, out)
                check_same_settings(task.with_layout(layout), out)
                scores[task.dataset, task.model] = score
        except ConfigError as error:
            errors.append(summarize(error))
    return scores, errors


def evaluate_task(
    task: SuiteTask, out: Path, *, ranks: Ranks, callback: Callback, stop: StopFlag, heartbeat: Callable[[], None]
) -> None:
    """Evaluate the model of a task by its protocol, and write the result."""
    data, trained = task.config.data, task_dir(replace(task, dataset=task.model_from or ""), out)
    bundle = load_bundle(task.config.model.init or "" if task.model_from == INITIAL_WEIGHTS else trained)
    split, source = choose_split(open_config_dataset(data))
    prepared = prepare(task.protocol, source, bundle=bundle, path=data.path)
    workers = resolve_workers(task.config)

    def on_progress(images: int) -> None:
        callback.on_progress(images)
        heartbeat()
        stop.raise_if_requested()

    readable = prepared.source
    if not readable.always_readable:
        callback.on_task("checking images", len(readable))
        readable, _ = skip_unreadable(
            readable,
            path=data.path,
            channels=bundle.preprocessing.channels,
            workers=workers,
            progress=on_progress,
            warn=callback.on_warning,
        )
    callback.on_task(f"evaluating on {task.dataset}", len(readable))
    result = evaluate_protocol(
        bundle, replace(prepared, source=readable), workers=workers, device=ranks.device, progress=on_progress
    )
    path = task_dir(task, out)
    path.mkdir(parents=True, exist_ok=True)
    record: dict[str, object] = {
        "key": evaluation_key(task),
        "evaluated_on": split,
        "left_out": prepared.left_out,
        "result": result.to_dict(),
    }
    record |= {} if result.real is None else {"real": to_json(result.real)}
    write_json(path / EVALUATION_FILE, record)


def evaluation_key(task: SuiteTask) -> dict[str, object]:
    """Return the settings that decide the result of an evaluation."""
    init = {"init": task.config.model.init} if task.model_from == INITIAL_WEIGHTS else {}
    data = {"data": task.config.data.path, "layout": task.config.data.layout}
    return {"model_from": task.model_from} | init | data | vars(task.protocol)


def read_score(task: SuiteTask, out: Path) -> LeaderboardScore | None:
    """Return the accuracy of a finished task; None if it is not finished."""
    path = task_dir(task, out)
    if task.model_from is None:
        if len(task.rates) > 1 and not (path / SWEEP_FILE).exists():
            return None
        return parse_score((RunDir(path).read_summary() or {}).get("result"))
    file, hint = path / EVALUATION_FILE, "delete the file and run again"
    try:
        record = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TrainingError(f"{file}: damaged", hint=hint) from error
    if not isinstance(record, dict) or not {"key", "result"} <= record.keys():
        raise TrainingError(f"{file}: not an evaluation of a suite", hint=hint)
    if record["key"] != evaluation_key(task):
        raise ConfigError(
            f"{path} holds another evaluation",
            expected=record["key"],
            got=evaluation_key(task),
            hint="choose another out (--out)",
        )
    return parse_score(record.get("real") or record["result"])


def parse_score(result: object) -> LeaderboardScore | None:
    """Return the accuracy in the JSON of an evaluation, with ReaL labels or others."""
    if not isinstance(result, Mapping):
        return None
    low, high = result["interval"] if "interval" in result else result["intervals"]["top1"]
    return LeaderboardScore(top1=result["top1"], interval=(low, high), count=result["count"])
