"""The command `vitkit suite`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_table, stderr_console
from vitkit.cli.options import RATES, CommaSeparated
from vitkit.core.config import parse_assignments
from vitkit.core.environment import is_main_rank
from vitkit.core.formatting import MISSING, safe_text

if TYPE_CHECKING:
    from vitkit.evaluation.leaderboard import Leaderboard


@click.command("suite")
@click.argument("name", metavar="NAME|FILE.toml")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Output directory. An interrupted suite is resumed."
)
@click.option("--model", "models", multiple=True, metavar="WEIGHTS", help="Model to fine-tune; repeat it for several.")
@click.option("--data", help="Directory of the datasets.")
@click.option("--only", type=CommaSeparated(click.STRING), help="Run some of the datasets, such as pets,flowers.")
@click.option("--rates", type=RATES, help="Learning rates to try on every dataset, instead of the recipes'.")
@click.option("--skip-missing", is_flag=True, help="Skip datasets that do not exist.")
@click.option("--json", "as_json", is_flag=True, help="Print the leaderboard as JSON.")
def command(name: str, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Fine-tune and evaluate models on every dataset of a suite, and print a leaderboard.

    A suite is vtab-1k, table2 (the paper's Table 2), or a TOML file. For each model and dataset the learning rate is
    swept, the model is trained on all training images and evaluated on the test images. Finished results are kept: run
    the same command again to resume. The leaderboard is also written to the output directory, as suite.csv, suite.json,
    picture.svg and report.html.

    \b
    vitkit suite vtab-1k --model ViT-B_16.npz --data vtab-1k --out runs/vtab
    vitkit suite table2 --model ViT-B_16.npz --model ViT-L_16.npz --data data --out runs/table2 --only pets,flowers
    vitkit suite mine.toml --out runs/mine steps=100
    """
    import vitkit

    leaderboard = vitkit.suite(name, settings=parse_assignments(settings), **options)
    if is_main_rank():
        print_result(leaderboard, print_leaderboard, as_json=as_json)


def print_leaderboard(leaderboard: "Leaderboard") -> None:
    """Print one row per dataset and one column per model, in per cent as in Table 2."""
    models, rows, means = leaderboard.models, [], []
    for index, row in enumerate(leaderboard.rows()):
        title = row.title
        if row.kind != "dataset":
            title = f"{row.title}, {row.description}"
            means.append(index)
        cells = (f"{row.scores[model].top1 * 100:.2f}" if model in row.scores else MISSING for model in models)
        rows.append((title, *cells))
    print_table((leaderboard.title, *models), rows, bold=means)
    stderr_console().print(safe_text(f"report: {leaderboard.report_path}"), soft_wrap=True)
