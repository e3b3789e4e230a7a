"""Nothing goes in, the hand-written digits that ship with the package come out."""

from importlib.resources import files

import numpy as np

from vitkit.data.source import DataSet
from vitkit.data.sources.base import ArraySource, numbered
from vitkit.data.split import split


def digits() -> DataSet:
    """1,797 hand-written digits of 8 × 8 pixels, of which a fixed fifth is the test split.

    E. Alpaydin and C. Kaynak, 1998; see digits.README.md.

    >>> {name: len(source) for name, source in digits().splits.items()}
    {'train': 1438, 'test': 359}
    >>> digits().splits["test"].content(0).shape
    (8, 8)
    """
    with (files("vitkit.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        pixels, labels = arrays["images"], arrays["labels"]
    source = ArraySource(
        np.round(pixels * (255 / 16)).astype(np.uint8),  # stored as 0…16
        kind="digits, embedded",
        classes=tuple("0123456789"),
        labels=labels.astype(np.int64),
        names=numbered("digits", len(labels)),
    )
    train, test = split(source, share=0.2)
    return DataSet(place="digits", splits={"train": train, "test": test})
