"""The command `vitkit demo`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_result, print_sections, print_table

if TYPE_CHECKING:
    from vitkit.evaluation.comparison import ComparisonResult


@click.command("demo")
@click.option(
    "--out", default="runs/demo", show_default=True, type=click.Path(path_type=Path), help="Output directory."
)
@click.option("--quick", is_flag=True, help="Train for a few steps only, as a test of the installation.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(out: Path, quick: bool, as_json: bool) -> None:
    """Train on built-in digits as `vitkit train digits --minutes 3` does, and compare with training from scratch.

    Takes about four minutes on two cores. Run the same command again to resume after an interruption.
    """
    import vitkit

    comparison = vitkit.demo(out=out, quick=quick)
    print_result(comparison, lambda result: print_comparison(result, out=out), as_json=as_json)


def print_comparison(comparison: "ComparisonResult", *, out: Path) -> None:
    """Print the accuracies, and commands to continue with."""
    rows = []
    for model in comparison.models:
        scores = model.scores
        if scores is None:
            continue
        low, high = scores.interval
        rows.append((model.label, f"{scores.top1:.1%}", f"{low:.1%}–{high:.1%}", f"{model.parameters:,}"))
    click.echo()
    print_table(("model", "top-1 on digits", "95 % interval", "parameters"), rows)
    click.echo()
    print_sections(
        {
            "Results": [("report", str(comparison.report_path)), ("all files", str(out))],
            "Next, with your images, one folder per class": [
                ("check them", "vitkit data check FOLDER"),
                ("train", "vitkit train FOLDER"),
                ("evaluate", "vitkit eval runs/FOLDER OTHER-FOLDER"),
            ],
        }
    )
