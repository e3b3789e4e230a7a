"""A folder of image files goes in, a labelled data set comes out, with folders as classes; or an unlabelled one."""

from collections.abc import Sequence
from pathlib import Path

from vitkit.core.errors import DataError
from vitkit.data.source import UNLABELLED, DataSet
from vitkit.data.sources.base import FileSource, class_table, data_set, is_image, some, split_called, walk


def has_class_folders(place: Path) -> bool:
    """Whether some image lies in a folder that can be its class."""
    return place.is_dir() and any(is_image(name) and class_folders_of(name) for name in walk(place))


def has_images(place: Path) -> bool:
    """Whether there is an image at any depth."""
    return place.is_dir() and any(map(is_image, walk(place)))


def class_folders_of(name: str) -> list[str]:
    """The folders of an image, but for the one that says train, val or test.

    >>> class_folders_of("train/cat/1.png"), class_folders_of("train/1.png")
    (['cat'], [])
    """
    folders = name.split("/")[:-1]
    return folders[1:] if folders and split_called(folders[0]) else folders


def open_folders(place: Path) -> DataSet:
    """Class folders, alone or within train, val and test folders. A class holds its images at any depth.

    Images beside the class folders, and a test folder without classes, are left out; `ignored` has their names.
    """
    images, ignored = images_below(place)
    if not any(map(class_folders_of, images)):
        raise DataError(
            f"{place} has no class folders",
            expected="FOLDER/CLASS/IMAGE or FOLDER/train/CLASS/IMAGE",
            got=f"{len(images)} images, and no folder that can be their class",
            hint="put the images of each class in a folder of its own, or name the kind unlabelled",
        )
    base = wrapper(images)
    tops = split_folders(place, base=base, images=images)
    by_split: dict[str, list[str]] = {}
    for split, top in tops.items():
        within = [name for name in images if name.startswith(top)]
        labelled = [name for name in within if "/" in name[len(top) :]]
        if not labelled and split != "test":
            raise DataError(
                f"{place}/{top} has no class folders", expected="CLASS/IMAGE", got=f"{len(within)} images in no folder"
            )
        if labelled:
            by_split[split] = labelled
    used = {name for names in by_split.values() for name in names}
    ignored += [name for name in images if name not in used]
    names = {split: [class_in(name, top=tops[split]) for name in of_split] for split, of_split in by_split.items()}
    classes = class_table(place, names)
    number = {name: label for label, name in enumerate(classes)}
    kind = "class folders" if "all" in by_split else "train, val and test folders of class folders"
    splits = {
        split: FileSource(
            place, kind=kind, classes=classes, labels=[number[name] for name in names[split]], names=of_split
        )
        for split, of_split in by_split.items()
    }
    for source in splits.values():
        source.ignored = tuple(sorted(ignored))
    return data_set(place, splits)


def open_unlabelled(place: Path) -> DataSet:
    """All images below a folder, without labels; train, val and test folders stay apart."""
    images, ignored = images_below(place)
    tops = split_folders(place, base="", images=images)
    splits = {}
    for split, top in tops.items():
        names = [name for name in images if name.startswith(top)]
        splits[split] = FileSource(
            place, kind="images without labels", classes=(), labels=[UNLABELLED] * len(names), names=names
        )
        splits[split].ignored = tuple(ignored)
    return data_set(place, splits)


def images_below(place: Path) -> tuple[list[str], list[str]]:
    """The names of the images below a folder, and those of the other files, both in order."""
    if not place.is_dir():
        raise DataError(f"{place} is not a folder")
    images: list[str] = []
    others: list[str] = []
    for name in walk(place):
        (images if is_image(name) else others).append(name)
    if not images:
        raise DataError(f"{place} has no images", got=f"{len(others)} other files" if others else "an empty folder")
    return sorted(images), sorted(others)


def wrapper(images: Sequence[str]) -> str:
    """The folders around all of the class folders, as unpacking an archive leaves them.

    >>> wrapper(["photos/cat/1.png", "photos/dog/1.png"]), wrapper(["cat/1.png", "cat/2.png"])
    ('photos/', '')
    """
    base = ""
    while True:
        tops = {name[len(base) :].partition("/")[0] for name in images}
        inner = f"{base}{next(iter(tops))}/"
        if len(tops) > 1 or split_called(next(iter(tops))) or any("/" not in name[len(inner) :] for name in images):
            return base
        base = inner


def split_folders(place: Path, *, base: str, images: Sequence[str]) -> dict[str, str]:
    """The folder of each split, relative and with its /; all is in `base` where the folders there are not splits.

    One folder called "test" among others is a class; a train folder and another split's beside it are splits.
    """
    tops = sorted({name[len(base) :].partition("/")[0] for name in images if "/" in name[len(base) :]})
    found: dict[str, str] = {}
    for top in tops:
        if split := split_called(top):
            if split in found:
                both = [found[split].removeprefix(base).rstrip("/"), top]
                raise DataError(f"{place} has two folders for {split}: {some(both)}", hint="keep one of them")
            found[split] = f"{base}{top}/"
    alone = len(found) == len(tops) and not any("/" not in name[len(base) :] for name in images)
    if alone or ("train" in found and len(found) > 1):
        return found
    return {"all": base}


def class_in(name: str, *, top: str) -> str:
    """The class of an image: the first folder below the split's.

    >>> class_in("train/cat/young/1.png", top="train/")
    'cat'
    """
    return name[len(top) :].partition("/")[0]
