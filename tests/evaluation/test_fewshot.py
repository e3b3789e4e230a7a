"""Few-shot classifiers, against scikit-learn and an independent implementation of the paper's procedure."""

import numpy as np
import pytest
import torch
from scipy import linalg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.core.errors import DataError, InputError
from vitkit.evaluation.features import LabeledFeatures
from vitkit.evaluation.fewshot import (
    L2,
    LinearHead,
    fit_logistic_head,
    predict_knn,
    sample_shots,
    score_shots,
    solve_ridge,
    temperature_scaled,
)

SIZES = [(40, 12), (12, 40), (30, 30), (7, 5)]


def some(images: int, width: int, *, num_classes: int = 3) -> LabeledFeatures:
    """Return features with different means and scales, as those of a network."""
    generator = torch.Generator().manual_seed(images * 1000 + width)
    labels = torch.arange(images) % num_classes
    centers = torch.randn(num_classes, width, generator=generator)
    features = centers[labels] + torch.randn(images, width, generator=generator)
    scale, shift = torch.rand(width, generator=generator) * 5 + 0.1, torch.randn(width, generator=generator) * 10
    return LabeledFeatures(features=features * scale + shift, targets=labels)


def reference_logits(train: LabeledFeatures, test: torch.Tensor, *, num_classes: int, l2: float) -> np.ndarray:
    """Return the logits of the released procedure in float64, with its constant column and an ordinary solver."""
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    columns = [
        np.c_[(part - mean) / deviation, np.full(len(part), 100.0)] for part in (features, test.double().numpy())
    ]
    targets = 2 * np.eye(num_classes)[train.targets.numpy()] - 1
    gram = columns[0].T @ columns[0] + l2 * np.eye(columns[0].shape[1])
    return columns[1] @ linalg.solve(gram, columns[0].T @ targets, assume_a="pos")


@pytest.mark.parametrize("l2", [2.0**-4, 1.0, L2, 2.0**20])
@pytest.mark.parametrize(("images", "width"), SIZES)
def test_ridge_equals_the_released_procedure(images: int, width: int, l2: float) -> None:
    train, test = some(images, width), some(50, width).features
    ours = solve_ridge(train.features, train.targets, num_classes=3).head(l2)(test)
    np.testing.assert_allclose(ours.numpy(), reference_logits(train, test, num_classes=3, l2=l2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_ridge_equals_scikit_learn(images: int, width: int) -> None:
    ridge = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed").Ridge
    train, test = some(images, width), some(50, width).features
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    targets = 2 * np.eye(3)[train.targets.numpy()] - 1
    standard = np.c_[(features - mean) / deviation, np.full(images, 100.0)]
    theirs = ridge(alpha=L2, fit_intercept=False).fit(standard, targets)
    expected = theirs.predict(np.c_[(test.double().numpy() - mean) / deviation, np.full(50, 100.0)])
    ours = solve_ridge(train.features, train.targets, num_classes=3).head()(test)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_leave_one_out_equals_refitting(images: int, width: int) -> None:
    train, l2 = some(images, width), 5.0
    ours = solve_ridge(train.features, train.targets, num_classes=3).leave_one_out_logits(
        train.features, train.targets, l2=l2
    )
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    columns = np.c_[(features - mean) / deviation, np.full(images, 100.0)]
    targets = 2 * np.eye(3)[train.targets.numpy()] - 1
    for image in range(images):
        others = np.arange(images) != image
        gram = columns[others].T @ columns[others] + l2 * np.eye(width + 1)
        expected = columns[image] @ linalg.solve(gram, columns[others].T @ targets[others], assume_a="pos")
        np.testing.assert_allclose(ours[image].numpy(), expected, rtol=0, atol=1e-6)


def test_temperature_scaling_calibrates_the_head() -> None:
    train = some(200, 10)
    solution = solve_ridge(train.features, train.targets, num_classes=3)
    head = solution.head()
    sharp = temperature_scaled(head, solution.leave_one_out_logits(train.features, train.targets), train.targets)
    queries = some(60, 10).features
    assert torch.equal(head(queries).argmax(dim=1), sharp(queries).argmax(dim=1))
    confidence = sharp(train.features).softmax(dim=1).max(dim=1).values.mean()
    right = (sharp(train.features).argmax(dim=1) == train.targets).float().mean()
    assert abs(float(confidence - right)) < 0.1


def test_smoothing_bounds_the_confidence_of_a_perfect_head() -> None:
    head, targets = LinearHead(weight=torch.eye(2), bias=torch.zeros(2)), torch.tensor([0, 1] * 4)
    logits = head(torch.eye(2)[targets])
    for smoothing, low, high in ((0.0, 0.9999, 1.0), (0.1, 0.9, 0.99)):
        scaled = temperature_scaled(head, logits, targets, smoothing=smoothing)
        assert low <= float(scaled(torch.eye(2)).softmax(dim=1).max()) <= high


def test_shots_are_nested_and_depend_on_the_seed() -> None:
    labels = torch.tensor([0, 1, 2] * 20 + [0] * 30)
    five, ten = (sample_shots(labels, num_classes=3, shots=shots, seed=3) for shots in (5, 10))
    assert torch.bincount(labels[five]).tolist() == [5, 5, 5]
    generator = np.random.default_rng(3)
    by_class = [generator.permutation(np.flatnonzero(labels == label))[:5] for label in range(3)]
    assert five.tolist() == np.concatenate(by_class).tolist()
    assert len(set(ten.tolist())) == 30
    assert set(five.tolist()) <= set(ten.tolist())
    assert not torch.equal(five, sample_shots(labels, num_classes=3, shots=5, seed=4))
    with pytest.raises(DataError, match="class 1 has too few images for 21 shots"):
        sample_shots(labels, num_classes=3, shots=21, seed=0)


@pytest.mark.parametrize("method", ["ridge", "knn", "logistic"])
def test_more_shots_are_more_accurate(method: str) -> None:
    train, test = some(300, 20), some(300, 20)
    generator = torch.Generator().manual_seed(0)
    noisy = LabeledFeatures(
        features=test.features + torch.randn(test.features.shape, generator=generator), targets=test.targets
    )
    scores = score_shots(train, noisy, num_classes=3, shots=[1, 50], method=method)
    assert len(scores[1].seeds) == 3
    assert scores[50].mean > 0.8
    assert scores[50].mean >= scores[1].mean
    assert scores[1].std >= 0


def test_l2_sweep_uses_held_out_images() -> None:
    train, test = some(600, 20), some(300, 20)
    swept = score_shots(train, test, num_classes=3, shots=[1, 40], sweep_l2=True)
    plain = score_shots(train, test, num_classes=3, shots=[40])
    assert swept[1].l2 == (L2, L2, L2)
    assert swept[40].mean >= plain[40].mean - 0.02


def test_logistic_head_equals_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    train, test = some(90, 8), some(40, 8).features
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    theirs = sklearn.LogisticRegression(C=1.0, tol=1e-8, max_iter=2000).fit(
        (features - mean) / deviation, train.targets.numpy()
    )
    expected = theirs.predict_proba((test.double().numpy() - mean) / deviation)
    ours = fit_logistic_head(train, num_classes=3)(test).softmax(dim=1)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-3)


def test_empty_features_are_an_error() -> None:
    with pytest.raises(InputError, match="no labeled features to fit"):
        solve_ridge(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), num_classes=2)


def test_linear_head() -> None:
    head = LinearHead(weight=torch.tensor([[1.0, 2.0]]), bias=torch.tensor([3.0]))
    assert head(torch.tensor([[4.0, 5.0]])).tolist() == [[17.0]]


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(each.numel() for each in tree_leaves(result) if torch.is_tensor(each)), 0)
        return result


def test_knn_votes_take_memory_for_each_class_once() -> None:
    classes, features = 2_000, torch.randn(2_000, 8)
    sample = LabeledFeatures(features=features, targets=torch.arange(classes))
    with LargestTensor() as largest:
        predictions = predict_knn(sample, features, num_classes=classes)
    assert predictions.tolist() == list(range(classes))
    assert largest.elements <= 1024 * classes
