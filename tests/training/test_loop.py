"""Training loop with a fake trainer: order of events, intervals, failures and speed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitkit.core.errors import TrainingError
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.loader import BatchLoader
from vitkit.training import loop as loop_module
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.checkpoint import Checkpoints, Progress
from vitkit.training.config import CheckpointConfig, OptimizerConfig, RunConfig, ScheduleConfig
from vitkit.training.loop import Intervals, Stopwatch, TrainingLoop
from vitkit.training.run_dir import RunLogs
from vitkit.training.trainer import StepOutput, Trainer

OUTPUT = StepOutput(loss=1.0, metrics={"top1": 0.5}, lr=0.1, gradient_norm=2.0, skipped=False, stop=False, save=False)
INTERVALS = Intervals(total_steps=7, steps_per_epoch=2.0, log=3, evaluate=4, save=5, save_seconds=1e9)


class Recorder(Callback):
    """Records all events in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.lines.append(f"step {metrics.step}")

    def on_warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def on_save(self, step: int, path: Path) -> None:
        self.lines.append(f"saved {step}")

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append(f"evaluated {step}")


class FakeTrainer(Trainer):
    """Counts steps; the output of step `n` is `outputs[n]`, or an ordinary one."""

    def __init__(
        self, outputs: dict[int, StepOutput] | None = None, *, best: bool = True, max_skipped: int = 10
    ) -> None:
        self.outputs = outputs or {}
        self.config = RunConfig(
            schedule=ScheduleConfig(batch_size=10),
            checkpoint=CheckpointConfig(best=best),
            optimizer=OptimizerConfig(max_skipped=max_skipped),
        )
        self.state = SimpleNamespace(progress=Progress(), gather_tensors=lambda *, discard: {"discarded": discard})
        self.ranks = SimpleNamespace(is_main=True, broadcast_int=lambda value: value, all_reduce_sum=list)
        self.save_requests: list[bool] = []

    def step(self, batches: object, *, stop: StopFlag, save: bool) -> StepOutput:
        self.save_requests.append(save)
        progress = self.state.progress
        progress.step += 1
        output = replace(self.outputs.get(progress.step, OUTPUT), save=save)
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if output.skipped else 0
        return output


class FakeCheckpoints(Checkpoints):
    """Records the best step of each save, and fails at some steps."""

    def __init__(self, *, failing: Sequence[int] = (), error: Exception | None = None) -> None:
        self.failing, self.error = failing, error or OSError(28, "No space left on device")
        self.directory, self.best = Path("checkpoints"), dict[int, int | None]()

    def save(self, tensors: object, progress: Progress, *, best_step: int | None) -> None:
        assert tensors == {"discarded": False}
        if progress.step in self.failing:
            raise self.error
        self.best[progress.step] = best_step


class NoBatches(BatchLoader):
    """Loader that is never waited for."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0


class FakeLogs(RunLogs):
    """Logs in memory."""

    def __init__(self) -> None:
        self.written: dict[str, dict[int, dict[str, float]]] = {"metrics": {}, "speed": {}}

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.written["metrics"][step] = metrics

    def write_speed(self, step: int, metrics: dict[str, float]) -> None:
        self.written["speed"][step] = metrics


def make_loop(
    trainer: FakeTrainer,
    *,
    checkpoints: FakeCheckpoints | None = None,
    intervals: Intervals = INTERVALS,
    evaluator: Callable[..., dict[str, float]] | None = None,
    stop: StopFlag | None = None,
) -> tuple[TrainingLoop, Recorder]:
    recorder = Recorder()
    loop = TrainingLoop(
        trainer=trainer,
        batches=NoBatches(),
        intervals=intervals,
        checkpoints=checkpoints or FakeCheckpoints(),
        stop=stop or StopFlag(),
        callback=recorder,
        evaluator=evaluator,
    )
    return loop, recorder


def test_events_happen_at_their_intervals_in_order() -> None:
    accuracies = iter([0.5, 0.4])
    loop, recorder = make_loop(FakeTrainer(), evaluator=lambda stop: {"val_top1": next(accuracies), "val_loss": 1.0})
    assert loop.run()
    assert recorder.lines == [
        *(f"step {step}" for step in range(1, 5)),
        "evaluated 4",
        "saved 4",  # the best is saved though no save is due
        "step 5",
        "saved 5",
        "step 6",
        "step 7",
        "evaluated 7",  # the last step is evaluated and saved, whatever the intervals
        "saved 7",
    ]
    assert loop.best == (0.5, 4)


def test_best_step_is_kept_if_configured() -> None:
    for best, expected in ((True, {4: 4, 5: 4, 7: 4}), (False, {5: None, 7: None})):
        checkpoints, accuracies = FakeCheckpoints(), iter([0.5, 0.5])
        trainer = FakeTrainer(best=best)
        loop, _ = make_loop(
            trainer,
            checkpoints=checkpoints,
            evaluator=lambda stop, left=accuracies: {"val_top1": next(left), "val_loss": 1},
        )
        loop.run()
        assert checkpoints.best == expected


def test_stop_saves_and_ends_the_loop() -> None:
    loop, recorder = make_loop(FakeTrainer({2: replace(OUTPUT, stop=True)}))
    assert not loop.run()
    assert recorder.lines == ["step 1", "step 2", "saved 2"]


def test_stop_during_evaluation_saves() -> None:
    def interrupted(stop: Callable[[], bool]) -> dict[str, float]:
        raise StopRequested

    loop, recorder = make_loop(FakeTrainer(), evaluator=interrupted)
    assert not loop.run()
    assert recorder.lines[-2:] == ["step 4", "saved 4"]


def test_stop_before_first_step_makes_no_step() -> None:
    loop, recorder = make_loop(FakeTrainer(), stop=StopFlag("SIGTERM"))
    assert not loop.run()
    assert recorder.lines == ["saved 0"]


def test_missed_evaluation_is_made_first() -> None:
    loop, recorder = make_loop(FakeTrainer(), evaluator=lambda stop: {"val_top1": 0.5, "val_loss": 1.0})
    loop.run(evaluate_first=True)
    assert recorder.lines[:2] == ["evaluated 0", "step 1"]


def test_save_is_requested_after_save_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: float(next(now)))
    trainer = FakeTrainer()
    loop, recorder = make_loop(trainer, intervals=replace(INTERVALS, save=100, save_seconds=15.0))
    loop.run()
    assert trainer.save_requests == [False, True, False, True, False, True, False]
    assert [line for line in recorder.lines if line.startswith("saved")] == ["saved 2", "saved 4", "saved 6", "saved 7"]


def test_failed_save_warns_or_fails_if_required() -> None:
    loop, recorder = make_loop(FakeTrainer(), checkpoints=FakeCheckpoints(failing=[5]))
    assert loop.run()
    assert [line for line in recorder.lines if "cannot save step 5" in line and "No space left" in line]
    loop, _ = make_loop(FakeTrainer({5: replace(OUTPUT, stop=True)}), checkpoints=FakeCheckpoints(failing=[5]))
    with pytest.raises(TrainingError, match="cannot save step 5") as caught:
        loop.run()
    assert "run the same command again" in str(caught.value.hint)


def test_non_finite_weights_end_the_run_at_any_save() -> None:
    error = TrainingError("step 5 is not saved: head.weight is not finite", hint="lower schedule.lr")
    loop, _ = make_loop(FakeTrainer(), checkpoints=FakeCheckpoints(failing=[5], error=error))
    with pytest.raises(TrainingError, match="not finite") as caught:
        loop.run()
    assert caught.value.hint == "lower schedule.lr"


def test_too_many_skipped_updates_end_the_run() -> None:
    skipped = replace(OUTPUT, skipped=True, loss=float("nan"))
    loop, recorder = make_loop(FakeTrainer({2: skipped, 4: skipped}, max_skipped=2))
    assert loop.run()
    assert sum("update skipped" in line for line in recorder.lines) == 2
    loop, recorder = make_loop(FakeTrainer({2: skipped, 3: skipped}, max_skipped=2))
    with pytest.raises(TrainingError, match="2 updates in a row"):
        loop.run()
    assert recorder.lines[-1] == "saved 3"


def test_logs_at_interval_have_no_clock_in_metrics() -> None:
    loop, _ = make_loop(FakeTrainer())
    loop.logs = logs = FakeLogs()
    loop.run()
    metrics, speed = logs.written["metrics"], logs.written["speed"]
    assert list(metrics) == list(speed) == [3, 6, 7]
    assert metrics[3] == {"epoch": 1.5, "loss": 1.0, "top1": 0.5, "lr": 0.1, "gradient_norm": 2.0, "skipped": 0}
    assert speed[3].keys() == {"images_per_second", "data_wait"}


def test_stopwatch_measures_speed_wait_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 2.0, 2.0, 6.0, 6.0])  # created at 0; steps end at 2 and 6
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: next(moments))
    loop, _ = make_loop(FakeTrainer())
    stopwatch, progress = Stopwatch(loop), loop.trainer.state.progress
    progress.step, loop.batches.wait_seconds = 1, 0.5
    first = stopwatch.measure(OUTPUT)
    assert (first.images_per_second, first.data_wait, first.epoch) == (5.0, 0.25, 0.5)
    assert first.seconds_left == 6 * 2.0
    progress.step, loop.batches.wait_seconds = 2, 2.5
    second = stopwatch.measure(OUTPUT)
    assert (second.images_per_second, second.data_wait) == (2.5, 0.5)
    assert second.seconds_left == pytest.approx(5 * (0.9 * 2.0 + 0.1 * 4.0))
