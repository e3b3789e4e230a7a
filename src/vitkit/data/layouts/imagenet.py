"""ImageNet (ILSVRC 2012) as folders, or as the official tars, which are read in place."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.data.dataset import Dataset, ImageSource
from vitkit.data.layouts.base import ArchiveSource, FileSource, make_dataset, number_class_names
from vitkit.data.layouts.files import (
    TarMember,
    is_image,
    list_directory,
    list_images,
    parse_split,
    read_lines,
    shorten_list,
    walk_files,
)

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
SYNSET = re.compile(r"n\d{8}")
LIST_FOLDERS = (".", "ILSVRC2012_devkit_t12/data", "devkit/data", "ILSVRC/ImageSets/CLS-LOC")
SYNSET_LIST = "imagenet_2012_validation_synset_labels.txt"
NAMED_LISTS = ("val.txt", "LOC_val_solution.csv")
NUMBER_LIST = "ILSVRC2012_validation_ground_truth.txt"
NUMBER_MAP = "map_clsloc.txt"

NO_LABELS = np.empty(0, dtype=np.int64)
SynsetSource = tuple[ImageSource, list[str]]
"""A source whose labels are not set yet, and the synset of each image."""


def has_imagenet(path: Path) -> bool:
    """Return whether there is an official tar, or a train or val folder with folders such as n01440764."""
    if path.is_file():
        return path.name in (TRAIN_TAR, VAL_TAR)
    has_tar = (path / TRAIN_TAR).is_file() or (path / VAL_TAR).is_file()
    return has_tar or any(map(has_synsets, find_split_directories(path).values()))


def find_split_directories(path: Path) -> dict[str, Path]:
    """Return the directories of the splits, in the path itself or as in Kaggle's archive."""
    for base in (path, path / "ILSVRC/Data/CLS-LOC"):
        directories = (entry for entry in list_directory(base) if entry.is_dir())
        if by_split := {split: entry for entry in directories if (split := parse_split(entry.name))}:
            return by_split
    return {}


def has_synsets(directory: Path) -> bool:
    """Return whether all folders in a directory are called like WordNet synsets."""
    folders = [entry for entry in list_directory(directory) if entry.is_dir()]
    return bool(folders) and all(SYNSET.fullmatch(folder.name) for folder in folders)


def open_imagenet(path: Path) -> Dataset:
    """Open ImageNet. Classes are sorted WordNet ids, which is the order of the usual 1,000 labels.

    train is train/n01440764/… or ILSVRC2012_img_train.tar. val is val/n01440764/…, or val/ or ILSVRC2012_img_val.tar
    with a list of labels next to it.
    """
    root = path.parent if path.is_file() else path
    directories = find_split_directories(path) if path.is_dir() else {}
    only = path.name if path.is_file() else None
    train_tar, val_tar = root / TRAIN_TAR, root / VAL_TAR
    splits: dict[str, SynsetSource] = {}
    if "train" in directories and has_synsets(directories["train"]):
        splits["train"] = open_synset_folders(root, directories["train"])
    elif train_tar.is_file() and only in (None, TRAIN_TAR):
        splits["train"] = open_train_tar(train_tar)
    train_synsets = sorted(set(splits["train"][1])) if "train" in splits else []
    if "val" in directories and has_synsets(directories["val"]):
        splits["val"] = open_synset_folders(root, directories["val"])
    elif "val" in directories and any(map(is_image, walk_files(directories["val"]))):
        names = list_names(root, directories["val"])
        splits["val"] = make_file_source(root, names), read_validation_synsets(root, names, train_synsets)
    elif val_tar.is_file() and only in (None, VAL_TAR):
        members = sorted(list_images(val_tar))
        names = [f"val/{member.name}" for member in members]
        splits["val"] = make_tar_source(val_tar, members, names), read_validation_synsets(root, names, train_synsets)
    classes, labels = number_class_names(path, {split: synsets for split, (_, synsets) in splits.items()})
    for split, (source, _) in splits.items():
        source.classes, source.labels = classes, labels[split]
    return make_dataset(path, {split: source for split, (source, _) in splits.items()})


def list_names(root: Path, directory: Path) -> list[str]:
    """Return the sorted names of the images in a directory, relative to the root."""
    prefix = directory.relative_to(root).as_posix()
    return sorted(f"{prefix}/{name}" for name in walk_files(directory) if is_image(name))


def open_synset_folders(root: Path, directory: Path) -> SynsetSource:
    """Open images in synset folders."""
    depth = len(directory.relative_to(root).parts)
    parts = {name: name.split("/")[depth:] for name in list_names(root, directory)}
    names = [name for name in parts if len(parts[name]) > 1]
    return make_file_source(root, names), [parts[name][0] for name in names]


def make_file_source(root: Path, names: list[str]) -> FileSource:
    """Create a source of files without labels."""
    return FileSource(root, layout="ImageNet folders", classes=(), labels=NO_LABELS, names=names)


def open_train_tar(archive: Path) -> SynsetSource:
    """Open the training images: a tar with a tar per synset."""
    members = sorted(list_images(archive))  # by name, as in folders, so that runs are equal
    names, synsets = [], []
    for member in members:
        inner, _, name = member.name.partition(".tar/")
        synset = inner.rpartition("/")[2]
        if not SYNSET.fullmatch(synset):
            raise DataError(f"{archive} contains {member.name}", expected="images in tars such as n01440764.tar")
        names.append(f"train/{synset}/{name}")
        synsets.append(synset)
    return make_tar_source(archive, members, names), synsets


def make_tar_source(archive: Path, members: list[TarMember], names: list[str]) -> ArchiveSource:
    """Create a source of members without labels."""
    slices = np.array([(0, member.offset, member.size) for member in members], dtype=np.int64)
    return ArchiveSource(
        [archive], slices.reshape(-1, 3), layout="ImageNet tars", classes=(), labels=NO_LABELS, names=names
    )


# Labels of the validation images


def read_validation_synsets(root: Path, names: Sequence[str], train_synsets: list[str]) -> list[str]:
    """Return the synset of each validation image from the first list that exists, by name or by number."""
    for path in find_lists(root, *NAMED_LISTS):
        return synsets_by_name(path, names, train_synsets)
    for path in find_lists(root, SYNSET_LIST):
        return synsets_by_number(path, list(read_lines(path)), names)
    for path in find_lists(root, NUMBER_LIST):
        for number_map in find_lists(root, NUMBER_MAP):
            synset_of = {words[1]: words[0] for line in read_lines(number_map) if len(words := line.split()) > 1}
            if unknown := sorted(set(read_lines(path)) - set(synset_of)):
                raise DataError(f"{number_map} lacks numbers of {path.name}: {shorten_list(unknown)}")
            return synsets_by_number(path, [synset_of[line] for line in read_lines(path)], names)
        raise DataError(
            f"{path} has ILSVRC numbers, but no file maps them to synsets",
            expected=f"{NUMBER_MAP} with lines such as n02119789 1 kit_fox",
            hint=f"the kit's meta.mat is not read; put {NUMBER_MAP} or {SYNSET_LIST} next to it",
        )
    raise DataError(
        f"the validation images of {root} have no labels",
        expected=", or ".join((SYNSET_LIST, *NAMED_LISTS, f"{NUMBER_LIST} with {NUMBER_MAP}")),
        hint="or put them in folders by synset, val/n01440764/…",
    )


def find_lists(root: Path, *names: str) -> Iterator[Path]:
    """Yield the files of these names in the root or in the folder of the development kit."""
    return (path for name in names for folder in LIST_FOLDERS if (path := root / folder / name).is_file())


def synsets_by_number(path: Path, synsets: list[str], names: Sequence[str]) -> list[str]:
    """Return synsets by line number: that of ILSVRC2012_val_00000007 is on line 7."""
    selected = []
    for name in names:
        number = re.search(r"_(\d{8})\.\w+$", name)
        if number is None or not 1 <= int(number[1]) <= len(synsets):
            raise DataError(f"{path} has no line for {name}", expected=f"a number up to {len(synsets)} in its name")
        selected.append(synsets[int(number[1]) - 1])
    return check_synsets(path, selected)


def synsets_by_name(path: Path, names: Sequence[str], train_synsets: list[str]) -> list[str]:
    """Return synsets by file name. Labels in the list are synsets or indices into those of train."""
    label_of: dict[str, str] = {}
    for line in read_lines(path):
        words = next(csv.reader([line])) if path.suffix == ".csv" else line.split()
        if len(words) < 2 or not words[1].strip():
            raise DataError(f"{path}: {line!r}", expected="a file name and a label")
        label = words[1].split()[0]
        if label.isdecimal() and len(label) < 7:
            label = train_synsets[int(label)] if int(label) < len(train_synsets) else label
        label_of[get_stem(words[0])] = label
    if missing := [get_stem(name) for name in names if get_stem(name) not in label_of]:
        got = f"{len(missing)} of {len(names)} missing"
        raise DataError(f"{path} has no line for {shorten_list(missing)}", got=got)
    return check_synsets(path, [label_of[get_stem(name)] for name in names])


def get_stem(name: str) -> str:
    """Return the file name without folders and suffixes."""
    return name.rpartition("/")[2].partition(".")[0]


def check_synsets(path: Path, synsets: list[str]) -> list[str]:
    """Return the synsets; raise DataError if some are not."""
    if wrong := sorted({synset for synset in synsets if not SYNSET.fullmatch(synset)}):
        raise DataError(f"{path} has labels that are not synsets: {shorten_list(wrong)}", expected="such as n01440764")
    return synsets
