"""A predictor and a source of any size go in, an answer for each image comes out, in order and a batch at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Tensor, pair
from vitkit.data.decode import decode
from vitkit.data.loader import Batch, readable_batches
from vitkit.data.source import Source, Subset
from vitkit.data.transforms import Preprocessing
from vitkit.data.verify import read_image
from vitkit.predict.predictor import Prediction, Predictor

NO_NUMBER = "the model's answer is not a number: its weights are damaged, or too large for this precision"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is said of one image: its likeliest classes, its features if they were asked for, or why it has neither."""

    file: str
    predictions: tuple[Prediction, ...] = ()
    features: tuple[float, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """As the command prints it.

        >>> Answer(file="cat.jpg", predictions=(Prediction("cat", 0.75),)).to_json()
        {'file': 'cat.jpg', 'predictions': [{'label': 'cat', 'probability': 0.75}]}
        """
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        said = [{"label": each.label, "probability": each.probability} for each in self.predictions]
        features = {"features": list(self.features)} if self.features else {}
        return {"file": self.file, "predictions": said, **features}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of every image: how many classes, and whether its features too."""

    top: int = 5
    features: bool = False


def answers(predictor: Predictor, source: Source, question: Question, *, workers: int = 0) -> Iterator[list[Answer]]:
    """The answers for a source, batch by batch: memory holds a few batches, whatever the source holds."""
    batches = readable_batches(
        source,
        preprocessing=predictor.preprocessing,
        batch_size=predictor.batch_size,
        workers=workers,
        device=predictor.device,
    )
    first = 0
    with batches:
        for batch in batches:
            yield _answers(predictor, source, batch, first=first, question=question)
            first += len(batch.labels)


def _answers(predictor: Predictor, source: Source, batch: Batch, *, first: int, question: Question) -> list[Answer]:
    probabilities, features = computed(predictor, batch, question)
    found = []
    for place, readable in enumerate(batch.labels.tolist()):
        name = source.name(first + place)
        if not readable:
            found.append(Answer(file=name, error=why_unreadable(source, first + place, predictor=predictor)))
            continue
        rows = [row[place] for row in (probabilities, features) if row is not None]
        if not all(row.isfinite().all() for row in rows):
            found.append(Answer(file=name, error=NO_NUMBER))
            continue
        said = () if probabilities is None else tuple(predictor.likeliest(probabilities[place], top=question.top))
        numbers = () if features is None else tuple(features[place].tolist())
        found.append(Answer(file=name, predictions=said, features=numbers))
    return found


def computed(
    predictor: Predictor, batch: Batch, question: Question
) -> tuple[Float[Tensor, "B Y"] | None, Float[Tensor, "B F"] | None]:
    """Probabilities, where the model has classes, and features, where they are asked for."""
    features, logits = predictor.answer(predictor.preprocessing.normalise(batch.pixels.to(predictor.device)))
    probabilities = logits.softmax(dim=1) if predictor.labels else None
    return probabilities, features if question.features else None


def extent(predictor: Predictor, question: Question) -> tuple[int, int]:
    """How many classes, and how many features, the answer for an image has."""
    classes = min(question.top, len(predictor.labels))
    if not question.features:
        return classes, 0
    how = predictor.preprocessing
    blank = torch.zeros(1, how.channels, *pair(how.image_size), device=predictor.device)
    return classes, predictor.engine.features(blank).shape[1]


def sample(
    source: Source, preprocessing: Preprocessing, *, images: int = 64, batch_size: int = 16, looked_at: int = 1024
) -> Iterator[Float[Tensor, "B C H W"]]:
    """The first images of a source that can be read, prepared, batch by batch; after so many in vain it gives up."""
    first = Subset(source, range(min(looked_at, len(source))))
    with readable_batches(first, preprocessing=preprocessing, batch_size=min(batch_size, images)) as batches:
        for batch in batches:
            readable = preprocessing.normalise(batch.pixels)[batch.labels.bool()][:images]
            if len(readable):
                yield readable
            images -= len(readable)
            if images == 0:
                return


def why_unreadable(source: Source, index: int, *, predictor: Predictor) -> str:
    """The reason that an image was left out for, found by reading it once more."""
    try:
        decode(read_image(source, index), channels=predictor.preprocessing.channels)
    except DataError as error:
        return str(error)
    return "could not be read, and can be now: it changed meanwhile"
