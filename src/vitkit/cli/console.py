"""Output of commands: JSON, tables and sections on stdout, messages and progress on stderr.

Commands import this module before they parse their options, so rich is imported only when something is printed.
"""

import io
import json
import logging
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from vitkit.core.formatting import get_log_format, safe_text

if TYPE_CHECKING:
    import rich.console
    from rich.progress import TaskID

    from vitkit.core.signals import ProgressFunction

logger = logging.getLogger("vitkit")


def print_json(value: object) -> None:
    """Print strict JSON in ASCII to stdout.

    >>> print_json({"name": "B/16"})
    {
      "name": "B/16"
    }
    """
    click.echo(json.dumps(value, indent=2, allow_nan=False))


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


def print_status(message: str) -> None:
    """Log a status message, which the command line prints to stderr."""
    logger.info("%s", message)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings to stderr in yellow."""
    for warning in warnings:
        stderr_console().print(safe_text(f"warning: {warning}"), style="yellow", soft_wrap=True)


@contextmanager
def show_progress() -> "Iterator[ProgressFunction]":
    """Show a progress bar for each task on stderr, if it is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def update(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(safe_text(task), total=total, visible=total > 0)
            bars.update(tasks[task], completed=done, total=total)

        yield update


def _console(**options: Any) -> "rich.console.Console":
    from rich.console import Console

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


def print_sections(sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Print labels and values in two columns under headings, without empty sections.

    >>> print_sections({"Model": [("name", "B/16"), ("parameters", "86.6 M")]})
    Model
      name        B/16
      parameters  86.6 M
    """
    from rich.text import Text

    console = stdout_console()
    filled = {title: rows for title, rows in sections.items() if rows}
    width = max((len(safe_text(label)) for rows in filled.values() for label, _ in rows), default=0)
    for number, (title, rows) in enumerate(filled.items()):
        console.print(Text(f"\n{title}" if number else title, style="bold"))
        for label, value in rows:
            text = Text("\n".join(_wrap_row(label, value, left=width, right=console.width - width - 4)))
            text.stylize("cyan", 0, width + 2)
            console.print(text)


def _wrap_row(label: str, value: str, *, left: int, right: int) -> list[str]:
    lines = textwrap.wrap(safe_text(value), max(right, 20), break_on_hyphens=False) or [""]
    return [f"  {safe_text(label):{left}}  {lines[0]}", *(f"  {'':{left}}  {line}" for line in lines[1:])]


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), bold: Collection[int] = ()
) -> None:
    """Print a table whose lines are never cut; `left` are the columns of text, `bold` the rows to emphasize.

    >>> print_table(("model", "top-1"), [("B/16", "81.1%"), ("L/16", "9.3%")])
    model  top-1
    B/16   81.1%
    L/16    9.3%
    """
    from rich.cells import cell_len
    from rich.text import Text

    table = [list(map(safe_text, row)) for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    console = stdout_console()
    for number, row in enumerate(table, start=-1):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            cells.append(cell + space if column in left else space + cell)
        line = Text("  ".join(cells).rstrip(), style="bold" if number < 0 or number in bold else "")
        if number >= 0:
            line.stylize("cyan", 0, len(cells[0]))
        console.print(line, soft_wrap=True)
