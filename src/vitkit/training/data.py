"""Datasets of a run: readable images, divided into training, validation and test splits."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.core.errors import DataError
from vitkit.core.files import write_json
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import (
    ConcatSource,
    Dataset,
    ImageSource,
    count_labels,
    fingerprint_source,
    hold_out,
    subsample,
)
from vitkit.data.fingerprint import Fingerprint, describe_changes, fingerprint_contents
from vitkit.data.joined import join_datasets
from vitkit.data.layouts.base import check_several_classes
from vitkit.data.layouts.files import list_left_out
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import (
    BadFile,
    VerifiedImages,
    check_bad_fraction,
    exclude_files,
    read_bad_files,
    verify_images,
    write_bad_files,
)
from vitkit.training.auto_state import read_data_config
from vitkit.training.build import resolve_workers
from vitkit.training.callbacks import Callback
from vitkit.training.config import DataConfig
from vitkit.training.distributed import Ranks, run_on_main
from vitkit.training.run_dir import FINGERPRINT_PREFIX, RunContext, RunDir


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Splits of a run's dataset; `bad` is the number of excluded files."""

    path: str
    layout: str
    classes: tuple[str, ...]
    train: ImageSource
    val: ImageSource | None
    test: ImageSource | None
    bad: int

    @property
    def splits(self) -> dict[str, ImageSource]:
        """The splits that exist, by name."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: source for name, source in splits.items() if source is not None}

    @property
    def evaluation_split(self) -> tuple[str, ImageSource] | None:
        """The split for the evaluation of the final model: test, or else validation."""
        return next(((name, self.splits[name]) for name in ("test", "val") if name in self.splits), None)

    def describe(self) -> str:
        """Describe the dataset in one line."""
        counts = ", ".join(f"{len(source):,} {name}" for name, source in self.splits.items())
        classes = f"{len(self.classes)} classes" if self.classes else "no labels"
        return f"{self.layout}: {classes}, images: {counts}"


def open_config_dataset(config: DataConfig) -> Dataset:
    """Open the dataset of a configuration, with those that are added to it."""
    dataset = open_dataset(config.path, layout=config.layout, fractals=config.fractals)
    return join_datasets([dataset, *map(open_dataset, config.add)]) if config.add else dataset


def open_run_data(context: RunContext) -> RunData:
    """Open the dataset, exclude unreadable images, and hold out validation images if it has none."""
    config, run_dir = context.config, context.run_dir
    data, needs_labels = config.data, config.objective.needs_labels
    dataset = context.dataset or open_config_dataset(data)
    if needs_labels and not dataset.classes:
        raise DataError(
            f"{data.path}: the images have no labels ({dataset.layout})",
            hint="put the images of each class in a directory of their own, or list file_name,label in a CSV file; "
            "or train without labels: vitkit train mae-folder data=…",
        )
    if needs_labels:
        check_several_classes(dataset)
    verified: Sequence[VerifiedImages] = ()
    if data.verify:
        verified = run_on_main(context.ranks, lambda beat: verify_dataset(dataset, context, heartbeat=beat)) or ()
    run_data = split_dataset(data, dataset, read_bad_files(run_dir.bad_files) if data.verify else [])
    if data.fraction < 1.0:
        was_held_out = "val" not in dataset.splits
        run_data = use_fraction(run_data, fraction=data.fraction, seed=config.seed, with_val=was_held_out)
    if needs_labels and data.label_fraction < 1.0:
        train = subsample(run_data.train, fraction=data.label_fraction, salt=f"labels {config.seed} ")
        run_data = replace(run_data, train=train)
    if data.verify:
        run_on_main(context.ranks, lambda beat: check_contents(run_data, context, verified=verified, heartbeat=beat))
    run_on_main(context.ranks, lambda _: check_unchanged(run_dir.data, run_data))
    context.callback.on_message(run_data.describe())
    for warning in list_left_out(dataset.left_out):
        context.callback.on_warning(warning)
    if needs_labels and run_data.evaluation_split is None and data.train_on != "all":
        hint = "add images, or a test folder" if data.val_fraction else "set data.val_fraction"
        context.callback.on_warning(f"no images are held out, so the accuracy will be unknown: {hint}")
    return run_data


def check_finished_data(run_dir: RunDir, *, ranks: Ranks, dataset: Dataset | None = None) -> None:
    """Raise DataError if the images of a finished run have changed. Data that no longer exists is not compared."""
    if not run_dir.config.exists():
        return
    config = run_dir.read_config()
    if dataset is not None or Path(config.data.path).exists():
        workers = resolve_workers(config)
        open_run_data(RunContext(config=config, run_dir=run_dir, ranks=ranks, workers=workers, dataset=dataset))


def use_fraction(data: RunData, *, fraction: float, seed: int, with_val: bool) -> RunData:
    """Return the splits with a fraction of each class; subsets of one seed are nested, and so are their held-out parts.

    `with_val` also reduces the validation images, which were held out of the same images.
    """
    salt = f"images {seed} "
    val = subsample(data.val, fraction=fraction, salt=salt) if with_val and data.val is not None else data.val
    return replace(data, train=subsample(data.train, fraction=fraction, salt=salt), val=val)


def verify_dataset(dataset: Dataset, context: RunContext, *, heartbeat: Callable[[], None]) -> Sequence[VerifiedImages]:
    """Write the list of unreadable images, once per run, and return the rest of what is found.

    Too many unreadable images are an error.
    """
    config, callback, file = context.config.data, context.callback, context.run_dir.bad_files
    if file.exists():
        return ()
    sources = [source for source in dataset.splits.values() if not source.always_readable]
    total = sum(map(len, sources))
    if total:
        callback.on_task("checking images", total)

    verified = []
    for source in sources:
        progress = make_progress(context, heartbeat)
        verified.append(verify_images(source, channels=config.channels, workers=context.workers, progress=progress))
    bad = [file for images in verified for file in images.bad]
    check_bad_fraction(bad, total=total, max_fraction=config.max_bad_fraction)
    write_bad_files(file, bad)
    if bad:
        callback.on_warning(f"{len(bad)} of {total} images are unreadable and excluded; see {file.name}")
    return verified


def make_progress(context: RunContext, heartbeat: Callable[[], None]) -> Callable[[int], None]:
    """Return a function that reports progress, stops on request, and keeps the other ranks waiting."""

    def on_progress(images: int) -> None:
        context.callback.on_progress(images)
        context.stop.raise_if_requested()
        heartbeat()

    return on_progress


def make_reading_progress(
    source: ImageSource, context: RunContext, heartbeat: Callable[[], None]
) -> Callable[[int], None]:
    """Return a function whose first call gets the number of known images; only if others are read, it reports them."""
    report, first = make_progress(context, heartbeat), True

    def on_progress(images: int) -> None:
        nonlocal first
        if not first:
            report(images)
        elif images < len(source):
            context.callback.on_task("reading images", len(source) - images)
        first = False

    in_memory = len(source) == 0 or source.locate(0) is None  # read at once
    return (lambda images: None) if in_memory else on_progress


def split_dataset(config: DataConfig, dataset: Dataset, bad: list[BadFile]) -> RunData:
    """Exclude bad files and return the splits of a run, holding out validation images if the dataset has none."""
    bad = [*bad, *(read_bad_files(config.exclude) if config.exclude else [])]
    splits = {name: exclude_files(source, bad) for name, source in dataset.splits.items()}
    train, val, test = splits.get("train", splits.get("all")), splits.get("val"), splits.get("test")
    if train is None:
        raise DataError(
            f"{config.path}: there is no training split",
            expected="a split called train, or no splits",
            got=", ".join(splits),
        )
    if config.train_on == "all":
        train, val = (train if val is None else ConcatSource([train, val])), None
    elif val is None and config.val_fraction:
        train, held_out = hold_out(train, fraction=config.val_fraction)
        val = held_out if len(held_out) else None
    if len(train) == 0:
        raise DataError(f"{config.path}: no training images are left")
    return RunData(
        path=dataset.path, layout=dataset.layout, classes=dataset.classes, train=train, val=val, test=test, bad=len(bad)
    )


def apply_run_splits(run_dir: RunDir, dataset: Dataset) -> Dataset:
    """Divide a dataset as a run did if the run was trained on it, so that a model is evaluated on held-out images."""
    config = read_data_config(run_dir)
    if config is None:
        return dataset
    if Path(config.path).resolve() != Path(dataset.path).resolve():
        return dataset
    if config.add or (config.layout == "val-as-test" and "test" not in dataset.splits):
        dataset = open_config_dataset(config)
    bad = read_bad_files(run_dir.bad_files) if run_dir.bad_files.exists() else []
    return replace(dataset, splits=split_dataset(config, dataset, bad).splits)


def check_contents(
    data: RunData, context: RunContext, *, verified: Sequence[VerifiedImages] = (), heartbeat: Callable[[], None]
) -> None:
    """Record the contents of the images; if they are recorded already, raise DataError with what has changed.

    An image is read only if neither the cache nor the record knows its file by size, times and inode.
    """
    changes = []
    for name, source in data.splits.items():
        path = context.run_dir.path / f"{FINGERPRINT_PREFIX}{name}.npz"
        previous = Fingerprint.load(path) if path.exists() else None
        progress = make_reading_progress(source, context, heartbeat)
        current = fingerprint_contents(
            source, previous=previous, verified=verified, workers=context.workers, progress=progress
        )
        if previous is None:
            current.save(path)
        elif change := describe_changes(previous, current):
            changes.append(f"{name}: {change}")
    if changes:
        raise DataError(
            f"{data.path}: the images have changed since the run began: {'; '.join(changes)}",
            hint="restore them, or start a new run with another out",
        )


def check_unchanged(path: Path, data: RunData) -> None:
    """Record sizes and fingerprints of the splits; if they are recorded already, they must be the same."""
    now = {
        "layout": data.layout,
        "classes": len(data.classes),
        "images": {name: len(source) for name, source in data.splits.items()},
        "fingerprints": {name: fingerprint_source(source) for name, source in data.splits.items()},
    }
    if not path.exists():
        write_json(path, now)
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: damaged", hint="delete the file and run again") from error
    if before != now:
        changed = next((key for key in ("layout", "classes", "images") if before.get(key) != now[key]), None)
        raise DataError(
            "the images have changed since the run began",
            expected=f"{changed} {before.get(changed)}" if changed else "the same names, labels and classes",
            got=f"{now[changed]}" if changed else "the same number, but others",
            hint="restore them, or start a new run with another out",
        )


def check_run_images(data: RunData, callback: Callback) -> None:
    """Raise an error if nothing can be learned or evaluated; warn of classes without held-out images."""
    if data.val is None or len(data.val) == 0:
        raise DataError(
            "no class has two images, so none can be held out for evaluation",
            hint="add images, at least ten of each class",
        )
    if are_identical(data.train):
        raise DataError(f"all {len(data.train)} training images are identical", hint="check how they were copied")
    counts = count_labels(data.val)
    if missing := [name for name, count in zip(data.classes, counts, strict=True) if count == 0]:
        callback.on_warning(
            f"{shorten_list(missing, limit=3)}: too few images to hold any out; the accuracy is that of the others"
        )


def are_identical(source: ImageSource) -> bool:
    """Return whether all of several images have the same content."""
    first = source.checksum(0)
    return len(source) > 1 and all(source.checksum(index) == first for index in range(1, len(source)))
