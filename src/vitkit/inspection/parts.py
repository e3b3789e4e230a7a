"""Names of parts and a subject go in, the parts of a report come out, also those that this model has not."""

from collections.abc import Callable

from vitkit.core.errors import ConfigError, did_you_mean
from vitkit.inspection import parts_attention, parts_learnt
from vitkit.inspection.applies import DoesNotApplyError
from vitkit.inspection.part import Part
from vitkit.inspection.subject import Subject

PARTS: dict[str, tuple[str, Callable[[Subject], Part]]] = {
    "rollout": ("Attention rollout", parts_attention.rolled_out),
    "heads": ("Heads one by one", parts_attention.heads_one_by_one),
    "trust": ("How far to trust the maps", parts_attention.trust),
    "lens": ("What each layer would answer", parts_learnt.layer_by_layer),
    "colours": ("Features as colours", parts_learnt.colours),
    "nearest": ("Patches that mean the same", parts_learnt.nearest),
    "hidden": ("Hidden patches", parts_learnt.hidden),
    "distance": ("Attention distance", parts_attention.distance),
    "filters": ("Filters", parts_learnt.filters),
    "positions": ("Position embeddings", parts_learnt.positions),
    "similarity": ("Similarity of layers", parts_learnt.likeness_of_layers),
    "norms": ("Length of tokens", parts_learnt.norms),
}
"""By name, in the order of the report: the title, and what makes the part."""


def chosen_parts(only: str | None) -> list[str]:
    """The names in a list such as `rollout,distance`; all where there is none.

    >>> chosen_parts("distance, rollout")
    ['rollout', 'distance']
    """
    if only is None:
        return list(PARTS)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in PARTS:
            hint = did_you_mean(name, PARTS) or f"parts are {', '.join(PARTS)}"
            raise ConfigError(f"no part called {name!r}", hint=hint)
    if not wanted:
        raise ConfigError("no part chosen", expected=", ".join(PARTS))
    return [name for name in PARTS if name in wanted]


def make_part(name: str, subject: Subject) -> Part:
    """A part by its name; where it does not apply to this kind of model, it says so."""
    title, make = PARTS[name]
    try:
        return make(subject)
    except DoesNotApplyError as error:
        return Part(name=name, title=title, missing=str(error))
