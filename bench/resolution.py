"""Accuracy of published weights at other resolutions.

python bench/resolution.py ../shared/data        about ten minutes on one core, prints a table
python bench/resolution.py ../shared/data --every 20

The folder holds `weights/` and `photos/` with `labels.csv` (file_name, class_index, …). Nothing is trained: positions
are resampled with the kernel of the weights' origin, and photos are resized and cropped by the same fractions at every
size.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.data.decode import decode
from vitkit.data.preprocessing import ORIGINS, Preprocessing
from vitkit.weights.adapt_state import adapt_state
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.load import load_bundle
from vitkit.zoo.registry import configure

SIZES = (160, 224, 288, 384)
BATCH = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A weight file and its preprocessing; None means that of its format."""

    title: str
    file: str
    origin: str | None = None


CASES = (
    Case(title="AugReg Ti/16, as Google evaluates", file="Ti_16-augreg-imagenet.npz"),
    Case(title="AugReg Ti/16, as timm evaluates", file="Ti_16-augreg-imagenet.npz", origin="timm_augreg"),
    Case(title="DeiT-Ti/16, as Facebook evaluates", file="deit_tiny_patch16_224.pth"),
)


@dataclass(frozen=True)
class Photo:
    """Path and class of a photo."""

    path: Path
    label: int


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--every", default=1, show_default=True, help="Use every n-th photo.")
def main(folder: Path, every: int) -> None:
    """Print one row per case with one column per size."""
    photos = list_photos(folder / "photos")[::every]
    print(f"{len(photos)} photos; one standard error is at most {50 / math.sqrt(len(photos)):.1f} points\n", flush=True)
    print(f"| top-1 in % | {' | '.join(map(str, SIZES))} |\n|---|{'---:|' * len(SIZES)}", flush=True)
    for case in CASES:
        published = load_bundle(folder / "weights" / case.file)
        if case.origin:
            published = replace(published, preprocessing=ORIGINS[case.origin])
        accuracies = [accuracy(at_size(published, size), photos) for size in SIZES]
        print(f"| {case.title} | {' | '.join(f'{100 * value:.1f}' for value in accuracies)} |", flush=True)


def list_photos(folder: Path) -> list[Photo]:
    """Return the photos of a directory in the order of its list."""
    with (folder / "labels.csv").open(newline="") as lines:
        return [Photo(folder / row["file_name"], int(row["class_index"])) for row in csv.DictReader(lines)]


def at_size(published: ModelBundle, size: int) -> ModelBundle:
    """Return the model for another image size with the same crop fraction."""
    config = configure(published.config, image_size=size)
    fitted = adapt_state(published.state, old=published.config, new=config)
    preprocessing = replace(published.preprocessing, image_size=size)
    return replace(published, config=config, state=fitted.state, preprocessing=preprocessing)


@torch.inference_mode()
def accuracy(artifact: ModelBundle, photos: list[Photo]) -> float:
    """Return the fraction of correct top-1 classes."""
    model, correct = artifact.build_model(), 0
    for start in range(0, len(photos), BATCH):
        some = photos[start : start + BATCH]
        pixels = np.stack(list(read_pixels(some, artifact.preprocessing)))
        results = model(artifact.preprocessing.normalize(torch.from_numpy(pixels))).argmax(1)
        correct += sum(int(number) == photo.label for number, photo in zip(results, some, strict=True))
    return correct / len(photos)


def read_pixels(photos: list[Photo], preprocessing: Preprocessing) -> Iterator[NDArray[np.uint8] | NDArray[np.float32]]:
    """Return the pixels of each photo before normalization."""
    for photo in photos:
        yield preprocessing.to_pixels(decode(photo.path.read_bytes(), channels=preprocessing.channels))


if __name__ == "__main__":
    main()
