"""A trainer and a stream of batches go in, a trained state comes out: the one training loop.

It updates, logs, evaluates and saves, in this order, each when it is due. Nothing that depends on the clock reaches
the metrics log, so a run that was killed and resumed leaves the same log as one that was not.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vitkit.core.errors import TrainingError
from vitkit.core.stopping import Stop, Stopped
from vitkit.data.loader import Batches
from vitkit.train.logs import Logs
from vitkit.train.state import Checkpoints
from vitkit.train.update import Trainer, Update
from vitkit.train.watch import Pulse, Watcher

Evaluate = Callable[[Callable[[], bool]], dict[str, float]]
"""Judges the model; asks between batches whether it should stop, and raises Stopped if so."""


def goodness(numbers: Mapping[str, object]) -> float:
    """What says which evaluation is the best: the share of right answers, or, where nobody knows those, minus the loss.

    >>> goodness({"val_loss": 0.5, "val_top1": 0.9}), goodness({"val_loss": 0.5}), goodness({"val_loss": float("nan")})
    (0.9, -0.5, -inf)
    """
    found = float(str(numbers["val_top1"])) if "val_top1" in numbers else -float(str(numbers["val_loss"]))
    return -math.inf if math.isnan(found) else found


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """After how many steps what is due, and how many steps there are."""

    steps: int
    steps_an_epoch: float
    log: int
    evaluate: int
    save: int
    save_seconds: float

    def due(self, every: int, step: int) -> bool:
        """Whether the step is the last, or one of every so many."""
        return step > 0 and (step == self.steps or step % every == 0)


@dataclass
class Loop:
    """Everything that goes round. Only the leading rank has logs."""

    trainer: Trainer
    batches: Batches
    rhythm: Rhythm
    checkpoints: Checkpoints
    stop: Stop
    watcher: Watcher
    logs: Logs | None = None
    evaluate: Evaluate | None = None
    best: tuple[float, int] | None = None
    """How good the best validation so far was, as `goodness` has it, and its step."""

    def run(self, *, evaluation_is_missing: bool = False) -> bool:
        """Train to the last step; False where someone asked to stop, with everything saved."""
        trainer, progress, rhythm = self.trainer, self.trainer.state.progress, self.rhythm
        clock = Clock(self)
        last_save = time.monotonic()
        if evaluation_is_missing and not self.judge():
            return self.leave()
        if self.someone_asks_to_stop():
            return self.leave()
        while progress.step < rhythm.steps:
            late = trainer.ranks.leads and time.monotonic() - last_save > rhythm.save_seconds
            update = trainer.update(self.batches, stop=self.stop, save=late)
            self.report(update, clock)
            self.guard(update)
            if update.stop:
                return self.leave()
            best = False
            if self.evaluate and rhythm.due(rhythm.evaluate, progress.step):
                if not self.judge():
                    return self.leave()
                best = self.is_best()
                clock.restart()
            if update.save or best or rhythm.due(rhythm.save, progress.step):
                self.save()
                last_save = time.monotonic()
        return True

    def report(self, update: Update, clock: "Clock") -> None:
        """Tell the watcher and, when due, the logs."""
        step, rhythm = self.trainer.state.progress.step, self.rhythm
        pulse = clock.pulse(update)
        self.watcher.pulse(pulse)
        if self.logs and rhythm.due(rhythm.log, step):
            numbers = {
                "epoch": round(pulse.epoch, 4),
                "loss": update.loss,
                **update.shares,
                "lr": update.lr,
                "gradient_norm": update.gradient_norm,
                "skipped": self.trainer.state.progress.skipped,
            }
            self.logs.write_metrics(step, numbers)
            self.logs.write_speed(step, {"images_per_second": pulse.images_per_second, "waiting": pulse.waiting})

    def guard(self, update: Update) -> None:
        """Stop, with the last good state, a run in which nothing is finite any more."""
        progress = self.trainer.state.progress
        limit = self.trainer.config.keep.max_skipped
        if not update.skipped:
            return
        self.watcher.warn(f"step {progress.step}: the loss or its gradient is not finite; the update is left out")
        if progress.skipped_in_a_row >= limit:
            self.save(must=True)
            raise TrainingError(
                f"{limit} updates in a row were not finite; the weights from before them are saved",
                hint="lower schedule.lr, or use parallel.precision=fp32",
            )

    def judge(self) -> bool:
        """Evaluate and log; False where someone asked to stop meanwhile."""
        if self.evaluate is None:
            return True
        step = self.trainer.state.progress.step
        try:
            numbers = self.evaluate(self.someone_asks_to_stop)
        except Stopped:
            return False
        if self.logs:
            self.logs.write_metrics(step, numbers)
        if self.best is None or goodness(numbers) > self.best[0]:
            self.best = (goodness(numbers), step)
        self.watcher.evaluated(step, numbers)
        return True

    def is_best(self) -> bool:
        """Whether this step is the best so far, and so to be kept; all ranks must ask together."""
        step = self.trainer.state.progress.step
        best = self.trainer.config.keep.best and self.best is not None and self.best[1] == step
        return bool(self.trainer.ranks.agree(int(best)))

    def someone_asks_to_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks must ask together."""
        return bool(self.trainer.ranks.total([bool(self.stop)])[0])

    def leave(self) -> bool:
        """Save where the run stands, and say that it is not finished."""
        self.save(must=True)
        return False

    def save(self, *, must: bool = False) -> None:
        """Commit a checkpoint. A disk that is full is a warning, unless this checkpoint must be."""
        state, ranks = self.trainer.state, self.trainer.ranks
        tensors = state.tensors(keep=ranks.leads)
        keep_best = self.best[1] if self.best and self.trainer.config.keep.best else None
        failure: Exception | None = None
        if ranks.leads:
            try:
                self.checkpoints.save(tensors, state.progress, best=keep_best)
            except (OSError, TrainingError) as error:
                failure = error
        failed, fatal = divmod(ranks.agree(2 * (failure is not None) + isinstance(failure, TrainingError)), 2)
        if not failed:
            self.watcher.saved(state.progress.step)
            return
        message = f"step {state.progress.step} could not be saved: {failure or 'see rank 0'}"
        if must or fatal:
            hint = getattr(failure, "hint", None) or "make room, or mend the disk, and run the same command again"
            raise TrainingError(message, hint=hint)
        self.watcher.warn(f"{message}; the run goes on from the checkpoint before if it is stopped now")


class Clock:
    """Images a second, the share of time spent waiting for them, and the time left."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.seconds_a_step: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the time since the last step: it went into something else."""
        self.last, self.waited = time.perf_counter(), self.loop.batches.waited

    def pulse(self, update: Update) -> Pulse:
        """The step's numbers with those of the clock."""
        trainer, rhythm = self.loop.trainer, self.loop.rhythm
        step = trainer.state.progress.step
        seconds = max(time.perf_counter() - self.last, 1e-9)
        waiting = min((self.loop.batches.waited - self.waited) / seconds, 1.0)
        self.restart()
        known = self.seconds_a_step
        self.seconds_a_step = seconds if known is None else 0.9 * known + 0.1 * seconds
        return Pulse(
            step=step,
            steps=rhythm.steps,
            epoch=step / rhythm.steps_an_epoch,
            loss=update.loss,
            shares=update.shares,
            lr=update.lr,
            images_per_second=trainer.config.schedule.batch_size / seconds,
            waiting=waiting,
            seconds_left=(rhythm.steps - step) * self.seconds_a_step,
        )
