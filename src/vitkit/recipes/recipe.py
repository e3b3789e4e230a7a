"""Recipe: a run's configuration with its command, time and expected result."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vitkit.core.config import to_toml
from vitkit.core.result import select
from vitkit.training.config import RunConfig

_LINE = 118


@dataclass(frozen=True)
class Recipe:
    """A complete run and its description.

    `time` is the duration with its hardware, `expected` the result with its source. A recipe with `rates`, the learning
    rates of its sweep, fine-tunes; its `make` sets neither initial weights nor data.
    """

    group: str
    name: str
    make: Callable[[], RunConfig]
    summary: str
    command: str
    time: str
    expected: str
    rates: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["pretrain", "finetune"]:
        """Whether the recipe trains from scratch or fine-tunes."""
        return "finetune" if self.rates else "pretrain"

    def header(self) -> dict[str, str]:
        """Return the lines of the header by their labels."""
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        lines = {"command": self.command, "time": self.time, "expected": self.expected}
        return lines | ({"sweep": f"lr {rates}"} if rates else {})

    def to_dict(self) -> dict[str, object]:
        """Return the description as plain data."""
        return select(self, "name", "group", "kind", "summary", "command", "time", "expected", "rates")

    def toml(self) -> str:
        """Format the recipe as a TOML file: the header in comments, then all settings."""
        lines = [f"{self.name}: {self.summary}", ""]
        for label, text in self.header().items():
            line = f"{label + ':':10}{text}"
            lines += textwrap.wrap(line, _LINE, subsequent_indent=" " * 10, break_long_words=False)
        comments = "\n".join(f"# {line}".rstrip() for line in lines)
        return f"{comments}\n\n{to_toml(self.make())}"


def slug(model: str) -> str:
    """Return a model's name in the form used in recipe names.

    >>> slug("B/16"), slug("R50+L/32"), slug("BiT-R152x2")
    ('b16', 'r50-l32', 'r152x2')
    """
    return model.lower().removeprefix("bit-").replace("/", "").replace("+", "-")
