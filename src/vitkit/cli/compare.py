"""`vitkit compare`: comparison of runs and models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_table, stdout_console
from vitkit.cli.options import device_option, json_option, workers_option
from vitkit.core.formatting import MISSING, format_count, format_duration, safe_text

if TYPE_CHECKING:
    from vitkit.evaluation.comparison import ComparisonResult


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="MODEL MODEL …")
@click.option("--data", metavar="DIR", help="Evaluate all models on these images, and test the differences.")
@click.option("--split", help="Split of --data.  [default: test, else val, else all images]")
@click.option("--layout", help="Layout of --data, if it is not detected correctly.")
@click.option(
    "--against",
    type=click.Choice(["first", "best"]),
    default="first",
    show_default=True,
    help="Baseline of the differences.",
)
@click.option("--measure", is_flag=True, help="Measure images per second of all models, side by side.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write report.html, charts, CSV and JSON to this directory."
)
@workers_option
@device_option
@json_option
def command(data: str | None, split: str | None, layout: str | None, as_json: bool, **options: Any) -> None:
    """Compare MODELs, which are runs or weights of any origin: accuracy, calibration, size, cost and speed.

    Without --data, each run has the scores of its own evaluation. With it, all models are evaluated on the same images,
    none of which a run was trained on, and differences have an interval and a test.

    \b
    vitkit compare runs/first runs/second --out compared
    vitkit compare runs/first runs/second --data photos --measure --out compared
    """
    from vitkit.api.comparison import compare

    if (split is not None or layout is not None) and data is None:
        raise click.UsageError("--split and --layout need --data")
    result = compare(data=data, split=split, layout=layout, **options)
    print_result(result, print_comparison, as_json=as_json)


def print_comparison(comparison: "ComparisonResult") -> None:
    """Print scores, costs, differences and the path of the report."""
    scores, costs = [], []
    for model in comparison.models:
        if model.scores is None:
            scores.append((model.label, *[MISSING] * 5))
        else:
            low, high = model.scores.interval
            mean = MISSING if model.scores.mean_per_class is None else f"{model.scores.mean_per_class:.1%}"
            accuracy = (f"{model.scores.top1:.2%}", f"{low:.1%}–{high:.1%}", f"{model.scores.top5:.1%}", mean)
            scores.append((model.label, *accuracy, f"{model.scores.ece:.3f}"))
        speed = model.speed or model.training_speed
        costs.append(
            (
                model.label,
                format_count(model.parameters),
                f"{model.gflops:.3g}",
                MISSING if model.exaflops is None else f"{model.exaflops:.3g}",
                MISSING if speed is None else f"{speed:,.0f}",
                format_duration(model.seconds),
            )
        )
    print_table(("model", "top-1", "95 %", "top-5", "per class", "ECE"), scores)
    console = stdout_console()
    console.print()
    rate = "images/s" if any(model.speed for model in comparison.models) else "training images/s"
    print_table(("model", "parameters", "GFLOPs", "exaFLOPs", rate, "training time"), costs)
    console.print()
    for difference in comparison.differences:
        console.print(safe_text(f"{difference.describe()}, p = {difference.p_value:.2g}"), soft_wrap=True)
    if comparison.report_path is not None:
        click.echo(safe_text(str(comparison.report_path)))
