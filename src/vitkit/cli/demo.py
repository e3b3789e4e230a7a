"""The command `vitkit demo`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_json, print_sections, print_table

if TYPE_CHECKING:
    from vitkit.api.run import Run


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
    import vitkit

    comparison = vitkit.demo(out=out, quick=quick)
    if as_json:
        print_json(comparison.to_dict())
    else:
        runs = {
            name: summarize(vitkit.Run(out / name)) for name in ("from-scratch", "fractals", "fractals-then-digits")
        }
        print_tour(runs, report=comparison.report_path, out=out)


def summarize(run: "Run") -> dict[str, object]:
    """Return the numbers of a run that the demo prints."""
    summary = run.to_dict()
    evaluation, compute = summary.get("result"), summary.get("compute")
    numbers: dict[str, object] = {}
    if isinstance(evaluation, Mapping):
        interval = evaluation["intervals"]["top1"]
        numbers |= {"top1": evaluation["top1"], "interval": interval, "count": evaluation["count"]}
    if isinstance(compute, Mapping):
        numbers |= {key: compute[key] for key in ("parameters", "images_seen", "images_per_second", "exaflops")}
    return numbers


def print_tour(runs: Mapping[str, Mapping[str, object]], *, report: Path | None, out: Path) -> None:
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
