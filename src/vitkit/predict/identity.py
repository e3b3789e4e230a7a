"""The place of a model and the images that it is asked about go in, marks of them come out; other ones have others."""

import hashlib
from pathlib import Path

from vitkit.checkpoints.foreign import WEIGHT_FILES
from vitkit.checkpoints.hub import located
from vitkit.checkpoints.native import CHECKSUMS, CONFIG, PREPROCESSING
from vitkit.core.errors import WeightsError
from vitkit.core.files import sha256
from vitkit.data.source import Source


def marks(model: str, source: Source) -> dict[str, object]:
    """What a file of answers remembers, to be gone on with only for the same weights and images."""
    weights = weights_mark(model)
    return {"images": images_mark(source), **({"weights": weights} if weights else {})}


def images_mark(source: Source) -> dict[str, object]:
    """How many images there are, and a checksum of their names in order.

    >>> from vitkit.data.sources.embedded import digits
    >>> images_mark(digits().splits["test"])["count"]
    359
    """
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\0")
    return {"count": len(source), "names": digest.hexdigest()}


def weights_mark(model: str) -> str | None:
    """A checksum of what tells the weights at a place from others; None where there are none any more.

    An artefact of ours has the checksums of its files. Of other weights it is sizes and times, because to read them
    takes as long as to load them.
    """
    try:
        place = located(model)
    except WeightsError:  # it is said by whoever loads it
        return None
    if (place / CHECKSUMS).is_file():
        return sha256(place / CHECKSUMS)
    files = weight_files(place)
    if not files:
        return None
    folder = files[0].parent
    files += [path for path in (folder / CONFIG, folder / PREPROCESSING) if path.is_file()]
    said = [(path.name, status.st_size, status.st_mtime_ns) for path in files for status in (path.stat(),)]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def weight_files(place: Path) -> list[Path]:
    """The files of weights of another origin: the place itself, or those in the folder."""
    if place.is_dir():
        return sorted(path for path in place.iterdir() if path.name.endswith(WEIGHT_FILES) and path.is_file())
    return [place] if place.is_file() else []
