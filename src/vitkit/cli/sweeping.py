"""A fine-tuning run and learning rates go in; the sweep is carried out, shown and concluded with an exit code."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.machine import prepare_for_training
from vitkit.cli.output import print_json, result_console, talk_console
from vitkit.cli.running import print_result
from vitkit.core.stopping import SAVED_AND_STOPPED, listening

if TYPE_CHECKING:
    from vitkit.train.config import RunConfig
    from vitkit.train.sweep import Trial


def carry_out_sweep(
    make: "Callable[[], RunConfig]", *, recipe: str, rates: str | None, out: Path, as_json: bool
) -> None:
    """Sweep, show progress, print all trials and the final result."""
    tried = read_rates(rates) if rates is not None else None
    leads = os.environ.get("RANK", "0") == "0"
    with listening() as stop:
        prepare_for_training()
        from vitkit.cli.watching import Shown
        from vitkit.recipes.table import find
        from vitkit.train.sweep import sweep

        with Shown() as watcher:
            found = sweep(make(), tried or find(recipe).rates, out, watcher=watcher, stop=stop)
    if found.final is None or found.final.summary is None:
        if leads:
            talk_console().print(f"stopped by {stop.signal or 'another rank'}; run the same command again to go on")
        click.get_current_context().exit(SAVED_AND_STOPPED)
    if not leads:
        return
    if as_json:
        trials = [vars(trial) for trial in found.trials]
        print_json(found.final.summary | {"sweep": trials})
        return
    print_trials(list(found.trials))
    print_result(found.final, as_json=False)


def read_rates(text: str) -> tuple[float, ...]:
    """The learning rates in a list with commas.

    >>> read_rates("0.001, 3e-3")
    (0.001, 0.003)
    """
    try:
        rates = tuple(float(rate) for rate in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise click.BadParameter(
            f"{text!r} is not a list of positive numbers, such as 0.001,0.003", param_hint="--rates"
        )
    return rates


def print_trials(trials: "list[Trial]") -> None:
    """Print what each rate gave."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("lr", "held-out top-1", "held-out loss"):
        table.add_column(heading, justify="right")
    best = max(trials, key=lambda each: (each.val_top1, -each.val_loss))
    for trial in trials:
        style = "bold" if trial is best else None
        table.add_row(f"{trial.lr:g}", f"{trial.val_top1:.2%}", f"{trial.val_loss:.3f}", style=style)
    result_console().print(table)
