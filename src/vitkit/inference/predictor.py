"""Predictions of a trained model for images in any form."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vitkit.core.errors import ConfigError, InputError, check_positive
from vitkit.core.result import to_json
from vitkit.core.shapes import Float, Tensor
from vitkit.data.dataset import ImageSource
from vitkit.data.decode import ImageLike
from vitkit.data.loader import CPU, ImageBatch, make_evaluation_loader
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.verify import inspect_image
from vitkit.inference.agreement import Agreement
from vitkit.inference.engine import Precision, check_precision, resolve_device
from vitkit.inference.image_inputs import list_images, open_images
from vitkit.inference.predictions import ImagePrediction, Prediction, Predictions, count_images, list_skipped
from vitkit.inference.select import select_engine
from vitkit.inference.top_classes import top_classes
from vitkit.typing import DataSource, ModelSource
from vitkit.weights.load import open_model

NOT_FINITE = "the output is not finite: the weights are damaged, or exceed the range of this precision"
CHANGED = "could not be read, but can be now: the file changed meanwhile"


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Outputs per image and engine settings."""

    top: int = 5
    features: bool = False
    precision: Precision = "fp32"
    merge: int = 0
    batch_size: int = 32
    workers: int = 0
    device: torch.device = CPU
    calibration: DataSource | None = None
    """Images on which an approximate engine is compared with fp32; by default the first of those to predict."""

    def __post_init__(self) -> None:
        check_positive("top", self.top)


class Predictor:
    """A trained model with the fastest engine for this machine. Images are preprocessed as in evaluation.

    For loops and services: it keeps the engine, which `vitkit.predict` selects for each call.

    Args:
        source: A run, an artifact, a weight file of any format, the name of a published model, or a model itself.
        batch_size: Images per batch.
        device: cpu, cuda, mps or auto.
        precision: Precision of the matrix products. `engine` is the engine that was selected, and `fallback_reason`
            explains why it is not a faster one (None if it is the fastest).
        merge: Number of tokens to merge in every layer.

    >>> import numpy as np, vitkit
    >>> model = vitkit.create("Ti/16", image_size=32, num_classes=2).eval()
    >>> predictor, photo = Predictor(model, device="cpu"), np.zeros((40, 30, 3), dtype=np.uint8)
    >>> predictor(photo)[0].predictions
    (Prediction(label='0', probability=0.5), Prediction(label='1', probability=0.5))
    >>> predictor.features([photo, photo]).shape
    torch.Size([2, 192])
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        batch_size: int = 32,
        device: torch.device | str = "auto",
        precision: Precision = "fp32",
        merge: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("the batch size must be at least 1", got=batch_size)
        self.precision = check_precision(precision)
        self.device, self.batch_size, self.merge = resolve_device(str(device)), batch_size, merge
        # Engines have copies in evaluation mode, so the model of a caller is neither moved nor changed.
        self.model = open_model(source, device=self.device)
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

    def describe_engine(self, agreement: Agreement | None = None) -> dict[str, object]:
        """Return the settings of the engine as JSON values; its name changes if compiling fails."""
        settings = {"precision": self.precision, "merge": self.merge, "engine": self.engine.name}
        return settings | ({"agreement": to_json(agreement)} if self.is_approximate else {})

    def __call__(self, images: ImageLike | Sequence[ImageLike], top: int = 5) -> Predictions:
        """Return the most probable classes of each image, in descending order.

        A directory, tar or parquet file means all images in it. An unreadable image has an `error`.
        """
        self.check_classes()
        options = PredictionOptions(top=top, precision=self.precision, merge=self.merge)
        return predict_source(self, open_images(self._list_images(images)), options)

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
            hint = "use predict(features=True), or add classes with finetune or fewshot(save=…)"
            raise InputError("the model has no classes", hint=hint)

    def top_predictions(self, probabilities: Float[Tensor, "B Y"], *, top: int) -> list[tuple[Prediction, ...]]:
        """Return the `top` most probable classes of each image. Ties keep the order of the classes."""
        labels = self.labels
        rows = top_classes(probabilities, count=top)
        return [tuple(Prediction(labels[index], value) for index, value in row) for row in rows]

    def _batches(self, images: ImageLike | Sequence[ImageLike]) -> Iterator[Float[Tensor, "B C H W"]]:
        inputs = self._list_images(images)
        for first in range(0, len(inputs), self.batch_size):
            yield self.model.preprocess(inputs[first : first + self.batch_size])

    @staticmethod
    def _list_images(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
        inputs = list_images(images)
        if not inputs:
            raise InputError("no images to predict", expected="one or more", got="none")
        return inputs


def predict_source(
    predictor: Predictor,
    source: ImageSource,
    options: PredictionOptions,
    *,
    agreement: Agreement | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> Predictions:
    """Return the predictions for all images of a source. `progress` is called with the images of each batch."""
    rows: list[ImagePrediction] = []
    for batch in predict_batches(predictor, source, options):
        rows += batch
        progress(len(batch))
    engine = predictor.describe_engine(agreement)
    metadata = {"model": predictor.model.name, **count_images(rows), **engine}
    return Predictions(
        rows=tuple(rows), skipped=list_skipped(rows), agreement=agreement, metadata=metadata, images=source
    )


def predict_batches(
    predictor: Predictor, source: ImageSource, options: PredictionOptions
) -> Iterator[list[ImagePrediction]]:
    """Yield the predictions for a source batch by batch; only a few batches are in memory."""
    batches = make_evaluation_loader(
        source,
        preprocessing=predictor.preprocessing,
        batch_size=predictor.batch_size,
        workers=options.workers if len(source) > predictor.batch_size else 0,
        device=predictor.device,
        lenient=True,
    )
    first, channels = 0, predictor.preprocessing.channels
    with batches:
        for batch in batches:
            probabilities, features = compute_outputs(predictor, batch, options)
            top = None if probabilities is None else predictor.top_predictions(probabilities, top=options.top)
            rows = []
            for row, is_readable in enumerate(batch.labels.tolist()):
                name, outputs = source.name(first + row), (probabilities, features)
                if not is_readable:
                    _, reason = inspect_image(source, first + row, channels=channels)
                    rows.append(ImagePrediction(file=name, error=reason or CHANGED))
                elif not all(output[row].isfinite().all() for output in outputs if output is not None):
                    rows.append(ImagePrediction(file=name, error=NOT_FINITE))
                else:
                    predictions = () if top is None else top[row]
                    values = () if features is None else features[row].tolist()
                    rows.append(ImagePrediction(file=name, predictions=predictions, features=tuple(values)))
            yield rows
            first += len(rows)


def compute_outputs(
    predictor: Predictor, batch: ImageBatch, options: PredictionOptions
) -> tuple[Float[Tensor, "B Y"] | None, Float[Tensor, "B F"] | None]:
    """Return probabilities, if the model has classes, and features, if requested."""
    features, logits = predictor.forward(predictor.preprocessing.normalize(batch.pixels.to(predictor.device)))
    probabilities = logits.softmax(dim=1) if predictor.labels else None
    return probabilities, features if options.features else None
