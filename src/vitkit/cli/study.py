"""The command `vitkit study`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_json, print_sections, print_table, print_warnings, stderr_console
from vitkit.core.config import parse_assignments
from vitkit.core.formatting import format_hours, format_plural, safe_text

if TYPE_CHECKING:
    from vitkit.studies.runner import StudyResult

CLUSTER_PFLOPS = 1e5
"""Compute from which a plan is in exaFLOPs, and its time on this machine means nothing."""


@click.command("study")
@click.argument("name", required=False, metavar="[NAME|FILE.toml]")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option("--out", type=click.Path(path_type=Path), help="Output directory. An interrupted study is resumed.")
@click.option("--quick", is_flag=True, help="One seed, a tenth of the steps, one learning rate, fewer labels.")
@click.option("--large", is_flag=True, help="Add the runs of the study's large form: a fourth budget of fig5.")
@click.option("--paper-scale", is_flag=True, help="The paper's models, data sizes and steps, for a cluster.")
@click.option("--recipes", is_flag=True, help="Write each run as a recipe to OUT/recipes, and start nothing.")
@click.option("--plan", is_flag=True, help="Print the runs and their cost, and start nothing.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print the list, the plan or the result as JSON.")
def command(
    name: str | None, settings: tuple[str, ...], out: Path | None, plan: bool, as_json: bool, **options: Any
) -> None:
    """Reproduce an experiment of the paper: a grid of runs, claims with verdicts, and a report.

    Without a name, list the studies. A study resumes after an interruption, never repeats a finished run, and continues
    past a failed one, after which the exit code is 1.

    \b
    vitkit study
    vitkit study table8 --plan
    vitkit study table8 --out runs/table8 --quick data.upstream=tiny-imagenet-200 data.downstream=cifar10
    vitkit study fig4 --out runs/fig4 --paper-scale --recipes data.upstream=JFT-300M data.downstream=imagenet
    vitkit study mine.toml --out runs/mine data.upstream=photos
    """
    import vitkit

    if name is None:
        studies = vitkit.list_studies()
        if as_json:
            print_json(list(studies.make_records()))
        else:
            print_table(studies.heads, studies.rows, left=(0, 4))
        return
    if out is None and not plan:
        raise click.UsageError("give --out DIR, or --plan")
    result = vitkit.study(name, out=out, plan=plan, settings=parse_assignments(settings), **options)
    if as_json:
        print_json(result.to_dict())
    elif plan:
        print_plan(result)
    elif options["recipes"]:
        print_warnings(result.warnings)
        assert out is not None
        count = len(list((out / "recipes").glob("*.toml")))
        click.echo(f"{count} recipes in {safe_text(str(out / 'recipes'))}; their commands are in runs.csv")
    else:
        print_study(result)
    if not plan and any(run.status == "failed" for run in result.runs):
        click.get_current_context().exit(1)


def print_plan(result: "StudyResult") -> None:
    """Print the runs with their compute, and their time unless they are for a cluster."""
    runs = format_plural(len(result.runs), "run")
    if result.pflops >= CLUSTER_PFLOPS:
        rows = [(run.name, run.status, f"{run.pflops / 1000:,.1f}") for run in result.runs]
        print_table(("run", "status", "exaFLOPs"), rows, left=(0, 1))
        click.echo(f"{runs}, {result.pflops / 1000:,.0f} exaFLOPs")
        return
    timed = [(run.name, run.status, f"{run.pflops:.4f}", f"{run.pflops / result.rate * 60:.1f}") for run in result.runs]
    print_table(("run", "status", "PFLOPs", "minutes"), timed, left=(0, 1))
    click.echo(f"{runs}, {result.pflops:.2f} PFLOPs, about {format_hours(result.hours)} left on this machine")


def print_study(result: "StudyResult") -> None:
    """Print the verdicts and the path of the report."""
    print_warnings(result.warnings)
    claims = [(claim.verdict, f"{claim.text} — {claim.detail}") for claim in result.claims]
    print_sections({f"{result.study.title}: {result.finished} of {len(result.runs)} runs finished": claims})
    stderr_console().print(safe_text(f"report: {result.report_path}"), soft_wrap=True)
