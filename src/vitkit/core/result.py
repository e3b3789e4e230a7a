"""Base class of the results of public functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING

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
        """Return the result as JSON values."""
        raise NotImplementedError

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


def draw(plot: str, result: object) -> "matplotlib.figure.Figure":
    """Draw a result with a function of `vitkit.report.plots`.

    It is imported by name, because results are made in layers below the reports.
    """
    figure: matplotlib.figure.Figure = getattr(import_module("vitkit.report.plots"), plot)(result)
    return figure


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else safe_text(str(value))
