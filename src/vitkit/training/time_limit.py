"""Time limit of a run, and the time that its steps take."""

from collections.abc import Callable

from vitkit.core.signals import StopFlag
from vitkit.training.callbacks import Callback, StepMetrics


class TimeLimit(StopFlag):
    """Stop flag that is also set when the time of a trial is over."""

    def __init__(self, stop: StopFlag, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.stop, self.is_over = stop, is_over

    @property
    def requested(self) -> bool:
        """Whether to stop, by request or because the time is over."""
        return self.stop.requested or self.is_over()


class StepTimer(Callback):
    """Measures the seconds per step, and passes everything on to another callback."""

    def __init__(self, callback: Callback, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, list[float]()
        for name in (name for name in vars(Callback) if name.startswith("on_") and name != "on_step"):
            setattr(self, name, getattr(callback, name))
        self.pass_on = callback.on_step

    def on_step(self, metrics: StepMetrics) -> None:
        """Note the time of a step."""
        self.times.append(self.clock())
        self.pass_on(metrics)

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.times)

    @property
    def seconds_per_step(self) -> float:
        """Return the median time between two steps; 0 if there were not two."""
        pauses = sorted(after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return pauses[len(pauses) // 2] if pauses else 0.0
