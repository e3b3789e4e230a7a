"""Error output of the command line: one `error:` line, one `hint:` line, and the exit code."""

import logging
import os
import re
import traceback
from dataclasses import fields

import click

from vitkit.core.errors import VitkitError, summarize
from vitkit.core.formatting import get_log_format, safe_text

EXIT_FAILURE, EXIT_SIGINT = 1, 130

logger = logging.getLogger("vitkit")


def report_error(error: Exception, *, verbose: bool) -> int:
    """Print an error to stderr and return its exit code.

    >>> report_error(VitkitError("no such file", hint="see vitkit models"), verbose=False)
    1
    """
    if isinstance(error, click.Abort):  # click raises it for KeyboardInterrupt
        click.echo("interrupted", err=True)
        return EXIT_SIGINT
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if isinstance(error, click.ClickException):
        message, hint = _describe_click_error(error)
        print_error(message, hint=hint)
        return error.exit_code
    if verbose:
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(safe_text(line), err=True)
    if isinstance(error, VitkitError):
        message, hint = summarize(error), error.hint
    elif isinstance(error, OSError) and error.strerror:  # a full disk, a read-only directory: no bug of vitkit
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        hint = "fix this and run the same command again"
    else:
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        hint = None if verbose else "this is a bug in vitkit; run the command again with -v for the traceback"
    print_error(message, hint=hint)
    return EXIT_FAILURE


def _describe_click_error(error: click.ClickException) -> tuple[str, str | None]:
    """Return the message and the hint of an error of click."""
    message, hint = error.format_message(), getattr(error, "hint", None)
    if possibilities := getattr(error, "possibilities", None):  # click appends them to the message
        message, hint = error.message, f"did you mean {' or '.join(possibilities)}?"
    context = error.ctx if isinstance(error, click.UsageError) else None
    parameters = [] if context is None else [each.name for each in context.command.params]
    if isinstance(error, click.NoSuchOption) and "settings" in parameters:
        from vitkit.training.config import SHORT_KEYS, RunConfig

        name = error.option_name.lstrip("-").replace("-", "_")
        if name.partition(".")[0] in {*SHORT_KEYS, *(field.name for field in fields(RunConfig))}:
            hint = f"settings have no dashes: {name}=VALUE"
    if hint is None and context is not None:
        hint = f"run {context.command_path} --help"
    if message[1:2].islower():  # click's messages begin with a capital letter; a name such as B/16 keeps its own
        message = message[0].lower() + message[1:]
    return message.removesuffix("."), hint


def print_error(message: str, *, hint: str | None = None) -> None:
    """Print an `error:` line and, if there is a hint, a `hint:` line to stderr; as JSON, one object.

    >>> print_error("no such file", hint="see vitkit models")
    """
    if get_log_format() == "json":
        logger.error(message, extra={"fields": {"hint": hint} if hint else {}})
        return
    color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
    for label, style, text in (("error:", "red", message), ("hint:", "cyan", hint)):
        if text:
            line = safe_text(re.sub(r"\s*\n\s*", " ", text.strip()))
            click.echo(f"{click.style(label, fg=style, bold=True)} {line}", err=True, color=color)
