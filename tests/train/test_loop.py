"""The loop alone, on a trainer that only counts: what is done when, in which order, and what the clock says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vitkit.core.errors import TrainingError
from vitkit.core.stopping import Stop, Stopped
from vitkit.data.loader import Batches
from vitkit.train import loop as loop_module
from vitkit.train.config import KeepConfig, RunConfig, ScheduleConfig
from vitkit.train.logs import Logs
from vitkit.train.loop import Clock, Loop, Rhythm
from vitkit.train.state import Checkpoints, Progress
from vitkit.train.update import Trainer, Update
from vitkit.train.watch import Pulse, Watcher

UPDATE = Update(loss=1.0, shares={"top1": 0.5}, lr=0.1, gradient_norm=2.0, skipped=False, stop=False, save=False)
RHYTHM = Rhythm(steps=7, steps_an_epoch=2.0, log=3, evaluate=4, save=5, save_seconds=1e9)


class Diary(Watcher):
    """Writes down all that happens, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pulses: list[Pulse] = []

    def pulse(self, pulse: Pulse) -> None:
        self.pulses.append(pulse)
        self.lines.append(f"step {pulse.step}")

    def warn(self, message: str) -> None:
        self.lines.append(f"warning: {message}")

    def saved(self, step: int) -> None:
        self.lines.append(f"saved {step}")

    def evaluated(self, step: int, numbers: dict[str, float]) -> None:
        self.lines.append(f"judged {step}")


class Counting(Trainer):
    """Counts steps; the update after step `n` is the n-th of `updates`, or an ordinary one."""

    def __init__(self, updates: dict[int, Update] | None = None, *, keep: KeepConfig | None = None) -> None:
        self.updates = updates or {}
        self.config = RunConfig(schedule=ScheduleConfig(batch_size=10), keep=keep or KeepConfig())
        self.state = SimpleNamespace(progress=Progress(), tensors=lambda *, keep: {"kept": keep})
        self.ranks = SimpleNamespace(leads=True, agree=lambda value: value, total=list)
        self.wishes: list[bool] = []

    def update(self, batches: object, *, stop: Stop, save: bool) -> Update:
        self.wishes.append(save)
        progress = self.state.progress
        progress.step += 1
        made = replace(self.updates.get(progress.step, UPDATE), save=save)
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if made.skipped else 0
        return made


class Shelf(Checkpoints):
    """Checkpoints that are only counted, and fail at some steps."""

    def __init__(self, *, failing: Sequence[int] = (), error: Exception | None = None) -> None:
        self.failing, self.error = failing, error or OSError(28, "No space left on device")
        self.best: dict[int, int | None] = {}

    def save(self, tensors: object, progress: Progress, *, best: int | None) -> None:
        assert tensors == {"kept": True}
        if progress.step in self.failing:
            raise self.error
        self.best[progress.step] = best


class NoBatches(Batches):
    """Nothing to wait for."""

    def __init__(self) -> None:
        self.waited = 0.0


class Lines(Logs):
    """Logs in memory."""

    def __init__(self) -> None:
        self.written: dict[str, dict[int, dict[str, float]]] = {"metrics": {}, "speed": {}}

    def write_metrics(self, step: int, numbers: dict[str, float]) -> None:
        self.written["metrics"][step] = numbers

    def write_speed(self, step: int, numbers: dict[str, float]) -> None:
        self.written["speed"][step] = numbers


def make(
    trainer: Counting,
    *,
    shelf: Shelf | None = None,
    rhythm: Rhythm = RHYTHM,
    evaluate: Callable[..., dict[str, float]] | None = None,
    stop: Stop | None = None,
) -> tuple[Loop, Diary]:
    diary = Diary()
    made = Loop(
        trainer=trainer,
        batches=NoBatches(),
        rhythm=rhythm,
        checkpoints=shelf or Shelf(),
        stop=stop or Stop(),
        watcher=diary,
        evaluate=evaluate,
    )
    return made, diary


def test_what_is_due_is_done_in_its_order() -> None:
    accuracies = iter([0.5, 0.4])
    loop, diary = make(Counting(), evaluate=lambda stop: {"val_top1": next(accuracies), "val_loss": 1.0})
    assert loop.run()
    assert diary.lines == [
        *(f"step {step}" for step in range(1, 5)),
        "judged 4",
        "saved 4",  # the best so far is kept though no save is due
        "step 5",
        "saved 5",
        "step 6",
        "step 7",
        "judged 7",  # the last step is judged and saved, whatever the rhythm
        "saved 7",
    ]
    assert loop.best == (0.5, 4)


def test_the_best_is_named_to_the_checkpoints_unless_it_is_not_to_be_kept() -> None:
    for best, named in ((True, {4: 4, 5: 4, 7: 4}), (False, {5: None, 7: None})):
        shelf, accuracies = Shelf(), iter([0.5, 0.5])
        trainer = Counting(keep=KeepConfig(best=best))
        loop, _ = make(
            trainer, shelf=shelf, evaluate=lambda stop, left=accuracies: {"val_top1": next(left), "val_loss": 1}
        )
        loop.run()
        assert shelf.best == named


def test_a_stop_saves_at_once_and_leaves() -> None:
    loop, diary = make(Counting({2: replace(UPDATE, stop=True)}))
    assert not loop.run()
    assert diary.lines == ["step 1", "step 2", "saved 2"]


def test_a_stop_while_judging_saves_without_a_judgement() -> None:
    def interrupted(stop: Callable[[], bool]) -> dict[str, float]:
        raise Stopped

    loop, diary = make(Counting(), evaluate=interrupted)
    assert not loop.run()
    assert diary.lines[-2:] == ["step 4", "saved 4"]


def test_a_stop_before_the_first_step_makes_none() -> None:
    loop, diary = make(Counting(), stop=Stop("SIGTERM"))
    assert not loop.run()
    assert diary.lines == ["saved 0"]


def test_an_evaluation_that_was_missed_is_made_up_for_first() -> None:
    loop, diary = make(Counting(), evaluate=lambda stop: {"val_top1": 0.5, "val_loss": 1.0})
    loop.run(evaluation_is_missing=True)
    assert diary.lines[:2] == ["judged 0", "step 1"]


def test_a_save_is_asked_for_when_its_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: float(next(now)))
    trainer = Counting()
    loop, diary = make(trainer, rhythm=replace(RHYTHM, save=100, save_seconds=15.0))
    loop.run()
    assert trainer.wishes == [False, True, False, True, False, True, False]
    assert [line for line in diary.lines if line.startswith("saved")] == ["saved 2", "saved 4", "saved 6", "saved 7"]


def test_a_save_that_fails_is_a_warning_but_at_the_end_of_a_stop_an_error() -> None:
    loop, diary = make(Counting(), shelf=Shelf(failing=[5]))
    assert loop.run()
    assert [line for line in diary.lines if "could not be saved" in line and "No space left" in line]
    loop, _ = make(Counting({5: replace(UPDATE, stop=True)}), shelf=Shelf(failing=[5]))
    with pytest.raises(TrainingError, match="step 5 could not be saved") as caught:
        loop.run()
    assert "run the same command again" in str(caught.value.hint)


def test_weights_that_are_not_finite_stop_even_a_save_that_need_not_be() -> None:
    error = TrainingError("step 5: head.weight is not finite, and is not saved", hint="lower schedule.lr")
    loop, _ = make(Counting(), shelf=Shelf(failing=[5], error=error))
    with pytest.raises(TrainingError, match="not finite") as caught:
        loop.run()
    assert caught.value.hint == "lower schedule.lr"


def test_a_row_of_skipped_updates_ends_the_run_and_a_single_one_does_not() -> None:
    skipped = replace(UPDATE, skipped=True, loss=float("nan"))
    keep = KeepConfig(max_skipped=2)
    loop, diary = make(Counting({2: skipped, 4: skipped}, keep=keep))
    assert loop.run()
    assert sum("is left out" in line for line in diary.lines) == 2
    loop, diary = make(Counting({2: skipped, 3: skipped}, keep=keep))
    with pytest.raises(TrainingError, match="2 updates in a row"):
        loop.run()
    assert diary.lines[-1] == "saved 3"


def test_logs_are_written_when_due_and_know_no_clock() -> None:
    loop, _ = make(Counting())
    loop.logs = logs = Lines()
    loop.run()
    metrics, speed = logs.written["metrics"], logs.written["speed"]
    assert list(metrics) == list(speed) == [3, 6, 7]
    assert metrics[3] == {"epoch": 1.5, "loss": 1.0, "top1": 0.5, "lr": 0.1, "gradient_norm": 2.0, "skipped": 0}
    assert speed[3].keys() == {"images_per_second", "waiting"}


def test_the_clock_tells_speed_waiting_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 2.0, 2.0, 6.0, 6.0])  # made at 0; a step ends at 2, and the next at 6
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: next(moments))
    loop, _ = make(Counting())
    clock, progress = Clock(loop), loop.trainer.state.progress
    progress.step, loop.batches.waited = 1, 0.5
    first = clock.pulse(UPDATE)
    assert (first.images_per_second, first.waiting, first.epoch) == (5.0, 0.25, 0.5)
    assert first.seconds_left == 6 * 2.0
    progress.step, loop.batches.waited = 2, 2.5
    second = clock.pulse(UPDATE)
    assert (second.images_per_second, second.waiting) == (2.5, 0.5)
    assert second.seconds_left == pytest.approx(5 * (0.9 * 2.0 + 0.1 * 4.0))
