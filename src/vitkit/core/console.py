"""Consoles of this process: results go to stdout, progress and messages to stderr. rich is imported at first use."""

import io
import logging
from typing import TYPE_CHECKING, Any

from vitkit.core.formatting import get_log_format

if TYPE_CHECKING:
    import rich.console

logger = logging.getLogger("vitkit")
logger.addHandler(logging.NullHandler())  # a program that uses vitkit configures logging, not the library


def stdout_console() -> "rich.console.Console":
    """Create a console for results. Markup is off: `[serve]` is printed literally.

    >>> stdout_console().print("pip install 'vitkit[serve]'")
    pip install 'vitkit[serve]'
    """
    return _console()


def stderr_console() -> "rich.console.Console":
    """Create a console for progress and messages. With `--log-format json` each line becomes a log record.

    >>> stderr_console().print("checking 3 images")
    """
    if get_log_format() == "json":
        return _console(file=LogStream(), width=10_000)
    return _console(stderr=True)


def _console(**options: Any) -> "rich.console.Console":
    from rich.console import Console  # noqa: PLC0415  commands print without it

    return Console(highlight=False, markup=False, emoji=False, **options)


class LogStream(io.TextIOBase):
    """Text stream that logs each line; `warning: ` at its start sets the level."""

    def __init__(self) -> None:
        self.incomplete = ""

    def write(self, text: str) -> int:
        """Log all complete lines."""
        *lines, self.incomplete = (self.incomplete + text).split("\n")
        for line in filter(None, map(str.rstrip, lines)):
            level = logging.WARNING if line.startswith("warning: ") else logging.INFO
            logger.log(level, "%s", line.removeprefix("warning: "))
        return len(text)
