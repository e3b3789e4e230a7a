"""Parquet shards as on the Hugging Face hub, read by row group."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vitkit.core.errors import DataError, MissingDependencyError
from vitkit.data.dataset import UNLABELED, Dataset, StoredImage
from vitkit.data.layouts.base import NamedSource, make_dataset, number_labels, number_names
from vitkit.data.layouts.files import MAX_TEXT, check_expansion, find_base_directory, group_shards, shorten_list

IMAGE_COLUMNS = ("image", "img", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls")
MAX_LABEL_BYTES = 1 << 10
"""Average size of a label, in addition to MAX_TEXT in total."""
CACHE_BYTES = 256 << 20
"""Size of the row groups that a process caches: all of CIFAR-10, or a few groups of large photos."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns of images and labels, and the class names if the schema has them."""

    image: str
    label: str | None
    classes: tuple[str, ...]


def import_pyarrow(module: str) -> ModuleType:
    """Import a module of pyarrow, which is an optional dependency."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError("parquet needs pyarrow", hint="pip install 'vitkit[parquet]'") from error


@dataclass(eq=False)
class ParquetSource(NamedSource):
    """Rows of parquet files. Row groups are read as a whole and cached, separately in each process.

    `group_rows` has the number of rows of each row group, per shard.
    """

    shards: list[Path]
    group_rows: list[list[int]]
    column: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups = [(shard, group) for shard, rows in enumerate(self.group_rows) for group in range(len(rows))]
        self.starts = np.cumsum([0, *(row for rows in self.group_rows for row in rows)], dtype=np.int64)
        self.cache: tuple[tuple[int, list[StoredImage | None], int], ...] = ()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "cache": ()}

    def read(self, index: int) -> StoredImage:
        """Return the bytes of the row."""
        index = range(len(self))[index]
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        image = self.read_group(group)[index - int(self.starts[group])]
        if image is None:
            raise DataError(f"{self.names[index]} has no bytes in the parquet file")
        return image

    def read_group(self, number: int) -> list[StoredImage | None]:
        """Return the images of a row group. The cache is replaced as a whole, because threads may call this."""
        for cached, images, _ in self.cache:
            if cached == number:
                return images
        shard, group = self.groups[number]
        images = read_image_column(self.shards[shard], group, column=self.column)
        size = sum(len(image) for image in images if image is not None)
        entries = [(number, images, size)]
        for entry in self.cache:
            size += entry[2]
            if size > CACHE_BYTES:
                break
            entries.append(entry)
        self.cache = tuple(entries)
        return images


def read_image_column(shard: Path, group: int, *, column: str) -> list[StoredImage | None]:
    """Read the images of one row group: structs with bytes, or bytes."""
    try:
        with import_pyarrow("pyarrow.parquet").ParquetFile(str(shard)) as file:
            values = file.read_row_group(group, columns=[column], use_threads=False).column(0)
    except import_pyarrow("pyarrow").ArrowException as error:
        raise DataError(f"{shard} is damaged in row group {group}: {error}", hint="download it again") from error
    if import_pyarrow("pyarrow.types").is_struct(values.type):
        values = import_pyarrow("pyarrow.compute").struct_field(values, "bytes")
    return values.to_pylist()


def open_parquet(path: Path) -> Dataset:
    """Open the rows of parquet shards. Names of files and folders tell train, validation and test."""
    by_split = group_shards(path, suffix=".parquet")
    base = find_base_directory(path)
    columns: Columns | None = None
    groups: dict[str, list[list[int]]] = {}
    values: dict[str, list[str | int | None]] = {}
    for split, shards in by_split.items():
        groups[split], values[split] = [], []
        for shard in shards:
            columns, rows, labels = read_shard(shard, previous=columns)
            groups[split].append(rows)
            values[split] += labels
    if columns is None:
        raise DataError(f"{path} has no parquet files")
    for split in [split for split, labels in values.items() if split != "train" and set(labels) == {-1}]:
        del values[split], groups[split]  # on the hub, -1 marks a test split with secret labels
    classes, numbers = number_labels(path, values, classes=columns.classes)
    splits = {
        split: ParquetSource(
            by_split[split],
            groups[split],
            columns.image,
            layout="parquet shards" if classes else "parquet shards without labels",
            classes=classes,
            labels=numbers[split],
            names=name_rows([shard.relative_to(base).as_posix() for shard in by_split[split]], groups[split]),
        )
        for split in values
    }
    return make_dataset(path, splits)


def open_parquet_images(shards: Mapping[str, Path]) -> ParquetSource:
    """Open every row of parquet files, given by name, without labels."""
    column, groups = "", []
    for shard in shards.values():
        with open_shard(shard) as file:
            columns = Columns(image=find_columns(file.schema_arrow, shard=shard).image, label=None, classes=())
            if column and columns.image != column:
                raise DataError(
                    f"{shard} has its images in another column than the files before it",
                    expected=column,
                    got=columns.image,
                    hint="run the command once per file",
                )
            column = columns.image
            groups.append(count_group_rows(file.metadata, columns, shard=shard))
    return ParquetSource(
        list(shards.values()),
        groups,
        column,
        layout="parquet shards without labels",
        classes=(),
        labels=np.full(sum(map(sum, groups)), UNLABELED),
        names=name_rows(list(shards), groups),
    )


def name_rows(shards: list[str], groups: list[list[int]]) -> list[str]:
    """Return the names of all rows: shard and row number."""
    return [name for shard, rows in zip(shards, groups, strict=True) for name in number_names(shard, sum(rows))]


def has_image_column(shard: Path) -> bool:
    """Return whether a parquet file has a column of images. Files of predictions, for example, have none."""
    with open_shard(shard) as file:
        schema = file.schema_arrow
    try:
        find_columns(schema, shard=shard)
    except DataError:
        return False
    return True


@contextmanager
def open_shard(shard: Path) -> Iterator[Any]:
    """Open a parquet file; raise DataError if it is none, or is damaged."""
    try:
        with import_pyarrow("pyarrow.parquet").ParquetFile(str(shard)) as file:
            yield file
    except (import_pyarrow("pyarrow").ArrowException, OSError) as error:
        raise DataError(f"{shard} is not a parquet file: {error}", hint="download it again") from error


def read_shard(shard: Path, *, previous: Columns | None) -> tuple[Columns, list[int], list[str | int | None]]:
    """Return the columns, the number of rows of each row group, and the labels of one file."""
    with open_shard(shard) as file:
        columns = find_columns(file.schema_arrow, shard=shard)
        if previous is not None and columns != previous:
            raise DataError(
                f"{shard} has other columns or classes than the files before it", hint="keep files of one dataset"
            )
        rows = count_group_rows(file.metadata, columns, shard=shard)
        if columns.label is None:
            return columns, rows, [None] * sum(rows)
        labels = file.read(columns=[columns.label], use_threads=False).column(0)
        if len(labels) and labels.nbytes > MAX_TEXT + MAX_LABEL_BYTES * len(labels):
            raise DataError(f"{shard}: {columns.label} has strings that are too long for a label")
        labels = labels.to_pylist()
    if None in labels:
        raise DataError(f"{shard}, row {labels.index(None)} has no {columns.label}")
    if not all(type(label) in (int, str) for label in labels):
        raise DataError(f"{shard}: {columns.label}", expected="integers or strings", got=type(labels[0]).__name__)
    return columns, rows, labels


def count_group_rows(metadata: Any, columns: Columns, *, shard: Path) -> list[int]:
    """Return the number of rows of each row group; raise DataError if the file claims more than it can hold."""
    compressed = shard.stat().st_size
    if metadata.num_rows > compressed:
        raise DataError(
            f"{shard} has more rows than bytes", expected=f"at most {compressed:,}", got=f"{metadata.num_rows:,}"
        )
    used = (columns.image, columns.label)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for number, group in enumerate(groups):
        parts = [group.column(column) for column in range(group.num_columns)]
        # Parts of a struct have paths such as image.bytes.
        size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.partition(".")[0] in used)
        check_expansion(size, compressed=compressed, where=f"{shard}, row group {number}")
    return [group.num_rows for group in groups]


def find_columns(schema: Any, *, shard: Path) -> Columns:
    """Find the columns by the features that the hub stores in the schema, or by their names."""
    names = list(schema.names)
    features = parse_features((schema.metadata or {}).get(b"huggingface", b"{}"))
    images = [name for name in features if features[name].get("_type") == "Image"]
    labels = [name for name in features if features[name].get("_type") == "ClassLabel"]
    image = next((name for name in (*IMAGE_COLUMNS, *images) if name in names), None)
    if image is None:
        raise DataError(f"{shard} has no column of images", expected=", ".join(IMAGE_COLUMNS), got=shorten_list(names))
    types = import_pyarrow("pyarrow.types")
    dtype = schema.field(image).type
    if types.is_struct(dtype):
        dtype = dtype.field("bytes").type if dtype.get_field_index("bytes") >= 0 else dtype
    if types.is_dictionary(dtype):
        dtype = dtype.value_type
    if not (types.is_binary(dtype) or types.is_large_binary(dtype)):
        raise DataError(f"{shard}: {image} holds no images", expected="bytes, or a struct with bytes", got=str(dtype))
    label = next((name for name in (*LABEL_COLUMNS, *labels) if name in names), None)
    class_names = features.get(label or "", {}).get("names")
    classes = tuple(map(str, class_names)) if isinstance(class_names, list) else ()
    return Columns(image=image, label=label, classes=classes)


def parse_features(metadata: bytes) -> dict[str, dict[str, object]]:
    """Return the features in the hub's metadata; none if they are damaged or missing."""
    try:
        features = json.loads(metadata)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    return {str(name): feature for name, feature in features.items() if isinstance(feature, dict)}
