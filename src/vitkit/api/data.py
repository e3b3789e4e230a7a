"""Checks of datasets."""

import pathlib
from dataclasses import replace

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.api.sources import resolve_workers
from vitkit.core.errors import ConfigError, check_positive
from vitkit.core.signals import start_task
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.summary import DataSummary, summarize_dataset
from vitkit.data_quality.check import DataQualityReport, find_quality_issues
from vitkit.inference.engine import resolve_device
from vitkit.report.data_quality import write_report
from vitkit.typing import DataSource, ModelSource, Path
from vitkit.weights.load import load_bundle


@public
def check_data(
    data: DataSource,
    *,
    layout: str | None = None,
    channels: int = 3,
    contact_sheet: Path | None = None,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> DataSummary:
    """Decode every image of a dataset, and report classes, counts, sizes, duplicates and broken files.

    The dataset is not changed, and broken files are reported rather than raised.

    Args:
        data: A dataset in any layout, pairs of image and label, or such pairs by split.
        layout: Layout of the dataset, instead of detecting it.
        channels: Channels to decode.
        contact_sheet: PNG file to write with thumbnails of each class.
        device: Not used, because images are decoded on the CPU.
        workers: Number of processes; one per core by default.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import vitkit
    >>> summary = vitkit.check_data("digits", workers=0, progress=False)
    >>> summary.images, summary.counts["3"], summary.sizes.height
    (1797, 183, SizeRange(minimum=8, median=8, maximum=8))
    """
    resolve_device(device)
    check_positive("channels", channels)
    dataset = open_dataset(data, layout=layout)
    with show_progress(progress) as report:
        return summarize_dataset(
            dataset,
            channels=channels,
            contact_sheet=None if contact_sheet is None else pathlib.Path(contact_sheet),
            workers=None if workers is None else resolve_workers(workers),
            progress=start_task(report, "checking images", sum(map(len, dataset.splits.values()))),
        )


@public
def check_data_quality(
    data: DataSource,
    *,
    model: ModelSource | None = None,
    out: Path | None = None,
    within_splits: bool = False,
    match_flips: bool = False,
    min_score: float | None = None,
    probability: bool = False,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> DataQualityReport:
    """Find near-duplicates and, with a model, wrong labels.

    Near-duplicates are found by pixels, and with a model also by features. Each label is compared with those of the
    nearest training images in feature space.

    Args:
        data: A dataset in any layout, pairs of image and label, or such pairs by split.
        model: A run, an artifact, a weight file of any format, a published name, or a model.
        out: Directory for report.html, near_duplicates.csv, label_issues.csv and data_quality.json.
        within_splits: Also search within each split; always if there is only one.
        match_flips: Also match horizontally flipped images.
        min_score: Smallest score of a reported label issue, −1…1; 0.5 by default.
        probability: Add the probability of each label by a head that was not trained on the image.
        device: cpu, cuda, mps or auto.
        workers: Processes that decode images; two by default, one on a single core.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import numpy as np, vitkit
    >>> images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    >>> train = [(image, label) for image, label in zip(images, "ababab")]
    >>> report = vitkit.check_data_quality({"train": train, "test": train[:1]}, workers=0, progress=False)
    >>> [(row["file"], row["other_file"]) for row in report.to_dict()["near_duplicates"]]
    [('train/image-00001', 'test/image-00001')]
    """
    if model is None and (probability or min_score is not None):
        raise ConfigError("probability and min_score are for label issues, which need a model", hint="set model")
    bundle = None if model is None else load_bundle(model)
    with show_progress(progress) as report_progress:
        report = find_quality_issues(
            open_dataset(data),
            bundle=bundle,
            within_splits=within_splits,
            match_flips=match_flips,
            min_score=min_score,
            probability=probability,
            workers=resolve_workers(workers),
            device=resolve_device(device),
            progress=report_progress,
        )
    if out is None:
        return report
    write_report(report, pathlib.Path(out))
    return replace(report, report_path=pathlib.Path(out) / "report.html")
