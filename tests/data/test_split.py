"""The automatic split: the right share of each class, stable by name."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.core.errors import ConfigError
from vitkit.data.source import Source
from vitkit.data.sources.base import ArraySource
from vitkit.data.split import split


def source_of(names: list[str], labels: list[int]) -> ArraySource:
    images = np.zeros((len(names), 1, 1), np.uint8)
    return ArraySource(images, kind="test", classes=tuple("abcdef"), labels=labels, names=names)


def names_of(source: Source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=5), share=st.floats(0.01, 0.9))
def test_each_class_gives_its_share_but_never_all_of_it(counts: list[int], share: float) -> None:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    names = [f"{label}/{i}.png" for i, label in enumerate(labels)]
    train, held = split(source_of(names, labels), share=share)
    assert sorted(names_of(train) + names_of(held)) == sorted(names)
    got = Counter(held.labels.tolist())
    for label, count in enumerate(counts):
        assert got[label] == (min(max(round(share * count), 1), count - 1))


def test_both_parts_keep_the_order_and_the_labels_of_the_source() -> None:
    names = [f"{i:03d}" for i in range(60)]
    whole = source_of(names, [i % 3 for i in range(60)])
    for part in split(whole, share=0.3):
        assert names_of(part) == sorted(names_of(part))
        assert part.labels.tolist() == [int(name) % 3 for name in names_of(part)]


def test_a_share_of_zero_holds_nothing_out_and_a_share_of_one_is_refused() -> None:
    whole = source_of(["a", "b"], [0, 0])
    assert [len(part) for part in split(whole, share=0)] == [2, 0]
    with pytest.raises(ConfigError, match="share"):
        split(whole, share=1)


def test_the_split_does_not_depend_on_the_order_of_the_source() -> None:
    names = [f"{i}.png" for i in range(50)]
    held = split(source_of(names, [0] * 50), share=0.2)[1]
    turned = split(source_of(names[::-1], [0] * 50), share=0.2)[1]
    assert set(names_of(held)) == set(names_of(turned))


@given(added=st.text(min_size=1, max_size=8).filter(lambda text: not text.isdigit()))
def test_an_added_image_moves_at_most_two_others(added: str) -> None:
    names = [str(i) for i in range(97)]
    before = set(names_of(split(source_of(names, [0] * 97), share=0.1)[1]))
    after = set(names_of(split(source_of([*names, added], [0] * 98), share=0.1)[1]))
    assert len((before ^ after) - {added}) <= 2


def test_another_salt_is_another_split_and_the_split_is_the_same_for_ever() -> None:
    whole = source_of([f"{i}.png" for i in range(20)], [0] * 20)
    assert names_of(split(whole, share=0.2)[1]) != names_of(split(whole, share=0.2, salt="x")[1])
    assert names_of(split(whole, share=0.2)[1]) == ["0.png", "6.png", "8.png", "18.png"]  # by sha256sum
