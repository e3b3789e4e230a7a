"""What a run tells whoever watches it, as it happens; a command line shows it, a test ignores it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """One step's numbers. `shares` are by name; `waiting` is that of the time since the last pulse spent waiting for
    images.
    """

    step: int
    steps: int
    epoch: float
    loss: float
    lr: float
    images_per_second: float
    waiting: float
    seconds_left: float
    shares: dict[str, float] = field(default_factory=dict)


def on_the_clock(seconds: float) -> str:
    """Hours, minutes and seconds, of more than a day too.

    >>> on_the_clock(100_000.4)
    '27:46:40'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


class Watcher:
    """Hears of everything and does nothing; a command line overrides what it wants to show."""

    def say(self, message: str) -> None:
        """Something worth a line of its own."""

    def warn(self, message: str) -> None:
        """Something that the user should know of, though the run goes on."""

    def work(self, what: str, total: int) -> None:
        """A piece of work with a known length begins: checking files, evaluating."""

    def advance(self, by: int) -> None:
        """So much more of it is done."""

    def pulse(self, pulse: Pulse) -> None:
        """A training step was made."""

    def evaluated(self, step: int, numbers: dict[str, float]) -> None:
        """The model was judged on the validation images."""

    def saved(self, step: int) -> None:
        """A checkpoint was committed."""
