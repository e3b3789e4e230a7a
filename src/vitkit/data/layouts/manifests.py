"""Lists of file names and labels, for files below the directory of the list: CSV and JSONL manifests, VTAB-1k tasks."""

import csv
import json
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from vitkit.core.errors import DataError
from vitkit.core.files import name_of_text, text_of_name
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.base import MAX_CLASSES, make_file_dataset, name_classes, number_class_names
from vitkit.data.layouts.files import (
    is_image,
    iterate_lines,
    list_directory,
    parse_split,
    read_list,
    walk_files,
)

MANIFESTS = ("metadata.csv", "metadata.jsonl", "labels.csv", "labels.jsonl", "manifest.csv", "manifest.jsonl")
COLUMNS = ("file_name", "label", "split", "class_index")
EXAMPLE = "file_name,label as the first line, cats/1.jpg,cat as the next"

MAX_MISSING = 1_000
"""Missing files after which no more are searched."""

Values = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class ManifestRow:
    """One line of a manifest. `where` names it in messages."""

    where: str
    file_name: str
    label: str
    split: str
    class_index: int | None


def find_manifests(path: Path) -> list[Path]:
    """Return the manifests of a path: itself, one in the directory, or one in each of its split folders.

    They are called like a manifest, and their first line mentions file_name.
    """
    if path.is_file():
        return [path] if path.suffix.lower() in {".csv", ".jsonl"} else []

    def has_file_names(manifest: Path) -> bool:
        with manifest.open("rb") as file:
            return b"file_name" in file.readline(65_536)

    folders = [folder for folder in list_directory(path) if folder.is_dir() and parse_split(folder.name)]
    for directories in ([path], folders):
        candidates = (file for each in directories for file in list_directory(each) if file.name.lower() in MANIFESTS)
        if manifests := list(filter(has_file_names, candidates)):
            return manifests
    return []


def open_manifest(path: Path) -> Dataset:
    """Open the images of a manifest. Columns: file_name, label, and optionally split and class_index.

    Without class_index the classes are the sorted labels: numbers by value, others by name. Images of a directory that
    are not listed are left out.
    """
    manifests = find_manifests(path)
    directories = {manifest.parent for manifest in manifests}
    if not manifests or len(directories) < len(manifests):
        expected = f"one of {', '.join(MANIFESTS)}, with {EXAMPLE}"
        got = shorten_list([manifest.name for manifest in manifests]) or None
        hint = "give the path of the manifest itself"
        raise DataError(f"{path} has {len(manifests) or 'no'} manifests", expected=expected, got=got, hint=hint)
    root = path.parent if path.is_file() else path
    lines = chain.from_iterable(read_rows(manifest, root=root) for manifest in manifests)
    rows = list(check_row_files(check_rows(lines), root=root))
    if not rows:
        raise DataError(f"{manifests[0]} lists no images", expected=EXAMPLE)
    by_split: dict[str, list[ManifestRow]] = {}
    for row in sorted(rows, key=lambda row: row.file_name):
        by_split.setdefault(row.split, []).append(row)
    classes = None if rows[0].class_index is None else name_classes_by_index(rows)
    layout = "CSV manifest" if manifests[0].suffix.lower() == ".csv" else "JSONL manifest"
    dataset = make_listed_dataset(path, by_split, layout=layout, root=root, classes=classes)
    if path.is_file():  # other lists may be next to it
        return dataset
    file_names = {row.file_name for row in rows}
    names = sorted(text_of_name(name) for name in walk_files(root) if is_image(name))
    return replace(dataset, left_out=tuple(name for name in names if name not in file_names))


def make_listed_dataset(
    path: Path,
    rows: Mapping[str, Sequence[ManifestRow]],
    *,
    layout: str,
    root: Path,
    classes: tuple[str, ...] | None,
) -> Dataset:
    """Create the dataset of the rows of each split.

    `classes` are the names by class_index, empty if these are the numbers themselves; None if rows have only labels.
    """
    if classes is None:
        by_name = {split: [row.label for row in of_split] for split, of_split in rows.items()}
        classes, labels = number_class_names(path, by_name)
    else:
        indices = {split: [row.class_index for row in of_split] for split, of_split in rows.items()}
        labels = {split: np.array(of_split, dtype=np.int64) for split, of_split in indices.items()}
        classes = name_classes(path, labels, classes=classes)
    names = {split: [row.file_name for row in of_split] for split, of_split in rows.items()}
    return make_file_dataset(path, root=root, layout=layout, classes=classes, labels=labels, names=names)


def name_classes_by_index(rows: Sequence[ManifestRow]) -> tuple[str, ...]:
    """Return class names in the order of class_index. Duplicates get their number: ImageNet has two cranes."""
    row_of: dict[int, ManifestRow] = {}
    for row in rows:
        first = row_of.setdefault(row.class_index or 0, row)
        if first.label != row.label:
            raise DataError(f"{row.where}: class_index {row.class_index}", expected=first.label, got=row.label)
    counts = Counter(row.label for row in row_of.values())
    names = []
    for index in range(max(row_of) + 1):
        label = row_of[index].label if index in row_of else str(index)
        names.append(f"{label} ({index})" if counts[label] > 1 else label)
    return tuple(names)


def read_rows(manifest: Path, *, root: Path) -> Iterator[ManifestRow]:
    """Yield the checked lines of a manifest."""
    directory = manifest.parent.relative_to(root)
    split = parse_split(directory.name) if directory.parts else None
    read = read_csv if manifest.suffix.lower() == ".csv" else read_jsonl
    try:
        for line, values in read(manifest):
            yield parse_row(values, directory=directory, split=split, where=f"{manifest}, line {line}")
    except (UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise DataError(f"{manifest} cannot be read: {error}", hint="save it as UTF-8") from error


def parse_row(values: Values, *, directory: Path, split: str | None, where: str) -> ManifestRow:
    """Return the checked values of a line of a manifest in `directory`; the split is "all" if nothing names one."""
    name = str(values.get("file_name") or "")
    if not name.strip():
        raise DataError(f"{where} has no file_name", expected=EXAMPLE)
    name = check_relative_path(name, where=where)
    label = str(values["label"] if values.get("label") is not None else "").strip()
    if not label:
        raise DataError(f"{where}: {name} has no label", expected=EXAMPLE, hint="fill in the column label")
    if split is None:
        value = values.get("split")
        split = "all" if value is None else parse_split(str(value))
        if split is None:
            raise DataError(f"{where}: unknown split", expected="train, val or test", got=repr(value))
    index = values.get("class_index")
    if index is not None and not re.fullmatch(r"[0-9]{1,6}", str(index).strip()):
        raise DataError(f"{where}: class_index", expected=f"a number from 0 to {MAX_CLASSES - 1}", got=repr(index))
    return ManifestRow(
        where=where,
        file_name=(directory / name).as_posix(),
        label=label,
        split=split,
        class_index=None if index is None else int(index),
    )


def read_csv(manifest: Path) -> Iterator[tuple[int, Values]]:
    """Yield line numbers and values of a CSV file."""
    with manifest.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(iterate_lines(file, path=manifest), strict=True)
        reader.fieldnames = columns = [column.strip() for column in reader.fieldnames or ()]
        if missing := [column for column in ("file_name", "label") if column not in columns]:
            raise DataError(f"{manifest} lacks the column {missing[0]}", expected=EXAMPLE, got=",".join(columns))
        for values in reader:
            if None in values:
                message = f"{manifest}, line {reader.line_num} has too many values"
                raise DataError(message, expected=len(columns), hint='put values with a comma in "quotes"')
            yield reader.line_num, {column: value for column, value in values.items() if value is not None}


def read_jsonl(manifest: Path) -> Iterator[tuple[int, Values]]:
    """Yield line numbers and values of a file with one JSON object per line."""
    with manifest.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(iterate_lines(file, path=manifest), start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError as error:
                raise DataError(f"{manifest}, line {line} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{manifest}, line {line}", expected='{"file_name": …, "label": …}', got=text.strip())
            values = {key: record[key] for key in COLUMNS if key in record}
            for key, value in values.items():
                if isinstance(value, bool) or not isinstance(value, str | int | None):
                    raise DataError(f"{manifest}, line {line}: {key}", expected="a string or an integer", got=value)
            yield line, values


def check_relative_path(name: str, *, where: str) -> str:
    """Return a normalized relative path; raise DataError if it could leave the directory of the dataset."""
    try:
        name_of_text(name)
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {name!r} is not valid text", hint="write file names as UTF-8") from error
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or re.search(r"[\\\0\n\r]|^[A-Za-z]:", name) or not path.parts:
        raise DataError(
            f"{where}: {name!r} is not a relative path with /", hint="name files relative to the manifest, without .."
        )
    return path.as_posix()


def check_rows(rows: Iterable[ManifestRow]) -> Iterator[ManifestRow]:
    """Yield the rows; raise DataError if only some have a split or class_index, or if a file is listed twice."""
    by_name: dict[str, ManifestRow] = {}
    for row in rows:
        first = next(iter(by_name.values()), row)
        if (row.split == "all") != (first.split == "all"):
            raise DataError(f"{row.where}: some lines have a split and some have none")
        if (row.class_index is None) != (first.class_index is None):
            raise DataError(f"{row.where}: some lines have a class_index and some have none")
        if by_name.setdefault(row.file_name, row) is not row:
            raise DataError(f"{row.where} repeats {row.file_name} of {by_name[row.file_name].where}")
        yield row


def check_row_files(rows: Iterable[ManifestRow], *, root: Path) -> Iterator[ManifestRow]:
    """Yield the rows; raise DataError for files that do not exist, and for links to files outside of the directory."""
    resolved_root = root.resolve()
    parents: dict[Path, Path] = {}
    missing: list[ManifestRow] = []
    count = 0
    for row in rows:
        count += 1
        path = root / name_of_text(row.file_name)
        try:
            parent = parents.get(path.parent) or parents.setdefault(path.parent, path.parent.resolve(strict=True))
            mode = path.lstat().st_mode
            resolved = path.resolve(strict=True) if stat.S_ISLNK(mode) else parent / path.name
            is_regular = resolved.is_file() if stat.S_ISLNK(mode) else stat.S_ISREG(mode)
        except (OSError, RuntimeError):  # RuntimeError: a link to itself
            missing.append(row)
            if len(missing) == MAX_MISSING:
                break
            continue
        if not resolved.is_relative_to(resolved_root):
            raise DataError(f"{row.where}: {row.file_name} is a link to a file outside of {root}")
        if not is_regular:
            raise DataError(f"{row.where}: {row.file_name} is not a file")
        yield row
    if missing:
        first = " the first" if len(missing) == MAX_MISSING else ""
        names = shorten_list([row.file_name for row in missing])
        got = f"{len(missing)} of{first} {count} files missing: {names}"
        hint = "file names are relative to the directory of the manifest"
        raise DataError(f"{missing[0].where}: no file {missing[0].file_name}", got=got, hint=hint)


# Tasks of VTAB-1k: images/train800/000000.jpg … and train800.txt with lines of a path and a label

VTAB_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
ALL_EXAMPLES = "train800val200.txt"
"""The 1,000 examples in one list, which is the only one of some releases."""
VTAB_EXAMPLE = "images/train800/000000.jpg 19"


def has_vtab(path: Path) -> bool:
    """Return whether there is the list of 800 or 1,000 examples."""
    return (path / VTAB_LISTS["train"]).is_file() or (path / ALL_EXAMPLES).is_file()


def open_vtab(path: Path) -> Dataset:
    """Open the splits train800, val200 and test; if there is only the list of 1,000 examples, it is train.

    Class names are the numbers of the labels. A class may have no example: Sun397 has 397 classes.
    """
    lists = {split: path / name for split, name in VTAB_LISTS.items() if (path / name).is_file()}
    if "train" not in lists and (path / ALL_EXAMPLES).is_file():
        lists = {"train": path / ALL_EXAMPLES} | {split: file for split, file in lists.items() if split != "val"}
    if "train" not in lists:
        expected = ", ".join((*VTAB_LISTS.values(), ALL_EXAMPLES))
        raise DataError(f"{path} has no {VTAB_LISTS['train']}", expected=expected)
    rows = {split: list(check_row_files(read_vtab_list(file), root=path)) for split, file in lists.items()}
    return make_listed_dataset(path, rows, layout="VTAB-1k task", root=path, classes=())


def read_vtab_list(path: Path) -> list[ManifestRow]:
    """Read lines of a path, which may contain spaces, and a label."""
    rows: list[ManifestRow] = []
    for number, line in enumerate(read_list(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        name, _, label = line.strip().rpartition(" ")
        if not name or not (label.isascii() and label.isdigit() and len(label) < 8):
            raise DataError(f"{where}: {line.strip()!r}", expected=f"a path and a number, such as {VTAB_EXAMPLE}")
        name = check_relative_path(name.strip(), where=where)
        rows.append(ManifestRow(where=where, file_name=name, label=label, split="", class_index=int(label)))
    if not rows:
        raise DataError(f"{path} lists no images", expected=VTAB_EXAMPLE)
    return rows
