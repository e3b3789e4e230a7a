"""Published weights and labelled photos go in; how often they are right at other resolutions than their own comes out.

python bench/resolution.py ../shared/data        about ten minutes on one core, prints a table
python bench/resolution.py ../shared/data --every 20

The folder holds `weights/` and `photos/` with `labels.csv` (file_name, class_index, …). Nothing is trained: positions
are resampled by the kernel of the weights' origin, and photos are resized and cropped by the same shares at every size.
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

from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.foreign import load
from vitkit.checkpoints.native import Artefact
from vitkit.checkpoints.ready import ready
from vitkit.data.decode import decode
from vitkit.data.transforms import ORIGINS, Preprocessing
from vitkit.zoo.lookup import configure

SIZES = (160, 224, 288, 384)
BATCH = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file of weights and what it is fed: None is what its own format says."""

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
    """Where a photo is, and its class."""

    path: Path
    label: int


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--every", default=1, show_default=True, help="Use every so-manyth photo.")
def main(folder: Path, every: int) -> None:
    """Print a row for each case, with a column for each size."""
    photos = listed(folder / "photos")[::every]
    print(f"{len(photos)} photos; one standard error is at most {50 / math.sqrt(len(photos)):.1f} points\n", flush=True)
    print(f"| top-1 in % | {' | '.join(map(str, SIZES))} |\n|---|{'---:|' * len(SIZES)}", flush=True)
    for case in CASES:
        published = load(folder / "weights" / case.file)
        if case.origin:
            published = replace(published, preprocessing=ORIGINS[case.origin])
        shares = [accuracy(at_size(published, size), photos) for size in SIZES]
        print(f"| {case.title} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |", flush=True)


def listed(folder: Path) -> list[Photo]:
    """The photos in a folder, in the order of its list."""
    with (folder / "labels.csv").open(newline="") as lines:
        return [Photo(folder / row["file_name"], int(row["class_index"])) for row in csv.DictReader(lines)]


def at_size(published: Artefact, size: int) -> Artefact:
    """The model for images of another size, fed with the same shares of them."""
    config = configure(published.config, image_size=size)
    fitted = adapt(published.state, old=published.config, new=config)
    feeding = replace(published.preprocessing, image_size=size)
    return replace(published, config=config, state=fitted.state, preprocessing=feeding)


@torch.inference_mode()
def accuracy(artefact: Artefact, photos: list[Photo]) -> float:
    """The share of photos that the model names rightly."""
    model, right = ready(artefact), 0
    for start in range(0, len(photos), BATCH):
        some = photos[start : start + BATCH]
        pixels = np.stack(list(pixels_of(some, artefact.preprocessing)))
        found = model(artefact.preprocessing.normalise(torch.from_numpy(pixels))).argmax(1)
        right += sum(int(number) == photo.label for number, photo in zip(found, some, strict=True))
    return right / len(photos)


def pixels_of(photos: list[Photo], how: Preprocessing) -> Iterator[NDArray[np.uint8] | NDArray[np.float32]]:
    """What the model sees of each photo, before normalisation."""
    for photo in photos:
        yield how.pixels(decode(photo.path.read_bytes(), channels=how.channels))


if __name__ == "__main__":
    main()
