"""Near-duplicates between pre-training images and test images, which the runs of a study leave out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitkit.core.environment import usable_cores
from vitkit.core.signals import StopFlag
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, read_bad_files, skip_unreadable, write_bad_files
from vitkit.data_quality.near_duplicates import ImageDescriptors, find_near_duplicates, make_thumbnails
from vitkit.evaluation.fewshot import fewshot_splits
from vitkit.studies.study import UPSTREAM
from vitkit.training.callbacks import Callback

FILE = "duplicates.csv"


def exclude_duplicates(
    out: Path, data: Mapping[str, str], names: Sequence[str], *, callback: Callback, stop: StopFlag
) -> list[BadFile]:
    """Return the images of `upstream` that are near-duplicates of test images of the others; search once per study."""
    file = out / FILE
    if not file.exists():
        others = [name for name in names if name != UPSTREAM and data[name] != data[UPSTREAM]]
        bad = find_duplicates(data, others, callback=callback, stop=stop) if UPSTREAM in names and others else []
        write_bad_files(file, bad)
        if bad:
            callback.on_warning(f"{len(bad)} images of {UPSTREAM} are copies of test images and left out; see {FILE}")
    return read_bad_files(file)


def find_duplicates(
    data: Mapping[str, str], others: Sequence[str], *, callback: Callback, stop: StopFlag
) -> list[BadFile]:
    """Return the pre-training images that are near-duplicates of a test image, each once."""

    def describe(source: ImageSource, path: str) -> tuple[ImageSource, ImageDescriptors]:
        readable, _ = skip_unreadable(source, path=path, workers=workers)
        callback.on_task("searching copies of test images", len(readable))

        def progress(images: int) -> None:
            callback.on_progress(images)
            stop.raise_if_requested()

        return readable, ImageDescriptors.from_thumbnails(make_thumbnails(readable, workers=workers, progress=progress))

    workers = usable_cores()
    splits = open_dataset(data[UPSTREAM]).splits
    upstream, descriptors = describe(splits.get("train", next(iter(splits.values()))), data[UPSTREAM])
    reasons: dict[str, str] = {}
    for name in others:
        test, test_descriptors = describe(fewshot_splits(open_dataset(data[name]))[1], data[name])
        for pair in find_near_duplicates({UPSTREAM: descriptors, name: test_descriptors}):
            reasons.setdefault(upstream.name(pair.one.index), f"copy of {test.name(pair.other.index)} of {name}")
    return [BadFile(image, reason) for image, reason in sorted(reasons.items())]
