"""Subsets of the training images by fraction and seed."""

import itertools

from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.arrays import open_digits
from vitkit.training.config import DataConfig
from vitkit.training.data import split_dataset, use_fraction


def names(source: ImageSource | None) -> set[str]:
    assert source is not None
    return {source.name(index) for index in range(len(source))}


def test_fractions_of_one_seed_are_nested_and_stratified() -> None:
    data = split_dataset(DataConfig(path="digits"), open_digits(), [])
    parts = [use_fraction(data, fraction=fraction, seed=1, with_val=True) for fraction in (0.1, 0.3, 1.0)]
    for smaller, larger in itertools.pairwise(parts):
        assert names(smaller.train) < names(larger.train)
        assert names(smaller.val) < names(larger.val)
    assert set(parts[0].train.labels) == set(range(10))
    assert not names(parts[1].train) & names(parts[1].val)
    assert names(parts[2].test) == names(data.test)


def test_another_seed_chooses_other_images() -> None:
    data = split_dataset(DataConfig(path="digits"), open_digits(), [])
    one, other = (use_fraction(data, fraction=0.1, seed=seed, with_val=False) for seed in (1, 2))
    assert names(one.train) != names(other.train)
    assert names(one.val) == names(data.val)
