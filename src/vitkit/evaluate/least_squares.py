"""Features and labels go in, the paper's few-shot head comes out: regularised least squares, in closed form.

The procedure is that of the released code: features are standardised by the mean and deviation of the training images
(deviation + 1e-5), a constant 100 is appended for the bias, targets are −1 and 1, and l2 is 2^10.
"""

from dataclasses import dataclass

import torch

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Int, Tensor

BIAS = 100.0
"""The constant column: large, so that l2 hardly holds the bias back."""
EPS = 1e-5
L2 = 2.0**10
ROWS = 4096
"""Features that are held in double precision at once: the rest may lie on disk."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """All that is needed for the head of any l2: the directions of the standardised features X, by eigenvectors of XᵀX.

    The mean of a standardised feature is 0, so the bias column is upright on all others and is solved apart.
    """

    mean: Float[Tensor, "F"]
    deviation: Float[Tensor, "F"]
    eigenvalues: Float[Tensor, "E"]
    directions: Float[Tensor, "F E"]
    targets: Float[Tensor, "E Y"]
    """What is asked for along each direction."""
    totals: Float[Tensor, "Y"]
    """The sum of the targets of each class."""
    images: int

    def head(self, l2: float = L2) -> "Head":
        """The head for an l2."""
        weight = self.directions @ (self.targets / (self.eigenvalues + l2)[:, None]) / self.deviation[:, None]
        bias = BIAS**2 * self.totals / (BIAS**2 * self.images + l2)
        return Head(weight=weight.T.contiguous(), bias=bias - self.mean @ weight)

    def leverage(self, features: Float[Tensor, "N F"], l2: float = L2) -> Float[Tensor, "N"]:
        """How much each training image has to say about its own answer, from 0 to 1."""
        along = ((features.double() - self.mean) / self.deviation) @ self.directions
        return (along.square_() / (self.eigenvalues + l2)).sum(dim=1) + BIAS**2 / (BIAS**2 * self.images + l2)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A linear head on features as they are."""

    weight: Float[Tensor, "Y F"]
    bias: Float[Tensor, "Y"]

    def __call__(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N Y"]:
        """The logits of features."""
        return features.to(self.weight.dtype) @ self.weight.T + self.bias


def solve(features: Float[Tensor, "N F"], labels: Int[Tensor, "N"], *, classes: int) -> Solved:
    """Prepare the heads of all l2 at once, in float64.

    >>> features = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.2]])
    >>> head = solve(features, torch.tensor([0, 0, 1, 1]), classes=2).head(l2=0.1)
    >>> head(features).argmax(dim=1).tolist()
    [0, 0, 1, 1]
    """
    if len(features) < 1 or len(features) != len(labels):
        raise InputError("nothing to learn from", expected="a label for each of one or more images", got=len(labels))
    mean = torch.stack([rows.double().sum(dim=0) for rows in features.split(ROWS)]).sum(dim=0) / len(features)
    wanted = wanted_of(labels, classes=classes)
    if len(features) < features.shape[1]:
        return _by_images(features.double() - mean, labels, mean=mean, totals=wanted)
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    for rows, of in zip(features.split(ROWS), labels.split(ROWS), strict=True):
        centred = rows.double() - mean
        gram.addmm_(centred.T, centred)
        sums.index_add_(0, of, centred)
    deviation = (gram.diagonal() / len(features)).sqrt() + EPS
    eigenvalues, directions = torch.linalg.eigh(gram / deviation[:, None] / deviation)
    return Solved(
        mean=mean,
        deviation=deviation,
        eigenvalues=eigenvalues.clamp(min=0),
        directions=directions,
        targets=directions.T @ _asked(sums, deviation),
        totals=wanted,
        images=len(labels),
    )


def _by_images(
    centred: Float[Tensor, "N F"], labels: Int[Tensor, "N"], *, mean: Float[Tensor, "F"], totals: Float[Tensor, "Y"]
) -> Solved:
    """The same from XXᵀ, the smaller matrix of the two where images are fewer than features."""
    deviation = centred.square().mean(dim=0).sqrt() + EPS
    standard = centred / deviation
    eigenvalues, sides = torch.linalg.eigh(standard @ standard.T)
    real = eigenvalues > eigenvalues[-1] * 1e-12  # centred, so that one at least is none
    eigenvalues = eigenvalues[real]
    directions = standard.T @ (sides[:, real] / eigenvalues.sqrt())
    sums = torch.zeros(len(totals), centred.shape[1], dtype=torch.float64).index_add_(0, labels, centred)
    return Solved(
        mean=mean,
        deviation=deviation,
        eigenvalues=eigenvalues,
        directions=directions,
        targets=directions.T @ _asked(sums, deviation),
        totals=totals,
        images=len(labels),
    )


def _asked(sums: Float[Tensor, "Y F"], deviation: Float[Tensor, "F"]) -> Float[Tensor, "F Y"]:
    """Xᵀ times the targets, from the sum of each class's features, centred but not yet divided by their deviation.

    A target is 2 where the class is the image's, less 1 everywhere; and the sum of centred features is 0.
    """
    return (2 * sums / deviation).T


def wanted_of(labels: Int[Tensor, "N"], *, classes: int) -> Float[Tensor, "Y"]:
    """The sum of the targets of each class.

    >>> wanted_of(torch.tensor([1, 1, 0]), classes=2).tolist()
    [-1.0, 1.0]
    """
    return 2 * torch.bincount(labels, minlength=classes).double() - len(labels)


def signs(labels: Int[Tensor, "N"], *, classes: int) -> Float[Tensor, "N Y"]:
    """1 for the class of an image, −1 for all others.

    >>> signs(torch.tensor([1]), classes=2).tolist()
    [[-1.0, 1.0]]
    """
    wanted = torch.full((len(labels), classes), -1.0, dtype=torch.float64)
    wanted[torch.arange(len(labels)), labels] = 1.0
    return wanted


def left_out(
    solved: Solved, features: Float[Tensor, "N F"], labels: Int[Tensor, "N"], *, l2: float = L2
) -> Float[Tensor, "N Y"]:
    """The logits of each training image by a head that did not see it, without solving anew for each.

    Mean and deviation stay those of all images.

    >>> features, labels = torch.randn(12, 3), torch.arange(12) % 2
    >>> left_out(solve(features, labels, classes=2), features, labels).shape
    torch.Size([12, 2])
    """
    own = solved.leverage(features, l2)[:, None].clamp(max=1 - 1e-9)
    wanted = signs(labels, classes=len(solved.totals))
    return (solved.head(l2)(features) - own * wanted) / (1 - own)


def sharpened(head: Head, logits: Float[Tensor, "N Y"], labels: Int[Tensor, "N"]) -> Head:
    """The head scaled so that its probabilities are honest: by the factor with the least surprise on held-out logits.

    Least squares aims at −1 and 1, which a softmax would take for hardly an opinion.
    """
    factors = torch.logspace(0, 2.5, 51)
    losses = torch.stack([torch.nn.functional.cross_entropy(logits * factor, labels) for factor in factors])
    factor = float(factors[losses.argmin()])
    return Head(weight=head.weight * factor, bias=head.bias * factor)
