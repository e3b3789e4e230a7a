"""`vitkit demo`: nothing goes in; a pre-trained, fine-tuned and judged model comes out, on built-in images."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.machine import prepare_for_training
from vitkit.cli.output import print_json, print_sections, result_console, talk_console
from vitkit.core.stopping import SAVED_AND_STOPPED, listening

if TYPE_CHECKING:
    from vitkit.train.config import RunConfig
    from vitkit.train.run import Result


@click.command("demo")
@click.option(
    "--out", default="runs/demo", show_default=True, type=click.Path(path_type=Path), help="Where it is kept."
)
@click.option("--quick", is_flag=True, help="A few steps of everything, to see that it works here.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(out: Path, quick: bool, as_json: bool) -> None:
    """Pre-train on fractals, fine-tune on digits at a higher resolution, judge, and write a report.

    It takes a few minutes on two cores and needs no download. Stop it when you like; the same command goes on.
    """
    with listening() as stop:
        prepare_for_training()
        from vitkit.cli.watching import Shown
        from vitkit.recipes import demo
        from vitkit.train.run import run

        scratch, fractals, tuned = out / "from-scratch", out / "fractals", out / "fractals-then-digits"
        steps = {
            "1/3 · digits from scratch, to compare with": (scratch, demo.digits()),
            "2/3 · pre-training on fractals, images drawn from formulas": (fractals, demo.fractals()),
            "3/3 · fine-tuning the same model on digits, at a higher resolution": (
                tuned,
                demo.tuned_digits(weights=str(fractals), beside=str(scratch)),
            ),
        }
        results = {}
        for title, (folder, config) in steps.items():
            talk_console().print(f"\n{title}", style="bold")
            with Shown() as watcher:
                result = run(shortened(config) if quick else config, folder, watcher=watcher, stop=stop)
            if result.summary is None:
                talk_console().print(f"stopped by {stop.signal}; run the same command again to go on")
                click.get_current_context().exit(SAVED_AND_STOPPED)
            results[folder] = result
    figures = {folder.name: figures_of(result) for folder, result in results.items()}
    if as_json:
        print_json({"runs": figures, "report": str(tuned / "report.html")})
        return
    print_tour(figures, results[tuned], out=out)


def shortened(config: "RunConfig") -> "RunConfig":
    """The same run, but for its length."""
    from vitkit.core.config import apply_overrides

    return apply_overrides(
        config,
        [
            "schedule.epochs=none",
            "schedule.steps=4",
            "data.fractals.classes=10",
            "data.fractals.per_class=20",
            "data.workers=0",
        ],
    )


def figures_of(result: "Result") -> dict[str, object]:
    """What the demo shows of one of its runs."""
    summary = result.summary or {}
    judged, ledger = summary.get("result"), summary.get("ledger")
    figures: dict[str, object] = {}
    if isinstance(judged, Mapping):
        figures |= {"top1": judged["top1"], "interval": judged["intervals"]["top1"], "count": judged["count"]}
    if isinstance(ledger, Mapping):
        figures |= {key: ledger[key] for key in ("parameters", "images_seen", "images_per_second", "exaflops")}
    return figures


def print_tour(figures: Mapping[str, Mapping[str, object]], tuned: "Result", *, out: Path) -> None:
    """Print the runs side by side, and where to go from here."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", style="cyan")
    for heading in ("top-1", "95 % interval", "judged on", "images seen", "images/s"):
        table.add_column(heading, justify="right")
    for name, row in figures.items():
        low, high = row["interval"] if isinstance(row["interval"], list | tuple) else (0.0, 0.0)
        table.add_row(
            name,
            f"{row['top1']:.1%}",
            f"{low:.1%}–{high:.1%}",
            f"{row['count']} {'fractals' if name == 'fractals' else 'digits'}",
            f"{row['images_seen']:,}",
            f"{row['images_per_second'] or 0:,.0f}",
        )
    console = result_console()
    console.print()
    console.print(table)
    console.print()
    print_sections(
        {
            "Look at it": [("report", str(tuned.folder.report)), ("everything", str(out))],
            "Now your own images, one folder a class": [
                ("look at them", "vitkit data check FOLDER"),
                ("train", "vitkit train FOLDER --out runs/mine"),
                ("judge", "vitkit eval runs/mine FOLDER"),
                (
                    "or begin with these weights",
                    f"vitkit finetune {out / 'fractals'} FOLDER --out runs/tuned channels=1",
                ),
            ],
        }
    )
