"""Few-shot heads: against scikit-learn, against an independent reading of the released procedure, and known answers."""

import numpy as np
import pytest
import torch
from scipy import linalg

from vitkit.core.errors import DataError, InputError
from vitkit.evaluate.fewshot import Labelled, chosen_images, few_shot, logistic_head
from vitkit.evaluate.least_squares import L2, Head, left_out, sharpened, solve

SIZES = [(40, 12), (12, 40), (30, 30), (7, 5)]


def some(images: int, width: int, *, classes: int = 3) -> Labelled:
    """Features with means and scales of their own, as a network's are."""
    generator = torch.Generator().manual_seed(images * 1000 + width)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, width, generator=generator)
    features = centres[labels] + torch.randn(images, width, generator=generator)
    scale, shift = torch.rand(width, generator=generator) * 5 + 0.1, torch.randn(width, generator=generator) * 10
    return Labelled(features=features * scale + shift, labels=labels)


def as_released(train: Labelled, test: torch.Tensor, *, classes: int, l2: float) -> np.ndarray:
    """The released procedure in float64, with its constant column and an ordinary solver."""
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    columns = [
        np.c_[(part - mean) / deviation, np.full(len(part), 100.0)] for part in (features, test.double().numpy())
    ]
    targets = 2 * np.eye(classes)[train.labels.numpy()] - 1
    gram = columns[0].T @ columns[0] + l2 * np.eye(columns[0].shape[1])
    return columns[1] @ linalg.solve(gram, columns[0].T @ targets, assume_a="pos")


@pytest.mark.parametrize("l2", [2.0**-4, 1.0, L2, 2.0**20])
@pytest.mark.parametrize(("images", "width"), SIZES)
def test_logits_equal_the_released_procedure(images: int, width: int, l2: float) -> None:
    train, test = some(images, width), some(50, width).features
    ours = solve(train.features, train.labels, classes=3).head(l2)(test)
    np.testing.assert_allclose(ours.numpy(), as_released(train, test, classes=3, l2=l2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_logits_equal_those_of_scikit_learn(images: int, width: int) -> None:
    ridge = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed").Ridge
    train, test = some(images, width), some(50, width).features
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    targets = 2 * np.eye(3)[train.labels.numpy()] - 1
    standard = np.c_[(features - mean) / deviation, np.full(images, 100.0)]
    theirs = ridge(alpha=L2, fit_intercept=False).fit(standard, targets)
    expected = theirs.predict(np.c_[(test.double().numpy() - mean) / deviation, np.full(50, 100.0)])
    ours = solve(train.features, train.labels, classes=3).head()(test)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_leaving_an_image_out_equals_solving_without_it(images: int, width: int) -> None:
    train, l2 = some(images, width), 5.0
    ours = left_out(solve(train.features, train.labels, classes=3), train.features, train.labels, l2=l2)
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    columns = np.c_[(features - mean) / deviation, np.full(images, 100.0)]
    targets = 2 * np.eye(3)[train.labels.numpy()] - 1
    for image in range(images):
        others = np.arange(images) != image
        gram = columns[others].T @ columns[others] + l2 * np.eye(width + 1)
        expected = columns[image] @ linalg.solve(gram, columns[others].T @ targets[others], assume_a="pos")
        np.testing.assert_allclose(ours[image].numpy(), expected, rtol=0, atol=1e-6)


def test_a_sharpened_head_answers_the_same_with_honest_probabilities() -> None:
    train = some(200, 10)
    solved = solve(train.features, train.labels, classes=3)
    head = solved.head()
    sharp = sharpened(head, left_out(solved, train.features, train.labels), train.labels)
    asked = some(60, 10).features
    assert torch.equal(head(asked).argmax(dim=1), sharp(asked).argmax(dim=1))
    confidence = sharp(train.features).softmax(dim=1).max(dim=1).values.mean()
    right = (sharp(train.features).argmax(dim=1) == train.labels).float().mean()
    assert abs(float(confidence - right)) < 0.1


def test_shots_are_of_each_class_nested_and_drawn_by_the_seed() -> None:
    labels = torch.tensor([0, 1, 2] * 20 + [0] * 30)
    five, ten = (chosen_images(labels, classes=3, shots=shots, seed=3) for shots in (5, 10))
    assert torch.bincount(labels[five]).tolist() == [5, 5, 5]
    assert len(set(ten.tolist())) == 30
    assert set(five.tolist()) <= set(ten.tolist())
    assert not torch.equal(five, chosen_images(labels, classes=3, shots=5, seed=4))
    with pytest.raises(DataError, match="class 1 has too few images for 21 shots"):
        chosen_images(labels, classes=3, shots=21, seed=0)


@pytest.mark.parametrize("method", ["ridge", "knn", "logistic"])
def test_more_shots_tell_more_and_clear_classes_are_told_by_every_method(method: str) -> None:
    train, test = some(300, 20), some(300, 20)
    generator = torch.Generator().manual_seed(0)
    noisy = Labelled(features=test.features + torch.randn(test.features.shape, generator=generator), labels=test.labels)
    found = few_shot(train, noisy, classes=3, shots=[1, 50], method=method)
    assert len(found[1].accuracies) == 3
    assert found[50].mean > 0.8
    assert found[50].mean >= found[1].mean
    assert found[1].deviation >= 0


def test_a_sweep_chooses_an_l2_by_images_held_out() -> None:
    train, test = some(600, 20), some(300, 20)
    swept = few_shot(train, test, classes=3, shots=[1, 40], sweep=True)
    plain = few_shot(train, test, classes=3, shots=[40])
    assert swept[1].l2 == (L2, L2, L2)
    assert swept[40].mean >= plain[40].mean - 0.02


def test_the_logistic_head_is_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    train, test = some(90, 8), some(40, 8).features
    features = train.features.double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5
    theirs = sklearn.LogisticRegression(C=1.0, tol=1e-8, max_iter=2000).fit(
        (features - mean) / deviation, train.labels.numpy()
    )
    expected = theirs.predict_proba((test.double().numpy() - mean) / deviation)
    ours = logistic_head(train, classes=3)(test).softmax(dim=1)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-3)


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to learn from"):
        solve(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), classes=2)


def test_a_head_is_linear() -> None:
    head = Head(weight=torch.tensor([[1.0, 2.0]]), bias=torch.tensor([3.0]))
    assert head(torch.tensor([[4.0, 5.0]])).tolist() == [[17.0]]
