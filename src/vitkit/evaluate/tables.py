"""Rows go in, a CSV file comes out."""

import csv
import io
from collections.abc import Mapping, Sequence


def as_csv(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> bytes:
    r"""A table with a head; nothing where there is nothing, and file names in the bytes that they have on disk.

    >>> as_csv([{"file": "a,b.jpg", "score": None}], ["file", "score"])
    b'file,score\r\n"a,b.jpg",\r\n'
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")
