"""ImageNet (ILSVRC 2012), Oxford-IIIT Pets and Oxford Flowers-102 as published, with their standard splits.

ImageNet is read from folders, or in place from the official tars.
"""

import csv
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.files import read_bytes
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import Dataset, ImageSource
from vitkit.data.layouts.base import (
    ArchiveSource,
    FileSource,
    check_files,
    make_dataset,
    make_file_dataset,
    number_class_names,
    stack_slices,
)
from vitkit.data.layouts.files import (
    TarMember,
    is_image,
    list_directory,
    list_images,
    parse_split,
    read_class_names,
    read_lines,
    walk_files,
)
from vitkit.data.layouts.manifests import check_relative_path

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
    with a list of labels next to it. The test images, which have no labels, and all other files are left out.
    """
    root = path.parent if path.is_file() else path
    directories = find_split_directories(path) if path.is_dir() else {}
    tars = [path] if path.is_file() else [root / name for name in (TRAIN_TAR, VAL_TAR) if (root / name).is_file()]
    files = {split: _list_names(root, directory) for split, directory in directories.items()}
    splits: dict[str, SynsetSource] = {}
    if "train" in directories and has_synsets(directories["train"]):
        splits["train"] = _open_synset_folders(root, directories["train"], files["train"])
    elif root / TRAIN_TAR in tars:
        splits["train"] = _open_train_tar(root / TRAIN_TAR)
    train_synsets = sorted(set(splits["train"][1])) if "train" in splits else []
    if "val" in directories and has_synsets(directories["val"]):
        splits["val"] = _open_synset_folders(root, directories["val"], files["val"])
    elif any(map(is_image, files.get("val", ()))):
        names = list(filter(is_image, files["val"]))
        splits["val"] = _make_file_source(root, names), _read_validation_synsets(root, names, train_synsets)
    elif root / VAL_TAR in tars:
        members = list_images(root / VAL_TAR)
        names = [f"val/{member.name}" for member in members]
        tar_source = _make_tar_source(root / VAL_TAR, members, names)
        splits["val"] = tar_source, _read_validation_synsets(root, names, train_synsets)
    classes, labels = number_class_names(path, {split: synsets for split, (_, synsets) in splits.items()})
    for split, (source, _) in splits.items():
        source.classes, source.labels = classes, labels[split]
    dataset = make_dataset(path, {split: source for split, (source, _) in splits.items()})
    used = {name for source, _ in splits.values() if isinstance(source, FileSource) for name in source.names}
    return replace(dataset, left_out=tuple(name for names in files.values() for name in names if name not in used))


def _list_names(root: Path, directory: Path) -> list[str]:
    prefix = directory.relative_to(root).as_posix()
    return sorted(f"{prefix}/{name}" for name in walk_files(directory))


def _open_synset_folders(root: Path, directory: Path, files: Sequence[str]) -> SynsetSource:
    depth = len(directory.relative_to(root).parts)
    parts = {name: name.split("/")[depth:] for name in filter(is_image, files)}
    names = [name for name in parts if len(parts[name]) > 1]
    return _make_file_source(root, names), [parts[name][0] for name in names]


def _make_file_source(root: Path, names: list[str]) -> FileSource:
    return FileSource(root, layout="ImageNet folders", classes=(), labels=NO_LABELS, names=names)


def _open_train_tar(archive: Path) -> SynsetSource:
    """Open the training images: a tar with a tar per synset."""
    members = list_images(archive)
    names, synsets = [], []
    for member in members:
        inner, _, name = member.name.partition(".tar/")
        synset = inner.rpartition("/")[2]
        if not SYNSET.fullmatch(synset):
            raise DataError(f"{archive} contains {member.name}", expected="images in tars such as n01440764.tar")
        names.append(f"train/{synset}/{name}")
        synsets.append(synset)
    return _make_tar_source(archive, members, names), synsets


def _make_tar_source(archive: Path, members: list[TarMember], names: list[str]) -> ArchiveSource:
    slices = stack_slices((0, member.offset, member.size) for member in members)
    return ArchiveSource([archive], slices, layout="ImageNet tars", classes=(), labels=NO_LABELS, names=names)


def _read_validation_synsets(root: Path, names: Sequence[str], train_synsets: list[str]) -> list[str]:
    """Return the synset of each validation image from the first list that exists, by name or by number."""
    if path := _find_list(root, *NAMED_LISTS):
        synsets = _synsets_by_name(path, names, train_synsets)
    elif path := _find_list(root, SYNSET_LIST):
        synsets = _synsets_by_number(path, list(read_lines(path)), names)
    elif path := _find_list(root, NUMBER_LIST):
        number_map = _find_list(root, NUMBER_MAP)
        if number_map is None:
            raise DataError(
                f"{path} has ILSVRC numbers, but no file maps them to synsets",
                expected=f"{NUMBER_MAP} with lines such as n02119789 1 kit_fox",
                hint=f"the kit's meta.mat is not read; put {NUMBER_MAP} or {SYNSET_LIST} next to it",
            )
        synset_of = {words[1]: words[0] for line in read_lines(number_map) if len(words := line.split()) > 1}
        if unknown := sorted(set(read_lines(path)) - set(synset_of)):
            raise DataError(f"{number_map} lacks numbers of {path.name}: {shorten_list(unknown)}")
        synsets = _synsets_by_number(path, [synset_of[line] for line in read_lines(path)], names)
    else:
        expected = ", or ".join((SYNSET_LIST, *NAMED_LISTS, f"{NUMBER_LIST} with {NUMBER_MAP}"))
        hint = "or put them in folders by synset, val/n01440764/…"
        raise DataError(f"the validation images of {root} have no labels", expected=expected, hint=hint)
    if wrong := sorted({synset for synset in synsets if not SYNSET.fullmatch(synset)}):
        raise DataError(f"{path} has labels that are not synsets: {shorten_list(wrong)}", expected="such as n01440764")
    return synsets


def _find_list(root: Path, *names: str) -> Path | None:
    """Return the first file of these names in the root or in the folder of the development kit."""
    paths = (root / folder / name for name in names for folder in LIST_FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def _synsets_by_number(path: Path, synsets: list[str], names: Sequence[str]) -> list[str]:
    """Return synsets by line number: that of ILSVRC2012_val_00000007 is on line 7."""
    selected = []
    for name in names:
        number = re.search(r"_(\d{8})\.\w+$", name)
        if number is None or not 1 <= int(number[1]) <= len(synsets):
            raise DataError(f"{path} has no line for {name}", expected=f"a number up to {len(synsets)} in its name")
        selected.append(synsets[int(number[1]) - 1])
    return selected


def _synsets_by_name(path: Path, names: Sequence[str], train_synsets: list[str]) -> list[str]:
    """Return synsets by file name. Labels in the list are synsets or indices into those of train."""
    label_of: dict[str, str] = {}
    for line in read_lines(path):
        words = next(csv.reader([line])) if path.suffix == ".csv" else line.split()
        if len(words) < 2 or not words[1].strip():
            raise DataError(f"{path}: {line!r}", expected="a file name and a label")
        label = words[1].split()[0]
        if label.isdecimal() and len(label) < 7:
            label = train_synsets[int(label)] if int(label) < len(train_synsets) else label
        label_of[_get_stem(words[0])] = label
    stems = list(map(_get_stem, names))
    if missing := [stem for stem in stems if stem not in label_of]:
        got = f"{len(missing)} of {len(names)} missing"
        raise DataError(f"{path} has no line for {shorten_list(missing)}", got=got)
    return [label_of[stem] for stem in stems]


def _get_stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


PETS_LISTS = {"train": "trainval.txt", "test": "test.txt"}
FLOWERS_LISTS = {"train": "trnid", "val": "valid", "test": "tstid"}


def has_pets(path: Path) -> bool:
    """Return whether there are the images and lists of Oxford-IIIT Pets."""
    return (path / "images").is_dir() and (path / "annotations" / "trainval.txt").is_file()


def open_pets(path: Path) -> Dataset:
    """Open Oxford-IIIT Pets: images/, annotations/trainval.txt and test.txt. Classes are breeds, by CLASS-ID."""
    lists = {split: path / "annotations" / name for split, name in PETS_LISTS.items()}
    rows = {split: sorted(read_pets_list(file)) for split, file in lists.items() if file.is_file()}
    breeds: dict[int, str] = {}
    for name, class_id in (row for of_split in rows.values() for row in of_split):
        breed = name.removesuffix(".jpg").rpartition("_")[0].rpartition("/")[2]
        if breeds.setdefault(class_id, breed) != breed:
            message = f"{path}: CLASS-ID {class_id} has two breeds"
            raise DataError(message, expected=breeds[class_id], got=f"{breed} in {name}")
    if sorted(breeds) != list(range(1, len(breeds) + 1)):
        got = shorten_list(list(map(str, breeds)))
        raise DataError(f"{path} has gaps in its CLASS-IDs", expected=f"1…{len(breeds)}", got=got)
    names = {split: [name for name, _ in of_split] for split, of_split in rows.items()}
    for of_split_names in names.values():
        check_files(path, of_split_names, where=str(path))
    labels = {split: np.array([number for _, number in of_split], np.int64) - 1 for split, of_split in rows.items()}
    classes = tuple(breeds[class_id] for class_id in sorted(breeds))
    return make_file_dataset(path, layout="Oxford-IIIT Pets", classes=classes, labels=labels, names=names)


def read_pets_list(path: Path) -> list[tuple[str, int]]:
    """Return image names and CLASS-IDs of lines such as Abyssinian_100 1 1 1."""
    rows = []
    for line in read_lines(path):
        if line.startswith("#"):
            continue
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal() or len(words[1]) > 6:
            raise DataError(f"{path}: {line!r}", expected="name, CLASS-ID, species, breed")
        rows.append((f"images/{check_relative_path(words[0], where=str(path))}.jpg", int(words[1])))
    return rows


def has_flowers(path: Path) -> bool:
    """Return whether there are the images and labels of Flowers-102."""
    return (path / "imagelabels.mat").is_file() and (path / "jpg").is_dir()


def open_flowers(path: Path) -> Dataset:
    """Open Oxford Flowers-102: jpg/, imagelabels.mat and setid.mat.

    Class names are numbers from 1, as in the published files, or the lines of classes.txt.
    """
    class_ids = read_matlab_row(path / "imagelabels.mat", "labels")
    if len(class_ids) and not (class_ids.min() >= 1 and class_ids.max() <= 100_000):
        raise DataError(f"{path}/imagelabels.mat has a label out of range", expected="1…102", got=int(class_ids.min()))
    count = int(class_ids.max(initial=0))
    classes = read_class_names(path) or tuple(str(number) for number in range(1, count + 1))
    if len(classes) < count:
        raise DataError(f"{path}/classes.txt has too few names", expected=count, got=len(classes))
    names: dict[str, list[str]] = {}
    labels: dict[str, NDArray[np.int64]] = {}
    for split, key in FLOWERS_LISTS.items():
        image_ids = np.sort(read_matlab_row(path / "setid.mat", key))
        if not len(image_ids):
            continue
        if image_ids[0] < 1 or image_ids[-1] > len(class_ids):
            raise DataError(f"{path}/setid.mat: {key}", expected=f"1…{len(class_ids)}", got=int(image_ids[-1]))
        names[split] = [f"jpg/image_{image_id:05d}.jpg" for image_id in image_ids.tolist()]
        labels[split] = class_ids[image_ids - 1] - 1
        check_files(path, names[split], where=str(path))
    return make_file_dataset(path, layout="Oxford Flowers-102", classes=classes, labels=labels, names=names)


def read_matlab_row(path: Path, key: str) -> NDArray[np.int64]:
    """Return one array of a .mat file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", hint="download imagelabels.mat and setid.mat next to the folder jpg")
    try:
        content = read_bytes(path, max_bytes=MAX_MATLAB_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    arrays = read_matlab(content, where=str(path))
    if key not in arrays:
        raise DataError(f"{path} has no {key}", got=shorten_list(sorted(arrays)) or "no arrays")
    return arrays[key]


# MATLAB 5 files, as far as Flowers-102 needs them

MATRIX, COMPRESSED = 14, 15
DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)
MAX_MATLAB_BYTES = 64 << 20


def read_matlab(content: bytes, *, where: str) -> dict[str, NDArray[np.int64]]:
    """Return the integer arrays of a MATLAB 5 file by name, flattened."""
    if len(content) < 128 or content[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{where} is not a MATLAB 5 file", hint="download it again, or save it with -v7")
    order = "<" if content[126:128] == b"IM" else ">"
    arrays = {}
    try:
        for kind, data in iterate_elements(content[128:], order=order):
            inner: Iterable[tuple[int, bytes]] = [(kind, data)]
            if kind == COMPRESSED:
                decompressed = zlib.decompressobj().decompress(data, MAX_MATLAB_BYTES + 1)
                if len(decompressed) > MAX_MATLAB_BYTES:
                    raise ValueError("it has an array of more than 64 MB")
                inner = iterate_elements(decompressed, order=order)
            for inner_kind, matrix in inner:
                if inner_kind == MATRIX:
                    arrays.update(parse_matrix(matrix, order=order))
    except (struct.error, zlib.error, ValueError, StopIteration, UnicodeDecodeError) as error:
        raise DataError(f"{where} is damaged: {error}", hint="download it again") from error
    return arrays


def iterate_elements(content: bytes, *, order: str) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of consecutive elements. A small element has both in four bytes."""
    offset = 0
    while offset + 8 <= len(content):
        element, size = struct.unpack_from(f"{order}II", content, offset)
        if element >> 16:
            element, size = element & 0xFFFF, element >> 16
            start, end = offset + 4, offset + 8
        else:
            start = offset + 8
            end = start + size if element == COMPRESSED else start + size + -size % 8
        if start + size > len(content):
            raise ValueError("it ends within an array")
        yield element, content[start : start + size]
        offset = end


def parse_matrix(data: bytes, *, order: str) -> dict[str, NDArray[np.int64]]:
    """Return name and numbers of an array; nothing if it does not hold numbers."""
    parts = iterate_elements(data, order=order)
    flags = struct.unpack_from(f"{order}I", next(parts)[1])[0]
    if flags & 0xFF not in NUMERIC_CLASSES:
        return {}
    _, name = next(parts), next(parts)[1]
    element, numbers = next(parts)
    if element not in DTYPES:
        raise ValueError(f"it has numbers of the unknown type {element}")
    array = np.frombuffer(numbers, dtype=np.dtype(DTYPES[element]).newbyteorder("<" if order == "<" else ">"))
    if array.dtype.kind == "f" and not (np.isfinite(array) & (abs(array) < 2**53)).all():
        return {}
    return {name.decode("ascii"): array.astype(np.int64)}
