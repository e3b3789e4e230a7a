"""One run of a study: train it in its run directory, measure it, and write its result; also as a process of its own.

The process reads the name of a file from its arguments, and ends when its standard input ends, so that no run outlives
a study that was killed.
"""

import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from vitkit.core.errors import DataError, VitkitError, did_you_mean
from vitkit.core.files import write_text
from vitkit.core.signals import EXIT_INTERRUPTED, StopFlag, catch_stop_signals
from vitkit.data.dataset import ImageSource, subsample
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import read_bad_files
from vitkit.evaluation.features import LabeledFeatures, compute_features
from vitkit.evaluation.fewshot import fewshot_splits, score_shots
from vitkit.studies.duplicates import duplicates_file
from vitkit.studies.plan import StudyRun
from vitkit.studies.records import explain_failure, read_record, result_file, run_path
from vitkit.studies.study import RUNS, FewShot, Study
from vitkit.training.callbacks import Callback
from vitkit.training.config import RunConfig
from vitkit.training.run import run_training
from vitkit.training.suite import VAL_AS_TEST
from vitkit.weights.load import load_bundle

POOL, TEST_IMAGES = 50, 2000
"""Images per class that shots are drawn from, and test images, of which features are computed."""
STDIN = 0
DRAWS_PER_SEED = 1000
"""Distance between the draws of two seeds."""


@dataclass(frozen=True, kw_only=True)
class StudyJob:
    """A run with everything that was decided before it starts."""

    config: RunConfig
    run_dir: Path
    result_file: Path
    seed: int
    measures: tuple[FewShot, ...]
    data: Mapping[str, str]

    def to_json(self) -> str:
        """Return the job as JSON, from which `read_job` builds an equal one."""
        return json.dumps(asdict(self), default=str)


def read_job(text: str) -> StudyJob:
    """Parse a job."""
    return TypeAdapter(StudyJob).validate_python(json.loads(text))


def make_job(run: StudyRun, out: Path, *, data: Mapping[str, str]) -> StudyJob:
    """Return the job of a run whose needs are finished: its learning rate and initial weights are known now."""
    config, directory = adapt_data(run.config, out, data=data), run.name
    if run.rates:
        results = {name: (read_record(out, name) or {})["result"] for _, name in run.rates}
        lr, best = max(run.rates, key=lambda pair: rank(results[pair[1]]))
        config = config.override({"lr": lr})
        directory = best if run.is_tuned_here else directory
    if run.init is not None:
        init = str(run_path(out, run.init, read_record(out, run.init)))
        model = replace(config.model, name=None, patch_size=None, settings=(), init=init, new_head=True)
        config = replace(config, model=model)
    return StudyJob(
        config=config,
        run_dir=out / "runs" / directory,
        result_file=result_file(out, run.name),
        seed=run.seed,
        measures=run.measures,
        data=data,
    )


def adapt_data(config: RunConfig, out: Path, *, data: Mapping[str, str]) -> RunConfig:
    """Return a configuration that fits its data: without copies of test images, and val as test where there is none."""
    settings: dict[str, object] = {}
    if config.data.layout == VAL_AS_TEST and not has_only_val(config.data.path):
        settings["data.layout"] = None
    for name, path in data.items():
        file = duplicates_file(out, name)
        if config.data.path == path and file.exists() and read_bad_files(file):
            settings["data.exclude"] = str(file)
    return config.override(settings) if settings else config


@functools.cache
def has_only_val(path: str) -> bool:
    """Return whether a dataset has a validation split and no test split."""
    splits = open_dataset(path).splits
    return "val" in splits and "test" not in splits


def rank(result: Mapping[str, Any]) -> tuple[float, float]:
    """Return what the best learning rate has the largest of: the accuracy on held-out images, then the negative loss.

    >>> rank({"val_top1": 0.5, "val_loss": 1.2}) > rank({"val_top1": None, "val_loss": 0.1})
    True
    """
    top1, loss = result["val_top1"], result["val_loss"]
    return (-1.0 if top1 is None else top1, -math.inf if loss is None else -loss)


def execute(job: StudyJob, *, callback: Callback, stop: StopFlag) -> bool:
    """Train and measure. Return False if a stop was requested; everything is saved in that case."""
    start = time.monotonic()
    summary: Any = run_training(job.config, job.run_dir, callback=callback, stop=stop).summary
    if summary is None:
        return False
    validation, result, compute = summary["validation"] or {}, summary["result"] or {}, summary["compute"]
    record: dict[str, object] = {
        "lr": job.config.schedule.lr,
        "val_top1": validation.get("val_top1"),
        "val_loss": validation.get("val_loss"),
        "top1": result.get("top1"),
        "flops": compute["exaflops"] * 1e18,
    }
    for measure in job.measures:
        record |= measure_shots(job, measure)
    # The speed depends on the machine and is kept apart, so that the rest is equal after a kill.
    hours = (compute["seconds"] or 0.0) / 3600
    wall_hours = max(hours, (time.monotonic() - start) / 3600)
    speed = {"images_per_second": compute["images_per_second"], "hours": hours, "wall_hours": wall_hours}
    job.result_file.parent.mkdir(parents=True, exist_ok=True)
    content = {"directory": job.run_dir.name, "result": record, "speed": speed}
    write_text(job.result_file, json.dumps(content, indent=2) + "\n")
    return True


def measure_shots(job: StudyJob, measure: FewShot) -> dict[str, object]:
    """Return the mean few-shot accuracy over the draws of the run's seed, by column."""
    bundle = load_bundle(str(job.run_dir))
    train, test = fewshot_splits(open_dataset(job.data[measure.data]))
    num_classes = len(train.classes)
    pool = limit_images(train, max(POOL, 2 * max(measure.shots)) * num_classes)

    def labeled(source: ImageSource) -> LabeledFeatures:
        features = compute_features(bundle, source, directory=job.run_dir / "features", workers=0)
        return LabeledFeatures.from_arrays(features, source.labels)

    first = DRAWS_PER_SEED * job.seed
    scores = score_shots(
        labeled(pool),
        labeled(limit_images(test, TEST_IMAGES)),
        num_classes=num_classes,
        shots=measure.shots,
        seeds=range(first, first + measure.draws),
    )
    return {column: scores[shots].mean for column, shots in zip(measure.columns, measure.shots, strict=True)}


def limit_images(source: ImageSource, count: int) -> ImageSource:
    """Return about `count` images, the same fraction of each class for every run."""
    return source if len(source) <= count else subsample(source, fraction=count / len(source), salt="few-shot ")


def check_data(data: Mapping[str, str], study: Study, *, needed: Sequence[str]) -> None:
    """Raise an error that names the data a study needs, before anything starts."""
    for name in needed:
        if name not in data:
            raise DataError(
                f"{study.name} needs the data {name!r}, which is not given",
                expected=f"data.{name}=PATH, a labeled dataset in any layout",
                hint=f"vitkit study {study.name} --out DIR {' '.join(f'data.{each}=PATH' for each in needed)}",
            )
    if unknown := [name for name in data if name not in study.data]:
        hint = did_you_mean(unknown[0], study.data) or f"its data are {', '.join(study.data)}"
        raise DataError(f"{study.name} has no data called {unknown[0]!r}", hint=hint)
    shots = {measure.data: max(measure.shots) for measure in study.measures}
    for name in needed:
        if name != RUNS:
            check_images(data[name], shots=shots.get(name, 0))


def check_images(path: str, *, shots: int) -> None:
    """Raise DataError if a dataset has no labels, an empty split, or a class with too few images for the shots."""
    dataset = open_dataset(path)
    if not dataset.classes or min(map(len, dataset.splits.values())) == 0:
        raise DataError(f"{path}: no labeled images", hint="download the dataset again, and vitkit data check")
    if shots:
        train, _ = fewshot_splits(dataset)
        counts = np.bincount(train.labels, minlength=len(dataset.classes))
        if counts.min() < shots:
            raise DataError(
                f"{path}: the class {dataset.classes[int(counts.argmin())]} has {counts.min()} training images",
                expected=f"at least {shots} for few-shot accuracy",
                hint="download the dataset again: files are missing",
            )


def end_with_parent() -> None:
    """End this process when its standard input ends, which the parent holds open."""

    def wait() -> None:
        # Not sys.stdin: a forked process closes it, and would wait forever for the lock that this thread holds.
        while os.read(STDIN, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Run the job of a file."""
    end_with_parent()
    job = read_job(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with catch_stop_signals() as stop:
        try:
            return 0 if execute(job, callback=Callback(), stop=stop) else EXIT_INTERRUPTED
        except VitkitError as error:
            reason = explain_failure(error)
        except (MemoryError, RuntimeError) as error:  # torch's allocator raises no MemoryError
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            reason = "out of memory: lower schedule.batch_size or --jobs"
    sys.stderr.write(reason + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
