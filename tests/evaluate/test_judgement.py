"""Judgement: the parts agree with each other, the JSON is strict, and nonsense is refused."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from vitkit.core.errors import DataError, InputError
from vitkit.evaluate.judgement import Judgement, judge


def a_case(images: int = 300, classes: int = 7) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    labels = torch.randint(0, classes - 1, (images,))  # the last class has no images
    logits = torch.randn(images, classes)
    logits[torch.arange(images), labels] += 1.5
    return logits, labels, tuple(f"class {label}" for label in range(classes))


def a_judgement() -> Judgement:
    logits, labels, classes = a_case()
    return judge(logits, labels, classes=classes)


def test_the_parts_agree_with_each_other() -> None:
    judgement = a_judgement()
    assert judgement.count == 300 == judgement.confusion.sum() == judgement.calibration.count.sum()
    assert judgement.top1 == pytest.approx(judgement.confusion.trace() / 300)
    assert judgement.top1 == pytest.approx((judgement.labels == judgement.predictions).mean())
    assert judgement.top1 < judgement.top5 < 1
    for name, share in (("top1", judgement.top1), ("top5", judgement.top5)):
        low, high = judgement.intervals[name]
        assert low < share < high
    recalled = sum(one.count * (one.recall or 0.0) for one in judgement.per_class)
    assert recalled / 300 == pytest.approx(judgement.top1)


def test_top5_counts_all_classes_where_there_are_fewer() -> None:
    assert judge(torch.randn(20, 3), torch.arange(20) % 3, classes=("a", "b", "c")).top5 == 1.0


def test_a_single_class_can_be_judged() -> None:
    judgement = judge(torch.randn(4, 1), torch.zeros(4, dtype=torch.int64), classes=("only",))
    assert (judgement.top1, judgement.ece, judgement.nll) == (1.0, 0.0, 0.0)


def test_mistakes_come_surest_first_with_both_probabilities() -> None:
    logits, labels, classes = a_case()
    probabilities = logits.double().softmax(dim=1)
    mistakes = judge(logits, labels, classes=classes).most_confident_mistakes(10)
    assert len(mistakes) == 10
    sureness = [mistake.probability for mistake in mistakes]
    assert sureness == sorted(sureness, reverse=True)
    for mistake in mistakes:
        assert mistake.label == labels[mistake.index] != mistake.predicted == logits[mistake.index].argmax()
        assert mistake.probability == pytest.approx(probabilities[mistake.index, mistake.predicted].item(), abs=1e-6)
        assert mistake.label_probability == pytest.approx(probabilities[mistake.index, mistake.label].item(), abs=1e-6)
    wrong = probabilities.amax(dim=1)[logits.argmax(dim=1) != labels]
    assert sureness[0] == pytest.approx(wrong.max().item(), abs=1e-6)


def test_a_model_without_mistakes_has_none_to_show() -> None:
    judgement = judge(torch.eye(3) * 9, torch.arange(3), classes=("a", "b", "c"))
    assert judgement.most_confident_mistakes(5) == []


def test_the_json_is_strict_and_keeps_its_keys() -> None:
    judgement = a_judgement()
    plain = judgement.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert {"top1", "top5", "count", "per_class", "ece", "nll", "intervals", "confusion", "calibration"} <= set(plain)
    assert plain["per_class"][6] == {  # type: ignore[index]
        "name": "class 6",
        "count": 0,
        "recall": None,
        "precision": 0.0,
        "f1": 0.0,
    }


def test_the_seed_draws_the_intervals_and_nothing_else() -> None:
    logits, labels, classes = a_case()
    first, second = (judge(logits, labels, classes=classes, seed=seed) for seed in (0, 1))
    assert first.intervals != second.intervals
    assert (first.top1, first.ece, first.nll) == (second.top1, second.ece, second.nll)
    np.testing.assert_array_equal(first.confusion, second.confusion)


def test_labels_of_a_narrower_integer_type_are_the_same_labels() -> None:
    logits, labels, classes = a_case()
    assert judge(logits, labels.int(), classes=classes).to_json() == judge(logits, labels, classes=classes).to_json()


def test_no_images_are_refused() -> None:
    with pytest.raises(DataError, match="no images"):
        judge(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), classes=("a", "b"))


def test_another_number_of_class_names_is_refused() -> None:
    with pytest.raises(InputError, match="expected 3 classes, got 2"):
        judge(torch.zeros(1, 2), torch.tensor([0]), classes=("a", "b", "c"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="not finite"):
        judge(torch.tensor([[0.0, bad]]), torch.tensor([0]), classes=("a", "b"))


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_that_names_no_class_is_refused(label: int) -> None:
    with pytest.raises(InputError, match=f"expected 0…1, got {label}"):
        judge(torch.zeros(2, 2), torch.tensor([0, label]), classes=("a", "b"))
