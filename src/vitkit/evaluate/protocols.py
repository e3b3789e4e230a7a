"""A model, images and how they are to be judged go in; the judgement comes out, by a label map and ReaL if asked."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import DataError, UnknownNameError, did_you_mean
from vitkit.data.loader import CPU
from vitkit.data.source import Source
from vitkit.data.sources.base import some
from vitkit.engine.engine import Engine
from vitkit.evaluate.judgement import Judgement, judge
from vitkit.evaluate.judging import answers_of, check_labelled, known_classes
from vitkit.evaluate.label_maps import (
    PUBLISHED,
    WNID,
    LabelMap,
    file_map,
    imagenet_order,
    judge_mapped,
    published_map,
)
from vitkit.evaluate.objectnet import WithoutBorder, mappings_folder, objectnet_map
from vitkit.evaluate.real import RealAccuracy, check_order, read_real, real_accuracy, validation_numbers

OBJECTNET = "objectnet"
MAPS = (*PUBLISHED, OBJECTNET)
"""Label maps that have a name; any other is a file."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How answers are judged: `label_map` is one's name or file, `real` ReaL's file."""

    label_map: str | None = None
    real: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Images that can be judged, and what is known about their classes."""

    source: Source
    label_map: LabelMap | None
    real: list[list[int]] | None
    left_out: int
    """Images whose class means nothing to the model."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The judgement, and the ReaL accuracy where it was asked for."""

    judgement: Judgement
    real: RealAccuracy | None


def prepare(protocol: Protocol, source: Source, *, labels: tuple[str, ...], place: Path | str) -> Prepared:
    """Find out what the classes mean, before time is spent on looking at images.

    >>> from vitkit.data.sources.embedded import digits
    >>> test = digits().splits["test"]
    >>> labels = tuple(str(number) for number in range(1000))
    >>> prepare(Protocol(label_map="imagenet-v2"), test, labels=labels, place="digits").label_map.warnings
    ('imagenet-v2 has 1,000 classes, these images have 10',)
    """
    check_labelled(source)
    label_map = choose_map(protocol, source=source, labels=labels, place=place)
    kept, left_out = (source, 0) if label_map is None else label_map.covered(source)
    if label_map is not None and not len(kept):
        raise DataError(
            f"the label map {label_map.name} names no class that these images are of",
            expected=some([label_map.classes[label] for label in label_map.known]),
            got=some([source.classes[label] for label in np.unique(source.labels[source.labels >= 0])]),
        )
    if label_map is not None and label_map.name == OBJECTNET:
        kept = WithoutBorder(kept)
    real = None
    if protocol.real is not None:
        check_order(imagenet_order(labels))
        validation_numbers([source.name(index) for index in range(len(source))])
        real = read_real(protocol.real)
    return Prepared(source=kept, label_map=label_map, real=real, left_out=left_out)


def choose_map(protocol: Protocol, *, source: Source, labels: tuple[str, ...], place: Path | str) -> LabelMap | None:
    """The label map that is asked for; without one, ImageNet's where classes are WordNet ids that the labels lack."""
    asked, classes = protocol.label_map, source.classes
    if asked is None:
        if set(classes) <= set(labels) or not all(map(WNID.fullmatch, classes)):
            return None
        return published_map("imagenet", classes=classes, labels=labels)
    if asked == OBJECTNET:
        return objectnet_map(mappings_folder(place), classes=classes, labels=labels)
    if asked in PUBLISHED:
        return published_map(asked, classes=classes, labels=labels)
    check_map(asked)
    return file_map(Path(asked), classes=classes, labels=labels)


def check_map(asked: str) -> None:
    """Refuse what is neither the name of a label map nor a file.

    >>> check_map("imagenet-a")
    """
    if asked in MAPS or Path(asked).is_file():
        return
    hint = did_you_mean(asked, MAPS) or f"{', '.join(MAPS)}, or a JSON or CSV file"
    raise UnknownNameError(f"no label map is called {asked}, and there is no such file", hint=hint)


def judge_by(
    artefact: Artefact,
    prepared: Prepared,
    *,
    workers: int = 0,
    batch_size: int = 64,
    device: torch.device = CPU,
    engine: Engine | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> Judged:
    """Ask the model, as written or by an engine, for every image once, and judge its answers."""
    source, label_map = prepared.source, prepared.label_map
    numbers = known_classes(artefact, source) if label_map is None else np.arange(len(source.classes))
    found = answers_of(
        artefact, source, workers=workers, batch_size=batch_size, device=device, engine=engine, progress=progress
    )
    if label_map is None:
        judgement = judge(found.logits, torch.from_numpy(numbers)[found.labels], classes=artefact.labels)
    else:
        judgement = judge_mapped(found, label_map)
    if prepared.real is None:
        return Judged(judgement=judgement, real=None)
    order = imagenet_order(artefact.labels)
    real = real_accuracy(found.logits, source=source, labels=prepared.real, order=order)
    return Judged(judgement=judgement, real=real)
