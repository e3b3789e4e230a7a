"""Entry point of the command `vitkit`: table of commands, lazy imports, and options of the whole program.

To add a command, write `vitkit/cli/NAME.py` with a `click.Command` called `command`, and an entry in SECTIONS.
"""

import importlib
import io
import logging
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from vitkit.cli.errors import report_error
from vitkit.cli.options import Session, add_global_options
from vitkit.core.environment import is_main_rank, limit_threads
from vitkit.core.formatting import configure_logging
from vitkit.core.signals import EXIT_INTERRUPTED, Interrupted

SECTIONS = {
    "Get started": {"demo": "Train on built-in images and open the report."},
    "Train": {
        "train": "Train on a folder of images, or run a recipe.",
        "finetune": "Fine-tune a model on other images.",
        "suite": "Fine-tune and evaluate models on several datasets.",
        "study": "Reproduce an experiment of the paper.",
        "recipes": "List the recipes, or print one as TOML.",
        "data": "Check a dataset and the quality of its labels.",
    },
    "Evaluate and predict": {
        "eval": "Evaluate a model on a dataset.",
        "predict": "Predict the classes of images.",
        "fewshot": "Fit classifiers on a few images per class.",
        "compare": "Compare models, with significance tests.",
        "inspect": "Report what a model attends to and has learned.",
    },
    "Models and weights": {
        "models": "List the models and their sizes.",
        "cost": "Count the operations and memory of a model.",
        "weights": "Describe, convert, adapt and verify weights.",
    },
    "Deploy": {
        "export": "Export a model to ONNX, OpenVINO or another library.",
        "serve": "Serve models over HTTP, with a web page.",
        "bench": "Measure the speed and exactness of a model here.",
    },
    "System": {
        "doctor": "Check hardware and installation.",
        "cache": "Show or clear the cache of kernels and features.",
    },
}
"""Summary of each command by section of the help."""
COMMANDS = {name: summary for summaries in SECTIONS.values() for name, summary in summaries.items()}


class LazyGroup(click.Group):
    """Group that imports a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and add the options of the whole program."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"vitkit.cli.{cmd_name}").command
        add_global_options(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, or raise with a suggestion."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            message = f"no such command {args[0]!r}"
            raise click.exceptions.NoSuchCommand(args[0].lower(), message, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table by sections, with all names in one column."""
        width = max(map(len, COMMANDS))
        for section, summaries in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in summaries.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command or an option without importing commands."""
        commands = [
            CompletionItem(name, help=summary) for name, summary in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> int:
        """Run the command. Its return value is ignored: a command sets another exit code with `Context.exit`."""
        try:
            super().invoke(ctx)
        except Interrupted as interruption:
            if is_main_rank():
                logging.getLogger("vitkit").info("%s", interruption)
            ctx.exit(EXIT_INTERRUPTED)
        return 0


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Run 'vitkit COMMAND --help' for the options of a command.",
)
@click.version_option(package_name="vitkit", message="%(prog)s %(version)s")
def vitkit() -> None:
    """Train, evaluate, inspect and serve Vision Transformers."""


add_global_options(vitkit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 success, 1 failure, 2 usage error, 130 Ctrl-C.

    Training commands exit with 75 if they were interrupted and saved.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    vitkit ...
    0
    """
    session = Session()
    configure_logging()
    limit_threads()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot show must not fail the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # click exits quietly when the reader of a pipe has closed it.
        exit_code: int = vitkit.main(arguments, prog_name="vitkit", standalone_mode=False, obj=session)
    except Exception as error:
        return report_error(error, verbose=session.verbose)
    return exit_code
