"""Registry of position embeddings. It imports no torch: implementations are imported when a model is built."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Injection = Literal["stem", "every_layer", "shared"]
PositionRole = Literal["table", "bias", "rotation"]


@dataclass(frozen=True, kw_only=True)
class PositionKind:
    """Registry entry of a kind of position embedding.

    Args:
        role: `table` is added to the tokens, `bias` is added to the attention logits, `rotation` is applied to queries
            and keys; None means no positions.
        factory: `package.module:function`, imported when a model is built. It is called with the `ViTConfig` (and,
            for a rotation, the device) and returns a parameter or module.
        injections: Where the positions may enter, the default first.
        fixed_values: `package.module:function` from a `ViTConfig` to the values of a table that is not learned.
        width_multiple: Number that must divide the model's width.
        head_width_multiple: Number that must divide the width of a head.
    """

    role: PositionRole | None
    factory: str | None = None
    injections: tuple[Injection, ...]
    fixed_values: str | None = None
    width_multiple: int = 1
    head_width_multiple: int = 1

    def import_function(self, field: Literal["factory", "fixed_values"]) -> Callable[..., Any]:
        """Import the function that a field names."""
        module, _, name = getattr(self, field).partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


_MODULE = "vitkit.model.positions"
POSITION_KINDS: dict[str, PositionKind] = {
    "none": PositionKind(role=None, injections=("stem",)),
    "learned_1d": PositionKind(
        role="table", factory=f"{_MODULE}:learned_1d", injections=("stem", "every_layer", "shared")
    ),
    "learned_2d": PositionKind(
        role="table",
        factory=f"{_MODULE}:learned_2d",
        injections=("stem", "every_layer", "shared"),
        width_multiple=2,
    ),
    "sincos_2d": PositionKind(
        role="table",
        factory=f"{_MODULE}:fixed_table",
        fixed_values=f"{_MODULE}:sincos_values",
        injections=("stem", "shared"),
        width_multiple=4,
    ),
    "relative": PositionKind(role="bias", factory=f"{_MODULE}:relative_1d", injections=("every_layer", "shared")),
    "rotary": PositionKind(
        role="rotation", factory=f"{_MODULE}:axial_rotary", injections=("shared",), head_width_multiple=4
    ),
}
"""All kinds of position embedding. To add one, write its factory and one entry here."""
