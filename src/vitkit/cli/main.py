"""The command `vitkit`: arguments go in, one sub-command is imported and run, an exit code comes out.

To add a command: write `vitkit/cli/NAME.py` with a click.Command called `command`, and its line in COMMANDS.
"""

import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from vitkit.cli.output import safe_text
from vitkit.core.errors import VitkitError, did_you_mean


class Entry(NamedTuple):
    """One command: its section in the help, the object to import when it is called, its line in the help."""

    section: str
    target: str
    summary: str


COMMANDS = {
    "demo": Entry("Start here", "vitkit.cli.demo:command", "The whole way on built-in images, with a report."),
    "train": Entry("Your images", "vitkit.cli.train:command", "Train a model on a folder of images, or by a recipe."),
    "finetune": Entry("Your images", "vitkit.cli.finetune:command", "Teach a trained model other classes."),
    "eval": Entry("Your images", "vitkit.cli.eval:command", "How good a trained model is, class by class."),
    "predict": Entry("Your images", "vitkit.cli.predict:command", "What a trained model says of images."),
    "compare": Entry("Your images", "vitkit.cli.compare:command", "Several runs in one table and one picture."),
    "fewshot": Entry("Your images", "vitkit.cli.fewshot:command", "How much a few examples of each class teach."),
    "suite": Entry("Your images", "vitkit.cli.suite:command", "Fine-tune and judge models on a list of data sets."),
    "inspect": Entry("Your images", "vitkit.cli.inspect:command", "What a model looks at and has learnt, as a report."),
    "data": Entry("Your images", "vitkit.cli.data:command", "Look at a data set before you train on it."),
    "recipes": Entry("Your images", "vitkit.cli.recipes:command", "List the recipes, or show one as TOML."),
    "models": Entry("Models", "vitkit.cli.models:command", "List the models and their sizes."),
    "cost": Entry("Models", "vitkit.cli.cost:command", "What a model costs to run and to train."),
    "weights": Entry("Models", "vitkit.cli.weights:command", "Look at weights of any origin; convert and adapt them."),
    "export": Entry("Models", "vitkit.cli.export:command", "Write a trained model for another library."),
    "serve": Entry("Models", "vitkit.cli.serve:command", "Answer for images over HTTP, with a page for people."),
    "bench": Entry("This machine", "vitkit.cli.bench:command", "How fast this machine runs a model, and how exactly."),
    "doctor": Entry("This machine", "vitkit.cli.doctor:command", "What this machine has, lacks and is best at."),
}

DONE, FAILED, USED_WRONGLY, INTERRUPTED = 0, 1, 2, 130

# A group called without a command, from click 8.2 on; click 8.1 prints the help by itself.
NO_COMMAND_ERROR: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())


@dataclass
class Session:
    """What options of the whole program decide; every command finds it in its context as `obj`."""

    verbose: bool = False


class UnknownCommandError(click.UsageError):
    """A command that is not in the table, with the nearest that is."""

    def __init__(self, name: str, context: click.Context) -> None:
        super().__init__(f"no such command {name!r}", context)
        self.hint = did_you_mean(name, COMMANDS)


class LazyGroup(click.Group):
    """A group that knows its commands by the table and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the named command, and let it take `-v` too."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        accept_verbose(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with, or say which was meant."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise UnknownCommandError(args[0], ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table by sections, all names in one column."""
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
                )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a name from the table, or one of vitkit's own options."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name].summary) for name in names), *options]

    def invoke(self, ctx: click.Context) -> int:
        """Run the command. What it returns is no exit code; `Context.exit` is how a command chooses one."""
        super().invoke(ctx)
        return DONE


def accept_verbose(command: click.Command) -> None:
    """Give a command, and the commands inside it, the option `-v`, unless they have one."""
    if not any("-v" in parameter.opts for parameter in command.params):
        command.params.append(
            click.Option(
                ["-v", "--verbose"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_remember_verbose,
                help="Show the traceback of an error.",
            )
        )
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            accept_verbose(inner)


def _remember_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Session).verbose = True


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Run 'vitkit COMMAND --help' to learn more about a command.",
)
@click.version_option(package_name="vitkit", message="%(prog)s %(version)s")
def vitkit() -> None:
    """The Vision Transformer of "An Image is Worth 16x16 Words", whole and exact."""


accept_verbose(vitkit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    vitkit ...
    0
    """
    session = Session()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name the terminal cannot show is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Click ends quietly when the reader of a pipe has left.
        exit_code: int = vitkit.main(arguments, prog_name="vitkit", standalone_mode=False, obj=session)
    except Exception as error:
        return conclude(error, verbose=session.verbose)
    return exit_code


def conclude(error: Exception, *, verbose: bool) -> int:
    """Tell the user about the error on stderr and return the exit code that it calls for.

    >>> conclude(VitkitError("no such file", hint="see vitkit models"), verbose=False)
    1
    """
    if isinstance(error, click.Abort):  # what click makes of KeyboardInterrupt
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return _conclude_usage(error)
    if verbose:
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(safe_text(line), err=True)
    if isinstance(error, VitkitError):
        print_error(str(error), hint=error.hint)
    elif isinstance(error, OSError) and error.strerror:  # a full disk, a folder that is read-only: not ours to foresee
        place = f"{error.filename}: " if error.filename else ""
        print_error(f"{place}{error.strerror}", hint="mend this and run the same command again")
    else:
        hint = None if verbose else "this is not expected; run it again with -v to see where it happened"
        print_error(f"{type(error).__name__}: {error}".removesuffix(": "), hint=hint)
    return FAILED


def _conclude_usage(error: click.ClickException) -> int:
    """Print click's own errors in vitkit's two lines."""
    if isinstance(error, NO_COMMAND_ERROR):
        click.echo(error.format_message(), err=True)
        return USED_WRONGLY
    message, hint = error.format_message(), getattr(error, "hint", None)
    if possibilities := getattr(error, "possibilities", None):  # click would put them into the message
        message, hint = error.message, f"did you mean {' or '.join(possibilities)}?"
    if hint is None and isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"run {error.ctx.command_path} --help"
    if message[1:2].islower():  # click begins with a capital letter; a name such as B/16 keeps its own
        message = message[0].lower() + message[1:]
    print_error(message.removesuffix("."), hint=hint)
    return error.exit_code


def print_error(message: str, *, hint: str | None = None) -> None:
    """Print one `error:` line and, if there is one, one `hint:` line to stderr.

    >>> print_error("no such file", hint="see vitkit models")
    """
    color = False if os.environ.get("NO_COLOR") else None
    for label, style, text in (("error:", "red", message), ("hint:", "cyan", hint)):
        if text:
            line = safe_text(re.sub(r"\s*\n\s*", " ", text.strip()))
            click.echo(f"{click.style(label, fg=style, bold=True)} {line}", err=True, color=color)
