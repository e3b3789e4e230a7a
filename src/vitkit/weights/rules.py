"""Invertible rules that map the tensors of a weight file to vitkit's.

A format's table is a list of rules, written out for one model. Reading applies it forwards and writing backwards, so
that each direction undoes the other exactly.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from vitkit.core.errors import WeightsError
from vitkit.core.formatting import shorten_list
from vitkit.core.shapes import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Names and shapes of the tensors in a file."""
Tensors = list[Tensor]


@dataclass(frozen=True)
class Conversion:
    """Conversion of some tensors of a file to vitkit's, and its inverse.

    `is_lossy` means that reading may combine or leave out values, so that writing does not restore them.
    """

    read: Callable[[Tensors], Tensors]
    write: Callable[[Tensors], Tensors]
    is_lossy: bool = False


@dataclass(frozen=True)
class Rule:
    """Correspondence of vitkit's tensors `ours` to the file's tensors `theirs`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion


IDENTITY = Conversion(lambda theirs: theirs, lambda ours: ours)


def rearrange_axes(theirs: str, ours: str, **sizes: int) -> Conversion:
    """Return a conversion with the same axes in another order, in einops notation."""
    return Conversion(
        lambda tensors: [rearrange(tensor, f"{theirs} -> {ours}", **sizes) for tensor in tensors],
        lambda tensors: [rearrange(tensor, f"{ours} -> {theirs}", **sizes) for tensor in tensors],
    )


def concatenate(part: Conversion, count: int) -> Conversion:
    """Return a conversion of `count` tensors of the file, concatenated along the first axis, to one of vitkit's."""
    return Conversion(
        lambda theirs: [torch.cat(part.read(theirs))], lambda ours: part.write(list(ours[0].chunk(count)))
    )


def stack_layers(layers: Sequence[Rule]) -> Rule:
    """Combine the rules of one tensor in all layers: the file's tensors have a leading axis for the layers."""
    first = layers[0]

    def read(theirs: Tensors) -> Tensors:
        return [ours for parts in zip(*theirs, strict=True) for ours in first.conversion.read(list(parts))]

    def write(ours: Tensors) -> Tensors:
        parts = [first.conversion.write([tensor]) for tensor in ours]
        return [torch.stack(layer) for layer in zip(*parts, strict=True)]

    return Rule(tuple(name for rule in layers for name in rule.ours), first.theirs, Conversion(read, write))


def sum_register_positions(prefix_rows: int, registers: int) -> Conversion:
    """Return the conversion of registers that have rows in the position table.

    Both are added, so vitkit stores the sum; written positions are zero.
    """

    def read(theirs: Tensors) -> Tensors:
        tokens, table = theirs
        before, own, patches = table.split([prefix_rows, registers, table.shape[1] - prefix_rows - registers], dim=1)
        return [tokens + own, torch.cat([before, patches], dim=1)]

    def write(ours: Tensors) -> Tensors:
        tokens, table = ours
        before, patches = table.split([prefix_rows, table.shape[1] - prefix_rows], dim=1)
        return [tokens, torch.cat([before, torch.zeros_like(tokens), patches], dim=1)]

    return Conversion(read, write, is_lossy=True)


def rename(ours: str, theirs: str) -> Rule:
    """Return the rule of one tensor with two names."""
    return Rule((ours,), (theirs,), IDENTITY)


def layer_rules(ours: str, *theirs: str, bias: bool = True) -> list[Rule]:
    """Return the rules of weight and bias of a layer that is one of the file's, or several joined along the outputs."""
    conversion = IDENTITY if len(theirs) == 1 else concatenate(IDENTITY, len(theirs))
    parts = ("weight", "bias") if bias else ("weight",)
    return [Rule((f"{ours}.{part}",), tuple(f"{name}.{part}" for name in theirs), conversion) for part in parts]


def apply_rules(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield vitkit's names and tensors. Only one rule's tensors are held in memory at a time."""
    for rule in rules:
        parts = rule.conversion.read([tensors[name] for name in rule.theirs])
        yield from ((name, tensor.contiguous()) for name, tensor in zip(rule.ours, parts, strict=True))


def invert_rules(rules: Sequence[Rule], state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the file's names and tensors."""
    for rule in rules:
        parts = rule.conversion.write([state[name] for name in rule.ours])
        yield from ((name, tensor.contiguous()) for name, tensor in zip(rule.theirs, parts, strict=True))


def find_lost(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of a file's tensors whose values are combined or left out when they are read."""
    lost = []
    for rule in rules:
        if rule.conversion.is_lossy:
            theirs = [tensors[name] for name in rule.theirs]
            restored = rule.conversion.write(rule.conversion.read(theirs))
            pairs = zip(rule.theirs, theirs, restored, strict=True)
            lost += [name for name, before, after in pairs if not torch.equal(before, after.to(before.dtype))]
    return tuple(lost)


@dataclass(frozen=True)
class KeyMatch:
    """Names that a model's rules do not find in a file, and names in the file that no rule uses.

    `ignored` are those of the latter that are not part of the model, such as decoders.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise an error if a name is missing or extra."""
        for names, message in ((self.missing, "the file has no"), (self.extra, "the model has no")):
            if names:
                raise WeightsError(
                    f"{message} {shorten_list(names, limit=1)}", hint="it is of another model, or incomplete"
                )


def match_keys(rules: Sequence[Rule], names: Collection[str], *, ignored: Sequence[str] = ()) -> KeyMatch:
    """Compare rules with the names in a file; `ignored` are patterns of names that are not part of the model."""
    expected = {name for rule in rules for name in rule.theirs}
    unused = sorted(set(names) - expected)
    extra = [name for name in unused if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    rest = tuple(name for name in unused if name not in extra)
    return KeyMatch(tuple(sorted(expected - set(names))), tuple(extra), rest)
