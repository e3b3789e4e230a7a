"""Speed of a model on this machine, export to other runtimes and libraries, and serving."""

import pathlib
from collections.abc import Sequence

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.core.console import logger
from vitkit.core.errors import ConfigError, check_not_negative, check_positive
from vitkit.exporters.exporter import ExportResult, export_model
from vitkit.inference.benchmark import BenchmarkResult, benchmark_model
from vitkit.inference.engine import check_precision, resolve_device
from vitkit.typing import DataSource, ModelSource, Path, Settings


@public
def benchmark(
    model: ModelSource,
    *,
    images: DataSource | None = None,
    batch_size: Sequence[int] = (1, 8, 32),
    precision: Sequence[str] = ("fp32", "bf16", "int8"),
    merge: int = 0,
    seconds: float = 2.0,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> BenchmarkResult:
    """Measure how fast and how exactly this machine runs a model, with every engine and precision.

    All engines are timed in turns, which gives a fair comparison on a busy machine too. Each is compared with the
    unmodified model in fp32.

    Args:
        model: A run, an artifact, weights of any format, or a model. A name such as "B/16" means random weights, and
            nothing is downloaded.
        images: Images on which agreement with fp32 is measured; by default one synthetic image.
        batch_size: Batch sizes to measure.
        precision: Precisions to measure: fp32, bf16, int8.
        merge: Also merge so many tokens in every layer.
        seconds: Time per engine and batch size.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode `images`; by default none, because there are at most 64.
        progress: Show progress; None shows it where it fits the display.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 1})
    >>> result = vitkit.benchmark(model, batch_size=[2], precision=["fp32"], seconds=0, progress=False)
    >>> result.rows[0].engine, result.rows[0].batch_size, result.rows[0].images_per_second > 0
    ('torch, eager', 2, True)
    """
    for name, values in (("batch_size", batch_size), ("precision", precision)):
        if isinstance(values, str | int) or not values:
            raise ConfigError(f"{name} is not a list of values to measure", got=repr(values), hint=f"use {name}=[…]")
    for size in batch_size:
        check_positive("batch_size", size)
    check_not_negative("seconds", seconds)
    with show_progress(progress) as report_progress:
        return benchmark_model(
            model,
            images=images,
            batch_sizes=batch_size,
            precisions=[check_precision(each) for each in precision],
            merge=merge,
            seconds=seconds,
            device=resolve_device(str(device)),
            workers=workers or 0,
            report=logger.info,
            progress=report_progress,
        )


@public
def export(
    model: ModelSource,
    out: Path,
    *,
    to: str = "huggingface",
    images: DataSource | None = None,
    settings: Settings | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ExportResult:
    """Write a model as a program for a runtime, or as weights for another library, and verify it.

    `out` is a new directory with labels, preprocessing and an example.py that does not need vitkit; or, with the suffix
    .npz or .pth, a file with only the weights. What is written is run and compared with the model before it gets its
    name: if the top-1 class of an image or a logit (by more than 1e-4) differs, nothing is left. Repeating an export
    changes nothing.

    Args:
        model: A run, an artifact, a weight file of any format, the name of a published model, or a model itself.
        out: The directory or file to write.
        to: A program: onnx, torch, openvino. Weights: huggingface, timm, google, torchvision, and other formats.
        images: Images for the verification; by default built-in ones.
        settings: Settings that change what the model computes, for formats that cannot represent it otherwise.
        overwrite: Replace `out`.
        progress: Show progress; None shows it where it fits the display.

    >>> import tempfile, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=2, settings={"depth": 1})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = vitkit.export(model, f"{directory}/model", to="google", progress=False)
    >>> result.format, result.files
    """
    with show_progress(progress) as report_progress:
        return export_model(
            model,
            pathlib.Path(out),
            to=to,
            images=images,
            settings=settings,
            overwrite=overwrite,
            report=logger.info,
            progress=report_progress,
        )
