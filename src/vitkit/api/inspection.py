"""Inspection of a model on images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitkit.core.errors import ConfigError, DataError
from vitkit.core.signals import ProgressFunction, ignore_progress
from vitkit.data.layouts.files import is_image, walk_files
from vitkit.report.inspection import InspectionResult, inspect_context, unique_names
from vitkit.report.inspection_context import InspectionContext, find_class
from vitkit.weights.load import load
from vitkit.weights.pretraining import find_pretraining_model

MAX_DIRECTORY_IMAGES = 128
"""Images of a directory that are used: as many as in the paper's Figure 7."""


def inspect(
    model: str,
    images: Sequence[Path],
    *,
    out: Path | None = None,
    only: Sequence[str] | None = None,
    target: str | int | None = None,
    other: str | None = None,
    layer: int = -1,
    labels: Sequence[str] | None = None,
    progress: ProgressFunction = ignore_progress,
) -> InspectionResult:
    """Show what a model attends to and has learned.

    Up to eight images are drawn; means, such as attention distance, are over all of them.

    Args:
        model: A run, an artifact or a weight file of any format.
        images: Image files or directories of images.
        out: Directory for report.html, all figures and numbers.json.
        only: Names of sections; all by default.
        target: Class to explain in addition to the predicted one, by label or index.
        other: Model to compare layers with.
        layer: Layer whose heads and features are drawn.
        labels: Class names, if the weights have none.
        progress: Called as sections are made.
    """
    loaded = load(model)
    if labels is not None:
        if len(labels) != loaded.config.num_classes:
            raise ConfigError(
                "these are not the labels of the model", expected=loaded.config.num_classes, got=len(labels)
            )
        loaded.labels = tuple(labels)
    files = find_images(images)
    context = InspectionContext(
        model=loaded,
        images=files,
        names=unique_names(files),
        target=None if target is None else find_class(loaded, target),
        other=None if other is None else load(other),
        pretraining=find_pretraining_model(model),
        layer=layer,
    )
    result = inspect_context(context, only=only, progress=progress)
    if out is None:
        return result
    result.write(out)
    return replace(result, report_path=out / "report.html")


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Return the given files and the images of the given directories, evenly sampled if there are very many.

    >>> find_images([Path("a.jpg")])
    [PosixPath('a.jpg')]
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = [path / name for name in sorted(walk_files(path)) if is_image(name)]
        if not inside:
            raise DataError(f"{path}: no images in this directory", hint="pass image files, or a directory of images")
        step = max(1, len(inside) // MAX_DIRECTORY_IMAGES)
        files += inside[::step][:MAX_DIRECTORY_IMAGES]
    return files
