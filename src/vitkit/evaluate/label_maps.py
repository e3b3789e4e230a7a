"""A data set's class names and a model's labels go in; which of the model's classes mean each of them comes out.

A model of ImageNet's 1,000 classes is judged on sets that name their classes otherwise, or have some of them only. A
label map gives for each class of the data the model's classes that mean it; an answer is right if it is one of these.
"""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import DataError, InputError
from vitkit.core.shapes import Bool, Float, Int, Tensor
from vitkit.data.source import Source, Subset
from vitkit.data.sources.base import some
from vitkit.evaluate.accuracy import Answers
from vitkit.evaluate.judgement import Judgement, judge
from vitkit.evaluate.shell import asset
from vitkit.objectives.metrics import bootstrap_interval

Read = Literal["mapped", "all"]
"""Whose logits are read: only of classes that the data has, or of all that the model knows."""

WNID = re.compile(r"n\d{8}")
NUMBER = re.compile(r"[0-9]{1,4}")
LANDMARKS = {0: "tench", 1: "goldfish", 207: "golden retriever", 779: "school bus", 999: "toilet"}
"""Words by which names of classes are known to stand in ImageNet's order."""
ANOTHER = "(another class)"
"""The column of a confusion matrix for answers that are no class of the data."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A set that ImageNet's models are judged on: how many classes it has, and whose logits its authors read."""

    classes: int
    read: Read
    names: Literal["wnids", "numbers", "either"]


PUBLISHED: Mapping[str, Published] = {
    "imagenet": Published(classes=1000, read="all", names="either"),
    "imagenet-v2": Published(classes=1000, read="all", names="numbers"),
    "imagenet-sketch": Published(classes=1000, read="all", names="wnids"),
    "imagenet-a": Published(classes=200, read="mapped", names="wnids"),
    "imagenet-r": Published(classes=200, read="mapped", names="wnids"),
}
"""Sets whose folders say themselves what they are: by WordNet id, or by number in ImageNet's order."""


@dataclass(frozen=True, kw_only=True)
class LabelMap:
    """For each class of a data set, the numbers of the model's classes that mean it; none where the model has none."""

    name: str
    classes: tuple[str, ...]
    means: tuple[tuple[int, ...], ...]
    read: Read
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.means):
            raise DataError(
                f"the label map {self.name} names no class of the data", got=f"classes such as {some(self.classes)}"
            )

    @property
    def known(self) -> tuple[int, ...]:
        """The labels of the data set that mean something to the model."""
        return tuple(label for label, numbers in enumerate(self.means) if numbers)

    def covered(self, source: Source) -> tuple[Source, int]:
        """The images whose class means something to the model, and how many are left out."""
        kept = np.flatnonzero(np.isin(source.labels, self.known))
        return (source if len(kept) == len(source) else Subset(source, kept.tolist())), len(source) - len(kept)

    def to_json(self) -> dict[str, object]:
        """What `vitkit eval --json` says of it."""
        left = [name for name, numbers in zip(self.classes, self.means, strict=True) if not numbers]
        return {"name": self.name, "classes": len(self.known), "logits": self.read, "left_out": left}


# ImageNet's classes


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The WordNet ids of ImageNet's 1,000 classes, in the order of the usual labels.

    >>> imagenet_wnids()[0], len(imagenet_wnids())
    ('n01440764', 1000)
    """
    lines = asset("imagenet_wnids.txt").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


def imagenet_order(labels: Sequence[str]) -> NDArray[np.int64]:
    """The model's number for each of ImageNet's classes, −1 where it lacks one.

    Labels are WordNet ids in any order; or 1,000 numbers, or names that can be seen to stand in the usual order.

    >>> imagenet_order(["n01443537", "n01440764"])[:3].tolist()
    [1, 0, -1]
    """
    number = {label: index for index, label in enumerate(labels) if WNID.fullmatch(label)}
    if number:
        return np.array([number.get(wnid, -1) for wnid in imagenet_wnids()], dtype=np.int64)
    usual = len(labels) == len(imagenet_wnids()) and (
        list(labels) == list(map(str, range(len(labels))))
        or all(word in labels[index].lower() for index, word in LANDMARKS.items())
    )
    if not usual:
        raise DataError(
            "the model's classes are not ImageNet's",
            expected="1,000 classes in the usual order, or WordNet ids such as n01440764",
            got=f"{len(labels)} classes: {some(labels, most=3)}",
            hint="say what its classes mean with --label-map FILE",
        )
    return np.arange(len(labels), dtype=np.int64)


def imagenet_number(name: str, *, names: Literal["wnids", "numbers", "either"] = "either") -> int | None:
    """The place of a class in ImageNet's order, by WordNet id or by number; None where it has none.

    >>> imagenet_number("n01443537"), imagenet_number("10"), imagenet_number("0007"), imagenet_number("tench")
    (1, 10, 7, None)
    """
    if names != "numbers" and WNID.fullmatch(name):
        return _places().get(name)
    if names != "wnids" and NUMBER.fullmatch(name) and int(name) < len(imagenet_wnids()):
        return int(name)
    return None


@cache
def _places() -> dict[str, int]:
    return {wnid: place for place, wnid in enumerate(imagenet_wnids())}


# Maps


def published_map(name: str, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """The map of a published set from the names of its folders.

    >>> labels = [str(number) for number in range(1000)]
    >>> published_map("imagenet-v2", classes=["0", "1", "10"], labels=labels).means
    ((0,), (1,), (10,))
    """
    facts, order = PUBLISHED[name], imagenet_order(labels)
    places = [imagenet_number(each, names=facts.names) for each in classes]
    if unknown := [each for each, place in zip(classes, places, strict=True) if place is None]:
        wanted = {"wnids": "n01440764", "numbers": "0 to 999", "either": "n01440764, or 0 to 999"}[facts.names]
        raise DataError(
            f"these are not the folders of {name}: {some(unknown)}", expected=f"classes called {wanted} and the like"
        )
    numbers = [int(order[place]) for place in places if place is not None]
    warnings = []
    if name != "imagenet" and len(classes) != facts.classes:
        warnings.append(f"{name} has {facts.classes:,} classes, these images have {len(classes):,}")
    return LabelMap(
        name=name,
        classes=tuple(classes),
        means=tuple((number,) if number >= 0 else () for number in numbers),
        read=facts.read,
        warnings=tuple(warnings),
    )


def file_map(path: Path, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """The map in a file: a JSON object of class names, or CSV lines of class and model_class.

    A model's class is its number, its label, or a WordNet id; JSON may give a list of them, CSV several lines. The
    logits of mapped classes alone are read, unless JSON says {"logits": "all", "classes": {…}}.
    """
    said, read = read_map(path)
    # A publisher's map may be of more than is there; one that shares no name is of something else.
    if not set(said) & set(classes):
        raise DataError(f"{path} names no class of the data", expected=some(list(classes)), got=some(list(said)))
    wnids = imagenet_order(labels) if _speaks_of_wnids(said, labels) else None
    means = tuple(
        tuple(dict.fromkeys(model_class(each, labels=labels, wnids=wnids, where=path) for each in said.get(name, ())))
        for name in classes
    )
    return LabelMap(name=path.name, classes=tuple(classes), means=means, read=read)


Said = dict[str, tuple[int | str, ...]]
"""What each class means, not yet looked up."""


def read_map(path: Path) -> tuple[Said, Read]:
    """What a file says each class means, and whose logits are to be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="--label-map takes a JSON or CSV file") from error
    return (_read_csv(path, text), "mapped") if path.suffix.lower() == ".csv" else _read_json(path, text)


def _read_json(path: Path, text: str) -> tuple[Said, Read]:
    expected = '{"class": 7} or {"class": [7, "n01440764"]}'
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", expected=expected) from error
    read: Read = "mapped"
    if isinstance(said, dict) and said.keys() == {"logits", "classes"}:
        if said["logits"] not in ("mapped", "all"):
            raise DataError(f"{path}: logits", expected="mapped or all", got=json.dumps(said["logits"])[:80])
        said, read = said["classes"], said["logits"]
    if not isinstance(said, dict) or not said:
        raise DataError(f"{path} is no label map", expected=expected)
    found: Said = {}
    for name, value in said.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int | str) and not isinstance(each, bool) for each in values):
            raise DataError(f"{path}: {name}", expected=expected, got=json.dumps(value)[:80])
        found[name] = tuple(values)
    return found, read


def _read_csv(path: Path, text: str) -> Said:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = {"class", "model_class"}
    if not columns <= set(reader.fieldnames or ()):
        got = ",".join(reader.fieldnames or ())
        raise DataError(f"{path} is no label map", expected="class,model_class as the first line", got=got)
    found: Said = {}
    for row in reader:
        name, value = row["class"] or "", (row["model_class"] or "").strip()
        # In CSV everything is text: a number is meant as one where it looks like one.
        means = () if not value else (int(value) if value.isascii() and value.isdigit() else value,)
        found[name] = (*found.get(name, ()), *means)
    return found


def _speaks_of_wnids(said: Said, labels: Sequence[str]) -> bool:
    known = set(labels)
    return any(
        isinstance(each, str) and each not in known and WNID.fullmatch(each) for of in said.values() for each in of
    )


def model_class(said: int | str, *, labels: Sequence[str], wnids: NDArray[np.int64] | None, where: Path) -> int:
    """The number of a class of the model, from its number, its label or its WordNet id."""
    if isinstance(said, int):
        if 0 <= said < len(labels):
            return said
        raise DataError(f"{where} names a class that the model lacks", expected=f"0…{len(labels) - 1}", got=said)
    if said in labels:
        return labels.index(said)
    place = imagenet_number(said, names="wnids")
    if place is not None and wnids is not None and wnids[place] >= 0:
        return int(wnids[place])
    raise DataError(f"{where} names a class that the model lacks", expected=some(list(labels)), got=said)


# Judging by a map


def judge_mapped(found: Answers, label_map: LabelMap, *, seed: int = 0) -> Judgement:
    """Judge answers by a map: right is an answer among the classes that mean the image's class.

    The classes of the judgement are those of the data; where all logits are read, one more stands for all others. A
    class that several of the model's mean has the highest of their logits.

    >>> label_map = LabelMap(name="pets", classes=("cat", "dog"), means=((0, 1), (2,)), read="all")
    >>> found = Answers(torch.tensor([[0.0, 2.0, 1.0, 0.0], [0.0, 1.0, 0.0, 3.0]]), torch.tensor([0, 1]))
    >>> judged = judge_mapped(found, label_map)
    >>> judged.top1, judged.top5, judged.confusion.tolist()
    (0.5, 1.0, [[1, 0, 0], [0, 0, 1], [0, 0, 0]])
    """
    known = label_map.known
    place = torch.full((len(label_map.classes),), -1)
    place[list(known)] = torch.arange(len(known))
    labels = place[found.labels]
    if (labels < 0).any():
        raise InputError("there are images whose class means nothing to the model", hint="leave them out: covered()")
    if not found.logits.isfinite().all():
        raise InputError("the model's logits are not finite", hint="its weights or its input hold NaN or infinity")
    means = [list(label_map.means[label]) for label in known]
    mapped = sorted({number for numbers in means for number in numbers})
    others = [] if label_map.read == "mapped" else sorted(set(range(found.logits.shape[1])) - set(mapped))
    columns = [found.logits[:, numbers].amax(dim=1) for numbers in (*means, *([others] if others else []))]
    names = tuple(label_map.classes[label] for label in known) + ((ANOTHER,) if others else ())
    read = sorted([*mapped, *others])
    right = {
        name: among_first(found.logits, labels, means=means, read=read, first=first)
        for name, first in (("top1", 1), ("top5", 5))
    }
    answer = torch.tensor(read)[found.logits[:, read].argmax(dim=1)]
    meant = _answered(answer, labels, right["top1"], means=[*means, others] if others else means)
    judged = judge(_preferring(torch.stack(columns, dim=1), meant), labels, classes=names, seed=seed)
    # Among five of the model's classes, not five of the data's: several of the former may be one of the latter.
    return replace(
        judged,
        top1=right["top1"].double().mean().item(),
        top5=right["top5"].double().mean().item(),
        intervals={name: bootstrap_interval(correct, seed=seed) for name, correct in right.items()},
    )


def among_first(
    logits: Float[Tensor, "N Y"],
    labels: Int[Tensor, " N"],
    *,
    means: Sequence[Sequence[int]],
    read: Sequence[int],
    first: int,
) -> Bool[Tensor, " N"]:
    """Whether one of the model's first few answers, of the classes that are read, is one that means the label.

    >>> among_first(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0]), means=[[0, 2]], read=[0, 1, 2], first=2)
    tensor([True])
    """
    is_meant = torch.zeros(len(means), logits.shape[1], dtype=torch.bool)
    for label, numbers in enumerate(means):
        is_meant[label, list(numbers)] = True
    # Of equal logits the lower class comes first, as in `top_k`: a model that says nothing is right by chance alone.
    likeliest, answer = logits.masked_fill(~is_meant[labels], -torch.inf).max(dim=1, keepdim=True)
    number = torch.arange(logits.shape[1])
    before = (logits > likeliest) | ((logits == likeliest) & (number < answer))
    return before[:, list(read)].sum(dim=1) < first


def _answered(
    answer: Int[Tensor, " N"], labels: Int[Tensor, " N"], right: Bool[Tensor, " N"], *, means: Sequence[Sequence[int]]
) -> Int[Tensor, " N"]:
    """The class of the data that each answer is: the label where it is right, else the first that it means."""
    first = {number: label for label, numbers in reversed(list(enumerate(means))) for number in numbers}
    wrong = torch.tensor([first[number] for number in answer.tolist()], dtype=torch.int64)
    return torch.where(right, labels, wrong)


def _preferring(logits: Float[Tensor, "N Y"], answered: Int[Tensor, " N"]) -> Float[Tensor, "N Y"]:
    """The logits with ties broken for the answer: one class may mean two of the data's."""
    logits = logits.clone()
    rows = (logits.argmax(dim=1) != answered).nonzero()[:, 0]
    logits[rows, answered[rows]] = torch.nextafter(logits[rows].amax(dim=1), torch.tensor(torch.inf))
    return logits
