"""What a run tells goes in; a progress bar with time left, or plain lines where there is no terminal, comes out."""

import time
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitkit.cli.output import safe_text, talk_console
from vitkit.train.watch import Pulse, Watcher, on_the_clock

SECONDS_BETWEEN_LINES = 10.0
"""How often a run that nobody watches on a terminal writes a line."""


NAMES = {"top1": "top-1", "right": "patches right"}
"""What shares are called, by their names in logs."""


class Bars(Progress):
    """Bars, and a line of numbers below them: in one line, 80 columns would leave no room for the bar."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, then the numbers where there are any."""
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers, style="dim", no_wrap=True, overflow="ellipsis")


class Shown(Watcher):
    """Shows a run on stderr. Use it as a context, so that the terminal is left as it was."""

    def __init__(self) -> None:
        self.console: Console = talk_console()
        self.live = self.console.is_terminal
        self.progress = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
        )
        self.training: TaskID | None = None
        self.other: TaskID | None = None
        self.last_line = 0.0
        self.last_step = 0

    def __enter__(self) -> "Shown":
        if self.live:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:  # one that never started would leave an empty line
            self.progress.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self.console.print(safe_text(message), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print a warning above the bar."""
        self.console.print(f"warning: {safe_text(message)}", style="yellow", soft_wrap=True)

    def work(self, what: str, total: int) -> None:
        """Show a bar for a piece of work with a known length."""
        if self.other is not None:
            self.progress.remove_task(self.other)
        if self.training is not None:
            self.progress.update(self.training, visible=False)
        self.progress.numbers = ""
        self.other = self.progress.add_task(what, total=total)
        if not self.live:
            self.say(f"{what}: {total}")

    def advance(self, by: int) -> None:
        """Move the bar of that work."""
        if self.other is not None:
            self.progress.advance(self.other, by)

    def pulse(self, pulse: Pulse) -> None:
        """Show a step's numbers."""
        shares = "".join(f"{NAMES.get(name, name)} {share:.0%} · " for name, share in pulse.shares.items())
        numbers = (
            f"loss {pulse.loss:.3f} · {shares}lr {pulse.lr:.2e} · "
            f"{pulse.images_per_second:,.0f} images/s · waiting {pulse.waiting:.0%}"
        )
        if not self.live:
            if time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES or pulse.step == pulse.steps:
                self.last_line = time.monotonic()
                left = on_the_clock(pulse.seconds_left)
                self.say(f"step {pulse.step}/{pulse.steps} · epoch {pulse.epoch:.2f} · {numbers} · {left} left")
            return
        if self.other is not None:
            self.progress.remove_task(self.other)
            self.other = None
        if self.training is None:
            self.training = self.progress.add_task("training", total=pulse.steps)
        elif pulse.step <= self.last_step:  # the next run of a sweep
            self.progress.reset(self.training, total=pulse.steps)
        self.last_step = pulse.step
        self.progress.numbers = numbers
        self.progress.update(self.training, completed=pulse.step, visible=True)

    def evaluated(self, step: int, numbers: dict[str, float]) -> None:
        """Print how good the model is now."""
        named = {NAMES.get(name, name): numbers[f"val_{name}"] for name in NAMES if f"val_{name}" in numbers}
        shares = "".join(f"{name} {share:.2%}, " for name, share in named.items())
        self.say(f"step {step}: validation {shares}loss {numbers['val_loss']:.3f}")
