"""Callbacks that observe a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.core.signals import StopFlag


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Numbers of one training step.

    `metrics` are the objective's, by name; `data_wait` is the fraction of the step spent waiting for images.
    """

    step: int
    total_steps: int
    epoch: float
    loss: float
    lr: float
    images_per_second: float
    data_wait: float
    seconds_left: float
    metrics: dict[str, float] = field(default_factory=dict)


class Callback:
    """Observer of a run; every method does nothing unless overridden."""

    def on_message(self, text: str) -> None:
        """Receive a line of information."""

    def on_warning(self, text: str) -> None:
        """Receive a warning; the run continues."""

    def on_task(self, description: str, total: int) -> None:
        """Note the start of a task of known length, such as checking files."""

    def on_progress(self, count: int) -> None:
        """Note that `count` more items of the current task are done."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Receive the metrics of a training step."""

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the metrics of an evaluation."""

    def on_save(self, step: int, path: Path) -> None:
        """Note that a checkpoint was written."""


class CallbackList(Callback):
    """Several callbacks; if one raises KeyboardInterrupt, the run stops as after Ctrl-C."""

    def __init__(self, callbacks: Sequence[Callback], stop: StopFlag) -> None:
        self.callbacks, self.stop = tuple(callbacks), stop

    def on_message(self, text: str) -> None:
        """Pass on a line of information."""
        self._call(lambda callback: callback.on_message(text))

    def on_warning(self, text: str) -> None:
        """Pass on a warning."""
        self._call(lambda callback: callback.on_warning(text))

    def on_task(self, description: str, total: int) -> None:
        """Pass on the start of a task."""
        self._call(lambda callback: callback.on_task(description, total))

    def on_progress(self, count: int) -> None:
        """Pass on the progress of a task."""
        self._call(lambda callback: callback.on_progress(count))

    def on_step(self, metrics: StepMetrics) -> None:
        """Pass on the metrics of a step."""
        self._call(lambda callback: callback.on_step(metrics))

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Pass on the metrics of an evaluation."""
        self._call(lambda callback: callback.on_evaluate(step, metrics))

    def on_save(self, step: int, path: Path) -> None:
        """Pass on that a checkpoint was written."""
        self._call(lambda callback: callback.on_save(step, path))

    def _call(self, notify: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            try:
                notify(callback)
            except KeyboardInterrupt:
                if self.stop.requested:  # a second Ctrl-C
                    raise
                self.stop.signal = "a callback"
