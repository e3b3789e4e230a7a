"""Tensors under foreign names go in, the same numbers under ours come out; and back, by the same table.

A format's table is a list of rules, written out for one model. Reading takes it forwards, writing backwards, so that
what one way does the other undoes, to the bit.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of a file, known by their names and shapes alone."""
Tensors = list[Tensor]


@dataclass(frozen=True)
class Layout:
    """How the numbers of some foreign tensors lie in some of ours, and back."""

    read: Callable[[Tensors], Tensors]
    write: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Rule:
    """These tensors of ours are those of theirs, in another layout."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout


SAME = Layout(lambda theirs: theirs, lambda ours: ours)


def rearranged(theirs: str, ours: str, **sizes: int) -> Layout:
    """The same axes in another order, as einops spells them.

    >>> dense = rearranged("inputs outputs", "outputs inputs")
    >>> dense.read([torch.zeros(2, 3)])[0].shape, dense.write(dense.read([torch.zeros(2, 3)]))[0].shape
    (torch.Size([3, 2]), torch.Size([2, 3]))
    """
    return Layout(
        lambda tensors: [rearrange(tensor, f"{theirs} -> {ours}", **sizes) for tensor in tensors],
        lambda tensors: [rearrange(tensor, f"{ours} -> {theirs}", **sizes) for tensor in tensors],
    )


def joined(part: Layout, count: int) -> Layout:
    """Several foreign tensors are one of ours, one after the other along its first axis.

    >>> qkv = joined(SAME, 3)
    >>> qkv.read([torch.zeros(2), torch.ones(2), torch.ones(2)])[0].tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    """
    return Layout(
        lambda theirs: [torch.cat(part.read(theirs))],
        lambda ours: part.write(list(ours[0].chunk(count))),
    )


def stacked(layers: Sequence[Rule]) -> Rule:
    """The rules of one tensor in all layers, as one: the foreign tensors have an axis for the layers in front."""
    first = layers[0]

    def read(theirs: Tensors) -> Tensors:
        return [ours for parts in zip(*theirs, strict=True) for ours in first.layout.read(list(parts))]

    def write(ours: Tensors) -> Tensors:
        written = [first.layout.write([tensor]) for tensor in ours]
        return [torch.stack(parts) for parts in zip(*written, strict=True)]

    return Rule(tuple(name for rule in layers for name in rule.ours), first.theirs, Layout(read, write))


def same(ours: str, theirs: str) -> Rule:
    """One tensor under two names."""
    return Rule((ours,), (theirs,), SAME)


def read(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors, rule by rule, so that no more than one rule's tensors are held beside the result."""
    for rule in rules:
        parts = rule.layout.read([tensors[name] for name in rule.theirs])
        yield from ((name, tensor.contiguous()) for name, tensor in zip(rule.ours, parts, strict=True))


def write(rules: Sequence[Rule], state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Foreign names and tensors, rule by rule."""
    for rule in rules:
        parts = rule.layout.write([state[name] for name in rule.ours])
        yield from ((name, tensor.contiguous()) for name, tensor in zip(rule.theirs, parts, strict=True))


@dataclass(frozen=True)
class Fit:
    """What the rules of a model look for in a file and do not find, and what they find no use for."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]

    def check(self) -> None:
        """Refuse a file that is not just this model."""
        for names, words in ((self.missing, "the file has no"), (self.extra, "the model has no place for")):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise WeightsError(f"{words} {names[0]}{more}", hint="it is of another model, or incomplete")


def fit(rules: Sequence[Rule], names: Collection[str], *, ignored: Sequence[str] = ()) -> Fit:
    """Compare rules with the names in a file; `ignored` are patterns of names that are no part of the model.

    >>> fit([same("norm.weight", "norm/scale")], ["norm/scale", "mask_token", "odd"], ignored=["mask_token"])
    Fit(missing=(), extra=('odd',))
    """
    wanted = {name for rule in rules for name in rule.theirs}
    unknown = sorted(set(names) - wanted)
    extra = [name for name in unknown if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    return Fit(tuple(sorted(wanted - set(names))), tuple(extra))
