"""Folders of image files: a folder per class, or images without labels."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import UNLABELED, Dataset
from vitkit.data.layouts.base import make_file_dataset, number_class_names
from vitkit.data.layouts.files import is_image, parse_split, walk_files


def has_class_folders(path: Path) -> bool:
    """Return whether some image is in a folder that can be its class."""
    return path.is_dir() and any(is_image(name) and get_class_folders(name) for name in walk_files(path))


def has_images(path: Path) -> bool:
    """Return whether there is an image at any depth."""
    return path.is_dir() and any(map(is_image, walk_files(path)))


def get_class_folders(name: str) -> list[str]:
    """Return the folders of an image, except for a first one called train, val or test."""
    folders = name.split("/")[:-1]
    return folders[1:] if folders and parse_split(folders[0]) else folders


def open_folders(path: Path) -> Dataset:
    """Open class folders, alone or within train, val and test folders. A class may have subfolders.

    Images next to the class folders, and those of a test folder without classes, are left out.
    """
    images, others = list_image_files(path)
    if not any(map(get_class_folders, images)):
        expected = "FOLDER/CLASS/IMAGE or FOLDER/train/CLASS/IMAGE"
        got = f"{len(images)} images, and no folder that can be their class"
        hint = "use one directory per class, or set the layout to unlabeled"
        raise DataError(f"{path} has no class folders", expected=expected, got=got, hint=hint)
    split_folders = find_split_folders(path, base=find_wrapper(images), images=images)
    names: dict[str, list[str]] = {}
    for split, folder in split_folders.items():
        inside = [name for name in images if name.startswith(folder)]
        labeled = [name for name in inside if "/" in name[len(folder) :]]
        if not labeled and split != "test":
            message = f"{path}/{folder} has no class folders"
            raise DataError(message, expected="CLASS/IMAGE", got=f"{len(inside)} images in no folder")
        if labeled:
            names[split] = labeled
    class_names = {
        split: [name.removeprefix(split_folders[split]).partition("/")[0] for name in names[split]] for split in names
    }
    classes, labels = number_class_names(path, class_names, numeric=False)
    layout = "class folders" if "all" in names else "train, val and test folders of class folders"
    dataset = make_file_dataset(path, layout=layout, classes=classes, labels=labels, names=names)
    used = {name for of_split in names.values() for name in of_split}
    left_out = [name for name in images if name not in used] + others
    left_out += find_empty_classes(others, classes=set(classes), split_folders=split_folders)
    return replace(dataset, left_out=tuple(dict.fromkeys(left_out)))


def find_empty_classes(
    others: Sequence[str], *, classes: Collection[str], split_folders: Mapping[str, str]
) -> Iterator[str]:
    """Yield the folders, with a final /, that would be classes if they had images."""
    for name in others:
        for folder in split_folders.values():
            class_name, slash, _ = name.removeprefix(folder).partition("/")
            if name.startswith(folder) and slash and class_name not in classes:
                yield f"{folder}{class_name}/"


def open_unlabeled(path: Path) -> Dataset:
    """Open all images below a directory without labels. Train, val and test folders are splits."""
    images, others = list_image_files(path)
    names = {
        split: [name for name in images if name.startswith(folder)]
        for split, folder in find_split_folders(path, base="", images=images).items()
    }
    labels = {split: np.full(len(of_split), UNLABELED) for split, of_split in names.items()}
    dataset = make_file_dataset(path, layout="images without labels", classes=(), labels=labels, names=names)
    return replace(dataset, left_out=tuple(others))


def list_image_files(path: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the images below a directory, and of its other files and empty folders."""
    if not path.is_dir():
        raise DataError(f"{path} is not a directory")
    names = sorted(walk_files(path))
    images: list[str] = []
    others: list[str] = []
    for name in names:
        (images if is_image(name) else others).append(name)
    if not images:
        raise DataError(f"{path} has no images", got=f"{len(names)} other files" if names else "an empty directory")
    return images, others


def find_wrapper(images: Sequence[str]) -> str:
    """Return the folders that contain all class folders, as unpacking an archive creates them.

    >>> find_wrapper(["photos/cat/1.png", "photos/dog/1.png"]), find_wrapper(["cat/1.png", "cat/2.png"])
    ('photos/', '')
    """
    base = ""
    while True:
        folders = {name[len(base) :].partition("/")[0] for name in images}
        folder = next(iter(folders))
        inner = f"{base}{folder}/"
        if len(folders) > 1 or parse_split(folder) or any("/" not in name[len(inner) :] for name in images):
            return base
        base = inner


def find_split_folders(path: Path, *, base: str, images: Sequence[str]) -> dict[str, str]:
    """Return the folder of each split, with a trailing /; `base` for "all" if the folders there are not splits.

    A single folder called "test" among others is a class; "train" and another split next to it are splits.
    """
    folders = sorted({name[len(base) :].partition("/")[0] for name in images if "/" in name[len(base) :]})
    by_split: dict[str, str] = {}
    for folder in folders:
        if split := parse_split(folder):
            if split in by_split:
                both = [by_split[split].removeprefix(base).rstrip("/"), folder]
                raise DataError(f"{path} has two folders for {split}: {shorten_list(both)}", hint="keep one of them")
            by_split[split] = f"{base}{folder}/"
    only_splits = len(by_split) == len(folders) and all("/" in name[len(base) :] for name in images)
    if only_splits or ("train" in by_split and len(by_split) > 1):
        return by_split
    return {"all": base}
