"""`vitkit predict`: label images, on the screen or in a file."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.console import print_json, print_status, print_warnings, show_progress
from vitkit.cli.options import device_option, merge_option, precision_option
from vitkit.core.formatting import safe_text

if TYPE_CHECKING:
    import torch

    from vitkit.inference.batch import FilePredictions, PredictionOptions
    from vitkit.inference.engine import Precision
    from vitkit.inference.outputs import ImagePrediction


@click.command("predict")
@click.argument("model")
@click.argument("images", nargs=-1, required=True)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Number of classes per image.")
@click.option("--features", is_flag=True, help="Include the features of each image; needs --out or --json.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a .csv, .jsonl or .parquet file.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Images per batch.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that decode images."
)
@device_option
@precision_option
@merge_option
@click.option(
    "--calibration",
    metavar="PATH",
    help="Images on which to measure agreement with fp32.  [default: the first 64 of IMAGES]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per image.")
def command(  # noqa: PLR0913, PLR0917  each is an option that users type
    model: str,
    images: tuple[str, ...],
    top: int,
    features: bool,
    out: Path | None,
    batch_size: int,
    workers: int,
    device: str,
    precision: "Precision",
    merge: int,
    calibration: str | None,
    as_json: bool,
) -> None:
    """Label IMAGES (files, directories, tar or parquet files) with MODEL, a run or weights of any format.

    Images are preprocessed as in evaluation. Unreadable images are reported and skipped. With --out the number of
    images is not limited: an interrupted command resumes, and under torchrun each process writes its own part. For
    bf16, int8 and merged tokens, agreement with fp32 is measured on your images first.

    \b
    vitkit predict runs/photos cat.jpg dog.jpg
    vitkit predict runs/photos new-photos --out predictions.csv
    vitkit predict runs/photos new-photos --out predictions.csv --precision int8
    """
    from vitkit.core.errors import ConfigError
    from vitkit.inference.batch import PredictionOptions, Shard, predict_to_file
    from vitkit.inference.engine import resolve_device

    if features and out is None and not as_json:
        raise ConfigError("features are too long to print", hint="add --out FILE.parquet, or --json")
    shard = Shard.from_environment()
    if shard.world_size > 1 and out is None:
        raise ConfigError("several processes need an output file", hint="add --out FILE.csv")
    options = PredictionOptions(
        top=top,
        features=features,
        precision=precision,
        merge=merge,
        batch_size=batch_size,
        workers=workers,
    )
    selected_device = resolve_device(device, local_rank=shard.local_rank)
    if out is None:
        _print_predictions(model, images, options, device=selected_device, calibration=calibration, as_json=as_json)
        return
    with show_progress() as progress:
        result = predict_to_file(
            model,
            images,
            out,
            options=options,
            device=selected_device,
            calibration=calibration,
            shard=shard,
            report=print_status,
            progress=partial(progress, "predicting"),
        )
    _print_file(result, as_json=as_json)


def _print_predictions(
    model: str,
    images: tuple[str, ...],
    options: "PredictionOptions",
    *,
    device: "torch.device",
    calibration: str | None,
    as_json: bool,
) -> None:
    """Print predictions as they are computed. Exit with 1 if no image could be read."""
    from vitkit.inference.batch import describe_engine, open_images, open_predictor, predict_batches

    source = open_images(images)
    predictor = open_predictor(model, options, device=device, report=print_status)
    describe_engine(predictor, source, calibration=calibration, report=print_status)
    failed = 0
    for batch in predict_batches(predictor, source, options):
        for prediction in batch:
            failed += prediction.error is not None
            if as_json:
                click.echo(json.dumps(prediction.to_json()))
            else:
                _print_prediction(prediction)
    if failed == len(source):
        click.get_current_context().exit(1)


def _print_prediction(prediction: "ImagePrediction") -> None:
    if prediction.error is not None:
        click.echo(safe_text(f"{prediction.file}: {prediction.error}"), err=True)
        return
    click.echo(safe_text(prediction.file))
    width = max(len(each.label) for each in prediction.predictions)
    for each in prediction.predictions:
        click.echo(safe_text(f"  {each.label:{width}}  {each.probability:6.1%}"))


def _print_file(result: "FilePredictions", *, as_json: bool) -> None:
    from vitkit.core.signals import EXIT_INTERRUPTED
    from vitkit.data.verify import BadFile, warn_skipped

    if result.already_existed:
        print_status(f"already complete: {result.path}")
        return
    if not result.is_complete:
        print_status("stopped; run the same command to resume")
        click.get_current_context().exit(EXIT_INTERRUPTED)
    bad = [BadFile(each["file"], each["reason"]) for each in result.metadata["bad"]]
    warn_skipped(bad, lambda message: print_warnings([message]))
    if as_json:
        print_json(result.metadata)
    else:
        click.echo(safe_text(str(result.path)))
