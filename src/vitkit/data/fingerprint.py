"""Fingerprints of the contents of a source, to find out what changed between two runs."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitkit.core.errors import DataError
from vitkit.core.files import atomic_write
from vitkit.core.formatting import format_plural, shorten_list
from vitkit.core.pickles import describe_array_error
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.image_cache import DIGEST_BYTES, NO_STATUS, ImageCache, ImageRecord, open_image_cache, stamp_images
from vitkit.data.verify import VerifiedImages, map_images

_ARRAYS = {"names": 1, "classes": 1, "labels": 1, "statuses": 2, "digests": 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fingerprint:
    """Name, label, file status and checksum of every image of a source, in order."""

    names: Sequence[str]
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    statuses: NDArray[np.int64]
    """Size, times of change in ns and inode of each image's file, N × 4; -1 for images in memory."""
    digests: NDArray[np.uint8]
    """First bytes of the SHA-256 of each image, N × 16; zero for images that cannot be read."""

    @property
    def checksum(self) -> str:
        """Checksum of the contents, in order. It does not depend on names, labels or paths."""
        return hashlib.sha256(self.digests.tobytes()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the fingerprint to an .npz file."""
        arrays = vars(self) | {"names": _pack(self.names), "classes": _pack(self.classes)}
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path | str) -> "Fingerprint":
        """Read a file written by `save`; raise DataError for any other content."""
        try:
            # Opened here, because np.load does not close the file of a damaged archive.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                values = {name: arrays[name] for name in _ARRAYS}
            names, classes = _unpack(values["names"]), tuple(_unpack(values["classes"]))
            if any(values[name].ndim != dims for name, dims in _ARRAYS.items()):
                raise ValueError("its arrays have other shapes")
            if len({len(names), *(len(values[name]) for name in ("labels", "statuses", "digests"))}) > 1:
                raise ValueError("its arrays have different lengths")
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged archive raises errors of zipfile, zlib, numpy and more
            raise DataError(
                f"{path}: damaged: {describe_array_error(error)}", hint="delete the file and run again"
            ) from error
        return cls(
            names=names,
            classes=classes,
            labels=values["labels"].astype(np.int64),
            statuses=values["statuses"].astype(np.int64),
            digests=values["digests"].astype(np.uint8),
        )


def _pack(texts: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer("".join(f"{text}\0" for text in texts).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _unpack(packed: NDArray[np.uint8]) -> list[str]:
    return packed.tobytes().decode("utf-8", "surrogatepass").split("\0")[:-1]


def fingerprint_contents(
    source: ImageSource,
    *,
    cache: ImageCache | None = None,
    previous: Fingerprint | None = None,
    verified: Sequence[VerifiedImages] = (),
    workers: int = 0,
    progress: Callable[[int], None] = lambda images: None,
) -> Fingerprint:
    """Return the fingerprint of a source. Only images whose files are not known by size, times and inode are read.

    Args:
        source: Images to identify.
        cache: Known checksums, such as those of images that were verified; by default the user's cache.
        previous: An earlier fingerprint of the same source, whose checksums are known as well.
        verified: What this process has just verified: the files of these images are not examined again.
        workers: Number of processes that read images.
        progress: Called with the number of images that were completed since the last call.
    """
    cache = open_image_cache() if cache is None else cache
    names = [source.name(index) for index in range(len(source))]
    statuses, digests = _take_verified(source, verified)
    is_known = np.asarray(digests.any(axis=1), dtype=np.bool_)
    others = np.flatnonzero(~is_known)
    unverified = Subset(source, others.tolist())
    stamps = stamp_images(unverified)
    statuses[others] = stamps.statuses
    for index, record in cache.find(stamps):
        digests[others[index]], is_known[others[index]] = np.frombuffer(record.digest, np.uint8), True
    if previous is not None:
        _copy_known(previous, names, statuses, digests, is_known)
    progress(int(is_known.sum()))
    missing = np.flatnonzero(~is_known[others]).tolist()
    results = map_images(Subset(unverified, missing), _hash_one, workers=0 if source.always_readable else workers)
    with closing(cache.store(stamps, zip(missing, results, strict=True))) as records:
        for index, record in records:
            if record.digest:
                digests[others[index]] = np.frombuffer(record.digest, np.uint8)
            progress(1)
    return Fingerprint(names=names, classes=source.classes, labels=source.labels, statuses=statuses, digests=digests)


def _take_verified(
    source: ImageSource, verified: Sequence[VerifiedImages]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return file status and checksum of the images that were verified, perhaps as part of a larger source."""
    part, indices = source, np.arange(len(source))
    while True:
        for images in verified:
            if images.source is part:
                return images.statuses[indices], images.digests[indices]
        if not isinstance(part, Subset):
            break
        indices = part.indices[indices]
        part = part.source
    return np.full((len(source), len(NO_STATUS)), -1, np.int64), np.zeros((len(source), DIGEST_BYTES), np.uint8)


def _copy_known(
    previous: Fingerprint,
    names: Sequence[str],
    statuses: NDArray[np.int64],
    digests: NDArray[np.uint8],
    is_known: NDArray[np.bool_],
) -> None:
    """Copy the checksums of images with the same name and file status."""
    index_of = {name: index for index, name in enumerate(previous.names)}
    old = np.array([index_of.get(name, -1) for name in names], dtype=np.int64)
    if not len(previous.names):
        return
    same = (old >= 0) & (previous.statuses[old] == statuses).all(axis=1) & (statuses[:, 0] >= 0)
    same &= previous.digests[old].any(axis=1)
    digests[same], is_known[same] = previous.digests[old[same]], True


def _hash_one(source: ImageSource, index: int) -> ImageRecord:
    try:
        return ImageRecord(source.checksum(index)[:DIGEST_BYTES])
    except (OSError, DataError):
        return ImageRecord(b"")


def describe_changes(old: Fingerprint, new: Fingerprint) -> str | None:
    """Return what changed from one fingerprint to another, with examples; None if images and labels are the same.

    File status does not count: a copied or touched file with the same content is the same image.
    """
    new_index = {name: index for index, name in enumerate(new.names)}
    old_index = {name: index for index, name in enumerate(old.names)}
    common = [name for name in old.names if name in new_index]
    before = np.array([old_index[name] for name in common], dtype=np.int64)
    after = np.array([new_index[name] for name in common], dtype=np.int64)
    is_other = (old.digests[before] != new.digests[after]).any(axis=1)
    old_labels, new_labels = _name_labels(old, before), _name_labels(new, after)
    relabeled = [
        f"{name} ({one} → {other})"
        for name, one, other in zip(common, old_labels, new_labels, strict=True)
        if one != other
    ]
    changes = {
        "with other contents": [name for name, differs in zip(common, is_other.tolist(), strict=True) if differs],
        "with another label": relabeled,
        "added": [name for name in new.names if name not in old_index],
        "removed": [name for name in old.names if name not in new_index],
    }
    parts = [
        f"{format_plural(len(names), 'image')} {change}: {shorten_list(names, limit=3)}"
        for change, names in changes.items()
        if names
    ]
    if not parts and old.classes != new.classes:
        parts = [f"{len(old.classes)} classes before, {len(new.classes)} now, or in another order"]
    if not parts and list(old.names) != list(new.names):
        parts = ["the images are in another order"]
    return "; ".join(parts) or None


def _name_labels(fingerprint: Fingerprint, indices: NDArray[np.int64]) -> list[str]:
    names = dict(enumerate(fingerprint.classes))
    return [names.get(label, "no label") for label in fingerprint.labels[indices].tolist()]
