"""Run directory and logs: files of one run, new, interrupted or finished.

config.toml            format version and resolved configuration
decisions.json         what was chosen for the user, and why
trials.json, trials/   what was tried within a time budget before the final run; probe/ is the first model
model.json             description of the model, for its checkpoints
data.json              sizes and fingerprints of the splits
data-train.npz …       name, label, file status and checksum of each image of a split
bad_files.csv          unreadable images and the reasons
metrics.jsonl          log that every repetition of the run reproduces
speed.jsonl            log of the speed, which depends on the machine
checkpoints/           states to resume from
model.safetensors …    the artifact
report.html            the report
confusion.npz          images by true class (row) and predicted class (column), for the pairs that occur
predictions.npz        target, prediction and probabilities of each image that the model was evaluated on
reconstructions.png    predictions of a self-supervised run at the last evaluation
summary.json           the result; a run that has one is finished
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitkit.core import metrics_log
from vitkit.core.config import flatten_settings, load_toml, to_mapping, to_toml
from vitkit.core.errors import ConfigError, DataError, MissingDependencyError, TrainingError
from vitkit.core.files import remove_empty_directories, remove_temporary_files, write_json, write_text
from vitkit.core.lock import lock_directory
from vitkit.core.metrics_log import MetricsLog, MetricsRecord
from vitkit.core.signals import StopFlag
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.pairs import is_pairs_path
from vitkit.training.budget import Selection
from vitkit.training.callbacks import Callback
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    RunConfig,
)
from vitkit.training.distributed import Ranks, run_on_main
from vitkit.weights import run_checkpoint

FORMAT_VERSION = 2
"""Version of the files in a run directory, in the first line of config.toml."""
VERSION_LINE = "# vitkit run directory, format version "
TRIALS_DIR = "sweep"
"""Directory of the trials of a sweep in that of the final run."""
AUTO_DIR = "trials"
"""Directory of the trials of a time budget."""
FINGERPRINT_PREFIX = "data-"
"""Prefix of the files with the fingerprints of splits."""
MODEL_DIRS = ("init-", "teacher-")
"""Prefixes of the directories of models that were given in memory."""


class RunDir:
    """Paths of a run's files."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.decisions = self.path / "decisions.json"
        self.trials = self.path / "trials.json"
        self.model = self.path / run_checkpoint.DESCRIPTION
        self.data = self.path / "data.json"
        self.bad_files = self.path / "bad_files.csv"
        self.metrics = self.path / "metrics.jsonl"
        self.speed = self.path / "speed.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.predictions = self.path / "predictions.npz"
        self.confusion = self.path / "confusion.npz"
        self.reconstructions = self.path / "reconstructions.png"

    def read_config(self) -> RunConfig:
        """Return the configuration; a directory of another format version is an error."""
        self._check_version()
        return load_toml(self.config, RunConfig, recipes={})

    def read_summary(self) -> dict[str, object] | None:
        """Return the summary of a finished run; None if it is not finished."""
        try:
            summary: dict[str, object] = json.loads(self.summary.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise TrainingError(f"{self.summary}: damaged", hint="delete the file and run again") from error
        self._check_version()
        return summary

    def create(self) -> None:
        """Create the directory, if it does not exist."""
        hint = "choose another out (--out)"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise TrainingError(f"{self.path} is a file", expected="a directory", hint=hint) from error
        except OSError as error:
            raise TrainingError(f"{self.path}: {error.strerror}", hint=hint) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise TrainingError(f"{self.path}: the directory is not writable", hint=hint)

    def claim(self, config: RunConfig, *, decisions: Sequence[str] = ()) -> None:
        """Create the directory for this run, or check that it holds the same run; any other content is an error."""
        self.create()
        if self.config.exists():
            self._check_same_run(config)
            remove_temporary_files(self.path)
            return
        if others := self.find_other_files():
            raise TrainingError(
                f"{self.path} holds other files: {', '.join(others[:3])}{' …' if len(others) > 3 else ''}",
                expected="a new or empty directory, or that of an earlier run",
                hint="choose another out (--out)",
            )
        if decisions:
            write_json(self.decisions, decisions)
        self.write_config(config)

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration with the format version."""
        write_text(self.config, f"{VERSION_LINE}{FORMAT_VERSION}\n\n{to_toml(config)}")

    def find_other_files(self) -> list[str]:
        """Return the files in a directory without a run that are not written before its configuration."""
        if self.trials.exists():  # a time budget has claimed the directory
            return []
        prefixes, names = (".", *MODEL_DIRS), (TRIALS_DIR, self.decisions.name)
        files = (path.name for path in self.path.iterdir())
        return sorted(name for name in files if not name.startswith(prefixes) and name not in names)

    def _check_version(self) -> None:
        if not self.config.exists():
            return
        with self.config.open(encoding="utf-8", errors="replace") as file:
            line = file.readline().strip()
        version = line.removeprefix(VERSION_LINE) if line.startswith(VERSION_LINE) else "1"
        if version != str(FORMAT_VERSION):
            raise TrainingError(
                f"{self.path} is a run of another version of vitkit",
                expected=f"format version {FORMAT_VERSION}",
                got=version,
                hint="train again with another --out; the weights in model.safetensors can still be used",
            )

    def _check_same_run(self, config: RunConfig) -> None:
        """Raise an error if the settings that decide the result differ; settings of the machine may change."""
        if (difference := find_difference(self.read_config(), config)) is None:
            return
        key, old, new = difference
        hint = "choose another out (--out), or repeat the settings to resume"
        if key == "data.path" and is_pairs_path(old) and is_pairs_path(new):
            raise DataError(f"{self.path}: the images have changed since the run began", hint=hint)
        raise ConfigError(f"{self.path} holds a run with {key}={old}, not {new}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Configuration, files, ranks and observer that every part of a run needs."""

    config: RunConfig
    run_dir: RunDir
    ranks: Ranks
    workers: int
    dataset: Dataset | None = None
    """The dataset, if it is in memory."""
    callback: Callback = Callback()
    stop: StopFlag = field(default_factory=StopFlag)
    is_trial: bool = False
    """Whether the run ends with its model and last evaluation, without a report."""
    selection: Selection | None = None
    """What was tried before this run."""


def reproducibility_key(config: RunConfig) -> RunConfig:
    """Return the configuration with everything that does not decide the result set to its default."""
    return replace(
        config,
        data=replace(config.data, workers=DataConfig().workers),
        optimizer=replace(config.optimizer, max_skipped=OptimizerConfig().max_skipped),
        schedule=replace(config.schedule, accumulate="auto"),
        parallel=ParallelConfig(precision=config.parallel.precision),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(log_every=config.logging.log_every),
        report=ReportConfig(),
    )


def find_difference(old: RunConfig, new: RunConfig) -> tuple[str, object, object] | None:
    """Return the first setting that decides the result and differs, with both values; None if all are equal.

    A new precision `auto` is that of the old run.
    """
    if new.parallel.precision == "auto":
        new = replace(new, parallel=replace(new.parallel, precision=old.parallel.precision))
    values = [flatten_settings(to_mapping(reproducibility_key(config))) for config in (old, new)]
    for key in values[0] | values[1]:
        before, after = (each.get(key) for each in values)
        if before != after:
            return key, "none" if before is None else before, "none" if after is None else after
    return None


@contextmanager
def claim_run_dir(run_dir: RunDir, config: RunConfig, *, ranks: Ranks, decisions: Sequence[str] = ()) -> Iterator[None]:
    """Lock and claim the directory; if the run fails before it has logged or saved anything, undo that.

    The corrected command can then use the same directory, which otherwise would hold a run with other settings.
    """
    new_dirs = [path for path in (run_dir.path, *run_dir.path.parents) if not path.exists()]
    is_new = not run_dir.config.exists()
    try:
        with ExitStack() as locked:

            def claim(_: object) -> None:
                run_dir.create()
                locked.enter_context(lock_directory(run_dir.path))
                run_dir.claim(config, decisions=decisions)

            run_on_main(ranks, claim)
            try:
                yield
            except Exception:
                has_log = run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0
                if ranks.is_main and is_new and not has_log and not any(run_dir.checkpoints.glob("step-*")):
                    rollback(run_dir)
                raise
    except Exception:
        if ranks.is_main and is_new:
            remove_empty_directories(new_dirs)
        raise


def rollback(run_dir: RunDir) -> None:
    """Remove what a run writes before its first checkpoint; the configuration, which marks the owner, last."""
    models = [path for prefix in MODEL_DIRS for path in run_dir.path.glob(f"{prefix}*")]
    for directory in (run_dir.checkpoints, run_dir.path / "tensorboard", *models):
        shutil.rmtree(directory, ignore_errors=True)
    files = (
        run_dir.decisions,
        run_dir.bad_files,
        run_dir.data,
        run_dir.metrics,
        run_dir.speed,
        run_dir.model,
        *run_dir.path.glob(f"{FINGERPRINT_PREFIX}*.npz"),
        run_dir.config,
    )
    for file in files:
        file.unlink(missing_ok=True)


@contextmanager
def explain_io_errors(run_dir: RunDir) -> Iterator[None]:
    """Turn an OSError into an error that names the file and what to do."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output is gone: not a problem of the disk
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TrainingError(
            f"{error.filename or run_dir.path}: {error.strerror or error}",
            hint=f"{'free disk space' if is_full else 'repair the disk'} and run the same command again, "
            "or choose another out (--out)",
        ) from error


@dataclass
class RunLogs:
    """Open logs of a run."""

    metrics: MetricsLog
    speed: MetricsLog
    tensorboard: Any = None
    """TensorBoard's SummaryWriter, which is untyped."""

    @classmethod
    @contextmanager
    def open(cls, run_dir: RunDir, config: LoggingConfig, *, step: int) -> Iterator["RunLogs"]:
        """Open the logs of a run that continues after `step`."""
        tensorboard = open_tensorboard(run_dir, step=step) if config.tensorboard else None
        with MetricsLog(run_dir.metrics) as metrics, MetricsLog(run_dir.speed) as speed:
            try:
                yield cls(metrics, speed, tensorboard)
            finally:
                if tensorboard is not None:
                    tensorboard.close()

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Log values that a repetition of the run reproduces."""
        self.metrics.write(step=step, **metrics)
        self._write_tensorboard(step, metrics)

    def write_speed(self, step: int, metrics: dict[str, float]) -> None:
        """Log values that depend on the machine."""
        self.speed.write(step=step, **metrics)
        self._write_tensorboard(step, metrics)

    def _write_tensorboard(self, step: int, metrics: dict[str, float]) -> None:
        if self.tensorboard is not None:
            for name, value in metrics.items():
                split, _, rest = name.partition("_")
                self.tensorboard.add_scalar(f"{rest}/val" if split == "val" else f"{name}/train", value, step)


def open_tensorboard(run_dir: RunDir, *, step: int) -> Any:
    """Open a TensorBoard writer that hides what an interrupted run wrote after `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an optional dependency
    except ImportError as error:
        raise MissingDependencyError(
            "logging.tensorboard needs TensorBoard", hint="pip install 'vitkit[track]'"
        ) from error
    return SummaryWriter(str(run_dir.path / "tensorboard"), purge_step=step + 1)


def read_metrics(run_dir: RunDir) -> list[MetricsRecord]:
    """Return the records of the metrics log."""
    return metrics_log.read_metrics(run_dir.metrics) if run_dir.metrics.exists() else []


def was_evaluated(run_dir: RunDir, step: int) -> bool:
    """Return whether the log has an evaluation of this step; a run that was stopped while evaluating has none."""
    return any("val_loss" in record and record["step"] == step for record in read_metrics(run_dir))
