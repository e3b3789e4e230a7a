"""A place goes in, a DataSet comes out: its kind is seen from what is there, or named."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from vitkit.core.errors import DataError, UnknownNameError, did_you_mean
from vitkit.data.fractals import FractalConfig, fractal_data
from vitkit.data.source import DataSet
from vitkit.data.sources.arrays import has_idx, has_npz, open_idx, open_npz
from vitkit.data.sources.base import walk
from vitkit.data.sources.cifar import has_cifar, open_cifar
from vitkit.data.sources.embedded import digits
from vitkit.data.sources.folders import has_class_folders, has_images, open_folders, open_unlabelled
from vitkit.data.sources.imagenet import has_imagenet, open_imagenet
from vitkit.data.sources.manifests import has_manifest, open_manifest
from vitkit.data.sources.oxford import has_flowers, has_pets, open_flowers, open_pets
from vitkit.data.sources.parquet import has_parquet, open_parquet
from vitkit.data.sources.vtab import has_vtab, open_vtab
from vitkit.data.sources.webdataset import has_tars, is_pattern, open_webdataset


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A layout of data sets: how it is recognised, in words and by a look, and how it is opened."""

    looks_like: str
    found: Callable[[Path], bool]
    open: Callable[[Path], DataSet]


def never(_: Path) -> bool:
    """Of a kind that is not seen but asked for."""
    return False


def open_val_as_test(place: Path) -> DataSet:
    """Any data set of train and val whose val is what models are judged by, as papers do with ImageNet's.

    It is called test, so that nothing is chosen by it and nothing learns from it.
    """
    found = KINDS[detect(place)].open(place)
    if "test" in found.splits or "val" not in found.splits:
        raise DataError(f"{place} has no val split to judge by", expected="train and val", got=", ".join(found.splits))
    splits = {"train" if split == "train" else "test": source for split, source in found.splits.items()}
    return DataSet(place=found.place, splits=splits)


KINDS: Mapping[str, Kind] = {
    "imagenet": Kind(looks_like="ILSVRC2012_img_train.tar or train/n01440764/", found=has_imagenet, open=open_imagenet),
    "pets": Kind(looks_like="images/ and annotations/trainval.txt", found=has_pets, open=open_pets),
    "flowers": Kind(looks_like="jpg/ and imagelabels.mat", found=has_flowers, open=open_flowers),
    "vtab": Kind(looks_like="train800.txt, val200.txt and test.txt", found=has_vtab, open=open_vtab),
    "cifar": Kind(looks_like="data_batch_1[.bin] or cifar-10-python.tar.gz", found=has_cifar, open=open_cifar),
    "idx": Kind(looks_like="train-images-idx3-ubyte[.gz]", found=has_idx, open=open_idx),
    "manifest": Kind(
        looks_like="metadata.csv, labels.csv or .jsonl with file_name, label", found=has_manifest, open=open_manifest
    ),
    "parquet": Kind(looks_like="train-00000-of-00001.parquet", found=has_parquet, open=open_parquet),
    "webdataset": Kind(looks_like="train-000000.tar", found=has_tars, open=open_webdataset),
    "npz": Kind(looks_like="an .npz file", found=has_npz, open=open_npz),
    "folders": Kind(looks_like="CLASS/IMAGE or train/CLASS/IMAGE", found=has_class_folders, open=open_folders),
    "unlabelled": Kind(looks_like="images in no folder", found=has_images, open=open_unlabelled),
    "val-as-test": Kind(
        looks_like="train and val, which is what models are judged by", found=never, open=open_val_as_test
    ),
}
EMBEDDED = ("digits", "fractals")
LOOSE = ("parquet", "webdataset", "npz")
"""Kinds seen by one file, which may as well be a stray one beside class folders."""


def open_data(place: Path | str, *, kind: str | None = None, fractals: FractalConfig | None = None) -> DataSet:
    """The data set at a place: "digits", "fractals", a folder, a file, or a pattern such as data-{0000..0009}.tar.

    >>> data = open_data("digits")
    >>> data.kind, len(data.classes), len(data.splits["train"])
    ('digits, embedded', 10, 1438)
    >>> open_data("digits", kind="folder")
    Traceback (most recent call last):
    vitkit.core.errors.UnknownNameError: no kind of data is called folder
    """
    known = (*KINDS, *EMBEDDED)
    if kind is not None and kind not in known:
        hint = did_you_mean(kind, known) or f"one of {', '.join(known)}"
        raise UnknownNameError(f"no kind of data is called {kind}", hint=hint)
    if str(place) in EMBEDDED and kind in (None, str(place)):
        return digits() if str(place) == "digits" else fractal_data(fractals or FractalConfig())
    if kind in EMBEDDED:
        raise DataError(f"{kind} comes with vitkit and lies nowhere", expected=kind, got=place)
    path = Path(os.path.expanduser(place))  # noqa: PTH111 - keeps "./digits" apart from "digits"
    if not path.exists() and not is_pattern(path):
        raise DataError(f"there is nothing at {path}", hint=missing_hint(path))
    return KINDS[kind or detect(path)].open(path)


def detect(place: Path) -> str:
    """The name of the kind that is at a place. What a publisher ships comes before plain folders of images."""
    found = [name for name in KINDS if name not in ("folders", "unlabelled") and KINDS[name].found(place)]
    if found and found[0] in LOOSE and has_class_folders(place):
        found.append("folders")
    if len(found) > 1:
        raise DataError(
            f"{place} can be read in {len(found)} ways: {', '.join(found)}",
            got="; ".join(f"{name}: {KINDS[name].looks_like}" for name in found),
            hint=f"name the kind, as {found[0]}, or give the file or folder itself",
        )
    if found:
        return found[0]
    for name in ("folders", "unlabelled"):
        if KINDS[name].found(place):
            return name
    raise DataError(
        f"{place} has no data that vitkit knows",
        expected="CLASS/IMAGE, train/CLASS/IMAGE, a manifest, shards or a published data set",
        got=contents(place),
        hint="vitkit reads folders of images, one folder for each class",
    )


def contents(place: Path) -> str:
    """What is at a place, in a few words."""
    if not place.is_dir():
        return f"a file that ends with {place.suffix}" if place.suffix else "a file"
    suffixes = Counter(os.path.splitext(name)[1].lower() or "no suffix" for name in islice(walk(place), 100_000))  # noqa: PTH122
    if not suffixes:
        return "an empty folder"
    return "files: " + ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))


def missing_hint(path: Path) -> str:
    """The nearest name beside the one that is not there."""
    parent = path.absolute().parent
    beside = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = did_you_mean(path.name, [*beside, *EMBEDDED])
    return near or "give a folder of images, or digits or fractals, which come with vitkit"
