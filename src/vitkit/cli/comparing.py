"""In what two models differ goes in, words for a reader and JSON for scripts come out."""

import math
from typing import TYPE_CHECKING, Any

from vitkit.cli.describing import SHOWN, some

if TYPE_CHECKING:
    from vitkit.checkpoints.compare import Comparison, Pair

Rows = list[tuple[str, str]]


def comparison_as_json(found: "Comparison") -> dict[str, Any]:
    """The differences under the names that scripts rely on."""
    return {
        "max_difference": found.max_difference,
        "same": found.is_same,
        "same_weights": found.same_weights,
        "tensors": [
            {
                "name": each.name,
                "max_difference": each.max_difference,
                "shape": list(each.shape),
                "other_shape": list(each.other_shape),
            }
            for each in found.tensors
        ],
        "reshaped": [each.name for each in found.tensors if each.shape != each.other_shape],
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "config": {key: pair._asdict() for key, pair in found.config.items()},
        "preprocessing": {key: pair._asdict() for key, pair in found.preprocessing.items()},
        "labels_differ": found.labels_differ,
    }


def comparison_in_words(found: "Comparison", *, titles: tuple[str, str]) -> dict[str, Rows]:
    """The differences for a reader, the largest first."""
    differing = sorted(
        (each for each in found.tensors if not each.is_same),
        key=lambda each: math.inf if each.max_difference is None else each.max_difference,
        reverse=True,
    )
    equal = len(found.tensors) - len(differing)
    reshaped = any(each.shape != each.other_shape for each in found.tensors)
    largest = "not a finite number" if found.max_difference is None else f"{found.max_difference:g}"
    largest += " where shapes agree" if reshaped else ""
    summary = [
        ("formats", " and ".join(titles)),
        ("tensors", f"{len(found.tensors):,} in both, {equal:,} of them the same number for number"),
        ("largest difference", largest if found.tensors else "nothing to compare"),
        ("configuration", "differs" if found.config else "the same"),
        ("preprocessing", "differs" if found.preprocessing else "the same"),
        ("labels", "differ" if found.labels_differ else "the same"),
    ]
    rows: Rows = []
    for each in differing[:SHOWN]:
        if each.shape != each.other_shape:
            rows.append((each.name, f"{' × '.join(map(str, each.shape))} ≠ {' × '.join(map(str, each.other_shape))}"))
        else:
            rows.append((each.name, "not finite" if each.max_difference is None else f"{each.max_difference:g}"))
    if len(differing) > SHOWN:
        rows.append(("…", f"and {len(differing) - SHOWN:,} more, all of them with --json"))
    return {
        "Comparison": summary,
        "Tensors that differ": rows,
        f"Only in the first: {len(found.only_a):,}": [("–", name) for name in some(found.only_a)],
        f"Only in the second: {len(found.only_b):,}": [("+", name) for name in some(found.only_b)],
        "Configuration": [(key, f"{shown(a)} → {shown(b)}") for key, (a, b) in found.config.items()],
        "Preprocessing": [(key, f"{shown(a)} → {shown(b)}") for key, (a, b) in found.preprocessing.items()],
    }


def pair_in_words(key: str, pair: "Pair") -> str:
    """A setting that changes."""
    return f"{key} {shown(pair.a)} → {shown(pair.b)}"


def shown(value: object) -> str:
    """A value as settings write it.

    >>> shown(None), shown(1e-6), shown([224, 320])
    ('none', '1e-06', '224x320')
    """
    if isinstance(value, list | tuple):
        return ("x" if all(isinstance(part, int) for part in value) else " ").join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
