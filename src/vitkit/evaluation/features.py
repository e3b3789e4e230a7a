"""Features of every image of a source, cached on disk, and exact nearest neighbors by cosine similarity.

A cache file is named by a hash of the weights, the preprocessing and the images. It is filled in batches; an
interrupted file is resumed. The result is memory-mapped. Without a cache that can be written it is in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from vitkit.core.cache_dir import create_cache_dir, mark_used, report_uncached, trim_cache
from vitkit.core.config import to_mapping
from vitkit.core.errors import ConfigError, DataError, summarize
from vitkit.core.files import file_lock, write_text
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import pair
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.fingerprint import fingerprint_contents
from vitkit.data.loader import CPU, make_evaluation_loader
from vitkit.data.preprocessing import Preprocessing
from vitkit.weights.bundle import ModelBundle

SAVE_EVERY = 50
"""Batches between two records of the progress."""
Extractor = Callable[[int], Generator[NDArray[np.float32], None, None]]
"""Function that yields the features of the images from an index on, in batches."""


@dataclass(frozen=True, kw_only=True)
class LabeledFeatures:
    """Features and true classes of images."""

    features: Float[Tensor, "N F"]
    targets: Int[Tensor, "N"]

    @classmethod
    def from_arrays(cls, features: NDArray[np.float32], labels: NDArray[np.int64]) -> "LabeledFeatures":
        """Copy arrays: torch does not accept a read-only mapping."""
        return cls(features=torch.tensor(features), targets=torch.tensor(labels))

    def select(self, indices: Int[Tensor, "n"]) -> "LabeledFeatures":
        """Return some of the images."""
        return LabeledFeatures(features=self.features[indices], targets=self.targets[indices])


@torch.no_grad()
def compute_features(
    bundle: ModelBundle,
    source: ImageSource,
    *,
    directory: Path | None = None,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device = CPU,
    progress: Callable[[int], None] = lambda images: None,
) -> NDArray[np.float32]:
    """Return the features of every image, N × F, read-only; compute only those that are not in the cache."""
    if len(source) == 0:
        raise DataError("there are no images to compute features of", hint="choose a dataset or split that has images")
    chosen = preprocessing or bundle.preprocessing

    def make_extractor() -> tuple[Extractor, int]:
        model = bundle.build_model().to(device).eval()
        width = model.features(torch.zeros(1, chosen.channels, *pair(chosen.image_size), device=device)).shape[1]

        def extract(first: int) -> Generator[NDArray[np.float32], None, None]:
            rest = Subset(source, range(first, len(source)))
            with make_evaluation_loader(
                rest, preprocessing=chosen, batch_size=batch_size, workers=workers, device=device
            ) as batches:
                for batch in batches:
                    yield model.features(chosen.normalize(batch.pixels.to(device))).float().cpu().numpy()
                    progress(len(batch.pixels))

        return extract, width

    directory = directory or _open_cache()
    if directory is None:
        extract, width = make_extractor()
        rows = (row for batch in extract(0) for row in batch)
        return np.fromiter(rows, dtype=np.dtype((np.float32, width)))
    directory.mkdir(parents=True, exist_ok=True)
    content = f"{bundle.checksum()} {to_mapping(chosen)} {fingerprint_contents(source).checksum}"
    path = directory / f"{hashlib.sha256(content.encode()).hexdigest()}.npy"
    with file_lock(path):
        if path.exists():
            mark_used(path)
            progress(len(source))
        else:
            extract, width = make_extractor()
            _fill_cache(path, extract, shape=(len(source), width), progress=progress)
            trim_cache(keep=path)
    features: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    if len(features) != len(source):
        expected = f"{len(source)} rows"
        raise DataError(f"{path}: damaged", expected=expected, got=len(features), hint="delete the file")
    return features


def _open_cache() -> Path | None:
    """Return the cache directory of this user, or None if it cannot be written."""
    try:
        directory = create_cache_dir("features")
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} cannot be written to")
    except (OSError, ConfigError) as error:
        report_uncached("features are", summarize(error))
        return None
    return directory


def _fill_cache(path: Path, extract: Extractor, *, shape: tuple[int, int], progress: Callable[[int], None]) -> None:
    """Compute a cache file, in a partial file that is renamed when it is complete; `record` counts its rows."""
    unfinished, record = path.with_suffix(".partial.npy"), path.with_suffix(".json")
    rows = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        done = json.loads(record.read_bytes())["done"]
        rows = done if unfinished.exists() and isinstance(done, int) else 0
    progress(rows)
    with (
        explain_io_errors(unfinished),
        unfinished.open("r+b" if rows else "w+b") as file,
        closing(extract(rows)) as batches,
    ):
        dtype = np.dtype(np.float32)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.seek(rows * shape[1] * dtype.itemsize, os.SEEK_CUR)
        file.truncate()
        for count, batch in enumerate(batches, start=1):
            file.write(batch.tobytes())
            rows += len(batch)
            if count % SAVE_EVERY == 0:
                _sync(file)
                write_text(record, json.dumps({"done": rows}))
        _sync(file)
    unfinished.replace(path)
    record.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def explain_io_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError with the path and a hint; the partial file stays and is resumed."""
    try:
        yield
    except OSError as error:
        hint = "free some space, or set VITKIT_CACHE to a directory that has some, and run the command again"
        raise DataError(f"{error.filename or path}: {error.strerror or error}", hint=hint) from error


# Nearest neighbors, in blocks of bounded memory

ROWS, COLUMNS = 1024, 8192
"""Size of a block: with 384 features its product takes 34 MB and its operands 14 MB."""

Excluded = Literal["nothing", "self", "self and before"]
"""Columns that a row ignores, if both sets are the same."""


class NeighborBlock(NamedTuple):
    """Nearest columns of a block of rows, nearest first; −1 if there are fewer than requested."""

    start: int
    cosines: Float[Tensor, "R k"]
    indices: Int[Tensor, "R k"]


def nearest_neighbors(
    left: NDArray[np.float32], right: NDArray[np.float32], *, count: int, exclude: Excluded = "nothing"
) -> Iterator[NeighborBlock]:
    """Yield, for blocks of rows of `left`, the rows of `right` with the largest cosines.

    >>> rows = np.eye(3, dtype=np.float32)
    >>> [block] = nearest_neighbors(rows[:1], rows + 0.1, count=2)
    >>> block.indices.tolist()
    [[0, 1]]
    """
    for start in range(0, len(left), ROWS):
        rows = normalize_rows(left[start : start + ROWS])
        best, indices = torch.full((len(rows), count), -2.0), torch.full((len(rows), count), -1)
        for first in range(0, len(right), COLUMNS):
            if exclude == "self and before" and first + COLUMNS <= start:
                continue
            cosines = rows @ normalize_rows(right[first : first + COLUMNS]).T
            if exclude != "nothing":
                row = torch.arange(start, start + cosines.shape[0])[:, None]
                column = torch.arange(first, first + cosines.shape[1])[None]
                cosines[column <= row if exclude == "self and before" else column == row] = -2.0
            values, columns = cosines.topk(min(count, cosines.shape[1]), dim=1)
            columns = torch.where(values > -2.0, columns + first, -1)
            best, positions = torch.cat([best, values], dim=1).topk(count, dim=1)
            indices = torch.cat([indices, columns], dim=1).gather(1, positions)
        yield NeighborBlock(start, best, indices)


def normalize_rows(rows: NDArray[np.float32]) -> Float[Tensor, "R F"]:
    """Return a copy of the rows with unit length; they may be memory-mapped and read-only."""
    return functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=1)
