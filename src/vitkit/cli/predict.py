"""`vitkit predict`: label images, on the screen or in a file."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_warnings
from vitkit.cli.options import device_option, merge_option, precision_option, workers_option
from vitkit.core.formatting import safe_text

if TYPE_CHECKING:
    from vitkit.inference.predictions import ImagePrediction


@click.command("predict")
@click.argument("model")
@click.argument("images", nargs=-1, required=True)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of classes per image.")
@click.option("--features", is_flag=True, help="Include the features of each image; needs --out or --json.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a .csv, .jsonl or .parquet file.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Images per batch.")
@workers_option
@device_option
@precision_option
@merge_option
@click.option(
    "--calibration",
    metavar="PATH",
    help="Images on which to measure agreement with fp32.  [default: the first 64 of IMAGES]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per image.")
def command(features: bool, out: Path | None, as_json: bool, **options: Any) -> None:
    """Label IMAGES (files, directories, tar or parquet files) with MODEL, a run or weights of any format.

    Images are preprocessed as in evaluation. Unreadable images are reported and skipped. With --out the number of
    images is not limited: an interrupted command resumes, and under torchrun each process writes its own part. For
    bf16, int8 and merged tokens, agreement with fp32 is measured on your images first.

    \b
    vitkit predict runs/photos cat.jpg dog.jpg
    vitkit predict runs/photos new-photos --out predictions.csv
    vitkit predict runs/photos new-photos --out predictions.csv --precision int8
    """
    import vitkit
    from vitkit.core.errors import ConfigError
    from vitkit.data.layouts.files import list_left_out

    if features and out is None and not as_json:
        raise ConfigError("features are too long to print", hint="add --out FILE.parquet, or --json")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and out is None:
        raise ConfigError("several processes need an output file", hint="add --out FILE.csv")
    result = vitkit.predict(features=features, out=out, **options)
    if result.path is not None:
        print_result(result, lambda table: click.echo(safe_text(str(table.path))), as_json=as_json)
        return
    for prediction in result:
        if as_json:
            click.echo(json.dumps(prediction.to_dict()))
        else:
            _print_prediction(prediction)
    print_warnings(list_left_out(result.left_out))
    if len(result.skipped) == len(result):
        click.get_current_context().exit(1)


def _print_prediction(prediction: "ImagePrediction") -> None:
    if prediction.error is not None:
        click.echo(safe_text(f"{prediction.file}: {prediction.error}"), err=True)
        return
    click.echo(safe_text(prediction.file))
    width = max(len(each.label) for each in prediction.predictions)
    for each in prediction.predictions:
        click.echo(safe_text(f"  {each.label:{width}}  {each.probability:6.1%}"))
