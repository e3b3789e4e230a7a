"""Weights of one model and the configuration of another go in, weights that fit the other come out, with what changed.

Fine-tuning removes the whole pre-trained head, attaches a zero-initialised one, and interpolates position embeddings
to the new grid by their place in the original image (section 3.2).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vitkit.core.errors import WeightsError
from vitkit.core.shapes import Tensor
from vitkit.model.config import ViTConfig
from vitkit.model.resample import Origin, resample_grid, resample_positions
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig

HEAD = ("head.", "pre_logits.")


@dataclass(frozen=True)
class Adapted:
    """Weights that fit, and in words what was done to them."""

    state: dict[str, Tensor]
    changes: tuple[str, ...]


def adapt(
    state: Mapping[str, Tensor],
    *,
    old: ModelConfig,
    new: ModelConfig,
    new_head: bool = False,
    origin: Origin | None = None,
    generator: torch.Generator | None = None,
) -> Adapted:
    """Weights for the model `new`, made of those of the model `old`; what cannot be made to fit is an error.

    `origin` names the kernel that resamples positions; None is the one that the old model names.

    >>> from vitkit.zoo.lookup import configure
    >>> old, new = (configure("Ti/16", image_size=side, classes=side) for side in (32, 48))
    >>> adapt(create(old).state_dict(), old=old, new=new).changes
    ('position embeddings: grid 2×2 → 3×3', 'head: new, for 48 classes instead of 32')
    """
    fresh = create(new, generator=generator).state_dict()
    head_is_new = new_head or _head_shapes(state) != _head_shapes(fresh)
    adapted: dict[str, Tensor] = {}
    changes: list[str] = []
    for name, wanted in fresh.items():
        if name.startswith(HEAD) and head_is_new:
            adapted[name] = wanted
        elif name not in state:
            raise WeightsError(f"the weights have no {name}", hint=_family(old, new))
        elif "pos_embed" in name and isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and old.grid != new.grid:
            adapted[name] = _moved(name, state[name], wanted, old=old, new=new, origin=origin)
        elif state[name].shape != wanted.shape:
            raise WeightsError(
                f"{name} does not fit the model",
                expected=" × ".join(map(str, wanted.shape)),
                got=" × ".join(map(str, state[name].shape)),
                hint=_family(old, new),
            )
        else:
            adapted[name] = state[name].clone()
    extra = [name for name in state if name not in fresh and not (head_is_new and name.startswith(HEAD))]
    if extra:
        raise WeightsError(f"the model has no place for {extra[0]} and {len(extra) - 1} more", hint=_family(old, new))
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig) and old.grid != new.grid:
        changes.append("position embeddings: grid {}×{} → {}×{}".format(*old.grid, *new.grid))
    if head_is_new:
        changes.append(f"head: new, for {new.classes} classes instead of {old.classes}")
    return Adapted(adapted, tuple(changes))


def _moved(
    name: str, table: Tensor, wanted: Tensor, *, old: ViTConfig, new: ViTConfig, origin: Origin | None
) -> Tensor:
    """One position table on the new grid."""
    origin = origin or old.positions.origin
    if old.positions.kind == "sincos_2d":
        return wanted  # a formula, evaluated on the new grid
    if axis := re.search(r"\.(x|y)$", name):
        side = 1 if axis[1] == "x" else 0
        return resample_grid(table, old=(1, old.grid[side]), new=(1, new.grid[side]), origin=origin)
    if name.endswith(".prefix"):
        return table.clone()
    return resample_positions(table, prefix=old.placed_prefix, old=old.grid, new=new.grid, origin=origin)


def _head_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items() if name.startswith(HEAD)}


def _family(old: ModelConfig, new: ModelConfig) -> str:
    """A hint: in what the two models differ."""
    differing = [
        f"{field} {getattr(old, field)} against {getattr(new, field, 'none')}"
        for field in vars(old)
        if field not in ("classes", "image_size") and getattr(old, field) != getattr(new, field, None)
    ]
    return f"the weights are of another model: {', '.join(differing)[:200]}" if differing else "the file is incomplete"
