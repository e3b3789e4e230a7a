"""Predictions of a trained model for images in any form."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vitkit.core.errors import ConfigError, InputError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.decode import ImageLike
from vitkit.data.preprocessing import Preprocessing
from vitkit.inference.engine import CPU, Precision, check_precision
from vitkit.inference.select import select_engine
from vitkit.weights.load import load
from vitkit.zoo.registry import Model


class Prediction(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


class Predictor:
    """A trained model with the fastest engine for this machine. Images are preprocessed as in evaluation.

    Args:
        model: Run, artifact, weight file or name, or a loaded model.
        precision: Precision of the matrix products. `engine` is the engine that was selected, and `fallback_reason`
            explains why it is not a faster one (None if it is the fastest).
        merge: Number of tokens to merge in every layer.

    >>> import tempfile, numpy as np, vitkit
    >>> photo = np.zeros((40, 30, 3), dtype=np.uint8)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     vitkit.save(vitkit.create("Ti/16", image_size=32, num_classes=2), directory, labels=["cat", "dog"])
    ...     predictor = Predictor(directory)
    >>> predictor(photo)[0]
    [Prediction(label='cat', probability=0.5), Prediction(label='dog', probability=0.5)]
    >>> predictor.features([photo, photo]).shape
    torch.Size([2, 192])
    """

    def __init__(
        self,
        model: Path | str | Model,
        *,
        device: torch.device | str = CPU,
        batch_size: int = 32,
        precision: Precision = "fp32",
        merge: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("the batch size must be at least 1", got=batch_size)
        self.precision = check_precision(precision)
        self.device, self.batch_size, self.merge = torch.device(device), batch_size, merge
        self.model = (load(model) if isinstance(model, Path | str) else model).to(self.device)
        self.engine, self.fallback_reason = select_engine(
            self.model, precision=precision, device=self.device, merge=merge
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names; empty for a model without a head."""
        return self.model.labels

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of the images."""
        return self.model.preprocess

    @property
    def is_approximate(self) -> bool:
        """Whether outputs can differ from those of the unmodified model by more than rounding."""
        return self.precision != "fp32" or self.merge > 0

    def __call__(self, images: ImageLike | Sequence[ImageLike], *, top: int = 5) -> list[list[Prediction]]:
        """Return the most probable classes of each image, in descending order."""
        return [self.top_predictions(row, top=top) for row in self.probabilities(images)]

    def probabilities(self, images: ImageLike | Sequence[ImageLike]) -> Float[Tensor, "B Y"]:
        """Return the probability of each class for each image."""
        return self.logits(images).softmax(dim=1)

    def logits(self, images: ImageLike | Sequence[ImageLike]) -> Float[Tensor, "B Y"]:
        """Return the logits of each image in float32."""
        self.check_classes()
        return torch.cat([self.forward(batch)[1] for batch in self._batches(images)])

    def features(self, images: ImageLike | Sequence[ImageLike]) -> Float[Tensor, "B F"]:
        """Return the input of the head for each image in float32."""
        return torch.cat([self.engine.features(batch) for batch in self._batches(images)])

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Return features and logits of preprocessed images (the output of `model.preprocess`)."""
        return self.engine.forward(pixels)

    def check_classes(self) -> None:
        """Raise InputError if the model has no classes."""
        if not self.labels:
            raise InputError(
                "the model has no classes",
                hint="request features, or add classes with vitkit finetune or vitkit fewshot --save",
            )

    def top_predictions(self, probabilities: Float[Tensor, "Y"], *, top: int) -> list[Prediction]:
        """Return the `top` most probable classes. Ties keep the order of the classes."""
        values, indices = probabilities.sort(descending=True, stable=True)
        pairs = zip(indices[:top].tolist(), values[:top].tolist(), strict=True)
        return [Prediction(self.labels[index], value) for index, value in pairs]

    def _batches(self, images: ImageLike | Sequence[ImageLike]) -> Iterator[Float[Tensor, "B C H W"]]:
        inputs: Sequence[ImageLike] = images if isinstance(images, list | tuple) else [images]  # type: ignore[list-item]
        if not inputs:
            raise InputError("no images to predict", expected="one or more", got="none")
        for first in range(0, len(inputs), self.batch_size):
            yield torch.cat([self.model.preprocess(image) for image in inputs[first : first + self.batch_size]])
