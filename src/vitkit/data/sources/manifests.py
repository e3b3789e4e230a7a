"""A CSV or JSONL list of file names and labels goes in, a data set comes out, of files below the list's folder."""

import csv
import json
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vitkit.core.errors import DataError
from vitkit.data.source import DataSet
from vitkit.data.sources.base import (
    MOST_CLASSES,
    FileSource,
    by_number,
    class_table,
    data_set,
    listing,
    some,
    split_called,
)

MANIFESTS = ("metadata.csv", "metadata.jsonl", "labels.csv", "labels.jsonl", "manifest.csv", "manifest.jsonl")
EXAMPLE = "file_name,label as the first line, cats/1.jpg,cat as the next"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a manifest."""

    where: str
    file_name: str
    label: str
    split: str
    class_index: int | None


def has_manifest(place: Path) -> bool:
    """Whether this is a manifest, or a folder with one in it or in its train, val or test folder."""
    return bool(find_manifests(place))


def find_manifests(place: Path) -> list[Path]:
    """The manifests of a place: itself, one in the folder, or one in each of its split folders."""
    if place.is_file():
        return [place] if place.suffix.lower() in {".csv", ".jsonl"} else []
    found = manifests_in(place)
    if not found:
        folders = [folder for folder in listing(place) if folder.is_dir() and split_called(folder.name)]
        found = [manifest for folder in folders for manifest in manifests_in(folder)]
    return found


def manifests_in(folder: Path) -> list[Path]:
    """The files directly in a folder that are called like a manifest, and have the column that makes one."""
    return [path for path in listing(folder) if path.name.lower() in MANIFESTS and names_files(path)]


def names_files(path: Path) -> bool:
    """Whether the first line speaks of file names."""
    with path.open("rb") as file:
        return b"file_name" in file.readline(65_536)


def open_manifest(place: Path) -> DataSet:
    """The images that a manifest lists. Columns: file_name, label; where wanted split, and class_index.

    Without class_index the classes are the labels in order: numbers by value, others by name.
    """
    manifests = find_manifests(place)
    folders = {manifest.parent for manifest in manifests}
    if not manifests or len(folders) < len(manifests):
        raise DataError(
            f"{place} has {len(manifests) or 'no'} manifests",
            expected=f"one of {', '.join(MANIFESTS)}, with {EXAMPLE}",
            got=some([manifest.name for manifest in manifests]) or None,
            hint="give the path of the manifest itself",
        )
    root = place.parent if place.is_file() else place
    rows = [row for manifest in manifests for row in read_rows(manifest, root=root)]
    if not rows:
        raise DataError(f"{manifests[0]} lists no images", expected=EXAMPLE)
    check_splits(rows)
    check_files(rows, root=root)
    by_split: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.file_name):
        by_split.setdefault(row.split, []).append(row)
    kind = "CSV manifest" if manifests[0].suffix.lower() == ".csv" else "JSONL manifest"
    classes, labels = label_rows(place, by_split)
    splits = {
        split: FileSource(
            root, kind=kind, classes=classes, labels=labels[split], names=[row.file_name for row in of_split]
        )
        for split, of_split in by_split.items()
    }
    return data_set(place, splits)


def label_rows(place: Path, by_split: dict[str, list[Row]]) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """The names of the classes, and the labels of each split."""
    rows = [row for of_split in by_split.values() for row in of_split]
    if all(row.class_index is not None for row in rows):
        labels = {split: [row.class_index or 0 for row in of_split] for split, of_split in by_split.items()}
        return names_by_index(rows), labels
    classes = by_number(class_table(place, {split: {row.label for row in of} for split, of in by_split.items()}))
    number = {name: label for label, name in enumerate(classes)}
    return classes, {split: [number[row.label] for row in of_split] for split, of_split in by_split.items()}


def names_by_index(rows: Sequence[Row]) -> tuple[str, ...]:
    """Class names in the order of class_index; ImageNet has two cranes, so a name given twice gets its number."""
    name_of: dict[int, Row] = {}
    for row in rows:
        known = name_of.setdefault(row.class_index or 0, row)
        if known.label != row.label:
            raise DataError(f"{row.where}: class_index {row.class_index}", expected=known.label, got=row.label)
    times = Counter(row.label for row in name_of.values())
    names = []
    for index in range(max(name_of) + 1):
        label = name_of[index].label if index in name_of else str(index)
        names.append(f"{label} ({index})" if times[label] > 1 else label)
    return tuple(names)


def read_rows(manifest: Path, *, root: Path) -> Iterator[Row]:
    """The lines of a manifest, each checked on its own."""
    inside = manifest.parent.relative_to(root)
    split_of_folder = split_called(inside.name) if inside.parts else None
    read = read_csv if manifest.suffix.lower() == ".csv" else read_jsonl
    try:
        for line, values in read(manifest):
            where = f"{manifest}, line {line}"
            name = file_name_in(values, where=where)
            label = str(values.get("label") if values.get("label") is not None else "").strip()
            if not label:
                raise DataError(f"{where}: {name} has no label", expected=EXAMPLE, hint="fill in the column label")
            index = values.get("class_index")
            yield Row(
                where=where,
                file_name=(inside / name).as_posix(),
                label=label,
                split=split_of_folder or split_value(values.get("split"), where=where),
                class_index=None if index is None else index_value(index, where=where),
            )
    except (UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise DataError(f"{manifest} cannot be read: {error}", hint="save it as UTF-8") from error


def read_csv(manifest: Path) -> Iterator[tuple[int, dict[str, str | int]]]:
    """Line numbers and values of a CSV file, after a check of its first line."""
    with manifest.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        columns = [column.strip() for column in reader.fieldnames or ()]
        reader.fieldnames = columns
        if missing := [column for column in ("file_name", "label") if column not in columns]:
            raise DataError(f"{manifest} lacks the column {missing[0]}", expected=EXAMPLE, got=",".join(columns))
        for values in reader:
            if None in values:
                raise DataError(
                    f"{manifest}, line {reader.line_num} has too many values",
                    expected=len(columns),
                    hint='put values with a comma in "quotes"',
                )
            yield reader.line_num, {column: value for column, value in values.items() if value is not None}


def read_jsonl(manifest: Path) -> Iterator[tuple[int, dict[str, str | int]]]:
    """Line numbers and values of a file with one JSON object a line."""
    with manifest.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except ValueError as error:
                raise DataError(f"{manifest}, line {line} is not JSON: {error}") from error
            if not isinstance(values, dict):
                raise DataError(f"{manifest}, line {line}", expected='{"file_name": …, "label": …}', got=text.strip())
            wanted = {key: values[key] for key in ("file_name", "label", "split", "class_index") if key in values}
            for key, value in wanted.items():
                if isinstance(value, bool) or not isinstance(value, str | int | None):
                    raise DataError(f"{manifest}, line {line}: {key}", expected="a text or a whole number", got=value)
            yield line, wanted


def file_name_in(values: dict[str, str | int], *, where: str) -> str:
    """The file name as it may be: relative, with /, and never out of the manifest's folder."""
    name = str(values.get("file_name") or "")
    if not name.strip():
        raise DataError(f"{where} has no file_name", expected=EXAMPLE)
    return safe_name(name, where=where)


def safe_name(name: str, *, where: str) -> str:
    r"""A relative name in its plain form; refused where it could lead out of the data set's folder.

    >>> safe_name("./cats//1.jpg", where="labels.csv, line 2")
    'cats/1.jpg'
    >>> safe_name("../secret.jpg", where="labels.csv, line 2")
    Traceback (most recent call last):
    vitkit.core.errors.DataError: labels.csv, line 2: '../secret.jpg' is not a relative path with /
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or re.search(r"[\\\0\n\r]|^[A-Za-z]:", name) or not path.parts:
        raise DataError(
            f"{where}: {name!r} is not a relative path with /", hint="name files relative to the manifest, without .."
        )
    return path.as_posix()


def split_value(value: str | int | None, *, where: str) -> str:
    """The split that a line names; "all" where the manifest has no such column."""
    if value is None:
        return "all"
    if split := split_called(str(value)):
        return split
    raise DataError(f"{where}: unknown split", expected="train, val or test", got=repr(value))


def index_value(value: str | int, *, where: str) -> int:
    """A class_index as a number."""
    if re.fullmatch(r"[0-9]{1,6}", str(value).strip()):
        return int(value)
    raise DataError(f"{where}: class_index", expected=f"a number from 0 to {MOST_CLASSES - 1}", got=repr(value))


def check_splits(rows: Sequence[Row]) -> None:
    """Refuse a manifest in which only some lines name their split or their index, or a file is named twice."""
    for row in rows:
        if (row.split == "all") != (rows[0].split == "all"):
            raise DataError(f"{row.where}: some lines have a split and some have none")
        if (row.class_index is None) != (rows[0].class_index is None):
            raise DataError(f"{row.where}: some lines have a class_index and some have none")
    first: dict[str, Row] = {}
    for row in rows:
        if first.setdefault(row.file_name, row) is not row:
            raise DataError(f"{row.where} names {row.file_name} again; {first[row.file_name].where} did before")


def check_files(rows: Sequence[Row], *, root: Path) -> None:
    """Refuse files that are not there, and links that lead out of the folder."""
    home = root.resolve()
    parents: dict[Path, Path] = {}
    missing = []
    for row in rows:
        path = root / row.file_name
        try:
            inside = parents.get(path.parent) or parents.setdefault(path.parent, path.parent.resolve(strict=True))
            mode = path.lstat().st_mode
            real = path.resolve(strict=True) if stat.S_ISLNK(mode) else inside / path.name
            regular = real.is_file() if stat.S_ISLNK(mode) else stat.S_ISREG(mode)
        except (OSError, RuntimeError):  # RuntimeError: a link that leads to itself
            missing.append(row)
            continue
        if not real.is_relative_to(home):
            raise DataError(f"{row.where}: {row.file_name} is a link that leads out of {root}")
        if not regular:
            raise DataError(f"{row.where}: {row.file_name} is not a file")
    if missing:
        raise DataError(
            f"{missing[0].where}: no file {missing[0].file_name}",
            got=f"{len(missing)} of {len(rows)} files missing: {some([row.file_name for row in missing])}",
            hint="file names are relative to the manifest's folder",
        )
