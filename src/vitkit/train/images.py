"""Where the images are goes in; those to learn from, to validate on and to test on come out, all of them readable."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitkit.core.config import load_toml
from vitkit.core.errors import DataError
from vitkit.core.files import write_text
from vitkit.core.stopping import Stop
from vitkit.data.source import DataSet, Joined, Source
from vitkit.data.sources.detect import open_data
from vitkit.data.split import part, split
from vitkit.data.verify import BadFile, read_bad_files, too_many, verify, without, write_bad_files
from vitkit.train.config import DataConfig, RunConfig
from vitkit.train.folder import RunFolder
from vitkit.train.parallel import Ranks, on_leader
from vitkit.train.watch import Watcher


@dataclass(frozen=True, kw_only=True)
class Images:
    """What a run learns from and is judged by."""

    place: str
    kind: str
    classes: tuple[str, ...]
    train: Source
    val: Source | None
    test: Source | None
    bad: int

    def in_words(self) -> str:
        """What was found, in a line."""
        parts = {"to learn from": self.train, "to validate on": self.val, "to test on": self.test}
        counts = ", ".join(f"{len(source):,} {use}" for use, source in parts.items() if source is not None)
        classes = f"{len(self.classes)} classes" if self.classes else "no labels"
        return f"{self.kind}: {classes}, {counts}"

    @property
    def judged_by(self) -> tuple[str, Source] | None:
        """The images that the final model is judged by: the test images, or else those of validation."""
        if self.test is not None:
            return "test", self.test
        return None if self.val is None else ("val", self.val)


def find_images(
    run: RunConfig, *, folder: RunFolder, ranks: Ranks, workers: int, watcher: Watcher, stop: Stop
) -> Images:
    """Open the data set, leave out what cannot be read, and split it where it has no splits of its own.

    An objective without labels asks for none and learns from all images; else the seed chooses those that keep theirs.
    """
    config, labelled = run.data, run.objective.labelled
    found = open_data(config.path, kind=config.kind, fractals=config.fractals)
    if labelled and not found.classes:
        raise DataError(
            f"{config.path}: the images have no labels ({found.kind})",
            hint="put each class in a folder of its own, or list file_name,label in a CSV file; "
            "or learn without labels: vitkit train mae-folder data=…",
        )
    bad = readable(found, config, folder=folder, ranks=ranks, workers=workers, watcher=watcher, stop=stop)
    splits = {name: without(source, bad) for name, source in found.splits.items()}
    images = divided(config, found, splits, bad=len(bad))
    if labelled and config.label_share < 1.0:
        images = replace(images, train=part(images.train, share=config.label_share, salt=f"labels {run.seed} "))
    on_leader(ranks, lambda _: _same_images(folder.data, images))
    watcher.say(images.in_words())
    return images


def readable(
    found: DataSet, config: DataConfig, *, folder: RunFolder, ranks: Ranks, workers: int, watcher: Watcher, stop: Stop
) -> list[BadFile]:
    """The images that cannot be read, looked for once in a run; too many of them are an error."""

    def check(still_working: Callable[[], None]) -> None:
        if not config.verify or folder.bad_files.exists():
            return
        unsure = [source for source in found.splits.values() if not source.is_sound]
        total = sum(map(len, unsure))
        if total:
            watcher.work("checking images", total)
        bad: list[BadFile] = []
        for source in unsure:
            done = 0

            def advance(now: int) -> None:
                nonlocal done
                watcher.advance(now - done)
                done = now
                stop.check()
                still_working()

            bad += verify(source, channels=config.channels, workers=workers, progress=advance)
        too_many(bad, total=total, max_share=config.max_bad_share)
        write_bad_files(folder.bad_files, bad)
        if bad:
            watcher.warn(f"{len(bad)} of {total} images cannot be read and are left out; see {folder.bad_files.name}")

    on_leader(ranks, check)
    return read_bad_files(folder.bad_files) if config.verify else []


def divided(config: DataConfig, found: DataSet, splits: dict[str, Source], *, bad: int) -> Images:
    """The splits as a run uses them: validation images are held out of training where there are none."""
    train, val, test = splits.get("train", splits.get("all")), splits.get("val"), splits.get("test")
    if train is None:
        raise DataError(
            f"{config.path}: there is nothing to train on",
            expected="a split called train, or none at all",
            got=", ".join(splits),
        )
    if config.train_on == "all":
        train, val = (train if val is None else Joined([train, val])), None
    elif val is None and config.val_share:
        train, val = split(train, share=config.val_share)
        val = val if len(val) else None
    if len(train) == 0:
        raise DataError(f"{config.path}: no image is left to train on")
    return Images(place=found.place, kind=found.kind, classes=found.classes, train=train, val=val, test=test, bad=bad)


def as_divided_for(folder: RunFolder, found: DataSet) -> DataSet:
    """The data set with the splits that a run made of it, where it is the one that the run learned from.

    So a model is judged on what was held out, not on what it has seen.
    """
    if not folder.config.exists():
        return found
    config = load_toml(folder.config, RunConfig, recipes={}).data
    if Path(config.path).resolve() != Path(found.place).resolve():
        return found
    if config.kind == "val-as-test" and "test" not in found.splits:
        found = open_data(found.place, kind=config.kind)
    bad = read_bad_files(folder.bad_files) if folder.bad_files.exists() else []
    images = divided(config, found, {name: without(source, bad) for name, source in found.splits.items()}, bad=len(bad))
    parts = {"train": images.train, "val": images.val, "test": images.test}
    return DataSet(found.place, {name: source for name, source in parts.items() if source is not None})


def _same_images(path: Path, images: Images) -> None:
    """Write down what the images are; a resumed run must find them as they were."""
    parts = {"train": images.train, "val": images.val, "test": images.test}
    now = {
        "kind": images.kind,
        "classes": len(images.classes),
        "images": {name: len(source) for name, source in parts.items() if source is not None},
        "fingerprints": {name: fingerprint(source) for name, source in parts.items() if source is not None},
    }
    if not path.exists():
        write_text(path, json.dumps(now, indent=2) + "\n")
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: damaged", hint="delete the file and run again") from error
    if before != now:
        counted = {key: before.get(key) != now[key] for key in ("kind", "classes", "images")}
        changed = next((key for key, differs in counted.items() if differs), None)
        raise DataError(
            "the images are not those that the run began with",
            expected=f"{changed} {before.get(changed)}" if changed else "the same names, labels and classes",
            got=f"{now[changed]}" if changed else "as many, but others",
            hint="put them back as they were, or begin a new run with another --out",
        )


def fingerprint(source: Source) -> str:
    """A checksum of the classes, the labels and the names, in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(source.labels).tobytes())
    for name in source.classes:
        digest.update(name.encode(errors="surrogateescape") + b"\0")
    for index in range(len(source)):
        digest.update(source.name(index).encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()
