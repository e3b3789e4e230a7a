"""Metrics: hand-worked cases, and scikit-learn's and scipy's answers to the same questions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from vitkit.evaluation.metrics import (
    Confusion,
    calibration,
    class_metrics,
    confidences,
    count_confusion,
    negative_log_likelihood,
    target_ranks,
    wilson_interval,
)

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 0])
PREDICTIONS = torch.tensor([0, 1, 0, 1, 2, 2, 2, 0, 2, 3])


def random_logits(images: int, num_classes: int) -> Tensor:
    return torch.randn(images, num_classes) * 3


@given(images=st.integers(1, 30), num_classes=st.integers(1, 8), k=st.integers(1, 9))
def test_top_k_equals_a_stable_sort(images: int, num_classes: int, k: int) -> None:
    logits = torch.randint(0, 4, (images, num_classes)).float()  # few values: many ties
    labels = torch.randint(0, num_classes, (images,))
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :k]
    expected = [int(label) in row for label, row in zip(labels, order, strict=True)]
    assert (target_ranks(logits, labels) < k).tolist() == expected


def test_zero_logits_are_correct_by_chance() -> None:
    labels = torch.arange(100) % 10
    assert (target_ranks(torch.zeros(100, 10), labels) < 1).float().mean() == pytest.approx(0.1)
    assert (target_ranks(torch.zeros(100, 10), labels) < 5).float().mean() == pytest.approx(0.5)


def test_confusion_matrix_rows_are_targets() -> None:
    expected = [[2, 1, 0, 1], [0, 1, 1, 0], [1, 0, 3, 0], [0, 0, 0, 0]]
    assert count_confusion(LABELS.numpy(), PREDICTIONS.numpy(), num_classes=4).matrix(np.arange(4)).tolist() == expected


def test_class_scores_equal_scikit_learn() -> None:
    # precision_recall_fscore_support(LABELS, PREDICTIONS, labels=range(4), zero_division=nan) of scikit-learn 1.9.1
    metrics = class_metrics(count_confusion(LABELS.numpy(), PREDICTIONS.numpy(), num_classes=4), "abcd")
    assert [each.count for each in metrics] == [4, 2, 4, 0]
    assert metrics[3].recall is None
    np.testing.assert_allclose([each.recall for each in metrics[:3]], [0.5, 0.5, 0.75])
    np.testing.assert_allclose([each.precision for each in metrics], [2 / 3, 0.5, 0.75, 0.0])
    np.testing.assert_allclose([each.f1 for each in metrics], [4 / 7, 0.5, 0.75, 0.0])


def test_absent_class_has_no_scores() -> None:
    absent = class_metrics(Confusion(*np.array([[0], [0], [3]])), "ab")[1]
    assert (absent.recall, absent.precision, absent.f1) == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nll_and_confidence_equal_softmax(dtype: torch.dtype) -> None:
    logits, labels = random_logits(50, 7).to(dtype), torch.randint(0, 7, (50,))
    expected = special.log_softmax(logits.double().numpy(), axis=1)
    surprise = negative_log_likelihood(logits, labels)
    assert surprise.dtype == torch.float64
    # The exponentials are in single precision unless the logits are double.
    np.testing.assert_allclose(surprise, -expected[np.arange(50), labels], rtol=0, atol=1e-6)
    np.testing.assert_allclose(confidences(logits), np.exp(expected.max(axis=1)), rtol=0, atol=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, 0.0], [-1e30, 0.0]])
    assert confidences(logits).tolist() == [1.0, 1.0]
    assert negative_log_likelihood(logits, torch.tensor([0, 1])).tolist() == [0.0, 0.0]


def test_calibration_error_by_hand() -> None:
    # Bin (12/15, 13/15]: confidence 0.85, accuracy 0.5. Bin (8/15, 9/15]: confidence 0.55, accuracy 1.
    result = calibration(torch.tensor([0.85, 0.85, 0.55, 0.55]).double(), torch.tensor([True, False, True, True]))
    assert result.error == pytest.approx(0.5 * 0.35 + 0.5 * 0.45)
    assert np.flatnonzero(result.count).tolist() == [8, 12]
    assert result.confidence[8] == pytest.approx(0.55)
    assert result.accuracy[12] == 0.5
    assert np.isnan(result.accuracy[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", range(1, 16))
def test_bins_are_closed_above(number: int, dtype: torch.dtype) -> None:
    edge = torch.tensor([number / 15], dtype=dtype)
    assert calibration(edge, torch.tensor([True])).count.argmax() == number - 1


def test_bins_hold_every_image_once() -> None:
    assert calibration(torch.tensor([0.0, 1.0]), torch.tensor([True, True])).count.tolist() == [1] + [0] * 13 + [1]


def test_calibrated_model_has_no_error() -> None:
    assert calibration(torch.full([8], 0.75), torch.arange(8) < 6).error == 0


@pytest.mark.parametrize(("correct", "total"), [(0, 7), (1, 3), (99, 100), (700, 997), (20, 20)])
def test_wilson_interval_equals_scipy(correct: int, total: int) -> None:
    expected = stats.binomtest(correct, total).proportion_ci(method="wilson")
    assert wilson_interval(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_higher_level_gives_a_wider_interval() -> None:
    narrow, wide = (wilson_interval(400, 500, level=level) for level in (0.5, 0.99))
    assert wide[0] < narrow[0] < 0.8 < narrow[1] < wide[1]


@pytest.mark.parametrize("correct", [0, 100])
def test_interval_of_constant_correctness_has_a_width(correct: int) -> None:
    low, high = wilson_interval(correct, 100)
    assert (low, high) == pytest.approx((0.963, 1.0) if correct else (0.0, 0.037), abs=5e-4)


@pytest.mark.parametrize(
    ("probability", "total", "expected"), [(0.99, 100, 0.921), (0.5, 100, 0.943), (0.9, 50, 0.970)]
)
def test_intervals_cover_the_nominal_level(probability: float, total: int, expected: float) -> None:
    """The exact coverage: the probability of all counts whose interval holds the true proportion."""
    counts = np.arange(total + 1)
    intervals = [wilson_interval(int(count), total) for count in counts]
    covered = [low <= probability <= high for low, high in intervals]
    assert stats.binom.pmf(counts, total, probability)[covered].sum() == pytest.approx(expected, abs=1e-3)
