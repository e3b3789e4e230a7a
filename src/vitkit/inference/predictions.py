"""Predictions for images, in memory or read from a file."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

from vitkit.core.formatting import safe_text
from vitkit.core.result import Result, draw
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.verify import BadFile
from vitkit.inference.agreement import Agreement

if TYPE_CHECKING:
    import matplotlib.figure


class Prediction(NamedTuple):
    """A class and its probability."""

    label: str
    probability: float


@dataclass(frozen=True, kw_only=True, repr=False)
class ImagePrediction:
    """The most probable classes of one image and, if requested, its features; or the error that prevented them."""

    file: str
    predictions: tuple[Prediction, ...] = ()
    features: tuple[float, ...] = ()
    error: str | None = None

    @property
    def label(self) -> str | None:
        """Most probable class; None without predictions."""
        return self.predictions[0].label if self.predictions else None

    @property
    def probability(self) -> float | None:
        """Probability of the most probable class; None without predictions."""
        return self.predictions[0].probability if self.predictions else None

    def to_dict(self) -> dict[str, object]:
        """Return the prediction as JSON values.

        >>> ImagePrediction(file="cat.jpg", predictions=(Prediction("cat", 0.75),)).to_dict()
        {'file': 'cat.jpg', 'predictions': [{'label': 'cat', 'probability': 0.75}]}
        """
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        features = {"features": list(self.features)} if self.features else {}
        return {"file": self.file, "predictions": [each._asdict() for each in self.predictions], **features}

    def __repr__(self) -> str:
        values = [f"file={self.file!r}"]
        if self.predictions:
            values.append(f"label={self.label!r}, probability={self.probability:.4g}")
        if self.features:
            values.append(f"features=({len(self.features)} numbers)")
        if self.error is not None:
            values.append(f"error={self.error!r}")
        return f"ImagePrediction({', '.join(values)})"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Predictions(Result, Sequence[ImagePrediction]):
    """Predictions for images, in their order; a slice is again `Predictions`.

    With `path` they are read from that file when they are used. `skipped` are the unreadable images, `left_out` the
    files of directories that are no images, and `agreement` compares an approximate engine with fp32. `to_dict()`
    describes the whole; each item has its own.
    """

    rows: Sequence[ImagePrediction]
    path: Path | None = None
    skipped: tuple[BadFile, ...] = ()
    left_out: tuple[str, ...] = ()
    agreement: Agreement | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Model, counts and engine, and the request if there is a file."""
    images: ImageSource | None = None
    """The images, for `plot`."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ImagePrediction]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> ImagePrediction: ...
    @overload
    def __getitem__(self, index: slice) -> "Predictions": ...
    def __getitem__(self, index: int | slice) -> "ImagePrediction | Predictions":
        if not isinstance(index, slice):
            return self.rows[index]
        chosen = range(len(self))[index]
        rows = tuple(self.rows[position] for position in chosen)
        skipped = list_skipped(rows)
        metadata = {**self.metadata, **count_images(rows)}
        images = None if self.images is None else Subset(self.images, chosen)
        return replace(self, rows=rows, skipped=skipped, metadata=metadata, images=images)

    def to_dict(self) -> dict[str, object]:
        """Return model, counts and engine as JSON values; `[row.to_dict() for row in predictions]` has the rows."""
        return dict(self.metadata)

    def highlights(self) -> dict[str, object]:
        """Return the prediction of one image, or the most frequent classes of several."""
        if len(self) == 1 and self.rows[0].error is None:
            row = self.rows[0]
            return {"file": row.file} | ({"label": row.label, "probability": row.probability} if row.label else {})
        values: dict[str, object] = {"images": len(self)}
        if self.path is not None:
            values["path"] = str(self.path)
        else:
            counts = Counter(row.label for row in self.rows if row.label is not None)
            values |= {safe_text(str(label)): count for label, count in counts.most_common(5)}
        return values | ({"skipped": len(self.skipped)} if self.skipped else {})

    def plot(self, *, images: int = 12) -> "matplotlib.figure.Figure":
        """Draw the first images with their labels and probabilities."""
        return draw("plot_predictions", self[:images])


def count_images(rows: Iterable[ImagePrediction]) -> dict[str, object]:
    """Return the number of images, and those that could not be read, as JSON values."""
    images, bad = 0, []
    for row in rows:
        images += 1
        if row.error is not None:
            bad.append({"file": row.file, "reason": row.error})
    return {"images": images, "bad": bad}


def list_skipped(rows: Sequence[ImagePrediction]) -> tuple[BadFile, ...]:
    """Return the images that could not be read."""
    return tuple(BadFile(row.file, row.error) for row in rows if row.error is not None)
