"""Evaluation protocols: label maps for datasets with other class names, ObjectNet, and ReaL labels for ImageNet."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.core.errors import DataError, UnknownNameError, did_you_mean
from vitkit.core.files import read_text
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource, StoredImage
from vitkit.data.decode import decode
from vitkit.data.loader import CPU
from vitkit.evaluation.evaluation import EvaluationResult, ImageMetrics, RealAccuracy, class_indices, require_labels
from vitkit.evaluation.label_maps import (
    PUBLISHED,
    WNID,
    LabelMap,
    MappedMetrics,
    imagenet_indices,
    load_label_map,
    published_label_map,
)
from vitkit.evaluation.logits import iterate_logits
from vitkit.evaluation.metrics import wilson_interval
from vitkit.inference.engine import Engine
from vitkit.weights.bundle import ModelBundle

OBJECTNET = "objectnet"
LABEL_MAPS = (*PUBLISHED, OBJECTNET)
"""Label maps that have a name; any other is a file."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Choice of a label map (a name or a file) and of a file of ReaL labels."""

    label_map: str | None = None
    real: str | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Images that the model can be evaluated on, with the label map and ReaL labels of the protocol."""

    source: ImageSource
    label_map: LabelMap | None = None
    real: list[list[int]] | None = None
    left_out: int = 0
    """Images whose class has no counterpart in the model."""


def prepare(protocol: Protocol, source: ImageSource, *, bundle: ModelBundle, path: Path | str) -> PreparedData:
    """Resolve the classes of a source before any image is read; raise DataError if they do not fit the model."""
    require_labels(source)
    label_map = choose_label_map(protocol, source=source, labels=bundle.labels, path=path)
    images, left_out = (source, 0) if label_map is None else label_map.restrict(source)
    if label_map is None:
        check_classes(bundle, source)
    elif not len(images):
        raise DataError(
            f"the label map {label_map.name} has none of the classes of these images",
            expected=shorten_list([label_map.classes[label] for label in label_map.mapped_labels]),
            got=shorten_list([source.classes[label] for label in np.unique(source.labels[source.labels >= 0])]),
        )
    elif label_map.name == OBJECTNET:
        images = BorderCroppedSource(images)
    real = None
    if protocol.real is not None:
        require_all_classes(imagenet_indices(bundle.labels))
        validation_numbers(source)
        real = read_real_labels(protocol.real)
    return PreparedData(source=images, label_map=label_map, real=real, left_out=left_out)


def check_classes(bundle: ModelBundle, source: ImageSource) -> None:
    """Raise DataError if the model lacks a class of a source; name the label map that would map ImageNet's classes."""
    try:
        class_indices(bundle, source)
    except DataError as error:
        try:
            published_label_map("imagenet", classes=source.classes, labels=bundle.labels)
        except DataError:
            raise error from None
        hint = "these look like ImageNet's classes by number, and the model has their names: use --label-map imagenet"
        raise DataError(error.summary, hint=hint) from error


def choose_label_map(
    protocol: Protocol, *, source: ImageSource, labels: tuple[str, ...], path: Path | str
) -> LabelMap | None:
    """Return the chosen label map; by default ImageNet's if the classes are WordNet ids that the model lacks."""
    choice, classes = protocol.label_map, source.classes
    if choice is None:
        if set(classes) <= set(labels) or not all(map(WNID.fullmatch, classes)):
            return None
        return published_label_map("imagenet", classes=classes, labels=labels)
    if choice == OBJECTNET:
        return objectnet_label_map(find_mappings(path), classes=classes, labels=labels)
    if choice in PUBLISHED:
        return published_label_map(choice, classes=classes, labels=labels)
    check_label_map(choice)
    return load_label_map(Path(choice), classes=classes, labels=labels)


def check_label_map(name: str) -> None:
    """Raise UnknownNameError if this is neither the name of a label map nor a file."""
    if name in LABEL_MAPS or Path(name).is_file():
        return
    hint = did_you_mean(name, LABEL_MAPS) or f"{', '.join(LABEL_MAPS)}, or a JSON or CSV file"
    raise UnknownNameError(f"there is no label map or file called {name}", hint=hint)


def evaluate_protocol(
    bundle: ModelBundle,
    prepared: PreparedData,
    *,
    workers: int = 0,
    batch_size: int = 64,
    device: torch.device = CPU,
    engine: Engine | None = None,
    keep_probabilities: bool = False,
    progress: Callable[[int], None] = lambda images: None,
) -> EvaluationResult:
    """Evaluate a model, or an engine of it, on prepared data. Without a label map, its classes are the source's."""
    source, label_map = prepared.source, prepared.label_map
    images: ImageMetrics | MappedMetrics
    if label_map is None:
        indices = torch.from_numpy(class_indices(bundle, source))
        images = ImageMetrics(bundle.labels, count=len(source), keep_probabilities=keep_probabilities)
    else:
        indices = torch.arange(len(source.classes))
        images = MappedMetrics(
            label_map, num_classes=len(bundle.labels), count=len(source), keep_probabilities=keep_probabilities
        )
    real = None if prepared.real is None else RealMetrics(imagenet_indices(bundle.labels))
    model = bundle.build_model().to(device) if engine is None else lambda images: engine.forward(images)[1]
    for logits, targets in iterate_logits(
        model,
        source,
        preprocessing=bundle.preprocessing,
        batch_size=batch_size,
        workers=workers,
        device=device,
        progress=progress,
    ):
        images.add(logits, indices[targets])
        if real is not None:
            real.add(logits)
    result = images.result()
    if label_map is not None:
        result = replace(result, label_map=label_map.to_dict(), images_left_out=prepared.left_out)
    if real is not None and prepared.real is not None:
        result = replace(result, real=real.result(source, labels=prepared.real))
    return result


# ObjectNet (Barbu et al., 2019): of 313 object classes, 113 correspond to ImageNet classes; images of the others are
# excluded. A prediction is correct if it is one of the ImageNet classes listed for the object. All logits compete.

BORDER = 2
"""Width in pixels of the red border that marks test images."""
FOLDER_LABELS, IMAGENET_LABELS = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
IMAGENET_NAMES, IMAGENET_LINES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"
MAPPINGS_HINT = "unpack all of ObjectNet's mappings again"


class BorderCroppedSource(ImageSource):
    """A source whose images have their border removed."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source
        self.layout, self.classes, self.labels = source.layout, source.classes, source.labels

    def name(self, index: int) -> str:
        """Return the name of the image in the original source."""
        return self.source.name(index)

    def read(self, index: int) -> StoredImage:
        """Return the pixels inside the border."""
        pixels = np.asarray(decode(self.source.read(index), channels=3))
        if min(pixels.shape[:2]) <= 2 * BORDER:
            got = f"{pixels.shape[1]}×{pixels.shape[0]} pixels"
            raise DataError("the image is not larger than its border", got=got)
        return np.ascontiguousarray(pixels[BORDER:-BORDER, BORDER:-BORDER])


def find_mappings(path: Path | str) -> Path:
    """Return the published `mappings` directory, inside the dataset or next to it."""
    for parent in (Path(path), Path(path).resolve().parent):
        if (parent / "mappings" / IMAGENET_LABELS).is_file():
            return parent / "mappings"
    expected = "objectnet-1.0/images and objectnet-1.0/mappings, as published"
    hint = "pass the directory that holds both"
    raise DataError(f"{path} has no mappings/{IMAGENET_LABELS}", expected=expected, hint=hint)


def objectnet_label_map(mappings: Path, *, classes: Sequence[str], labels: Sequence[str]) -> LabelMap:
    """Build the label map of ObjectNet's directories from the four published files."""
    indices = imagenet_indices(labels)
    folder_labels, imagenet_labels = _read_object(mappings / FOLDER_LABELS), _read_object(mappings / IMAGENET_LABELS)
    imagenet_names = read_class_names(mappings)
    if unknown := [name for name in classes if name not in folder_labels]:
        message = f"{mappings / FOLDER_LABELS} lacks the directories {shorten_list(unknown)}"
        raise DataError(message, expected=shorten_list(list(folder_labels)))
    model_classes = []
    for name in classes:
        entry = imagenet_labels.get(str(folder_labels[name]))
        names = [] if entry is None else [part.strip() for part in str(entry).split("; ")]
        if unknown := [each for each in names if each not in imagenet_names]:
            raise DataError(f"{mappings / IMAGENET_NAMES} has no line for {shorten_list(unknown)}")
        candidates = (int(indices[imagenet_names[each]]) for each in names)
        model_classes.append(tuple(index for index in candidates if index >= 0))
    return LabelMap(name="objectnet", classes=tuple(classes), model_classes=tuple(model_classes), logits="all")


def read_class_names(mappings: Path) -> dict[str, int]:
    """Read the index in ImageNet's usual order of each class name.

    The names are listed in the order of the challenge's own ids; another file maps the usual order to these.
    """
    names = [line.strip() for line in _read_text(mappings / IMAGENET_NAMES, hint=MAPPINGS_HINT).splitlines()]
    lines = _read_object(mappings / IMAGENET_LINES)
    try:
        return {names[int(str(line))]: int(index) for index, line in lines.items()}
    except (ValueError, IndexError) as error:
        raise DataError(f"{mappings / IMAGENET_LINES} and {IMAGENET_NAMES} do not match: {error}") from error


def _read_object(path: Path) -> dict[str, object]:
    value = _read_json(path, hint=MAPPINGS_HINT)
    if not isinstance(value, dict):
        raise DataError(f"{path}", expected="a JSON object", got=type(value).__name__)
    return value


def _read_json(path: Path, *, hint: str) -> Any:
    text = _read_text(path, hint=hint)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", hint=hint) from error


def _read_text(path: Path, *, hint: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: {reason}", hint=hint) from error


# ReaL accuracy ("Are we done with ImageNet?", Beyer et al., arXiv:2006.07159): a prediction is correct if it is among
# the reassessed labels of the image; images without such labels are skipped.

IMAGES, CLASSES = 50_000, 1_000
FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")


def read_real_labels(path: Path | str) -> list[list[int]]:
    """Read the published `real.json`: the labels of each validation image, in the order of image numbers."""
    labels = _read_json(Path(path), hint="pass the published real.json")
    if not isinstance(labels, list) or len(labels) != IMAGES:
        raise DataError(
            f"{path} is not the published real.json",
            expected=f"a list of {IMAGES:,}, one for each validation image",
            got=f"a list of {len(labels):,}" if isinstance(labels, list) else type(labels).__name__,
        )
    for number, each in enumerate(labels, start=1):
        if not isinstance(each, list) or not all(type(label) is int and 0 <= label < CLASSES for label in each):
            expected, got = f"a list of numbers from 0 to {CLASSES - 1}", json.dumps(each)[:80]
            raise DataError(f"{path}: the labels of image {number}", expected=expected, got=got)
    return labels


def validation_numbers(source: ImageSource) -> list[int]:
    """Return the number of each validation image, from 1, from its file name."""
    numbers = []
    for name in map(source.name, range(len(source))):
        match = FILE_NAME.fullmatch(name.rpartition("/")[2])
        if match is None or not 1 <= int(match[1]) <= IMAGES:
            expected = f"ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_{IMAGES:08}.JPEG"
            hint = "ReaL labels are looked up by the original file names"
            raise DataError(f"{name} is not an ImageNet validation image", expected=expected, hint=hint)
        numbers.append(int(match[1]))
    return numbers


def require_all_classes(indices: NDArray[np.int64]) -> None:
    """Raise DataError if the model lacks some of the ImageNet classes."""
    if missing := int((indices < 0).sum()):
        raise DataError("ReaL needs a model of all ImageNet classes", expected=f"{CLASSES:,}", got=f"{missing:,} fewer")


class RealMetrics:
    """ReaL accuracy of images, collected batch by batch; `indices` are the model's of each ImageNet class."""

    def __init__(self, indices: NDArray[np.int64]) -> None:
        require_all_classes(indices)
        self.indices = torch.from_numpy(indices)
        self._predictions: list[int] = []

    def add(self, logits: Float[Tensor, "N Y"]) -> None:
        """Add the logits of a batch."""
        self._predictions += logits[:, self.indices].argmax(dim=1).tolist()

    def result(self, source: ImageSource, *, labels: Sequence[Sequence[int]]) -> RealAccuracy:
        """Return the accuracy on the images of a source, all of which were added; `labels` are by image number."""
        image_labels = [labels[number - 1] for number in validation_numbers(source)]
        correct = [predicted in each for predicted, each in zip(self._predictions, image_labels, strict=True) if each]
        if not correct:
            got = f"{len(image_labels):,} images without"
            raise DataError("none of the images has a label in real.json", got=got)
        return RealAccuracy(
            top1=sum(correct) / len(correct),
            count=len(correct),
            skipped=len(image_labels) - len(correct),
            interval=wilson_interval(sum(correct), len(correct)),
        )
