"""Base class of the results of public functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.core.formatting import safe_text

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Result:
    """A result that prints as one line and shows as a table in notebooks.

    `to_dict()` is what the command prints with `--json`. `warnings` are what needs the user's attention.
    """

    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON values: by default all fields but the warnings."""
        return fields_to_json(self)

    def highlights(self) -> dict[str, object]:
        """Return the few values that represent the result in one line."""
        return {key: value for key, value in self.to_dict().items() if isinstance(value, str | int | float)}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={_format(value)}" for name, value in self.highlights().items())
        return f"{type(self).__name__}({values})"

    def _repr_html_(self) -> str:
        return render_table(type(self).__name__, self.highlights(), warnings=self.warnings)


def render_table(title: str, values: Mapping[str, object], *, warnings: Sequence[str] = ()) -> str:
    """Return names and values as an HTML table for notebooks."""
    cell = "<tr><th style='text-align:left'>{}</th><td style='text-align:left'>{}</td></tr>"
    rows = [*values.items(), *(("warning", warning) for warning in warnings)]
    table = "".join(cell.format(escape(name), escape(_format(value))) for name, value in rows)
    return f"<table><caption style='text-align:left'>{escape(title)}</caption>{table}</table>"


def select(value: object, *names: str) -> dict[str, object]:
    """Return attributes by name as JSON values.

    >>> select(Path("images/cat.jpg"), "name", "parent", "parts")
    {'name': 'cat.jpg', 'parent': 'images', 'parts': ['images', 'cat.jpg']}
    """
    return {name: to_json(getattr(value, name)) for name in names}


def fields_to_json(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass, but for `warnings`, as JSON values."""
    return select(value, *(field.name for field in fields(value) if field.name != "warnings"))


def to_json(value: object) -> object:
    """Return a value as JSON: dataclasses and named tuples as objects, other tuples as lists, paths as text.

    A number that is not finite is None. What has `to_dict` decides for itself.
    """
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    match value:
        case _ if hasattr(value, "to_dict"):
            return value.to_dict()
        case Path():
            return str(value)
        case Mapping():
            return {key: to_json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [to_json(inner) for inner in value]
        case float():
            return value if math.isfinite(value) else None
    return fields_to_json(value) if is_dataclass(value) else value


def draw(plot: str, result: object) -> "matplotlib.figure.Figure":
    """Draw a result with a function of `vitkit.report.plots`.

    It is imported by name, because results are made in layers below the reports.
    """
    return getattr(import_module("vitkit.report.plots"), plot)(result)


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else safe_text(str(value))
