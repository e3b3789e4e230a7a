"""Progress of a run on stderr: a bar with the time left, or plain lines without a terminal."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitkit.cli.console import stderr_console
from vitkit.core.formatting import format_clock, safe_text
from vitkit.training.callbacks import Callback, StepMetrics

SECONDS_BETWEEN_LINES = 10.0
"""Interval of lines without a terminal."""

METRIC_NAMES = {"top1": "top-1", "patch_accuracy": "patch accuracy"}
"""Names of metrics by their names in logs."""


class ProgressBars(Progress):
    """Bars with a line of numbers below them: in one line, 80 columns leave no room for the bar."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars, then the numbers if there are any."""
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers, style="dim", no_wrap=True, overflow="ellipsis")


class RichProgress(Callback):
    """Callback that shows a run on stderr; a context, so that the terminal is restored."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console: Console = stderr_console()
        self.live = self.console.is_terminal
        self.progress = ProgressBars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
        )
        self.clock = clock
        self.training: TaskID | None = None
        self.other: TaskID | None = None
        self.last_line = -SECONDS_BETWEEN_LINES
        self.last_step = 0

    def __enter__(self) -> "RichProgress":
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:  # stopping bars that never started prints an empty line
            self.progress.stop()

    def on_message(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(safe_text(text), soft_wrap=True)

    def on_warning(self, text: str) -> None:
        """Print a warning above the bar."""
        self.console.print(f"warning: {safe_text(text)}", style="yellow", soft_wrap=True)

    def on_task(self, description: str, total: int) -> None:
        """Show a bar for a task of known length."""
        if self.other is not None:
            self.progress.remove_task(self.other)
        if self.training is not None:
            self.progress.update(self.training, visible=False)
        self.progress.numbers = ""
        self.other = self.progress.add_task(description, total=total)
        if not self.live:
            self.on_message(f"{description}: {total}")

    def on_progress(self, count: int) -> None:
        """Advance the bar of the task."""
        if self.other is not None:
            self.progress.advance(self.other, count)

    def on_step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a step."""
        values = "".join(f"{METRIC_NAMES.get(name, name)} {value:.0%} · " for name, value in metrics.metrics.items())
        numbers = (
            f"loss {metrics.loss:.3f} · {values}lr {metrics.lr:.2e} · "
            f"{metrics.images_per_second:,.0f} images/s · data wait {metrics.data_wait:.0%}"
        )
        if not self.live:
            if self.clock() - self.last_line > SECONDS_BETWEEN_LINES or metrics.step == metrics.total_steps:
                self.last_line = self.clock()
                step, left = f"step {metrics.step}/{metrics.total_steps}", format_clock(metrics.seconds_left)
                self.on_message(f"{step} · epoch {metrics.epoch:.2f} · {numbers} · {left} left")
            return
        if self.other is not None:
            self.progress.remove_task(self.other)
            self.other = None
        if self.training is None:
            self.training = self.progress.add_task("training", total=metrics.total_steps)
        elif metrics.step <= self.last_step:  # the next run of a sweep
            self.progress.reset(self.training, total=metrics.total_steps)
        self.last_step = metrics.step
        self.progress.numbers = numbers
        self.progress.update(self.training, completed=metrics.step, visible=True)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Print the metrics of an evaluation."""
        accuracies = {title: metrics[f"val_{name}"] for name, title in METRIC_NAMES.items() if f"val_{name}" in metrics}
        values = "".join(f"{title} {value:.2%}, " for title, value in accuracies.items())
        self.on_message(f"step {step}: validation {values}loss {metrics['val_loss']:.3f}")
