"""Few-shot evaluation: classifiers fitted to the features of a few images of each class."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch.nn import functional

from vitkit.core.errors import DataError, InputError
from vitkit.core.result import Result, draw, select
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.data.dataset import Dataset, ImageSource, hold_out
from vitkit.data.preprocessing import Preprocessing
from vitkit.data.verify import BadFile
from vitkit.evaluation.evaluation import require_labels
from vitkit.evaluation.features import LabeledFeatures
from vitkit.model.config import ViTConfig
from vitkit.weights.bundle import ModelBundle

if TYPE_CHECKING:
    import matplotlib.figure

Method = Literal["ridge", "knn", "logistic"]
METHODS: tuple[Method, ...] = get_args(Method)
L2_GRID = tuple(2.0**power for power in range(-10, 21, 2))
"""Values of l2 that a sweep tries, as in the paper's code."""
NEIGHBORS, TEMPERATURE = 20, 0.07
"""Parameters of k-NN, as in DINO."""
BIAS = 100.0
"""Constant column: large, so that l2 hardly shrinks the bias."""
EPS = 1e-5
L2 = 2.0**10
CHUNK = 4096
"""Rows that are converted to double precision at a time; the features may be memory-mapped."""
TEST_FRACTION = 0.2
"""Fraction of each class that is held out if a dataset has no test or validation split."""


@dataclass(frozen=True, kw_only=True)
class ShotScore:
    """Accuracy for a number of shots, by seed, and the l2 that each seed used."""

    seeds: tuple[float, ...]
    l2: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return float(np.mean(self.seeds))

    @property
    def std(self) -> float:
        """Return the sample standard deviation over seeds; 0 for one seed."""
        return float(np.std(self.seeds, ddof=1)) if len(self.seeds) > 1 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        plain: dict[str, object] = {"mean": self.mean, "std": self.std, "seeds": list(self.seeds)}
        return plain | ({"l2": list(self.l2)} if self.l2 else {})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FewShotResult(Result):
    """Few-shot accuracy by number of shots, for one method or all."""

    model: str
    labels: tuple[str, ...]
    methods: dict[Method, dict[int, ShotScore]]
    train_images: int
    test_images: int
    skipped: tuple[BadFile, ...] = ()
    model_path: Path | None = None
    """Where the model with a few-shot head was saved."""

    def plot(self) -> "matplotlib.figure.Figure":
        """Draw accuracy over shots, with the standard deviation over seeds."""
        return draw("plot_fewshot", self)

    def highlights(self) -> dict[str, object]:
        """Return the mean accuracy for each number of shots."""
        scores = {f"shots{count}": score.mean for count, score in self.shots.items()}
        return {"model": self.model, "method": self.method, **scores}

    @property
    def method(self) -> Method:
        """Return the first method."""
        return next(iter(self.methods))

    @property
    def shots(self) -> dict[int, ShotScore]:
        """Return the scores of the first method."""
        return self.methods[self.method]

    def to_dict(self) -> dict[str, object]:
        """Return what `vitkit fewshot --json` prints."""
        plain = {
            method: {str(shots): score.to_dict() for shots, score in scores.items()}
            for method, scores in self.methods.items()
        }
        result = {"model": self.model, "classes": len(self.labels), "method": self.method}
        result |= {"shots": plain.pop(self.method)}
        return result | select(self, "skipped") | plain


def fewshot_splits(data: Dataset) -> tuple[ImageSource, ImageSource]:
    """Return the images to draw shots from and those to test on, held out of the former if there is no such split."""
    train = data.splits.get("train") or data.splits.get("all") or data.first_split
    require_labels(train)
    test = data.splits.get("test") or data.splits.get("val")
    if test is not None and test is not train:
        return train, test
    return hold_out(train, fraction=TEST_FRACTION)


def released_preprocessing(preprocessing: Preprocessing) -> Preprocessing:
    """Return the preprocessing of the paper's few-shot code: resize to 8/7, ignoring the aspect ratio, and crop."""
    return replace(preprocessing, resize="squash_crop", crop_fraction=0.875)


def sample_shots(targets: Int[Tensor, "N"], *, num_classes: int, shots: int, seed: int) -> Int[Tensor, "n"]:
    """Draw images of each class, class by class; the draw for fewer shots is contained in that for more."""
    generator = np.random.default_rng(seed)
    order = np.argsort(targets.numpy(), kind="stable")
    starts = np.searchsorted(targets.numpy()[order], np.arange(1, num_classes))
    images = [generator.permutation(of_class) for of_class in np.split(order, starts)]
    smallest = min(range(num_classes), key=lambda label: len(images[label]))
    if (count := len(images[smallest])) < shots:
        message = f"class {smallest} has too few images for {shots} shots"
        raise DataError(message, expected=f"{shots} images", got=count)
    return torch.from_numpy(np.concatenate([each[:shots] for each in images]))


def score_shots(
    train: LabeledFeatures,
    test: LabeledFeatures,
    *,
    num_classes: int,
    shots: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
    method: Method = "ridge",
    sweep_l2: bool = False,
) -> dict[int, ShotScore]:
    """Return the test accuracy for each number of shots and seed.

    >>> features = torch.eye(4).repeat(10, 1) + 0.1 * torch.randn(40, 4)
    >>> data = LabeledFeatures(features=features, targets=torch.arange(40) % 4)
    >>> score_shots(data, data, num_classes=4, shots=[5])[5].mean
    1.0
    """
    scores = {}
    for count in shots:
        accuracies, l2_values = [], []
        for seed in seeds:
            sample = train.select(sample_shots(train.targets, num_classes=num_classes, shots=count, seed=seed))
            is_swept = sweep_l2 and method == "ridge"
            l2 = select_l2(sample, num_classes=num_classes, shots=count) if is_swept else L2
            predictions = predict_classes(method, sample, test.features, num_classes=num_classes, l2=l2)
            accuracies.append(float((predictions == test.targets).float().mean()))
            l2_values.append(l2)
        scores[count] = ShotScore(seeds=tuple(accuracies), l2=tuple(l2_values) if method == "ridge" else ())
    return scores


def select_l2(sample: LabeledFeatures, *, num_classes: int, shots: int) -> float:
    """Return the l2 with the best accuracy on a held-out fifth of each class; with one shot, the default."""
    if shots < 2:
        return L2
    # `sample_shots` returns the images of a class next to each other.
    is_held_out = torch.arange(len(sample.targets)) % shots < max(1, shots // 5)
    train, held_out = sample.select((~is_held_out).nonzero()[:, 0]), sample.select(is_held_out.nonzero()[:, 0])
    solution = solve_ridge(train.features, train.targets, num_classes=num_classes)
    correct = [int((solution.head(l2)(held_out.features).argmax(dim=1) == held_out.targets).sum()) for l2 in L2_GRID]
    best = [l2 for l2, count in zip(L2_GRID, correct, strict=True) if count == max(correct)]
    return best[len(best) // 2]


# Ridge regression in closed form, as in the paper's code: features are standardized by the mean and deviation of the
# training images (deviation + 1e-5), a constant column of 100 gives the bias, targets are −1 and 1, and l2 is 2^10.


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """A linear classifier of unstandardized features."""

    weight: Float[Tensor, "Y F"]
    bias: Float[Tensor, "Y"]

    def __call__(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N Y"]:
        """Return the logits of features."""
        return features.to(self.weight.dtype) @ self.weight.T + self.bias


@dataclass(frozen=True, kw_only=True)
class RidgeSolution:
    """Eigendecomposition of XᵀX for standardized features X, from which the head for any l2 follows.

    The mean of a standardized feature is 0, so the bias column is orthogonal to all others and is solved separately.
    """

    mean: Float[Tensor, "F"]
    deviation: Float[Tensor, "F"]
    eigenvalues: Float[Tensor, "E"]
    directions: Float[Tensor, "F E"]
    projected_targets: Float[Tensor, "E Y"]
    """Xᵀ times the targets, in the basis of eigenvectors."""
    target_sums: Float[Tensor, "Y"]
    """Sum of the targets of each class."""
    images: int

    def head(self, l2: float = L2) -> LinearHead:
        """Return the head for an l2."""
        scaled = self.projected_targets / (self.eigenvalues + l2)[:, None]
        weight = self.directions @ scaled / self.deviation[:, None]
        bias = BIAS**2 * self.target_sums / (BIAS**2 * self.images + l2)
        return LinearHead(weight=weight.T.contiguous(), bias=bias - self.mean @ weight)

    def leave_one_out_logits(
        self, features: Float[Tensor, "N F"], targets: Int[Tensor, "N"], *, l2: float = L2
    ) -> Float[Tensor, "N Y"]:
        """Return the logits of each training image from a head fitted without it, in closed form.

        Mean and deviation stay those of all images.
        """
        projected = ((features.double() - self.mean) / self.deviation) @ self.directions
        # The leverage of an image, 0..1, is the weight of its own target in its prediction.
        leverage = (projected.square_() / (self.eigenvalues + l2)).sum(dim=1) + BIAS**2 / (BIAS**2 * self.images + l2)
        leverage = leverage[:, None].clamp(max=1 - 1e-9)
        signs = functional.one_hot(targets, len(self.target_sums)).double() * 2 - 1
        return (self.head(l2)(features) - leverage * signs) / (1 - leverage)


def solve_ridge(features: Float[Tensor, "N F"], targets: Int[Tensor, "N"], *, num_classes: int) -> RidgeSolution:
    """Decompose the problem for all l2 at once, in float64."""
    if len(features) < 1 or len(features) != len(targets):
        raise InputError("no labeled features to fit", expected="a label for each image", got=len(targets))
    mean = torch.stack([rows.double().sum(dim=0) for rows in features.split(CHUNK)]).sum(dim=0) / len(features)
    sums = torch.zeros(num_classes, features.shape[1], dtype=torch.float64)
    if len(features) < features.shape[1]:
        centered = features.double() - mean
        deviation = centered.square().mean(dim=0).sqrt() + EPS
        sums.index_add_(0, targets, centered)
        # XᵀX is decomposed through XXᵀ, the smaller matrix if there are fewer images than features.
        standard = centered / deviation
        eigenvalues, vectors = torch.linalg.eigh(standard @ standard.T)
        is_positive = eigenvalues > eigenvalues[-1] * 1e-12  # centering makes at least one eigenvalue 0
        eigenvalues = eigenvalues[is_positive]
        directions = standard.T @ (vectors[:, is_positive] / eigenvalues.sqrt())
    else:
        gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
        for rows, labels in zip(features.split(CHUNK), targets.split(CHUNK), strict=True):
            centered = rows.double() - mean
            gram.addmm_(centered.T, centered)
            sums.index_add_(0, labels, centered)
        deviation = (gram.diagonal() / len(features)).sqrt() + EPS
        eigenvalues, directions = torch.linalg.eigh(gram / deviation[:, None] / deviation)
        eigenvalues = eigenvalues.clamp(min=0)
    return RidgeSolution(
        mean=mean,
        deviation=deviation,
        eigenvalues=eigenvalues,
        directions=directions,
        # A target is twice the one-hot class minus 1, and the centered features sum to 0.
        projected_targets=directions.T @ (2 * sums / deviation).T,
        target_sums=2 * torch.bincount(targets, minlength=num_classes).double() - len(targets),
        images=len(targets),
    )


def temperature_scaled(
    head: LinearHead, logits: Float[Tensor, "N Y"], targets: Int[Tensor, "N"], *, smoothing: float = 0.0
) -> LinearHead:
    """Scale a head by the factor with the lowest cross-entropy on held-out logits.

    Least squares aims at −1 and 1, which a softmax would turn into almost uniform probabilities.
    `smoothing` of the labels bounds the factor where every held-out image is recognized.
    """
    factors = torch.logspace(0, 2.5, 51)
    losses = torch.stack(
        [functional.cross_entropy(logits * factor, targets, label_smoothing=smoothing) for factor in factors]
    )
    factor = float(factors[losses.argmin()])
    return LinearHead(weight=head.weight * factor, bias=head.bias * factor)


def predict_classes(
    method: Method, sample: LabeledFeatures, features: Float[Tensor, "N F"], *, num_classes: int, l2: float = L2
) -> Int[Tensor, "N"]:
    """Return the classes of features by a classifier fitted to a sample; `l2` is that of the ridge regression."""
    if method == "knn":
        return predict_knn(sample, features, num_classes=num_classes)
    if method == "ridge":
        return solve_ridge(sample.features, sample.targets, num_classes=num_classes).head(l2)(features).argmax(dim=1)
    return fit_logistic_head(sample, num_classes=num_classes)(features).argmax(dim=1)


def predict_knn(sample: LabeledFeatures, features: Float[Tensor, "N F"], *, num_classes: int) -> Int[Tensor, "N"]:
    """Return the classes of features by the cosines of their nearest neighbors, with softmax weights."""
    references = functional.normalize(sample.features.float(), dim=1)
    predictions = []
    for chunk in features.split(1024):
        similarity = functional.normalize(chunk.float(), dim=1) @ references.T
        nearest = similarity.topk(min(NEIGHBORS, len(references)), dim=1)
        weights = (nearest.values / TEMPERATURE).softmax(dim=1)
        votes = torch.zeros(len(chunk), num_classes).scatter_add_(1, sample.targets[nearest.indices], weights)
        predictions.append(votes.argmax(dim=1))
    return torch.cat(predictions)


def fit_logistic_head(sample: LabeledFeatures, *, num_classes: int) -> LinearHead:
    """Minimize the summed cross-entropy plus half the squared weights, on standardized features."""
    features = sample.features.float()
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0) + 1e-5
    standard = (features - mean) / deviation
    weight = torch.zeros(num_classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = standard @ weight.T + bias
        value = functional.cross_entropy(logits, sample.targets, reduction="sum") + weight.square().sum() / 2
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    scaled = weight.detach() / deviation
    return LinearHead(weight=scaled, bias=bias.detach() - scaled @ mean)


def fit_head(train: LabeledFeatures, *, num_classes: int, shots: int) -> LinearHead:
    """Fit a head with calibrated probabilities to the first draw of some shots."""
    sample = train.select(sample_shots(train.targets, num_classes=num_classes, shots=shots, seed=0))
    solution = solve_ridge(sample.features, sample.targets, num_classes=num_classes)
    held_out = solution.leave_one_out_logits(sample.features, sample.targets)
    return temperature_scaled(solution.head(), held_out, sample.targets)


def replace_head(
    bundle: ModelBundle, head: LinearHead, *, labels: tuple[str, ...], preprocessing: Preprocessing
) -> ModelBundle:
    """Return the model with another head, labels and preprocessing."""
    state = {name: tensor for name, tensor in bundle.state.items() if not name.startswith("head.")}
    config = replace(bundle.config, num_classes=len(labels))
    weight, bias = head.weight.float(), head.bias.float()
    if isinstance(config, ViTConfig) and config.tokens.distillation:
        # A distilled model has a head for each of two tokens and averages them.
        label, teacher = (2 * weight).chunk(2, dim=1)
        state |= {"head.label.weight": label.contiguous(), "head.label.bias": 2 * bias}
        state |= {"head.teacher.weight": teacher.contiguous(), "head.teacher.bias": torch.zeros_like(bias)}
    else:
        state |= {"head.weight": weight, "head.bias": bias}
    return ModelBundle(name=bundle.name, config=config, state=state, preprocessing=preprocessing, labels=labels)
