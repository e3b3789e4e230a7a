"""`vitkit inspect`: a report of what a model attends to and has learned."""

from pathlib import Path
from typing import Any

import click

from vitkit.cli.console import print_result
from vitkit.cli.options import CommaSeparated, device_option
from vitkit.core.formatting import safe_text


@click.command("inspect")
@click.argument("model")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write the report to.")
@click.option("--only", type=CommaSeparated(click.STRING), help="Sections, such as rollout,distance.  [default: all]")
@click.option("--class", "target", help="Also explain this class, by label or index.")
@click.option("--with", "other", help="Compare layers with another model.")
@click.option("--layer", type=int, default=-1, show_default=True, help="Layer whose heads and features are drawn.")
@click.option("--labels", type=click.Path(path_type=Path), help="File of class names, if the weights have none.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(as_json: bool, **options: Any) -> None:
    """Inspect MODEL, a run or weights of any origin, on IMAGES, which are files or directories.

    Writes report.html, every figure as PNG and SVG, and numbers.json to --out. Up to eight images are drawn; means,
    such as attention distance, are over all of them.

    \b
    vitkit inspect runs/photos photos/cat.jpg photos/dog.jpg --out report
    vitkit inspect weights.npz photos/ --out report --only rollout,distance
    """
    from vitkit.api.inspection import inspect

    result = inspect(**options)
    print_result(result, lambda report: click.echo(safe_text(str(report.report_path))), as_json=as_json)
