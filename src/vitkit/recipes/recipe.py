"""A run's configuration and what is known about it go in, a recipe that can be shown and carried out comes out."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vitkit.core.config import to_toml
from vitkit.train.config import RunConfig

_LINE = 118


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run under its head.

    `time` says how long it takes and on what; `expected` says what comes out, and who found that. A fine-tuning recipe
    names no model: `vitkit finetune` puts in the weights and the data. `rates` are the learning rates of its sweep.
    """

    name: str
    group: str
    summary: str
    command: str
    time: str
    expected: str
    make: Callable[[], RunConfig]
    kind: Literal["pretrain", "finetune"] = "pretrain"
    rates: tuple[float, ...] = ()

    def head(self) -> dict[str, str]:
        """What stands above the run, by its label."""
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        lines = {"command": self.command, "time": self.time, "expected": self.expected}
        return lines | ({"sweep": f"lr {rates}"} if rates else {})

    def toml(self) -> str:
        """The recipe as a TOML file: its head in comments, then every setting of the run."""
        lines = [f"{self.name}: {self.summary}", ""]
        for label, text in self.head().items():
            lines += _hanging(f"{label}:", text)
        comments = "\n".join(f"# {line}".rstrip() for line in lines)
        return f"{comments}\n\n{to_toml(self.make())}"


def slug(model: str) -> str:
    """A model's name as part of a recipe's name.

    >>> slug("B/16"), slug("R50+L/32"), slug("BiT-R152x2")
    ('b16', 'r50-l32', 'r152x2')
    """
    return model.lower().removeprefix("bit-").replace("/", "").replace("+", "-")


def _hanging(label: str, text: str) -> list[str]:
    """The label and its text, whose further lines begin under its first word."""
    return textwrap.wrap(f"{label:10}{text}", _LINE, subsequent_indent=" " * 10, break_long_words=False)
