"""Several datasets as one, whose classes are those of all of them."""

from collections.abc import Sequence

import numpy as np

from vitkit.core.errors import DataError
from vitkit.data.dataset import ConcatSource, Dataset, ImageSource, Subset


class AddedSource(Subset):
    """A source with the classes of the joined dataset and names of its own."""

    def __init__(self, source: ImageSource, *, classes: tuple[str, ...], prefix: str) -> None:
        super().__init__(source, range(len(source)))
        label_of = {name: label for label, name in enumerate(classes)}
        new_labels = np.array([label_of[name] for name in source.classes], dtype=np.int64)
        self.classes, self.labels, self.prefix = classes, new_labels[source.labels], prefix

    def name(self, index: int) -> str:
        """Return the name of the image below the prefix, so that no two datasets share a name."""
        return self.prefix + super().name(index)


def join_sources(sources: Sequence[ImageSource]) -> ImageSource:
    """Return the images of several sources with the classes of all of them, named as `join_datasets` says."""
    classes = tuple(dict.fromkeys(name for source in sources for name in source.classes))
    return ConcatSource(
        [
            AddedSource(source, classes=classes, prefix=f"+{number}/" if number else "")
            for number, source in enumerate(sources)
        ]
    )


def join_datasets(datasets: Sequence[Dataset]) -> Dataset:
    """Return the first dataset with the images of the others added to the same splits.

    Classes of equal name are one class. Images of the first dataset keep their names, and those of the n-th added one
    are named +n/NAME.

    >>> from vitkit.data.layouts.arrays import open_digits
    >>> joined = join_datasets([open_digits(), open_digits()])
    >>> len(joined.classes), len(joined.splits["train"]), joined.splits["train"].name(1438)
    (10, 2876, '+1/digits/000002')
    """
    first, *others = datasets
    for other in others:
        if not other.classes or not first.classes:
            path = first.path if not first.classes else other.path
            raise DataError(f"{path} has no labels, so it cannot be joined with another dataset")
        if other.splits.keys() != first.splits.keys():
            raise DataError(
                f"{other.path} cannot be added to {first.path}: their splits differ",
                expected=", ".join(first.splits),
                got=", ".join(other.splits),
                hint="divide both in the same way, such as train and test",
            )
    splits = {split: join_sources([dataset.splits[split] for dataset in datasets]) for split in first.splits}
    left_out = [*first.left_out]
    left_out += [f"+{number}/{name}" for number, other in enumerate(others, start=1) for name in other.left_out]
    return Dataset(path=first.path, splits=splits, left_out=tuple(left_out))
