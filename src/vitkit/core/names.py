"""List of names that prints as a table."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

Records = Sequence[Mapping[str, object]]


class NameList(list[str]):
    """Names with a table of what they stand for: `print` shows the table, and so does a notebook.

    >>> names = NameList([("B/16", "86.6 M")], heads=("model", "parameters"))
    >>> names
    ['B/16']
    >>> print(names)
    model  parameters
    B/16   86.6 M

    Args:
        rows: Cells of each name; the first cell is the name itself.
        heads: Titles of the columns.
        make_records: Returns what the command prints with `--json`.
    """

    def __init__(
        self, rows: Sequence[Sequence[str]], *, heads: Sequence[str], make_records: Callable[[], Records] = tuple
    ) -> None:
        super().__init__(row[0] for row in rows)
        self.heads, self.rows, self.make_records = tuple(heads), tuple(map(tuple, rows)), make_records

    def __str__(self) -> str:
        table = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(cell)}</th>" for cell in self.heads)
        body = (
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><tr>{head}</tr>{''.join(body)}</table>"
