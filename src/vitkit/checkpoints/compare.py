"""Two models of whatever origin go in, in what they differ comes out: tensor by tensor, and in all that is not one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vitkit.checkpoints.native import Artefact
from vitkit.core.config import to_mapping
from vitkit.core.shapes import Tensor


class Pair(NamedTuple):
    """A value in the one model and in the other; None where a model has no such thing."""

    a: object
    b: object


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """How far a tensor that both models have lies from its namesake.

    `max_difference` is None where the shapes differ, or where one has numbers that are not finite and the other has
    not the same.
    """

    name: str
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]
    max_difference: float | None

    @property
    def is_same(self) -> bool:
        """Whether all numbers are equal."""
        return self.max_difference == 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """In what two models differ, under vitkit's names."""

    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    config: Mapping[str, Pair]
    preprocessing: Mapping[str, Pair]
    labels_differ: bool

    @property
    def max_difference(self) -> float | None:
        """The largest difference of any number; None where there is nothing to compare or no number to tell it."""
        known = [each.max_difference for each in self.tensors if each.shape == each.other_shape]
        numbers = [difference for difference in known if difference is not None]
        return max(numbers) if numbers and len(numbers) == len(known) else None

    @property
    def same_weights(self) -> bool:
        """Whether both have the same tensors with the same numbers."""
        return all(each.is_same for each in self.tensors) and not (self.only_a or self.only_b)

    @property
    def is_same(self) -> bool:
        """Whether there is no difference at all."""
        return self.same_weights and not (self.config or self.preprocessing or self.labels_differ)


def compare(a: Artefact, b: Artefact) -> Comparison:
    """Compare two models under our names, which both have once they are loaded, whatever their files call them.

    >>> from dataclasses import replace
    >>> from vitkit.data.transforms import Preprocessing
    >>> from vitkit.zoo.lookup import configure
    >>> config, state = configure("Ti/16", classes=2), {"norm.bias": torch.zeros(192)}
    >>> a = Artefact(name="a", config=config, state=state, preprocessing=Preprocessing(), labels=("cat", "dog"))
    >>> b = replace(a, state={"norm.bias": torch.ones(192)})
    >>> compare(a, a).is_same, compare(a, b).max_difference
    (True, 1.0)
    """
    shared = [name for name in a.state if name in b.state]
    return Comparison(
        tensors=tuple(_tensors(name, a.state[name], b.state[name]) for name in shared),
        only_a=tuple(name for name in a.state if name not in b.state),
        only_b=tuple(name for name in b.state if name not in a.state),
        config=differing(flat(to_mapping(a.config)), flat(to_mapping(b.config))),
        preprocessing=differing(to_mapping(a.preprocessing), to_mapping(b.preprocessing)),
        labels_differ=a.labels != b.labels,
    )


def _tensors(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    difference = largest_difference(a, b) if a.shape == b.shape else None
    return TensorDifference(name=name, shape=tuple(a.shape), other_shape=tuple(b.shape), max_difference=difference)


def largest_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of two tensors of one shape; None where it is no finite number.

    Numbers that are equal do not differ, infinite ones too, nor do two that are both not a number.

    >>> largest_difference(torch.tensor([1.0, math.inf]), torch.tensor([1.5, math.inf]))
    0.5
    """
    if a.numel() == 0:
        return 0.0
    precision = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(precision), b.to(precision)
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float((a - b).abs().masked_fill(same, 0.0).max())
    return largest if math.isfinite(largest) else None


def flat(section: Mapping[str, object], *, prefix: str = "") -> dict[str, object]:
    """A mapping of mappings under dotted keys.

    >>> flat({"depth": 2, "head": {"bias": 0.0}})
    {'depth': 2, 'head.bias': 0.0}
    """
    values: dict[str, object] = {}
    for key, value in section.items():
        values |= flat(value, prefix=f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def differing(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, Pair]:
    """The keys whose values are not the same, in the order of the first mapping.

    >>> differing({"depth": 2, "heads": 3}, {"depth": 4, "heads": 3})
    {'depth': Pair(a=2, b=4)}
    """
    keys = [*a, *(key for key in b if key not in a)]
    return {key: Pair(a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}
