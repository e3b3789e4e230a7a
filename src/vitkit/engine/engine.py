"""What every engine is: normalised images go in, features and logits come out, in one of three precisions.

`vitkit.engine.choose` finds the fastest one for a model and a machine.
"""

from typing import Literal, Protocol, runtime_checkable

import torch

from vitkit.core.errors import ConfigError, did_you_mean
from vitkit.core.shapes import Float, Tensor

Precision = Literal["fp32", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
CPU = torch.device("cpu")


@runtime_checkable
class Engine(Protocol):
    """A model made ready to answer. Images are pixels as `Preprocessing.normalise` gives them, in float32."""

    @property
    def name(self) -> str:
        """What runs, in words for people."""

    @property
    def precision(self) -> Precision:
        """The precision of the matrix products; what goes in and comes out is float32 on the CPU, whatever it is."""

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B F"]:
        """What the head reads of each image."""

    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B Y"]]:
        """Features and logits, in one pass; a model without classes gives its features twice."""


@runtime_checkable
class Divisible(Engine, Protocol):
    """An engine whose callers may each have a thread of their own."""

    def on_threads(self, threads: int) -> Engine:
        """The same engine on so many threads; on one, the caller's, callers at the same time are in nobody's way."""


def check_precision(name: str) -> Precision:
    """The precision of that name.

    >>> check_precision("bf16")
    'bf16'
    """
    for precision in PRECISIONS:
        if precision == name:
            return precision
    hint = did_you_mean(name, PRECISIONS) or "vitkit bench says which is fastest here"
    raise ConfigError("no such precision", expected="fp32, bf16 or int8", got=name, hint=hint)
