"""Features of training and test images go in; how well a few of them a class teach comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.evaluate.least_squares import L2, Head, solve

Method = Literal["ridge", "knn", "logistic"]
SWEPT = tuple(2.0**power for power in range(-10, 21, 2))
"""The l2 that a sweep tries: the released code's range."""
NEIGHBOURS, TEMPERATURE = 20, 0.07
"""Of k-NN, as DINO evaluates."""


@dataclass(frozen=True, kw_only=True)
class Shots:
    """The accuracy for one number of shots, by seed, and the l2 that each seed chose."""

    accuracies: tuple[float, ...]
    l2: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        """Over the seeds, as of a sample; 0 where there is one."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Features with labels."""

    features: Float[Tensor, "N F"]
    labels: Int[Tensor, "N"]

    def at(self, indices: Int[Tensor, "n"]) -> "Labelled":
        """Some of them."""
        return Labelled(features=self.features[indices], labels=self.labels[indices])


def chosen_images(labels: Int[Tensor, "N"], *, classes: int, shots: int, seed: int) -> Int[Tensor, "n"]:
    """So many images of each class, drawn by a seed; fewer shots are some of more shots.

    >>> chosen_images(torch.arange(12) % 3, classes=3, shots=2, seed=0).shape
    torch.Size([6])
    """
    generator = np.random.default_rng(seed)
    drawn = [generator.permutation(np.flatnonzero(labels.numpy() == number)) for number in range(classes)]
    few = min(range(classes), key=lambda number: len(drawn[number]))
    if len(drawn[few]) < shots:
        raise DataError(
            f"class {few} has too few images for {shots} shots", expected=f"{shots} images", got=len(drawn[few])
        )
    return torch.from_numpy(np.concatenate([images[:shots] for images in drawn]))


def few_shot(
    train: Labelled,
    test: Labelled,
    *,
    classes: int,
    shots: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
    method: Method = "ridge",
    sweep: bool = False,
) -> dict[int, Shots]:
    """The share of test images that are told rightly after so many examples of each class, for each seed.

    >>> features = torch.eye(4).repeat(10, 1) + 0.1 * torch.randn(40, 4)
    >>> data = Labelled(features=features, labels=torch.arange(40) % 4)
    >>> few_shot(data, data, classes=4, shots=[5])[5].mean
    1.0
    """
    found = {}
    for number in shots:
        accuracies, chosen = [], []
        for seed in seeds:
            some = train.at(chosen_images(train.labels, classes=classes, shots=number, seed=seed))
            l2 = choose_l2(some, classes=classes, shots=number) if sweep and method == "ridge" else L2
            told = TEACHERS[method](some, classes, l2)(test.features)
            accuracies.append(float((told == test.labels).float().mean()))
            chosen.append(l2)
        found[number] = Shots(accuracies=tuple(accuracies), l2=tuple(chosen) if method == "ridge" else ())
    return found


def choose_l2(some: Labelled, *, classes: int, shots: int) -> float:
    """The l2 that does best on a fifth of each class, held out; with one shot there is nothing to hold out."""
    if shots < 2:
        return L2
    # `chosen_images` lays the images of a class side by side.
    place = torch.arange(len(some.labels)) % shots
    held = place < max(1, shots // 5)
    taught, asked = some.at((~held).nonzero()[:, 0]), some.at(held.nonzero()[:, 0])
    solved = solve(taught.features, taught.labels, classes=classes)
    right = [int((solved.head(l2)(asked.features).argmax(dim=1) == asked.labels).sum()) for l2 in SWEPT]
    best = max(right)
    # Of those that do as well, the middle one.
    as_good = [l2 for l2, count in zip(SWEPT, right, strict=True) if count == best]
    return as_good[len(as_good) // 2]


Told = Callable[[Float[Tensor, "N F"]], Int[Tensor, "N"]]


def ridge(some: Labelled, classes: int, l2: float) -> Told:
    """The paper's probe."""
    head = solve(some.features, some.labels, classes=classes).head(l2)
    return lambda features: head(features).argmax(dim=1)


def nearest(some: Labelled, classes: int, l2: float) -> Told:
    """The votes of the nearest by angle, the nearer the weightier."""
    del l2
    known = functional.normalize(some.features.float(), dim=1)
    votes = functional.one_hot(some.labels, classes).float()

    def tell(features: Float[Tensor, "N F"]) -> Int[Tensor, "N"]:
        told = []
        for part in features.split(1024):
            alike = functional.normalize(part.float(), dim=1) @ known.T
            best = alike.topk(min(NEIGHBOURS, len(known)), dim=1)
            weights = (best.values / TEMPERATURE).softmax(dim=1)
            told.append((weights[:, :, None] * votes[best.indices]).sum(dim=1).argmax(dim=1))
        return torch.cat(told)

    return tell


def logistic(some: Labelled, classes: int, l2: float) -> Told:
    """A softmax classifier on standardised features, by L-BFGS to its optimum."""
    del l2
    head = logistic_head(some, classes=classes)
    return lambda features: head(features).argmax(dim=1)


def logistic_head(some: Labelled, *, classes: int, decay: float = 1.0) -> Head:
    """The head with the least cross-entropy plus `decay` / 2 times its squared weights, over all images together."""
    features = some.features.float()
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0) + 1e-5
    standard = (features - mean) / deviation
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = standard @ weight.T + bias
        value = functional.cross_entropy(logits, some.labels, reduction="sum") + decay / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    scaled = weight.detach() / deviation
    return Head(weight=scaled, bias=bias.detach() - scaled @ mean)


TEACHERS: dict[Method, Callable[[Labelled, int, float], Told]] = {
    "ridge": ridge,
    "knn": nearest,
    "logistic": logistic,
}
