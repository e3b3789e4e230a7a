"""Shards: WebDataset tars with key.jpg next to key.cls or key.json, and parquet files as on the Hugging Face hub.

Tars are read in place, parquet files by row group.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from vitkit.core.errors import DataError, MissingDependencyError
from vitkit.core.formatting import shorten_list
from vitkit.data.dataset import UNLABELED, Dataset, StoredImage
from vitkit.data.layouts.base import (
    ArchiveSource,
    Labels,
    NamedSource,
    make_dataset,
    number_labels,
    number_names,
    stack_slices,
)
from vitkit.data.layouts.files import (
    IMAGE_SUFFIXES,
    MAX_TEXT,
    TarMember,
    check_expansion,
    find_base_directory,
    group_shards,
    is_image,
    list_members,
    list_nested_members,
    read_class_names,
    read_member_text,
)

LABEL_KEYS = ("label", "cls", "class")


@dataclass
class ShardContents:
    """Images and labels of one split, collected shard by shard."""

    archives: list[Path] = field(default_factory=list)
    slices: list[tuple[int, int, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    labels: list[str | int | None] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def make_source(self, layout: str, classes: tuple[str, ...], labels: Labels) -> ArchiveSource:
        """Create the source of the images."""
        slices = stack_slices(self.slices)
        return ArchiveSource(self.archives, slices, layout=layout, classes=classes, labels=labels, names=self.names)


def open_webdataset(path: Path) -> Dataset:
    """Open the images of tar shards. Names of shards tell train, val and test.

    Labels are numbers or class names. Numbers get their names from the lines of classes.txt next to the shards.
    """
    base = find_base_directory(path)
    contents: dict[str, ShardContents] = {}
    for split, archives in group_shards(path, suffix=".tar").items():
        contents[split] = ShardContents(archives)
        for number in range(len(archives)):
            read_archive(contents[split], number, base=base)
    values = {split: shards.labels for split, shards in contents.items()}
    classes, labels = number_labels(path, values, classes=read_class_names(base))
    layout = "WebDataset tars" if classes else "WebDataset tars without labels"
    dataset = make_dataset(
        path, {split: shards.make_source(layout, classes, labels[split]) for split, shards in contents.items()}
    )
    return replace(dataset, left_out=tuple(name for shards in contents.values() for name in shards.left_out))


OnError = Callable[[str, DataError], None]
"""Called with the name of a file that cannot be opened, and the reason."""


def raise_error(name: str, error: DataError) -> None:
    """Stop at a file that cannot be opened."""
    raise error


def open_tar_images(archives: Mapping[str, Path], *, on_error: OnError = raise_error) -> ArchiveSource:
    """Open every image of tars, given by name, without labels."""
    shards = ShardContents(list(archives.values()))
    for number, (name, archive) in enumerate(archives.items()):
        try:
            # A tar may contain a name twice; the later file replaces the earlier one, as when it is unpacked.
            members = {member.name: member for member in list_nested_members(archive)}
        except DataError as error:
            on_error(name, error)
            continue
        images = list(filter(is_image, members))
        for image in images:
            shards.slices.append((number, members[image].offset, members[image].size))
            shards.names.append(f"{name}/{image}")
        keys = {split_key(image)[0] for image in images}  # of samples, whose other files are their labels
        shards.left_out += [f"{name}/{other}" for other in members.keys() - images if split_key(other)[0] not in keys]
    source = shards.make_source("images in tars", (), np.full(len(shards.names), UNLABELED))
    source.left_out = tuple(sorted(shards.left_out))
    return source


def read_archive(shards: ShardContents, number: int, *, base: Path) -> None:
    """Add the images and labels of one tar."""
    archive = shards.archives[number]
    images: dict[str, TarMember] = {}
    labels: dict[str, TarMember] = {}
    others: list[tuple[str, str]] = []
    for member in list_members(archive):
        key, suffix = split_key(member.name)
        if f".{suffix}" in IMAGE_SUFFIXES:
            if key in images:
                raise DataError(f"{archive} has two images for {key}: {images[key].name}, {member.name}")
            images[key] = member
        elif suffix == "cls" or (suffix == "json" and key not in labels):
            labels[key] = member
        else:
            others.append((key, member.name))
    shard = archive.relative_to(base).as_posix()
    shards.left_out += [f"{shard}/{name}" for key, name in others if key not in images]
    with archive.open("rb") as file:
        for key, image in images.items():
            shards.slices.append((number, image.offset, image.size))
            shards.names.append(f"{shard}/{image.name}")
            shards.labels.append(read_label(file, labels[key], archive=archive) if key in labels else None)


def split_key(name: str) -> tuple[str, str]:
    """Return the key of a file in a shard, which it shares with the files of the same sample, and its suffix.

    >>> split_key("train/0001.seg.PNG")
    ('train/0001', 'seg.png')
    """
    folder, slash, file_name = name.rpartition("/")
    stem, _, suffix = file_name.partition(".")
    return folder + slash + stem, suffix.lower()


def read_label(file: IO[bytes], member: TarMember, *, archive: Path) -> str | int | None:
    """Return the label in a .cls or .json file; None if the JSON has none."""
    text, where = read_member_text(file, member, where=str(archive)), f"{archive}: {member.name}"
    value: object = text.strip()
    if member.name.lower().endswith(".json"):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        record = record if isinstance(record, dict) else {"label": record}
        value = next((record[key] for key in LABEL_KEYS if record.get(key) is not None), None)
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value or None
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise DataError(f"{where} has no label", expected="a number or a class name", got=repr(value)[:80])
    return value


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
        self.shard_starts = np.cumsum([0, *map(sum, self.group_rows)], dtype=np.int64)
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

    def locate(self, index: int) -> tuple[str, int]:
        """Return the path of the shard and the number of the row in it."""
        shard = int(np.searchsorted(self.shard_starts, index, side="right")) - 1
        return self.absolute_shards[shard], index - int(self.shard_starts[shard])

    @cached_property
    def absolute_shards(self) -> list[str]:
        """The shards as absolute paths."""
        return [str(shard.absolute()) for shard in self.shards]

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
    splits = {}
    for split in values:
        by_name = {shard.relative_to(base).as_posix(): shard for shard in by_split[split]}
        splits[split] = make_source(by_name, groups[split], columns.image, classes=classes, labels=numbers[split])
    return make_dataset(path, splits)


def open_parquet_images(shards: Mapping[str, Path], *, on_error: OnError = raise_error) -> ParquetSource:
    """Open every row of parquet files, given by name, without labels."""
    readable: dict[str, Path] = {}
    column, groups = "", []
    for name, shard in shards.items():
        try:
            with open_shard(shard) as file:
                columns = Columns(image=find_columns(file.schema_arrow, shard=shard).image, label=None, classes=())
                rows = count_group_rows(file.metadata, columns, shard=shard)
        except DataError as error:
            on_error(name, error)
            continue
        if column and columns.image != column:
            message = f"{shard} has its images in another column than the files before it"
            raise DataError(message, expected=column, got=columns.image, hint="run the command once per file")
        column, readable[name] = columns.image, shard
        groups.append(rows)
    return make_source(readable, groups, column, classes=(), labels=np.full(sum(map(sum, groups)), UNLABELED))


def make_source(
    shards: Mapping[str, Path], groups: list[list[int]], column: str, *, classes: tuple[str, ...], labels: Labels
) -> ParquetSource:
    """Create the source of shards, given by name. Rows are named by shard and number."""
    layout = "parquet shards" if classes else "parquet shards without labels"
    rows = zip(shards, map(sum, groups), strict=True)
    names = [name for shard, count in rows for name in number_names(shard, count)]
    return ParquetSource(
        list(shards.values()), groups, column, layout=layout, classes=classes, labels=labels, names=names
    )


def lacks_images(shard: Path) -> bool:
    """Return whether a parquet file is readable but has no column of images, as a file of predictions."""
    with suppress(DataError), open_shard(shard) as file:
        try:
            find_columns(file.schema_arrow, shard=shard)
        except DataError:
            return True
    return False


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
        types, dtype = import_pyarrow("pyarrow.types"), labels.type
        dtype = dtype.value_type if types.is_dictionary(dtype) else dtype
        if not (types.is_integer(dtype) or types.is_string(dtype) or types.is_large_string(dtype)):
            raise DataError(f"{shard}: {columns.label}", expected="integers or strings", got=str(dtype))
        if len(labels) and labels.nbytes > MAX_TEXT + MAX_LABEL_BYTES * len(labels):
            raise DataError(f"{shard}: {columns.label} has strings that are too long for a label")
        labels = labels.to_pylist()
    if None in labels:
        raise DataError(f"{shard}, row {labels.index(None)} has no {columns.label}")
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
    label = next((name for name in (*LABEL_COLUMNS, *labels) if name in names), None)
    if repeated := [name for name in (image, label) if names.count(name) > 1]:
        hint = "rename or remove all but one"
        raise DataError(f"{shard} has {names.count(repeated[0])} columns called {repeated[0]}", hint=hint)
    types = import_pyarrow("pyarrow.types")
    dtype = schema.field(image).type
    if types.is_struct(dtype):
        dtype = dtype.field("bytes").type if dtype.get_field_index("bytes") >= 0 else dtype
    if types.is_dictionary(dtype):
        dtype = dtype.value_type
    if not (types.is_binary(dtype) or types.is_large_binary(dtype)):
        raise DataError(f"{shard}: {image} holds no images", expected="bytes, or a struct with bytes", got=str(dtype))
    class_names = features.get(label or "", {}).get("names")
    classes = tuple(map(str, class_names)) if isinstance(class_names, list) else ()
    return Columns(image=image, label=label, classes=classes)


def parse_features(metadata: bytes) -> dict[str, dict[str, object]]:
    """Return the features in the hub's metadata; none if they are damaged or missing."""
    try:
        features = json.loads(metadata)["info"]["features"]
        return {str(name): feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
