"""Evaluation results: consistent metrics, strict JSON, rejected inputs."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from vitkit.core.errors import DataError, InputError
from vitkit.evaluation.evaluation import EvaluationResult, ImageMetrics, evaluate_logits


def a_case(images: int = 300, num_classes: int = 7) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    labels = torch.randint(0, num_classes - 1, (images,))  # the last class has no images
    logits = torch.randn(images, num_classes)
    logits[torch.arange(images), labels] += 1.5
    return logits, labels, tuple(f"class {label}" for label in range(num_classes))


def an_evaluation() -> EvaluationResult:
    logits, labels, classes = a_case()
    return evaluate_logits(logits, labels, labels=classes)


def test_metrics_are_consistent() -> None:
    evaluation = an_evaluation()
    assert evaluation.count == 300 == evaluation.confusion_matrix().sum() == evaluation.calibration.count.sum()
    assert evaluation.top1 == pytest.approx(evaluation.confusion_matrix().trace() / 300)
    assert evaluation.top1 == pytest.approx((evaluation.targets == evaluation.predictions).mean())
    assert evaluation.top1 < evaluation.top5 < 1
    for name, share in (("top1", evaluation.top1), ("top5", evaluation.top5)):
        low, high = evaluation.intervals[name]
        assert low < share < high
    recalled = sum(one.count * (one.recall or 0.0) for one in evaluation.per_class)
    assert recalled / 300 == pytest.approx(evaluation.top1)


def test_top5_is_one_with_fewer_than_five_classes() -> None:
    assert evaluate_logits(torch.randn(20, 3), torch.arange(20) % 3, labels=("a", "b", "c")).top5 == 1.0


def test_batches_equal_all_logits_at_once() -> None:
    logits, labels, classes = a_case()
    whole, images = evaluate_logits(logits, labels, labels=classes), ImageMetrics(classes, count=len(labels))
    for batch in zip(logits.split(7), labels.split(7), strict=True):
        images.add(*batch)
    parts = images.result()
    for name in ("top1", "top5", "ece", "nll"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-12)
    assert parts.to_dict().keys() == whole.to_dict().keys()
    assert parts.to_dict()["confusion"] == whole.to_dict()["confusion"]
    assert parts.per_class == whole.per_class
    assert parts.probabilities is None


@pytest.mark.parametrize("keep_probabilities", [False, True])
def test_logits_are_held_only_as_probabilities_to_keep(keep_probabilities: bool) -> None:
    """Counted bytes: what is held per image does not grow with the number of classes."""
    num_classes = 1000
    images = ImageMetrics(tuple(map(str, range(num_classes))), count=200, keep_probabilities=keep_probabilities)
    for _ in range(4):
        images.add(torch.randn(50, num_classes), torch.randint(num_classes, (50,)))
    held = sum(column.untyped_storage().nbytes() for column in images._columns.values()) / 200
    assert held == 5 * 8 + (4 * num_classes if keep_probabilities else 0)


def test_missing_images_are_reported() -> None:
    images = ImageMetrics(("a", "b"), count=3)
    images.add(torch.zeros(2, 2), torch.tensor([0, 1]))
    with pytest.raises(InputError, match=r"not all images were added .*expected 3, got 2"):
        images.result()


def test_confusion_holds_only_pairs_that_occur() -> None:
    images = ImageMetrics(tuple(map(str, range(10_000))), count=20)
    images.add(torch.randn(20, 10_000), torch.arange(20))
    confusion = images.result().confusion
    assert len(confusion.row) == len(confusion.column) == len(confusion.count) <= 20
    assert confusion.matrix(np.array([3, 7, 11])).sum(axis=1).max() <= 1


def test_single_class_is_evaluated() -> None:
    evaluation = evaluate_logits(torch.randn(4, 1), torch.zeros(4, dtype=torch.int64), labels=("only",))
    assert (evaluation.top1, evaluation.ece, evaluation.nll) == (1.0, 0.0, 0.0)


def test_mistakes_are_sorted_by_probability() -> None:
    logits, labels, classes = a_case()
    probabilities = logits.double().softmax(dim=1)
    mistakes = evaluate_logits(logits, labels, labels=classes).mistakes(10)
    assert len(mistakes) == 10
    sureness = [mistake.probability for mistake in mistakes]
    assert sureness == sorted(sureness, reverse=True)
    for mistake in mistakes:
        assert mistake.target == labels[mistake.index] != mistake.predicted == logits[mistake.index].argmax()
        assert mistake.probability == pytest.approx(probabilities[mistake.index, mistake.predicted].item(), abs=1e-6)
        assert mistake.target_probability == pytest.approx(
            probabilities[mistake.index, mistake.target].item(), abs=1e-6
        )
    wrong = probabilities.amax(dim=1)[logits.argmax(dim=1) != labels]
    assert sureness[0] == pytest.approx(wrong.max().item(), abs=1e-6)


def test_perfect_model_has_no_mistakes() -> None:
    evaluation = evaluate_logits(torch.eye(3) * 9, torch.arange(3), labels=("a", "b", "c"))
    assert evaluation.mistakes(5) == []


def test_json_is_strict_and_keeps_its_keys() -> None:
    evaluation = an_evaluation()
    plain = evaluation.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert {"top1", "top5", "count", "per_class", "ece", "nll", "intervals", "confusion", "calibration"} <= set(plain)
    assert plain["per_class"][6] == {  # type: ignore[index]
        "name": "class 6",
        "count": 0,
        "recall": None,
        "precision": 0.0,
        "f1": 0.0,
    }


def test_json_of_many_classes_is_small() -> None:
    """It was 9 MB for 1,000 classes, with a dense confusion matrix."""
    logits, labels, classes = a_case(images=500, num_classes=1000)
    assert len(json.dumps(evaluate_logits(logits, labels, labels=classes).to_dict())) < 200_000


def test_targets_may_be_of_any_integer_type() -> None:
    logits, labels, classes = a_case()
    assert (
        evaluate_logits(logits, labels.int(), labels=classes).to_dict()
        == evaluate_logits(logits, labels, labels=classes).to_dict()
    )


def test_empty_split_is_rejected() -> None:
    with pytest.raises(DataError, match="no images"):
        evaluate_logits(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), labels=("a", "b"))


def test_wrong_number_of_labels_is_rejected() -> None:
    with pytest.raises(InputError, match="expected 3 classes, got 2"):
        evaluate_logits(torch.zeros(1, 2), torch.tensor([0]), labels=("a", "b", "c"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_rejected(bad: float) -> None:
    with pytest.raises(InputError, match="not finite"):
        evaluate_logits(torch.tensor([[0.0, bad]]), torch.tensor([0]), labels=("a", "b"))


@pytest.mark.parametrize("label", [-1, 2])
def test_target_out_of_range_is_rejected(label: int) -> None:
    with pytest.raises(InputError, match=f"expected 0…1, got {label}"):
        evaluate_logits(torch.zeros(2, 2), torch.tensor([0, label]), labels=("a", "b"))
