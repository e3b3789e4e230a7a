"""Predictions for images."""

import pathlib
from collections.abc import Sequence

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.api.sources import resolve_workers
from vitkit.core.console import logger
from vitkit.inference.batch import Shard, predict_images, predict_to_file
from vitkit.inference.engine import Precision, resolve_device
from vitkit.inference.image_inputs import list_images
from vitkit.inference.predictions import Predictions
from vitkit.inference.predictor import PredictionOptions
from vitkit.typing import DataSource, ImageLike, ModelSource, Path
from vitkit.weights.load import source_name


@public
def predict(  # noqa: PLR0913  the options of `vitkit predict`
    model: ModelSource,
    images: ImageLike | Sequence[ImageLike],
    *,
    top: int = 5,
    features: bool = False,
    out: Path | None = None,
    calibration: DataSource | None = None,
    batch_size: int = 32,
    precision: Precision = "fp32",
    merge: int = 0,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> Predictions:
    """Label images with a trained model. Images are preprocessed as in evaluation.

    With `out` the number of images is not limited: predictions are written as they are computed, the same call resumes
    after an interruption, and under torchrun each process writes its own part. The result reads from the file.

    Args:
        model: A run, an artifact, a weight file of any format, the name of a published model, or a model itself.
        images: One image or several: paths, encoded files, Pillow images, or uint8 pixels. A directory, tar or parquet
            file means all images in it. An unreadable image is a row with an `error`.
        top: Number of classes per image.
        features: Include the features of each image.
        out: A .csv, .jsonl or .parquet file to write.
        calibration: Images on which an approximate engine is compared with fp32; by default the first 64 of `images`.
        batch_size: Images per batch.
        precision: Precision of matrix products; bf16 and int8 are faster and less exact.
        merge: Tokens to merge in every layer (ToMe): faster and less exact.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images; two by default, one on a single core.
        progress: Show progress; None shows it where it fits the display.

    >>> import numpy as np, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=2)
    >>> photo = np.zeros((40, 30, 3), dtype=np.uint8)
    >>> predictions = vitkit.predict(model, [photo, b"not an image"], top=1, progress=False)
    >>> predictions[0]
    ImagePrediction(file='images[0]', label='0', probability=0.5)
    >>> predictions[1].error
    'not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file'
    """
    source_name(model)  # raises if the arguments are in the other order
    shard = Shard() if out is None else Shard.from_environment()
    options = PredictionOptions(
        top=top,
        features=features,
        precision=precision,
        merge=merge,
        batch_size=batch_size,
        workers=resolve_workers(workers),
        device=resolve_device(str(device), local_rank=shard.local_rank),
        calibration=calibration,
    )
    inputs = list_images(images)
    with show_progress(progress) as report_progress:
        if out is None:
            return predict_images(model, inputs, options, report=logger.info, progress=report_progress)
        path = pathlib.Path(out)
        return predict_to_file(
            model, inputs, options, out=path, shard=shard, report=logger.info, progress=report_progress
        )
