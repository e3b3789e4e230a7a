"""The command `vitkit demo`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_json, print_sections, print_table
from vitkit.cli.running import training_session

if TYPE_CHECKING:
    from vitkit.training.run import RunResult


@click.command("demo")
@click.option(
    "--out", default="runs/demo", show_default=True, type=click.Path(path_type=Path), help="Output directory."
)
@click.option("--quick", is_flag=True, help="Train for a few steps only, as a test of the installation.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(out: Path, quick: bool, as_json: bool) -> None:
    """Pre-train on fractals, fine-tune on digits at a higher resolution, evaluate, and write a report.

    Takes a few minutes on two cores and downloads nothing. Run the same command again to resume after an interruption.
    """
    with training_session() as (progress, stop):
        from vitkit.recipes.train import demo

        results = demo(out=out, quick=quick, callback=progress, stop=stop)
    runs = {name: summarize(result) for name, result in results.items()}
    report = results["fractals-then-digits"].run_dir.report
    if as_json:
        print_json({"runs": runs, "report": str(report)})
    else:
        print_tour(runs, report=report, out=out)


def summarize(result: "RunResult") -> dict[str, object]:
    """Return the numbers of a run that the demo prints."""
    summary = result.summary or {}
    evaluation, compute = summary.get("result"), summary.get("compute")
    numbers: dict[str, object] = {}
    if isinstance(evaluation, Mapping):
        interval = evaluation["intervals"]["top1"]
        numbers |= {"top1": evaluation["top1"], "interval": interval, "count": evaluation["count"]}
    if isinstance(compute, Mapping):
        numbers |= {key: compute[key] for key in ("parameters", "images_seen", "images_per_second", "exaflops")}
    return numbers


def print_tour(runs: Mapping[str, Mapping[str, object]], *, report: Path, out: Path) -> None:
    """Print a table of the runs, and commands to continue with."""
    rows = []
    for name, row in runs.items():
        low, high = row["interval"] if isinstance(row["interval"], list | tuple) else (0.0, 0.0)
        images = f"{row['count']} {'fractals' if name == 'fractals' else 'digits'}"
        accuracy = (f"{row['top1']:.1%}", f"{low:.1%}–{high:.1%}", images)
        rows.append((name, *accuracy, f"{row['images_seen']:,}", f"{row['images_per_second'] or 0:,.0f}"))
    click.echo()
    print_table(("run", "top-1", "95 % interval", "evaluated on", "images seen", "images/s"), rows)
    click.echo()
    finetune = f"vitkit finetune {out / 'fractals'} FOLDER --out runs/tuned channels=1"
    print_sections(
        {
            "Results": [("report", str(report)), ("all files", str(out))],
            "Next, with your images, one folder per class": [
                ("check them", "vitkit data check FOLDER"),
                ("train", "vitkit train FOLDER --out runs/mine"),
                ("evaluate", "vitkit eval runs/mine FOLDER"),
                ("or fine-tune these weights", finetune),
            ],
        }
    )
