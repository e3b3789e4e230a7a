"""Label maps: which classes of a model correspond to each class of a dataset.

They evaluate a model of the 1,000 ImageNet classes on datasets that name the classes differently or have only some of
them. A prediction is correct if it is one of the model's classes that the map lists for the image's class.
"""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import DataError, InputError
from vitkit.core.files import read_text
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.data.dataset import ImageSource, Subset
from vitkit.evaluation.evaluation import EvaluationResult, ImageMetrics, check_finite
from vitkit.zoo.imagenet import has_imagenet_names, imagenet_wnids

LogitScope = Literal["mapped", "all"]
"""Logits that compete: those of mapped classes only, or all."""
NameKind = Literal["wnids", "numbers", "either"]

WNID = re.compile(r"n\d{8}")
NUMBER = re.compile(r"[0-9]{1,4}")
OTHER_CLASS = "(other class)"
"""Label of predictions that are no class of the dataset."""


class PublishedDataset(NamedTuple):
    """A published ImageNet test set: its number of classes, the logits that its authors use, and its class names."""

    num_classes: int
    logits: LogitScope
    names: NameKind


PUBLISHED: Mapping[str, PublishedDataset] = {
    "imagenet": PublishedDataset(1000, "all", "either"),
    "imagenet-v2": PublishedDataset(1000, "all", "numbers"),
    "imagenet-sketch": PublishedDataset(1000, "all", "wnids"),
    "imagenet-a": PublishedDataset(200, "mapped", "wnids"),
    "imagenet-r": PublishedDataset(200, "mapped", "wnids"),
}
"""Datasets whose class directories are WordNet ids or numbers in ImageNet's order."""


@dataclass(frozen=True, kw_only=True)
class LabelMap:
    """Indices of the model's classes for each class of a dataset; empty for a class without counterpart."""

    name: str
    classes: tuple[str, ...]
    model_classes: tuple[tuple[int, ...], ...]
    logits: LogitScope
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.model_classes):
            got = f"classes such as {shorten_list(self.classes)}"
            raise DataError(f"the label map {self.name} has no class of the dataset", got=got)

    @property
    def mapped_labels(self) -> tuple[int, ...]:
        """Return the labels of the dataset that have a counterpart in the model."""
        return tuple(label for label, indices in enumerate(self.model_classes) if indices)

    @property
    def unmapped_classes(self) -> list[str]:
        """Return the classes of the dataset without counterpart in the model."""
        return [name for name, indices in zip(self.classes, self.model_classes, strict=True) if not indices]

    def restrict(self, source: ImageSource) -> tuple[ImageSource, int]:
        """Return the images of mapped classes, and the number of the others."""
        selected = np.flatnonzero(np.isin(source.labels, self.mapped_labels))
        subset = source if len(selected) == len(source) else Subset(source, selected.tolist())
        return subset, len(source) - len(selected)

    def to_dict(self) -> dict[str, object]:
        """Return the value of "label_map" in `vitkit eval --json`."""
        classes = len(self.mapped_labels)
        return {"name": self.name, "classes": classes, "logits": self.logits, "left_out": self.unmapped_classes}


def imagenet_indices(labels: Sequence[str]) -> NDArray[np.int64]:
    """Return the model's index of each ImageNet class, −1 where it lacks one.

    Labels are WordNet ids in any order, or 1,000 numbers or names in the usual order.

    >>> imagenet_indices(["n01443537", "n01440764"])[:3].tolist()
    [1, 0, -1]
    """
    positions = {label: index for index, label in enumerate(labels) if WNID.fullmatch(label)}
    if positions:
        return np.array([positions.get(wnid, -1) for wnid in imagenet_wnids()], dtype=np.int64)
    is_numbered = list(labels) == list(map(str, range(len(imagenet_wnids()))))
    if not (is_numbered or has_imagenet_names(labels)):
        expected = "1,000 classes in the usual order, or WordNet ids such as n01440764"
        got = f"{len(labels)} classes: {shorten_list(labels, limit=3)}"
        hint = "map its classes with --label-map FILE"
        raise DataError("the model's classes are not ImageNet's", expected=expected, got=got, hint=hint)
    return np.arange(len(labels), dtype=np.int64)


def imagenet_index(name: str, *, names: NameKind = "either") -> int | None:
    """Return the index of a class in ImageNet's order, from its WordNet id or number.

    >>> imagenet_index("n01443537"), imagenet_index("10"), imagenet_index("0007"), imagenet_index("tench")
    (1, 10, 7, None)
    """
    wnids = imagenet_wnids()
    if names != "wnids" and NUMBER.fullmatch(name) and int(name) < len(wnids):
        return int(name)
    return wnids.index(name) if names != "numbers" and name in wnids else None


def published_label_map(name: str, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """Build the map of a published dataset from its class names."""
    dataset, indices = PUBLISHED[name], imagenet_indices(labels)
    positions = [imagenet_index(each, names=dataset.names) for each in classes]
    if unknown := [each for each, position in zip(classes, positions, strict=True) if position is None]:
        example = {"wnids": "n01440764", "numbers": "0 to 999", "either": "n01440764, or 0 to 999"}[dataset.names]
        message = f"these are not the classes of {name}: {shorten_list(unknown)}"
        raise DataError(message, expected=f"class names such as {example}")
    warnings = []
    if name != "imagenet" and len(classes) != dataset.num_classes:
        warnings.append(f"{name} has {dataset.num_classes:,} classes, these images have {len(classes):,}")
    model_indices = [int(indices[position]) for position in positions if position is not None]
    return LabelMap(
        name=name,
        classes=tuple(classes),
        model_classes=tuple((index,) if index >= 0 else () for index in model_indices),
        logits=dataset.logits,
        warnings=tuple(warnings),
    )


RawLabelMap = dict[str, tuple[int | str, ...]]
"""Indices, labels or WordNet ids for each class, as in the file."""


def load_label_map(path: Path, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """Read a label map: a JSON object by class name, or CSV lines of class and model_class.

    A class of the model is given by its index, label or WordNet id; JSON may have a list of them, CSV several lines.
    Only logits of mapped classes compete, unless JSON has {"logits": "all", "classes": {…}}.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="pass a JSON or CSV file") from error
    parse = _parse_csv if path.suffix.lower() == ".csv" else _parse_json
    raw, logits = parse(path, text)
    # A map may cover more classes than the dataset has, but one without a common class is of another dataset.
    if not set(raw) & set(classes):
        expected, got = shorten_list(list(classes)), shorten_list(list(raw))
        raise DataError(f"{path} has no class of the dataset", expected=expected, got=got)
    names = {each for group in raw.values() for each in group if isinstance(each, str)} - set(labels)
    wnids = imagenet_indices(labels) if any(map(WNID.fullmatch, names)) else None
    model_classes = tuple(
        tuple(dict.fromkeys(resolve_class(each, labels=labels, wnids=wnids, path=path) for each in raw.get(name, ())))
        for name in classes
    )
    return LabelMap(name=path.name, classes=tuple(classes), model_classes=model_classes, logits=logits)


def _parse_json(path: Path, text: str) -> tuple[RawLabelMap, LogitScope]:
    expected = '{"class": 7} or {"class": [7, "n01440764"]}'
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", expected=expected) from error
    logits: LogitScope = "mapped"
    if isinstance(content, dict) and content.keys() == {"logits", "classes"}:
        if content["logits"] not in ("mapped", "all"):
            raise DataError(f"{path}: logits", expected="mapped or all", got=json.dumps(content["logits"])[:80])
        content, logits = content["classes"], content["logits"]
    if not isinstance(content, dict) or not content:
        raise DataError(f"{path} is not a label map", expected=expected)
    raw: RawLabelMap = {}
    for name, value in content.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int | str) and not isinstance(each, bool) for each in values):
            raise DataError(f"{path}: {name}", expected=expected, got=json.dumps(value)[:80])
        raw[name] = tuple(values)
    return raw, logits


def _parse_csv(path: Path, text: str) -> tuple[RawLabelMap, LogitScope]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if not {"class", "model_class"} <= set(reader.fieldnames or ()):
        got = ",".join(reader.fieldnames or ())
        raise DataError(f"{path} is not a label map", expected="class,model_class as the first line", got=got)
    raw: RawLabelMap = {}
    for row in reader:
        name, value = row["class"] or "", (row["model_class"] or "").strip()
        # All CSV values are text: digits are an index.
        values = () if not value else (int(value) if value.isascii() and value.isdigit() else value,)
        raw[name] = (*raw.get(name, ()), *values)
    return raw, "mapped"


def resolve_class(value: int | str, *, labels: Sequence[str], wnids: NDArray[np.int64] | None, path: Path) -> int:
    """Return the index of a class of the model from its index, label or WordNet id."""
    if isinstance(value, int):
        if 0 <= value < len(labels):
            return value
        raise DataError(f"{path} has a class that the model lacks", expected=f"0…{len(labels) - 1}", got=value)
    if value in labels:
        return labels.index(value)
    position = imagenet_index(value, names="wnids")
    if position is not None and wnids is not None and wnids[position] >= 0:
        return int(wnids[position])
    raise DataError(f"{path} has a class that the model lacks", expected=shorten_list(list(labels)), got=value)


class MappedMetrics:
    """Metrics of images whose classes correspond to those of the model by a label map.

    The labels of the result are the mapped classes of the dataset, plus one for all others if all logits compete. The
    logit of a class with several counterparts is the largest of theirs.
    """

    def __init__(self, label_map: LabelMap, *, num_classes: int, count: int, keep_probabilities: bool = False) -> None:
        mapped = label_map.mapped_labels
        self.positions = torch.full((len(label_map.classes),), -1)
        self.positions[list(mapped)] = torch.arange(len(mapped))
        groups = [sorted(label_map.model_classes[label]) for label in mapped]
        members = {index for group in groups for index in group}
        others = [] if label_map.logits == "mapped" else sorted(set(range(num_classes)) - members)
        all_groups = [*groups, others] if others else groups
        pairs = [(index, label) for label, group in enumerate(all_groups) for index in group]
        self.members, self.groups = torch.tensor(pairs).unbind(dim=1)
        self.competing = sorted(members | set(others))
        # A wrong prediction counts for the first group that contains it.
        first_group = dict(reversed(pairs))
        self.first_group = torch.tensor([first_group[index] for index in self.competing])
        names = tuple(label_map.classes[label] for label in mapped) + ((OTHER_CLASS,) if others else ())
        self.images = ImageMetrics(names, count=count, keep_probabilities=keep_probabilities)

    def add(self, logits: Float[Tensor, "N Y"], targets: Int[Tensor, " N"]) -> None:
        """Add a batch: logits of the model's classes, and classes of the dataset."""
        targets = self.positions[targets]
        if (targets < 0).any():
            message = "some images have a class without counterpart in the model"
            raise InputError(message, hint="exclude them: restrict()")
        check_finite(logits)
        # Top-5 is among the model's classes, of which several may belong to one class of the dataset.
        ranks = self._ranks(logits, targets)
        predictions = self.first_group[logits[:, self.competing].argmax(dim=1)]
        predictions = torch.where(ranks < 1, targets, predictions)
        mapped = logits.new_full((len(logits), len(self.images.labels)), -torch.inf)
        mapped.scatter_reduce_(1, self.groups.expand(len(logits), -1), logits[:, self.members], "amax")
        # One class of the model may be in two groups: raise the logit of the predicted one above its equals.
        rows = (mapped.argmax(dim=1) != predictions).nonzero()[:, 0]
        mapped[rows, predictions[rows]] = torch.nextafter(mapped[rows].amax(dim=1), torch.tensor(torch.inf))
        self.images.add(mapped, targets, ranks=ranks)

    def result(self) -> EvaluationResult:
        """Return the metrics of all images that were added."""
        return self.images.result()

    def _ranks(self, logits: Float[Tensor, "N Y"], targets: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """Return the number of competing logits above the largest one in the group of the target."""
        is_other = self.groups != targets[:, None]
        # Of equal logits the lower class comes first, as in `target_ranks`.
        largest, argmax = logits[:, self.members].masked_fill(is_other, -torch.inf).max(dim=1, keepdim=True)
        index = torch.arange(logits.shape[1])
        precedes = (logits > largest) | ((logits == largest) & (index < self.members[argmax]))
        return precedes[:, self.competing].sum(dim=1)
