"""Classes of ImageNet-1k in their usual order: WordNet ids and names."""

from collections.abc import Sequence
from functools import cache
from importlib import resources

LANDMARKS = {0: "tench", 1: "goldfish", 207: "golden retriever", 779: "school bus", 999: "toilet"}
"""Class names by which the usual order is recognized."""


@cache
def _read_classes() -> tuple[tuple[str, str], ...]:
    lines = resources.files(__package__).joinpath("imagenet_classes.txt").read_text("utf-8").splitlines()
    rows = (line.partition(" ") for line in lines if not line.startswith("#"))
    return tuple((wnid, name) for wnid, _, name in rows)


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the WordNet ids of the classes."""
    return tuple(wnid for wnid, _ in _read_classes())


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return the names of the classes, each of which is unique.

    >>> imagenet_names()[134], imagenet_names()[517]
    ('crane (bird)', 'crane (machine)')
    """
    return tuple(name for _, name in _read_classes())


def has_imagenet_names(labels: Sequence[str]) -> bool:
    """Return whether these are names of the 1,000 classes in their usual order, with spaces or underscores."""
    is_complete = len(labels) == len(_read_classes())
    return is_complete and all(word in labels[index].lower().replace("_", " ") for index, word in LANDMARKS.items())
