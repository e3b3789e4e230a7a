"""Callbacks that observe a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vitkit.core.errors import ConfigError
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
        for callback in self.callbacks:
            check_callback(callback)
        for name in (name for name in vars(Callback) if name.startswith("on_")):
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *arguments: object) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, name)(*arguments)
            except KeyboardInterrupt:
                if self.stop.requested:  # a second Ctrl-C
                    raise
                self.stop.signal = "a callback"


def check_callback(callback: object) -> None:
    """Raise ConfigError if an object of the user's is not a callback."""
    if not isinstance(callback, Callback):
        hint = "write a class derived from vitkit.Callback, with the methods that it needs"
        raise ConfigError("a callback is not a vitkit.Callback", got=repr(callback)[:80], hint=hint)
