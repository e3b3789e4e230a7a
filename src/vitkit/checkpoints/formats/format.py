"""The names and shapes in a file go in, the format that it is written in comes out; one row for each format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitkit.checkpoints.mapping import Rule, Shapes
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class About:
    """What a file says of itself beside its tensors.

    `container` is the key under which a pickled file holds its tensors ("model", "state_dict" …), None where they are
    at its top. `config` is the `config.json` beside it.
    """

    kind: Literal["npz", "safetensors", "torch"]
    container: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write models down.

    `describe` tells the model in a file from names and shapes, with this origin's GELU, eps, positions and tokens.
    `rules` are the table for a model; with the shapes of a file in that file's dialect, else in the one we write.
    `refuses` says in a few words why the format cannot hold a model, or None. `ignored` are patterns of names that
    belong to something else: decoders, mask tokens. `origin` names the preprocessing. `input_size` is what the origin's
    own code feeds models whose positions are for more, where it resamples these to whatever comes.
    """

    name: str
    title: str
    origin: str
    writes: Literal["npz", "safetensors", "torch"]
    recognises: Callable[[Shapes, About], bool]
    describe: Callable[[Shapes, About], ModelConfig]
    rules: Callable[[ModelConfig, Shapes | None], Sequence[Rule]]
    refuses: Callable[[ModelConfig], str | None]
    ignored: tuple[str, ...] = ()
    input_size: int | None = None
