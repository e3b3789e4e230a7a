"""The highest classes of a batch equal those of a stable sort of each row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitkit.inference.top_classes import ClassScore, top_classes

SCORES = st.sampled_from([0.0, -0.0, 0.25, 1.0, math.inf, -math.inf])


def sort_row(scores: torch.Tensor, *, count: int) -> list[ClassScore]:
    """Sort all classes of one row."""
    order = scores.argsort(descending=True, stable=True).tolist()
    return [(index, float(scores[index])) for index in order[:count]]


def rows_of_scores(columns: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(SCORES, min_size=columns, max_size=columns), min_size=1, max_size=6)


@given(st.integers(1, 8).flatmap(rows_of_scores), st.integers(1, 10))
def test_top_classes_equal_a_stable_sort(rows: list[list[float]], count: int) -> None:
    scores = torch.tensor(rows)
    assert top_classes(scores, count=count) == [sort_row(row, count=count) for row in scores]


@pytest.mark.parametrize("levels", [50, 5_000, 500_000])
def test_top_classes_of_many_equal_a_stable_sort(levels: int) -> None:
    """Most rows have ties for the last place at 50 levels, some at 5,000, and hardly any at 500,000."""
    scores = torch.randint(levels, [8, 5_000], generator=torch.Generator().manual_seed(0)) / levels
    assert top_classes(scores, count=5) == [sort_row(row, count=5) for row in scores]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([math.nan, 1.0, 2.0], [(2, 2.0)]),
        ([math.nan, 1.0, 1.0], [(1, 1.0), (2, 1.0)]),
        ([math.nan, math.nan, 1.0], []),
        ([math.nan] * 3, []),
    ],
)
def test_nan_is_not_among_the_top_classes(scores: list[float], expected: list[ClassScore]) -> None:
    others = [0.0, 2.0, 1.0]
    assert top_classes(torch.tensor([others, scores]), count=2) == [[(1, 2.0), (2, 1.0)], expected]


def test_only_rows_with_ties_for_the_last_place_are_searched_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = torch.Tensor.sort

    def sort(tensor: torch.Tensor, **options: object) -> object:
        sizes.append(tensor.numel())
        return original(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "sort", sort)
    scores = torch.arange(20_000).repeat(4, 1) / 20_000
    scores[2, -6:] = 1.0
    assert [[index for index, _ in row] for row in top_classes(scores, count=5)] == [
        [19_999, 19_998, 19_997, 19_996, 19_995] if row != 2 else [19_994, 19_995, 19_996, 19_997, 19_998]
        for row in range(4)
    ]
    assert sizes == [4 * 5, 4 * 5, 6]
