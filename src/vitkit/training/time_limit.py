"""Training that ends when its time is over, and the time of its steps."""

from collections.abc import Callable
from dataclasses import replace

from vitkit.core.signals import StopFlag
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.checkpoint import Checkpoints
from vitkit.training.config import RunConfig
from vitkit.training.distributed import Ranks, run_on_main
from vitkit.training.run import RunResult


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
    """Callback that measures the seconds per step and forwards everything to another callback."""

    def __init__(self, callback: Callback, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, list[float]()
        for name in (name for name in vars(Callback) if name.startswith("on_") and name != "on_step"):
            setattr(self, name, getattr(callback, name))
        self.forward = callback.on_step

    def on_step(self, metrics: StepMetrics) -> None:
        """Record the time of a step."""
        self.times.append(self.clock())
        self.forward(metrics)

    @property
    def seconds_per_step(self) -> float:
        """Median time between two steps; 0 if there were not two."""
        intervals = sorted(after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return intervals[len(intervals) // 2] if intervals else 0.0


def run_limited(
    start: Callable[..., RunResult], config: RunConfig, *, stop: StopFlag, is_over: Callable[[], bool], ranks: Ranks
) -> RunResult:
    """Train until the last step or until the time is over on a rank; in that case the steps so far are all steps.

    The shorter length is written to config.toml, so that the files of the run agree. Collective over all ranks.
    """
    result = start(config, stop=TimeLimit(stop, is_over))
    if result.summary is not None or ranks.all_reduce_sum([stop.requested])[0]:
        return result
    done = ranks.broadcast_int(max([1, *Checkpoints(result.run_dir.checkpoints).steps()]))
    stored = result.run_dir.read_config()  # with the precision that was chosen
    shorter = replace(stored, schedule=replace(stored.schedule, steps=done, epochs=None))
    run_on_main(ranks, lambda _: result.run_dir.write_config(shorter))
    return start(shorter, stop=stop)
