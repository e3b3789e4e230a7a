"""Batch prediction: images at any paths, and predictions in memory or into a file that an interrupted call resumes."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.core.shapes import Float, Tensor
from vitkit.core.signals import catch_stop_signals
from vitkit.core.sizes import pair
from vitkit.data.dataset import UNLABELED, ConcatSource, ImageSource, StoredImage, Subset
from vitkit.data.decode_limits import DEFAULT_LIMITS
from vitkit.data.layouts.base import NamedSource
from vitkit.data.layouts.files import find_shards, is_image, is_pattern, walk_files
from vitkit.data.layouts.parquet import has_image_column, open_parquet_images
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.layouts.webdataset import open_tar_images
from vitkit.data.loader import ImageBatch, make_evaluation_loader
from vitkit.data.verify import find_reason
from vitkit.inference.agreement import Agreement, measure_agreement, sample_images
from vitkit.inference.engine import WARMUP_BATCHES, Precision, compile_now, eager_engine
from vitkit.inference.outputs import ImagePrediction, PredictionFile, fingerprint_inputs
from vitkit.inference.predictor import Predictor
from vitkit.inference.select import Report, build_native_if_needed
from vitkit.weights.load import load

NOT_FINITE = "the output is not finite: the weights are damaged, or exceed the range of this precision"
TAR, PARQUET = ".tar", ".parquet"


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Outputs per image and engine settings."""

    top: int = 5
    features: bool = False
    precision: Precision = "fp32"
    merge: int = 0
    batch_size: int = 32
    workers: int = 2


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of one process among several that share the images, as torchrun numbers them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Shard":
        """Read the variables that torchrun sets."""
        rank, world_size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        return cls(rank=rank, world_size=world_size, local_rank=local_rank)

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


@dataclass(frozen=True, kw_only=True)
class FilePredictions:
    """A file of predictions. `is_complete` is False after an interruption, and the same call resumes."""

    path: Path
    is_complete: bool
    already_existed: bool = False
    metadata: dict[str, Any]
    """The content of the JSON file next to it."""


def predict_to_file(
    model: str,
    images: Sequence[str],
    out: Path,
    *,
    options: PredictionOptions,
    device: torch.device,
    calibration: str | None = None,
    shard: Shard | None = None,
    report: Report,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FilePredictions:
    """Write predictions for all images to a .csv, .jsonl or .parquet file.

    An interrupted call leaves what is done, and the same call resumes there. A completed file of the same call is
    returned without loading the model. `progress` receives the numbers of finished and of all images.
    """
    shard = shard or Shard()
    source = open_images(images)
    part = shard.select(source)
    request: dict[str, object] = {"model": model, "images": list(images), "top": options.top}
    request |= {"features": options.features, "part": [shard.rank, shard.world_size]}
    if options.precision != "fp32" or options.merge:
        request |= {"precision": options.precision, "merge": options.merge}
    file = PredictionFile(shard.path(out), request, fingerprints=fingerprint_inputs(model, part))
    if file.is_complete():
        return FilePredictions(path=file.path, is_complete=True, already_existed=True, metadata=file.read_metadata())
    predictor = open_predictor(model, options, device=device, report=report)
    engine = describe_engine(predictor, source, calibration=calibration, report=report)
    with file.open() as resumed, catch_stop_signals() as stop:
        if resumed:
            report(f"resuming after {resumed:,} of {len(part):,} images")
        rest, done = Subset(part, range(resumed, len(part))), resumed
        progress(done, len(part))
        for batch in file.append(predict_batches(predictor, rest, options)) if len(rest) else ():
            done += len(batch)
            progress(done, len(part))
            if stop.requested:
                return FilePredictions(path=file.path, is_complete=False, metadata={})
        classes, features = output_sizes(predictor, options)
        metadata = file.finalize(model=predictor.model.name, classes=classes, features=features, engine=engine)
    return FilePredictions(path=file.path, is_complete=True, metadata=metadata)


def open_predictor(model: str, options: PredictionOptions, *, device: torch.device, report: Report) -> Predictor:
    """Load a model with the engine that the options select. Report a native build, and why a slower engine is used."""
    loaded, precision, merge = load(model), options.precision, options.merge
    build_native_if_needed(loaded, precision=precision, device=device, merge=merge, report=report)
    predictor = Predictor(loaded, device=device, batch_size=options.batch_size, precision=precision, merge=merge)
    if predictor.fallback_reason is not None:
        report(f"engine: {predictor.engine.name}; {predictor.fallback_reason}")
    if not options.features:
        predictor.check_classes()
    return predictor


def predict_batches(
    predictor: Predictor, source: ImageSource, options: PredictionOptions
) -> Iterator[list[ImagePrediction]]:
    """Yield the predictions for a source batch by batch; only a few batches are in memory."""
    batches = make_evaluation_loader(
        source,
        lenient=True,
        preprocessing=predictor.preprocessing,
        batch_size=predictor.batch_size,
        workers=options.workers if len(source) > predictor.batch_size else 0,
        device=predictor.device,
    )
    first = 0
    with batches:
        for batch in batches:
            yield _predict_batch(predictor, source, batch, first=first, options=options)
            first += len(batch.labels)


def _predict_batch(
    predictor: Predictor, source: ImageSource, batch: ImageBatch, *, first: int, options: PredictionOptions
) -> list[ImagePrediction]:
    probabilities, features = compute_outputs(predictor, batch, options)
    predictions = []
    for row, is_readable in enumerate(batch.labels.tolist()):
        name = source.name(first + row)
        if not is_readable:
            error = unreadable_reason(source, first + row, channels=predictor.preprocessing.channels)
            predictions.append(ImagePrediction(file=name, error=error))
        elif not all(output[row].isfinite().all() for output in (probabilities, features) if output is not None):
            predictions.append(ImagePrediction(file=name, error=NOT_FINITE))
        else:
            top = () if probabilities is None else predictor.top_predictions(probabilities[row], top=options.top)
            values = () if features is None else features[row].tolist()
            predictions.append(ImagePrediction(file=name, predictions=tuple(top), features=tuple(values)))
    return predictions


def compute_outputs(
    predictor: Predictor, batch: ImageBatch, options: PredictionOptions
) -> tuple[Float[Tensor, "B Y"] | None, Float[Tensor, "B F"] | None]:
    """Return probabilities, if the model has classes, and features, if requested."""
    features, logits = predictor.forward(predictor.preprocessing.normalize(batch.pixels.to(predictor.device)))
    probabilities = logits.softmax(dim=1) if predictor.labels else None
    return probabilities, features if options.features else None


def output_sizes(predictor: Predictor, options: PredictionOptions) -> tuple[int, int]:
    """Return the numbers of classes and of features per image in the output."""
    classes = min(options.top, len(predictor.labels))
    if not options.features:
        return classes, 0
    preprocessing = predictor.preprocessing
    blank = torch.zeros(1, preprocessing.channels, *pair(preprocessing.image_size), device=predictor.device)
    return classes, predictor.engine.features(blank).shape[1]


def describe_engine(
    predictor: Predictor, source: ImageSource, *, calibration: str | None = None, report: Report
) -> dict[str, object]:
    """Return the engine's settings; for an approximate engine also its agreement with fp32, which is reported."""
    if not predictor.is_approximate:
        return {"precision": predictor.precision, "merge": predictor.merge, "engine": predictor.engine.name}
    agreement = measure_predictor(predictor, source, open_images([calibration]) if calibration else source)
    merging = f", merging {predictor.merge} token{'s' * (predictor.merge != 1)} per layer" if predictor.merge else ""
    if agreement is None:
        report("agreement with fp32 is unknown: no image could be read")
    else:
        report(f"{predictor.precision}{merging} compared with fp32: {agreement}")
    # The name is read afterwards: it changes if compiling fails.
    settings = {"precision": predictor.precision, "merge": predictor.merge, "engine": predictor.engine.name}
    return settings | {"agreement": agreement and agreement.to_json()}


def measure_predictor(predictor: Predictor, source: ImageSource, calibration: ImageSource) -> Agreement | None:
    """Measure agreement with the unmodified model on the first readable images; None if there are none."""
    batches = list(sample_images(calibration, predictor.preprocessing))
    if len(batches) + len(source) / predictor.batch_size > WARMUP_BATCHES:
        compile_now(predictor.engine)  # predictions will use the compiled model, so measure that one
    reference = eager_engine(predictor.model, device=predictor.device)
    return measure_agreement(predictor.engine, reference, batches) if batches else None


def unreadable_reason(source: ImageSource, index: int, *, channels: int) -> str:
    """Read an image again to find out why it was skipped."""
    reason = find_reason(source, index, channels=channels)
    return reason or "could not be read, but can be now: the file changed meanwhile"


# Images at paths


class ImageFiles(NamedSource):
    """Image files, named by the prefix (a directory, or nothing) and their names relative to it."""

    def __init__(self, names: Sequence[str], *, prefix: str = "") -> None:
        labels = np.full(len(names), UNLABELED, dtype=np.int64)
        super().__init__(layout="files", classes=(), labels=labels, names=names)
        self.prefix = prefix

    def name(self, index: int) -> str:
        """Return the path as the user wrote it."""
        return self.prefix + self.names[index]

    def read(self, index: int) -> StoredImage:
        """Return the bytes of the file."""
        return read_bytes(self.name(index), max_bytes=DEFAULT_LIMITS.max_bytes)


class DatasetImages(ImageSource):
    """The images of a dataset without their labels, named by the dataset's path."""

    def __init__(self, path: str, source: ImageSource) -> None:
        self.path, self.source = path.rstrip("/"), source
        self.layout, self.classes, self.always_readable = source.layout, (), source.always_readable
        self.labels = np.full(len(source), UNLABELED, dtype=np.int64)

    def name(self, index: int) -> str:
        """Return the image's name, after the dataset's path if it has one."""
        return f"{self.path}/{self.source.name(index)}" if self.path else self.source.name(index)

    def read(self, index: int) -> StoredImage:
        """Return the stored image."""
        return self.source.read(index)


def open_images(paths: Sequence[str]) -> ImageSource:
    """Open all images at some paths, in the order of the paths and sorted by name inside each. Labels are ignored.

    >>> open_images(["digits"]).name(0)
    'digits/000002'
    """
    sources = [source for path in paths for source in _open_path(path)]
    if not sources or not sum(map(len, sources)):
        raise DataError("no images found", got=", ".join(paths)[:200] or "no path", hint="pass files or directories")
    return ConcatSource(sources) if len(sources) > 1 else sources[0]


def _open_path(name: str) -> list[ImageSource]:
    path = Path(name)
    if path.is_file() and is_image(path.name):
        return [ImageFiles([name])]
    sources = _open_directory(name) if path.is_dir() else _open_archives(_shards(name, TAR), _shards(name, PARQUET))
    if sources := [source for source in sources if len(source)]:
        return sources
    return [DatasetImages(name if path.exists() else "", source) for source in open_dataset(name).splits.values()]


def _open_directory(name: str) -> list[ImageSource]:
    """Open the image files below a directory, then its tar archives, then its parquet files that hold images."""
    root, prefix = Path(name), f"{name.rstrip('/')}/"
    names: dict[str, list[str]] = {"image": [], TAR: [], PARQUET: []}
    for file in walk_files(root):
        kind = "image" if is_image(file) else os.path.splitext(file)[1].lower()  # noqa: PTH122 - a million Paths are slow
        if kind in names:
            names[kind].append(file)
    images, *archives = (sorted(files) for files in names.values())
    tars, tables = ({prefix + file: root / file for file in files if (root / file).is_file()} for files in archives)
    tables = {name: table for name, table in tables.items() if has_image_column(table)}
    return [ImageFiles(images, prefix=prefix), *_open_archives(tars, tables)]


def _open_archives(tars: dict[str, Path], tables: dict[str, Path]) -> list[ImageSource]:
    return [*([open_tar_images(tars)] if tars else []), *([open_parquet_images(tables)] if tables else [])]


def _shards(name: str, suffix: str) -> dict[str, Path]:
    """Return the files with this suffix that a path is, or matches as a pattern."""
    path = Path(name)
    if path.is_file():
        return {name: path} if path.suffix.lower() == suffix else {}
    return {str(shard): shard for shard in find_shards(path, suffix=suffix)} if is_pattern(path) else {}
