"""Answers go in, a file of them comes out: JSON lines, CSV or parquet, whole or not at all; what was cut off goes on.

While it is written, `NAME.partial` holds a line of JSON for each answer that is done, after a line that says what was
asked. When all are there, the file is made of it; `NAME.json` beside it says what it holds and which images are bad.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from vitkit.core.errors import ConfigError, DataError, did_you_mean
from vitkit.core.files import write_text, written_aside
from vitkit.data.sources.parquet import arrow
from vitkit.predict.stream import Answer

Form = Literal["csv", "jsonl", "parquet"]
FORMS: tuple[Form, ...] = ("csv", "jsonl", "parquet")
ROWS = 10_000
"""Rows of a parquet file that are held at once."""


def form_of(path: Path) -> Form:
    """The form of a file by the end of its name.

    >>> form_of(Path("answers.csv"))
    'csv'
    """
    for form in FORMS:
        if path.suffix.lower() == f".{form}":
            return form
    hint = did_you_mean(path.suffix, [f".{form}" for form in FORMS]) or "use one of these endings"
    raise ConfigError(f"{path}: the ending says no form", expected=".csv, .jsonl or .parquet", got=path.name, hint=hint)


class AnswerFile:
    """A file of answers that is being written, or is done."""

    def __init__(self, path: Path, asked: Mapping[str, object]) -> None:
        self.path, self.asked, self.form = path, dict(asked), form_of(path)
        if self.form == "parquet":
            arrow("pyarrow")  # who lacks it learns so before hours of work, not after
        self.partial, self.about = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.json")

    def is_done(self) -> bool:
        """Whether the same was asked before and answered; a file that answers something else is an error."""
        if not self.path.exists():
            return False
        try:
            said = json.loads(self.about.read_bytes())
        except (OSError, ValueError):
            said = {}
        if isinstance(said, dict) and said.get("asked") == self.asked:
            return True
        raise DataError(
            f"{self.path} is there already, and answers another question",
            hint="name another --out, or remove it and the .json beside it",
        )

    def done(self) -> int:
        """How many answers of an interrupted run are there; a line that was cut off is taken back."""
        try:
            with self.partial.open("rb+") as file:
                if not _is_same(file.readline(), self.asked):
                    return self._begin()
                count, end = 0, file.tell()
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    count, end = count + 1, end + len(line)
                file.truncate(end)
                return count
        except FileNotFoundError:
            return self._begin()

    def _begin(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_bytes(_line(self.asked))
        return 0

    def add(self, batches: Iterable[list[Answer]]) -> Iterator[list[Answer]]:
        """Write the answers of each batch, and hand it on once they are on the disk."""
        with self.partial.open("ab") as file:
            for batch in batches:
                file.write(b"".join(_line(answer.to_json()) for answer in batch))
                file.flush()
                os.fsync(file.fileno())
                yield batch

    def finish(self, *, model: str, engine: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Make the file of all answers, then what says that it is whole; what it says, with words on the engine."""
        writers = {"csv": self._write_csv, "jsonl": self._write_lines, "parquet": self._write_parquet}
        with written_aside(self.path) as aside:
            writers[self.form](aside)
        bad = [{"file": row["file"], "reason": row["error"]} for row in self._rows() if "error" in row]
        images = sum(1 for _ in self._rows())
        about = {"model": model, "images": images, "bad": bad, "asked": self.asked, **(engine or {})}
        write_text(self.about, json.dumps(about, indent=2) + "\n")
        self.partial.unlink()
        return about

    def _rows(self) -> Iterator[dict[str, Any]]:
        with self.partial.open("rb") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def _write_lines(self, path: Path) -> None:
        with path.open("wb") as file:
            for row in self._rows():
                file.write(_line(row))

    def _write_csv(self, path: Path) -> None:
        """A row an image: labels and probabilities side by side, then the features, then what went wrong."""
        most = max((len(row.get("predictions", ())) for row in self._rows()), default=0)
        width = max((len(row.get("features", ())) for row in self._rows()), default=0)
        head = ["file", *(f"{what}_{rank}" for rank in range(1, most + 1) for what in ("label", "probability"))]
        head += [f"feature_{number}" for number in range(width)]
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*head, "error"])
            for row in self._rows():
                said = [value for each in row.get("predictions", ()) for value in (each["label"], each["probability"])]
                said += [""] * (2 * most - len(said))
                features = [*row.get("features", ())] or [""] * width
                writer.writerow([row["file"], *said, *features, row.get("error", "")])

    def _write_parquet(self, path: Path) -> None:
        pyarrow, parquet = arrow("pyarrow"), arrow("pyarrow.parquet")
        schema = pyarrow.schema(
            [
                ("file", pyarrow.string()),
                ("labels", pyarrow.list_(pyarrow.string())),
                ("probabilities", pyarrow.list_(pyarrow.float32())),
                ("features", pyarrow.list_(pyarrow.float32())),
                ("error", pyarrow.string()),
            ]
        )
        with parquet.ParquetWriter(path, schema) as writer:
            for rows in _several(map(_columns, self._rows())):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    said = row.get("predictions", ())
    return {
        "file": row["file"].encode("utf-8", "backslashreplace").decode(),
        "labels": [each["label"] for each in said],
        "probabilities": [each["probability"] for each in said],
        "features": row.get("features", []),
        "error": row.get("error"),
    }


def _several(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == ROWS:
            yield held
            held = []
    yield held


def _line(value: Mapping[str, object]) -> bytes:
    """A line of JSON; as plain text, unless a file's name is no text at all."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


def _is_same(line: bytes, asked: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads(line) == dict(asked))
    except ValueError:
        return False
