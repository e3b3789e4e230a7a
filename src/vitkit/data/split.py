"""A source goes in, parts of it come out: class by class, and the same for the same names on every machine."""

import hashlib

import numpy as np

from vitkit.core.errors import ConfigError, check_share
from vitkit.data.source import Source, Subset


def split(source: Source, *, share: int | float = 0.1, salt: str = "") -> tuple[Source, Source]:
    """The greater part, and a part held out that has this share of every class.

    Within a class the images with the lowest SHA-256 of salt and name are held out: at least one where the class has
    two, and never all. An image that is added or removed moves hardly any other from one part to the other. Both parts
    keep the order of the source.

    >>> from vitkit.data.sources.embedded import digits
    >>> train, val = split(digits().splits["train"], share=0.1)
    >>> len(train) + len(val), bool(set(val.labels) == set(range(10)))
    (1438, True)
    """
    check_share("share", share)
    held = np.zeros(len(source), dtype=np.bool_)
    for label in np.unique(source.labels):
        members = np.flatnonzero(source.labels == label).tolist()
        count = round(share * len(members))
        count = min(max(count, 1), len(members) - 1) if share > 0 else 0
        held[sorted(members, key=lambda index: _digest(salt + source.name(index)))[:count]] = True
    return Subset(source, np.flatnonzero(~held).tolist()), Subset(source, np.flatnonzero(held).tolist())


def part(source: Source, *, share: int | float, salt: str = "") -> Source:
    """This share of every class, at least one image of each, in the order of the source.

    Within a class the images with the lowest SHA-256 of salt and name are taken: a smaller share is a part of a larger.

    >>> from vitkit.data.sources.embedded import digits
    >>> labels = part(digits().splits["train"], share=0.01).labels
    >>> len(labels), len(set(labels))
    (10, 10)
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError("this is no share of the images", expected="0 < share ≤ 1", got=share)
    taken: list[int] = []
    for label in np.unique(source.labels):
        members = np.flatnonzero(source.labels == label).tolist()
        count = max(round(share * len(members)), 1)
        taken += sorted(members, key=lambda index: _digest(salt + source.name(index)))[:count]
    return Subset(source, sorted(taken))


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
