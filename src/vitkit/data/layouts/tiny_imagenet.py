"""Tiny-ImageNet as published: 200 classes of ImageNet at 64 pixels, in a layout of its own."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitkit.core.errors import DataError
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.base import make_file_dataset, number_class_names
from vitkit.data.layouts.files import is_image, list_directory, read_lines, walk_files
from vitkit.data.layouts.published import SYNSET

ANNOTATIONS = "val/val_annotations.txt"
WORDS = "words.txt"


def has_tiny_imagenet(path: Path) -> bool:
    """Return whether there is val_annotations.txt, or words.txt next to folders such as train/n01443537/images."""
    if (path / ANNOTATIONS).is_file():
        return True
    folders = [entry for entry in list_directory(path / "train") if SYNSET.fullmatch(entry.name)]
    return bool(folders) and (path / WORDS).is_file() and (folders[0] / "images").is_dir()


def open_tiny_imagenet(path: Path) -> Dataset:
    """Open train/n01443537/images/ and val/images/, whose labels are in val_annotations.txt.

    Classes are sorted by WordNet id, and named by words.txt if it exists. Images without a label, as those of test, are
    left out.
    """
    annotations = read_annotations(path / ANNOTATIONS) if (path / ANNOTATIONS).is_file() else {}
    files = sorted(walk_files(path))
    synsets: dict[str, dict[str, str]] = {"train": {}, "val": {}}
    for name in filter(is_image, files):
        split, *folders, file_name = name.split("/")
        if split in synsets and folders and SYNSET.fullmatch(folders[0]):
            synsets[split][name] = folders[0]
        elif split == "val" and file_name in annotations:
            synsets[split][name] = annotations[file_name]
    if missing := [name for name in files if is_image(name) and name.startswith("val/") and name not in synsets["val"]]:
        raise DataError(f"{path / ANNOTATIONS} has no line for {shorten_list(missing)}")
    present = {name.rpartition("/")[2] for name in synsets["val"]}
    if lost := [name for name in annotations if name not in present]:
        raise DataError(
            f"{path}: {len(lost)} of {len(annotations)} validation images are missing: {shorten_list(lost)}",
            hint="download the dataset again",
        )
    by_split = {split: of_split for split, of_split in synsets.items() if of_split}
    ids, labels = number_class_names(path, {split: list(of_split.values()) for split, of_split in by_split.items()})
    names = {split: list(of_split) for split, of_split in by_split.items()}
    classes = name_synsets(ids, path / WORDS)
    dataset = make_file_dataset(path, layout="Tiny-ImageNet", classes=classes, labels=labels, names=names)
    used = {name for of_split in names.values() for name in of_split}
    left_out = (name for name in files if name not in used and not name.endswith(".txt"))  # lists of names and boxes
    return replace(dataset, left_out=tuple(left_out))


def read_annotations(path: Path) -> dict[str, str]:
    """Return the synset of each validation image, from lines of file name, synset and box."""
    rows = {}
    for line in read_lines(path):
        words = line.split()
        if len(words) < 2 or not SYNSET.fullmatch(words[1]):
            raise DataError(f"{path}: {line!r}", expected="a file name and a synset, such as val_0.JPEG n03444034")
        rows[words[0]] = words[1]
    return rows


def name_synsets(synsets: Sequence[str], words: Path) -> tuple[str, ...]:
    """Return the first name of each synset in words.txt; its id if it has none, and with the id if two are equal."""
    if not words.is_file():
        return tuple(synsets)
    pairs = (line.partition("\t") for line in read_lines(words))
    name_of = {synset: names.partition(",")[0].strip() for synset, _, names in pairs}
    names = [name_of.get(synset) or synset for synset in synsets]
    counts = Counter(names)
    return tuple(
        f"{name} ({synset})" if counts[name] > 1 else name for name, synset in zip(names, synsets, strict=True)
    )
