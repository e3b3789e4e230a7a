"""Parquet shards as the Hugging Face hub ships them go in, a data set that reads them by row group comes out."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.data.source import UNLABELLED, Content, DataSet
from vitkit.data.sources.base import (
    NamedSource,
    by_number,
    check_expansion,
    check_labels,
    class_numbers,
    class_table,
    data_set,
    some,
    split_in,
)
from vitkit.data.sources.tars import MOST_TEXT
from vitkit.data.sources.webdataset import find_shards, home_of

IMAGE_COLUMNS = ("image", "img", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls")
MOST_LABEL = 1 << 10
"""Bytes of a label on average, beyond a first `MOST_TEXT`."""
CACHE_BYTES = 256 << 20
"""How much of the last row groups a process keeps: all of CIFAR-10, or a few groups of large photos."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns hold the images and the labels, and the names of the classes where the schema has them."""

    image: str
    label: str | None
    classes: tuple[str, ...]


def has_parquet(place: Path) -> bool:
    """Whether this is a parquet file, or a folder with some in it."""
    return bool(find_shards(place, suffix=".parquet"))


def arrow(module: str) -> ModuleType:
    """A module of pyarrow, which is an extra of ours."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError("parquet needs pyarrow", hint="pip install 'vitkit[parquet]'") from error


class ParquetSource(NamedSource):
    """Rows of parquet files. A row group is read as a whole, so the last few are kept, in each process for itself."""

    def __init__(
        self,
        shards: list[Path],
        groups: list[list[int]],
        *,
        column: str,
        classes: tuple[str, ...],
        labels: NDArray[np.int64],
        names: Iterable[str],
    ) -> None:
        kind = "parquet shards" if classes else "parquet shards without labels"
        super().__init__(kind=kind, classes=classes, labels=labels, names=names)
        self.column = column
        self.shards = [str(shard) for shard in shards]
        self.groups = [(shard, group) for shard, rows in enumerate(groups) for group in range(len(rows))]
        self.starts = np.cumsum([0, *(row for rows in groups for row in rows)], dtype=np.int64)
        self.kept: tuple[tuple[int, list[Content | None], int], ...] = ()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "kept": ()}

    def content(self, index: int) -> Content:
        """The bytes in the row."""
        index = range(len(self))[index]
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        content = self.group(group)[index - int(self.starts[group])]
        if content is None:
            raise DataError(f"{self.names[index]} has no bytes in the parquet file")
        return content

    def group(self, number: int) -> list[Content | None]:
        """The images of a row group, read or kept. The tuple of those kept is replaced whole: threads may call this."""
        for known, images, _ in self.kept:
            if known == number:
                return images
        shard, group = self.groups[number]
        images = read_group(self.shards[shard], group, column=self.column)
        size = sum(len(image) for image in images if image is not None)
        kept = [(number, images, size)]
        for entry in self.kept:
            size += entry[2]
            if size > CACHE_BYTES:
                break
            kept.append(entry)
        self.kept = tuple(kept)
        return images


def read_group(shard: str, group: int, *, column: str) -> list[Content | None]:
    """The image column of one row group: a struct with bytes in it, or the bytes themselves."""
    try:
        with arrow("pyarrow.parquet").ParquetFile(shard) as file:
            values = file.read_row_group(group, columns=[column], use_threads=False).column(0)
    except arrow("pyarrow").ArrowException as error:
        raise DataError(f"{shard} is damaged in row group {group}: {error}", hint="fetch it again") from error
    if arrow("pyarrow.types").is_struct(values.type):
        values = arrow("pyarrow.compute").struct_field(values, "bytes")
    return values.to_pylist()


def open_parquet(place: Path) -> DataSet:
    """The rows of parquet shards; train, validation and test are told apart by the names of files and folders."""
    home = home_of(place)
    by_split: dict[str, list[Path]] = {}
    for shard in find_shards(place, suffix=".parquet"):
        by_split.setdefault(split_in(shard, root=home) or "all", []).append(shard)
    if "all" in by_split and len(by_split) > 1:
        raise DataError(
            f"some parquet files of {place} name their split and some do not: "
            + some([path.name for path in by_split["all"]]),
            hint="let each name begin with train-, validation- or test-",
        )
    columns: Columns | None = None
    groups: dict[str, list[list[int]]] = {}
    values: dict[str, list[object]] = {}
    for split, shards in by_split.items():
        groups[split], values[split] = [], []
        for shard in shards:
            columns, rows, labels = read_shard(shard, before=columns)
            groups[split].append(rows)
            values[split] += labels
    if columns is None:
        raise DataError(f"{place} has no parquet files")
    for split in [split for split, labels in values.items() if split != "train" and set(labels) == {-1}]:
        del values[split], groups[split]  # the hub's mark for a test split whose labels are kept secret
    classes, numbers = labels_of(place, columns, values)
    splits = {
        split: ParquetSource(
            by_split[split],
            groups[split],
            column=columns.image,
            classes=classes,
            labels=numbers[split],
            names=[
                f"{shard.relative_to(home).as_posix()}/{row:06d}"
                for shard, rows in zip(by_split[split], groups[split], strict=True)
                for row in range(sum(rows))
            ],
        )
        for split in values
    }
    return data_set(place, splits)


def parquet_images(shards: Mapping[str, Path]) -> ParquetSource:
    """Every row of some parquet files, under the names that the files go by; labels are not looked at."""
    column, groups = "", []
    for shard in shards.values():
        with opened(shard) as file:
            columns = Columns(image=columns_of(file.schema_arrow, shard=shard).image, label=None, classes=())
            if column and columns.image != column:
                raise DataError(
                    f"{shard} has its images in another column than the files before it",
                    expected=column,
                    got=columns.image,
                    hint="name the files one by one",
                )
            column = columns.image
            groups.append(group_rows(file.metadata, columns, shard=shard))
    rows = [sum(of_shard) for of_shard in groups]
    return ParquetSource(
        list(shards.values()),
        groups,
        column=column,
        classes=(),
        labels=np.full(sum(rows), UNLABELLED, dtype=np.int64),
        names=(f"{name}/{row:06d}" for name, count in zip(shards, rows, strict=True) for row in range(count)),
    )


def holds_images(shard: Path) -> bool:
    """Whether a parquet file has a column of images: answers and features, for example, have none."""
    with opened(shard) as file:
        schema = file.schema_arrow
    try:
        columns_of(schema, shard=shard)
    except DataError:
        return False
    return True


@contextmanager
def opened(shard: Path) -> Iterator[Any]:
    """A parquet file to read from; a DataError where it is none, or is damaged."""
    try:
        with arrow("pyarrow.parquet").ParquetFile(str(shard)) as file:
            yield file
    except (arrow("pyarrow").ArrowException, OSError) as error:
        raise DataError(f"{shard} is not a parquet file: {error}", hint="fetch it again") from error


def group_rows(metadata: Any, columns: Columns, *, shard: Path) -> list[int]:
    """How many rows each row group has, after a check that it can."""
    check_sizes(metadata, columns, shard=shard)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def read_shard(shard: Path, *, before: Columns | None) -> tuple[Columns, list[int], list[object]]:
    """Columns, rows of each row group, and labels of one file."""
    with opened(shard) as file:
        columns = columns_of(file.schema_arrow, shard=shard)
        if before is not None and columns != before:
            raise DataError(f"{shard} has other columns or classes than the files before it", hint="keep one set")
        rows = group_rows(file.metadata, columns, shard=shard)
        if columns.label is None:
            return columns, rows, [None] * sum(rows)
        labels = file.read(columns=[columns.label], use_threads=False).column(0)
        if len(labels) and labels.nbytes > MOST_TEXT + MOST_LABEL * len(labels):
            raise DataError(f"{shard}: {columns.label} has texts that are too long for a label")
        labels = labels.to_pylist()
    if None in labels:
        raise DataError(f"{shard}, row {labels.index(None)} has no {columns.label}")
    if not all(type(label) in (int, str) for label in labels):
        raise DataError(f"{shard}: {columns.label}", expected="whole numbers or texts", got=type(labels[0]).__name__)
    return columns, rows, labels


def check_sizes(metadata: Any, columns: Columns, *, shard: Path) -> None:
    """Refuse a file that says it holds more than it can: reading it would be the end of the memory."""
    packed = shard.stat().st_size
    if metadata.num_rows > packed:
        raise DataError(
            f"{shard} has more rows than bytes", expected=f"at most {packed:,}", got=f"{metadata.num_rows:,}"
        )
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        parts = [row_group.column(number) for number in range(row_group.num_columns)]
        unpacked = sum(part.total_uncompressed_size for part in parts if wanted(part.path_in_schema, columns))
        check_expansion(unpacked, packed=packed, where=f"{shard}, row group {group}")


def wanted(column: str, columns: Columns) -> bool:
    """Whether a column, or a part of one as image.bytes, is read at all."""
    return column.partition(".")[0] in (columns.image, columns.label)


def columns_of(schema: Any, *, shard: Path) -> Columns:
    """The columns by what the hub's own description says, or by their names."""
    names = list(schema.names)
    features = features_of((schema.metadata or {}).get(b"huggingface", b"{}"))
    images = [name for name in features if features[name].get("_type") == "Image"]
    labels = [name for name in features if features[name].get("_type") == "ClassLabel"]
    image = next((name for name in (*IMAGE_COLUMNS, *images) if name in names), None)
    if image is None:
        raise DataError(f"{shard} has no column of images", expected=", ".join(IMAGE_COLUMNS), got=some(names))
    kind = schema.field(image).type
    if arrow("pyarrow.types").is_struct(kind):
        kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
    if arrow("pyarrow.types").is_dictionary(kind):
        kind = kind.value_type
    if not (arrow("pyarrow.types").is_binary(kind) or arrow("pyarrow.types").is_large_binary(kind)):
        raise DataError(f"{shard}: {image} holds no images", expected="bytes, or a struct with bytes", got=str(kind))
    label = next((name for name in (*LABEL_COLUMNS, *labels) if name in names), None)
    listed = features.get(label or "", {}).get("names")
    classes = tuple(map(str, listed)) if isinstance(listed, list) else ()
    return Columns(image=image, label=label, classes=classes)


def features_of(metadata: bytes) -> dict[str, dict[str, object]]:
    """The features in the hub's description; none where it is damaged or absent.

    >>> features_of(b'{"info": {"features": {"image": {"_type": "Image"}}}}')
    {'image': {'_type': 'Image'}}
    """
    try:
        found = json.loads(metadata)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): feature for name, feature in found.items() if isinstance(feature, dict)}


def labels_of(
    place: Path, columns: Columns, values: dict[str, list[object]]
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """The names of the classes, and each split's labels."""
    if columns.label is None:
        return (), {split: np.full(len(rows), UNLABELLED, dtype=np.int64) for split, rows in values.items()}
    if any(isinstance(value, str) for rows in values.values() for value in rows):
        texts = {split: [str(value) for value in rows] for split, rows in values.items()}
        classes = by_number(class_table(place, texts))
        number = {name: label for label, name in enumerate(classes)}
        return classes, {split: np.asarray([number[text] for text in rows], np.int64) for split, rows in texts.items()}
    arrays = {split: np.asarray(rows, dtype=np.int64) for split, rows in values.items()}
    classes = columns.classes or class_numbers(arrays.values(), where=str(place))
    for split, labels in arrays.items():
        check_labels(labels, classes=len(classes), where=f"{split} of {place}")
    return classes, arrays
