"""How commands write: values go in; JSON, readable numbers and terminal-safe text come out.

The command table imports this module to print errors, so rich is imported only where a console is made.
"""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import rich.console

# Control characters, line separators, direction overrides, and the lone surrogates of undecodable file names.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe_text(text: str) -> str:
    r"""The text with everything that could steer a terminal, or not be encoded, written as an escape.

    >>> print(safe_text("cat\x1b[31m.jpg"))
    cat\x1b[31m.jpg
    """
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_json(value: object) -> None:
    """Print the value to stdout as strict JSON in ASCII, which every terminal, pipe and parser can take.

    >>> print_json({"name": "B/16"})
    {
      "name": "B/16"
    }
    """
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def result_console() -> "rich.console.Console":
    """A console on stdout, for results. Strings are printed as they are: `[serve]` is not a style.

    >>> result_console().print("pip install 'vitkit[serve]'")
    pip install 'vitkit[serve]'
    """
    return _console(stderr=False)


def talk_console() -> "rich.console.Console":
    """A console on stderr, for progress and remarks that must not mix with results.

    >>> talk_console().print("examining 3 images")
    """
    return _console(stderr=True)


def _console(*, stderr: bool) -> "rich.console.Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_sections(sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Print labels and values in two columns under headings; an empty section is left out.

    >>> print_sections({"Model": [("name", "B/16"), ("parameters", "86.6 M")]})
    Model
      name        B/16
      parameters  86.6 M
    """
    from rich.text import Text

    console = result_console()
    filled = {title: rows for title, rows in sections.items() if rows}
    width = max((len(safe_text(label)) for rows in filled.values() for label, _ in rows), default=0)
    for number, (title, rows) in enumerate(filled.items()):
        console.print(Text(f"\n{title}" if number else title, style="bold"))
        for label, value in rows:
            text = Text("\n".join(_in_columns(label, value, left=width, right=console.width - width - 4)))
            text.stylize("cyan", 0, width + 2)
            console.print(text)


def _in_columns(label: str, value: str, *, left: int, right: int) -> list[str]:
    """The lines of one label and its value, which is wrapped inside its column."""
    lines = textwrap.wrap(safe_text(value), max(right, 20), break_on_hyphens=False) or [""]
    return [f"  {safe_text(label):{left}}  {lines[0]}", *(f"  {'':{left}}  {line}" for line in lines[1:])]


def format_count(count: int | float) -> str:
    """A count to three or four digits, in thousands, millions, billions.

    >>> format_count(86_567_656), format_count(196)
    ('86.6 M', '196')
    """
    return _scaled(count, ("", "k", "M", "G", "T"))


def format_bytes(size: int | float) -> str:
    """A size in decimal units, as on the label of a disk.

    >>> format_bytes(1_204_000_000), format_bytes(512)
    ('1.2 GB', '512 B')
    """
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def _scaled(number: int | float, units: tuple[str, ...]) -> str:
    """The number in the largest unit that leaves at least 1.0 of it."""
    power = 0
    while abs(number) >= (999.95 if power else 999.5) and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.{1 if power else 0}f} {units[power]}".rstrip()
