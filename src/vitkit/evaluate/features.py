"""A model and images go in, the features of every image come out: computed once, kept on disk, mapped when read.

A file of features is named after what it holds: the weights, how images are prepared, and the images themselves. It is
filled in pieces, and one that was interrupted goes on where it was.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.checkpoints.native import Artefact
from vitkit.core.config import to_mapping
from vitkit.core.errors import DataError
from vitkit.core.files import write_text
from vitkit.core.shapes import pair
from vitkit.data.loader import CPU, evaluation_batches
from vitkit.data.source import Source, Subset
from vitkit.data.transforms import Preprocessing
from vitkit.zoo.lookup import Model

SAVE_EVERY = 50
"""Batches after which an interrupted file would go on."""


def cache_folder() -> Path:
    """Where features are kept where nobody says: the user's folder for what can be made anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit" / "features"


def cached_features(
    artefact: Artefact,
    source: Source,
    *,
    folder: Path,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda images: None,
) -> NDArray[np.float32]:
    """The features of every image in order, from the file that has them or into one; N × F, mapped and read-only."""
    if len(source) == 0:
        raise DataError("no images to compute features of", hint="name a data set that has some")
    how = preprocessing or artefact.preprocessing
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{model_digest(artefact)} {to_mapping(how)} {data_digest(source)}".encode()).hexdigest()
    done = folder / f"{key}.npy"
    if not done.exists():
        model = artefact.model().to(device).eval()
        _fill(
            done,
            model,
            source,
            preprocessing=how,
            batch_size=batch_size,
            workers=workers,
            device=device,
            progress=progress,
        )
    else:
        progress(len(source))
    found: NDArray[np.float32] = np.load(done, mmap_mode="r", allow_pickle=False)
    if len(found) != len(source):
        raise DataError(f"{done}: damaged", expected=f"{len(source)} rows", got=len(found), hint="delete the file")
    return found


def model_digest(artefact: Artefact) -> str:
    """A checksum of a model: its configuration, and every number of it."""
    digest = hashlib.sha256(json.dumps(to_mapping(artefact.config), sort_keys=True, default=str).encode())
    for name in sorted(artefact.state):
        digest.update(name.encode())
        digest.update(artefact.state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def data_digest(source: Source) -> str:
    """A checksum of the images of a source in their order, by what they hold and not by where they lie."""
    digest = hashlib.sha256()
    for index in range(len(source)):
        content = source.content(index)
        each = (
            content
            if isinstance(content, bytes)
            else np.ascontiguousarray(content).tobytes() + str(content.shape).encode()
        )
        digest.update(hashlib.sha256(each).digest())
    return digest.hexdigest()


@torch.no_grad()
def _fill(
    done: Path,
    model: Model,
    source: Source,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    workers: int,
    device: torch.device,
    progress: Callable[[int], None],
) -> None:
    """Compute what is missing into a file aside, and give it its name when it is whole."""
    aside, count = done.with_suffix(".partial.npy"), done.with_suffix(".json")
    first = _already(aside, count)
    width = model.features(
        torch.zeros(1, preprocessing.channels, *pair(preprocessing.image_size), device=device)
    ).shape[1]
    mode = "r+" if first else "w+"
    rows = np.lib.format.open_memmap(aside, mode=mode, dtype=np.float32, shape=None if first else (len(source), width))
    progress(first)
    rest = Subset(source, range(first, len(source)))
    with evaluation_batches(
        rest, preprocessing=preprocessing, batch_size=batch_size, workers=workers, device=device
    ) as batches:
        for number, batch in enumerate(batches, start=1):
            images = preprocessing.normalise(batch.pixels.to(device))
            rows[first : first + len(images)] = model.features(images).float().cpu().numpy()
            first += len(images)
            progress(len(images))
            if number % SAVE_EVERY == 0:
                rows.flush()
                write_text(count, json.dumps({"done": first}))
    rows.flush()
    del rows
    aside.replace(done)
    count.unlink(missing_ok=True)


def _already(aside: Path, count: Path) -> int:
    """How many rows an interrupted file has; 0 where there is none that can be trusted."""
    try:
        found = json.loads(count.read_bytes())["done"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return found if aside.exists() and isinstance(found, int) else 0
