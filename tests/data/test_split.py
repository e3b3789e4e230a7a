"""Stratified splits by hashes of names."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.core.errors import ConfigError
from vitkit.data.dataset import ImageSource, hold_out
from vitkit.data.layouts.base import ArraySource


def source_of(names: list[str], labels: list[int]) -> ArraySource:
    images = np.zeros((len(names), 1, 1), np.uint8)
    return ArraySource(
        images, layout="test", classes=tuple("abcdef"), labels=np.array(labels, dtype=np.int64), names=names
    )


def names_of(source: ImageSource) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=5), share=st.floats(0.01, 0.9))
def test_split_is_stratified(counts: list[int], share: float) -> None:
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    names = [f"{label}/{i}.png" for i, label in enumerate(labels)]
    train, held = hold_out(source_of(names, labels), fraction=share)
    assert sorted(names_of(train) + names_of(held)) == sorted(names)
    got = Counter(held.labels.tolist())
    for label, count in enumerate(counts):
        assert got[label] == (min(max(round(share * count), 1), count - 1))


def test_parts_keep_order_and_labels() -> None:
    names = [f"{i:03d}" for i in range(60)]
    whole = source_of(names, [i % 3 for i in range(60)])
    for part in hold_out(whole, fraction=0.3):
        assert names_of(part) == sorted(names_of(part))
        assert part.labels.tolist() == [int(name) % 3 for name in names_of(part)]


def test_fraction_may_be_zero_but_not_one() -> None:
    whole = source_of(["a", "b"], [0, 0])
    assert [len(part) for part in hold_out(whole, fraction=0)] == [2, 0]
    with pytest.raises(ConfigError, match="fraction"):
        hold_out(whole, fraction=1)


def test_split_does_not_depend_on_order() -> None:
    names = [f"{i}.png" for i in range(50)]
    held = hold_out(source_of(names, [0] * 50), fraction=0.2)[1]
    turned = hold_out(source_of(names[::-1], [0] * 50), fraction=0.2)[1]
    assert set(names_of(held)) == set(names_of(turned))


@given(added=st.text(min_size=1, max_size=8).filter(lambda text: not text.isdigit()))
def test_added_image_moves_at_most_two_others(added: str) -> None:
    names = [str(i) for i in range(97)]
    before = set(names_of(hold_out(source_of(names, [0] * 97), fraction=0.1)[1]))
    after = set(names_of(hold_out(source_of([*names, added], [0] * 98), fraction=0.1)[1]))
    assert len((before ^ after) - {added}) <= 2


def test_split_is_reproducible_and_salted() -> None:
    whole = source_of([f"{i}.png" for i in range(20)], [0] * 20)
    assert names_of(hold_out(whole, fraction=0.2)[1]) != names_of(hold_out(whole, fraction=0.2, salt="x")[1])
    assert names_of(hold_out(whole, fraction=0.2)[1]) == ["0.png", "6.png", "8.png", "18.png"]  # by sha256sum


class CountingLabels(np.ndarray):
    """Labels that count the comparisons of all of them with one value."""

    scans = 0

    def __eq__(self, other: object) -> object:
        CountingLabels.scans += 1
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def test_split_scans_labels_once_and_not_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingLabels, "scans", 0)
    whole = source_of([f"{number:04}" for number in range(600)], [number % 200 for number in range(600)])
    whole.labels = whole.labels.view(CountingLabels)
    train, held = hold_out(whole, fraction=0.2)
    assert (len(train), len(held)) == (400, 200)
    assert CountingLabels.scans == 0
