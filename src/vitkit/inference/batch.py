"""Batch prediction of images in memory, or into a file that an interrupted call resumes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.core.signals import Interrupted, ProgressFunction, catch_stop_signals, ignore_progress, start_task
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.decode import ImageLike
from vitkit.data.layouts.files import list_left_out
from vitkit.data.verify import BadFile, warn_skipped
from vitkit.inference.agreement import Agreement, measure_agreement, sample_images
from vitkit.inference.engine import WARMUP_BATCHES, compile_now, eager_engine
from vitkit.inference.image_inputs import describe_images, open_data_images, open_images
from vitkit.inference.outputs import PredictionFile, StoredPredictions, fingerprint_inputs
from vitkit.inference.predictions import Predictions
from vitkit.inference.predictor import PredictionOptions, Predictor, predict_batches, predict_source
from vitkit.inference.select import Report, build_native_if_needed
from vitkit.typing import DataSource, ModelSource
from vitkit.weights.load import open_model, source_name

TASK = "predicting"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of one process among several that share the images, as torchrun numbers them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Shard":
        """Read the variables that torchrun sets."""
        fields = ("rank", "world_size", "local_rank")
        return cls(**{name: int(os.environ[name.upper()]) for name in fields if name.upper() in os.environ})

    def select(self, source: ImageSource) -> ImageSource:
        """Return a contiguous part of equal size, so that the files of all processes in order cover the source."""
        if self.world_size == 1:
            return source
        first, last = (len(source) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return Subset(source, range(first, last))

    def path(self, out: Path) -> Path:
        """Return the output file of this process.

        >>> Shard(rank=1, world_size=4).path(Path("predictions.csv")).name
        'predictions-00001-of-00004.csv'
        """
        suffix = f"-{self.rank:05}-of-{self.world_size:05}{out.suffix}"
        return out if self.world_size == 1 else out.with_name(out.stem + suffix)


def predict_images(
    model: ModelSource,
    images: Sequence[ImageLike],
    options: PredictionOptions,
    *,
    report: Report,
    progress: ProgressFunction = ignore_progress,
) -> Predictions:
    """Return the predictions for all images."""
    source = open_images(images)
    predictor = open_predictor(model, options, report=report)
    agreement = measure_predictor(predictor, source, calibration=options.calibration, report=report)
    advance = start_task(progress, TASK, len(source))
    result = predict_source(predictor, source, options, agreement=agreement, progress=advance)
    return _add_warnings(result, source.left_out)


def predict_to_file(
    model: ModelSource,
    images: Sequence[ImageLike],
    options: PredictionOptions,
    *,
    out: Path,
    shard: Shard,
    report: Report,
    progress: ProgressFunction = ignore_progress,
) -> Predictions:
    """Write predictions for all images to a .csv, .jsonl or .parquet file, and return them as read from it.

    An interrupted call leaves what is done and raises `Interrupted`; the same call resumes there. A completed file of
    the same call is returned without loading the model.
    """
    source = open_images(images)
    part, left_out = shard.select(source), () if shard.rank else source.left_out
    request: dict[str, object] = {"model": source_name(model), "images": describe_images(images), "top": options.top}
    request |= {"features": options.features, "part": [shard.rank, shard.world_size]}
    if options.precision != "fp32" or options.merge:
        request |= {"precision": options.precision, "merge": options.merge}
    file = PredictionFile(shard.path(out), request, fingerprints=fingerprint_inputs(model, part))
    if file.is_complete():
        report(f"already complete: {file.path}")
        return _add_warnings(_read_file(file.path, file.read_metadata(), images=part), left_out)
    predictor = open_predictor(model, options, report=report)
    agreement = measure_predictor(predictor, source, calibration=options.calibration, report=report)
    with file.open() as resumed, catch_stop_signals() as stop:
        if resumed:
            report(f"resuming after {resumed:,} of {len(part):,} images")
        rest = Subset(part, range(resumed, len(part)))
        advance = start_task(progress, TASK, len(part))
        advance(resumed)
        for batch in file.append(predict_batches(predictor, rest, options)) if len(rest) else ():
            advance(len(batch))
            if stop.requested:
                raise Interrupted("stopped; run the same command to resume", path=file.partial_path)
        classes = min(options.top, len(predictor.labels))
        features = predictor.model.config.num_features if options.features else 0
        engine = predictor.describe_engine(agreement)
        metadata = file.finalize(model=predictor.model.name, classes=classes, features=features, engine=engine)
    return _add_warnings(_read_file(file.path, metadata, images=part), left_out)


def _read_file(path: Path, metadata: dict[str, Any], *, images: ImageSource) -> Predictions:
    agreement = metadata.get("agreement")
    return Predictions(
        rows=StoredPredictions(path, size=metadata["images"]),
        path=path,
        skipped=tuple(BadFile(each["file"], each["reason"]) for each in metadata["bad"]),
        agreement=None if agreement is None else Agreement.from_json(agreement),
        metadata=metadata,
        images=images,
    )


def _add_warnings(result: Predictions, left_out: tuple[str, ...]) -> Predictions:
    warnings = list_left_out(left_out)
    warn_skipped(result.skipped, warnings.append)
    return replace(result, left_out=left_out, warnings=tuple(warnings))


def open_predictor(model: ModelSource, options: PredictionOptions, *, report: Report) -> Predictor:
    """Load a model with the engine that the options select. Report a native build, and why a slower engine is used."""
    loaded = open_model(model)
    precision, merge, device = options.precision, options.merge, options.device
    build_native_if_needed(loaded, precision=precision, device=device, merge=merge, report=report)
    predictor = Predictor(loaded, device=device, batch_size=options.batch_size, precision=precision, merge=merge)
    if predictor.fallback_reason is not None:
        report(f"engine: {predictor.engine.name}; {predictor.fallback_reason}")
    if not options.features:
        predictor.check_classes()
    return predictor


def measure_predictor(
    predictor: Predictor, source: ImageSource, *, calibration: DataSource | None, report: Report
) -> Agreement | None:
    """Measure and report how an approximate engine agrees with fp32; None if it is exact or no image is readable."""
    if not predictor.is_approximate:
        return None
    images = source if calibration is None else open_data_images(calibration)
    batches = list(sample_images(images, predictor.preprocessing))
    if len(batches) + len(source) / predictor.batch_size > WARMUP_BATCHES:
        compile_now(predictor.engine)  # predictions will use the compiled model, so measure that one
    if not batches:
        report("agreement with fp32 is unknown: no image could be read")
        return None
    reference = eager_engine(predictor.model, device=predictor.device)
    agreement = measure_agreement(predictor.engine, reference, batches)
    merging = f", merging {predictor.merge} token{'s' * (predictor.merge != 1)} per layer" if predictor.merge else ""
    report(f"{predictor.precision}{merging} compared with fp32: {agreement}")
    return agreement
