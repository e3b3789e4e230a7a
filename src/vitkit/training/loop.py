"""The training loop: update, log, evaluate and save, each at its interval.

Nothing that depends on the clock reaches the metrics log, so a run that was killed and resumed writes the same log as
an uninterrupted one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vitkit.core.errors import TrainingError, summarize
from vitkit.core.metrics_log import validation_score
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.loader import BatchLoader
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.checkpoint import Checkpoints
from vitkit.training.run_dir import RunLogs
from vitkit.training.trainer import StepOutput, Trainer

Evaluator = Callable[[Callable[[], bool]], dict[str, float]]
"""Evaluates the model. Calls its argument between batches and raises StopRequested if that returns True."""


class DivergedError(TrainingError):
    """Run whose updates are no longer finite."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Length of a run and the intervals of its events, in steps; `save_seconds` is by the clock."""

    total_steps: int
    steps_per_epoch: float
    log: int
    evaluate: int
    save: int
    save_seconds: float

    def is_due(self, event: Literal["log", "evaluate", "save"], step: int) -> bool:
        """Return whether the event happens after this step; all of them happen after the last."""
        every: int = getattr(self, event)
        return step > 0 and (step == self.total_steps or step % every == 0)


@dataclass
class TrainingLoop:
    """Training loop of one rank; only the main rank has `logs`."""

    trainer: Trainer
    batches: BatchLoader
    intervals: Intervals
    checkpoints: Checkpoints
    stop: StopFlag
    callback: Callback
    logs: RunLogs | None = None
    evaluator: Evaluator | None = None
    best: tuple[float, int] | None = None
    """Score and step of the best evaluation so far."""

    def run(self, *, evaluate_first: bool = False) -> bool:
        """Train until the last step. Return False if a stop was requested; everything is saved in that case."""
        trainer, intervals, progress = self.trainer, self.intervals, self.trainer.state.progress
        stopwatch, last_save = Stopwatch(self), time.monotonic()
        if (evaluate_first and not self.evaluate()) or self.stop_requested():
            return self.save_and_stop()
        while progress.step < intervals.total_steps and not self.is_stalled():
            save_is_late = trainer.ranks.is_main and time.monotonic() - last_save > intervals.save_seconds
            output = trainer.step(self.batches, stop=self.stop, save=save_is_late)
            self.log(output, stopwatch)
            self.check_finite(output)
            if output.stop:
                return self.save_and_stop()
            is_best = False
            if self.evaluator and intervals.is_due("evaluate", progress.step):
                if not self.evaluate():
                    return self.save_and_stop()
                is_best = self.is_best()
                stopwatch.restart()
            if output.save or is_best or intervals.is_due("save", progress.step):
                self.save()
                last_save = time.monotonic()
        return True

    def log(self, output: StepOutput, stopwatch: "Stopwatch") -> None:
        """Pass the step's metrics to the callback and, at its interval, to the logs."""
        step, metrics = self.trainer.state.progress.step, stopwatch.measure(output)
        self.callback.on_step(metrics)
        if self.logs and self.intervals.is_due("log", step):
            values = {
                "epoch": round(metrics.epoch, 4),
                "loss": output.loss,
                **output.metrics,
                "lr": output.lr,
                "gradient_norm": output.gradient_norm,
                "skipped": self.trainer.state.progress.skipped,
            }
            self.logs.write_metrics(step, values)
            self.logs.write_speed(
                step, {"images_per_second": metrics.images_per_second, "data_wait": metrics.data_wait}
            )

    def check_finite(self, output: StepOutput) -> None:
        """Warn of a skipped update; after too many in a row, save the last finite state and fail."""
        progress, limit = self.trainer.state.progress, self.trainer.config.optimizer.max_skipped
        if not output.skipped:
            return
        self.callback.on_warning(f"step {progress.step}: the loss or its gradient is not finite; update skipped")
        if progress.skipped_in_a_row >= limit:
            self.save(required=True)
            raise DivergedError(
                f"{limit} updates in a row were not finite; the weights from before them are saved",
                hint="lower schedule.lr, or use parallel.precision=fp32",
            )

    def evaluate(self) -> bool:
        """Evaluate and log. Return False if a stop was requested meanwhile."""
        if self.evaluator is None:
            return True
        step = self.trainer.state.progress.step
        try:
            metrics = self.evaluator(self.stop_requested)
        except StopRequested:
            return False
        if self.logs:
            self.logs.write_metrics(step, metrics)
        if self.best is None or validation_score(metrics) > self.best[0]:
            self.best = (validation_score(metrics), step)
        self.callback.on_evaluate(step, metrics)
        return True

    def is_best(self) -> bool:
        """Return whether this step's evaluation is the best so far and to be saved; collective over all ranks."""
        is_best = self.trainer.config.checkpoint.best and self.best and self.best[1] == self.trainer.state.progress.step
        return bool(self.trainer.ranks.broadcast_int(int(bool(is_best))))

    def is_stalled(self) -> bool:
        """Return whether the last `evaluation.patience` evaluations were not better than the best; of the log alone."""
        patience = self.trainer.config.evaluation.patience
        if patience is None or self.best is None:
            return False
        return (self.trainer.state.progress.step - self.best[1]) // self.intervals.evaluate >= patience

    def stop_requested(self) -> bool:
        """Return whether any rank was asked to stop; collective over all ranks."""
        return bool(self.trainer.ranks.all_reduce_sum([self.stop.requested])[0])

    def save_and_stop(self) -> bool:
        """Save and return False: the run is not finished."""
        self.save(required=True)
        return False

    def save(self, *, required: bool = False) -> None:
        """Write a checkpoint. A full disk is a warning unless the checkpoint is required."""
        state, ranks = self.trainer.state, self.trainer.ranks
        step, tensors = state.progress.step, state.gather_tensors(discard=not ranks.is_main)
        best_step = self.best[1] if self.best and self.trainer.config.checkpoint.best else None
        failure: Exception | None = None
        if ranks.is_main:
            try:
                self.checkpoints.save(tensors, state.progress, best_step=best_step)
            except (OSError, TrainingError) as error:
                failure = error
        failed, fatal = divmod(ranks.broadcast_int(2 * (failure is not None) + isinstance(failure, TrainingError)), 2)
        if not failed:
            self.callback.on_save(step, self.checkpoints.path(step))
            return
        message = f"cannot save step {step}: {summarize(failure) if failure else 'see rank 0'}"
        if required or fatal:
            hint = (
                getattr(failure, "hint", None) or "free disk space or repair the disk, and run the same command again"
            )
            raise TrainingError(message, hint=hint)
        self.callback.on_warning(f"{message}; an interruption would resume from the checkpoint before")


class Stopwatch:
    """Meter of images per second, the fraction of time spent waiting for data, and the time left."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.seconds_per_step: float | None = None
        self.restart()

    def restart(self) -> None:
        """Start measuring now: the time since the last step was spent on something else."""
        self.last, self.wait_seconds = time.perf_counter(), self.loop.batches.wait_seconds

    def measure(self, output: StepOutput) -> StepMetrics:
        """Return the metrics of the step that just ended."""
        trainer, intervals = self.loop.trainer, self.loop.intervals
        step = trainer.state.progress.step
        seconds = max(time.perf_counter() - self.last, 1e-9)
        data_wait = min((self.loop.batches.wait_seconds - self.wait_seconds) / seconds, 1.0)
        self.restart()
        average = self.seconds_per_step
        self.seconds_per_step = seconds if average is None else 0.9 * average + 0.1 * seconds
        return StepMetrics(
            step=step,
            total_steps=intervals.total_steps,
            epoch=step / intervals.steps_per_epoch,
            loss=output.loss,
            metrics=output.metrics,
            lr=output.lr,
            images_per_second=trainer.config.schedule.batch_size / seconds,
            data_wait=data_wait,
            seconds_left=(intervals.total_steps - step) * self.seconds_per_step,
        )
