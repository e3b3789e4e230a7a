"""WebDataset tars, read in place: key.jpg next to key.cls or key.json."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.core.errors import DataError
from vitkit.data.dataset import UNLABELED, Dataset
from vitkit.data.layouts.base import ArchiveSource, make_dataset, number_labels
from vitkit.data.layouts.files import (
    IMAGE_SUFFIXES,
    TarMember,
    find_base_directory,
    group_shards,
    list_images,
    list_members,
    read_class_names,
    read_text,
)

LABEL_KEYS = ("label", "cls", "class")


@dataclass
class ShardContents:
    """Images and labels of one split, collected shard by shard."""

    archives: list[Path] = field(default_factory=list)
    slices: list[tuple[int, int, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    labels: list[str | int | None] = field(default_factory=list)


def open_webdataset(path: Path) -> Dataset:
    """Open the images of tar shards. Names of shards tell train, val and test.

    Labels are numbers or class names. Numbers get their names from the lines of classes.txt next to the shards.
    """
    base = find_base_directory(path)
    contents: dict[str, ShardContents] = {}
    for split, archives in group_shards(path, suffix=".tar").items():
        contents[split] = ShardContents()
        for archive in archives:
            read_archive(contents[split], archive, base=base)
    values = {split: shards.labels for split, shards in contents.items()}
    classes, labels = number_labels(path, values, classes=read_class_names(base))
    splits = {
        split: ArchiveSource(
            shards.archives,
            np.array(shards.slices, dtype=np.int64).reshape(-1, 3),
            layout="WebDataset tars" if classes else "WebDataset tars without labels",
            classes=classes,
            labels=labels[split],
            names=shards.names,
        )
        for split, shards in contents.items()
    }
    return make_dataset(path, splits)


def open_tar_images(archives: Mapping[str, Path]) -> ArchiveSource:
    """Open every image of tars, given by name, without labels."""
    slices: list[tuple[int, int, int]] = []
    names: list[str] = []
    for number, (name, archive) in enumerate(archives.items()):
        # A tar may contain a name twice; the later file replaces the earlier one, as when it is unpacked.
        for image in {image.name: image for image in list_images(archive)}.values():
            slices.append((number, image.offset, image.size))
            names.append(f"{name}/{image.name}")
    return ArchiveSource(
        list(archives.values()),
        np.array(slices, dtype=np.int64).reshape(-1, 3),
        layout="images in tars",
        classes=(),
        labels=np.full(len(names), UNLABELED),
        names=names,
    )


def read_archive(shards: ShardContents, archive: Path, *, base: Path) -> None:
    """Add the images and labels of one tar."""
    number = len(shards.archives)
    shards.archives.append(archive)
    images: dict[str, TarMember] = {}
    labels: dict[str, TarMember] = {}
    for member in list_members(archive):
        folder, _, file_name = member.name.rpartition("/")
        stem, _, suffix = file_name.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        suffix = suffix.lower()
        if f".{suffix}" in IMAGE_SUFFIXES:
            if key in images:
                raise DataError(f"{archive} has two images for {key}: {images[key].name}, {member.name}")
            images[key] = member
        elif suffix == "cls" or (suffix == "json" and key not in labels):
            labels[key] = member
    shard = archive.relative_to(base).as_posix()
    with archive.open("rb") as file:
        for key, image in images.items():
            shards.slices.append((number, image.offset, image.size))
            shards.names.append(f"{shard}/{image.name}")
            label = None
            if key in labels:
                text = read_text(file, labels[key], where=str(archive))
                is_json = labels[key].name.lower().endswith(".json")
                label = parse_label(text, is_json=is_json, where=f"{archive}: {labels[key].name}")
            shards.labels.append(label)


def parse_label(text: str, *, is_json: bool, where: str) -> str | int | None:
    """Return the label in a .cls or .json file; None if the JSON has none."""
    value: object = text.strip()
    if is_json:
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
