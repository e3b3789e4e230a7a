"""Output of commands: JSON, tables and sections on stdout, messages on stderr.

Commands import this module before they parse their options, so rich is imported only when something is printed.
"""

import json
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import click

from vitkit.core.console import logger
from vitkit.core.console import stderr_console as stderr_console  # noqa: PLC0414  commands import it from here
from vitkit.core.console import stdout_console as stdout_console  # noqa: PLC0414
from vitkit.core.formatting import safe_text
from vitkit.core.result import Result

ResultT = TypeVar("ResultT", bound=Result)
MAX_INDENTED = 100_000
"""Characters of JSON above which it is printed on one line: indented, lists of numbers take several times as many."""


def print_json(value: object) -> None:
    """Print strict JSON in ASCII to stdout, indented unless it is too long to be read.

    >>> print_json({"name": "B/16"})
    {
      "name": "B/16"
    }
    """
    text = json.dumps(value, allow_nan=False)
    click.echo(text if len(text) > MAX_INDENTED else json.dumps(value, indent=2))


def print_status(message: str) -> None:
    """Log a status message, which the command line prints to stderr."""
    logger.info("%s", message)


def print_result(result: ResultT, print_text: Callable[[ResultT], None], *, as_json: bool) -> None:
    """Print the warnings of a result to stderr, and the result as JSON or by `print_text`."""
    print_warnings(result.warnings)
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(result)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings to stderr in yellow."""
    for warning in warnings:
        stderr_console().print(safe_text(f"warning: {warning}"), style="yellow", soft_wrap=True)


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
