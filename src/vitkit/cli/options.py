"""Options and parameter types that several commands share."""

import re
from dataclasses import dataclass
from typing import Any

import click

from vitkit.core.formatting import LogFormat, configure_logging
from vitkit.core.sizes import Size

PRECISION = click.Choice(["fp32", "bf16", "int8"])
device_option = click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=0),
    help="Processes that decode images.  [default: two, or one on a single core]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
precision_option = click.option(
    "--precision",
    type=PRECISION,
    default="fp32",
    show_default=True,
    help="Precision of matrix products; bf16 and int8 are faster and less exact.",
)
merge_option = click.option(
    "--merge",
    type=click.IntRange(min=0),
    metavar="R",
    default=0,
    show_default=True,
    help="Merge R tokens in every layer (ToMe): faster and less exact.",
)


class SizeParameter(click.ParamType[Size]):
    """Image size: 384 for a square, 224x320 for height and width."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Size:
        """Parse the size."""
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(value))
        if not match:
            self.fail(f"{value!r} is not a size; use 384, or 224x320 for height and width", param, ctx)
        return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


class CommaSeparated(click.ParamType[list[Any]]):
    """Comma-separated values of another type, without duplicates.

    >>> CommaSeparated(click.FLOAT).convert("0.001, 3e-3", None, None)
    [0.001, 0.003]
    """

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self.item = item

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Convert each value; fail if there are none."""
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        items = list(dict.fromkeys(self.item.convert(part, param, ctx) for part in parts))
        return items or self.fail("the list is empty", param, ctx)


COUNTS = CommaSeparated(click.IntRange(min=1))
"""Numbers of at least 1."""
RATES = CommaSeparated(click.FloatRange(min=0, max=float("inf"), min_open=True, max_open=True))
"""Learning rates."""
PRECISIONS = CommaSeparated(PRECISION)
"""Precisions of engines."""


@dataclass
class Session:
    """Options of the whole program, available to every command as `context.obj`."""

    verbose: bool = False


def add_global_options(command: click.Command) -> None:
    """Add `-v` and `--log-format` to a command and its subcommands, so that they are accepted anywhere."""
    names = {name for parameter in command.params for name in parameter.opts}
    if "-v" not in names:
        command.params += [
            click.Option(
                ["-v", "--verbose"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_set_verbose,
                help="Print the traceback of an error.",
            ),
            click.Option(
                ["--log-format"],
                type=click.Choice(["text", "json"]),
                is_eager=True,
                expose_value=False,
                callback=_set_log_format,
                help="Format of messages on stderr.  [default: text]",
            ),
        ]
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            add_global_options(subcommand)


def _set_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Session).verbose = True


def _set_log_format(context: click.Context, parameter: click.Parameter, value: LogFormat | None) -> None:
    if value:
        configure_logging(value)
