"""Public function to adapt a weight file to another shape, and the labels that it takes."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from vitkit.core.errors import ConfigError
from vitkit.core.sizes import Size
from vitkit.data.layouts.registry import open_dataset
from vitkit.weights import artifact as artifact_io
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import check_output, write_output
from vitkit.weights.describe import load_described
from vitkit.zoo.registry import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdaptResult:
    """Adapted model, a description of each change, and the path it was written to."""

    source: str
    source_format: str
    bundle: ModelBundle
    changes: tuple[str, ...]
    path: Path | None = None

    @cached_property
    def model(self) -> Model:
        """The adapted model, in eval mode."""
        return self.bundle.build_model()

    def to_dict(self) -> dict[str, object]:
        """Return the output of `vitkit weights adapt --json`."""
        config = self.bundle.config
        return {
            "source": self.source,
            "source_format": self.source_format,
            "path": None if self.path is None else str(self.path),
            "model": self.bundle.name,
            "image_size": config.image_size,
            "classes": config.num_classes,
            "channels": config.channels,
            "changes": list(self.changes),
            "identical": not self.changes,
        }


def adapt(
    source: Path | str,
    out: Path | str | None = None,
    *,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    labels: Sequence[str] | Path | str | None = None,
    pooling: Literal["class", "mean"] | None = None,
    format: str | None = None,  # noqa: A002  the word users type
    overwrite: bool = False,
) -> AdaptResult:
    """Return a copy of a model in another shape, and write it as an artifact if `out` is given.

    `labels` are class names, or the path of a file with one per line, a run or a dataset. Classes of the same name keep
    their weights; `num_classes` gives a new zero head.
    """
    if num_classes is not None and labels is not None:
        raise ConfigError("labels already set the number of classes", hint="leave num_classes out")
    names = read_labels(Path(labels)) if isinstance(labels, str | Path) else labels
    request = AdaptRequest(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=num_classes,
        labels=None if names is None else tuple(names),
        pooling=pooling,
    )
    path = None if out is None else Path(out)
    if path is not None:
        check_output(path, source=source, format=format, overwrite=overwrite, as_directory=True)
    info, bundle = load_described(source, format=format)
    logger.info("read %s: %s, %s", info.file, info.title, info.model)
    adapted, changes = adapt_bundle(bundle, request)
    if path is not None:
        write_output(path, lambda directory: artifact_io.write_artifact(directory, adapted), as_directory=True)
    return AdaptResult(source=str(source), source_format=info.format, bundle=adapted, changes=changes, path=path)


def read_labels(path: Path) -> tuple[str, ...]:
    """Read class names from a file (a JSON list, or one name per line), a trained model or a dataset."""
    if path.is_dir() and not (path / artifact_io.LABELS).is_file():
        return _dataset_labels(path)
    try:
        text = (path / artifact_io.LABELS if path.is_dir() else path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        hint = "labels are a file with one class per line, a run, or a directory of images"
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
    if repeated := [label for label, count in Counter(labels).items() if count > 1]:
        raise ConfigError(f"{path}: label {repeated[0]} is repeated", hint="give each class a name of its own")
    return labels


def _dataset_labels(path: Path) -> tuple[str, ...]:
    """Return the classes of a dataset, in the order that training on it gives them."""
    classes = open_dataset(path).classes
    if not classes:
        hint = "give each class a directory, or name a file with one class per line"
        raise ConfigError(f"{path}: the images have no classes", hint=hint)
    return tuple(classes)
