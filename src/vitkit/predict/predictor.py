"""The place of a model and images in any form go in; labelled probabilities, or features, come out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vitkit.checkpoints.ready import Loaded, load
from vitkit.core.errors import ConfigError, InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.given import Given
from vitkit.data.transforms import Preprocessing
from vitkit.engine.choose import chosen
from vitkit.engine.engine import CPU, Precision, check_precision


class Prediction(NamedTuple):
    """A class and how likely it is, from 0 to 1."""

    label: str
    probability: float


class Predictor:
    """A trained model that answers for images. They are prepared as when it was judged, always.

    Images are files' paths, their contents, Pillow's images or pixels; one of them, or a list. The model answers by its
    `engine`, the fastest for this machine in the precision asked for; `remark` says why it is no faster one. `merge` is
    how many tokens are merged in every layer. A model that is loaded already can be given instead of its place.

    >>> import tempfile, numpy as np, vitkit
    >>> photo = np.zeros((40, 30, 3), dtype=np.uint8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vitkit.save(vitkit.create("Ti/16", image_size=32, classes=2), folder, labels=["cat", "dog"])
    ...     predictor = Predictor(folder)
    >>> predictor(photo)[0]
    [Prediction(label='cat', probability=0.5), Prediction(label='dog', probability=0.5)]
    >>> predictor.features([photo, photo]).shape
    torch.Size([2, 192])
    """

    def __init__(
        self,
        path_or_name: Path | str | Loaded,
        *,
        device: torch.device | str = CPU,
        batch_size: int = 32,
        precision: Precision = "fp32",
        merge: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("a batch has at least one image", got=batch_size)
        self.precision = check_precision(precision)
        self.device, self.batch_size, self.merge = torch.device(device), batch_size, merge
        loaded = load(path_or_name) if isinstance(path_or_name, Path | str) else path_or_name
        self.model = loaded.to(self.device)
        self.engine, self.remark = chosen(self.model, precision=precision, device=self.device, merge=merge)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; empty where the model gives features alone."""
        return self.model.labels

    @property
    def preprocessing(self) -> Preprocessing:
        """What is done to an image before the model sees it."""
        return self.model.preprocess.preprocessing

    def __call__(self, images: Given | Sequence[Given], *, top: int = 5) -> list[list[Prediction]]:
        """The likeliest classes of each image, the likeliest first."""
        return [self.likeliest(row, top=top) for row in self.probabilities(images)]

    def probabilities(self, images: Given | Sequence[Given]) -> Float[Tensor, "B Y"]:
        """How likely each class is, for each image."""
        return self.logits(images).softmax(dim=1)

    def logits(self, images: Given | Sequence[Given]) -> Float[Tensor, "B Y"]:
        """What the model's head says of each image, in float32."""
        self.check_classes()
        return torch.cat([self.answer(batch)[1] for batch in self._batches(images)])

    def features(self, images: Given | Sequence[Given]) -> Float[Tensor, "B F"]:
        """What the model's head reads of each image, in float32."""
        return torch.cat([self.engine.features(batch) for batch in self._batches(images)])

    def answer(self, pixels: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits of images that are prepared already: what `model.preprocess` gives."""
        return self.engine.answer(pixels)

    def check_classes(self) -> None:
        """Refuse to name classes where the model has none."""
        if not self.labels:
            raise InputError(
                "the model has no classes to answer with",
                hint="ask for features, or give it classes with vitkit finetune or vitkit fewshot --save",
            )

    def likeliest(self, probabilities: Float[Tensor, "Y"], *, top: int) -> list[Prediction]:
        """The likeliest classes among the probabilities of one image; of equal ones the first comes first."""
        values, numbers = probabilities.sort(descending=True, stable=True)
        shown = zip(numbers[:top].tolist(), values[:top].tolist(), strict=True)
        return [Prediction(self.labels[number], value) for number, value in shown]

    def _batches(self, images: Given | Sequence[Given]) -> Iterator[Float[Tensor, "B C H W"]]:
        several: Sequence[Given] = images if isinstance(images, list | tuple) else [images]  # type: ignore[list-item]
        if not several:
            raise InputError("no images to answer for", expected="one or more", got="none")
        for first in range(0, len(several), self.batch_size):
            batch = [self.model.preprocess(image) for image in several[first : first + self.batch_size]]
            yield torch.cat(batch)
