"""ImageNet (ILSVRC 2012) goes in, as folders or as the official tars read in place; train and val come out."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitkit.core.errors import DataError
from vitkit.data.source import DataSet, Source
from vitkit.data.sources.base import FileSource, SliceSource, data_set, is_image, listing, some, split_called, walk
from vitkit.data.sources.tars import members, nested_members
from vitkit.data.sources.webdataset import lines_of

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
SYNSET = re.compile(r"n\d{8}")
HOMES = (".", "ILSVRC2012_devkit_t12/data", "devkit/data", "ILSVRC/ImageSets/CLS-LOC")
SYNSET_LISTS = ("imagenet_2012_validation_synset_labels.txt",)
NAMED_LISTS = ("val.txt", "LOC_val_solution.csv")
NUMBER_LIST = "ILSVRC2012_validation_ground_truth.txt"
NUMBER_MAP = "map_clsloc.txt"


def has_imagenet(place: Path) -> bool:
    """Whether there is one of the official tars, or a train or val folder with folders called n01440764."""
    if place.is_file():
        return place.name in (TRAIN_TAR, VAL_TAR)
    if (place / TRAIN_TAR).is_file() or (place / VAL_TAR).is_file():
        return True
    return any(has_synsets(folder) for folder in split_places(place).values())


def split_places(place: Path) -> dict[str, Path]:
    """The folders of the splits, in the place itself or where Kaggle's archive has them."""
    for home in (place, place / "ILSVRC/Data/CLS-LOC"):
        found = {split: folder for folder in listing(home) if folder.is_dir() and (split := split_called(folder.name))}
        if found:
            return found
    return {}


def has_synsets(folder: Path) -> bool:
    """Whether there are folders called like WordNet's synsets, and no others."""
    folders = [path for path in listing(folder) if path.is_dir()]
    return bool(folders) and all(SYNSET.fullmatch(path.name) for path in folders)


def open_imagenet(place: Path) -> DataSet:
    """ImageNet: classes are WordNet ids in order, which is the order of the usual 1,000 labels.

    train is train/n01440764/… or ILSVRC2012_img_train.tar; val is val/n01440764/…, or val/ or ILSVRC2012_img_val.tar
    with a list of labels beside it.
    """
    home = place.parent if place.is_file() else place
    folders = split_places(place) if place.is_dir() else {}
    only = place.name if place.is_file() else None
    train_tar, val_tar = home / TRAIN_TAR, home / VAL_TAR
    found: dict[str, tuple[Source, list[str]]] = {}
    if "train" in folders and has_synsets(folders["train"]):
        found["train"] = from_folder(home, folders["train"])
    elif train_tar.is_file() and only in (None, TRAIN_TAR):
        found["train"] = from_train_tar(train_tar)
    if "val" in folders and has_synsets(folders["val"]):
        found["val"] = from_folder(home, folders["val"])
    elif "val" in folders and any(map(is_image, walk(folders["val"]))):
        found["val"] = from_flat_folder(home, folders["val"], train=found.get("train"))
    elif val_tar.is_file() and only in (None, VAL_TAR):
        found["val"] = from_val_tar(val_tar, home=home, train=found.get("train"))
    return with_labels(place, found)


def with_labels(place: Path, found: dict[str, tuple[Source, list[str]]]) -> DataSet:
    """The splits with the labels that their synsets mean."""
    known = sorted({synset for _, synsets in list(found.values())[:1] for synset in synsets})
    number = {synset: label for label, synset in enumerate(known)}
    splits = {}
    for split, (source, synsets) in found.items():
        if unknown := sorted(set(synsets) - set(known)):
            raise DataError(f"{split} of {place} has classes that train lacks: {some(unknown)}")
        source.classes = tuple(known)
        source.labels = source.labels.copy()
        source.labels[:] = [number[synset] for synset in synsets]
        splits[split] = source
    return data_set(place, splits)


def from_folder(home: Path, folder: Path) -> tuple[Source, list[str]]:
    """Images in synset folders."""
    top = folder.relative_to(home).as_posix()
    names = sorted(f"{top}/{name}" for name in walk(folder) if is_image(name) and "/" in name)
    return file_source(home, names), [name[len(top) + 1 :].partition("/")[0] for name in names]


def from_flat_folder(home: Path, folder: Path, *, train: tuple[Source, list[str]] | None) -> tuple[Source, list[str]]:
    """Validation images in one folder, with their labels from a list."""
    top = folder.relative_to(home).as_posix()
    names = sorted(f"{top}/{name}" for name in walk(folder) if is_image(name))
    return file_source(home, names), validation_synsets(home, names, train=train)


def file_source(home: Path, names: list[str]) -> FileSource:
    """Image files whose labels are still to come."""
    return FileSource(home, kind="ImageNet folders", classes=(), labels=[0] * len(names), names=names)


def from_train_tar(archive: Path) -> tuple[Source, list[str]]:
    """The training images: a tar with a tar in it for each synset."""
    slices, names, synsets = [], [], []
    for inner, member in sorted(nested_members(archive)):  # by name, as in folders: both give the same run
        synset = inner.rpartition("/")[2].removesuffix(".tar")
        if not SYNSET.fullmatch(synset):
            raise DataError(f"{archive} has {inner} in it", expected="n01440764.tar and the like")
        if is_image(member.name):
            slices.append((0, member.offset, member.size))
            names.append(f"train/{synset}/{member.name}")
            synsets.append(synset)
    return tar_source(archive, slices, names), synsets


def from_val_tar(archive: Path, *, home: Path, train: tuple[Source, list[str]] | None) -> tuple[Source, list[str]]:
    """The validation images: one flat tar, with the labels from a list beside it."""
    found = sorted(member for member in members(archive) if is_image(member.name))
    names = [f"val/{member.name}" for member in found]
    slices = [(0, member.offset, member.size) for member in found]
    return tar_source(archive, slices, names), validation_synsets(home, names, train=train)


def tar_source(archive: Path, slices: list[tuple[int, int, int]], names: list[str]) -> SliceSource:
    """Images of an archive whose labels are still to come."""
    return SliceSource([archive], slices, kind="ImageNet tars", classes=(), labels=[0] * len(names), names=names)


def validation_synsets(home: Path, names: Sequence[str], *, train: tuple[Source, list[str]] | None) -> list[str]:
    """The synset of each validation image, from whichever list there is: by name, or by the images' numbers."""
    for path in existing(home, NAMED_LISTS):
        return by_name(path, names, synsets=sorted(set(train[1])) if train else [])
    for path in existing(home, SYNSET_LISTS):
        return by_order(path, list(lines_of(path)), names)
    for path in existing(home, (NUMBER_LIST,)):
        for number_map in existing(home, (NUMBER_MAP,)):
            synset_of = {words[1]: words[0] for line in lines_of(number_map) if len(words := line.split()) > 1}
            if unknown := sorted(set(lines_of(path)) - set(synset_of)):
                raise DataError(f"{number_map} lacks numbers of {path.name}: {some(unknown)}")
            return by_order(path, [synset_of[line] for line in lines_of(path)], names)
        raise DataError(
            f"{path} has ILSVRC numbers, and nothing here says which synsets they are",
            expected=f"{NUMBER_MAP}, lines as n02119789 1 kit_fox",
            hint=f"the kit's meta.mat is not read; put {NUMBER_MAP} or {SYNSET_LISTS[0]} beside it",
        )
    raise DataError(
        f"the validation images of {home} have no labels",
        expected=", or ".join((*SYNSET_LISTS, *NAMED_LISTS, f"{NUMBER_LIST} with {NUMBER_MAP}")),
        hint="or put them in folders by synset, val/n01440764/…",
    )


def existing(home: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files of these names in the place, or in the development kit's folder."""
    return (path for name in names for folder in HOMES if (path := home / folder / name).is_file())


def by_order(path: Path, synsets: list[str], names: Sequence[str]) -> list[str]:
    """The label of ILSVRC2012_val_00000007 is on the seventh line."""
    found = []
    for name in names:
        number = re.search(r"_(\d{8})\.\w+$", name)
        if number is None or not 1 <= int(number[1]) <= len(synsets):
            raise DataError(f"{path} has no line for {name}", expected=f"a number up to {len(synsets)} in its name")
        found.append(synsets[int(number[1]) - 1])
    return checked(path, found)


def by_name(path: Path, names: Sequence[str], *, synsets: list[str]) -> list[str]:
    """Labels by file name: a synset, or its place in the order of the training folders."""
    label_of: dict[str, str] = {}
    for line in lines_of(path):
        words = next(csv.reader([line])) if path.suffix == ".csv" else line.split()
        if len(words) < 2 or not words[1].strip():
            raise DataError(f"{path}: {line!r}", expected="a file name and a label")
        label = words[1].split()[0]
        if label.isdecimal() and len(label) < 7:
            label = synsets[int(label)] if int(label) < len(synsets) else label
        label_of[words[0].rpartition("/")[2].partition(".")[0]] = label
    wanted = [name.rpartition("/")[2].partition(".")[0] for name in names]
    if missing := [name for name in wanted if name not in label_of]:
        raise DataError(f"{path} has no line for {some(missing)}", got=f"{len(missing)} of {len(names)} missing")
    return checked(path, [label_of[name] for name in wanted])


def checked(path: Path, synsets: list[str]) -> list[str]:
    """The synsets, if they are."""
    if wrong := sorted({synset for synset in synsets if not SYNSET.fullmatch(synset)}):
        raise DataError(f"{path} has labels that are no synsets: {some(wrong)}", expected="n01440764 and the like")
    return synsets
