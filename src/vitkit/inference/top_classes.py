"""The classes with the highest scores, in an order that does not depend on the device or the number of classes."""

from vitkit.core.shapes import Float, Tensor

ClassScore = tuple[int, float]
"""Index and score of a class."""


def top_classes(scores: Float[Tensor, "B Y"], *, count: int) -> list[list[ClassScore]]:
    """Return the classes with the highest scores of each image, in descending order.

    Ties keep the order of the classes. A score that is not a number is never among them.

    >>> import torch
    >>> top_classes(torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]), count=2)
    [[(1, 0.5), (0, 0.25)], [(2, 0.5), (0, 0.25)]]
    """
    num_classes = scores.shape[1]
    count = min(count, num_classes)
    highest = scores.topk(min(count + 1, num_classes))
    # topk returns equal scores in any order, and any of those that tie for the last place; NaN comes first.
    classes, order = highest.indices[:, :count].sort(dim=1)
    values, order = highest.values.gather(1, order).sort(dim=1, descending=True, stable=True)
    pairs = [
        list(zip(*row, strict=True)) for row in zip(classes.gather(1, order).tolist(), values.tolist(), strict=True)
    ]
    is_ambiguous = highest.values.isnan().any(dim=1)
    if count < num_classes:
        is_ambiguous |= highest.values[:, count - 1] == highest.values[:, count]
    for row in is_ambiguous.nonzero()[:, 0].tolist():
        pairs[row] = _top_of_one(scores[row], highest.values[row, count - 1], count=count)
    return pairs


def _top_of_one(scores: Float[Tensor, "Y"], lowest: Float[Tensor, ""], *, count: int) -> list[ClassScore]:
    """Sort all classes whose score is at least that of the last place."""
    candidates = (scores >= lowest).nonzero()[:, 0]
    values, order = scores[candidates].sort(descending=True, stable=True)
    return list(zip(candidates[order[:count]].tolist(), values[:count].tolist(), strict=True))
