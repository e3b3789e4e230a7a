"""Progress displays: a cell in a notebook, bars on a terminal, lines elsewhere.

`show_progress` shows tasks that report to a `ProgressFunction`, `RunDisplay` shows a run. Messages are shown with the
progress; a program that has configured the logger `vitkit` gets them there instead.
"""

import html
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitkit.core.console import logger, stderr_console
from vitkit.core.environment import is_main_rank
from vitkit.core.formatting import format_clock, is_logging_configured, safe_text
from vitkit.core.signals import ProgressFunction
from vitkit.training.callbacks import Callback, StepMetrics

SECONDS_BETWEEN_LINES = 10.0
"""Interval of lines without a terminal."""
SECONDS_BETWEEN_UPDATES = 0.25
"""Interval of updates of a notebook cell."""
MAX_CELL_MESSAGES = 100
"""Messages that a notebook cell keeps."""
METRIC_NAMES = {"top1": "top-1", "patch_accuracy": "patch accuracy"}
"""Names of metrics by their names in logs."""
TRAINING = "training"
"""Name of the task that steps belong to."""

Clock = Callable[[], float]


@contextmanager
def show_progress(progress: bool | None = None, *, clock: Clock = time.monotonic) -> Iterator[ProgressFunction]:
    """Show the progress of tasks while the context is active; False shows nothing.

    >>> with show_progress(False) as report:
    ...     report("evaluating", 3, 10)
    """
    with make_display(progress, clock=clock) as display:
        yield display.show


def make_display(progress: bool | None = None, *, clock: Clock = time.monotonic) -> "Display":
    """Choose the display: that of the notebook, of the terminal, lines, or none if `progress` is False."""
    if progress is False or not is_main_rank():
        return Display()
    if is_notebook():
        return NotebookDisplay(clock=clock)
    console = stderr_console()
    return TerminalDisplay(console) if console.is_terminal else LineDisplay(console, clock=clock)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class Display:
    """Display that shows no progress and logs messages; the base of the others."""

    is_live = False
    """Whether the display is redrawn."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, task: str, done: int, total: int) -> None:
        """Show how much of a task is done."""

    def show_metrics(self, text: str) -> None:
        """Show numbers below the bars, until the next call."""

    def remove(self, task: str) -> None:
        """Remove the bar of a task."""

    def print(self, text: str, *, is_warning: bool = False) -> None:
        """Print a line; here, log it."""
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)

    def write(self, text: str, *, is_warning: bool = False) -> None:
        """Print a message, or log it if a program that uses vitkit has configured logging."""
        if not is_logging_configured() and logger.isEnabledFor(logging.INFO):
            Display.print(self, text, is_warning=is_warning)
        else:
            self.print(text, is_warning=is_warning)


class ConsoleDisplay(Display):
    """Base of the displays that print to a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def print(self, text: str, *, is_warning: bool = False) -> None:
        """Print a line that is not wrapped; a warning is yellow."""
        prefix, style = ("warning: ", "yellow") if is_warning else ("", None)
        self.console.print(f"{prefix}{safe_text(text)}", style=style, soft_wrap=True)


class LineDisplay(ConsoleDisplay):
    """Display that prints a line every ten seconds."""

    def __init__(self, console: Console, *, clock: Clock) -> None:
        super().__init__(console)
        self.clock, self.last_line = clock, clock()

    def show(self, task: str, done: int, total: int) -> None:
        """Print a line if ten seconds have passed since the last one."""
        if self.is_due():
            self.print(f"{task}: {done}/{total}" if total else f"{task}: {done}")

    def is_due(self) -> bool:
        """Return whether it is time for a line; the interval starts anew if it is."""
        if self.clock() - self.last_line <= SECONDS_BETWEEN_LINES:
            return False
        self.last_line = self.clock()
        return True


class ProgressBars(Progress):
    """Bars with a line of numbers below them: in one line, 80 columns leave no room for the bar."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars, then the numbers if there are any."""
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers, style="dim", no_wrap=True, overflow="ellipsis")


class TerminalDisplay(ConsoleDisplay):
    """Display with a bar for each task."""

    is_live = True

    def __init__(self, console: Console) -> None:
        description, bar = TextColumn("{task.description}"), BarColumn(bar_width=None)
        columns = (description, bar, MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        super().__init__(console)
        self.bars = ProgressBars(*columns, console=console, transient=True, expand=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, task: str, done: int, total: int) -> None:
        """Update the bar of a task; one of unknown length has none."""
        if task not in self.tasks:
            self.tasks[task] = self.bars.add_task(safe_text(task), total=total, visible=total > 0)
        current = next(each for each in self.bars.tasks if each.id == self.tasks[task])
        if done < current.completed:  # the next run of a sweep
            self.bars.reset(self.tasks[task], total=total)
        self.bars.update(self.tasks[task], completed=done, total=total)

    def show_metrics(self, text: str) -> None:
        """Show numbers below the bars."""
        self.bars.numbers = text

    def remove(self, task: str) -> None:
        """Remove the bar of a task."""
        if task in self.tasks:
            self.bars.remove_task(self.tasks.pop(task))


class NotebookDisplay(Display):
    """Display in one cell of HTML, which is updated."""

    is_live = True

    def __init__(self, *, clock: Clock) -> None:
        self.clock = clock
        self.cell: Any = None
        """IPython's handle of what is displayed, which is untyped."""
        self.tasks: dict[str, tuple[int, int]] = {}
        self.messages: list[str] = []
        self.numbers = ""
        self.last_update = 0.0

    def __exit__(self, *_: object) -> None:
        self.tasks, self.numbers = {}, ""
        if self.cell is not None:
            self.update(force=True)

    def show(self, task: str, done: int, total: int) -> None:
        """Update the bar of a task."""
        is_new = task not in self.tasks
        self.tasks[task] = (done, total)
        self.update(force=is_new)

    def show_metrics(self, text: str) -> None:
        """Show numbers below the bars."""
        self.numbers = text

    def remove(self, task: str) -> None:
        """Remove the bar of a task."""
        self.tasks.pop(task, None)

    def print(self, text: str, *, is_warning: bool = False) -> None:
        """Add a line above the bars."""
        color = "color:#b58900" if is_warning else ""
        prefix = "warning: " if is_warning else ""
        self.messages.append(f'<div style="{color}">{html.escape(prefix + safe_text(text))}</div>')
        del self.messages[:-MAX_CELL_MESSAGES]
        self.update(force=True)

    def update(self, *, force: bool = False) -> None:
        """Redraw the cell, if the last time is not too recent."""
        if not force and self.clock() - self.last_update < SECONDS_BETWEEN_UPDATES:
            return
        ipython = importlib.import_module("IPython.display")  # present in a notebook, and not required
        self.last_update = self.clock()
        content = ipython.HTML(self.render())
        if self.cell is None:
            self.cell = ipython.display(content, display_id=True)
        else:
            self.cell.update(content)

    def render(self) -> str:
        """Return the HTML of the cell."""
        bars = "".join(
            f"<div>{html.escape(safe_text(task))} "
            f'<progress value="{done}" max="{total}"></progress> {done}/{total}</div>'
            for task, (done, total) in self.tasks.items()
            if total
        )
        numbers = f"<div>{html.escape(self.numbers)}</div>" if self.numbers else ""
        return f'<div style="font-family:monospace">{"".join(self.messages)}{bars}{numbers}</div>'


class RunDisplay(Callback):
    """Callback that shows a run; a context, so that the terminal is restored."""

    def __init__(self, progress: bool | None = None, *, clock: Clock = time.monotonic) -> None:
        self.display = make_display(progress, clock=clock)
        self.warnings: list[str] = []
        self.task, self.done, self.total = "", 0, 0
        self.last_step = 0

    def __enter__(self) -> "RunDisplay":
        self.display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.__exit__()

    def on_message(self, text: str) -> None:
        """Print a line."""
        self.display.write(text)

    def on_warning(self, text: str) -> None:
        """Print a warning."""
        self.warnings.append(text)
        self.display.write(text, is_warning=True)

    def on_task(self, description: str, total: int) -> None:
        """Show a task of known length."""
        for task in (self.task, TRAINING):
            self.display.remove(task)
        self.display.show_metrics("")
        self.task, self.done, self.total = description, 0, total
        self.display.show(description, 0, total)
        if not self.display.is_live:
            self.display.write(f"{description}: {total}")

    def on_progress(self, count: int) -> None:
        """Advance the task."""
        self.done += count
        self.display.show(self.task, self.done, self.total)

    def on_step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a step."""
        values = "".join(f"{METRIC_NAMES.get(name, name)} {value:.0%} · " for name, value in metrics.metrics.items())
        numbers = (
            f"loss {metrics.loss:.3f} · {values}lr {metrics.lr:.2e} · "
            f"{metrics.images_per_second:,.0f} images/s · data wait {metrics.data_wait:.0%}"
        )
        is_first, is_last = not 0 < self.last_step < metrics.step, metrics.step == metrics.total_steps
        self.last_step = metrics.step
        if isinstance(self.display, LineDisplay):
            if self.display.is_due() or is_first or is_last:
                step, left = f"step {metrics.step}/{metrics.total_steps}", format_clock(metrics.seconds_left)
                self.display.write(f"{step} · epoch {metrics.epoch:.2f} · {numbers} · {left} left")
            return
        self.display.remove(self.task)
        self.display.show_metrics(numbers)
        self.display.show(TRAINING, metrics.step, metrics.total_steps)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Print the metrics of an evaluation."""
        accuracies = {title: metrics[f"val_{name}"] for name, title in METRIC_NAMES.items() if f"val_{name}" in metrics}
        values = "".join(f"{title} {value:.2%}, " for title, value in accuracies.items())
        self.on_message(f"step {step}: validation {values}loss {metrics['val_loss']:.3f}")
