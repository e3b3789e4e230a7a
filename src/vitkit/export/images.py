"""Images of a place, or some that come with vitkit, go in; the batches that an export is proved on come out."""

import io
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitkit.checkpoints.reference import drawn_image
from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.decode import decode
from vitkit.data.fractals import FractalConfig, FractalSource
from vitkit.data.source import Content, Joined, Source, Subset
from vitkit.data.sources.embedded import digits
from vitkit.data.transforms import Preprocessing
from vitkit.data.verify import read_image
from vitkit.zoo.variants import ModelConfig

BATCHES = (1, 2, 7)
"""Sizes of batches, in turn: one image, more, and a number that nothing divides."""
MOST = 1000
"""Of more images than this, as many are taken, spread evenly: a proof is no evaluation."""
EMBEDDED = 12
"""Digits, and as many fractals, where no images are named."""
IN_FILES = (1, 2, 3, 4)
"""Channels that a PNG can have."""


def unwatched(count: int) -> None:
    """Let nobody know."""


class ProofImages:
    """Images to prove an export on. `unreadable` counts those that could not be read, once they were tried.

    `watch` is told how many were taken up to now.
    """

    def __init__(
        self, source: Source, *, preprocessing: Preprocessing, described: str, watch: Callable[[int], None] = unwatched
    ) -> None:
        count = min(len(source), MOST)
        self.source = Subset(source, [index * len(source) // count for index in range(count)])
        self.preprocessing, self.described, self.watch = preprocessing, described, watch
        self.unreadable = 0

    def __len__(self) -> int:
        return len(self.source) - self.unreadable

    def content(self, index: int) -> Content:
        """An image as it is stored; pixels of other channels than the model wants are repeated, each a bit aside."""
        content, channels = read_image(self.source, index), self.preprocessing.channels
        if isinstance(content, np.ndarray) and channels not in (1, 3, content.shape[2] if content.ndim == 3 else 1):
            grey = content if content.ndim == 2 else content[:, :, 0]
            return np.stack([np.roll(grey, band, axis=1) for band in range(channels)], axis=2)
        return content

    def batches(self) -> Iterator[Float[Tensor, "B C H W"]]:
        """Every image once, in batches of 1, 2 and 7 in turn; of few images, some again until each size was had."""
        self.unreadable = 0
        sizes, waiting, first = cycle(BATCHES), [], list[Float[Tensor, "C H W"]]()
        size = next(sizes)
        for pixels in self._pixels():
            first += [pixels] if len(first) < sum(BATCHES) else []
            waiting.append(pixels)
            if len(waiting) == size:
                yield self.preprocessing.normalise(torch.stack(waiting))
                waiting, size = [], next(sizes)
        if not first:
            raise DataError("none of the images can be read", got=self.described, hint="name others with --images")
        if len(first) < sum(BATCHES):
            again = cycle(first)
            for size in BATCHES:
                yield self.preprocessing.normalise(torch.stack(list(islice(again, size))))
        elif waiting:
            yield self.preprocessing.normalise(torch.stack(waiting))

    def files(self, folder: Path, *, most: int) -> list[Path]:
        """Some of the readable images, from all over, as files for a program of its own to read."""
        made: list[Path] = []
        step = max(1, len(self.source) // most)
        for index in range(0, len(self.source), step):
            if len(made) == most:
                break
            try:
                content = self.content(index)
                decode(content, channels=self.preprocessing.channels)
            except DataError:
                continue
            made.append(folder / f"{index:04}{_ending(content)}")
            if isinstance(content, bytes):
                made[-1].write_bytes(content)
            elif made[-1].suffix == ".npy":
                np.save(made[-1], content)
            else:
                made[-1].write_bytes(_png(content))
        return made

    def _pixels(self) -> Iterator[Float[Tensor, "C H W"]]:
        how = self.preprocessing
        for index in range(len(self.source)):
            try:
                picture = decode(self.content(index), channels=how.channels)
            except DataError:
                self.unreadable += 1
                continue
            yield torch.from_numpy(how.pixels(picture))
            self.watch(index + 1)


def embedded_images(preprocessing: Preprocessing) -> ProofImages:
    """Digits and fractals, which come with vitkit.

    >>> [len(batch) for batch in embedded_images(Preprocessing(image_size=16)).batches()]
    [1, 2, 7, 1, 2, 7, 1, 2, 1]
    """
    numerals = Subset(digits().splits["test"], range(EMBEDDED))
    fractals = FractalSource(FractalConfig(classes=EMBEDDED, per_class=1), first=0, count=1)
    described = f"{EMBEDDED} digits and {EMBEDDED} fractals that come with vitkit, and the drawn reference image"
    return ProofImages(Joined([numerals, fractals]), preprocessing=preprocessing, described=described)


def with_reference(batches: Iterator[Tensor], config: ModelConfig) -> Iterator[Float[Tensor, "B C H W"]]:
    """The batches, and the drawn reference image after them, as one of its own."""
    yield from batches
    yield drawn_image(config)


def _ending(content: Content) -> str:
    if isinstance(content, bytes):
        return ""  # what it is, its first bytes say
    return ".png" if content.ndim == 2 or content.shape[2] in IN_FILES else ".npy"


def _png(pixels: np.ndarray) -> bytes:
    single = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(single)).save(file, format="PNG")
    return file.getvalue()
