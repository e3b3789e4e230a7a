"""One task of VTAB-1k goes in, a folder of images with lists of paths and labels; train, val and test come out.

cifar/images/train800/000000.jpg …      cifar/train800.txt: images/train800/000000.jpg 19
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.data.source import DataSet
from vitkit.data.sources.base import FileSource, class_numbers, data_set
from vitkit.data.sources.manifests import Row, check_files, safe_name

LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
WHOLE = "train800val200.txt"
"""The 1,000 examples in one list, which some releases have alone."""
KIND = "VTAB-1k task"
EXAMPLE = "images/train800/000000.jpg 19"


def has_vtab(place: Path) -> bool:
    """Whether there is the list of 800, or of 1,000, examples."""
    return (place / LISTS["train"]).is_file() or (place / WHOLE).is_file()


def open_vtab(place: Path) -> DataSet:
    """The task: train800, val200 and test; a release with the 1,000 examples alone has them as train.

    Labels are numbers, and so are the names of the classes. A class need have no example: Sun397 has 397.
    """
    lists = {split: place / name for split, name in LISTS.items() if (place / name).is_file()}
    if "train" not in lists and (place / WHOLE).is_file():
        lists = {"train": place / WHOLE} | {split: path for split, path in lists.items() if split != "val"}
    if "train" not in lists:
        raise DataError(f"{place} has no {LISTS['train']}", expected=", ".join((*LISTS.values(), WHOLE)))
    rows = {split: read_list(path) for split, path in lists.items()}
    for of_split in rows.values():
        check_files(of_split, root=place)
    labels = {
        split: np.array([row.class_index for row in of_split], dtype=np.int64) for split, of_split in rows.items()
    }
    classes = class_numbers(labels.values(), where=str(place))
    splits = {
        split: FileSource(
            place, kind=KIND, classes=classes, labels=labels[split], names=[row.file_name for row in of_split]
        )
        for split, of_split in rows.items()
    }
    return data_set(place, splits)


def read_list(path: Path) -> Sequence[Row]:
    """The lines of a list: a path, which may have spaces in it, and a label."""
    rows: list[Row] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: {error}", hint="save it as UTF-8") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        name, _, label = line.strip().rpartition(" ")
        if not name or not (label.isascii() and label.isdigit() and len(label) < 8):
            raise DataError(f"{where}: {line.strip()!r}", expected=f"a path and a number, as {EXAMPLE}")
        name = safe_name(name.strip(), where=where)
        rows.append(Row(where=where, file_name=name, label=label, split="", class_index=int(label)))
    if not rows:
        raise DataError(f"{path} lists no images", expected=EXAMPLE)
    return rows
