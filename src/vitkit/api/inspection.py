"""Inspection of a model on images."""

import pathlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import cast

import torch

from vitkit.api.progress import show_progress
from vitkit.api.public import public
from vitkit.api.sources import resolve_workers
from vitkit.core.errors import ConfigError, DataError, InputError
from vitkit.data.decode import refuse_url
from vitkit.data.layouts.files import is_image, walk_files
from vitkit.inference.engine import resolve_device
from vitkit.report.inspection import InspectionResult, inspect_context, unique_names
from vitkit.report.inspection_context import InspectionContext, find_class
from vitkit.typing import ImageLike, ModelSource, Path
from vitkit.weights.adapt import read_labels
from vitkit.weights.load import load_bundle
from vitkit.weights.pretraining import find_pretraining_model

MAX_DIRECTORY_IMAGES = 128
"""Images of a directory that are used: as many as in the paper's Figure 7."""


@public
def inspect(  # noqa: PLR0913  the options of `vitkit inspect`
    model: ModelSource,
    images: ImageLike | Sequence[ImageLike],
    *,
    out: Path | None = None,
    only: Sequence[str] | None = None,
    target: str | int | None = None,
    other: ModelSource | None = None,
    layer: int = -1,
    labels: Sequence[str] | Path | None = None,
    device: str | torch.device = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> InspectionResult:
    """Show what a model attends to and has learned.

    Up to eight images are drawn; means, such as attention distance, are over all of them. A notebook shows the result
    as a page.

    Args:
        model: A run, an artifact, a weight file of any format, a published name, or a model.
        images: Images or directories of images, one or several.
        out: Directory for report.html, all figures and numbers.json.
        only: Names of sections; all by default.
        target: Class to explain in addition to the predicted one, by label or index.
        other: Model to compare layers with.
        layer: Layer whose heads and features are drawn.
        labels: Class names, or a file of them, if the weights have none.
        device: cpu, cuda, mps or auto.
        workers: Not used, because the images are few.
        progress: Whether to show progress; by default in notebooks, on terminals, and as lines elsewhere.

    >>> import numpy as np, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=10)
    >>> result = vitkit.inspect(model, np.zeros((32, 32, 3), np.uint8), only=["distance"], progress=False)
    >>> list(result.numbers), result.figure("distance").get_size_inches().shape
    (['distance'], (2,))
    """
    resolve_workers(workers)
    target_device = resolve_device(device)
    loaded = load_bundle(model).build_model().to(target_device)
    if labels is not None:
        names = read_labels(pathlib.Path(labels)) if isinstance(labels, str | PathLike) else tuple(labels)
        if len(names) != loaded.num_classes:
            raise ConfigError("these are not the labels of the model", expected=loaded.num_classes, got=len(names))
        loaded.labels = names
    files, file_names = find_images(images)
    pretraining = find_pretraining_model(model)
    with show_progress(progress) as report:
        context = InspectionContext(
            model=loaded,
            images=files,
            names=file_names,
            target=None if target is None else find_class(loaded, target),
            other=None if other is None else load_bundle(other).build_model().to(target_device),
            pretraining=None if pretraining is None else pretraining.to(target_device),
            layer=layer,
            progress=report,
        )
        result = inspect_context(context, only=only)
    if out is None:
        return result
    result.write(pathlib.Path(out))
    return replace(result, report_path=pathlib.Path(out) / "report.html")


def find_images(images: ImageLike | Sequence[ImageLike]) -> tuple[list[ImageLike], list[str]]:
    """Return images with names: those given, and those of the given directories, evenly sampled if there are very many.

    >>> find_images("a.jpg")
    ([PosixPath('a.jpg')], ['a.jpg'])
    """
    all_images = list(images) if isinstance(images, list | tuple) else [cast("ImageLike", images)]
    selected: list[ImageLike] = []
    for image in all_images:
        if not isinstance(image, str | PathLike):
            selected.append(image)
            continue
        refuse_url(image)
        path = pathlib.Path(image)
        if not path.is_dir():
            selected.append(path)
            continue
        inside = [path / name for name in sorted(walk_files(path)) if is_image(name)]
        if not inside:
            raise DataError(f"{path}: no images in this directory", hint="pass image files, or a directory of images")
        step = max(1, len(inside) // MAX_DIRECTORY_IMAGES)
        selected += inside[::step][:MAX_DIRECTORY_IMAGES]
    if not selected:
        raise InputError("there are no images to inspect", expected="at least one")
    numbered = [pathlib.Path(f"image-{number:05}") for number in range(1, len(selected) + 1)]
    paths = [image if isinstance(image, pathlib.Path) else name for image, name in zip(selected, numbered, strict=True)]
    return selected, unique_names(paths)
