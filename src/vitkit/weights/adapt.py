"""Adaptation of a source to another shape, and the labels that it takes."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitkit.core.errors import ConfigError
from vitkit.core.files import read_text
from vitkit.core.result import Result, select
from vitkit.data.layouts.registry import open_dataset
from vitkit.typing import ModelSource
from vitkit.weights import artifact as artifact_io
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import check_output, write_output
from vitkit.weights.describe import load_described
from vitkit.zoo.imagenet import has_imagenet_names, imagenet_names
from vitkit.zoo.registry import Model

IMAGENET = "imagenet"
"""Name of ImageNet-1k's labels."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class AdaptResult(Result):
    """Adapted model, a description of each change, and the path it was written to.

    `dropped` names the tensors of the source that are not part of the model, such as a decoder.
    """

    source: str
    source_format: str
    bundle: ModelBundle
    changes: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    path: Path | None = None

    @cached_property
    def model(self) -> Model:
        """The adapted model, in eval mode."""
        return self.bundle.build_model(keep_dtype=True)

    def to_dict(self) -> dict[str, object]:
        """Return the output of `vitkit weights adapt --json`."""
        config = self.bundle.config
        return {
            **select(self, "source", "source_format", "path"),
            "model": self.bundle.name,
            "image_size": config.image_size,
            "classes": config.num_classes,
            "channels": config.channels,
            "changes": list(self.changes),
            "dropped": list(self.dropped),
            "identical": not self.changes,
        }


def adapt_source(
    source: ModelSource,
    path: Path | None,
    request: AdaptRequest,
    *,
    format: str | None,  # noqa: A002  the word users type
    overwrite: bool,
) -> AdaptResult:
    """Return a copy of a model in another shape, and write it as an artifact if `path` is given."""
    if path is not None:
        check_output(path, source=source, format=format, overwrite=overwrite, as_directory=True)
    info, bundle = load_described(source, format=format)
    logger.info("read %s: %s, %s", info.file, info.title, info.model)
    adapted, changes = adapt_bundle(bundle, request)
    if path is not None:
        write_output(path, lambda directory: artifact_io.write_artifact(directory, adapted), as_directory=True)
    return AdaptResult(
        source=info.file, source_format=info.format, bundle=adapted, changes=changes, dropped=info.dropped, path=path
    )


def read_labels(path: Path) -> tuple[str, ...]:
    """Read class names from a file (a JSON list, or one name per line), a trained model or a dataset.

    "imagenet" are the names of ImageNet-1k. A list of them in the usual order may call two classes crane.
    """
    if str(path) == IMAGENET and not path.exists():
        return imagenet_names()
    if path.is_dir() and not (path / artifact_io.LABELS).is_file():
        return _dataset_labels(path)
    try:
        text = read_text(path / artifact_io.LABELS if path.is_dir() else path)
    except FileNotFoundError as error:
        hint = f"labels are a file with one class per line, a run, a directory of images, or {IMAGENET}"
        raise ConfigError(f"{path}: no such file or directory", hint=hint) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: invalid JSON list: {error}") from error
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{path}: not a list of strings", expected='["cat", "dog"]')
        labels = tuple(values)
    else:
        labels = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not labels:
        raise ConfigError(f"{path}: contains no labels", expected="one class per line")
    repeated = [label for label, count in Counter(labels).items() if count > 1]
    if repeated and has_imagenet_names(labels):
        pairs = zip(labels, imagenet_names(), strict=True)
        return tuple(unique if label in repeated else label for label, unique in pairs)
    if repeated:
        raise ConfigError(f"{path}: label {repeated[0]} is repeated", hint="give each class a name of its own")
    return labels


def _dataset_labels(path: Path) -> tuple[str, ...]:
    """Return the classes of a dataset, in the order that training on it gives them."""
    classes = open_dataset(path).classes
    if not classes:
        hint = "give each class a directory, or name a file with one class per line"
        raise ConfigError(f"{path}: the images have no classes", hint=hint)
    return tuple(classes)
