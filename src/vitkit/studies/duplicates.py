"""Near-duplicates between pre-training images and test images, which the runs of a study leave out.

The search reads every image, so its result is kept in the user's cache, for other studies of the same files.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitkit.core.cache_dir import create_cache_dir, mark_used
from vitkit.core.environment import usable_cores
from vitkit.core.errors import ConfigError, DataError, summarize
from vitkit.core.signals import StopFlag
from vitkit.data.dataset import ImageSource, fingerprint_source
from vitkit.data.image_cache import stamp_images
from vitkit.data.joined import join_sources
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, read_bad_files, skip_unreadable, write_bad_files
from vitkit.data_quality.near_duplicates import ImageDescriptors, find_near_duplicates, make_thumbnails
from vitkit.evaluation.fewshot import fewshot_splits
from vitkit.studies.study import UPSTREAM, Study
from vitkit.training.callbacks import Callback

logger = logging.getLogger(__name__)

FILE = "duplicates.csv"
SEARCH_VERSION = 1
"""Version of the search, to be increased if it finds other images."""


def duplicates_file(out: Path, name: str) -> Path:
    """Return the file with the images of a pre-training dataset that are left out."""
    return out / (FILE if name == UPSTREAM else f"duplicates-{name}.csv")


def exclude_duplicates(
    out: Path, data: Mapping[str, str], study: Study, *, callback: Callback, stop: StopFlag
) -> list[BadFile]:
    """Return the pre-training images that are near-duplicates of test images of the others; search once per study."""
    excluded, pretraining = list[BadFile](), study.pretraining_data
    for name, added in pretraining.items():
        file = duplicates_file(out, name)
        if not file.exists():
            others = [other for other in study.data if other not in pretraining and data[other] != data[name]]
            bad = find_duplicates(data, (name, *added), others, callback=callback, stop=stop) if others else []
            write_bad_files(file, bad)
            if bad:
                callback.on_warning(
                    f"{len(bad)} images of {' and '.join((name, *added))} are copies of test images and left out; "
                    f"see {file.name}"
                )
        excluded += read_bad_files(file)
    return excluded


def find_duplicates(
    data: Mapping[str, str], pretraining: Sequence[str], others: Sequence[str], *, callback: Callback, stop: StopFlag
) -> list[BadFile]:
    """Return the pre-training images that show the same as a test image, each once; from the cache if they are there.

    The images of several pre-training datasets are named as those of a run on all of them. Datasets that several names
    share are searched once, under the first of them.
    """
    datasets = [open_dataset(data[name]) for name in pretraining]
    parts = [dataset.splits.get("train", dataset.first_split) for dataset in datasets]
    name, *_ = pretraining
    sources, paths = {name: join_sources(parts) if len(parts) > 1 else parts[0]}, set[str]()
    for other in others:
        if data[other] not in paths:
            paths.add(data[other])
            sources[other] = fewshot_splits(open_dataset(data[other]))[1]
    file = find_cache_file(sources)
    try:
        if file is not None and file.exists():
            mark_used(file)
            return read_bad_files(file)
    except DataError as error:
        logger.info("searching again: %s", summarize(error))
    bad = search_duplicates(sources, data, callback=callback, stop=stop)
    if file is not None:
        write_bad_files(file, bad)
    return bad


def find_cache_file(sources: Mapping[str, ImageSource]) -> Path | None:
    """Return the file of the cache for these images, by the state of their files, or by the contents of arrays.

    None if a file cannot be read, or if there is no cache.
    """
    content = hashlib.blake2b(f"{SEARCH_VERSION}".encode(), digest_size=16)
    for name, source in sources.items():
        stamps = stamp_images(source)
        in_memory = np.flatnonzero(stamps.statuses[:, 0] < 0).tolist()
        if any(source.locate(index) for index in in_memory):
            return None
        content.update(f"{name} {fingerprint_source(source)}".encode())
        content.update(b"".join(stamps.keys) + stamps.statuses.tobytes())
        content.update(b"".join(map(source.checksum, in_memory)))
    try:
        return create_cache_dir("images") / f"duplicates-{content.hexdigest()}.csv"
    except (OSError, ConfigError) as error:
        logger.info("copies of test images are not cached: %s", summarize(error))
        return None


def search_duplicates(
    sources: Mapping[str, ImageSource], data: Mapping[str, str], *, callback: Callback, stop: StopFlag
) -> list[BadFile]:
    """Compare the images of the first source with those of the others."""
    workers = usable_cores()

    def describe(name: str) -> tuple[ImageSource, ImageDescriptors]:
        source = sources[name]

        def progress(images: int) -> None:
            callback.on_progress(images)
            stop.raise_if_requested()

        callback.on_task(f"verifying {name}", len(source))
        readable, _ = skip_unreadable(source, path=data[name], workers=workers, progress=progress)
        callback.on_task(f"searching copies of test images: {name}", len(readable))
        return readable, ImageDescriptors.from_thumbnails(make_thumbnails(readable, workers=workers, progress=progress))

    first, *others = sources
    train, descriptors = describe(first)
    reasons: dict[str, str] = {}
    for name in others:
        test, test_descriptors = describe(name)
        for pair in find_near_duplicates({first: descriptors, name: test_descriptors}):
            reasons.setdefault(train.name(pair.one.index), f"copy of {test.name(pair.other.index)} of {name}")
    return [BadFile(image, reason) for image, reason in sorted(reasons.items())]
