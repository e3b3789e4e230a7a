"""A model and images go in, the features of every image come out: computed once, kept on disk, mapped when read.

A file of features is named after what it holds: the weights, how images are prepared, and the images themselves. It is
filled in pieces, and one that was interrupted goes on where it was.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from vitkit.checkpoints.native import Artefact
from vitkit.core.config import to_mapping
from vitkit.core.errors import DataError
from vitkit.core.files import one_at_a_time, write_text
from vitkit.core.shapes import pair
from vitkit.data.loader import CPU, Batches, evaluation_batches
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
    with one_at_a_time(done):  # who comes second finds them
        if done.exists():
            progress(len(source))
        else:
            batches = Batching(preprocessing=how, batch_size=batch_size, workers=workers, device=device)
            _fill(done, artefact.model().to(device).eval(), source, batches, progress=progress)
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


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How images come to a model."""

    preprocessing: Preprocessing
    batch_size: int
    workers: int
    device: torch.device

    def of(self, source: Source) -> Batches:
        """The batches of a source, in order."""
        return evaluation_batches(
            source,
            preprocessing=self.preprocessing,
            batch_size=self.batch_size,
            workers=self.workers,
            device=self.device,
        )


@torch.no_grad()
def _fill(done: Path, model: Model, source: Source, how: Batching, *, progress: Callable[[int], None]) -> None:
    """Compute what is missing into a file aside, and give it its name when it is whole."""
    aside, count = done.with_suffix(".partial.npy"), done.with_suffix(".json")
    first, device = _already(aside, count), how.device
    sides = pair(how.preprocessing.image_size)
    width = model.features(torch.zeros(1, how.preprocessing.channels, *sides, device=device)).shape[1]
    progress(first)
    rest = Subset(source, range(first, len(source)))
    with naming_the_file(aside), aside.open("r+b" if first else "w+b") as file, how.of(rest) as batches:
        _begin(file, rows=len(source), width=width, first=first)
        for number, batch in enumerate(batches, start=1):
            images = how.preprocessing.normalise(batch.pixels.to(device))
            file.write(model.features(images).float().cpu().numpy().tobytes())
            first += len(images)
            progress(len(images))
            if number % SAVE_EVERY == 0:
                file.flush()
                os.fsync(file.fileno())
                write_text(count, json.dumps({"done": first}))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(done)
    count.unlink(missing_ok=True)


def _begin(file: BinaryIO, *, rows: int, width: int, first: int) -> None:
    """Write the head of a file of so many rows, and go to where the first row that is missing begins."""
    head = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, head)
    file.seek(first * width * np.dtype(np.float32).itemsize, os.SEEK_CUR)
    file.truncate()


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Say of a file that cannot be written which it is, and what helps; what is there stays, and is gone on from."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: {error.strerror or error}",
            hint="make room, or set XDG_CACHE_HOME to a folder that has some, and run the same command again",
        ) from error


def _already(aside: Path, count: Path) -> int:
    """How many rows an interrupted file has; 0 where there is none that can be trusted."""
    try:
        found = json.loads(count.read_bytes())["done"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return found if aside.exists() and isinstance(found, int) else 0
